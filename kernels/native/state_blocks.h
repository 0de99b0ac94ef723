// Recurrent states in blocks of 16 tokens: a slot has the state at the last multiple of 16 tokens, and of the tokens since
// then ("pending") what the recurrence takes from them. README.md has the maths and why. The names are those of Mamba-2. In the
// gated delta rule, keys are B, what a token changes is x dt, and both its key and its query read the state, as C does.
//
// Everything is computed from the state before the block and the block's tokens up to the own one, in one order: a token's
// output has the same bits however the tokens were divided into steps.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "activations.h"
#include "cells.h"
#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int64_t GRID = 16;         // tokens of a block: as many as a vector has lanes
constexpr int32_t PLAIN = -1;        // instead of a count of pending tokens: the state is as torch operations have it, and nothing is pending
constexpr int64_t STATE_SLICE = 64;  // channels that are computed together; the rest of a head in slices of 32 and 16
constexpr int64_t STATE_AHEAD = 48;  // lines of a state that are asked for before a single token needs them

// What products multiply: pairs of bfloat16 where the model is in bfloat16 and there are instructions for them, else float32.
template <typename T>
using StateCells = std::conditional_t<BF16_PAIRS && std::is_same_v<T, uint16_t>, Bf16Cells, F32Cells>;

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Sizes of a group of heads, for windows of type T and states of type S. A word has 32 bits.
template <typename T, typename S>
struct BlockShape {
    using Cells = StateCells<T>;
    static constexpr bool PAIRS = Cells::EACH == 2, SPLIT = PAIRS && sizeof(S) == 4;
    static constexpr int64_t STEPS = GRID / Cells::EACH;  // cells of 16 tokens

    BlockShape(int64_t heads, int64_t head, int64_t n)
        : heads(heads), head(head), n(n), lanes(rounded_up(head, 16)), rows(rounded_up(n, Cells::EACH)), cells(rows / Cells::EACH),
          row(rounded_up(cells, 16)), x_at(16 + heads * GRID), b_at(x_at + heads * STEPS * lanes), pending_words(b_at + GRID * row) {}

    // A state is [heads, slices, cells, channels of a slice] words, and if SPLIT as many again for what bfloat16 leaves of
    // float32: a number's bits are its bfloat16's, rounded half up, followed by 16 zeros, plus a signed rest of 16 bits. Without pairs
    // it is [heads, slices, n, channels of a slice] numbers of type S.
    int64_t state_bytes() const { return rounded_up(heads * lanes * (PAIRS ? 4 * cells * (SPLIT ? 2 : 1) : n * sizeof(S)), 64); }
    int64_t bytes() const { return state_bytes() + 4 * pending_words; }
    int64_t rest_at() const { return heads * lanes * cells; }

    const int64_t heads, head, n;
    const int64_t lanes, rows, cells, row;  // channels of a head and inputs of a state with padding; cells of a row of B
    // Words of pending tokens: their count in the first 16; sums of dt A [heads, 16]; x dt [heads, STEPS, lanes]; B [16, row]
    const int64_t x_at, b_at, pending_words;
};

struct BlockTokens {  // of Mamba-2
    const float *steps, *log_decays;  // dt, dt A: [tokens, heads]
    const float *x, *b, *c;           // [tokens, heads * head], [tokens, n]
    const float* d;                   // [heads]
};

struct DeltaTokens {  // of the gated delta rule
    const float *betas, *log_decays;  // [tokens, heads]
    const float *k, *q;               // [tokens, n]
};

struct PlainStrides {  // of a state in the form of torch operations: from a channel, or an input, to the next
    int64_t channel, input;
};

struct Pending {  // tokens of an unfinished block
    uint32_t* words;
    int32_t count() const {
        int32_t n;
        std::memcpy(&n, words, 4);
        return n;
    }
    void set_count(int32_t n) const { std::memcpy(words, &n, 4); }
    float* sums() const { return reinterpret_cast<float*>(words + 16); }
};

