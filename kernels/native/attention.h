// Attention of a row's new tokens and one key/value head: over what lies in the row's pages, and over each other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flash.h"
#include "numbers.h"
#include "structs.h"

namespace {

constexpr int64_t TOKEN_LANES = 10 * LANES;  // queries of a unit: each packs the row's keys for itself

inline int64_t tokens_of_unit(const Model& m) { return std::max<int64_t>(TOKEN_LANES / (m.q_heads / m.kv_heads), 1); }

inline int64_t token_blocks(const Model& m, const Step& step, int64_t row) {
    return (step.starts[row + 1] - step.starts[row] + tokens_of_unit(m) - 1) / tokens_of_unit(m);
}

// Blocks of a scanned row; the other rows are one each.
inline int64_t most_blocks(const Model& m, const Step& step) {
    int64_t most = 1;
    for (int64_t row = step.rows - step.scans; row < step.rows; row++) most = std::max(most, token_blocks(m, step, row));
    return most;
}

inline int64_t attention_units(const Model& m, const Step& step) {
    return (step.rows - step.scans + step.scans * most_blocks(m, step)) * m.kv_heads;
}

// Queries are tokens [first, behind), and of each token the heads that share the key/value head `head`.
template <typename T>
struct PagedRow {
    const Model& m;
    const Op& op;
    int64_t head, share;
    int64_t begin, before;  // the row's first token, and how many keys come before its
    int64_t first, behind;
    const int64_t* table;

    const float* fresh(int64_t token, int64_t index) const { return m.wide + token * m.ld + index * m.width; }
    const T* stored(int64_t position, int64_t side) const {
        const int64_t token = m.kv_heads * m.width;
        return static_cast<const T*>(op.kv) + table[position / m.page] * op.kv_stride
            + (side * m.page + position % m.page) * token + head * m.width;
    }
    // Keys and values of this step are taken from where they were made: others may be writing them to their pages now.
    template <typename Visit>
    __m512i at(int64_t position, int64_t side, Visit&& visit) const {
        return position < before ? visit(stored(position, side)) : visit(fresh(begin + position - before, m.q_heads + side * m.kv_heads + head));
    }
    int64_t last(int64_t i) const { return before + first - begin + i / share; }
    template <typename Cells>
    __m512i query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(fresh(first + i / share, head * share + i % share), m.width, cell);
    }
    template <typename Cells>
    __m512i key(Cells, int64_t position, int64_t cell) const {
        return at(position, 0, [&](const auto* row) { return Cells::row(row, m.width, cell); });
    }
    __m512 value(int64_t position, int64_t feature) const {
        return (__m512)at(position, 1, [&](const auto* row) { return (__m512i)load16(row + feature, lanes(m.width - feature)); });
    }
    template <typename Cells>
    __m512i values(Cells, int64_t position, bool more, int64_t feature) const {
        return Cells::beside(value(position, feature), more ? value(position + 1, feature) : _mm512_setzero_ps());
    }
    void write(int64_t i, const float* numbers) const {
        float* out = m.mid + (first + i / share) * m.ld + (head * share + i % share) * m.width;
        std::copy(numbers, numbers + m.width, out);
    }
    void keep(const int64_t* places) const {  // the new keys and values
        for (int64_t token = first; token < behind; token++) {
            if (places[token] < 0) continue;
            for (int64_t side = 0; side < 2; side++) {
                const float* from = fresh(token, m.q_heads + side * m.kv_heads + head);
                T* to = static_cast<T*>(op.kv) + places[token] / m.page * op.kv_stride
                    + ((side * m.page + places[token] % m.page) * m.kv_heads + head) * m.width;
#pragma omp simd
                for (int64_t i = 0; i < m.width; i++) store(to, i, from[i]);
            }
        }
    }
};

template <typename Cells, typename T>
void attention(const Model& m, const Op& op, const Step& step, int64_t unit, std::vector<float>& scratch) {
    const int64_t alone = step.rows - step.scans, head = unit % m.kv_heads, part = unit / m.kv_heads;
    const int64_t most = most_blocks(m, step), row = part < alone ? part : alone + (part - alone) / most;
    const int64_t block = part < alone ? 0 : most - 1 - (part - alone) % most;  // those with most keys first
    const int64_t begin = step.starts[row], end = step.starts[row + 1];
    const int64_t first = begin + block * tokens_of_unit(m), behind = row < alone ? end : std::min(first + tokens_of_unit(m), end);
    if (first >= behind) return;
    PagedRow<T> source{m, op, head, m.q_heads / m.kv_heads, begin, 0, first, behind, nullptr};
    if (row < alone) source.before = step.lengths[begin] - 1, source.table = step.tables + begin * step.table_stride;
    else source.before = step.scan_computed[row - alone], source.table = step.scan_tables + (row - alone) * step.scan_table_stride;
    source.keep(step.places);
    for (; source.first < behind && source.last(0) < op.first_key; source.first++)  // padding, or nothing to look at yet
        for (int64_t i = 0; i < source.share; i++) {
            float* out = m.mid + source.first * m.ld + (head * source.share + i) * m.width;
            std::fill(out, out + m.width, 0.0f);
        }
    const int64_t queries = (behind - source.first) * source.share;
    if (queries > 0) attend<Cells>(Head::of<Cells>(m.width, m.scale), source, queries, op.first_key, scratch);
}

}  // namespace
