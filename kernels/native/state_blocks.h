// Recurrent states in blocks of 16 tokens: a slot has the state at the last multiple of 16 tokens, and the inputs of
// the recurrence for the tokens since then ("pending"). README.md has the maths and the reasons. The names are those of
// Mamba-2. In the gated delta rule, keys are B, a token's change of the state is x dt, and both its key and its query
// read the state, as C does.
//
// A token's output is computed from the state before its block and the block's tokens up to it, in one order: it has
// the same bits however the tokens were divided into steps.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "convolution.h"
#include "numbers.h"
#include "state_advance.h"
#include "state_arithmetic.h"
#include "state_shape.h"
#include "state_tiles.h"

namespace {

struct BlockTokens {                  // inputs of Mamba-2's recurrence
    const float *steps, *log_decays;  // dt, dt A: [tokens, heads]
    const float *x, *b, *c;           // [tokens, heads * head], [tokens, n]
    const float* d;                   // [heads]
};

struct DeltaTokens {                  // inputs of the gated delta rule
    const float *betas, *log_decays;  // [tokens, heads]
    const float *k, *q;               // [tokens, n]
};

// What is prefetched after each slice of a token's outputs: its gates for these outputs, and as many inputs of the
// token `in.tokens` later.
struct ReadNext {
    Projected in;
    const InputRange (&channels)[3];
    InputRange gates;

    // After the slice of token `t` that begins with this output.
    void prefetch(int64_t t, int64_t output) const {
        const float* rows = in.rows + t * in.ld;
        for (int64_t i = output; in.with_outputs && i < std::min(output + STATE_SLICE, gates.count); i += 16) {
            prefetch_far(rows + gates.begin + i);
            for (const InputRange& range : channels)
                if (in.has_next && i < range.count) prefetch_far(rows + in.tokens * in.ld + range.begin + i);
        }
    }
};

// Tokens that belong to one block: of the given ones [first, first + count), which begin at `begin` within their block.
struct BlockPart {
    int64_t begin, first, count;
};

// A group's blocks of tokens on one thread, with memory for what is computed for a block.
template <class Cells, typename S>
class Blocks {
    using Shape = BlockShape<Cells, S>;
    static constexpr int64_t TOKEN_CELLS = Shape::TOKEN_CELLS;

  public:
    // `rows_per_token`: rows of C that a token has, 2 in the gated delta rule. `has_next_group`: whether another
    // group's memory follows in a slot.
    Blocks(const Shape& shape, int64_t rows_per_token, bool has_next_group, float* scratch)
        : s_(shape), rows_per_token_(rows_per_token), has_next_group_(has_next_group), decays_(scratch),
          weights_(reinterpret_cast<uint32_t*>(decays_ + s_.heads * BLOCK_TOKENS)),
          c_(weights_ + rows_per_token * s_.heads * BLOCK_TOKENS * TOKEN_CELLS),
          widened_(c_ + rows_per_token * BLOCK_TOKENS * s_.row_words), advance_(shape, widened_ + widened(shape)) {}

    static int64_t scratch(const Shape& s, int64_t rows_per_token) {  // words
        return s.heads * BLOCK_TOKENS * (1 + rows_per_token * TOKEN_CELLS) +
               rows_per_token * BLOCK_TOKENS * s.row_words + widened(s) + BlockAdvance<Cells, S>::scratch(s);
    }

    // Appends tokens of `in` to the pending ones, whose count `each_part` then sets.
    void append(Pending pending, BlockPart part, const BlockTokens& in) const {
        const int64_t width = s_.heads * s_.head;
        append_decays(pending, part, in.log_decays);
        for (int64_t h = 0; h < s_.heads; h++)
            for (int64_t lane = 0; lane < s_.padded_head; lane += 16) {
                const Mask mask = lanes(s_.head - lane);
                const float* x = in.x + part.first * width + h * s_.head + lane;
                const auto weighed = [&](int64_t t) {
                    return load16(x + t * width, mask) * splat(in.steps[(part.first + t) * s_.heads + h]);
                };
                for (int64_t t = 0; t < part.count;) {
                    const bool both = Shape::PAIRS && (part.begin + t) % 2 == 0 && t + 1 < part.count;
                    put_in_cells<Cells>(
                        s_.x_of(pending, h, lane), s_.padded_head, part.begin + t, weighed(t),
                        both ? weighed(t + 1) : zero()
                    );
                    t += both ? 2 : 1;
                }
            }
        for (int64_t t = 0; t < part.count; t++)
            for (int64_t at = 0; at < s_.row_words; at += 16) {
                const int64_t row = (part.first + t) * s_.n;
                store_words(s_.b_of(pending, part.begin + t) + at, Cells::row(in.b + row, s_.n, at));
                store_words(c_ + t * s_.row_words + at, Cells::row(in.c + row, s_.n, at));
            }
    }

