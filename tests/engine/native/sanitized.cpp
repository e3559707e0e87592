// Drives the C interface with buffers of exactly the size it is promised, under the sanitizers.
// Prints how many passes it compared; a fault or a difference ends it with a message.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "abi.h"

static std::mt19937 source(1);

static void fail(const char *what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// `count` numbers in the dtype's bytes, in a block of their own.
struct Numbers {
    std::unique_ptr<unsigned char[]> bytes;
    Numbers(int dtype, int64_t count, double centre, double spread) {
        static const int sizes[] = {4, 2, 8};
        bytes.reset(new unsigned char[static_cast<size_t>(count * sizes[dtype])]);
        std::normal_distribution<double> normal(centre, spread);
        for (int64_t i = 0; i < count; i++) {
            const double x = spread == 0 ? centre : normal(source);
            const float y = static_cast<float>(x);
            if (dtype == TAILRACE_FLOAT64)
                std::memcpy(bytes.get() + i * 8, &x, 8);
            else if (dtype == TAILRACE_FLOAT32)
                std::memcpy(bytes.get() + i * 4, &y, 4);
            else
                std::memcpy(bytes.get() + i * 2, reinterpret_cast<const char *>(&y) + 2, 2);
        }
    }
};

struct Request {
    int64_t queries, keys;
};

static int64_t passes = 0;

// A matrix of codes whose bytes are all in blocks of their own.
struct Coded {
    std::unique_ptr<uint8_t[]> codes;
    std::unique_ptr<float[]> scales, minimums;
    std::unique_ptr<int32_t[]> order;
    tailrace_codes view;
    Coded(int64_t out, int64_t in, int64_t bits, int64_t group, bool minimum, bool narrow) {
        const int64_t groups = (in + group - 1) / group, count = out * groups;
        codes.reset(new uint8_t[static_cast<size_t>(out * in)]);
        for (int64_t i = 0; i < out * in; i++)
            codes[static_cast<size_t>(i)] = static_cast<uint8_t>(source() % (1u << bits));
        const auto numbers = [&](double spread) {
            std::unique_ptr<float[]> to(new float[static_cast<size_t>(count)]);
            for (int64_t i = 0; i < count; i++)
                to[static_cast<size_t>(i)] = narrow ? 0.015625f : static_cast<float>(spread / 3);
            return to;
        };
        scales = numbers(bits == 4 ? 0.05 : 0.003);
        if (minimum) minimums = numbers(-0.1);
        order.reset(new int32_t[static_cast<size_t>(in)]);
        for (int64_t i = 0; i < in; i++)
            order[static_cast<size_t>(i)] = static_cast<int32_t>(in - 1 - i);
        view = {bits, group, codes.get(), scales.get(), minimums.get(), order.get()};
    }
};

// `codes`: 0, or the bits of the matrices.
static void exercise(const tailrace_shape &shape, int64_t block_tokens, int64_t codes) {
    void *decoder = tailrace_create(&shape);
    if (!decoder) fail("no decoder");
    const int dtype = shape.dtype;
    std::vector<Numbers> kept;
    const auto load = [&](int part, int64_t layer, std::vector<int64_t> sizes, double centre) {
        std::vector<const void *> pointers;
        std::vector<Numbers> own;
        for (int64_t size : sizes) own.emplace_back(dtype, size, centre, 0.2);
        for (auto &numbers : own) pointers.push_back(numbers.bytes.get());
        if (const char *fault = tailrace_load(decoder, part, layer, pointers.data())) fail(fault);
        if (part == TAILRACE_EMBED) kept.push_back(std::move(own[0]));
    };
    const auto load_matrices = [&](int part, int64_t layer, std::vector<int64_t> outs, int64_t in) {
        if (!codes) {
            for (auto &out : outs) out *= in;
            return load(part, layer, outs, 0);
        }
        std::vector<Coded> own;
        std::vector<tailrace_codes> views;
        for (int64_t out : outs)
            own.emplace_back(out, in, codes, codes == 4 ? 32 : 64, layer == 0, layer == 0);
        for (auto &coded : own) views.push_back(coded.view);
        if (const char *fault = tailrace_load_codes(decoder, part, layer, views.data()))
            fail(fault);
    };
    const int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const int64_t hidden = shape.hidden, inner = shape.inner;
    load(TAILRACE_EMBED, 0, {shape.vocab * hidden}, 0);
    for (int64_t l = 0; l < shape.layers; l++) {
        load(TAILRACE_ATTN_NORM, l, {hidden}, 1);
        load_matrices(TAILRACE_QKV, l, {q, kv, kv}, hidden);
        if (shape.qkv_bias) load(TAILRACE_QKV_BIAS, l, {q, kv, kv}, 0);
        if (shape.qk_norm) load(TAILRACE_QK_NORM, l, {shape.head_dim, shape.head_dim}, 1);
        load_matrices(TAILRACE_O, l, {hidden}, q);
        load(TAILRACE_MLP_NORM, l, {hidden}, 1);
        load_matrices(TAILRACE_GATE_UP, l, {inner, inner}, hidden);
        load_matrices(TAILRACE_DOWN, l, {hidden}, inner);
    }
    load(TAILRACE_NORM, 0, {hidden}, 1);
    load_matrices(TAILRACE_HEAD, 0, {shape.vocab}, hidden);

    const std::vector<Request> requests = {{1, 1}, {70, 70}, {1, 67}, {9, 130}, {1, 600}};
    const int64_t columns = (600 + block_tokens - 1) / block_tokens, angles = 600;
    const int64_t num_blocks = 1 + columns * static_cast<int64_t>(requests.size());
    const int wide = dtype == TAILRACE_FLOAT64 ? TAILRACE_FLOAT64 : TAILRACE_FLOAT32;
    const size_t width = wide == TAILRACE_FLOAT64 ? 8 : 4;
    const int64_t rows = num_blocks * shape.layers * 2 * block_tokens * shape.kv_heads;
    Numbers pool(
        shape.kv_codes ? int(TAILRACE_FLOAT32) : dtype,
        shape.kv_codes ? rows * (shape.head_dim / 4 + 1) : rows * shape.head_dim,
        std::numeric_limits<double>::quiet_NaN(), 0);
    Numbers cos(wide, angles * shape.head_dim / 2, 0, 0.5);
    Numbers sin(wide, angles * shape.head_dim / 2, 0, 0.5);

    // One pass over tokens [from, keys) of the requests, each row's logits wanted.
    const auto run = [&](const std::vector<size_t> &rows, const std::vector<int64_t> &from) {
        std::vector<int64_t> ids, positions, slots, last;
        std::vector<int32_t> cu_q = {0}, kv_lens, table;
        for (size_t i = 0; i < rows.size(); i++) {
            const int64_t r = static_cast<int64_t>(rows[i]), keys = requests[rows[i]].keys;
            for (int64_t c = 0; c < columns; c++)
                table.push_back(static_cast<int32_t>(1 + r * columns + c));
            for (int64_t at = from[i]; at < keys; at++) {
                ids.push_back((7 * at + r) % shape.vocab);
                positions.push_back(at);
                slots.push_back((1 + r * columns + at / block_tokens) * block_tokens +
                                at % block_tokens);
                last.push_back(static_cast<int64_t>(last.size()));
            }
            cu_q.push_back(static_cast<int32_t>(ids.size()));
            kv_lens.push_back(static_cast<int32_t>(keys));
        }
        for (auto *list : {&ids, &positions, &slots, &last}) list->shrink_to_fit();
        std::unique_ptr<unsigned char[]> logits(
            new unsigned char[last.size() * static_cast<size_t>(shape.vocab) * width]);
        tailrace_step step{};
        step.tokens = static_cast<int64_t>(ids.size());
        step.requests = static_cast<int64_t>(rows.size());
        step.columns = columns;
        step.sampled = static_cast<int64_t>(last.size());
        step.ids = ids.data();
        step.positions = positions.data();
        step.slots = slots.data();
        step.last = last.data();
        step.cu_q = cu_q.data();
        step.kv_lens = kv_lens.data();
        step.block_table = table.data();
        step.cos = cos.bytes.get();
        step.sin = sin.bytes.get();
        step.angles = angles;
        step.pool = pool.bytes.get();
        step.num_blocks = num_blocks;
        step.block_tokens = block_tokens;
        step.logits = logits.get();
        if (const char *fault = tailrace_step_run(decoder, &step)) fail(fault);
        for (size_t i = 0; i < last.size() * static_cast<size_t>(shape.vocab); i++) {
            double x;
            float y;
            if (width == 8)
                std::memcpy(&x, logits.get() + i * 8, 8);
            else
                std::memcpy(&y, logits.get() + i * 4, 4), x = y;
            if (!std::isfinite(x)) fail("a logit that is not a number");
        }
        passes++;
        // What does not fit is refused before anything is read.
        slots[0] = num_blocks * block_tokens;
        if (!tailrace_step_run(decoder, &step)) fail("a slot behind the pool was taken");
        slots[0] = 0;
        table[0] = static_cast<int32_t>(num_blocks);
        if (!shape.window && !tailrace_step_run(decoder, &step)) fail("a block behind the pool");
        return logits;
    };
    std::vector<std::unique_ptr<unsigned char[]>> alone;
    for (size_t i = 0; i < requests.size(); i++) alone.push_back(run({i}, {0}));
    std::vector<int64_t> from;
    for (const auto &request : requests) from.push_back(request.keys - request.queries);
    const auto together = run({0, 1, 2, 3, 4}, from);
    size_t at = 0;
    const size_t row = static_cast<size_t>(shape.vocab) * width;
    // The last token of the longest by itself: several threads share its keys.
    const auto last = run({4}, {599});
    if (std::memcmp(last.get(), alone[4].get() + 599 * row, row)) fail("logits depend on the chunk");
    for (size_t i = 0; i < requests.size(); i++) {
        const size_t count = static_cast<size_t>(requests[i].queries) * row;
        const size_t begin = static_cast<size_t>(from[i]) * row;
        if (std::memcmp(together.get() + at, alone[i].get() + begin, count))
            fail("logits depend on the batch");
        at += count;
    }
    tailrace_destroy(decoder);
}

int main() {
    for (int dtype : {TAILRACE_FLOAT32, TAILRACE_BFLOAT16, TAILRACE_FLOAT64})
        for (int variant : {TAILRACE_PORTABLE, TAILRACE_AVX2, TAILRACE_AVX512}) {
            if (!(tailrace_variants(dtype) >> variant & 1)) continue;
            for (int odd : {0, 1}) {
                tailrace_shape shape{};
                shape.vocab = odd ? 37 : 64;
                shape.hidden = odd ? 19 : 32;
                shape.layers = 2;
                shape.heads = odd ? 3 : 4;
                shape.kv_heads = odd ? 1 : 2;
                shape.head_dim = odd ? 12 : 64;
                shape.inner = odd ? 21 : 48;
                shape.window = odd ? 11 : 0;
                shape.norm_eps = 1e-5;
                shape.qkv_bias = shape.qk_norm = shape.gelu_tanh = odd;
                shape.dtype = dtype;
                shape.variant = variant;
                shape.threads = 3;
                for (int64_t codes : {0, 4, 8}) exercise(shape, odd ? 5 : 16, codes);
                shape.kv_codes = 1;
                exercise(shape, odd ? 5 : 16, 0);
            }
        }
    std::printf("%lld\n", static_cast<long long>(passes));
}
