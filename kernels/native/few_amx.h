// Attention of up to 16 queries of each of several heads by tiles of AMX, with the bits of flash_amx.h: the same products of a single
// tile of queries. Keys are packed as soon as they are read.

#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_amx.h"
#include "window.h"

#if AMX_TILES

namespace {

class FewInTiles {
  public:
    static constexpr int64_t SPAN = KEY_BLOCK;

    FewInTiles(int64_t width, float scale, int64_t heads, int64_t count) : head_(width, scale), heads_(heads), count_(count) {}

    int64_t floats() const {
        return Scratch::floats<Block>(heads_) + heads_ * Block::floats(head_) + Scratch::floats<uint32_t>(of_keys())
            + Scratch::floats<uint32_t>(of_values());
    }
    template <typename Source>
    void begin(const Source& source, Scratch& scratch) {
        blocks_ = scratch.take<Block>(heads_);
        for (int64_t h = 0; h < heads_; h++) blocks_[h].begin(head_, source.of(h), 0, count_, scratch);
        keys_.keys = scratch.take<uint32_t>(of_keys()), keys_.values = scratch.take<uint32_t>(of_values());
    }
    // Keys [at, to) of a window, at most SPAN, for head h; none before `first` counts.
    void attend_to(int64_t h, const Window<uint16_t>& window, int64_t at, int64_t to, int64_t first, Upcoming<SPAN>& upcoming) {
        keys_.begin = at, keys_.end = to;
        for (int64_t tile = at; tile < (to + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS; tile += 16)
            pack_tile(head_, keys_, tile, to - tile, [&](int64_t i, int64_t cell) ALWAYS {
                upcoming.fetch(1);
                return Bf16Cells::row(window.row(window.keys, tile + i, h), head_.width, cell);
            }, [&](int64_t i, int64_t feature, Words (&cells)[2]) ALWAYS {
                upcoming.fetch(2);
                const uint16_t* const a = window.row(window.values, tile + i, h) + feature;
                const uint16_t* const b = window.row(window.values, tile + i + 1, h) + feature;
                Bf16Cells::between(a, b, head_.width - feature, cells);
            });
        attention_.walk(blocks_[h], keys_, first);
    }
    template <typename Source>
    void finish(const Source& source) {
        for (int64_t h = 0; h < heads_; h++)
            blocks_[h].finish(head_, [&](int64_t i, const float* numbers) { source.of(h).write(i, numbers); });
    }

  private:
    using Block = QueryBlock<1>;
    int64_t of_keys() const { return SPAN * head_.steps * 16; }
    int64_t of_values() const { return SPAN / 2 * head_.row(); }

    const TiledHead head_;
    const int64_t heads_, count_;
    TiledAttention attention_{head_};
    Block* blocks_ = nullptr;
    TiledKeys keys_{0, 0, nullptr, nullptr};
};

}  // namespace

#endif
