// Attention of up to 16 queries: the same sums in the same order as in flash.h. Keys are in the lanes for the scores, features
// for the outputs, and queries are multiplied one after the other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "flash.h"
#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int64_t FEW = 16;                // queries
constexpr int64_t SPAN = 32;               // keys whose scores are computed together: several tiles
constexpr int64_t WINDOW_BYTES = 1 << 17;  // of keys and values that all heads of a unit attend to before the next ones
static_assert(SPAN == 32 && SPAN % TILE == 0);

// Memory that is needed later: a few lines of 64 bytes are prefetched between computations, because a processor ignores
// prefetches while it waits for as many lines as it can. Lines alternate between keys, values and two pages: neighbouring lines
// would come from one memory channel.
class Upcoming {
  public:
    explicit Upcoming(const void* unused) { rows_[0] = static_cast<const char*>(unused); }  // nothing is needed
    // SPAN keys and as many values of so many bytes, `skip` numbers behind these pointers.
    template <typename T>
    Upcoming(const T* const* keys, const T* const* values, int64_t bytes, int64_t skip) {
        while (64 << shift_ < bytes) shift_++;
        last_ = (2 * SPAN << shift_) - 1;
        for (int64_t i = 0; i < SPAN / 2; i++)
            for (int64_t half = 0; half < 2; half++) {
                rows_[4 * i + 2 * half] = reinterpret_cast<const char*>(keys[i + half * SPAN / 2] + skip);
                rows_[4 * i + 2 * half + 1] = reinterpret_cast<const char*>(values[i + half * SPAN / 2] + skip);
            }
    }
    inline __attribute__((always_inline)) void fetch(int lines) {  // after the last line, that one again: cheaper than a branch
        for (int i = 0; i < lines; i++) {
            const int64_t at = std::min(line_++, last_);
            fetch_line(rows_[at >> shift_] + (at & ((int64_t(1) << shift_) - 1)) * 64);
        }
    }

  private:
    int64_t shift_ = 0, last_ = 0, line_ = 0;  // a row has 1 << shift lines
    const char* rows_[2 * SPAN];
};

// The queries of one head, and how far they have come. Keys are in the lanes, so a probability takes as many instructions
// as there are queries; in flash.h, where queries are in the lanes, few of them would leave most lanes empty.
template <typename T>
struct FewQueries {
    using Cells = CellsOf<T>;
    static constexpr int64_t CHANCES = SPAN / Cells::EACH;  // cells of a query's probabilities
    static constexpr int MOST = VECTOR_REGISTERS == 1 ? 4 : 2, WIDE = VECTOR_REGISTERS == 1 ? 64 : 32;  // queries, features at a time
    const Head& head;
    int64_t count, begin, end;             // queries; keys of a window
    const uint32_t* queries;               // [count][padded]
    const T *const *keys, *const *values;  // from `begin` on ...
    int64_t skip;                          // ... of the heads before this one
    Lanes& lanes;
    float* out;         // [count][wide]
    int64_t wide;       // width, rounded up to WIDE
    uint32_t* packed;   // [padded][SPAN]: cells of the keys
    float* scores;      // [count][SPAN]
    uint32_t* chances;  // [count][CHANCES]: probabilities of the keys from `pending` on, not yet multiplied with values
    int64_t pending = 0;

    const T* row(const T* const* rows, int64_t at) const { return rows[std::min(at, end - 1) - begin] + skip; }

    // Keys [at, to), at most SPAN, from a multiple of TILE on; none before `first` counts.
    void attend_to(int64_t at, int64_t to, int64_t first, Upcoming& upcoming) {
        if (to - at > 16) attend_to<2>(at, to, first, upcoming);
        else attend_to<1>(at, to, first, upcoming);
    }