// What is asked for while columns come from memory: columns STATE_AHEAD lines on, from column `from` on `skip` words further; and lines
// of `next`, one for each column.
struct StateAhead {
    const uint32_t* next;
    int64_t lines, from, skip;
};

// sum[r][w] += products of `count` cells of row r, at a + r * row + k * step, with those of columns, at b + k * ld.
template <class Cells, int R, int W>
inline ALWAYS void multiply_cells(
    Floats (&sum)[R][W], const uint32_t* a, int64_t row, int64_t step, int64_t count, const uint32_t* b, int64_t ld,
    const StateAhead* ahead = nullptr
) {
    for (int64_t k = 0; k < count; k++, a += step, b += ld) {
        if (ahead) {
            const uint32_t* far = b + STATE_AHEAD * 16 + (k < ahead->from ? 0 : ahead->skip);
            unrolled<W>([&](int w) ALWAYS { prefetch_far(far + 16 * w); });
            if (k < ahead->lines) prefetch_far(ahead->next + 16 * k);
        }
        Words column[W];
        unrolled<W>([&](int w) ALWAYS { column[w] = in_register(load_words(b + 16 * w)); });
        unrolled<R>([&](int r) ALWAYS {
            const Words x = broadcast_word(a + r * row);
            unrolled<W>([&](int w) ALWAYS { sum[r][w] = Cells::multiply(sum[r][w], x, column[w]); });
        });
    }
}

// Vectors of V that R rows are multiplied with at a time.
constexpr int beside(int rows, int v) { return v % vectors_beside(rows) ? 1 : vectors_beside(rows); }

// The products of a row of C with `count` rows of B, perhaps one more, and zeros.
template <class Cells>
inline Floats products_with(const uint32_t* c, const uint32_t* b, int64_t row, int64_t count) {
    Floats pairs[8];
    for (int i = 0; i < 8; i++) {
        if (2 * i >= count) {
            pairs[i] = zero();
            continue;
        }
        Floats sum[2] = {zero(), zero()};
        for (int64_t at = 0; at < row; at += 16) {
            const Words x = load_words(c + at);
            for (int j = 0; j < 2; j++) sum[j] = Cells::multiply(sum[j], x, load_words(b + (2 * i + j) * row + at));
        }
        pairs[i] = fold(sum[0], sum[1]);
    }
    return sums_of(pairs);
}

// Adds `decay` times a state's rows [at, at + R) of a slice, [n or cells, 16 V].
template <class Shape, typename S, int R, int V, int W>
inline ALWAYS void add_state(const S* state, int64_t rest, int64_t at, int v, Floats decay, Floats (&sum)[R][W]) {
    if constexpr (Shape::PAIRS) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(state) + at / 2 * 16 * V + 16 * v;
        const Words high = splat_word(int32_t(0xffff0000));
        unrolled<R / 2>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS {
                const uint32_t* p = from + (r * V + w) * 16;
                const Words bits = load_words(p);
                Words a = shift_left32<16>(bits), b = bits & high;
                if constexpr (Shape::SPLIT) {
                    const Words left = load_words(p + rest);
                    a = add32(a, shift_right32<16>(shift_left32<16>(left))), b = add32(b, shift_right32<16>(left));
                }
                sum[2 * r][w] = fmadd(as_floats(a), decay, sum[2 * r][w]), sum[2 * r + 1][w] = fmadd(as_floats(b), decay, sum[2 * r + 1][w]);
            });
        });
    } else {
        unrolled<R>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS { sum[r][w] = fmadd(load_all(state + (at + r) * 16 * V + 16 * (v + w)), decay, sum[r][w]); });
        });
    }
}

