// The plain C interface of the native decoder: pointers and sizes, no C++ and no torch.
//
// A dtype is 0 float32, 1 bfloat16, 2 float64. "Wide" is what sums are kept in: double for float64,
// float otherwise. Matrices are row-major, [out, in]. Strings returned are static; null means
// success. A decoder computes one call at a time.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define TAILRACE_EXPORT extern "C" __declspec(dllexport)
#else
#define TAILRACE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define TAILRACE_ABI 4

enum tailrace_dtype { TAILRACE_FLOAT32, TAILRACE_BFLOAT16, TAILRACE_FLOAT64 };

enum tailrace_variant { TAILRACE_PORTABLE, TAILRACE_AVX2, TAILRACE_AVX512 };

enum tailrace_part {
    TAILRACE_EMBED,      // [vocab, hidden]; borrowed: it must outlive the decoder
    TAILRACE_ATTN_NORM,  // [hidden]
    TAILRACE_QKV,        // three matrices
    TAILRACE_QKV_BIAS,   // three vectors
    TAILRACE_QK_NORM,    // two vectors [head_dim]
    TAILRACE_O,
    TAILRACE_MLP_NORM,
    TAILRACE_GATE_UP,    // two matrices
    TAILRACE_DOWN,
    TAILRACE_NORM,
    TAILRACE_HEAD,
};

struct tailrace_shape {
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, inner;
    int64_t window;  // tokens each token sees, itself included; 0: no limit
    double norm_eps;
    int32_t qkv_bias, qk_norm;
    int32_t gelu_tanh;  // 0: SiLU
    int32_t dtype, variant, threads;
    int32_t kv_codes;  // 1: the pool holds codes with scales; head_dim is a multiple of 4 then
};

// A matrix [out, in] as codes, one a byte, with groups of inputs:
//
//     w = scales[out][in / group] * (code - 8 or 128), or, where there are minimums,
//     w = scales[out][in / group] * code + minimums[out][in / group]
struct tailrace_codes {
    int64_t bits, group;  // 4 or 8; a multiple of 32, the last group may be shorter
    const uint8_t *codes;
    const float *scales, *minimums;  // [out, ceil(in / group)]; minimums may be null
    const int32_t *order;  // [in] or null: input k of the codes is input order[k] of the product
};

// One pass over a flattened batch; the fields mean what `StepContext` says.
struct tailrace_step {
    int64_t tokens, requests, columns, sampled;
    const int64_t *ids, *positions, *slots, *last;
    const int32_t *cu_q, *kv_lens, *block_table;
    const void *cos, *sin;  // wide, [angles, head_dim / 2], by position
    int64_t angles;
    // [num_blocks, layers, 2] of [block_tokens, kv_heads, head_dim], or with `kv_codes` of
    //
    //     int8 codes [block_tokens, kv_heads, head_dim], float scales [kv_heads, block_tokens]
    void *pool;
    int64_t num_blocks, block_tokens;
    void *logits;  // wide, [sampled, vocab]
};

TAILRACE_EXPORT int32_t tailrace_abi(void);

// Bit v is set where this processor has what variant v computes `dtype` with.
TAILRACE_EXPORT uint32_t tailrace_variants(int32_t dtype);

// Null where memory or threads cannot be had, or the variant is not there.
TAILRACE_EXPORT void *tailrace_create(const tailrace_shape *shape);
TAILRACE_EXPORT void tailrace_destroy(void *decoder);

// Copies one part into its packed form. `tensors`: as many pointers as the part has.
TAILRACE_EXPORT const char *tailrace_load(
    void *decoder, int32_t part, int64_t layer, const void *const *tensors);

// The same for a matrix part: as many as it has, alike in everything but codes and scales.
TAILRACE_EXPORT const char *tailrace_load_codes(
    void *decoder, int32_t part, int64_t layer, const struct tailrace_codes *tensors);

TAILRACE_EXPORT const char *tailrace_step_run(void *decoder, const tailrace_step *step);

// All matrix products of a pass over `tokens` rows of which `sampled` are sampled from, on whatever
// the buffers hold, and nothing else: what the rest of a step is measured against.
TAILRACE_EXPORT const char *tailrace_products(void *decoder, int64_t tokens, int64_t sampled);

// The kernels by themselves, so that each can be held against another implementation. x and y are
// wide; weights have the decoder's dtype.
TAILRACE_EXPORT const char *tailrace_linear(
    void *decoder, int64_t rows, int64_t out, int64_t in, const void *x, const void *weight,
    const void *bias, void *y);
TAILRACE_EXPORT const char *tailrace_linear_codes(
    void *decoder, int64_t rows, int64_t out, int64_t in, const void *x,
    const struct tailrace_codes *codes, void *y);
TAILRACE_EXPORT const char *tailrace_gated(
    void *decoder, int64_t rows, int64_t inner, int64_t in, const void *x, const void *gate,
    const void *up, void *y);
TAILRACE_EXPORT const char *tailrace_norm(
    void *decoder, int64_t rows, int64_t size, const void *x, const void *weight, void *y);
// qkv: [tokens, heads + 2 * kv_heads, head_dim], wide. Rotates (and with `qk_norm` normalises with
// the weights of `layer`), stores k and v, attends: y is [tokens, heads, head_dim], wide.
TAILRACE_EXPORT const char *tailrace_attention(
    void *decoder, int64_t layer, const tailrace_step *step, const void *qkv, void *y);
