// A recurrent state after a block of tokens, from that before it.

#pragma once

#include <cstdint>

#include "activations.h"
#include "numbers.h"
#include "state_arithmetic.h"
#include "state_shape.h"
#include "state_tiles.h"

namespace {

// Advances a group's states; `scratch` holds what is computed for one block, so one object serves one thread.
template <class Cells, typename S>
class BlockAdvance {
    using Shape = BlockShape<Cells, S>;
    static constexpr int64_t TOKEN_CELLS = Shape::TOKEN_CELLS;

  public:
    BlockAdvance(const Shape& shape, uint32_t* scratch)
        : s_(shape), b_(scratch), x_(b_ + (Shape::TILES ? 2 : 1) * TOKEN_CELLS * 2 * s_.row_words) {}

    // Words of scratch memory.
    static int64_t scratch(const Shape& s) {
        return TOKEN_CELLS * ((Shape::TILES ? 2 : 1) * 2 * s.row_words + STATE_SLICE);
    }

    // The state after the first `count` tokens of the block, from that before it; they may be in the same place.
    void run(Pending pending, int64_t count, const S* before, S* after) const {
        const int64_t ld = Shape::PAIRS ? 2 * s_.row_words : s_.row_words;
        const uint32_t* b = s_.b_of(pending);
        if constexpr (Shape::PAIRS) b = paired(b);
        const int64_t in_tiles = Shape::TILES ? s_.padded_n / 16 * 16 : 0;
#if AMX_TILES
        uint32_t* const transposed = b_ + TOKEN_CELLS * 2 * s_.row_words;
        if constexpr (Shape::TILES) UpdateTiles::transpose(b, ld, in_tiles, transposed), UpdateTiles::begin();
#endif
        s_.each_slice([&](int64_t h, int64_t lane, auto vectors) {
            constexpr int V = vectors();
            const float* sums = pending.sums(h);
            alignas(64) float decay_to_end[BLOCK_TOKENS];
            store_floats(decay_to_end, select(lanes(count), exp16(splat(sums[count - 1]) - load_floats(sums)), zero()));
            const Floats total = exp16(splat(sums[count - 1]));
            decay_x<V>(s_.x_of(pending, h, lane), decay_to_end);
            const S* from = before ? s_.slice_of(before, h, lane) : nullptr;
            S* const to = s_.slice_of(after, h, lane);
#if AMX_TILES
            if constexpr (Shape::TILES) advance_in_tiles<V>(from, to, transposed, in_tiles, total);
#endif
            in_groups<4>(s_.padded_n - in_tiles, [&](auto group, int64_t at) {
                advance_rows<V, group()>(from, to, b + in_tiles + at, ld, in_tiles + at, total);
            });
        });
#if AMX_TILES
        if constexpr (Shape::TILES) release_tiles();
#endif
    }

  private:
    // Rows of B [BLOCK_TOKENS, row_words] as [TOKEN_CELLS, 2 * row_words]: pairs of two tokens' numbers of one input.
    const uint32_t* paired(const uint32_t* b) const {
        for (int64_t step = 0; step < TOKEN_CELLS; step++)
            for (int64_t at = 0; at < s_.row_words; at += 16) {
                Words both[2];
                const auto* rows = reinterpret_cast<const uint16_t*>(b + 2 * step * s_.row_words + at);
                Cells::between(rows, rows + 2 * s_.row_words, 32, both);
                store_words(b_ + step * 2 * s_.row_words + 2 * at, both[0]),
                    store_words(b_ + step * 2 * s_.row_words + 2 * at + 16, both[1]);
            }
        return b_;
    }

    // A slice's x dt, times each token's decay until the end of the block, to x_ [TOKEN_CELLS, 16 V].
    template <int V>
    void decay_x(const uint32_t* x, const float* decay_to_end) const {
        for (int64_t step = 0; step < TOKEN_CELLS; step++)
            for (int v = 0; v < V; v++) {
                const Words cell = load_words(x + step * s_.padded_head + 16 * v);
                uint32_t* to = x_ + (step * V + v) * 16;
                if constexpr (Shape::PAIRS) {
                    const Floats low = as_floats(shift_left32<16>(cell)),
                                 high = as_floats(cell & splat_word(int32_t(0xffff0000)));
                    store_words(
                        to, Cells::beside(low * splat(decay_to_end[2 * step]), high * splat(decay_to_end[2 * step + 1]))
                    );
                } else {
                    store_words(to, as_words(as_floats(cell) * splat(decay_to_end[step])));
                }
            }
    }

#if AMX_TILES
    // Rows [0, rows) of a slice, 16 at a time. `b`: [rows, TOKEN_CELLS].
    template <int V>
    void advance_in_tiles(const S* from, S* to, const uint32_t* b, int64_t rows, Floats total) const {
        alignas(64) float sums[16 * STATE_SLICE];
        UpdateTiles::load<V>(x_);
        for (int64_t at = 0; at < rows; at += 16) {
            UpdateTiles::multiply<V>(b + at * TOKEN_CELLS, sums);
            for (int64_t r = 0; r < 16; r += 4) {
                Floats sum[4][V];
                unrolled<4>([&](int i) ALWAYS {
                    unrolled<V>([&](int v) ALWAYS { sum[i][v] = load_floats(sums + (r + i) * STATE_SLICE + 16 * v); });
                });
                if (from) add_state<Shape, S, 4, V>(from, s_.rest_at(), at + r, 0, total, sum);
                store_state<Shape, S, 4, V>(to, s_.rest_at(), at + r, 0, sum);
            }
        }
    }
#endif

    template <int V, int R>
    void advance_rows(const S* from, S* to, const uint32_t* b, int64_t ld, int64_t at, Floats total) const {
        if constexpr (!Shape::PAIRS || R % 2 == 0) {
            constexpr int W = vectors_at_once(R, V);
            for (int v = 0; v < V; v += W) {
                Floats sum[R][W];
                set_zero(sum);
                multiply_cells<Cells>(sum, b, 1, ld, TOKEN_CELLS, x_ + 16 * v, 16 * V);
                if (from) add_state<Shape, S, R, V>(from, s_.rest_at(), at, v, total, sum);
                store_state<Shape, S, R, V>(to, s_.rest_at(), at, v, sum);
            }
        }
    }

    const Shape s_;
    uint32_t *const b_, *const x_;  // B as `paired` makes it, with TILES also transposed; x dt as `decay_x` makes it
};

}  // namespace
