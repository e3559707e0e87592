// The decoder, written once over a policy P and compiled for each instruction set.
//
// Included inside an anonymous namespace, behind the pragma that switches the instruction set on:
// nothing here may end up shared with a translation unit for another one. P says:
//
//   F     what sums are kept in (float or double), V a vector of W of them with its operations
//   KV    what the KV pool, the embedding and the checkpoint hold
//   A     what products read their left side as
//   PAIR  2: products take two neighbouring terms at once (a panel holds 32-bit pairs), else 1
//   M, T  an element of a packed weight, and of a panel packed from the KV pool
//   R     rows a product computes at once
//   INTEGERS  whether products with codes of the KV pool are of integers: queries and weights are
//         rounded to 16 bits then, each row with a scale of its own. Otherwise codes become T.
//   Codes products of quantised weights (codes.hpp)
//
// Every row is summed in an order that depends on nothing but its own length and position: neither
// on the batch around it, nor on how a prompt is cut into chunks, nor on the size of a page, nor on
// the number of threads. So equal tokens have equal logits to the last bit, however computed.

#include "codes.hpp"

constexpr int KEYS = 64;   // keys attended at a time, counted from position 0
constexpr int64_t ROWS = 24;         // rows of a product that one claim covers
constexpr int64_t OWN_ROWS = 64;     // from so many a thread, threads keep to rows of their own
constexpr int64_t STREAM_STEPS = 32; // how far in front of itself a product reads memory
constexpr int64_t SPAN = 512;  // keys whose softmax is one, counted from position 0; spans are joined
constexpr int LARGEST_CODE = 127;    // of keys and values
constexpr int64_t QUERY_ROWS = 96;   // query heads times tokens attended together
// Rows so few that each thread prepares all of them for itself, rather than wait for the others.
constexpr int64_t FEW_ROWS = 8;

// [groups][in / PAIR][32 outputs]: a product reads its weight from end to end once.
template <class P>
struct Matrix {
    const typename P::M *data = nullptr;
    int64_t out = 0, in = 0, groups = 0, steps = 0;
    const typename P::M *panel(int64_t group) const { return data + group * steps * GROUP; }
};