    // The same for the gated delta rule, without the tokens' changes, which `solve` appends.
    void append(Pending pending, BlockPart part, const DeltaTokens& in) const {
        append_decays(pending, part, in.log_decays);
        for (int64_t t = 0; t < part.count; t++)
            for (int64_t at = 0; at < s_.row_words; at += 16) {
                const int64_t row = (part.first + t) * s_.n;
                const Words key = Cells::row(in.k + row, s_.n, at);
                store_words(s_.b_of(pending, part.begin + t) + at, key);
                store_words(c_ + 2 * t * s_.row_words + at, key);
                store_words(c_ + (2 * t + 1) * s_.row_words + at, Cells::row(in.q + row, s_.n, at));
            }
    }

    // Prefetches the memory that a single token reads first.
    void prefetch(Pending pending, const S* state) const {
        const int64_t count = pending.count() + 1;
        for (int64_t at = 0; at < s_.x_at + s_.token_cells(count) * s_.padded_head; at += 16)
            prefetch_far(pending.words + at);
        for (int64_t at = 0; at < count * s_.row_words; at += 16) prefetch_far(s_.b_of(pending) + at);
        for (int64_t line = 0; state && line < STATE_AHEAD; line++)
            prefetch_far(reinterpret_cast<const uint32_t*>(state) + 16 * line);
    }

    // Divides `tokens` into parts that end where blocks end, and advances the state, from `before` to `after`, after
    // each part that completes a block. visit(part, state) adds a part to the pending tokens. Returns where the state
    // is afterwards.
    template <typename Visit>
    const S* each_part(Pending pending, int64_t tokens, const S* before, S* after, Visit&& visit) const {
        for (int64_t first = 0; first < tokens;) {
            const int64_t begin = pending.count(), count = std::min(tokens - first, BLOCK_TOKENS - begin);
            visit(BlockPart{begin, first, count}, before);
            if (begin + count == BLOCK_TOKENS) advance(pending, BLOCK_TOKENS, before, after), before = after;
            pending.set_count((begin + count) % BLOCK_TOKENS);
            first += count;
        }
        return before;
    }

    // Writes the outputs of a part, the last tokens that were appended, to out [tokens of `in`, heads * head]. `state`:
    // null for zeros.
    void read(
        Pending pending, BlockPart part, const S* state, const BlockTokens& in, float* out, const ReadNext& next
    ) const {
        set_decays(pending);
        for (int64_t t = 0; t < part.count; t++) set_weights(pending, t, part.begin + t, part.begin + t + 1);
#if AMX_TILES
        if constexpr (Shape::TILES) return read_in_tiles(pending, part, state, in, out, next);
#endif
        each_tokens<4>(pending, part, state, next, [&](auto vectors, auto group, const StateSlice& slice, int64_t t) {
            read_rows<vectors(), group()>(pending, part, slice, t, in, out);
        });
    }

    // The same for the gated delta rule, whose tokens' changes are added to the pending ones. `out` has the tokens'
    // values before.
    void solve(
        Pending pending, BlockPart part, const S* state, const DeltaTokens& in, float* out, const ReadNext& next
    ) const {
        set_decays(pending);
        for (int64_t t = 0; t < part.count; t++) {
            set_weights(pending, 2 * t, part.begin + t, part.begin + t);
            set_weights(pending, 2 * t + 1, part.begin + t, part.begin + t + 1);
        }
#if AMX_TILES
        if constexpr (Shape::TILES) return solve_in_tiles(pending, part, state, in, out, next);
#endif
        each_tokens<2>(pending, part, state, next, [&](auto vectors, auto group, const StateSlice& slice, int64_t t) {
            solve_rows<vectors(), group()>(pending, part, slice, t, nullptr, in, out);
        });
    }

    // The state after the first `count` tokens of the block, from that before it; they may be in the same place.
    void advance(Pending pending, int64_t count, const S* before, S* after) const {
        advance_.run(pending, count, before, after);
    }