  private:
    template <int V>
    void attend_to(int64_t at, int64_t to, int64_t first, Upcoming& upcoming) {
        pending = at;
        pack<V>(at, upcoming);
        in_groups<MOST>(count, [&](auto group, int64_t q) { multiply<V, group()>(q, upcoming); });
        if (at + 16 * V > lanes.nearest + 1 || at < first) close<V>(at, first);
        if (__builtin_expect(far<V>(), 0)) {
            for (int64_t tile = at; tile < to; tile += TILE) weigh_tile(tile, scores + (tile - at), upcoming);
        } else {
            weigh<V>(upcoming);
        }
        add_until(to, upcoming);
    }

    template <int V>
    void pack(int64_t at, Upcoming& upcoming) const {
        const T* rows[16 * V];
        for (int i = 0; i < 16 * V; i++) rows[i] = row(keys, at + i);
        for (int64_t cell = 0; cell < head.cells; cell += 16)
            for (int v = 0; v < V; v++)
                transpose16([&](int i) {
                    if (i % 4 == 0) upcoming.fetch(2);
                    return Cells::row(rows[16 * v + i], head.width, cell);
                }, packed + cell * SPAN + 16 * v, SPAN);
    }

    template <int V, int J>
    void multiply(int64_t first, Upcoming& upcoming) {
        Floats sum[J][V];
        for (int j = 0; j < J; j++)
            for (int v = 0; v < V; v++) sum[j][v] = zero();
        const uint32_t *key = packed, *query = queries + first * head.padded;
        for (int64_t cell = 0; cell < head.cells; cell++, key += SPAN, query++) {
            Words column[V];
            for (int v = 0; v < V; v++) column[v] = load_words(key + 16 * v);
            upcoming.fetch(1);
            for (int j = 0; j < J; j++) {
                const Words x = splat_word(int32_t(query[j * head.padded]));
                for (int v = 0; v < V; v++) sum[j][v] = Cells::multiply(sum[j][v], column[v], x);
            }
        }
        for (int j = 0; j < J; j++)
            for (int v = 0; v < V; v++) store_floats(scores + (first + j) * SPAN + 16 * v, sum[j][v]);
    }

