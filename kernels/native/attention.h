// Attention of a row's new tokens and one key/value head: over what lies in the row's pages, and over each other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few.h"
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
    // Keys and values of this step are taken from where they were made: others may be writing them to their pages now.
    struct Lines {
        int64_t width, old;  // how many lie in pages
        const T* stored[2][TILE];
        const float* fresh[2];
        int64_t stride;  // of fresh ones
        template <typename Visit>
        auto at(int64_t side, int64_t i, Visit&& visit) const {
            return i < old ? visit(stored[side][i]) : visit(fresh[side] + (i - old) * stride);
        }
        template <typename Cells>
        __m512i key(Cells, int64_t i, int64_t cell) const {
            return at(0, i, [&](const auto* row) { return Cells::row(row, width, cell); });
        }
        __m512 value(int64_t i, int64_t feature) const {
            return at(1, i, [&](const auto* row) { return load16(row + feature, lanes(width - feature)); });
        }
    };
    Lines lines(int64_t position, int64_t count) const {
        Lines found{m.width, std::min(std::max<int64_t>(before - position, 0), count), {}, {}, m.ld};
        const int64_t side = m.page * m.kv_heads * m.width;
        for (int64_t i = 0, index = position / m.page, place = position % m.page; i < found.old; i++, place++) {
            if (place == m.page) index++, place = 0;
            const T* page = static_cast<const T*>(op.kv) + table[index] * op.kv_stride;
            found.stored[0][i] = page + (place * m.kv_heads + head) * m.width;
            found.stored[1][i] = found.stored[0][i] + side;
        }
        const int64_t token = begin + std::max(position - before, int64_t(0));
        found.fresh[0] = fresh(token, m.q_heads + head), found.fresh[1] = fresh(token, m.q_heads + m.kv_heads + head);
        return found;
    }
    int64_t last(int64_t i) const { return before + first - begin + i / share; }
    template <typename Cells>
    __m512i query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(fresh(first + i / share, head * share + i % share), m.width, cell);
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

// What a unit works on; no queries where there is nothing left for it.
template <typename T>
PagedRow<T> paged_row(const Model& m, const Op& op, const Step& step, int64_t unit) {
    const int64_t alone = step.rows - step.scans, part = unit / m.kv_heads, most = most_blocks(m, step);
    const int64_t row = part < alone ? part : alone + (part - alone) / most;
    const int64_t block = part < alone ? 0 : most - 1 - (part - alone) % most;  // those with most keys first
    const int64_t begin = step.starts[row], end = step.starts[row + 1], first = begin + block * tokens_of_unit(m);
    PagedRow<T> found{m, op, unit % m.kv_heads, m.q_heads / m.kv_heads, begin, 0, first, end, nullptr};
    if (row < alone) {
        found.before = step.lengths[begin] - 1, found.table = step.tables + begin * step.table_stride;
    } else {
        found.behind = std::min(first + tokens_of_unit(m), end);
        found.before = step.scan_computed[row - alone], found.table = step.scan_tables + (row - alone) * step.scan_table_stride;
    }
    return found;
}

template <typename T>
void attention(const Model& m, const Op& op, const Step& step, int64_t unit, std::vector<float>& scratch) {
    PagedRow<T> source = paged_row<T>(m, op, step, unit);
    if (source.first >= source.behind) return;
    source.keep(step.places);
    for (; source.first < source.behind && source.last(0) < op.first_key; source.first++)  // padding, or nothing to look at yet
        for (int64_t i = 0; i < source.share; i++) {
            float* out = m.mid + source.first * m.ld + (source.head * source.share + i) * m.width;
            std::fill(out, out + m.width, 0.0f);
        }
    using Cells = CellsOf<T>;
    const Head head = Head::of<Cells>(m.width, m.scale);
    const int64_t queries = (source.behind - source.first) * source.share;
    if (queries <= 0) return;
    if (queries > FEW || m.width % Cells::EACH) return attend<Cells>(head, source, queries, op.first_key, scratch);
    const int64_t then = unit + m.threads;
    const PagedRow<T> next = then < attention_units(m, step) ? paged_row<T>(m, op, step, then) : source;
    attend_few<T>(head, source, queries, op.first_key, [&](int64_t position) {
        const auto lines = next.lines(position, TILE);
        for (int64_t side = 0; side < 2; side++)
            for (int64_t i = 0; i < lines.old; i++) fetch(lines.stored[side][i], m.width);
    }, scratch);
}

}  // namespace
