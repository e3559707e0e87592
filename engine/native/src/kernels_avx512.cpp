// x86-64 with AVX-512: float32, and bfloat16 where the processor multiplies it (AVX512_BF16).

#include "includes.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target( \
        "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

namespace tailrace {
namespace {

#include "model.hpp"
#include "panels.hpp"
#include "codes_avx2.hpp"
#include "codes_avx512.hpp"

struct Avx512Floats {
    using F = float;
    using V = __m512;
    static constexpr int W = 16;

    static V zero() { return _mm512_setzero_ps(); }
    static V set1(float x) { return _mm512_set1_ps(x); }
    static V load(const float *p) { return _mm512_loadu_ps(p); }
    static V load(const bf16 *p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static void store(float *p, V v) { _mm512_storeu_ps(p, v); }
    static void store(bf16 *p, V v) {
        const __m256bh bits = _mm512_cvtneps_pbh(v);
        std::memcpy(p, &bits, sizeof bits);
    }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static float sum(V v) { return _mm512_reduce_add_ps(v); }
    static float top(V v) { return _mm512_reduce_max_ps(v); }
    // 2^n * e^r with |r| <= ln(2) / 2; exactly 0 below the least normal number.
    static V exp(V x) {
        const __mmask16 tiny = _mm512_cmp_ps_mask(x, set1(-87.33654f), _CMP_LT_OQ);
        x = _mm512_min_ps(set1(89.0f), x);
        const V n = _mm512_roundscale_ps(
            mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        V r = _mm512_fnmadd_ps(n, set1(0.693359375f), x);
        r = _mm512_fnmadd_ps(n, set1(-2.12194440e-4f), r);
        V p = set1(1.9875691500e-4f);
        p = fma(p, r, set1(1.3981999507e-3f));
        p = fma(p, r, set1(8.3334519073e-3f));
        p = fma(p, r, set1(4.1665795894e-2f));
        p = fma(p, r, set1(1.6666665459e-1f));
        p = fma(p, r, set1(5.0000001201e-1f));
        p = fma(p, mul(r, r), add(r, set1(1.0f)));
        return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, zero());
    }
};

// Products: of codes, on processors with VNNI and without.
template <class Products>
struct Avx512Single : Avx512Floats, Plain<Avx512Single<Products>, float, float> {
    using Codes = Products;
    static constexpr int R = 12;
};

// The products of two neighbouring terms at once, summed in float32.
struct Avx512Pairs : Avx512Floats {
    using KV = bf16;
    using A = bf16;
    using M = uint32_t;
    using T = uint32_t;
    using Codes = Avx512Codes;
    static constexpr int PAIR = 2, R = 12;
    static constexpr bool INTEGERS = true;

    static M term(const bf16 *row, int64_t k, int64_t in) {
        const uint32_t low = row[2 * k].bits;
        const uint32_t high = 2 * k + 1 < in ? row[2 * k + 1].bits : 0;
        return high << 16 | low;
    }

