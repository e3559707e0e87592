// Products of codes with AVX2: integers of 16 bits, two inputs at once. Included as model.hpp is,
// behind codes.hpp.

struct Avx2Codes {
    static constexpr int ROWS = 4;
    static constexpr bool NARROWS = true, WIDENS = true;

    template <int BITS>
    static void place(uint8_t *block, int k, int output, uint8_t code) {
        place_pair<BITS>(block, k, output, code);
    }

    // A pair of inputs of 16 outputs, codes of 16 bits.
    template <int BITS>
    static void sixteen(const uint8_t *at, __m256i &w0, __m256i &w1) {
        if constexpr (BITS == 16) {
            const __m256i *from = reinterpret_cast<const __m256i *>(at);
            w0 = _mm256_loadu_si256(from);
            w1 = _mm256_loadu_si256(from + 1);
        } else {
            const __m128i *from = reinterpret_cast<const __m128i *>(at);
            const __m128i low = _mm_set1_epi8(15);
            __m128i c0 = _mm_loadu_si128(from), c1;
            if constexpr (BITS == 8) {
                c1 = _mm_loadu_si128(from + 1);
            } else {
                c1 = _mm_and_si128(_mm_srli_epi16(c0, 4), low);
                c0 = _mm_and_si128(c0, low);
            }
            w0 = _mm256_cvtepu8_epi16(c0);
            w1 = _mm256_cvtepu8_epi16(c1);
        }
    }

    template <int R, int BITS, bool MINIMUM, class S>
    static void block(const CodesTask &task, const CodedRows<float> &x, float *c, int64_t ldc) {
        constexpr int64_t header = GROUP * sizeof(S) * (MINIMUM ? 2 : 1);
        constexpr int64_t pair_bytes = GROUP * 2 * BITS / 8;
        const uint8_t *w = task.panel;
        for (int64_t b = 0, g = 0; b < task.blocks; g++) {
            const S *scale = reinterpret_cast<const S *>(w);
            const int64_t count = std::min(task.group_blocks, task.blocks - b);
            const int64_t bytes = count * BLOCK / 2 * pair_bytes;
            w += header;
            if (task.ahead)
                for (int64_t i = 0; i < header + bytes; i += 64)
                    __builtin_prefetch(w + CODES_AHEAD + i, 0, 2);
            for (int column = 0; column < GROUP; column += 16) {
                __m256i sum[R][2];
                for (int r = 0; r < R; r++)
                    sum[r][0] = sum[r][1] =
                        _mm256_set1_epi32(MINIMUM ? 0 : x.sums[r * x.groups + g]);
                const uint8_t *at = w + column * 2 * BITS / 8;
                const int16_t *n = x.data + b * BLOCK;
                for (int64_t k = 0; k < count * BLOCK; k += 2, n += 2, at += pair_bytes) {
                    __m256i w0, w1;
                    sixteen<BITS>(at, w0, w1);
                    for (int r = 0; r < R; r++) {
                        int32_t two;
                        std::memcpy(&two, n + r * x.stride, sizeof two);
                        const __m256i v = _mm256_set1_epi32(two);
                        sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(w0, v));
                        sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(w1, v));
                    }
                }
                for (int h = 0; h < 2; h++) {
                    const int first = column + h * 8;
                    const __m256 s = wide(scale + first);
                    for (int r = 0; r < R; r++) {
                        float *to = c + r * ldc + first;
                        __m256 total = g ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
                        total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), s, total);
                        if constexpr (MINIMUM)
                            total = _mm256_fmadd_ps(
                                _mm256_set1_ps(static_cast<float>(x.sums[r * x.groups + g])),
                                wide(scale + GROUP + first), total);
                        _mm256_storeu_ps(to, total);
                    }
                }
            }
            b += count;
            w += bytes;
        }
        for (int r = 0; r < R; r++)
            for (int o = 0; o < GROUP; o += 8) {
                float *to = c + r * ldc + o;
                _mm256_storeu_ps(
                    to, _mm256_mul_ps(_mm256_loadu_ps(to), _mm256_set1_ps(x.scale[r])));
            }
    }

    template <int BITS>
    static void widen_block(const uint8_t *from, int16_t *to) {
        for (int i = 0; i < BLOCK * GROUP; i += 32, from += 4 * BITS, to += 32) {
            __m256i w0, w1;
            sixteen<BITS>(from, w0, w1);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), w0);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 16), w1);
        }
    }

    static __m256 wide(const float *p) { return _mm256_loadu_ps(p); }
    static __m256 wide(const half *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
};
