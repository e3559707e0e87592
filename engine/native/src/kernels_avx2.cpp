// x86-64 with AVX2 and FMA: products in float32, bfloat16 widened as it is read.

#include "includes.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace tailrace {
namespace {

#include "model.hpp"
#include "panels.hpp"
#include "codes_avx2.hpp"

struct Avx2Floats {
    using F = float;
    using V = __m256;
    static constexpr int W = 8, R = 6;

    static V zero() { return _mm256_setzero_ps(); }
    static V set1(float x) { return _mm256_set1_ps(x); }
    static V load(const float *p) { return _mm256_loadu_ps(p); }
    static V load(const bf16 *p) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static void store(float *p, V v) { _mm256_storeu_ps(p, v); }
    static void store(bf16 *p, V v) {
        float lanes[W];
        _mm256_storeu_ps(lanes, v);
        for (int i = 0; i < W; i++) narrow(lanes[i], p[i]);
    }
    static V add(V a, V b) { return _mm256_add_ps(a, b); }
    static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V div(V a, V b) { return _mm256_div_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static V max(V a, V b) { return _mm256_max_ps(a, b); }
    static float sum(V v) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float top(V v) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    // 2^n * e^r with |r| <= ln(2) / 2; exactly 0 below the least normal number.
    static V exp(V x) {
        const V tiny = _mm256_cmp_ps(x, set1(-87.33654f), _CMP_LT_OQ);
        // The second operand is what comes out of min and max where one is NaN.
        x = _mm256_min_ps(set1(88.37f), _mm256_max_ps(set1(-87.33654f), x));
        const V n = _mm256_round_ps(
            mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        V r = _mm256_fnmadd_ps(n, set1(0.693359375f), x);
        r = _mm256_fnmadd_ps(n, set1(-2.12194440e-4f), r);
        V p = set1(1.9875691500e-4f);
        p = fma(p, r, set1(1.3981999507e-3f));
        p = fma(p, r, set1(8.3334519073e-3f));
        p = fma(p, r, set1(4.1665795894e-2f));
        p = fma(p, r, set1(1.6666665459e-1f));
        p = fma(p, r, set1(5.0000001201e-1f));
        p = fma(p, mul(r, r), add(r, set1(1.0f)));
        const __m256i power = _mm256_slli_epi32(
            _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return _mm256_andnot_ps(tiny, mul(p, _mm256_castsi256_ps(power)));
    }
};

template <class Stored>
struct Avx2 : Avx2Floats, Plain<Avx2<Stored>, float, Stored> {
    using Codes = Avx2Codes;
};

}  // namespace

std::unique_ptr<Decoder> make_avx2(const tailrace_shape &shape) {
    switch (shape.dtype) {
        case TAILRACE_FLOAT32: return std::make_unique<Model<Avx2<float>>>(shape);
        case TAILRACE_BFLOAT16: return std::make_unique<Model<Avx2<bf16>>>(shape);
    }
    return nullptr;
}

}  // namespace tailrace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