  private:
    // Channels of a head from `lane` on.
    struct StateSlice {
        int64_t h, lane;
        const uint32_t* cells;    // of the state before the block, or null
        const StateAhead* ahead;  // what to prefetch while they are multiplied, or null
    };

    static int64_t widened(const Shape& s) { return Shape::PAIRS || sizeof(S) == 4 ? 0 : s.n * STATE_SLICE; }

    // What to prefetch while a slice is multiplied for a single token: the pending tokens of the next head, or after
    // the last head those of the next group, and then its state. `tokens`: of the block so far.
    StateAhead ahead_of(Pending pending, int64_t h, int64_t lane, int64_t vectors, int64_t tokens) const {
        const int64_t x_words = s_.token_cells(tokens) * s_.padded_head;  // of a head
        if (h + 1 < s_.heads) return {s_.x_of(pending, h + 1), x_words / 16, s_.cells, 0};
        if (!has_next_group_) return {nullptr, 0, s_.cells, 0};
        const Pending next{pending.words + s_.pending_words};
        StateAhead ahead{next.words, (s_.x_at + x_words) / 16, s_.cells, 0};
        if (lane) ahead.next = s_.b_of(next), ahead.lines = tokens * s_.row_words / 16;
        if (lane + 16 * vectors >= s_.padded_head)
            ahead.from = s_.cells - STATE_AHEAD / vectors, ahead.skip = Shape::SPLIT ? s_.rest_at() : 0;
        return ahead;
    }

    // Appends the sums of log decays of these tokens. Before a block's first tokens, clears the cells of x dt, because
    // those of missing tokens are multiplied by weights of 0.
    void append_decays(Pending pending, BlockPart part, const float* log_decays) const {
        for (int64_t h = 0; h < s_.heads; h++) {
            float* const sums = pending.sums(h);
            float sum = part.begin ? sums[part.begin - 1] : 0.0f;
            for (int64_t t = 0; t < part.count; t++)
                sums[part.begin + t] = sum += log_decays[(part.first + t) * s_.heads + h];
        }
        if (!part.begin && part.count < BLOCK_TOKENS)
            std::memset(s_.x_of(pending, 0), 0, 4 * s_.heads * TOKEN_CELLS * s_.padded_head);
    }

    // Computes `decays_`.
    void set_decays(Pending pending) const {
        for (int64_t h = 0; h < s_.heads; h++)
            store_floats(decays_ + h * BLOCK_TOKENS, decay_of<Cells>(load_floats(pending.sums(h))));
    }

    // Computes the weights by which the outputs of row `row` of C, which is token `token` of the block, depend on the
    // block's first `count` tokens.
    void set_weights(Pending pending, int64_t row, int64_t token, int64_t count) const {
        const Floats products = products_with<Cells>(c_ + row * s_.row_words, s_.b_of(pending), s_.row_words, count);
        for (int64_t h = 0; h < s_.heads; h++) {
            const float* sums = pending.sums(h);
            const Floats decay = decay_of<Cells>(splat(sums[token]) - load_floats(sums));
            put_weights<Cells>(weights_of(h, row), select(lanes(count), products * decay, zero()));
        }
    }
    uint32_t* weights_of(int64_t h, int64_t row) const {
        return weights_ + (h * rows_per_token_ * BLOCK_TOKENS + row) * TOKEN_CELLS;
    }