template <class Shape, typename S, int R, int V, int W>
inline ALWAYS void store_state(S* state, int64_t rest, int64_t at, int v, const Floats (&sum)[R][W]) {
    if constexpr (Shape::PAIRS) {
        uint32_t* to = reinterpret_cast<uint32_t*>(state) + at / 2 * 16 * V + 16 * v;
        const Words high = splat_word(int32_t(0xffff0000)), half = splat_word(0x8000);
        unrolled<R / 2>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS {
                uint32_t* p = to + (r * V + w) * 16;
                if constexpr (Shape::SPLIT) {
                    const Words a = as_words(sum[2 * r][w]), b = as_words(sum[2 * r + 1][w]);
                    store_words(p, choose_bits(high, add32(b, half), shift_right32<16>(add32(a, half))));
                    store_words(p + rest, choose_bits(high, shift_left32<16>(b), a));
                } else {
                    store_words(p, Shape::Cells::beside(sum[2 * r][w], sum[2 * r + 1][w]));
                }
            });
        });
    } else {
        unrolled<R>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS { store_all(state + (at + r) * 16 * V + 16 * (v + w), sum[r][w]); });
        });
    }
}

// A group's blocks of tokens on one thread, with memory for what is computed for a block.
template <typename T, typename S>
class Blocks {
    using Shape = BlockShape<T, S>;
    using Cells = typename Shape::Cells;
    static constexpr int64_t STEPS = Shape::STEPS;

  public:
    // `reads`: rows of C of a token. `more`: whether another group's memory follows in a slot.
    Blocks(const Shape& shape, int64_t reads, bool more, float* scratch)
        : s_(shape), reads_(reads), more_(more), growth_(scratch), weights_(reinterpret_cast<uint32_t*>(growth_ + s_.heads * GRID)),
          c_(weights_ + reads * s_.heads * GRID * STEPS), b_(c_ + reads * GRID * s_.row), x_(b_ + STEPS * 2 * s_.row),
          widened_(x_ + STEPS * STATE_SLICE) {}

    static int64_t scratch(const Shape& s, int64_t reads) {  // words
        return s.heads * GRID * (1 + reads * STEPS) + (reads * GRID + 2 * STEPS) * s.row + STEPS * STATE_SLICE + widened(s);
    }

    // Adds tokens [first, first + count) to the pending ones.
    void take(Pending pending, int64_t first, int64_t count, const BlockTokens& in) const {
        const int64_t begin = pending.count(), width = s_.heads * s_.head;
        take_decays(pending, first, count, in.log_decays);
        uint32_t* cells = pending.words + s_.x_at;
        for (int64_t h = 0; h < s_.heads; h++, cells += STEPS * s_.lanes)
            for (int64_t lane = 0; lane < s_.lanes; lane += 16) {
                const Mask mask = lanes(s_.head - lane);
                const float* x = in.x + first * width + h * s_.head + lane;
                const auto weighed = [&](int64_t t) { return load16(x + t * width, mask) * splat(in.steps[(first + t) * s_.heads + h]); };
                for (int64_t t = 0; t < count;) {
                    const bool both = Shape::PAIRS && (begin + t) % 2 == 0 && t + 1 < count;
                    put(cells + lane, begin + t, weighed(t), both ? weighed(t + 1) : zero());
                    t += both ? 2 : 1;
                }
            }
        for (int64_t t = 0; t < count; t++)
            for (int64_t at = 0; at < s_.row; at += 16) {
                store_words(pending.words + s_.b_at + (begin + t) * s_.row + at, Cells::row(in.b + (first + t) * s_.n, s_.n, at));
                store_words(c_ + t * s_.row + at, Cells::row(in.c + (first + t) * s_.n, s_.n, at));
            }
    }

