// Matrices whose weights are codes of 4 or 8 bits, with a scale for every `group` inputs of an
// output. Included by model.hpp.
//
//     w[o][k] = scale[o][k / group] * (code[o][k] - zero),  zero = 8 or 128, or
//     w[o][k] = scale[o][k / group] * code[o][k] + minimum[o][k / group]
//
// The left side's rows are rounded to integers of 16 bits, each row with a scale of its own:
// products of integers are exact in any order, and the rounding is at most 1 / 65534 of a row's
// largest number, where bfloat16's is 1 / 256 of each. Eight bits for each 32 numbers, which other
// engines take, cost five times bfloat16's divergence from float32. In a float64 model nothing is
// rounded.
//
// What a policy P has as P::Codes:
//
//   ROWS          rows that a product computes at once
//   place         where in a block a code goes
//   block         the product of some rows with a panel
//   NARROWS       whether scales that float16 holds are kept so
//   WIDENS        whether products of more rows read codes of 16 bits, which `widen_block` makes

constexpr int GROUP = 32;           // outputs of a panel
constexpr int BLOCK = 32;           // inputs of a block
constexpr int64_t MOST = 256;       // inputs of a group: sums of so many products fit 32 bits
constexpr float LARGEST = 32767;    // that an integer of a row can be
constexpr int64_t CODES_AHEAD = 4096;  // bytes in front of itself that a product asks for

// [panels][groups]{scales[32], minimums[32] or none, [blocks of a group]{32 outputs x 32 inputs}}
struct Codes {
    const uint8_t *data = nullptr;
    int64_t out = 0, in = 0, panels = 0;
    int64_t blocks = 0;        // of all inputs
    int64_t group_blocks = 0;  // blocks that share a scale; the last group may have fewer
    int64_t stride = 0;        // bytes of a panel
    int bits = 0;
    bool minimum = false, narrow_scales = false;
    const int32_t *order = nullptr;  // input k of the codes is input order[k] of the product

    int64_t groups() const { return (blocks + group_blocks - 1) / group_blocks; }
    int64_t wide_size() const {
        return groups() * GROUP * 4 * (minimum ? 2 : 1) + blocks * BLOCK * GROUP * 2;
    }
    int64_t header() const { return GROUP * (narrow_scales ? 2 : 4) * (minimum ? 2 : 1); }
    int64_t block_bytes() const { return BLOCK * GROUP * bits / 8; }
    int64_t size() const { return groups() * header() + blocks * block_bytes(); }
    const uint8_t *panel(int64_t p) const { return data + p * stride; }
};

// Rows as a product of codes reads them: integers, or in a float64 model numbers.
template <class F>
struct CodedRows {
    using N = std::conditional_t<std::is_same_v<F, double>, double, int16_t>;
    const N *data = nullptr;
    int64_t stride = 0;
    const F *scale = nullptr;  // [rows]
    // [rows][groups]: the sum of a group's integers, times -zero where there is no minimum.
    const int32_t *sums = nullptr;
    int64_t groups = 0;
    CodedRows from(int64_t row) const {
        return {data + row * stride, stride, scale + row, sums + row * groups, groups};
    }
};

// What one product does: a panel against up to P::Codes::ROWS rows, c[row][32].
struct CodesTask {
    const uint8_t *panel;
    int64_t blocks, group_blocks;
    bool ahead;  // the panel comes from memory
};

// `code` at its place among zeros, for policies that take pairs of inputs.
template <int BITS>
inline void place_pair(uint8_t *block, int k, int output, uint8_t code) {
    if constexpr (BITS == 8) {
        block[k / 2 * 64 + output * 2 + k % 2] = code;
    } else {
        // Eight outputs share their bytes with the next eight.
        uint8_t &byte = block[k / 2 * 32 + output / 16 * 16 + output % 8 * 2 + k % 2];
        byte = static_cast<uint8_t>(byte | code << (output % 16 < 8 ? 0 : 4));
    }
}

// Any processor: loops that a compiler may vectorise.
struct PlainCodes {
    static constexpr int ROWS = 1;
    static constexpr bool NARROWS = false, WIDENS = false;

    template <int BITS>
    static void place(uint8_t *block, int k, int output, uint8_t code) {
        place_pair<BITS>(block, k, output, code);
    }

    template <int R, int BITS, bool MINIMUM, class S>
    static void block(const CodesTask &task, const CodedRows<float> &x, float *c, int64_t ldc) {
        const uint8_t *w = task.panel;
        for (int r = 0; r < R; r++) std::fill_n(c + r * ldc, GROUP, 0.0f);
        for (int64_t b = 0, g = 0; b < task.blocks; g++) {
            const S *scale = reinterpret_cast<const S *>(w);
            w += GROUP * sizeof(S) * (MINIMUM ? 2 : 1);
            int32_t sum[R][GROUP];
            for (int r = 0; r < R; r++)
                std::fill_n(sum[r], GROUP, MINIMUM ? 0 : x.sums[r * x.groups + g]);
            for (const int64_t stop = std::min(b + task.group_blocks, task.blocks); b < stop; b++)
                for (int k = 0; k < BLOCK; k += 2) {
                    int16_t codes[GROUP][2];
                    w = pair<BITS>(w, codes);
                    for (int r = 0; r < R; r++) {
                        const int16_t *at = x.data + r * x.stride + b * BLOCK + k;
                        for (int o = 0; o < GROUP; o++)
                            sum[r][o] += at[0] * codes[o][0] + at[1] * codes[o][1];
                    }
                }
            for (int r = 0; r < R; r++)
                for (int o = 0; o < GROUP; o++) {
                    c[r * ldc + o] += static_cast<float>(sum[r][o]) * widen(scale[o]);
                    if constexpr (MINIMUM)
                        c[r * ldc + o] += static_cast<float>(x.sums[r * x.groups + g]) *
                                          widen(scale[GROUP + o]);
                }
        }
        for (int r = 0; r < R; r++)
            for (int o = 0; o < GROUP; o++) c[r * ldc + o] *= x.scale[r];
    }

