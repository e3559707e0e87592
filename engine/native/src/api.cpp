// The C interface: dispatch by processor, and a border that no exception crosses.

#include <exception>

#include "decoder.hpp"

namespace tailrace {
namespace {

bool runs(int32_t dtype, int32_t variant) {
    switch (variant) {
        case TAILRACE_PORTABLE: return dtype >= TAILRACE_FLOAT32 && dtype <= TAILRACE_FLOAT64;
#if defined(__x86_64__)
        case TAILRACE_AVX2:
            return dtype != TAILRACE_FLOAT64 && __builtin_cpu_supports("avx2") &&
                   __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case TAILRACE_AVX512:
            // The float32 half is compiled for bfloat16's instructions too, without using them.
            return dtype != TAILRACE_FLOAT64 && __builtin_cpu_supports("avx512f") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("f16c") &&
                   (dtype == TAILRACE_FLOAT32 || (__builtin_cpu_supports("avx512bf16") &&
                                                  __builtin_cpu_supports("avx512vnni")));
#endif
        default: return false;
    }
}

// nullptr, or what went wrong.
template <class Call>
const char *guarded(Call &&call) {
    try {
        return call();
    } catch (const std::bad_alloc &) {
        return "out of memory";
    } catch (const std::exception &) {
        return "an unexpected failure";
    }
}

Decoder &decoder_of(void *decoder) { return *static_cast<Decoder *>(decoder); }

}  // namespace
}  // namespace tailrace

using namespace tailrace;

int32_t tailrace_abi(void) { return TAILRACE_ABI; }

uint32_t tailrace_variants(int32_t dtype) {
    uint32_t found = 0;
    for (int32_t variant : {TAILRACE_PORTABLE, TAILRACE_AVX2, TAILRACE_AVX512})
        if (runs(dtype, variant)) found |= 1u << variant;
    return found;
}

void *tailrace_create(const tailrace_shape *shape) {
    if (!runs(shape->dtype, shape->variant)) return nullptr;
    if (shape->kv_codes && shape->head_dim % 4) return nullptr;  // scales would not be aligned
    try {
        switch (shape->variant) {
            case TAILRACE_PORTABLE: return make_portable(*shape).release();
#if defined(__x86_64__)
            case TAILRACE_AVX2: return make_avx2(*shape).release();
            case TAILRACE_AVX512: return make_avx512(*shape).release();
#endif
        }
    } catch (const std::exception &) {
    }
    return nullptr;
}

void tailrace_destroy(void *decoder) { delete static_cast<Decoder *>(decoder); }

const char *tailrace_load(
    void *decoder, int32_t part, int64_t layer, const void *const *tensors) {
    return guarded([&] { return decoder_of(decoder).load(part, layer, tensors); });
}

const char *tailrace_load_codes(
    void *decoder, int32_t part, int64_t layer, const tailrace_codes *tensors) {
    return guarded([&] { return decoder_of(decoder).load_codes(part, layer, tensors); });
}

const char *tailrace_step_run(void *decoder, const tailrace_step *step) {
    return guarded([&] { return decoder_of(decoder).step(*step); });
}

const char *tailrace_products(void *decoder, int64_t tokens, int64_t sampled) {
    return guarded([&] { return decoder_of(decoder).products(tokens, sampled); });
}

const char *tailrace_linear(
    void *decoder, int64_t rows, int64_t out, int64_t in, const void *x, const void *weight,
    const void *bias, void *y) {
    return guarded([&] { return decoder_of(decoder).linear(rows, out, in, x, weight, bias, y); });
}

const char *tailrace_linear_codes(
    void *decoder, int64_t rows, int64_t out, int64_t in, const void *x,
    const tailrace_codes *codes, void *y) {
    return guarded([&] { return decoder_of(decoder).linear_codes(rows, out, in, x, codes, y); });
}

const char *tailrace_gated(
    void *decoder, int64_t rows, int64_t inner, int64_t in, const void *x, const void *gate,
    const void *up, void *y) {
    return guarded([&] { return decoder_of(decoder).gated(rows, inner, in, x, gate, up, y); });
}

const char *tailrace_norm(
    void *decoder, int64_t rows, int64_t size, const void *x, const void *weight, void *y) {
    return guarded([&] { return decoder_of(decoder).norm(rows, size, x, weight, y); });
}

const char *tailrace_attention(
    void *decoder, int64_t layer, const tailrace_step *step, const void *qkv, void *y) {
    return guarded([&] { return decoder_of(decoder).attention(layer, *step, qkv, y); });
}