struct Free {
    void operator()(void *p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

// Zeroed, on a boundary of 64 bytes, or of 2 MiB where huge pages pay.
template <class T>
Buffer<T> allocate(int64_t count) {
    constexpr size_t huge = size_t{1} << 21;
    size_t bytes = static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T);
    const size_t boundary = bytes >= huge ? huge : 64;
    bytes = (bytes + boundary - 1) / boundary * boundary;
    void *p = std::aligned_alloc(boundary, bytes);
    if (!p) throw std::bad_alloc();
#if defined(__linux__)
    if (boundary == huge) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    std::memset(p, 0, bytes);
    return Buffer<T>(static_cast<T *>(p));
}

// Memory that is given out once and kept, in pieces large enough for huge pages.
class Arena {
public:
    template <class T>
    T *take(int64_t count) {
        const int64_t bytes = round_up(count * int64_t(sizeof(T)), 64);
        if (bytes > left_) {
            left_ = std::max(bytes, int64_t{1} << 25);
            pieces_.push_back(allocate<uint8_t>(left_));
            next_ = pieces_.back().get();
        }
        uint8_t *taken = next_;
        next_ += bytes;
        left_ -= bytes;
        return reinterpret_cast<T *>(taken);
    }

private:
    std::vector<Buffer<uint8_t>> pieces_;
    uint8_t *next_ = nullptr;
    int64_t left_ = 0;
};

// Memory that grows and keeps nothing.
template <class T>
class Scratch {
public:
    T *reserve(int64_t count) {
        if (count > size_) {
            data_.reset();
            size_ = 0;
            data_ = allocate<T>(count);
            size_ = count;
        }
        return data_.get();
    }
    T *get() const { return data_.get(); }

private:
    Buffer<T> data_;
    int64_t size_ = 0;
};

// What a product asks memory for while it computes: in its first `steps` steps, the weights that lie
// `distance` elements behind the one it reads.
struct Ahead {
    int64_t distance = 0, steps = 0;
};

// c[r][0..32) = (add ? c : 0) + sum over k of a[r][k] * w[k][0..32), for up to P::R rows.
template <class P, class T>
void product(
    int rows, const typename P::A *a, int64_t lda, const T *w, int64_t steps, typename P::F *c,
    int64_t ldc, bool add, Ahead ahead = {}) {
    switch (rows) {
#define TAILRACE_ROWS(n)                                                                         \
    case n:                                                                                      \
        if constexpr (n <= P::R) P::template block<n>(a, lda, w, steps, c, ldc, add, ahead); \
        break;
        TAILRACE_ROWS(1)
        TAILRACE_ROWS(2)
        TAILRACE_ROWS(3)
        TAILRACE_ROWS(4)
        TAILRACE_ROWS(5)
        TAILRACE_ROWS(6)
        TAILRACE_ROWS(7)
        TAILRACE_ROWS(8)
        TAILRACE_ROWS(9)
        TAILRACE_ROWS(10)
        TAILRACE_ROWS(11)
        TAILRACE_ROWS(12)
#undef TAILRACE_ROWS
    }
}

// c[r][0..32) = (onto ? c : 0) + scale[r] * (sum over k of a[r][k] * w[k][0..32)) of integers.
template <class P>
void integer_product(
    int rows, const int16_t *a, int64_t lda, const typename P::T *w, int64_t steps,
    const typename P::F *scale, typename P::F *c, int64_t ldc, bool onto) {
    switch (rows) {
#define TAILRACE_ROWS(n)                                                                    \
    case n:                                                                                 \
        if constexpr (n <= P::R)                                                            \
            P::template integer_block<n>(a, lda, w, steps, scale, c, ldc, onto);            \
        break;
        TAILRACE_ROWS(1)
        TAILRACE_ROWS(2)
        TAILRACE_ROWS(3)
        TAILRACE_ROWS(4)
        TAILRACE_ROWS(5)
        TAILRACE_ROWS(6)
        TAILRACE_ROWS(7)
        TAILRACE_ROWS(8)
        TAILRACE_ROWS(9)
        TAILRACE_ROWS(10)
        TAILRACE_ROWS(11)
        TAILRACE_ROWS(12)
#undef TAILRACE_ROWS
    }
}

// The rows of the next block when `left` are left: blocks as equal as they can be.
template <class P>
int block_rows(int64_t left) {
    const int64_t blocks = (left + P::R - 1) / P::R;
    return static_cast<int>((left + blocks - 1) / blocks);
}

// `block` of policies that take one term at a time.
template <class P, int R, class T>
inline void plain_block(
    const typename P::A *a, int64_t lda, const T *w, int64_t steps, typename P::F *c, int64_t ldc,
    bool add, Ahead ahead) {
    using V = typename P::V;
    constexpr int W = P::W;
    for (int column = 0; column < GROUP; column += 2 * W) {
        V sum[R][2];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++)
                sum[r][h] = add ? P::load(c + r * ldc + column + h * W) : P::zero();
        const T *p = w + column;
        for (int64_t k = 0; k < steps; k++, p += GROUP) {
            // The columns that come first ask for the others' lines too.
            if (k < ahead.steps && column == 0)
                for (int i = 0; i < GROUP; i += 64 / int(sizeof(T)))
                    __builtin_prefetch(p + ahead.distance + i, 0, 2);
            const V w0 = P::load(p), w1 = P::load(p + W);
            for (int r = 0; r < R; r++) {
                const V x = P::set1(a[r * lda + k]);
                sum[r][0] = P::fma(x, w0, sum[r][0]);
                sum[r][1] = P::fma(x, w1, sum[r][1]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) P::store(c + r * ldc + column + h * W, sum[r][h]);
    }
}

// What one task of attention computes: consecutive queries of one request.
struct Queries {
    int64_t request, token, row, position;  // in the batch; in the output; among the keys
    int64_t count;
};

// A product in tasks: some rows by one group of outputs. Of few rows, threads share the groups, so
// that a weight is read once. Of many, each thread begins with rows of its own, in every loop the
// same: what it writes and reads again stays in its cache, for which it reads all of the weights.
struct Tiles {
    int64_t rows, groups, pieces, threads;
    bool own;

    Tiles(int64_t rows, int64_t groups, int64_t threads)
        : rows(rows),
          groups(groups),
          pieces((rows + ROWS - 1) / ROWS),
          threads(threads),
          own(keeps(rows, threads)) {}

    static bool keeps(int64_t rows, int64_t threads) { return rows >= OWN_ROWS * threads; }
    // Of a loop over rows, in the parts of a product of as many.
    static int64_t unit_of(int64_t rows, int64_t threads) {
        return keeps(rows, threads) ? ROWS : rows;
    }

    int64_t count() const { return groups * pieces; }
    int64_t unit() const { return own ? groups : 1; }

    struct Tile {
        int64_t group, first, last;  // outputs, rows
    };
    // Tasks of a part that follow each other have the same group as far as they can.
    Tile at(int64_t task) const {
        int64_t from = 0, width = pieces;
        if (own)
            for (int64_t part = 1; part <= threads; part++) {
                const int64_t to = pieces * part / threads;
                width = to - from;
                if (task < groups * to) break;
                from = to;
            }
        task -= groups * from;
        const int64_t first = (from + task % width) * ROWS;
        return {task / width, first, std::min(first + ROWS, rows)};
    }
};

template <class P>
class Model final : public Decoder {
    using F = typename P::F;
    using A = typename P::A;
    using KV = typename P::KV;
    using V = typename P::V;
    using M = typename P::M;
    using T = typename P::T;
    static constexpr int W = P::W, PAIR = P::PAIR;

    using Coded = typename P::Codes;
    using N = typename CodedRows<F>::N;
    static constexpr bool EXACT = std::is_same_v<F, double>;

    // One or the other.
    struct Weight {
        Matrix<P> plain;
        Codes codes;
    };

    struct Layer {
        Buffer<F> attn_norm, mlp_norm, q_norm, k_norm, bias;
        Weight qkv, o, gate_up, down;
    };

    // Rows for products of codes.
    struct Rows {
        Scratch<N> data;
        Scratch<F> scale;
        Scratch<int32_t> sums;
        void reserve(int64_t rows, int64_t in) {
            data.reserve(rows * in);
            scale.reserve(rows);
            sums.reserve(rows * (in / BLOCK));
        }
    };

    // Where the keys and values of one head lie that are attended together; null: to be left out.
    // Keys come first, then values: as numbers or as codes.
    struct Round {
        const KV *numbers[2][KEYS];
        const int8_t *codes[2][KEYS];
        // Scales of codes that lie one behind another.
        struct Run {
            int64_t first, count;
            const float *scales[2];
        } runs[KEYS];
        int64_t num_runs;
    };

    struct Private {  // of one thread
        Buffer<F> sums, scores;
        Buffer<F> out, top, total;                   // of the span under way
        Buffer<F> joined, joined_top, joined_total;  // of those before
        Buffer<A> q, p;
        Buffer<T> keys, values;
        Buffer<F> key_scales, value_scales;
        // Of policies whose products with codes are of integers: q and p.
        Buffer<int16_t> whole_q, whole_p;
        Buffer<F> q_scale, p_scale;
        Round rounds[2];
        int round = 0;  // the one under way; the other is what comes next
        Buffer<A> normed;
        Rows rows;
        Scratch<uint8_t> panel;
    };

public:
    explicit Model(const tailrace_shape &s)
        : s_(s),
          q_size_(s.heads * s.head_dim),
          kv_size_(s.kv_heads * s.head_dim),
          qkv_size_(q_size_ + 2 * kv_size_),
          share_(s.heads / s.kv_heads),
          hidden_(round_up(s.hidden, GROUP)),
          inner_(round_up(s.inner, GROUP)),
          attended_(round_up(q_size_, GROUP)),
          padded_qkv_(round_up(qkv_size_, GROUP)),
          padded_dim_(round_up(s.head_dim, GROUP)),
          query_tokens_(std::max<int64_t>(QUERY_ROWS / share_, 1)),
          scale_(F(1) / std::sqrt(F(s.head_dim))),
          layers_(static_cast<size_t>(s.layers)),
          team_(s.threads) {
        const int64_t rows = query_tokens_ * share_;
        for (int i = 0; i < team_.size(); i++)
            private_.push_back(Private{
                allocate<F>(P::R * GROUP),
                allocate<F>(rows * KEYS),
                allocate<F>(rows * padded_dim_),
                allocate<F>(rows),
                allocate<F>(rows),
                allocate<F>(rows * padded_dim_),
                allocate<F>(rows),
                allocate<F>(rows),
                allocate<A>(rows * padded_dim_),
                allocate<A>(rows * KEYS),
                allocate<T>(round_up(s.head_dim, PAIR) / PAIR * KEYS),
                allocate<T>(padded_dim_ * KEYS / PAIR),
                allocate<F>(KEYS),
                allocate<F>(KEYS),
                allocate<int16_t>(integers() ? rows * padded_dim_ : 0),
                allocate<int16_t>(integers() ? rows * KEYS : 0),
                allocate<F>(rows),
                allocate<F>(rows),
                {},
                0,
                allocate<A>(FEW_ROWS * hidden_),
                {},
                {},
            });
    }

    const char *load(int part, int64_t layer, const void *const *tensors) override {
        if (layer < 0 || layer >= s_.layers) return "no such layer";
        Layer &l = layers_[static_cast<size_t>(layer)];
        const auto at = [&](int i) { return static_cast<const KV *>(tensors[i]); };
        switch (part) {
            case TAILRACE_EMBED: embed_ = at(0); return nullptr;
            case TAILRACE_ATTN_NORM: l.attn_norm = vector(at(0), s_.hidden); return nullptr;
            case TAILRACE_MLP_NORM: l.mlp_norm = vector(at(0), s_.hidden); return nullptr;
            case TAILRACE_NORM: norm_ = vector(at(0), s_.hidden); return nullptr;
            case TAILRACE_QK_NORM:
                l.q_norm = vector(at(0), s_.head_dim);
                l.k_norm = vector(at(1), s_.head_dim);
                return nullptr;
            case TAILRACE_QKV_BIAS: {
                l.bias = allocate<F>(padded_qkv_);
                F *to = l.bias.get();
                const int64_t sizes[] = {q_size_, kv_size_, kv_size_};
                for (int i = 0; i < 3; i++)
                    for (int64_t j = 0; j < sizes[i]; j++) *to++ = widen(at(i)[j]);
                return nullptr;
            }
        }
        return place(part, layer, [&](Weight &weight, int64_t out, int64_t in, auto &&source) {
            weight.codes = {};
            put(weight.plain, out, in, [&](int64_t r) -> const KV * {
                const auto [tensor, row] = source(r);
                return tensor < 0 ? nullptr : at(tensor) + row * in;
            });
        });
    }

    const char *load_codes(int part, int64_t layer, const tailrace_codes *tensors) override {
        if (layer < 0 || layer >= s_.layers) return "no such layer";
        const char *fault = nullptr;
        const char *other =
            place(part, layer, [&](Weight &weight, int64_t out, int64_t in, auto &&source) {
                fault = put_codes(weight.codes, arena_, out, in, tensors, source);
                weight.plain = {};
                widest_ = std::max(widest_, round_up(in, BLOCK));
            });
        return other ? other : fault;
    }

    const char *step(const tailrace_step &step) override {
        if (const char *fault = check(step)) return fault;
        const int64_t tokens = step.tokens, sampled = step.sampled;
        if (tokens == 0) return nullptr;
        plan(step);
        residual_.reserve(tokens * hidden_);
        normed_.reserve(tokens * hidden_);
        qkv_.reserve(tokens * padded_qkv_);
        q_.reserve(tokens * q_size_);
        attention_.reserve(tokens * attended_);
        inside_.reserve(tokens * inner_);
        kept_.reserve(sampled * hidden_);
        coded_.reserve(tokens, widest_);
        team_.run([&](Lane &lane) { pass(lane, step); });
        return nullptr;
    }

    const char *products(int64_t tokens, int64_t sampled) override {
        if (tokens < 0 || sampled < 0 || sampled > tokens) return "no such pass";
        normed_.reserve(tokens * hidden_);
        attention_.reserve(tokens * attended_);
        inside_.reserve(tokens * inner_);
        coded_.reserve(tokens, widest_);
        const auto normed = there(normed_.get(), hidden_);
        const auto attended = there(attention_.get(), attended_);
        const auto inside = there(inside_.get(), inner_);
        const auto drop = [](int64_t, int64_t, const F *) {};
        team_.run([&](Lane &lane) {
            for (int64_t l = 0; l < s_.layers; l++) {
                const Layer &layer = layers_[static_cast<size_t>(l)];
                const int64_t rows = l + 1 == s_.layers ? sampled : tokens;
                multiply(lane, layer.qkv, normed, tokens, drop);
                multiply(lane, layer.o, attended, rows, drop);
                multiply(lane, layer.gate_up, normed, rows, drop);
                multiply(lane, layer.down, inside, rows, drop);
            }
            multiply(lane, head_, normed, sampled, drop);
        });
        return nullptr;
    }

    const char *linear(
        int64_t rows, int64_t out, int64_t in, const void *x, const void *weight, const void *bias,
        void *y) override {
        const KV *w = static_cast<const KV *>(weight);
        Weight weights;
        Buffer<M> memory = allocate<M>(elements(out, in));
        pack(weights.plain, memory.get(), out, in, [&](int64_t r) { return w + r * in; });
        Buffer<F> added;
        if (bias) added = vector(static_cast<const KV *>(bias), out);
        const int64_t lda = round_up(in, GROUP);
        Buffer<A> rounded = activations(static_cast<const F *>(x), rows, in, lda);
        team_.run([&](Lane &lane) {
            const auto from = there(rounded.get(), lda);
            multiply(lane, weights, from, rows, [&](int64_t r, int64_t g, const F *c) {
                store_row(static_cast<F *>(y) + r * out, out, g, c, added.get());
            });
        });
        return nullptr;
    }

    const char *linear_codes(
        int64_t rows, int64_t out, int64_t in, const void *x, const tailrace_codes *codes,
        void *y) override {
        Weight weight;
        Arena memory;
        const auto same = [&](int64_t r) { return Place{r < out ? 0 : -1, r}; };
        if (const char *fault = put_codes(weight.codes, memory, out, in, codes, same)) return fault;
        const int64_t lda = round_up(in, GROUP);
        Buffer<A> rounded = activations(static_cast<const F *>(x), rows, in, lda);
        coded_.reserve(rows, round_up(in, BLOCK));
        team_.run([&](Lane &lane) {
            const auto from = there(rounded.get(), lda);
            multiply(lane, weight, from, rows, [&](int64_t r, int64_t g, const F *c) {
                store_row(static_cast<F *>(y) + r * out, out, g, c, nullptr);
            });
        });
        return nullptr;
    }

    const char *gated(
        int64_t rows, int64_t inner, int64_t in, const void *x, const void *gate, const void *up,
        void *y) override {
        Weight weights;
        const int64_t out = round_up(inner, 16) * 2;
        Buffer<M> memory = allocate<M>(elements(out, in));
        pack(weights.plain, memory.get(), out, in, [&](int64_t r) -> const KV * {
            const auto [tensor, row] = interleaved(r, inner);
            if (tensor < 0) return nullptr;
            return static_cast<const KV *>(tensor ? up : gate) + row * in;
        });
        const int64_t lda = round_up(in, GROUP), ldy = round_up(inner, 16);
        Buffer<A> rounded = activations(static_cast<const F *>(x), rows, in, lda);
        Buffer<A> result = allocate<A>(rows * ldy);
        team_.run([&](Lane &lane) {
            const auto from = there(rounded.get(), lda);
            multiply(lane, weights, from, rows, [&](int64_t r, int64_t g, const F *c) {
                activate(c, result.get() + r * ldy + g * 16);
            });
        });
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < inner; i++)
                static_cast<F *>(y)[r * inner + i] = widen(result[r * ldy + i]);
        return nullptr;
    }

    const char *norm(
        int64_t rows, int64_t size, const void *x, const void *weight, void *y) override {
        const int64_t padded = round_up(size, GROUP);
        Buffer<F> scale = vector(static_cast<const KV *>(weight), size);
        Buffer<F> from = allocate<F>(padded);
        Buffer<A> to = allocate<A>(padded);
        for (int64_t r = 0; r < rows; r++) {
            std::copy_n(static_cast<const F *>(x) + r * size, size, from.get());
            normalise(from.get(), scale.get(), size, to.get());
            for (int64_t i = 0; i < size; i++) static_cast<F *>(y)[r * size + i] = widen(to[i]);
        }
        return nullptr;
    }

    const char *attention(
        int64_t layer, const tailrace_step &step, const void *qkv, void *y) override {
        if (const char *fault = check(step)) return fault;
        if (layer < 0 || layer >= s_.layers) return "no such layer";
        plan(step);
        qkv_.reserve(step.tokens * padded_qkv_);
        q_.reserve(step.tokens * q_size_);
        attention_.reserve(step.tokens * attended_);
        for (int64_t t = 0; t < step.tokens; t++)
            std::copy_n(
                static_cast<const F *>(qkv) + t * qkv_size_, qkv_size_,
                qkv_.get() + t * padded_qkv_);
        team_.run([&](Lane &lane) {
            rotate_all(lane, step, layer);
            attend_all(lane, step, layer, all_, false);
        });
        for (int64_t t = 0; t < step.tokens; t++)
            for (int64_t i = 0; i < q_size_; i++)
                static_cast<F *>(y)[t * q_size_ + i] = widen(attention_.get()[t * attended_ + i]);
        return nullptr;
    }

private:
    // --- weights -------------------------------------------------------------------------------

    static int64_t elements(int64_t out, int64_t in) {
        return round_up(out, GROUP) * (round_up(in, PAIR) / PAIR);
    }

    static Buffer<F> vector(const KV *from, int64_t size) {
        Buffer<F> to = allocate<F>(round_up(size, GROUP));
        for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
        return to;
    }

    static Buffer<A> activations(const F *x, int64_t rows, int64_t size, int64_t stride) {
        Buffer<A> to = allocate<A>(rows * stride);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < size; i++) narrow(x[r * size + i], to[r * stride + i]);
        return to;
    }

