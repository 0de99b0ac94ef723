// Attention of up to 16 queries: the same sums in the same order as in flash.h. Keys are in the lanes for the scores,
// features for the outputs, and queries are multiplied one after the other.

#pragma once

#include <algorithm>
#include <cstdint>

#include "flash.h"
#include "numbers.h"
#include "tiles.h"
#include "window.h"

namespace {

// The queries of one head, and how far they have come. Keys are in the lanes, so a probability takes as many
// instructions as there are queries; in flash.h, where queries are in the lanes, few of them would leave most lanes
// empty.
template <typename T>
struct FewQueries {
    using Cells = CellsOf<T>;
    static constexpr int64_t SPAN = 32;                     // keys whose scores are computed together: several tiles
    static constexpr int64_t CHANCES = SPAN / Cells::EACH;  // cells of a query's probabilities
    static_assert(SPAN == 32 && SPAN % TILE == 0);
    // queries, features at a time
    static constexpr int MOST = VECTOR_REGISTERS == 1 ? 4 : 2, WIDE = VECTOR_REGISTERS == 1 ? 64 : 32;
    const Head& head;
    int64_t count;            // queries
    const uint32_t* queries;  // [count][padded]
    const Window<T>& window;
    int64_t number;  // of the head in the window
    Lanes& lanes;
    float* out;         // [count][wide]
    int64_t wide;       // width, rounded up to WIDE
    uint32_t* packed;   // [padded][SPAN]: cells of the keys
    float* scores;      // [count][SPAN]
    uint32_t* chances;  // [count][CHANCES]: probabilities of the keys from `pending` on, not yet multiplied with values
    int64_t pending = 0;

    // Keys [at, to), at most SPAN, from a multiple of TILE on; none before `first` counts.
    void attend_to(int64_t at, int64_t to, int64_t first, Upcoming<T, SPAN>& upcoming) {
        if (to - at > 16) attend_to<2>(at, to, first, upcoming);
        else attend_to<1>(at, to, first, upcoming);
    }

