// How policies that take one term at a time hold weights and panels. Included as model.hpp is.

template <class P, class Number, class Stored>
struct Plain {
    using KV = Stored;
    using A = Number;
    using M = Stored;
    using T = Number;
    static constexpr int PAIR = 1;
    static constexpr bool INTEGERS = false;

    static M term(const KV *row, int64_t k, int64_t) { return row[k]; }

    template <int R, class Element>
    static void block(
        const A *a, int64_t lda, const Element *w, int64_t steps, Number *c, int64_t ldc, bool add,
        Ahead ahead) {
        plain_block<P, R>(a, lda, w, steps, c, ldc, add, ahead);
    }

    // Rows are numbers, or codes, which are numbers of their own until scales multiply what comes of
    // them.
    template <class Row>
    static void pack_keys(const Row *const *rows, int64_t dim, T *to) {
        for (int j = 0; j < GROUP; j++)
            for (int64_t k = 0; k < dim; k++) to[k * GROUP + j] = rows[j] ? widen(rows[j][k]) : T(0);
    }

    template <class Row>
    static void pack_values(
        const Row *const *rows, int64_t steps, int64_t first, int64_t dim, T *to) {
        const int64_t count = std::min<int64_t>(GROUP, dim - first);
        for (int64_t k = 0; k < steps; k++, to += GROUP)
            for (int64_t j = 0; j < GROUP; j++)
                to[j] = rows[k] && j < count ? widen(rows[k][first + j]) : T(0);
    }
};