    // Where a row of a packed matrix comes from: which of its tensors (none: -1), and which row.
    struct Place {
        int tensor;
        int64_t row;
    };

    // 16 rows of gate, then the same 16 of up: one panel holds both sides of what it yields.
    static Place interleaved(int64_t r, int64_t inner) {
        const int64_t row = r / 32 * 16 + r % 16;
        return {row < inner ? (r % 32 < 16 ? 0 : 1) : -1, row};
    }

    // fill(weight, out, in, source) for the matrix that `part` is; source(row) says its Place.
    template <class Fill>
    const char *place(int part, int64_t layer, Fill &&fill) {
        Layer &l = layers_[static_cast<size_t>(layer)];
        const auto whole = [](int64_t r) { return Place{0, r}; };
        switch (part) {
            case TAILRACE_QKV:
                fill(l.qkv, qkv_size_, s_.hidden, [&](int64_t r) {
                    if (r < q_size_) return Place{0, r};
                    r -= q_size_;
                    return r < kv_size_ ? Place{1, r} : Place{2, r - kv_size_};
                });
                return nullptr;
            case TAILRACE_O: fill(l.o, s_.hidden, q_size_, whole); return nullptr;
            case TAILRACE_GATE_UP:
                fill(l.gate_up, round_up(s_.inner, 16) * 2, s_.hidden, [&](int64_t r) {
                    return interleaved(r, s_.inner);
                });
                return nullptr;
            case TAILRACE_DOWN: fill(l.down, s_.hidden, s_.inner, whole); return nullptr;
            case TAILRACE_HEAD: fill(head_, s_.vocab, s_.hidden, whole); return nullptr;
        }
        return "no such part";
    }

    template <class Row>
    void put(Matrix<P> &matrix, int64_t out, int64_t in, Row &&row) {
        // A part loaded again goes where it was.
        M *to = matrix.data ? const_cast<M *>(matrix.data)
                            : arena_.template take<M>(elements(out, in));
        pack(matrix, to, out, in, row);
    }