    template <int R>
    static void block(
        const bf16 *a, int64_t lda, const uint32_t *w, int64_t steps, float *c, int64_t ldc,
        bool add, Ahead ahead) {
        __m512 sum[R][2];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) sum[r][h] = add ? load(c + r * ldc + h * W) : zero();
        for (int64_t k = 0; k < steps; k++, w += GROUP) {
            if (k < ahead.steps) {
                __builtin_prefetch(w + ahead.distance, 0, 2);
                __builtin_prefetch(w + ahead.distance + 16, 0, 2);
            }
            const __m512bh w0 = pairs(w), w1 = pairs(w + 16);
            for (int r = 0; r < R; r++) {
                int32_t bits;
                std::memcpy(&bits, a + r * lda + 2 * k, sizeof bits);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(bits);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], w0, x);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], w1, x);
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) store(c + r * ldc + h * W, sum[r][h]);
    }

    static __m512bh pairs(const uint32_t *p) { return (__m512bh)_mm512_loadu_si512(p); }

    // 32 keys, `dim` of each, to [dim / 2][32]: transposes of 16 keys by 16 pairs.
    static void pack_keys(const bf16 *const *rows, int64_t dim, uint32_t *to) {
        const int64_t whole = dim / 32 * 32;
        for (int j = 0; j < GROUP; j += 16)
            for (int64_t d = 0; d < whole; d += 32) {
                __m512i x[16];
                for (int i = 0; i < 16; i++)
                    x[i] = rows[j + i] ? _mm512_loadu_si512(rows[j + i] + d)
                                       : _mm512_setzero_si512();
                transpose(x);
                for (int i = 0; i < 16; i++)
                    _mm512_storeu_si512(to + (d / 2 + i) * GROUP + j, x[i]);
            }
        for (int64_t k = whole / 2; k < (dim + 1) / 2; k++)
            for (int j = 0; j < GROUP; j++)
                to[k * GROUP + j] = rows[j] ? term(rows[j], k, dim) : 0;
    }

    static void transpose(__m512i x[16]) {
        __m512i y[16];
        for (int i = 0; i < 16; i += 2) {
            y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int h = 0; h < 2; h++) {
                x[i + 2 * h] = _mm512_unpacklo_epi64(y[i + h], y[i + 2 + h]);
                x[i + 2 * h + 1] = _mm512_unpackhi_epi64(y[i + h], y[i + 2 + h]);
            }
        // x[4 q + j] now holds, in its lane l, column 4 l + j of rows 4 q .. 4 q + 3.
        for (int j = 0; j < 4; j++) {
            y[j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
            y[4 + j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
            y[8 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
            y[12 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        }
        for (int j = 0; j < 4; j++) {
            x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
            x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
            x[4 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0x88);
            x[12 + j] = _mm512_shuffle_i32x4(y[4 + j], y[12 + j], 0xdd);
        }
    }

    alignas(64) static constexpr uint16_t INTERLEAVED[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

    // `steps` pairs of keys, 32 dimensions from `first` on, to [steps][32].
    static void pack_values(
        const bf16 *const *rows, int64_t steps, int64_t first, int64_t dim, uint32_t *to) {
        const int64_t count = std::min<int64_t>(GROUP, dim - first);
        const __mmask32 valid = count == 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
        const __m512i first_half = _mm512_load_si512(INTERLEAVED);
        const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
        for (int64_t k = 0; k < steps; k++, to += GROUP) {
            const __m512i even = values(rows[2 * k], first, valid);
            const __m512i odd = values(rows[2 * k + 1], first, valid);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first_half, odd));
            _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(even, second_half, odd));
        }
    }

    static __m512i values(const bf16 *row, int64_t first, __mmask32 valid) {
        return row ? _mm512_maskz_loadu_epi16(valid, row + first) : _mm512_setzero_si512();
    }

    // c[r][0..32) = (onto ? c : 0) + scale[r] * (sum over k of the integers a[r][k] * w[k][0..32)).
    template <int R>
    static void integer_block(
        const int16_t *a, int64_t lda, const uint32_t *w, int64_t steps, const float *scale,
        float *c, int64_t ldc, bool onto) {
        __m512i sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
        for (int64_t k = 0; k < steps; k++, w += GROUP) {
            const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 16);
            for (int r = 0; r < R; r++) {
                int32_t two;
                std::memcpy(&two, a + r * lda + 2 * k, sizeof two);
                const __m512i x = _mm512_set1_epi32(two);
                sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], w0, x);
                sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], w1, x);
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) {
                float *to = c + r * ldc + h * 16;
                const V product = mul(_mm512_cvtepi32_ps(sum[r][h]), set1(scale[r]));
                store(to, onto ? Avx512Floats::add(load(to), product) : product);
            }
    }

    // 32 keys of codes, `dim` of each, to [dim / 2][32] pairs of 16 bits: transposes of 16 keys by 16
    // fours of codes, of which the first pair is of dimensions 0 and 2, the second of 1 and 3.
    static void pack_keys(const int8_t *const *rows, int64_t dim, uint32_t *to) {
        for (int j = 0; j < GROUP; j += 16)
            for (int64_t d = 0; d < dim; d += 64) {
                const __mmask64 valid = first_bytes(dim - d);
                __m512i x[16];
                for (int i = 0; i < 16; i++)
                    x[i] = rows[j + i] ? _mm512_maskz_loadu_epi8(valid, rows[j + i] + d)
                                       : _mm512_setzero_si512();
                transpose(x);
                const int64_t fours = std::min<int64_t>((dim - d) / 4, 16);
                uint32_t *at = to + d / 2 * GROUP + j;
                for (int64_t i = 0; i < fours; i++, at += 2 * GROUP) {
                    _mm512_storeu_si512(at, _mm512_srai_epi16(_mm512_slli_epi16(x[i], 8), 8));
                    _mm512_storeu_si512(at + GROUP, _mm512_srai_epi16(x[i], 8));
                }
            }
    }

    // Where dimension k of a query goes that meets such keys.
    static int64_t place_of(int64_t k) {
        constexpr int64_t places[4] = {0, 2, 1, 3};
        return k / 4 * 4 + places[k % 4];
    }

    // `steps` pairs of keys, 32 dimensions from `first` on, to [steps][32] pairs of 16 bits.
    static void pack_values(
        const int8_t *const *rows, int64_t steps, int64_t first, int64_t dim, uint32_t *to) {
        const __mmask32 valid = static_cast<__mmask32>(first_bytes(dim - first));
        const __m512i first_half = _mm512_load_si512(INTERLEAVED);
        const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
        for (int64_t k = 0; k < steps; k++, to += GROUP) {
            const __m512i even = codes(rows[2 * k], first, valid);
            const __m512i odd = codes(rows[2 * k + 1], first, valid);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first_half, odd));
            _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(even, second_half, odd));
        }
    }

    static __m512i codes(const int8_t *row, int64_t first, __mmask32 valid) {
        if (!row) return _mm512_setzero_si512();
        return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(valid, row + first));
    }
    static __mmask64 first_bytes(int64_t count) {
        return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
    }
    // To the nearest integers, the even ones of two.
    static void store_integers(int16_t *p, V v) {
        _mm256_storeu_si256(
            reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
    }
};

}  // namespace

std::unique_ptr<Decoder> make_avx512(const tailrace_shape &shape) {
    switch (shape.dtype) {
        case TAILRACE_FLOAT32:
            if (__builtin_cpu_supports("avx512vnni"))
                return std::make_unique<Model<Avx512Single<Avx512Codes>>>(shape);
            return std::make_unique<Model<Avx512Single<Avx2Codes>>>(shape);
        case TAILRACE_BFLOAT16: return std::make_unique<Model<Avx512Pairs>>(shape);
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