  private:
    template <int V>
    void attend_to(int64_t at, int64_t to, int64_t first, Upcoming<T, SPAN>& upcoming) {
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
    void pack(int64_t at, Upcoming<T, SPAN>& upcoming) const {
        const T* rows[16 * V];
        for (int i = 0; i < 16 * V; i++) rows[i] = window.row(window.keys, at + i, number);
        for (int64_t cell = 0; cell < head.cells; cell += 16)
            for (int v = 0; v < V; v++)
                transpose16(
                    [&](int i) {
                        if (i % 4 == 0) upcoming.fetch();
                        return Cells::row(rows[16 * v + i], head.width, cell);
                    },
                    packed + cell * SPAN + 16 * v, SPAN
                );
    }

    template <int V, int J>
    void multiply(int64_t first, Upcoming<T, SPAN>& upcoming) {
        Floats sum[J][V];
        for (int j = 0; j < J; j++)
            for (int v = 0; v < V; v++) sum[j][v] = zero();
        const uint32_t *key = packed, *query = queries + first * head.padded;
        for (int64_t cell = 0; cell < head.cells; cell++, key += SPAN, query++) {
            Words column[V];
            for (int v = 0; v < V; v++) column[v] = load_words(key + 16 * v);
            if (cell % 2 == 0) upcoming.fetch();
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
    void weigh(Upcoming<T, SPAN>& upcoming) {
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
            upcoming.fetch(4);
        }
    }

    // One tile, where references may change: before its probabilities, as in flash.h.
    void weigh_tile(int64_t at, const float* score, Upcoming<T, SPAN>& upcoming) {
        constexpr Mask TILE_LANES = (1 << TILE) - 1;
        for (int64_t q = 0; q < count; q++) {
            const float largest = *std::max_element(score + q * SPAN, score + q * SPAN + TILE) * head.scale;
            if (!(largest > lanes.reference[q] + HEADROOM)) continue;
            add_until(at, upcoming);
            alignas(64) float factor[16];
            store_floats(factor, Cells::power(splat(lanes.reference[q] - largest)));
            lanes.reference[q] = largest, lanes.sum[q] *= factor[0];
            for (int64_t i = 0; i < wide; i += 16)
                store_floats(out + q * wide + i, load_floats(out + q * wide + i) * splat(factor[0]));
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
    void add_until(int64_t to, Upcoming<T, SPAN>& upcoming) {
        for (int64_t feature = 0; feature < head.width && pending < to; feature += WIDE)
            in_groups<MOST>(count, [&](auto group, int64_t q) { add<group()>(q, feature, to, upcoming); });
        pending = to;
    }

    // For J queries from `first` on, WIDE features from `feature` on.
    template <int J>
    void add(int64_t first, int64_t feature, int64_t to, Upcoming<T, SPAN>& upcoming) const {
        constexpr int F = WIDE / 32;
        float* y = out + first * wide + feature;
        const uint32_t* chance = chances + first * CHANCES;
        Floats sum[J][2 * F];
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2 * F; f++) sum[j][f] = load_floats(y + j * wide + 16 * f);
        for (int64_t at = pending; at < to; at += Cells::EACH, chance++) {
            const T* a = window.row(window.values, at, number) + feature;
            const T* b = Cells::EACH == 1 ? a : window.row(window.values, at + 1, number) + feature;
            upcoming.fetch(Cells::EACH);
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

// Up to FEW queries of each of several heads. Queries have whole cells.
template <typename T>
class FewInLanes {
  public:
    using Queries = FewQueries<T>;
    static constexpr int64_t SPAN = Queries::SPAN;

    FewInLanes(int64_t width, float scale, int64_t heads, int64_t count)
        : head_(Head::of<Cells>(width, scale)), heads_(heads), count_(count),
          wide_((width + Queries::WIDE - 1) / Queries::WIDE * Queries::WIDE) {}

    int64_t floats() const {
        return Scratch::floats<Lanes>(heads_) + Scratch::floats<uint32_t>(heads_ * of_queries()) +
               Scratch::floats<float>(heads_ * of_out()) + Scratch::floats<uint32_t>(head_.padded * SPAN) +
               Scratch::floats<float>(count_ * SPAN) + Scratch::floats<uint32_t>(count_ * Queries::CHANCES);
    }
    template <typename Source>
    void begin(const Source& source, Scratch& scratch) {
        lanes_ = scratch.take<Lanes>(heads_);
        queries_ = scratch.take<uint32_t>(heads_ * of_queries());
        out_ = scratch.take<float>(heads_ * of_out());
        packed_ = scratch.take<uint32_t>(head_.padded * SPAN);
        scores_ = scratch.take<float>(count_ * SPAN);
        chances_ = scratch.take<uint32_t>(count_ * Queries::CHANCES);
        std::fill_n(out_, heads_ * of_out(), 0.0f);
        for (int64_t h = 0; h < heads_; h++) {
            lanes_[h].begin(source, 0, count_);
            for (int64_t i = 0; i < count_; i++)
                for (int64_t cell = 0; cell < head_.padded; cell += 16)
                    store_words(
                        queries_ + h * of_queries() + i * head_.padded + cell, source.of(h).query(Cells(), i, cell)
                    );
        }
    }
    // Keys [at, to) of a window, at most SPAN, for head h; none before `first` counts.
    void attend_to(
        int64_t h, const Window<T>& window, int64_t at, int64_t to, int64_t first, Upcoming<T, SPAN>& upcoming
    ) {
        const uint32_t* queries = queries_ + h * of_queries();
        float* out = out_ + h * of_out();
        Queries few{head_, count_, queries, window, h, lanes_[h], out, wide_, packed_, scores_, chances_};
        few.attend_to(at, to, first, upcoming);
    }
    template <typename Source>
    void finish(const Source& source) {
        for (int64_t h = 0; h < heads_; h++) {
            alignas(64) float inverse[16];
            store_floats(inverse, lanes_[h].inverse(0));
            for (int64_t j = 0; j < count_; j++) {
                float* numbers = out_ + h * of_out() + j * wide_;
                for (int64_t i = 0; i < head_.width; i++) numbers[i] *= inverse[j];
                source.of(h).write(j, numbers);
            }
        }
    }

  private:
    using Cells = CellsOf<T>;
    int64_t of_queries() const { return count_ * head_.padded; }
    int64_t of_out() const { return count_ * wide_; }

    const Head head_;
    const int64_t heads_, count_, wide_;
    Lanes* lanes_ = nullptr;
    uint32_t *queries_ = nullptr, *packed_ = nullptr, *chances_ = nullptr;
    float *out_ = nullptr, *scores_ = nullptr;
};

}  // namespace
