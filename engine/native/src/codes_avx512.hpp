// Products of codes with AVX-512 VNNI, which multiplies integers of 16 bits and adds two products at
// once. Included as model.hpp is, behind codes.hpp.

struct Avx512Codes {
    static constexpr int ROWS = 6;
    static constexpr bool NARROWS = true, WIDENS = true;

    // 8 bits as `place_pair`. 4 bits: [fours of inputs][32 words of 16 bits], nibble i of each word
    // belongs to pair i / 2 of inputs and half i % 2 of outputs.
    template <int BITS>
    static void place(uint8_t *block, int k, int output, uint8_t code) {
        if constexpr (BITS == 8) {
            place_pair<8>(block, k, output, code);
        } else {
            const int word = output % 16 * 2 + k % 2, nibble = k % 4 / 2 * 2 + output / 16;
            uint8_t &byte = block[k / 4 * 64 + word * 2 + nibble / 2];
            byte = static_cast<uint8_t>(byte | code << nibble % 2 * 4);
        }
    }

    // each(pair of inputs, outputs 0 to 15, outputs 16 to 31) for a block, codes of 16 bits.
    template <int BITS, class Each>
    static void pairs(const uint8_t *w, bool ahead, Each &&each) {
        constexpr int bytes = BITS == 16 ? 128 : 64;
        for (int k = 0; k < BLOCK; k += BITS == 4 ? 4 : 2, w += bytes) {
            if (ahead) {
                __builtin_prefetch(w + CODES_AHEAD, 0, 2);
                if constexpr (BITS == 16) __builtin_prefetch(w + CODES_AHEAD + 64, 0, 2);
            }
            if constexpr (BITS == 16) {
                each(k, _mm512_loadu_si512(w), _mm512_loadu_si512(w + 64));
            } else if constexpr (BITS == 8) {
                const __m256i *from = reinterpret_cast<const __m256i *>(w);
                each(
                    k, _mm512_cvtepu8_epi16(_mm256_loadu_si256(from)),
                    _mm512_cvtepu8_epi16(_mm256_loadu_si256(from + 1)));
            } else {
                const __m512i nibble = _mm512_set1_epi16(15), x = _mm512_loadu_si512(w);
                each(
                    k, _mm512_and_si512(x, nibble),
                    _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
                each(
                    k + 2, _mm512_and_si512(_mm512_srli_epi16(x, 8), nibble),
                    _mm512_srli_epi16(x, 12));
            }
        }
    }

    template <int R, int BITS, bool MINIMUM, class S>
    static void block(const CodesTask &task, const CodedRows<float> &x, float *c, int64_t ldc) {
        constexpr int64_t header = GROUP * sizeof(S) * (MINIMUM ? 2 : 1);
        __m512 total[R][2];
        for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
        const uint8_t *w = task.panel;
        const int16_t *n = x.data;
        for (int64_t b = 0, g = 0; b < task.blocks; g++) {
            const S *scale = reinterpret_cast<const S *>(w);
            if (task.ahead)
                for (int64_t i = 0; i < header; i += 64)
                    __builtin_prefetch(w + CODES_AHEAD + i, 0, 2);
            w += header;
            __m512i sum[R][2];
            for (int r = 0; r < R; r++)
                sum[r][0] = sum[r][1] = _mm512_set1_epi32(MINIMUM ? 0 : x.sums[r * x.groups + g]);
            const int64_t stop = std::min(b + task.group_blocks, task.blocks);
            for (; b < stop; b++, w += BLOCK * GROUP * BITS / 8, n += BLOCK)
                pairs<BITS>(w, task.ahead, [&](int k, __m512i w0, __m512i w1) {
                    for (int r = 0; r < R; r++) {
                        int32_t two;
                        std::memcpy(&two, n + r * x.stride + k, sizeof two);
                        const __m512i v = _mm512_set1_epi32(two);
                        sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], w0, v);
                        sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], w1, v);
                    }
                });
            for (int h = 0; h < 2; h++) {
                const __m512 s = wide(scale + h * 16);
                for (int r = 0; r < R; r++) {
                    total[r][h] =
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][h]), s, total[r][h]);
                    if constexpr (MINIMUM)
                        total[r][h] = _mm512_fmadd_ps(
                            _mm512_set1_ps(static_cast<float>(x.sums[r * x.groups + g])),
                            wide(scale + GROUP + h * 16), total[r][h]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++)
                _mm512_storeu_ps(
                    c + r * ldc + h * 16, _mm512_mul_ps(total[r][h], _mm512_set1_ps(x.scale[r])));
    }

    template <int BITS>
    static void widen_block(const uint8_t *from, int16_t *to) {
        pairs<BITS>(from, false, [&](int k, __m512i w0, __m512i w1) {
            _mm512_storeu_si512(to + k * GROUP, w0);
            _mm512_storeu_si512(to + k * GROUP + GROUP, w1);
        });
    }

    static __m512 wide(const float *p) { return _mm512_loadu_ps(p); }
    static __m512 wide(const half *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
};