    template <int BITS>
    static const uint8_t *pair(const uint8_t *w, int16_t (*codes)[2]) {
        for (int o = 0; o < GROUP; o++)
            for (int i = 0; i < 2; i++)
                if constexpr (BITS == 8)
                    codes[o][i] = w[o * 2 + i];
                else
                    codes[o][i] =
                        w[o / 16 * 16 + o % 8 * 2 + i] >> (o % 16 < 8 ? 0 : 4) & 15;
        return w + GROUP * 2 * BITS / 8;
    }
};

// float64: no rounding, the weights as they are.
struct ExactCodes {
    static constexpr int ROWS = 1;
    static constexpr bool NARROWS = false, WIDENS = false;

    template <int BITS>
    static void place(uint8_t *block, int k, int output, uint8_t code) {
        place_pair<BITS>(block, k, output, code);
    }

    template <int R, int BITS, bool MINIMUM, class S>
    static void block(const CodesTask &task, const CodedRows<double> &x, double *c, int64_t ldc) {
        constexpr int zero = MINIMUM ? 0 : 1 << (BITS - 1);
        const uint8_t *w = task.panel;
        for (int r = 0; r < R; r++) std::fill_n(c + r * ldc, GROUP, 0.0);
        for (int64_t b = 0; b < task.blocks;) {
            const S *scale = reinterpret_cast<const S *>(w);
            w += GROUP * sizeof(S) * (MINIMUM ? 2 : 1);
            for (const int64_t stop = std::min(b + task.group_blocks, task.blocks); b < stop; b++)
                for (int k = 0; k < BLOCK; k += 2) {
                    int16_t codes[GROUP][2];
                    w = PlainCodes::pair<BITS>(w, codes);
                    for (int i = 0; i < 2; i++)
                        for (int r = 0; r < R; r++) {
                            const double at = x.data[r * x.stride + b * BLOCK + k + i];
                            for (int o = 0; o < GROUP; o++) {
                                double weight = double(widen(scale[o])) * (codes[o][i] - zero);
                                if constexpr (MINIMUM) weight += double(widen(scale[GROUP + o]));
                                c[r * ldc + o] += at * weight;
                            }
                        }
                }
        }
    }
};

// [groups]{scales[32], minimums[32] or none, as floats, [blocks of a group][pairs][32 outputs][2]},
// for products of many rows.
template <class P>
void widen_panel(const Codes &codes, const uint8_t *from, uint8_t *to) {
    const int64_t scales = GROUP * (codes.minimum ? 2 : 1);
    for (int64_t b = 0; b < codes.blocks;) {
        float *wide = reinterpret_cast<float *>(to);
        if (codes.narrow_scales)
            for (int64_t i = 0; i < scales; i++)
                wide[i] = widen(reinterpret_cast<const half *>(from)[i]);
        else
            std::memcpy(wide, from, static_cast<size_t>(scales) * sizeof(float));
        from += codes.header();
        to += scales * int64_t(sizeof(float));
        for (const int64_t stop = std::min(b + codes.group_blocks, codes.blocks); b < stop; b++) {
            if (codes.bits == 4)
                P::Codes::template widen_block<4>(from, reinterpret_cast<int16_t *>(to));
            else
                P::Codes::template widen_block<8>(from, reinterpret_cast<int16_t *>(to));
            from += codes.block_bytes();
            to += BLOCK * GROUP * 2;
        }
    }
}

// c[row][32] for `rows` rows of x, up to P::Codes::ROWS. bits: 16 for a panel made wide.
template <class P, class F>
void product(
    int rows, int bits, const Codes &codes, const CodesTask &task, const CodedRows<F> &x, F *c,
    int64_t ldc) {
    const auto of = [&]<int BITS, bool MINIMUM, class S>() {
        switch (rows) {
#define TAILRACE_ROWS(n)                                                    \
    case n:                                                                 \
        if constexpr (n <= P::Codes::ROWS)                                  \
            P::Codes::template block<n, BITS, MINIMUM, S>(task, x, c, ldc); \
        break;
            TAILRACE_ROWS(1)
            TAILRACE_ROWS(2)
            TAILRACE_ROWS(3)
            TAILRACE_ROWS(4)
            TAILRACE_ROWS(5)
            TAILRACE_ROWS(6)
#undef TAILRACE_ROWS
        }
    };
    const auto with = [&]<int BITS, class S>() {
        codes.minimum ? of.template operator()<BITS, true, S>()
                      : of.template operator()<BITS, false, S>();
    };
    if constexpr (P::Codes::WIDENS)
        if (bits == 16) return with.template operator()<16, float>();
    if constexpr (P::Codes::NARROWS)
        if (codes.narrow_scales)
            return bits == 4 ? with.template operator()<4, half>()
                             : with.template operator()<8, half>();
    bits == 4 ? with.template operator()<4, float>() : with.template operator()<8, float>();
}