    // The same for the gated delta rule, without what they change, which `solve` adds.
    void take(Pending pending, int64_t first, int64_t count, const DeltaTokens& in) const {
        const int64_t begin = pending.count();
        take_decays(pending, first, count, in.log_decays);
        for (int64_t t = 0; t < count; t++)
            for (int64_t at = 0; at < s_.row; at += 16) {
                const Words key = Cells::row(in.k + (first + t) * s_.n, s_.n, at);
                store_words(pending.words + s_.b_at + (begin + t) * s_.row + at, key);
                store_words(c_ + 2 * t * s_.row + at, key);
                store_words(c_ + (2 * t + 1) * s_.row + at, Cells::row(in.q + (first + t) * s_.n, s_.n, at));
            }
    }

    // Prefetches what a single token reads first.
    void prefetch(Pending pending, const S* state) const {
        const int64_t count = pending.count() + 1;
        for (int64_t at = 0; at < s_.x_at + steps_of(count) * s_.lanes; at += 16) prefetch_far(pending.words + at);
        for (int64_t at = 0; at < count * s_.row; at += 16) prefetch_far(pending.words + s_.b_at + at);
        for (int64_t line = 0; state && line < STATE_AHEAD; line++) prefetch_far(reinterpret_cast<const uint32_t*>(state) + 16 * line);
    }

    // Divides `tokens` into parts that end where blocks do, and advances the state, from `before` to `after`, behind those that fill one.
    // visit(begin, first, count, state): of tokens [first, first + count), which begin at `begin` within their block; it takes them.
    // Returns where the state is afterwards.
    template <typename Visit>
    const S* each_part(Pending pending, int64_t tokens, const S* before, S* after, Visit&& visit) const {
        for (int64_t first = 0; first < tokens;) {
            const int64_t begin = pending.count(), count = std::min(tokens - first, GRID - begin);
            visit(begin, first, count, before);
            if (begin + count == GRID) advance(pending, GRID, before, after), before = after;
            pending.set_count((begin + count) % GRID);
            first += count;
        }
        return before;
    }

    // out [count, heads * head]: the outputs of tokens [begin, begin + count) of the block, the last ones taken, which are tokens `first`
    // and so on of `in`. `state`: null for zeros. visit(h, slice, t): called once for each token of a slice.
    template <typename Visit>
    void read(Pending pending, int64_t begin, int64_t first, int64_t count, const S* state, const BlockTokens& in, float* out, Visit&& visit) const {
        grow(pending);
        for (int64_t t = 0; t < count; t++) weigh_tokens(pending, t, begin + t, begin + t + 1);
        each_tokens<4>(pending, begin, count, state, visit, [&](auto vectors, auto group, const uint32_t* cells, const StateAhead* ahead, int64_t h, int64_t lane, int64_t t) {
            const uint32_t* taken = pending.words + s_.x_at + h * STEPS * s_.lanes + lane;
            const float* x = in.x + first * s_.heads * s_.head + h * s_.head + lane;
            read_rows<vectors(), group()>(cells, ahead, taken, x, in.d[h], h, begin, t, s_.head - lane, out + h * s_.head + lane);
        });
    }

    // The same for the gated delta rule, whose tokens' changes are added to the pending ones. `out`: has the tokens' values.
    template <typename Visit>
    void solve(
        Pending pending, int64_t begin, int64_t first, int64_t count, const S* state, const DeltaTokens& in, float* out, Visit&& visit
    ) const {
        grow(pending);
        for (int64_t t = 0; t < count; t++) {
            weigh_tokens(pending, 2 * t, begin + t, begin + t);
            weigh_tokens(pending, 2 * t + 1, begin + t, begin + t + 1);
        }
        each_tokens<2>(pending, begin, count, state, visit, [&](auto vectors, auto group, const uint32_t* cells, const StateAhead* ahead, int64_t h, int64_t lane, int64_t t) {
            uint32_t* changes = pending.words + s_.x_at + h * STEPS * s_.lanes + lane;
            const float* betas = in.betas + first * s_.heads + h;
            solve_rows<vectors(), group()>(cells, ahead, changes, betas, h, begin, t, s_.head - lane, out + h * s_.head + lane);
        });
    }

