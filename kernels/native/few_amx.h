// Attention of up to 16 queries of each of several heads by tiles of AMX, with the bits of flash_amx.h: the same
// products of a single tile of queries. Keys are the rows of the scores' product, so tiles of them are read where they
// lie.

#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_amx.h"
#include "scratch.h"
#include "transpose.h"
#include "window.h"

#if AMX_TILES

namespace {

class FewInTiles {
  public:
    static constexpr int64_t SPAN = KEY_BLOCK;

    FewInTiles(int64_t width, float scale, int64_t heads, int64_t count)
        : head_(width, scale), heads_(heads), count_(count), lines_((2 * width + AMX_BYTES - 1) / AMX_BYTES) {}

    int64_t floats() const {
        return Scratch::floats<Block>(heads_) +
               heads_ * (Block::floats(head_) + Scratch::floats<uint32_t>(of_columns())) +
               Scratch::floats<uint32_t>(SPAN / 2 * head_.row()) + Scratch::floats<uint16_t>((STEP_KEYS + 1) * row());
    }
    template <typename Source>
    void begin(const Source& source, Scratch& scratch) {
        blocks_ = scratch.take<Block>(heads_), columns_ = scratch.take<uint32_t>(heads_ * of_columns());
        values_ = scratch.take<uint32_t>(SPAN / 2 * head_.row()), keys_ = scratch.take<uint16_t>(STEP_KEYS * row());
        zeros_ = scratch.take<uint16_t>(row());
        std::fill_n(keys_, STEP_KEYS * row(), 0), std::fill_n(zeros_, row(), 0);
        for (int64_t h = 0; h < heads_; h++) {
            blocks_[h].begin(head_, source.for_head(h), 0, count_, scratch);
            for (int64_t step = 0; step < head_.steps; step++) {
                const uint32_t* const queries = blocks_[h].queries + 16 * step;
                transpose16(
                    [&](int64_t i) ALWAYS { return load_words(queries + i * 16 * head_.steps); },
                    columns_ + h * of_columns() + step * 256, 16
                );
            }
        }
    }
    // Keys [at, to) of a window, at most SPAN, for head h.
    void attend_to(
        int64_t h, const Window<uint16_t>& window, int64_t at, int64_t to, Prefetcher<uint16_t, SPAN>& prefetcher
    ) {
        const int64_t steps = (to - at + STEP_KEYS - 1) / STEP_KEYS;
        for (int64_t i = blocks_[h].skipped(at); i < steps; i++)
            score(window, h, at + i * STEP_KEYS, attention_.scores() + i * STEP_KEYS, prefetcher);
        if (head_.width % 32) pair_values<false>(window, h, at, at + steps * STEP_KEYS, to, prefetcher);
        else pair_values<true>(window, h, at, at + steps * STEP_KEYS, to, prefetcher);
        attention_.with_steps(steps, [&](auto S) ALWAYS {
            attention_.exponentiate_and_add<1, S()>(blocks_[h], at, values_);
        });
    }
    template <typename Source>
    void finish(const Source& source) {
        for (int64_t h = 0; h < heads_; h++)
            blocks_[h].finish(head_, [&](int64_t i, const float* numbers) { source.for_head(h).write(i, numbers); });
    }

  private:
    using Block = QueryBlock<1>;
    int64_t row() const { return 32 * head_.steps; }  // numbers of a key with padding
    int64_t of_columns() const { return 256 * head_.steps; }

    // Scores [queries, STEP_KEYS] of keys from `at` on; those of two queries are KEY_BLOCK numbers apart.
    void score(
        const Window<uint16_t>& window, int64_t h, int64_t at, float* scores, Prefetcher<uint16_t, SPAN>& prefetcher
    ) {
        alignas(64) float products[2][AMX_ROWS * AMX_ROWS];  // [keys, queries]
        const Rows a = rows_of(window, h, at, 0), b = rows_of(window, h, at + AMX_ROWS, 1);
        zero_tile<0>(), zero_tile<1>();
        for (int64_t step = 0; step < head_.steps; step++) {
            load_tile<6>(columns_ + h * of_columns() + step * 256, AMX_BYTES);
            load_tile<4>(a.at + 32 * step, a.stride), dot_bf16<0, 4, 6>();
            load_tile<5>(b.at + 32 * step, b.stride), dot_bf16<1, 5, 6>();
        }
        store_tile<0>(products[0], AMX_BYTES), store_tile<1>(products[1], AMX_BYTES);
        for (int64_t tile = 0; tile < 2; tile++) {
            prefetcher.fetch(4 * lines_);
            transpose16(
                [&](int64_t i) ALWAYS { return load_words(products[tile] + i * 16); },
                reinterpret_cast<uint32_t*>(scores + 16 * tile), KEY_BLOCK
            );
        }
    }

    struct Rows {
        const uint16_t* at;
        int64_t stride;  // bytes
    };
    // 16 keys from `at` on as a tile's rows: in their page, if they are contiguous there and need no padding, otherwise
    // copied to `keys_`.
    Rows rows_of(const Window<uint16_t>& window, int64_t h, int64_t at, int64_t tile) {
        const uint16_t* const first = window.row(window.keys, at, h);
        bool contiguous = at + AMX_ROWS <= window.end && head_.width % 32 == 0;
        for (int64_t i = 1; i < AMX_ROWS && contiguous; i++)
            contiguous = window.row(window.keys, at + i, h) == first + i * head_.width;
        if (contiguous) return {first, 2 * head_.width};
        uint16_t* const copy = keys_ + tile * AMX_ROWS * row();
        for (int64_t i = 0; i < AMX_ROWS; i++)
            std::copy_n(window.row(window.keys, at + i, h), head_.width, copy + i * row());
        return {copy, 2 * row()};
    }

    // Values [at, padded_end) in pairs, zeros from `to` on. WHOLE: a row has whole vectors.
    template <bool WHOLE>
    void pair_values(
        const Window<uint16_t>& window, int64_t h, int64_t at, int64_t padded_end, int64_t to,
        Prefetcher<uint16_t, SPAN>& prefetcher
    ) {
        uint32_t* out = values_;
        for (int64_t i = at; i < padded_end; i += 2, out += head_.row()) {
            const uint16_t* const a = i < to ? window.row(window.values, i, h) : zeros_;
            const uint16_t* const b = i + 1 < to ? window.row(window.values, i + 1, h) : zeros_;
            prefetcher.fetch(lines_ + lines_ / 2);
            for (int64_t feature = 0; feature < head_.row(); feature += 32) {
                Words cells[2];
                Bf16Cells::between(a + feature, b + feature, WHOLE ? 32 : head_.width - feature, cells);
                store_words(out + feature, cells[0]);
                if (WHOLE || feature + 16 < head_.row()) store_words(out + feature + 16, cells[1]);
            }
        }
    }

    const TiledHead head_;
    const int64_t heads_, count_, lines_;  // lines of 64 bytes of a key
    TiledAttention attention_{head_};
    Block* blocks_ = nullptr;
    // [heads, steps, 16 pairs of features, queries]; [pairs of keys, head_.row()]
    uint32_t *columns_ = nullptr, *values_ = nullptr;
    uint16_t *keys_ = nullptr, *zeros_ = nullptr;  // two tiles; a row
};

}  // namespace

#endif