    // Visits the tokens of a part, slice by slice, in groups of at most MOST: each(vectors, group, slice, t) for
    // `group` tokens from t on.
    template <int MOST, typename Each>
    void each_tokens(Pending pending, BlockPart part, const S* state, const ReadNext& next, Each&& each) const {
        s_.each_slice([&](int64_t h, int64_t lane, auto vectors) {
            const uint32_t* cells = state ? cells_of<vectors()>(s_.slice_of(state, h, lane)) : nullptr;
            if (part.count == 1) {
                const StateAhead ahead = ahead_of(pending, h, lane, vectors(), part.begin + 1);
                each(vectors, std::integral_constant<int, 1>(), StateSlice{h, lane, cells, &ahead}, 0);
            } else {
                in_groups<MOST>(part.count, [&](auto group, int64_t t) {
                    each(vectors, group, StateSlice{h, lane, cells, nullptr}, t);
                });
            }
            for (int64_t t = 0; t < part.count; t++) next.prefetch(part.first + t, h * s_.head + lane);
        });
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

    // Outputs of tokens [t, t + R) of a part: products of C with the state, which has decayed since; products of
    // weights with x dt; and D x.
    template <int V, int R>
    void read_rows(
        Pending pending, BlockPart part, const StateSlice& slice, int64_t t, const BlockTokens& in, float* out
    ) const {
        constexpr int W = vectors_at_once(R, V);
        const int64_t h = slice.h, left = s_.head - slice.lane, width = s_.heads * s_.head,
                      steps = s_.token_cells(part.begin + t + R),
                      place = (part.first + t) * width + h * s_.head + slice.lane;
        const uint32_t* const x_cells = s_.x_of(pending, h, slice.lane);
        const float* const x = in.x + place;
        float* const to = out + place;
        const float* const decays = decays_ + h * BLOCK_TOKENS + part.begin + t;
        for (int v = 0; v < V; v += W) {
            Floats sum[R][W];
            set_zero(sum);
            if (slice.cells)
                multiply_cells<Cells>(
                    sum, c_ + t * s_.row_words, s_.row_words, 1, s_.cells, slice.cells + 16 * v, 16 * V, slice.ahead
                );
            unrolled<R>([&](int r) ALWAYS {
                const Floats decay = splat(decays[r]), d = splat(in.d[h]);
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    sum[r][w] = fmadd(sum[r][w], decay, d * load16(x + r * width + at, lanes(left - at)));
                });
            });
            multiply_cells<Cells>(sum, weights_of(h, t), TOKEN_CELLS, 1, steps, x_cells + 16 * v, s_.padded_head);
            unrolled<R>([&](int r) ALWAYS {
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    store16(to + r * width + at, lanes(left - at), sum[r][w]);
                });
            });
        }
    }

#if AMX_TILES
    // `read` by tiles: of all tokens, the products with a slice of the state, and those of weights with x dt.
    void read_in_tiles(
        Pending pending, BlockPart part, const S* state, const BlockTokens& in, float* out, const ReadNext& next
    ) const {
        const int64_t width = s_.heads * s_.head;
        StateTiles::begin(part.count);
        s_.each_slice([&](int64_t h, int64_t lane, auto vectors) {
            constexpr int V = vectors();
            alignas(64) float of_state[BLOCK_TOKENS * STATE_SLICE], of_tokens[BLOCK_TOKENS * STATE_SLICE];
            multiply_state<V>(pending, part, state, h, lane, of_state);
            StateTiles::multiply_weights<V>(weights_of(h, 0), s_.x_of(pending, h, lane), s_.padded_head, of_tokens);
            const float* x = in.x + part.first * width + h * s_.head + lane;
            float* to = out + part.first * width + h * s_.head + lane;
            const Floats d = splat(in.d[h]);
            for (int64_t t = 0; t < part.count; t++, x += width, to += width) {
                const Floats decay = splat(decays_[h * BLOCK_TOKENS + part.begin + t]);
                unrolled<V>([&](int v) ALWAYS {
                    const Mask mask = lanes(s_.head - lane - 16 * v);
                    Floats sum = fmadd(d, load16(x + 16 * v, mask), load_floats(of_tokens + t * STATE_SLICE + 16 * v));
                    if (state) sum = fmadd(load_floats(of_state + t * STATE_SLICE + 16 * v), decay, sum);
                    store16(to + 16 * v, mask, sum);
                });
                next.prefetch(part.first + t, h * s_.head + lane);
            }
        });
        release_tiles();
    }

    // `solve` by tiles: of all tokens, the products with a slice of the state.
    void solve_in_tiles(
        Pending pending, BlockPart part, const S* state, const DeltaTokens& in, float* out, const ReadNext& next
    ) const {
        s_.each_slice([&](int64_t h, int64_t lane, auto vectors) {
            constexpr int V = vectors();
            alignas(64) float of_state[2 * BLOCK_TOKENS * STATE_SLICE];
            if (state) {
                StateTiles::begin(std::min(2 * part.count, BLOCK_TOKENS));
                multiply_state<V>(pending, part, state, h, lane, of_state);
                release_tiles();
            }
            in_groups<2>(part.count, [&](auto group, int64_t t) {
                const float* const state_sums = state ? of_state + 2 * t * STATE_SLICE : nullptr;
                solve_rows<V, group()>(pending, part, {h, lane, nullptr, nullptr}, t, state_sums, in, out);
            });
            for (int64_t t = 0; t < part.count; t++) next.prefetch(part.first + t, h * s_.head + lane);
        });
    }

    // sums [rows_per_token * count, STATE_SLICE]: products of the tokens' rows of C with a slice of the state, if there
    // is one. Tiles are configured for all of these rows, or for BLOCK_TOKENS of them.
    template <int V>
    void multiply_state(Pending pending, BlockPart part, const S* state, int64_t h, int64_t lane, float* sums) const {
        if (!state) return;
        const uint32_t* cells = reinterpret_cast<const uint32_t*>(s_.slice_of(state, h, lane));
        const StateAhead ahead = ahead_of(pending, h, lane, V, part.begin + 1);
        const int64_t rows = rows_per_token_ * part.count;
        for (int64_t row = 0; row < rows; row += BLOCK_TOKENS)
            StateTiles::multiply<V>(
                c_ + row * s_.row_words, s_.row_words, std::min(rows, BLOCK_TOKENS), s_.cells, cells,
                part.count == 1 ? &ahead : nullptr, sums + row * STATE_SLICE
            );
    }