    // The state after the first `count` tokens of the block, from that before it; they may be in the same place.
    void advance(Pending pending, int64_t count, const S* before, S* after) const {
        const uint32_t* b = pending.words + s_.b_at;
        int64_t ld = s_.row;
        if constexpr (Shape::PAIRS) {
            ld = 2 * s_.row;
            for (int64_t step = 0; step < STEPS; step++)
                for (int64_t at = 0; at < s_.row; at += 16) {
                    Words both[2];
                    const auto* rows = reinterpret_cast<const uint16_t*>(b + 2 * step * s_.row + at);
                    Cells::between(rows, rows + 2 * s_.row, 32, both);
                    store_words(b_ + step * ld + 2 * at, both[0]), store_words(b_ + step * ld + 2 * at + 16, both[1]);
                }
            b = b_;
        }
        each_slice([&](int64_t h, int64_t lane, auto vectors) {
            constexpr int V = vectors();
            const float* own = pending.sums() + h * GRID;
            alignas(64) float left[GRID];
            store_floats(left, select(lanes(count), exp16(splat(own[count - 1]) - load_floats(own)), zero()));
            const Floats total = exp16(splat(own[count - 1]));
            weigh<V>(pending.words + s_.x_at + h * STEPS * s_.lanes + lane, left);
            const S* from = before ? slice_of(before, h, lane) : nullptr;
            in_groups<4>(s_.rows, [&](auto group, int64_t at) { advance_rows<V, group()>(from, slice_of(after, h, lane), b + at, ld, at, total); });
        });
    }