    // Scores of keys before `first`, or after a query's last key, become scores without weight.
    template <int V>
    void close(int64_t at, int64_t first) {
        alignas(64) static constexpr int32_t LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int v = 0; v < V; v++) {
            const Words key = add32(load_words(LANE), splat_word(int32_t(at + 16 * v)));
            const Mask from = at_least(key, splat_word(int32_t(first)));
            for (int64_t q = 0; q < count; q++) {
                float* score = scores + q * SPAN + 16 * v;
                const Mask open = from & at_least(splat_word(lanes.last[q]), key);
                store_floats(score, select(open, load_floats(score), splat(-__builtin_inff())));
            }
        }
    }

    // Whether a query has a score far above its reference.
    template <int V>
    bool far() const {
        const Floats scale = splat(head.scale);
        uint32_t found = 0;
        for (int64_t q = 0; q < count; q++) {
            Floats largest = load_floats(scores + q * SPAN);
            if (V == 2) largest = larger(largest, load_floats(scores + q * SPAN + 16));
            found |= above(largest * scale, splat(lanes.reference[q] + HEADROOM));
        }
        return found != 0;
    }

    template <int V>
    void weigh(Upcoming& upcoming) {
        const Floats scale = splat(head.scale);
        for (int64_t q = 0; q < count; q++) {
            const Floats reference = splat(lanes.reference[q]);
            Floats chance[2] = {zero(), zero()};
            for (int v = 0; v < V; v++) {
                chance[v] = Cells::power(fmsub(load_floats(scores + q * SPAN + 16 * v), scale, reference));
                float sums[2];
                sums_of_eights(chance[v], sums);
                lanes.sum[q] = (lanes.sum[q] + sums[0]) + sums[1];
            }
            Cells::store(chances + q * CHANCES, chance);
            upcoming.fetch(8);
        }
    }

    // One tile, where references may change: before its probabilities, as in flash.h.
    void weigh_tile(int64_t at, const float* score, Upcoming& upcoming) {
        constexpr Mask TILE_LANES = (1 << TILE) - 1;
        for (int64_t q = 0; q < count; q++) {
            const float largest = *std::max_element(score + q * SPAN, score + q * SPAN + TILE) * head.scale;
            if (!(largest > lanes.reference[q] + HEADROOM)) continue;
            add_until(at, upcoming);
            alignas(64) float factor[16];
            store_floats(factor, Cells::power(splat(lanes.reference[q] - largest)));
            lanes.reference[q] = largest, lanes.sum[q] *= factor[0];
            for (int64_t i = 0; i < wide; i += 16) store_floats(out + q * wide + i, load_floats(out + q * wide + i) * splat(factor[0]));
        }
        for (int64_t q = 0; q < count; q++) {
            const Floats eight = load_or(splat(-__builtin_inff()), TILE_LANES, score + q * SPAN);
            const Floats chance[2] = {Cells::power(fmsub(eight, splat(head.scale), splat(lanes.reference[q]))), zero()};
            float sums[2];
            sums_of_eights(chance[0], sums);
            lanes.sum[q] += sums[0];
            alignas(64) uint32_t cells[SPAN];
            Cells::store(cells, chance);
            std::copy_n(cells, TILE / Cells::EACH, chances + q * CHANCES + (at - pending) / Cells::EACH);
        }
    }

    // Multiplies the probabilities of keys [pending, to) with their values.
    void add_until(int64_t to, Upcoming& upcoming) {
        for (int64_t feature = 0; feature < head.width && pending < to; feature += WIDE)
            in_groups<MOST>(count, [&](auto group, int64_t q) { add<group()>(q, feature, to, upcoming); });
        pending = to;
    }

    // For J queries from `first` on, WIDE features from `feature` on.
    template <int J>
    void add(int64_t first, int64_t feature, int64_t to, Upcoming& upcoming) const {
        constexpr int F = WIDE / 32;
        float* y = out + first * wide + feature;
        const uint32_t* chance = chances + first * CHANCES;
        Floats sum[J][2 * F];
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2 * F; f++) sum[j][f] = load_floats(y + j * wide + 16 * f);
        for (int64_t at = pending; at < to; at += Cells::EACH, chance++) {
            const T* a = row(values, at) + feature;
            const T* b = Cells::EACH == 1 ? a : row(values, at + 1) + feature;
            upcoming.fetch(3);
            Words cells[F][2];
            for (int f = 0; f < F; f++) Cells::between(a + 32 * f, b + 32 * f, head.width - feature - 32 * f, cells[f]);
            for (int j = 0; j < J; j++) {
                const Words x = splat_word(int32_t(chance[j * CHANCES]));
                for (int f = 0; f < 2 * F; f++) sum[j][f] = Cells::multiply(sum[j][f], x, cells[f / 2][f % 2]);
            }
        }
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2 * F; f++) store_floats(y + j * wide + 16 * f, sum[j][f]);
    }
};

// Keys per window for `keys` keys of this many bytes each; windows are nearly equal.
inline int64_t window_of(int64_t keys, int64_t bytes) {
    const int64_t most = std::max(WINDOW_BYTES / bytes, SPAN), windows = std::max<int64_t>((keys + most - 1) / most, 1);
    return ((keys + windows - 1) / windows + SPAN - 1) / SPAN * SPAN;
}