#endif

    // Tokens [t, t + N) of a part: change = beta (value - what the key reads); what the query reads, the change
    // included. Reads are products with the state, which has decayed since, and of weights with changes. `of_state`:
    // the first ones, [2 N, STATE_SLICE], if the slice does not have cells.
    template <int V, int N>
    void solve_rows(
        Pending pending, BlockPart part, const StateSlice& slice, int64_t t, const float* of_state,
        const DeltaTokens& in, float* out
    ) const {
        constexpr int W = vectors_at_once(2 * N, V);
        const int64_t h = slice.h, left = s_.head - slice.lane, width = s_.heads * s_.head;
        uint32_t* const changes = s_.x_of(pending, h, slice.lane);
        const float* const betas = in.betas + (part.first + t) * s_.heads + h;
        float* const to = out + (part.first + t) * width + h * s_.head + slice.lane;
        for (int v = 0; v < V; v += W) {
            Floats sum[2 * N][W];
            set_zero(sum);
            if (slice.cells)
                multiply_cells<Cells>(
                    sum, c_ + 2 * t * s_.row_words, s_.row_words, 1, s_.cells, slice.cells + 16 * v, 16 * V, slice.ahead
                );
            if (of_state)
                unrolled<2 * N>([&](int r) ALWAYS {
                    unrolled<W>([&](int w) ALWAYS {
                        sum[r][w] = load_floats(of_state + r * STATE_SLICE + 16 * (v + w));
                    });
                });
            unrolled<N>([&](int r) ALWAYS {
                const int64_t token = part.begin + t + r;
                const Floats decay = splat(decays_[h * BLOCK_TOKENS + token]), beta = splat(betas[r * s_.heads]);
                float* values = to + r * width;
                Floats by_key[1][W], by_query[1][W];
                unrolled<W>([&](int w) ALWAYS {
                    by_key[0][w] = sum[2 * r][w] * decay, by_query[0][w] = sum[2 * r + 1][w] * decay;
                });
                multiply_cells<Cells>(
                    by_key, weights_of(h, 2 * (t + r)), 0, 1, s_.token_cells(token), changes + 16 * v, s_.padded_head
                );
                unrolled<W>([&](int w) ALWAYS {
                    const int64_t at = 16 * (v + w);
                    put_in_cells<Cells>(
                        changes + at, s_.padded_head, token,
                        beta * (load16(values + at, lanes(left - at)) - by_key[0][w]), zero()
                    );
                });
                multiply_cells<Cells>(
                    by_query, weights_of(h, 2 * (t + r) + 1), 0, 1, s_.token_cells(token + 1), changes + 16 * v,
                    s_.padded_head
                );
                unrolled<W>([&](int w) ALWAYS {
                    store16(values + 16 * (v + w), lanes(left - 16 * (v + w)), by_query[0][w]);
                });
            });
        }
    }

    const Shape s_;
    const int64_t rows_per_token_;
    const bool has_next_group_;
    float* const decays_;  // [heads, BLOCK_TOKENS]: the factor by which the state before the block has decayed
    // weights [heads, rows of C, TOKEN_CELLS] of the block's tokens; rows of C [rows, row_words]; a slice of a bfloat16
    // state in float32
    uint32_t *const weights_, *const c_, *const widened_;
    const BlockAdvance<Cells, S> advance_;
};

}  // namespace
