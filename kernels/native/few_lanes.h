// Attention of up to 16 queries: the same sums in the same order as in flash.h. Keys are in the lanes for the scores,
// features for the outputs, and queries are multiplied one after the other.

#pragma once

#include <algorithm>
#include <cstdint>

#include "flash.h"
#include "numbers.h"
#include "scratch.h"
#include "tiles.h"
#include "transpose.h"
#include "window.h"

namespace {

// Attention of one head's queries to spans of keys. With keys in the lanes, the probabilities of 16 keys take an
// instruction for each query; with queries in the lanes, as in flash.h, few queries would leave most lanes empty.
template <typename T>
struct FewQueries {
    using Cells = CellsOf<T>;
    static constexpr int64_t SPAN = 32;  // keys whose scores are computed together: several tiles
    static constexpr int64_t PROBABILITY_CELLS = SPAN / Cells::EACH;  // cells of a query's probabilities
    static_assert(SPAN == 32 && SPAN % TILE == 0);
    // Queries, and features of outputs, that are computed together.
    static constexpr int GROUP_QUERIES = VECTOR_REGISTERS == 1 ? 4 : 2;
    static constexpr int GROUP_FEATURES = VECTOR_REGISTERS == 1 ? 64 : 32;

    const HeadShape& head;
    int64_t count;            // queries
    const uint32_t* queries;  // [count][padded]
    const Window<T>& window;
    int64_t head_index;  // in the window
    SoftmaxState& softmax;
    float* out;               // [count][padded_width]
    int64_t padded_width;     // a multiple of GROUP_FEATURES
    uint32_t* packed;         // [padded][SPAN]: cells of the keys
    float* scores;            // [count][SPAN]
    uint32_t* probabilities;  // [count][PROBABILITY_CELLS], of the keys from `pending` on
    int64_t pending = 0;      // the first key whose value is not in `out` yet

    // Keys [at, to), at most SPAN, from a multiple of TILE on.
    void attend_to(int64_t at, int64_t to, Prefetcher<T, SPAN>& prefetcher) {
        if (to - at > 16) attend_to<2>(at, to, prefetcher);
        else attend_to<1>(at, to, prefetcher);
    }

  private:
    template <int V>
    void attend_to(int64_t at, int64_t to, Prefetcher<T, SPAN>& prefetcher) {
        pending = at;
        pack<V>(at, prefetcher);
        in_groups<GROUP_QUERIES>(count, [&](auto group, int64_t q) { multiply<V, group()>(q, prefetcher); });
        if (at + 16 * V > softmax.min_last + 1 || at < softmax.max_first) mask_scores<V>(at);
        if (__builtin_expect(exceeds<V>(), 0)) {
            for (int64_t tile = at; tile < to; tile += TILE) exponentiate_tile(tile, scores + (tile - at), prefetcher);
        } else {
            exponentiate<V>(prefetcher);
        }
        add_until(to, prefetcher);
    }

    template <int V>
    void pack(int64_t at, Prefetcher<T, SPAN>& prefetcher) const {
        const T* rows[16 * V];
        for (int i = 0; i < 16 * V; i++) rows[i] = window.row(window.keys, at + i, head_index);
        for (int64_t cell = 0; cell < head.cells; cell += 16)
            for (int v = 0; v < V; v++)
                transpose16(
                    [&](int i) {
                        if (i % 4 == 0) prefetcher.fetch();
                        return Cells::row(rows[16 * v + i], head.width, cell);
                    },
                    packed + cell * SPAN + 16 * v, SPAN
                );
    }

    template <int V, int J>
    void multiply(int64_t first, Prefetcher<T, SPAN>& prefetcher) {
        Floats sum[J][V];
        for (int j = 0; j < J; j++)
            for (int v = 0; v < V; v++) sum[j][v] = zero();
        const uint32_t *key = packed, *query = queries + first * head.padded;
        for (int64_t cell = 0; cell < head.cells; cell++, key += SPAN, query++) {
            Words column[V];
            for (int v = 0; v < V; v++) column[v] = load_words(key + 16 * v);
            if (cell % 2 == 0) prefetcher.fetch();
            for (int j = 0; j < J; j++) {
                const Words x = splat_word(int32_t(query[j * head.padded]));
                for (int v = 0; v < V; v++) sum[j][v] = Cells::multiply(sum[j][v], column[v], x);
            }
        }
        for (int j = 0; j < J; j++)
            for (int v = 0; v < V; v++) store_floats(scores + (first + j) * SPAN + 16 * v, sum[j][v]);
    }