// Like `attend` in flash.h, for `count` <= FEW queries of whole cells and several heads; the keys of one token in two
// neighbouring heads lie `apart` numbers from each other, a multiple of the width. source.of(h) is one head's source. For the
// first head, its lines() also says which keys are in pages (`old`, `stored`) and which are not (`fresh`); `before` is how many
// are. `next`: that of the unit that this thread is likely to take next, or null.
template <typename T, typename Source>
void attend_few(
    const Head& head, const Source& source, int64_t heads, int64_t apart, int64_t count, int64_t first, const Source* next,
    std::vector<float>& memory
) {
    using Cells = CellsOf<T>;
    using Queries = FewQueries<T>;
    const int64_t begin = first / TILE * TILE, end = source.last(count - 1) + 1;
    const int64_t wide = (head.width + Queries::WIDE - 1) / Queries::WIDE * Queries::WIDE, bytes = head.width * int64_t(sizeof(T));
    const int64_t window = window_of(end - begin, 2 * heads * bytes), old = std::min(std::max(source.before, begin), end);
    const int64_t per = apart / head.width, copied = (end - old + per - 1) / per * heads * apart;  // fresh keys lie as in pages
    const int64_t of_queries = count * head.padded, of_out = count * wide;
    Scratch scratch(memory, 4 * Scratch::floats<const T*>(window) + Scratch::floats<T>(2 * copied)
        + Scratch::floats<Lanes>(heads) + Scratch::floats<uint32_t>(heads * of_queries) + Scratch::floats<float>(heads * of_out)
        + Scratch::floats<uint32_t>(head.padded * SPAN) + Scratch::floats<float>(count * SPAN)
        + Scratch::floats<uint32_t>(count * Queries::CHANCES));
    T* made = scratch.take<T>(2 * copied);
    const auto copy_of = [&](int64_t position, int64_t side) {
        return made + side * copied + (position - old) / per * heads * apart + (position - old) % per * head.width;
    };
    for (int64_t at = old; at < end; at++) {
        const auto lines = source.lines(at, 1);
        for (int64_t side = 0; side < 2; side++) {
            const float* from = lines.fresh[side];
            T* copy = copy_of(at, side);
            for (int64_t h = 0; h < heads; h++, copy += apart, from += head.width)
                for (int64_t f = 0; f < head.width; f++) store(copy, f, from[f]);
        }
    }
    Lanes* lanes = scratch.take<Lanes>(heads);
    uint32_t* queries = scratch.take<uint32_t>(heads * of_queries);
    float* out = scratch.take<float>(heads * of_out);
    uint32_t* packed = scratch.take<uint32_t>(head.padded * SPAN);
    float* scores = scratch.take<float>(count * SPAN);
    uint32_t* chances = scratch.take<uint32_t>(count * Queries::CHANCES);
    std::fill(out, out + heads * of_out, 0.0f);
    for (int64_t h = 0; h < heads; h++) {
        lanes[h].begin(source, 0, count);
        for (int64_t i = 0; i < count; i++)
            for (int64_t cell = 0; cell < head.padded; cell += 16)
                store_words(queries + h * of_queries + i * head.padded + cell, source.of(h).query(Cells(), i, cell));
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
            for (int64_t side = 0; side < 2; side++) std::copy_n(found.stored[side], found.count, places.of[side] + tile - from);
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
        for (int64_t h = 0; h < heads; h++) {
            Queries few{head, count, begun, behind, queries + h * of_queries, now.of[0], now.of[1], h * apart, lanes[h],
                out + h * of_out, wide, packed, scores, chances};
            for (int64_t at = begun; at < behind; at += SPAN) {
                const bool more = at - begun < then.count && h < following;
                const int64_t i = at - begun;
                Upcoming upcoming = more ? Upcoming(then.of[0] + i, then.of[1] + i, bytes, h * apart) : Upcoming(now.of[0][0]);
                few.attend_to(at, std::min(at + SPAN, behind), first, upcoming);
            }
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        alignas(64) float inverse[16];
        store_floats(inverse, lanes[h].inverse(0));
        for (int64_t j = 0; j < count; j++) {
            float* numbers = out + h * of_out + j * wide;
            for (int64_t i = 0; i < head.width; i++) numbers[i] *= inverse[j];
            source.of(h).write(j, numbers);
        }
    }
}

}  // namespace