    // `tensors`: as many as the part has, alike in bits, group, order and in having minimums.
    template <class Source>
    static const char *put_codes(
        Codes &codes, Arena &arena, int64_t out, int64_t in, const tailrace_codes *tensors,
        Source &&source) {
        const tailrace_codes &like = tensors[0];
        if (like.bits != 4 && like.bits != 8) return "codes of 4 or 8 bits are known";
        if (like.group < BLOCK || like.group % BLOCK || like.group > MOST)
            return "groups are multiples of 32, up to 256";
        const int64_t groups = (in + like.group - 1) / like.group;
        codes.out = out;
        codes.in = in;
        codes.panels = round_up(out, GROUP) / GROUP;
        codes.blocks = round_up(in, BLOCK) / BLOCK;
        codes.group_blocks = like.group / BLOCK;
        codes.bits = like.bits;
        codes.minimum = like.minimums != nullptr;
        codes.narrow_scales = Coded::NARROWS;
        half ignored;
        for (int64_t r = 0; r < out; r++) {
            const Place from = source(r);
            if (from.tensor < 0) continue;
            const tailrace_codes &tensor = tensors[from.tensor];
            for (int64_t g = from.row * groups; g < (from.row + 1) * groups; g++)
                codes.narrow_scales = codes.narrow_scales &&
                                      narrow_exactly(tensor.scales[g], ignored) &&
                                      (!codes.minimum || narrow_exactly(tensor.minimums[g], ignored));
        }
        codes.stride = codes.size();
        uint8_t *to = arena.take<uint8_t>(codes.panels * codes.stride);
        if (like.order) {
            int32_t *order = arena.take<int32_t>(in);
            for (int64_t k = 0; k < in; k++) {
                if (like.order[k] < 0 || like.order[k] >= in) return "an order that is none";
                order[k] = like.order[k];
            }
            codes.order = order;
        }
        codes.data = to;
        for (int64_t r = 0; r < out; r++) {
            const Place from = source(r);
            if (from.tensor < 0) continue;
            const tailrace_codes &tensor = tensors[from.tensor];
            uint8_t *panel = to + r / GROUP * codes.stride;
            const int output = static_cast<int>(r % GROUP);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = from.row * groups + g;
                const auto put_scale = [&](int64_t i, float x) {
                    if (codes.narrow_scales)
                        narrow_exactly(x, reinterpret_cast<half *>(panel)[i]);
                    else
                        reinterpret_cast<float *>(panel)[i] = x;
                };
                put_scale(output, tensor.scales[at]);
                if (codes.minimum) put_scale(GROUP + output, tensor.minimums[at]);
                panel += codes.header();
                const int64_t first = g * like.group;
                const int64_t count = std::min<int64_t>(like.group, in - first);
                const uint8_t *row = tensor.codes + from.row * in + first;
                for (int64_t k = 0; k < count; k++) {
                    uint8_t *block = panel + k / BLOCK * codes.block_bytes();
                    const int within = static_cast<int>(k % BLOCK);
                    if (codes.bits == 4)
                        Coded::template place<4>(block, within, output, row[k]);
                    else
                        Coded::template place<8>(block, within, output, row[k]);
                }
                panel += round_up(count, BLOCK) / BLOCK * codes.block_bytes();
            }
        }
        return nullptr;
    }

    template <class Row>
    static void pack(Matrix<P> &matrix, M *to, int64_t out, int64_t in, Row &&row) {
        matrix.data = to;
        matrix.out = out;
        matrix.in = in;
        matrix.groups = round_up(out, GROUP) / GROUP;
        matrix.steps = round_up(in, PAIR) / PAIR;
        for (int64_t g = 0; g < matrix.groups; g++) {
            M *panel = to + g * matrix.steps * GROUP;
            for (int j = 0; j < GROUP; j++) {
                const int64_t r = g * GROUP + j;
                const KV *from = r < out ? row(r) : nullptr;
                for (int64_t k = 0; k < matrix.steps; k++)
                    panel[k * GROUP + j] = from ? P::term(from, k, in) : M{};
            }
        }
    }

    // --- products ------------------------------------------------------------------------------

    // Where a product's left side comes from: rows that are there, or `make(row, to)`.
    template <class Make>
    struct Source {
        A *rows;
        int64_t stride;
        Make make;
    };
    static Source<std::nullptr_t> there(A *rows, int64_t stride) { return {rows, stride, nullptr}; }

    // each(row, group, sums[32]) for every row and group of source @ weight.T.
    template <class Make, class Each>
    void multiply(
        Lane &lane, const Weight &weight, const Source<Make> &source, int64_t rows, Each &&each) {
        constexpr bool makes = !std::is_same_v<Make, std::nullptr_t>;
        const Codes &codes = weight.codes;
        Private &mine = private_[static_cast<size_t>(lane.index)];
        const bool few = rows <= FEW_ROWS;
        Rows &to = few ? mine.rows : coded_;
        A *x = makes && few ? mine.normed.get() : source.rows;
        const int64_t stride = makes && few ? hidden_ : source.stride;
        const auto prepare = [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) {
                if constexpr (makes) source.make(r, x + r * stride);
                if (codes.data) code_row(codes, x + r * stride, r, to);
            }
        };
        bool ready = !makes && !codes.data;
        if (!ready && !few) {
            lane.share(rows, Tiles::unit_of(rows, team_.size()), prepare);
            ready = true;
        }
        if (few && codes.data) to.reserve(rows, codes.blocks * BLOCK);
        // Only who has a task of this product may read what it reads: a thread that comes late finds
        // the others at later ones.
        const auto once = [&] {
            if (!ready) prepare(0, rows);
            ready = true;
        };
        if (codes.data)
            multiply_codes(
                lane, codes,
                CodedRows<F>{
                    to.data.get(), codes.blocks * BLOCK, to.scale.get(), to.sums.get(),
                    codes.groups()},
                rows, once, each);
        else
            multiply_plain(lane, weight.plain, x, stride, rows, once, each);
    }

    void code_row(const Codes &codes, const A *from, int64_t r, Rows &to) const {
        const int64_t padded = codes.blocks * BLOCK, groups = codes.groups();
        N *data = to.data.get() + r * padded;
        std::fill_n(data + codes.in, padded - codes.in, N(0));
        if constexpr (EXACT) {
            for (int64_t k = 0; k < codes.in; k++)
                data[k] = from[codes.order ? codes.order[k] : k];
        } else {
            const int32_t *order = codes.order;
            to.scale.get()[r] =
                order ? integers_of(from, codes.in, [=](int64_t k) { return order[k]; }, data)
                      : integers_of(from, codes.in, [](int64_t k) { return k; }, data);
            int32_t *sums = to.sums.get() + r * groups;
            const int32_t factor = codes.minimum ? 1 : -(1 << (codes.bits - 1));
            for (int64_t g = 0, k = 0; g < groups; g++) {
                int32_t sum = 0;
                const int64_t stop = std::min(k + codes.group_blocks * BLOCK, padded);
                for (; k < stop; k++) sum += data[k];
                sums[g] = factor * sum;
            }
        }
    }

    template <class Once, class Each>
    void multiply_codes(
        Lane &lane, const Codes &codes, const CodedRows<F> &left, int64_t rows, Once &&once,
        Each &&each) {
        const Tiles tiles(rows, codes.panels, team_.size());
        Private &mine = private_[static_cast<size_t>(lane.index)];
        F *sums = mine.sums.get();
        const bool wide = Coded::WIDENS && rows > 4 * Coded::ROWS;
        if (wide) mine.panel.reserve(codes.wide_size());
        lane.share(tiles.count(), tiles.unit(), [&](int64_t begin, int64_t end) {
            once();
            int64_t widened = -1;
            for (int64_t task = begin; task < end; task++) {
                const auto [panel, first, last] = tiles.at(task);
                CodesTask work{codes.panel(panel), codes.blocks, codes.group_blocks, !wide};
                if constexpr (Coded::WIDENS)
                    if (wide) {
                        if (panel != widened) widen_panel<P>(codes, work.panel, mine.panel.get());
                        widened = panel;
                        work.panel = mine.panel.get();
                    }
                for (int64_t r = first; r < last;) {
                    const int64_t blocks = (last - r + Coded::ROWS - 1) / Coded::ROWS;
                    const int n = static_cast<int>((last - r + blocks - 1) / blocks);
                    product<P>(
                        n, wide ? 16 : codes.bits, codes, work, left.from(r), sums, GROUP);
                    work.ahead = false;
                    for (int i = 0; i < n; i++) each(r + i, panel, sums + i * GROUP);
                    r += n;
                }
            }
        });
    }

    // A row as integers of at most LARGEST, the one at k of x[at(k)]; the return is what one of them
    // stands for. A row that is not finite has a scale that is not a number.
    template <class At>
    static float integers_of(const A *x, int64_t size, At &&at, int16_t *to) {
        V most = P::zero(), odd = P::zero();
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            const V v = P::load(x + i);
            most = P::max(most, P::max(v, P::sub(P::zero(), v)));
            odd = P::add(odd, P::sub(v, v));
        }
        float top = float(P::top(most)), fault = float(P::sum(odd));
        for (; i < size; i++) {
            const float v = float(widen(x[i]));
            top = std::max(top, std::abs(v));
            fault += v - v;
        }
        const float inverse = top > 0 ? LARGEST / top : 0.0f;
        const auto integer = [&](A v) {
            // 1.5 * 2^23 leaves the nearest integer, the even one of two, in the low bits.
            const float rounded = float(widen(v)) * inverse + 12582912.0f;
            uint32_t bits;
            std::memcpy(&bits, &rounded, sizeof bits);
            return static_cast<int16_t>(bits - 0x4b400000u);
        };
        for (int64_t k = 0; k < size; k++) to[k] = integer(x[at(k)]);
        return top / LARGEST + fault;
    }

    template <class Once, class Each>
    void multiply_plain(
        Lane &lane, const Matrix<P> &matrix, const A *x, int64_t ldx, int64_t rows, Once &&once,
        Each &&each) {
        const Tiles tiles(rows, matrix.groups, team_.size());
        F *sums = private_[static_cast<size_t>(lane.index)].sums.get();
        lane.share(tiles.count(), tiles.unit(), [&](int64_t begin, int64_t end) {
            once();
            auto tile = tiles.at(begin);
            for (int64_t task = begin; task < end; task++) {
                const auto [g, first, last] = tile;
                if (task + 1 < end) tile = tiles.at(task + 1);
                const bool leaves = task + 1 == end || tile.group != g;
                // The first block of rows reads the panel from memory; while the last one computes
                // on what is in the cache, half of the next panel can be on its way.
                Ahead ahead{GROUP * STREAM_STEPS, matrix.steps};
                for (int64_t r = first; r < last;) {
                    const int n = block_rows<P>(last - r);
                    if (r > first)
                        ahead = {matrix.steps * GROUP,
                                 leaves && last - r == n ? matrix.steps / 2 : 0};
                    product<P>(
                        n, x + r * ldx, ldx, matrix.panel(g), matrix.steps, sums, GROUP, false,
                        ahead);
                    for (int i = 0; i < n; i++) each(r + i, g, sums + i * GROUP);
                    r += n;
                }
            }
        });
    }

    static void store_row(F *to, int64_t size, int64_t group, const F *c, const F *bias) {
        const int64_t first = group * GROUP;
        const int64_t n = std::min<int64_t>(GROUP, size - first);
        to += first;
        if (n == GROUP) {
            for (int i = 0; i < GROUP; i += W) {
                const V sum = P::load(c + i);
                P::store(to + i, bias ? P::add(sum, P::load(bias + first + i)) : sum);
            }
            return;
        }
        for (int64_t i = 0; i < n; i++) to[i] = bias ? c[i] + bias[first + i] : c[i];
    }

    static void add_row(F *to, const F *c) {
        for (int i = 0; i < GROUP; i += W) P::store(to + i, P::add(P::load(to + i), P::load(c + i)));
    }

    // c: 16 of gate, 16 of up. GELU's tanh form is x * sigmoid(2u), SiLU is x * sigmoid(x).
    void activate(const F *c, A *to) const {
        const V one = P::set1(1), none = P::zero();
        for (int i = 0; i < 16; i += W) {
            const V x = P::load(c + i), up = P::load(c + 16 + i);
            V u = x;
            if (s_.gelu_tanh) {
                const V cube = P::mul(P::mul(x, x), x);
                const V inner = P::fma(P::set1(F(0.044715)), cube, x);
                u = P::mul(P::set1(F(1.5957691216057308)), inner);
            }
            const V gate = P::div(x, P::add(one, P::exp(P::sub(none, u))));
            P::store(to + i, P::mul(gate, up));
        }
    }

    void normalise(const F *x, const F *weight, int64_t size, A *to) const {
        V squares = P::zero();
        const int64_t padded = round_up(size, W);
        for (int64_t i = 0; i < padded; i += W) {
            const V v = P::load(x + i);
            squares = P::fma(v, v, squares);
        }
        const V factor = P::set1(F(1) / std::sqrt(P::sum(squares) / F(size) + F(s_.norm_eps)));
        for (int64_t i = 0; i < padded; i += W)
            P::store(to + i, P::mul(P::mul(P::load(x + i), factor), P::load(weight + i)));
    }

    // --- one pass ------------------------------------------------------------------------------

    void pass(Lane &lane, const tailrace_step &step) {
        const int64_t tokens = step.tokens, sampled = step.sampled;
        F *x = residual_.get();
        const auto over_rows = [&](int64_t rows, auto &&body) {
            const int64_t unit = Tiles::unit_of(rows, team_.size());
            lane.share(rows, unit, [&](int64_t begin, int64_t end) {
                for (int64_t r = begin; r < end; r++) body(r);
            });
        };
        const auto normal = [&](const Buffer<F> &weight) {
            const auto make = [&, scale = weight.get()](int64_t r, A *to) {
                normalise(x + r * hidden_, scale, s_.hidden, to);
            };
            return Source<decltype(make)>{normed_.get(), hidden_, make};
        };
        over_rows(tokens, [&](int64_t r) { embed(step.ids[r], x + r * hidden_); });
        for (int64_t l = 0; l < s_.layers; l++) {
            const Layer &layer = layers_[static_cast<size_t>(l)];
            const bool final = l + 1 == s_.layers;
            multiply(
                lane, layer.qkv, normal(layer.attn_norm), tokens,
                [&](int64_t r, int64_t g, const F *c) {
                    store_row(
                        qkv_.get() + r * padded_qkv_, padded_qkv_, g, c, layer.bias.get());
                });
            // Behind the last attention nothing mixes tokens: only the wanted rows go on.
            const auto &list = final ? wanted_ : all_;
            const bool together = single_ && pieces_.empty() && (!final || wanted_is_all_);
            if (!together) rotate_all(lane, step, l);
            attend_all(lane, step, l, list, together);
            const int64_t rows = final ? sampled : tokens;
            if (final) {
                over_rows(rows, [&](int64_t r) {
                    std::copy_n(x + step.last[r] * hidden_, hidden_, kept_.get() + r * hidden_);
                });
                x = kept_.get();
            }
            const auto onto = [&](int64_t r, int64_t g, const F *c) {
                add_row(x + r * hidden_ + g * GROUP, c);
            };
            multiply(lane, layer.o, there(attention_.get(), attended_), rows, onto);
            multiply(
                lane, layer.gate_up, normal(layer.mlp_norm), rows,
                [&](int64_t r, int64_t g, const F *c) {
                    activate(c, inside_.get() + r * inner_ + g * 16);
                });
            multiply(lane, layer.down, there(inside_.get(), inner_), rows, onto);
        }
        F *logits = static_cast<F *>(step.logits);
        multiply(
            lane, head_, normal(norm_), sampled,
            [&](int64_t r, int64_t g, const F *c) {
                store_row(logits + r * s_.vocab, s_.vocab, g, c, nullptr);
            });
    }

    void embed(int64_t id, F *to) const {
        const KV *from = embed_ + id * s_.hidden;
        int64_t i = 0;
        for (; i + W <= s_.hidden; i += W) P::store(to + i, P::load(from + i));
        for (; i < s_.hidden; i++) to[i] = widen(from[i]);
        // A NaN in another pass's row must not live on in the padding.
        for (; i < hidden_; i++) to[i] = 0;
    }

    bool integers() const { return P::INTEGERS && s_.kv_codes; }

    // The keys, or the values, of one layer in one block.
    uint8_t *page(const tailrace_step &step, int64_t block, int64_t layer, int value) const {
        const int64_t row = s_.kv_codes ? s_.head_dim + int64_t(sizeof(float))
                                        : s_.head_dim * int64_t(sizeof(KV));
        return static_cast<uint8_t *>(step.pool) +
               ((block * s_.layers + layer) * 2 + value) * step.block_tokens * s_.kv_heads * row;
    }
    template <class Row>
    Row *cached(
        const tailrace_step &step, int64_t block, int64_t layer, int value, int64_t offset,
        int64_t kv_head) const {
        return reinterpret_cast<Row *>(page(step, block, layer, value)) + offset * kv_size_ +
               kv_head * s_.head_dim;
    }
    float *scale(
        const tailrace_step &step, int64_t block, int64_t layer, int value, int64_t offset,
        int64_t kv_head) const {
        uint8_t *codes = page(step, block, layer, value);
        return reinterpret_cast<float *>(codes + step.block_tokens * kv_size_) +
               kv_head * step.block_tokens + offset;
    }

    // q into its buffer, k and v into the pool.
    void rotate_all(Lane &lane, const tailrace_step &step, int64_t l) {
        const int64_t unit = Tiles::unit_of(step.tokens, team_.size());
        lane.share(step.tokens, unit, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++)
                for (int64_t h = 0; h < s_.kv_heads; h++) rotate_group(step, l, t, h);
        });
    }

    // The same for the heads that share one of k and v.
    void rotate_group(const tailrace_step &step, int64_t l, int64_t t, int64_t kv_head) {
        const Layer &layer = layers_[static_cast<size_t>(l)];
        const int64_t dim = s_.head_dim, half = dim / 2;
        F *row = qkv_.get() + t * padded_qkv_;
        const F *cos = static_cast<const F *>(step.cos) + step.positions[t] * half;
        const F *sin = static_cast<const F *>(step.sin) + step.positions[t] * half;
        for (int64_t h = kv_head * share_; h < (kv_head + 1) * share_; h++) {
            if (s_.qk_norm) normalise_head(row + h * dim, layer.q_norm.get());
            rotate(row + h * dim, cos, sin, q_.get() + t * q_size_ + h * dim);
        }
        const int64_t block = step.slots[t] / step.block_tokens;
        const int64_t offset = step.slots[t] % step.block_tokens;
        F *key = row + q_size_ + kv_head * dim;
        if (s_.qk_norm) normalise_head(key, layer.k_norm.get());
        const F *value = row + q_size_ + kv_size_ + kv_head * dim;
        if (s_.kv_codes) {
            rotate(key, cos, sin, key);
            for (int v : {0, 1})
                *scale(step, block, l, v, offset, kv_head) = codes_of(
                    v ? value : key, dim, cached<int8_t>(step, block, l, v, offset, kv_head));
            return;
        }
        rotate(key, cos, sin, cached<KV>(step, block, l, 0, offset, kv_head));
        KV *to = cached<KV>(step, block, l, 1, offset, kv_head);
        int64_t i = 0;
        for (; i + W <= dim; i += W) P::store(to + i, P::load(value + i));
        for (; i < dim; i++) narrow(value[i], to[i]);
    }

    // A row as integers of at most LARGEST_CODE; the return is what one of them stands for. A row that
    // is not finite has a scale that is not a number.
    static float codes_of(const F *x, int64_t size, int8_t *to) {
        V most = P::zero(), odd = P::zero();
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            const V v = P::load(x + i);
            most = P::max(most, P::max(v, P::sub(P::zero(), v)));
            odd = P::add(odd, P::sub(v, v));
        }
        F top = P::top(most), fault = P::sum(odd);
        for (; i < size; i++) {
            top = std::max(top, std::abs(x[i]));
            fault += x[i] - x[i];
        }
        const float scale = float(top / F(LARGEST_CODE));
        const F unit = scale > 0 ? F(scale) : F(1);
        // 1.5 * 2^23 (2^52) leaves no fraction: the nearest integer, the even one of two.
        constexpr F large = EXACT ? F(6755399441055744.0) : F(12582912.0);
        // What is not a number comes out as a bound.
        const auto put = [&](int64_t at, F code) {
            to[at] = static_cast<int8_t>(
                std::max(F(-LARGEST_CODE), std::min(F(LARGEST_CODE), code)));
        };
        for (i = 0; i + W <= size; i += W) {
            const V code = P::add(P::div(P::load(x + i), P::set1(unit)), P::set1(large));
            F codes[W];
            P::store(codes, P::sub(code, P::set1(large)));
            for (int j = 0; j < W; j++) put(i + j, codes[j]);
        }
        for (; i < size; i++) put(i, (x[i] / unit + large) - large);
        return scale + float(fault);
    }

    void normalise_head(F *x, const F *weight) const {
        F squares = 0;
        for (int64_t i = 0; i < s_.head_dim; i++) squares += x[i] * x[i];
        const F factor = F(1) / std::sqrt(squares / F(s_.head_dim) + F(s_.norm_eps));
        for (int64_t i = 0; i < s_.head_dim; i++) x[i] = x[i] * factor * weight[i];
    }

    // The pairs (x[i], x[i + dim / 2]), as transformers has them. `to` may be x.
    template <class To>
    void rotate(const F *x, const F *cos, const F *sin, To *to) const {
        const int64_t half = s_.head_dim / 2;
        int64_t i = 0;
        for (; i + W <= half; i += W) {
            const V a = P::load(x + i), b = P::load(x + half + i);
            const V c = P::load(cos + i), s = P::load(sin + i);
            P::store(to + i, P::sub(P::mul(a, c), P::mul(b, s)));
            P::store(to + half + i, P::add(P::mul(b, c), P::mul(a, s)));
        }
        for (; i < half; i++) {
            const F a = x[i], b = x[half + i];
            narrow(a * cos[i] - b * sin[i], to[i]);
            narrow(b * cos[i] + a * sin[i], to[half + i]);
        }
    }

    // --- attention -----------------------------------------------------------------------------

    void plan(const tailrace_step &step) {
        all_.clear();
        wanted_.clear();
        request_of_.resize(static_cast<size_t>(step.tokens));
        // Tokens that are alone in their requests need no other token's key of this step.
        single_ = true;
        for (int64_t r = 0; r < step.requests; r++) {
            single_ = single_ && step.cu_q[r + 1] - step.cu_q[r] == 1;
            for (int64_t t = step.cu_q[r]; t < step.cu_q[r + 1]; t++) {
                request_of_[static_cast<size_t>(t)] = r;
                append(all_, step, t, t);
            }
        }
        wanted_is_all_ = step.sampled == step.tokens;
        for (int64_t i = 0; i < step.sampled; i++) {
            append(wanted_, step, step.last[i], i);
            wanted_is_all_ = wanted_is_all_ && step.last[i] == i;
        }
        // The longest first: what is claimed last should end soon.
        for (auto *list : {&all_, &wanted_})
            std::stable_sort(list->begin(), list->end(), [](const Queries &a, const Queries &b) {
                return (a.position + a.count) * a.count > (b.position + b.count) * b.count;
            });
        divide();
    }

    // Spans as tasks of their own, where there are too few tasks for the threads otherwise.
    void divide() {
        pieces_.clear();
        const int64_t tasks = static_cast<int64_t>(all_.size()) * s_.kv_heads;
        if (!single_ || !wanted_is_all_ || team_.size() == 1 || tasks >= 4 * team_.size()) return;
        int64_t most = 0;
        for (const Queries &queries : all_) most = std::max(most, stop_key(queries));
        if (most <= SPAN) return;
        for (size_t i = 0; i < all_.size(); i++) {
            const int64_t stop = stop_key(all_[i]);
            for (int64_t begin = first_key(all_[i]) / KEYS * KEYS; begin < stop;) {
                const int64_t end = std::min((begin / SPAN + 1) * SPAN, stop);
                pieces_.push_back({static_cast<int64_t>(i), begin, end});
                begin = end;
            }
        }
        partial_.reserve(
            static_cast<int64_t>(pieces_.size()) * s_.kv_heads * share_ * (padded_dim_ + 2));
    }

    void append(
        std::vector<Queries> &list, const tailrace_step &step, int64_t token, int64_t row) const {
        const int64_t request = request_of_[static_cast<size_t>(token)];
        if (!list.empty()) {
            Queries &open = list.back();
            if (open.request == request && open.token + open.count == token &&
                open.row + open.count == row && open.count < query_tokens_) {
                open.count++;
                return;
            }
        }
        const int64_t position = step.kv_lens[request] - (step.cu_q[request + 1] - token);
        list.push_back({request, token, row, position, 1});
    }

    // A task is some queries, one head of k and v, and keys [begin, stop) of those that they see.
    struct Task {
        const Queries *queries = nullptr;
        int64_t kv_head = 0, begin = 0, stop = 0;
    };

    Task whole(const std::vector<Queries> &list, int64_t task) const {
        const Queries &queries = list[static_cast<size_t>(task / s_.kv_heads)];
        return {
            &queries, task % s_.kv_heads, first_key(queries) / KEYS * KEYS, stop_key(queries)};
    }

    // rotates: whether q, k and v come from the tasks too.
    void attend_all(
        Lane &lane, const tailrace_step &step, int64_t layer, const std::vector<Queries> &list,
        bool rotates) {
        const int64_t tasks = static_cast<int64_t>(list.size()) * s_.kv_heads;
        if (!pieces_.empty()) return attend_pieces(lane, step, layer, list);
        each_task(
            lane, step, layer, tasks, [&](int64_t task) { return whole(list, task); },
            [&](int64_t, const Task &task, const Task &next, Private &mine) {
                if (rotates) rotate_group(step, layer, task.queries->token, task.kv_head);
                attend(task, next, step, layer, mine);
                finish(task, mine.joined.get(), mine.joined_total.get());
            });
    }

    // Few queries with many keys: their spans are tasks of their own, joined in the same order.
    void attend_pieces(
        Lane &lane, const tailrace_step &step, int64_t layer, const std::vector<Queries> &list) {
        const int64_t ld = padded_dim_, size = share_ * (ld + 2);
        each_task(
            lane, step, layer, static_cast<int64_t>(pieces_.size()) * s_.kv_heads,
            [&](int64_t task) {
                const Piece &piece = pieces_[static_cast<size_t>(task / s_.kv_heads)];
                const Queries &queries = list[static_cast<size_t>(piece.queries)];
                return Task{&queries, task % s_.kv_heads, piece.begin, piece.stop};
            },
            [&](int64_t number, const Task &task, const Task &next, Private &mine) {
                attend(task, next, step, layer, mine);
                F *to = partial_.get() + number * size;
                std::copy_n(mine.joined.get(), share_ * ld, to);
                std::copy_n(mine.joined_top.get(), share_, to + share_ * ld);
                std::copy_n(mine.joined_total.get(), share_, to + share_ * (ld + 1));
            });
        lane.share(static_cast<int64_t>(list.size()) * s_.kv_heads, [&](int64_t begin, int64_t end) {
            for (int64_t number = begin; number < end; number++) {
                const Task task = whole(list, number);
                F *joined = nullptr;
                for (size_t i = 0; i < pieces_.size(); i++) {
                    if (pieces_[i].queries != number / s_.kv_heads) continue;
                    const int64_t at = static_cast<int64_t>(i) * s_.kv_heads + task.kv_head;
                    F *piece = partial_.get() + at * size;
                    if (joined)
                        join(
                            share_, joined, joined + share_ * ld, joined + share_ * (ld + 1), piece,
                            piece + share_ * ld, piece + share_ * (ld + 1));
                    else
                        joined = piece;
                }
                finish(task, joined, joined + share_ * (ld + 1));
            }
        });
    }

    template <class Find, class Each>
    void each_task(
        Lane &lane, const tailrace_step &step, int64_t layer, int64_t tasks, Find &&find,
        Each &&each) {
        Private &mine = private_[static_cast<size_t>(lane.index)];
        lane.share(tasks, [&](int64_t begin, int64_t end) {
            Task task = find(begin);
            locate(step, layer, task, task.begin, mine.rounds[mine.round]);
            fetch(mine.rounds[mine.round], 0, KEYS);
            for (int64_t number = begin; number < end; number++) {
                const Task next = number + 1 < end ? find(number + 1) : Task{};
                each(number, task, next, mine);
                task = next;
            }
        });
    }

    // Of the keys of `queries`, counted from position 0.
    int64_t width(const Queries &queries) const {
        return s_.window ? s_.window : queries.position + queries.count;
    }
    int64_t first_key(const Queries &queries) const {
        return std::max<int64_t>(queries.position - width(queries) + 1, 0);
    }
    static int64_t stop_key(const Queries &queries) { return queries.position + queries.count; }

    // The first round of the task is located already. next: what comes behind it, whose first round
    // is located and asked for; or nothing. The sums are in `mine.joined`.
    void attend(
        const Task &task, const Task &next, const tailrace_step &step, int64_t layer,
        Private &mine) const {
        const Queries &queries = *task.queries;
        const int64_t dim = s_.head_dim, ld = padded_dim_, group = share_;
        const int64_t rows = queries.count * group;
        const int64_t width = this->width(queries);
        const int64_t dim_steps = round_up(dim, PAIR) / PAIR;
        for (int64_t r = 0; r < rows; r++) {
            const A *from = q_.get() + (queries.token + r / group) * q_size_ +
                            (task.kv_head * group + r % group) * dim;
            if constexpr (P::INTEGERS)
                if (s_.kv_codes) {
                    mine.q_scale[r] =
                        integers_of(
                            from, dim, [](int64_t k) { return P::place_of(k); },
                            mine.whole_q.get() + r * ld);
                    continue;
                }
            std::copy_n(from, dim, mine.q.get() + r * ld);
        }
        for (int64_t base = task.begin; base < task.stop; base += KEYS) {
            if (base == task.begin || base % SPAN == 0) {
                std::fill_n(mine.out.get(), rows * ld, F(0));
                std::fill_n(mine.top.get(), rows, -std::numeric_limits<F>::infinity());
                std::fill_n(mine.total.get(), rows, F(0));
            }
            const int64_t high = std::min<int64_t>(task.stop - base, KEYS);
            Round &coming = mine.rounds[1 - mine.round];
            const bool more = base + KEYS < task.stop;
            if (more)
                locate(step, layer, task, base + KEYS, coming);
            else if (next.queries)
                locate(step, layer, next, next.begin, coming);
            gather(mine.rounds[mine.round], more || next.queries ? &coming : nullptr, high, mine);
            mine.round = 1 - mine.round;
            // Tokens before see nothing of these keys yet, those behind nothing any more.
            const int64_t from = std::max<int64_t>(base - queries.position, 0) * group;
            const int64_t to =
                std::min(base + high - 1 + width - queries.position, queries.count) * group;
            const int64_t panels = round_up(high, GROUP) / GROUP;
            const int64_t value_steps = round_up(high, PAIR) / PAIR;
            for (int64_t r = from; r < to;) {
                const int n = block_rows<P>(to - r);
                for (int64_t g = 0; g < panels; g++) {
                    const T *keys = mine.keys.get() + g * dim_steps * GROUP;
                    F *scores = mine.scores.get() + r * KEYS + g * GROUP;
                    if constexpr (P::INTEGERS)
                        if (s_.kv_codes) {
                            integer_product<P>(
                                n, mine.whole_q.get() + r * ld, ld, keys, dim_steps,
                                mine.q_scale.get() + r, scores, KEYS, false);
                            continue;
                        }
                    product<P>(n, mine.q.get() + r * ld, ld, keys, dim_steps, scores, KEYS, false);
                }
                for (int i = 0; i < n; i++) {
                    const int64_t position = queries.position + (r + i) / group - base;
                    soften(
                        r + i, std::max<int64_t>(position - width + 1, 0),
                        std::min(position + 1, high), panels * GROUP, mine);
                }
                for (int64_t g = 0; g < ld / GROUP; g++) {
                    const T *values = mine.values.get() + g * (KEYS / PAIR) * GROUP;
                    F *out = mine.out.get() + r * ld + g * GROUP;
                    if constexpr (P::INTEGERS)
                        if (s_.kv_codes) {
                            integer_product<P>(
                                n, mine.whole_p.get() + r * KEYS, KEYS, values, value_steps,
                                mine.p_scale.get() + r, out, ld, true);
                            continue;
                        }
                    product<P>(
                        n, mine.p.get() + r * KEYS, KEYS, values, value_steps, out, ld, true);
                }
                r += n;
            }
            if (more && (base + KEYS) % SPAN != 0) continue;
            if (base / SPAN == task.begin / SPAN) {
                std::swap(mine.joined, mine.out);
                std::swap(mine.joined_top, mine.top);
                std::swap(mine.joined_total, mine.total);
            } else {
                join(
                    rows, mine.joined.get(), mine.joined_top.get(), mine.joined_total.get(),
                    mine.out.get(), mine.top.get(), mine.total.get());
            }
        }
    }

    // Adds the sums over one span to those over the spans before.
    void join(
        int64_t rows, F *out, F *top, F *total, const F *more, const F *more_top,
        const F *more_total) const {
        for (int64_t r = 0; r < rows; r++) {
            // A row that saw nothing of the span.
            if (more_top[r] == -std::numeric_limits<F>::infinity() && more_total[r] == 0) continue;
            const F most = std::max(top[r], more_top[r]);
            const F mine = std::exp(top[r] - most), other = std::exp(more_top[r] - most);
            total[r] = total[r] * mine + more_total[r] * other;
            F *to = out + r * padded_dim_;
            const F *from = more + r * padded_dim_;
            for (int64_t i = 0; i < padded_dim_; i += W)
                P::store(
                    to + i, P::add(
                                P::mul(P::load(to + i), P::set1(mine)),
                                P::mul(P::load(from + i), P::set1(other))));
            top[r] = most;
        }
    }

    void finish(const Task &task, const F *out, const F *total) const {
        const Queries &queries = *task.queries;
        const int64_t dim = s_.head_dim;
        for (int64_t r = 0; r < queries.count * share_; r++) {
            const F inverse = F(1) / total[r];
            const F *from = out + r * padded_dim_;
            A *to = attention_.get() + (queries.row + r / share_) * attended_ +
                    (task.kv_head * share_ + r % share_) * dim;
            int64_t i = 0;
            for (; i + W <= dim; i += W)
                P::store(to + i, P::mul(P::load(from + i), P::set1(inverse)));
            for (; i < dim; i++) narrow(from[i] * inverse, to[i]);
        }
    }

    // Online softmax of one row over keys [low, high) of this round; the others weigh 0.
    void soften(int64_t row, int64_t low, int64_t high, int64_t size, Private &mine) const {
        constexpr F none = -std::numeric_limits<F>::infinity();
        F *scores = mine.scores.get() + row * KEYS;
        if (s_.kv_codes)
            for (int64_t i = 0; i < size; i += W)
                P::store(scores + i, P::mul(P::load(scores + i), P::load(mine.key_scales.get() + i)));
        for (int64_t i = 0; i < low; i++) scores[i] = none;
        for (int64_t i = high; i < size; i++) scores[i] = none;
        const V scale = P::set1(scale_);
        V most = P::set1(none);
        for (int64_t i = 0; i < size; i += W) most = P::max(most, P::load(scores + i));
        const F top = std::max(mine.top[row], P::top(most) * scale_);
        const V shift = P::set1(top);
        V sum = P::zero();
        // Values that are codes weigh what they stand for.
        const F *units = s_.kv_codes ? mine.value_scales.get() : nullptr;
        const auto weigh = [&](auto &&put) {
            for (int64_t i = 0; i < size; i += W) {
                const V weight = P::exp(P::sub(P::mul(P::load(scores + i), scale), shift));
                sum = P::add(sum, weight);
                put(i, units ? P::mul(weight, P::load(units + i)) : weight);
            }
        };
        if constexpr (P::INTEGERS)
            if (units) {
                V heaviest = P::zero(), odd = P::zero();
                weigh([&](int64_t i, V weight) {
                    heaviest = P::max(heaviest, weight);
                    odd = P::add(odd, P::sub(weight, weight));
                    P::store(scores + i, weight);
                });
                const F largest = P::top(heaviest);
                const V inverse = P::set1(largest > 0 ? F(LARGEST) / largest : F(0));
                int16_t *p = mine.whole_p.get() + row * KEYS;
                for (int64_t i = 0; i < size; i += W)
                    P::store_integers(p + i, P::mul(P::load(scores + i), inverse));
                mine.p_scale[row] = largest / F(LARGEST) + P::sum(odd);
            }
        if (!P::INTEGERS || !units) {
            A *p = mine.p.get() + row * KEYS;
            weigh([&](int64_t i, V weight) { P::store(p + i, weight); });
        }
        if (top > mine.top[row]) {
            const F shrink = std::exp(mine.top[row] - top);
            mine.total[row] *= shrink;
            F *out = mine.out.get() + row * padded_dim_;
            for (int64_t i = 0; i < padded_dim_; i += W)
                P::store(out + i, P::mul(P::load(out + i), P::set1(shrink)));
            mine.top[row] = top;
        }
        mine.total[row] += P::sum(sum);
    }

    // found(position, count, block, offset) for every run of positions that lie one behind another.
    template <class Found>
    void each_run(
        const tailrace_step &step, int64_t request, int64_t from, int64_t to, Found &&found) const {
        const int32_t *table = step.block_table + request * step.columns;
        int64_t block = from / step.block_tokens, offset = from % step.block_tokens;
        for (; from < to; block++, offset = 0) {
            const int64_t count = std::min(step.block_tokens - offset, to - from);
            found(from, count, table[block], offset);
            from += count;
        }
    }

    // The keys of a task from position `base` on, a round of them.
    void locate(
        const tailrace_step &step, int64_t layer, const Task &task, int64_t base,
        Round &round) const {
        const Queries &queries = *task.queries;
        const int64_t low = std::max(first_key(queries), base);
        const int64_t high = std::min(task.stop, base + KEYS);
        for (int v : {0, 1}) {
            std::fill_n(round.numbers[v], s_.kv_codes ? 0 : KEYS, nullptr);
            std::fill_n(round.codes[v], s_.kv_codes ? KEYS : 0, nullptr);
        }
        round.num_runs = 0;
        each_run(
            step, queries.request, low, high,
            [&](int64_t position, int64_t count, int64_t block, int64_t offset) {
                const int64_t first = position - base;
                auto &run = round.runs[round.num_runs++];
                run = {first, count, {}};
                for (int v : {0, 1}) {
                    const auto line_up = [&](const auto *row, const auto **to) {
                        for (int64_t i = 0; i < count; i++) to[first + i] = row + i * kv_size_;
                    };
                    if (!s_.kv_codes) {
                        line_up(
                            cached<KV>(step, block, layer, v, offset, task.kv_head),
                            round.numbers[v]);
                        continue;
                    }
                    line_up(
                        cached<int8_t>(step, block, layer, v, offset, task.kv_head),
                        round.codes[v]);
                    run.scales[v] = scale(step, block, layer, v, offset, task.kv_head);
                }
            });
    }

    // Asks memory for keys and values [from, to) of a round. Inlined, since GCC takes a call that
    // does nothing else for one without effect, and drops it.
    [[gnu::always_inline]] void fetch(const Round &round, int64_t from, int64_t to) const {
        const int64_t bytes = s_.head_dim * (s_.kv_codes ? 1 : int64_t(sizeof(KV)));
        for (int64_t i = from; i < to; i++)
            for (int v : {0, 1}) {
                const void *row = s_.kv_codes ? static_cast<const void *>(round.codes[v][i])
                                              : round.numbers[v][i];
                if (row)
                    for (int64_t b = 0; b < bytes; b += 64)
                        __builtin_prefetch(static_cast<const char *>(row) + b, 0, 2);
            }
        if (!s_.kv_codes) return;
        for (int64_t r = 0; r < round.num_runs; r++) {
            const auto &run = round.runs[r];
            if (run.first < from || run.first >= to) continue;
            for (int v : {0, 1})
                for (int64_t i = 0; i < run.count; i += 16)
                    __builtin_prefetch(run.scales[v] + i, 0, 2);
        }
    }

    // The first `high` keys of a round as panels, and the round that comes asked for meanwhile. Keys
    // that are left out and those that fill up a panel are zero: what lies in the pool there may be
    // anything, even NaN.
    void gather(const Round &round, const Round *coming, int64_t high, Private &mine) const {
        const int64_t steps = round_up(s_.head_dim, PAIR) / PAIR;
        const int64_t key_panels = round_up(high, GROUP) / GROUP;
        const int64_t panels = key_panels + padded_dim_ / GROUP;
        for (int64_t g = 0; g < panels; g++) {
            if (coming) fetch(*coming, g * KEYS / panels, (g + 1) * KEYS / panels);
            const auto pack = [&](const auto &rows) {
                if (g < key_panels)
                    P::pack_keys(
                        rows[0] + g * GROUP, s_.head_dim, mine.keys.get() + g * steps * GROUP);
                else
                    P::pack_values(
                        rows[1], round_up(high, PAIR) / PAIR, (g - key_panels) * GROUP,
                        s_.head_dim, mine.values.get() + (g - key_panels) * (KEYS / PAIR) * GROUP);
            };
            if (s_.kv_codes)
                pack(round.codes);
            else
                pack(round.numbers);
        }
        if (!s_.kv_codes) return;
        std::fill_n(mine.key_scales.get(), KEYS, F(0));
        std::fill_n(mine.value_scales.get(), KEYS, F(0));
        for (int64_t r = 0; r < round.num_runs; r++) {
            const auto &run = round.runs[r];
            std::copy_n(run.scales[0], run.count, mine.key_scales.get() + run.first);
            std::copy_n(run.scales[1], run.count, mine.value_scales.get() + run.first);
        }
    }

    // --- arguments -----------------------------------------------------------------------------

    const char *check(const tailrace_step &s) const {
        const int64_t capacity = s.num_blocks * s.block_tokens;
        if (s.tokens < 0 || s.requests < 0 || s.block_tokens < 1) return "negative sizes";
        for (int64_t t = 0; t < s.tokens; t++) {
            if (s.ids[t] < 0 || s.ids[t] >= s_.vocab) return "a token id outside the vocabulary";
            if (s.positions[t] < 0 || s.positions[t] >= s.angles)
                return "a position outside the rotation's table";
            if (s.slots[t] < 0 || s.slots[t] >= capacity) return "a slot outside the pool";
        }
        if (s.requests && s.cu_q[0] != 0) return "cu_q does not begin at 0";
        if ((s.requests ? s.cu_q[s.requests] : 0) != s.tokens) return "cu_q does not end at tokens";
        for (int64_t r = 0; r < s.requests; r++) {
            const int64_t count = s.cu_q[r + 1] - s.cu_q[r], keys = s.kv_lens[r];
            if (count < 0) return "cu_q decreases";
            if (count > keys) return "a request has more queries than keys";
            const int64_t used = (keys + s.block_tokens - 1) / s.block_tokens;
            if (used > s.columns) return "more keys than the block table has columns for";
            const int64_t first =
                s_.window ? std::max<int64_t>(keys - count - s_.window + 1, 0) / s.block_tokens : 0;
            for (int64_t i = count ? first : used; i < used; i++) {
                const int64_t block = s.block_table[r * s.columns + i];
                if (block < 0 || block >= s.num_blocks)
                    return "the block table names a block outside the pool";
            }
        }
        for (int64_t i = 0; i < s.sampled; i++)
            if (s.last[i] < 0 || s.last[i] >= s.tokens) return "a wanted row outside the batch";
        return nullptr;
    }

    const tailrace_shape s_;
    const int64_t q_size_, kv_size_, qkv_size_, share_;
    const int64_t hidden_, inner_, attended_, padded_qkv_, padded_dim_, query_tokens_;
    const F scale_;
    Arena arena_;
    const KV *embed_ = nullptr;
    std::vector<Layer> layers_;
    Buffer<F> norm_;
    Weight head_;
    // Rows are padded to whole panels; the padding is zero from the allocation on.
    Scratch<F> residual_, qkv_, kept_;
    Scratch<A> normed_, q_, attention_, inside_;
    Rows coded_;
    int64_t widest_ = 0;  // inputs of the widest matrix of codes
    // Keys [begin, stop) of some queries.
    struct Piece {
        int64_t queries, begin, stop;
    };

    std::vector<Queries> all_, wanted_;
    std::vector<Piece> pieces_;
    Scratch<F> partial_;
    bool single_ = false, wanted_is_all_ = false;
    std::vector<int64_t> request_of_;
    std::vector<Private> private_;
    Team team_;
};
