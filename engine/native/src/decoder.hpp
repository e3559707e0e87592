// What the C interface calls: one class per dtype and variant implements it.
#pragma once

#include <cstdint>
#include <memory>

#include "abi.h"

namespace tailrace {

class Decoder {
public:
    virtual ~Decoder() = default;
    virtual const char *load(int part, int64_t layer, const void *const *tensors) = 0;
    virtual const char *load_codes(
        int part, int64_t layer, const tailrace_codes *tensors) = 0;
    virtual const char *step(const tailrace_step &step) = 0;
    virtual const char *products(int64_t tokens, int64_t sampled) = 0;
    virtual const char *linear(
        int64_t rows, int64_t out, int64_t in, const void *x, const void *weight, const void *bias,
        void *y) = 0;
    virtual const char *linear_codes(
        int64_t rows, int64_t out, int64_t in, const void *x, const tailrace_codes *codes,
        void *y) = 0;
    virtual const char *gated(
        int64_t rows, int64_t inner, int64_t in, const void *x, const void *gate, const void *up,
        void *y) = 0;
    virtual const char *norm(
        int64_t rows, int64_t size, const void *x, const void *weight, void *y) = 0;
    virtual const char *attention(
        int64_t layer, const tailrace_step &step, const void *qkv, void *y) = 0;
};

using Maker = std::unique_ptr<Decoder> (*)(const tailrace_shape &);

std::unique_ptr<Decoder> make_portable(const tailrace_shape &shape);
#if defined(__x86_64__)
std::unique_ptr<Decoder> make_avx2(const tailrace_shape &shape);
std::unique_ptr<Decoder> make_avx512(const tailrace_shape &shape);
#endif

}  // namespace tailrace
