// Attention of up to 16 queries of each of several heads, with the bits of `attend_many`: the order in which keys and
// values are read. The products are those of few_lanes.h or few_amx.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "few_amx.h"
#include "few_lanes.h"
#include "numbers.h"
#include "scratch.h"
#include "window.h"

namespace {

constexpr int64_t MAX_FEW_QUERIES = 16;    // as many as a vector has lanes
constexpr int64_t WINDOW_BYTES = 1 << 17;  // of keys and values that all heads of a unit attend to before later ones

#if AMX_TILES
template <typename T>
using FewOf = std::conditional_t<std::is_same_v<T, float>, FewInLanes<T>, FewInTiles>;
#else
template <typename T>
using FewOf = FewInLanes<T>;
#endif

// Keys of a window, a multiple of `span`, if there are `keys` keys of this many bytes each, with their values; windows
// are nearly equal.
inline int64_t window_of(int64_t keys, int64_t bytes, int64_t span) {
    const int64_t most = std::max(WINDOW_BYTES / bytes, span), windows = std::max<int64_t>((keys + most - 1) / most, 1);
    return ((keys + windows - 1) / windows + span - 1) / span * span;
}

// Rows of keys and of values of the first head, in the order of positions.
template <typename T>
struct RowsInOrder {
    const T** rows[2];  // keys, values
    int64_t count = 0;

    RowsInOrder(Scratch& scratch, int64_t most) : rows{scratch.take<const T*>(most), scratch.take<const T*>(most)} {}
    void add(const T* key, const T* value) { rows[0][count] = key, rows[1][count] = value, count++; }
    // Those at positions [from, to) of a source, which are in pages.
    template <typename Source>
    void add_pages(const Source& source, int64_t from, int64_t to) {
        for (int64_t tile = from; tile < to; tile += TILE) {
            const auto lines = source.keys_and_values(tile, std::min(TILE, to - tile));
            for (int64_t side = 0; side < 2; side++) std::copy_n(lines.stored[side], lines.count, rows[side] + count);
            count += lines.count;
        }
    }
    // Repeats the last row, if there is one, until there are `most`.
    void repeat_last(int64_t most) const {
        for (int64_t side = 0; side < 2 && count; side++)
            std::fill(rows[side] + count, rows[side] + most, rows[side][count - 1]);
    }
};

// Copies of the keys [begin, end) that are not in pages yet, and of their values, with the layout of pages.
template <typename T>
class FreshCopies {
  public:
    FreshCopies(int64_t begin, int64_t end, int64_t width, int64_t heads, int64_t head_stride)
        : begin_(begin), end_(end), width_(width), heads_(heads), head_stride_(head_stride), page_(head_stride / width),
          size_((end - begin + page_ - 1) / page_ * heads * head_stride) {}
    int64_t numbers() const { return 2 * size_; }

    template <typename Source>
    void copy(const Source& source, T* memory) {
        memory_ = memory;
        for (int64_t at = begin_; at < end_; at++) {
            const auto found = source.keys_and_values(at, 1);
            for (int64_t side = 0; side < 2; side++) {
                const float* from = found.fresh[side];
                T* to = row(side, at);
                for (int64_t h = 0; h < heads_; h++, to += head_stride_, from += width_)
                    for (int64_t f = 0; f < width_; f++) store(to, f, from[f]);
            }
        }
    }
    // The first head's key (side 0) or value (side 1) at a position.
    T* row(int64_t side, int64_t position) const {
        const int64_t i = position - begin_;
        return memory_ + side * size_ + i / page_ * heads_ * head_stride_ + i % page_ * width_;
    }

  private:
    const int64_t begin_, end_, width_, heads_, head_stride_, page_, size_;  // page: tokens; size: numbers of a side
    T* memory_ = nullptr;
};

// Attention of `count` <= MAX_FEW_QUERIES queries of whole cells, for several heads. A source (see `attend`) of each:
//   source.for_head(h): that of head h. For the first head, source.keys_and_values() also says how many keys are in
//   pages (`in_pages`, `stored`), and where the first of the others is (`fresh`). source.before: how many keys are in
//   pages.
// `head_stride`: numbers from a key in a page to that of the next head, a multiple of the width. `next`: the source of
// the unit that this thread is likely to take next, or null.
template <typename T, typename Source>
void attend_few(
    int64_t width, float scale, const Source& source, int64_t heads, int64_t head_stride, int64_t count,
    const Source* next, std::vector<float>& memory
) {
    constexpr int64_t SPAN = FewOf<T>::SPAN;
    FewOf<T> few(width, scale, heads, count);
    const int64_t first = source.first_key(0), begin = first / SPAN * SPAN, end = source.last(count - 1) + 1,
                  bytes = width * int64_t(sizeof(T));
    const int64_t window = window_of(end - begin, 2 * heads * bytes, SPAN),
                  fresh_begin = std::max(source.before, first);
    FreshCopies<T> fresh(fresh_begin, end, width, heads, head_stride);
    Scratch scratch(memory, few.floats() + 4 * Scratch::floats<const T*>(window) + Scratch::floats<T>(fresh.numbers()));
    few.begin(source, scratch);
    fresh.copy(source, scratch.take<T>(fresh.numbers()));
    RowsInOrder<T> current(scratch, window), following(scratch, window);
    const auto find = [&](RowsInOrder<T>& found, int64_t from, int64_t to) {
        found.count = 0;
        // Keys before the first one are not read: the last one is in their place, with probability zero.
        for (; from < std::min(to, first); from++) found.add(fresh.row(0, end - 1), fresh.row(1, end - 1));
        found.add_pages(source, from, std::min(to, fresh_begin));
        for (int64_t at = std::max(from, fresh_begin); at < to; at++) found.add(fresh.row(0, at), fresh.row(1, at));
    };
    find(current, begin, std::min(begin + window, end));
    for (int64_t window_begin = begin; window_begin < end; window_begin += window, std::swap(current, following)) {
        const int64_t window_end = std::min(window_begin + window, end);
        int64_t following_heads = heads;
        following.count = 0;
        if (window_end < end) {
            find(following, window_end, std::min(window_end + window, end));
        } else if (next) {
            const int64_t from = next->first_key(0);
            following.add_pages(*next, from, std::min(from + window, next->before));
            following_heads = next->heads;
        }
        following.repeat_last(window);
        const Window<T> keys{window_begin, window_end, head_stride, current.rows[0], current.rows[1]};
        for (int64_t h = 0; h < heads; h++)
            for (int64_t at = window_begin; at < window_end; at += SPAN) {
                const int64_t i = at - window_begin;
                Prefetcher<T, SPAN> prefetcher =
                    i < following.count && h < following_heads
                        ? Prefetcher<T, SPAN>(following.rows[0] + i, following.rows[1] + i, bytes, h * head_stride)
                        : Prefetcher<T, SPAN>();
                few.attend_to(h, keys, at, std::min(at + SPAN, window_end), prefetcher);
                prefetcher.fetch_rest();
            }
    }
    few.finish(source);
}

}  // namespace