    // Scores of keys before a query's first key, or after its last one, become minus infinity.
    template <int V>
    void mask_scores(int64_t at) {
        alignas(64) static constexpr int32_t LANE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int v = 0; v < V; v++) {
            const Words key = add32(load_words(LANE), splat_word(int32_t(at + 16 * v)));
            for (int64_t q = 0; q < count; q++) {
                float* score = scores + q * SPAN + 16 * v;
                const Mask visible = at_least(key, splat_word(softmax.first[q])) &
                                     at_least(splat_word(softmax.last[q]), key);
                store_floats(score, select(visible, load_floats(score), splat(-__builtin_inff())));
            }
        }
    }

    // Whether a query has a score that exceeds its reference by more than HEADROOM.
    template <int V>
    bool exceeds() const {
        const Floats scale = splat(head.scale);
        uint32_t found = 0;
        for (int64_t q = 0; q < count; q++) {
            Floats largest = load_floats(scores + q * SPAN);
            if (V == 2) largest = larger(largest, load_floats(scores + q * SPAN + 16));
            found |= above(largest * scale, splat(softmax.reference[q] + HEADROOM));
        }
        return found != 0;
    }

    template <int V>
    void exponentiate(Prefetcher<T, SPAN>& prefetcher) {
        const Floats scale = splat(head.scale);
        for (int64_t q = 0; q < count; q++) {
            const Floats reference = splat(softmax.reference[q]);
            Floats probability[2] = {zero(), zero()};
            for (int v = 0; v < V; v++) {
                probability[v] = Cells::exp2(fmsub(load_floats(scores + q * SPAN + 16 * v), scale, reference));
                float sums[2];
                sums_of_eights(probability[v], sums);
                softmax.sum[q] = (softmax.sum[q] + sums[0]) + sums[1];
            }
            Cells::store(probabilities + q * PROBABILITY_CELLS, probability);
            prefetcher.fetch(4);
        }
    }

    // One tile, where references may change: before its probabilities, as in flash.h.
    void exponentiate_tile(int64_t at, const float* score, Prefetcher<T, SPAN>& prefetcher) {
        constexpr Mask TILE_LANES = (1 << TILE) - 1;
        for (int64_t q = 0; q < count; q++) {
            const float largest = *std::max_element(score + q * SPAN, score + q * SPAN + TILE) * head.scale;
            if (!(largest > softmax.reference[q] + HEADROOM)) continue;
            add_until(at, prefetcher);
            alignas(64) float factor[16];
            store_floats(factor, Cells::exp2(splat(softmax.reference[q] - largest)));
            softmax.reference[q] = largest, softmax.sum[q] *= factor[0];
            for (int64_t i = 0; i < padded_width; i += 16)
                store_floats(out + q * padded_width + i, load_floats(out + q * padded_width + i) * splat(factor[0]));
        }
        for (int64_t q = 0; q < count; q++) {
            const Floats eight = load_or(splat(-__builtin_inff()), TILE_LANES, score + q * SPAN);
            const Floats probability[2] = {
                Cells::exp2(fmsub(eight, splat(head.scale), splat(softmax.reference[q]))), zero()
            };
            float sums[2];
            sums_of_eights(probability[0], sums);
            softmax.sum[q] += sums[0];
            alignas(64) uint32_t cells[SPAN];
            Cells::store(cells, probability);
            std::copy_n(
                cells, TILE / Cells::EACH, probabilities + q * PROBABILITY_CELLS + (at - pending) / Cells::EACH
            );
        }
    }

    // Multiplies the probabilities of keys [pending, to) with their values.
    void add_until(int64_t to, Prefetcher<T, SPAN>& prefetcher) {
        for (int64_t feature = 0; feature < head.width && pending < to; feature += GROUP_FEATURES)
            in_groups<GROUP_QUERIES>(count, [&](auto group, int64_t q) { add<group()>(q, feature, to, prefetcher); });
        pending = to;
    }

