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
#include "window.h"

namespace {

constexpr int64_t FEW = 16;                // queries
constexpr int64_t WINDOW_BYTES = 1 << 17;  // of keys and values that all heads of a unit attend to before the next ones

#if AMX_TILES
template <typename T>
using FewOf = std::conditional_t<std::is_same_v<T, float>, FewInLanes<T>, FewInTiles>;
#else
template <typename T>
using FewOf = FewInLanes<T>;
#endif

// Keys per window for `keys` keys of this many bytes each, a multiple of `span`; windows are nearly equal.
inline int64_t window_of(int64_t keys, int64_t bytes, int64_t span) {
    const int64_t most = std::max(WINDOW_BYTES / bytes, span), windows = std::max<int64_t>((keys + most - 1) / most, 1);
    return ((keys + windows - 1) / windows + span - 1) / span * span;
}

// `count` <= FEW queries of whole cells and several heads; the keys of one token in two neighbouring heads lie `apart`
// numbers from each other, a multiple of the width. source.of(h) is one head's source. For the first head, its lines()
// also says which keys are in pages (`old`, `stored`) and which are not (`fresh`); `before` is how many are. `next`:
// the source of the unit that this thread is likely to take next, or null. None before `first` counts.
template <typename T, typename Source>
void attend_few(
    int64_t width, float scale, const Source& source, int64_t heads, int64_t apart, int64_t count, int64_t first,
    const Source* next, std::vector<float>& memory
) {
    constexpr int64_t SPAN = FewOf<T>::SPAN;
    FewOf<T> few(width, scale, heads, count);
    const int64_t begin = first / SPAN * SPAN, end = source.last(count - 1) + 1, bytes = width * int64_t(sizeof(T));
    const int64_t window = window_of(end - begin, 2 * heads * bytes, SPAN),
                  old = std::min(std::max(source.before, begin), end);
    // fresh keys lie as in pages
    const int64_t per = apart / width, copied = (end - old + per - 1) / per * heads * apart;
    Scratch scratch(memory, few.floats() + 4 * Scratch::floats<const T*>(window) + Scratch::floats<T>(2 * copied));
    few.begin(source, scratch);
    T* made = scratch.take<T>(2 * copied);
    const auto copy_of = [&](int64_t position, int64_t side) {
        return made + side * copied + (position - old) / per * heads * apart + (position - old) % per * width;
    };
    for (int64_t at = old; at < end; at++) {
        const auto lines = source.lines(at, 1);
        for (int64_t side = 0; side < 2; side++) {
            const float* from = lines.fresh[side];
            T* copy = copy_of(at, side);
            for (int64_t h = 0; h < heads; h++, copy += apart, from += width)
                for (int64_t f = 0; f < width; f++) store(copy, f, from[f]);
        }
    }
    struct Places {
        const T** of[2];  // keys and values of the first head
        int64_t count;
    } now{}, then{};  // in a window, and in the one after it
    for (Places* each : {&now, &then})
        for (int64_t side = 0; side < 2; side++) each->of[side] = scratch.take<const T*>(window);
    const auto find = [&](const Source& in, Places& places, int64_t from, int64_t to) {  // in pages
        for (int64_t tile = from; tile < to; tile += TILE) {
            const auto found = in.lines(tile, std::min(TILE, to - tile));
            for (int64_t side = 0; side < 2; side++)
                std::copy_n(found.stored[side], found.count, places.of[side] + tile - from);
        }
        places.count = std::max(to - from, int64_t(0));
    };
    const auto find_own = [&](Places& places, int64_t from, int64_t to) {
        find(source, places, from, std::min(to, old));
        for (int64_t at = from + places.count; at < to; at++, places.count++)
            for (int64_t side = 0; side < 2; side++) places.of[side][at - from] = copy_of(at, side);
    };
    find_own(now, begin, std::min(begin + window, end));
    for (int64_t begun = begin; begun < end; begun += window, std::swap(now, then)) {
        const int64_t behind = std::min(begun + window, end);
        int64_t following = heads;  // whose memory is prefetched
        if (behind < end) find_own(then, behind, std::min(behind + window, end));
        else if (next) find(*next, then, begin, std::min(begin + window, next->before)), following = next->heads;
        else then.count = 0;
        for (int64_t side = 0; side < 2 && then.count; side++)
            std::fill(then.of[side] + then.count, then.of[side] + window, then.of[side][then.count - 1]);
        const Window<T> keys{begun, behind, apart, now.of[0], now.of[1]};
        for (int64_t h = 0; h < heads; h++)
            for (int64_t at = begun; at < behind; at += SPAN) {
                const int64_t i = at - begun;
                const bool more = i < then.count && h < following;
                Upcoming<T, SPAN> upcoming = more ? Upcoming<T, SPAN>(then.of[0] + i, then.of[1] + i, bytes, h * apart)
                                                  : Upcoming<T, SPAN>();
                few.attend_to(h, keys, at, std::min(at + SPAN, behind), first, upcoming);
                upcoming.fetch_rest();
            }
    }
    few.finish(source);
}

}  // namespace
