// Any processor: GCC's and clang's vectors of 16 bytes, which every one of them has or is spared.

#include "includes.hpp"

namespace tailrace {
namespace {

#include "model.hpp"
#include "panels.hpp"

template <class Number>
struct Short {
    using F = Number;
    typedef Number V __attribute__((vector_size(16)));
    static constexpr int W = 16 / sizeof(Number), R = 4;

    static V zero() { return V{}; }
    static V set1(F x) { return x - V{}; }
    static V load(const F *p) {
        V v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static V load(const bf16 *p) {
        V v;
        for (int i = 0; i < W; i++) v[i] = widen(p[i]);
        return v;
    }
    static void store(F *p, V v) { std::memcpy(p, &v, sizeof v); }
    static void store(bf16 *p, V v) {
        for (int i = 0; i < W; i++) narrow(v[i], p[i]);
    }
    static V add(V a, V b) { return a + b; }
    static V sub(V a, V b) { return a - b; }
    static V mul(V a, V b) { return a * b; }
    static V div(V a, V b) { return a / b; }
    static V fma(V a, V b, V c) { return a * b + c; }
    static V max(V a, V b) { return a > b ? a : b; }
    static F sum(V v) {
        F s = 0;
        for (int i = 0; i < W; i++) s += v[i];
        return s;
    }
    static F top(V v) {
        F most = v[0];
        for (int i = 1; i < W; i++) most = std::max(most, F(v[i]));
        return most;
    }
    static V exp(V v) {
        for (int i = 0; i < W; i++) v[i] = std::exp(v[i]);
        return v;
    }
};

template <class Number, class Stored>
struct Portable : Short<Number>, Plain<Portable<Number, Stored>, Number, Stored> {
    using Codes = std::conditional_t<std::is_same_v<Number, double>, ExactCodes, PlainCodes>;
};

}  // namespace

std::unique_ptr<Decoder> make_portable(const tailrace_shape &shape) {
    switch (shape.dtype) {
        case TAILRACE_FLOAT32: return std::make_unique<Model<Portable<float, float>>>(shape);
        case TAILRACE_BFLOAT16: return std::make_unique<Model<Portable<float, bf16>>>(shape);
        case TAILRACE_FLOAT64: return std::make_unique<Model<Portable<double, double>>>(shape);
    }
    return nullptr;
}

}  // namespace tailrace