    // For J queries from `first` on, GROUP_FEATURES features from `feature` on.
    template <int J>
    void add(int64_t first, int64_t feature, int64_t to, Prefetcher<T, SPAN>& prefetcher) const {
        constexpr int F = GROUP_FEATURES / 32;
        float* y = out + first * padded_width + feature;
        const uint32_t* probability = probabilities + first * PROBABILITY_CELLS;
        Floats sum[J][2 * F];
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2 * F; f++) sum[j][f] = load_floats(y + j * padded_width + 16 * f);
        for (int64_t at = pending; at < to; at += Cells::EACH, probability++) {
            const T* a = window.row(window.values, at, head_index) + feature;
            const T* b = Cells::EACH == 1 ? a : window.row(window.values, at + 1, head_index) + feature;
            prefetcher.fetch(Cells::EACH);
            Words cells[F][2];
            for (int f = 0; f < F; f++) Cells::between(a + 32 * f, b + 32 * f, head.width - feature - 32 * f, cells[f]);
            for (int j = 0; j < J; j++) {
                const Words x = splat_word(int32_t(probability[j * PROBABILITY_CELLS]));
                for (int f = 0; f < 2 * F; f++) sum[j][f] = Cells::multiply(sum[j][f], x, cells[f / 2][f % 2]);
            }
        }
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2 * F; f++) store_floats(y + j * padded_width + 16 * f, sum[j][f]);
    }
};

// Up to MAX_FEW_QUERIES queries of each of several heads. Queries have whole cells.
template <typename T>
class FewInLanes {
  public:
    using Queries = FewQueries<T>;
    static constexpr int64_t SPAN = Queries::SPAN;

    FewInLanes(int64_t width, float scale, int64_t heads, int64_t count)
        : head_(HeadShape::of<Cells>(width, scale)), heads_(heads), count_(count),
          padded_width_((width + Queries::GROUP_FEATURES - 1) / Queries::GROUP_FEATURES * Queries::GROUP_FEATURES) {}

    int64_t floats() const {
        return Scratch::floats<SoftmaxState>(heads_) + Scratch::floats<uint32_t>(heads_ * of_queries()) +
               Scratch::floats<float>(heads_ * of_out()) + Scratch::floats<uint32_t>(head_.padded * SPAN) +
               Scratch::floats<float>(count_ * SPAN) + Scratch::floats<uint32_t>(count_ * Queries::PROBABILITY_CELLS);
    }
    template <typename Source>
    void begin(const Source& source, Scratch& scratch) {
        softmax_ = scratch.take<SoftmaxState>(heads_);
        queries_ = scratch.take<uint32_t>(heads_ * of_queries());
        out_ = scratch.take<float>(heads_ * of_out());
        packed_ = scratch.take<uint32_t>(head_.padded * SPAN);
        scores_ = scratch.take<float>(count_ * SPAN);
        probabilities_ = scratch.take<uint32_t>(count_ * Queries::PROBABILITY_CELLS);
        std::fill_n(out_, heads_ * of_out(), 0.0f);
        for (int64_t h = 0; h < heads_; h++) {
            softmax_[h].begin(source, 0, count_);
            for (int64_t i = 0; i < count_; i++)
                for (int64_t cell = 0; cell < head_.padded; cell += 16)
                    store_words(
                        queries_ + h * of_queries() + i * head_.padded + cell,
                        source.for_head(h).query(Cells(), i, cell)
                    );
        }
    }
    // Keys [at, to) of a window, at most SPAN, for head h.
    void attend_to(int64_t h, const Window<T>& window, int64_t at, int64_t to, Prefetcher<T, SPAN>& prefetcher) {
        const uint32_t* queries = queries_ + h * of_queries();
        float* out = out_ + h * of_out();
        Queries few{head_,         count_,  queries, window,        h, softmax_[h], out,
                    padded_width_, packed_, scores_, probabilities_};
        few.attend_to(at, to, prefetcher);
    }
    template <typename Source>
    void finish(const Source& source) {
        for (int64_t h = 0; h < heads_; h++) {
            alignas(64) float inverse[16];
            store_floats(inverse, softmax_[h].inverse(0));
            for (int64_t j = 0; j < count_; j++) {
                float* numbers = out_ + h * of_out() + j * padded_width_;
                for (int64_t i = 0; i < head_.width; i++) numbers[i] *= inverse[j];
                source.for_head(h).write(j, numbers);
            }
        }
    }

  private:
    using Cells = CellsOf<T>;
    int64_t of_queries() const { return count_ * head_.padded; }
    int64_t of_out() const { return count_ * padded_width_; }

    const HeadShape head_;
    const int64_t heads_, count_, padded_width_;
    SoftmaxState* softmax_ = nullptr;
    uint32_t *queries_ = nullptr, *packed_ = nullptr, *probabilities_ = nullptr;
    float *out_ = nullptr, *scores_ = nullptr;
};

}  // namespace