    // A state without pending tokens, of numbers with these strides, from its slices and back.
    void to_plain(const S* state, PlainStrides strides, S* plain) const {
        each_number(state, [&](Floats (&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
            alignas(64) float numbers[16];
            for (int64_t r = 0; r < 2 && at + r < s_.n; r++) {
                store_floats(numbers, sum[r][0]);
                for (int64_t i = 0; i < 16 && lane + i < s_.head; i++) store(plain, plain_at(strides, h, lane + i, at + r), numbers[i]);
            }
            return false;
        });
    }
    void from_plain(const S* plain, PlainStrides strides, S* state) const {
        each_number(state, [&](Floats (&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
            for (int64_t r = 0; r < 2; r++) {
                alignas(64) float numbers[16] = {};
                for (int64_t i = 0; i < 16 && lane + i < s_.head && at + r < s_.n; i++)
                    numbers[i] = load(plain, plain_at(strides, h, lane + i, at + r));
                sum[r][0] = load_floats(numbers);
            }
            return true;
        });
    }

  private:
    static int64_t steps_of(int64_t tokens) { return (tokens + Cells::EACH - 1) / Cells::EACH; }
    static int64_t widened(const Shape& s) { return Shape::PAIRS || sizeof(S) == 4 ? 0 : s.n * STATE_SLICE; }
    int64_t plain_at(PlainStrides strides, int64_t h, int64_t channel, int64_t input) const {
        return h * s_.head * s_.n + channel * strides.channel + input * strides.input;
    }

    // While a slice is multiplied: the pending tokens of the next head, or behind the last one those of the next group, and its state.
    StateAhead ahead_of(Pending pending, int64_t h, int64_t lane, int64_t vectors, int64_t tokens) const {
        const int64_t taken = steps_of(tokens) * s_.lanes;
        if (h + 1 < s_.heads) return {pending.words + s_.x_at + (h + 1) * STEPS * s_.lanes, taken / 16, s_.cells, 0};
        if (!more_) return {nullptr, 0, s_.cells, 0};
        const uint32_t* next = pending.words + s_.pending_words;
        StateAhead ahead{next, (s_.x_at + taken) / 16, s_.cells, 0};
        if (lane) ahead.next = next + s_.b_at, ahead.lines = tokens * s_.row / 16;
        if (lane + 16 * vectors >= s_.lanes) ahead.from = s_.cells - STATE_AHEAD / vectors, ahead.skip = Shape::SPLIT ? s_.rest_at() : 0;
        return ahead;
    }

    // Adds to the sums of the pending tokens, and before a block's first ones clears their cells: weights of 0 meet numbers.
    void take_decays(Pending pending, int64_t first, int64_t count, const float* log_decays) const {
        const int64_t begin = pending.count();
        float* sums = pending.sums();
        for (int64_t h = 0; h < s_.heads; h++) {
            float sum = begin ? sums[h * GRID + begin - 1] : 0.0f;
            for (int64_t t = 0; t < count; t++) sums[h * GRID + begin + t] = sum += log_decays[(first + t) * s_.heads + h];
        }
        if (!begin && count < GRID) std::memset(pending.words + s_.x_at, 0, 4 * s_.heads * STEPS * s_.lanes);
    }

    void grow(Pending pending) const {
        for (int64_t h = 0; h < s_.heads; h++) store_floats(growth_ + h * GRID, decay_of(load_floats(pending.sums() + h * GRID)));
    }

    // The weights that token `token` of the block gives to its first `known` tokens, by row `row` of C.
    void weigh_tokens(Pending pending, int64_t row, int64_t token, int64_t known) const {
        const Floats products = products_with<Cells>(c_ + row * s_.row, pending.words + s_.b_at, s_.row, known);
        for (int64_t h = 0; h < s_.heads; h++) {
            const float* own = pending.sums() + h * GRID;
            const Floats decay = decay_of(splat(own[token]) - load_floats(own));
            put_weights(weights_of(h, row), select(lanes(known), products * decay, zero()));
        }
    }
    uint32_t* weights_of(int64_t h, int64_t row) const { return weights_ + (h * reads_ * GRID + row) * STEPS; }

    template <typename F>
    void each_slice(F&& f) const {
        for (int64_t h = 0; h < s_.heads; h++) {
            int64_t lane = 0;
            for (; lane + 64 <= s_.lanes; lane += 64) f(h, lane, std::integral_constant<int, 4>());
            if ((s_.lanes - lane) & 32) f(h, lane, std::integral_constant<int, 2>()), lane += 32;
            if ((s_.lanes - lane) & 16) f(h, lane, std::integral_constant<int, 1>());
        }
    }

    // The last `count` tokens, slice by slice, MOST at a time: each(vectors, group, cells, ahead, h, lane, t), of a group of tokens from t
    // on, with the slice's cells of the state, and what to prefetch meanwhile. visit(h, lane, t): called for each token behind its slice.
    template <int MOST, typename Visit, typename Each>
    void each_tokens(Pending pending, int64_t begin, int64_t count, const S* state, Visit&& visit, Each&& each) const {
        each_slice([&](int64_t h, int64_t lane, auto vectors) {
            const uint32_t* cells = state ? cells_of<vectors()>(slice_of(state, h, lane)) : nullptr;
            if (count == 1) {
                const StateAhead ahead = ahead_of(pending, h, lane, vectors(), begin + 1);
                each(vectors, std::integral_constant<int, 1>(), cells, &ahead, h, lane, 0);
            } else {
                in_groups<MOST>(count, [&](auto group, int64_t t) { each(vectors, group, cells, nullptr, h, lane, t); });
            }
            for (int64_t t = 0; t < count; t++) visit(h, lane, t);
        });
    }

    template <typename P>
    P* slice_of(P* state, int64_t h, int64_t lane) const {
        return state + (h * s_.lanes + lane) * (Shape::PAIRS ? s_.cells * 4 / int64_t(sizeof(S)) : s_.n);
    }

    // Two rows of 16 channels at a time; f says whether they are to be stored.
    template <typename P, typename F>
    void each_number(P* state, F&& f) const {
        each_slice([&](int64_t h, int64_t lane, auto vectors) {
            constexpr int V = vectors();
            P* slice = slice_of(state, h, lane);
            for (int64_t at = 0; at < s_.rows; at += 2)
                for (int v = 0; v < V; v++) {
                    if (Shape::PAIRS || at + 2 <= s_.rows) one_number<2, V>(slice, at, v, h, lane, f);
                    else if constexpr (!Shape::PAIRS) one_number<1, V>(slice, at, v, h, lane, f);
                }
        });
    }
    template <int R, int V, typename P, typename F>
    void one_number(P* slice, int64_t at, int v, int64_t h, int64_t lane, F&& f) const {
        Floats rows[R][1], sum[2][1] = {{zero()}, {zero()}};
        set_zero(rows);
        add_state<Shape, S, R, V>(slice, s_.rest_at(), at, v, splat(1.0f), rows);
        for (int r = 0; r < R; r++) sum[r][0] = rows[r][0];
        if (!f(sum, at, h, lane + 16 * v)) return;
        for (int r = 0; r < R; r++) rows[r][0] = sum[r][0];
        if constexpr (!std::is_const_v<P>) store_state<Shape, S, R, V>(slice, s_.rest_at(), at, v, rows);
    }

    // Puts 16 channels of token t of the block in their cells, of an even one with those of the next token or zeros.
    void put(uint32_t* cells, int64_t t, Floats x, Floats next) const {
        uint32_t* to = cells + t / Cells::EACH * s_.lanes;
        if constexpr (!Shape::PAIRS) store_words(to, as_words(x));
        else if (t % 2 == 0) store_words(to, Cells::beside(x, next));
        else store_words(to, load_words(to) | Cells::beside(zero(), x));
    }

    // exp(x) of what is rounded to bfloat16, or multiplied with a state that is.
    static Floats decay_of(Floats x) {
        if constexpr (Shape::PAIRS) return Cells::power(x * splat(LOG2_E));
        else return exp16(x);
    }

    static void put_weights(uint32_t* to, Floats weights) {
        if constexpr (Shape::PAIRS) store_low_half(to, pairs_after_zero(weights));
        else store_words(to, as_words(weights));
    }
    static Words pairs_after_zero(Floats low) {
#if BF16_PAIRS
        return pairs_after(low, zero());
#else
        return as_words(low);
#endif
    }

    template <int V>
    const uint32_t* cells_of(const S* slice) const {
        if constexpr (Shape::PAIRS || sizeof(S) == 4) {
            return reinterpret_cast<const uint32_t*>(slice);
        } else {
            for (int64_t i = 0; i < s_.n * V; i++) store_words(widened_ + 16 * i, as_words(load_all(slice + 16 * i)));
            return widened_;
        }
    }

    // Tokens [t, t + R) of the last ones: products of C with the state, which has decayed since, and of weights with the `taken` x dt; D x.
    template <int V, int R>
    void read_rows(
        const uint32_t* cells, const StateAhead* ahead, const uint32_t* taken, const float* x, float d, int64_t h, int64_t begin, int64_t t, int64_t left, float* out
    ) const {
        constexpr int W = beside(R, V);
        const int64_t width = s_.heads * s_.head, steps = steps_of(begin + t + R);
        for (int v = 0; v < V; v += W) {
            Floats sum[R][W];
            set_zero(sum);
            if (cells) multiply_cells<Cells>(sum, c_ + t * s_.row, s_.row, 1, s_.cells, cells + 16 * v, 16 * V, ahead);
            unrolled<R>([&](int r) ALWAYS {
                const Floats growth = splat(growth_[h * GRID + begin + t + r]);
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    sum[r][w] = fmadd(sum[r][w], growth, splat(d) * load16(x + (t + r) * width + at, lanes(left - at)));
                });
            });
            multiply_cells<Cells>(sum, weights_of(h, t), STEPS, 1, steps, taken + 16 * v, s_.lanes);
            unrolled<R>([&](int r) ALWAYS {
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    store16(out + (t + r) * width + at, lanes(left - at), sum[r][w]);
                });
            });
        }
    }

    // Tokens [t, t + N) of the last ones: change = beta (value - what the key reads); what the query reads, the change included.
    // Reads are products with the state, which has decayed since, and of weights with `changes`.
    template <int V, int N>
    void solve_rows(
        const uint32_t* cells, const StateAhead* ahead, uint32_t* changes, const float* betas, int64_t h, int64_t begin, int64_t t, int64_t left, float* out
    ) const {
        constexpr int W = beside(2 * N, V);
        const int64_t width = s_.heads * s_.head;
        for (int v = 0; v < V; v += W) {
            Floats sum[2 * N][W];
            set_zero(sum);
            if (cells) multiply_cells<Cells>(sum, c_ + 2 * t * s_.row, s_.row, 1, s_.cells, cells + 16 * v, 16 * V, ahead);
            unrolled<N>([&](int r) ALWAYS {
                const int64_t token = begin + t + r;
                const Floats growth = splat(growth_[h * GRID + token]), beta = splat(betas[(t + r) * s_.heads]);
                float* own = out + (t + r) * width;
                Floats by_key[1][W], by_query[1][W];
                unrolled<W>([&](int w) ALWAYS { by_key[0][w] = sum[2 * r][w] * growth, by_query[0][w] = sum[2 * r + 1][w] * growth; });
                multiply_cells<Cells>(by_key, weights_of(h, 2 * (t + r)), 0, 1, steps_of(token), changes + 16 * v, s_.lanes);
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    put(changes + at, token, beta * (load16(own + at, lanes(left - at)) - by_key[0][w]), zero());
                });
                multiply_cells<Cells>(by_query, weights_of(h, 2 * (t + r) + 1), 0, 1, steps_of(token + 1), changes + 16 * v, s_.lanes);
                unrolled<W>([&](int w) ALWAYS { store16(own + 16 * (v + w), lanes(left - 16 * (v + w)), by_query[0][w]); });
            });
        }
    }

    // A slice's x, times what is left of each token at the end of the block.
    template <int V>
    void weigh(const uint32_t* x, const float* left) const {
        for (int64_t step = 0; step < STEPS; step++)
            for (int v = 0; v < V; v++) {
                const Words cell = load_words(x + step * s_.lanes + 16 * v);
                uint32_t* to = x_ + (step * V + v) * 16;
                if constexpr (Shape::PAIRS) {
                    const Floats low = as_floats(shift_left32<16>(cell)), high = as_floats(cell & splat_word(int32_t(0xffff0000)));
                    store_words(to, Cells::beside(low * splat(left[2 * step]), high * splat(left[2 * step + 1])));
                } else {
                    store_words(to, as_words(as_floats(cell) * splat(left[step])));
                }
            }
    }

    template <int V, int R>
    void advance_rows(const S* from, S* to, const uint32_t* b, int64_t ld, int64_t at, Floats total) const {
        if constexpr (!Shape::PAIRS || R % 2 == 0) {
            constexpr int W = beside(R, V);
            for (int v = 0; v < V; v += W) {
                Floats sum[R][W];
                set_zero(sum);
                multiply_cells<Cells>(sum, b, 1, ld, STEPS, x_ + 16 * v, 16 * V);
                if (from) add_state<Shape, S, R, V>(from, s_.rest_at(), at, v, total, sum);
                store_state<Shape, S, R, V>(to, s_.rest_at(), at, v, sum);
            }
        }
    }

    const Shape s_;
    const int64_t reads_;
    const bool more_;
    float* const growth_;  // [heads, GRID]: what is left of the state before the block
    uint32_t *const weights_, *const c_, *const b_, *const x_, *const widened_;
};

}  // namespace
