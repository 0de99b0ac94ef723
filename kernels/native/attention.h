// Attention of a row's new tokens for some key/value heads: over the keys in the row's pages and over each other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few.h"
#include "flash_amx.h"
#include "numbers.h"
#include "structs.h"

namespace {

// Tokens whose queries are one unit, for one key/value head.
inline int64_t tokens_of_unit(const AttentionShape& shape) {
    return std::max<int64_t>(UNIT_QUERIES / (shape.q_heads / shape.kv_heads), 1);
}

// Blocks of queries of the longest scanned row (a prompt's). Other rows are one block each.
inline int64_t most_blocks(const AttentionShape& shape, const Step& step) {
    const int64_t each = tokens_of_unit(shape);
    int64_t most = 1;
    for (int64_t row = step.rows - step.scans; row < step.rows; row++)
        most = std::max(most, (step.starts[row + 1] - step.starts[row] + each - 1) / each);
    return most;
}

// Key/value heads per unit of a row that is not scanned: all of them, so that pages are read sequentially, unless
// threads would be idle.
inline int64_t heads_together(const Model& m, const AttentionShape& shape, const Step& step) {
    const int64_t rows = step.rows - step.scans;
    int64_t parts = 1;
    while (parts < shape.kv_heads && rows * parts % m.threads && rows * parts < 4 * m.threads) parts++;
    return (shape.kv_heads + parts - 1) / parts;
}

struct AttentionUnits {
    int64_t rows;                           // that are not scanned, and come first
    int64_t heads_per_unit, units_per_row;  // of such a row; key/value heads
    int64_t blocks_per_scan;                // of each scanned row; a block has one unit for each key/value head
    int64_t count;                          // of units
    AttentionUnits(const Model& m, const AttentionShape& shape, const Step& step)
        : rows(step.rows - step.scans), heads_per_unit(heads_together(m, shape, step)),
          units_per_row((shape.kv_heads + heads_per_unit - 1) / heads_per_unit),
          blocks_per_scan(most_blocks(shape, step)),
          count(rows * units_per_row + step.scans * blocks_per_scan * shape.kv_heads) {}
};

// A source of queries, keys and values (see `attend` in flash.h): those of a unit of work, with most keys in pages. Its
// queries are those of tokens [first, end), and for each token the query heads that share key/value head `head`.
template <typename T>
struct PagedRow {
    const Model& m;
    const Op& op;
    const AttentionShape& shape;
    int64_t head, heads;    // key/value heads of the unit: the first one, and how many
    int64_t group_size;     // query heads of a key/value head
    int64_t begin, before;  // the row's first token, and how many keys come before that token's
    int64_t first, end;     // tokens of the unit
    const int64_t* table;   // the row's pages

    // The source of the unit's key/value head `index`.
    PagedRow for_head(int64_t index) const {
        PagedRow one = *this;
        one.head += index;
        return one;
    }
    // Numbers from a key in a page to that of the next head.
    int64_t head_stride() const { return m.page * shape.width; }
    // A query, key or value of this step: head `index` of a row of `wide`.
    const float* fresh(int64_t token, int64_t index) const {
        return m.wide + token * m.ld + shape.column + index * shape.width;
    }
    // This step's keys and values are read from the product's output: other threads may be writing them to the pages
    // now.
    struct KeysAndValues {
        int64_t width, count, in_pages;       // in_pages: how many of the `count` keys are, which come first
        const T* stored[2][MAX_SOURCE_KEYS];  // keys and values in pages
        const float* fresh[2];                // the first of the other keys, and its value
        int64_t stride;                       // numbers from such a key to the next
        void fetch_all() const {
            for (int64_t side = 0; side < 2; side++)
                for (int64_t i = 0; i < count; i++)
                    if (i < in_pages) fetch(stored[side][i], width);
                    else fetch(fresh[side] + (i - in_pages) * stride, width);
        }
        template <typename Visit>
        auto at(int64_t side, int64_t i, Visit&& visit) const {
            return i < in_pages ? visit(stored[side][i]) : visit(fresh[side] + (i - in_pages) * stride);
        }
        template <typename Cells>
        Words key(Cells, int64_t i, int64_t cell) const {
            return at(0, i, [&](const auto* row) { return Cells::row(row, width, cell); });
        }
        Floats value(int64_t i, int64_t feature) const {
            return at(1, i, [&](const auto* row) { return load16(row + feature, lanes(width - feature)); });
        }
    };
    KeysAndValues keys_and_values(int64_t position, int64_t count) const {
        KeysAndValues found{shape.width, count, std::min(std::max<int64_t>(before - position, 0), count), {}, {}, m.ld};
        const int64_t side = shape.kv_heads * head_stride();
        for (int64_t i = 0, index = position / m.page, place = position % m.page; i < found.in_pages; i++, place++) {
            if (place == m.page) index++, place = 0;
            const T* page = static_cast<const T*>(op.kv) + table[index] * op.kv_stride;
            found.stored[0][i] = page + (head * m.page + place) * shape.width;
            found.stored[1][i] = found.stored[0][i] + side;
        }
        const int64_t token = begin + std::max(position - before, int64_t(0));
        found.fresh[0] = fresh(token, shape.q_heads + head),
        found.fresh[1] = fresh(token, shape.q_heads + shape.kv_heads + head);
        return found;
    }
    int64_t last(int64_t i) const { return before + first - begin + i / group_size; }
    int64_t first_key(int64_t i) const {
        return shape.window ? std::max(last(i) + 1 - shape.window, op.first_key) : op.first_key;
    }
    template <typename Cells>
    Words query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(fresh(first + i / group_size, head * group_size + i % group_size), shape.width, cell);
    }
    void fetch_query(int64_t i) const {
        fetch(fresh(first + i / group_size, head * group_size + i % group_size), shape.width);
    }
    void write(int64_t i, const float* numbers) const {
        float* out = m.mid + (first + i / group_size) * m.mid_ld + (head * group_size + i % group_size) * shape.width;
        std::copy(numbers, numbers + shape.width, out);
    }
    void write_pages(const int64_t* places) const {  // the new keys and values
        for (int64_t token = first; token < end; token++) {
            if (places[token] < 0) continue;
            for (int64_t side = 0; side < 2; side++) {
                const float* from = fresh(token, shape.q_heads + side * shape.kv_heads + head);
                T* to = static_cast<T*>(op.kv) + places[token] / m.page * op.kv_stride +
                        ((side * shape.kv_heads + head) * m.page + places[token] % m.page) * shape.width;
                for (int64_t h = 0; h < heads; h++, to += head_stride(), from += shape.width) {
#pragma omp simd
                    for (int64_t i = 0; i < shape.width; i++) store(to, i, from[i]);
                }
            }
        }
    }
};

// The queries, keys and values of a unit. It has no queries if its scanned row has fewer blocks than the longest one.
template <typename T>
PagedRow<T> paged_row(const Model& m, const Op& op, const Step& step, const AttentionUnits& units, int64_t unit) {
    const AttentionShape& shape = *op.attention;
    PagedRow<T> found{m, op, shape, 0, 1, shape.q_heads / shape.kv_heads, 0, 0, 0, 0, nullptr};
    if (unit < units.rows * units.units_per_row) {
        const int64_t row = unit / units.units_per_row;
        found.head = unit % units.units_per_row * units.heads_per_unit,
        found.heads = std::min(units.heads_per_unit, shape.kv_heads - found.head);
        found.begin = found.first = step.starts[row], found.end = step.starts[row + 1];
        found.before = step.lengths[found.begin] - 1, found.table = step.tables + found.begin * step.table_stride;
        return found;
    }
    unit -= units.rows * units.units_per_row;
    const int64_t part = unit / shape.kv_heads, scan = part / units.blocks_per_scan;
    const int64_t block = units.blocks_per_scan - 1 - part % units.blocks_per_scan;  // those with most keys first
    found.head = unit % shape.kv_heads;
    found.begin = step.starts[units.rows + scan], found.first = found.begin + block * tokens_of_unit(shape);
    found.end = std::min(found.first + tokens_of_unit(shape), step.starts[units.rows + scan + 1]);
    found.before = step.scan_computed[scan], found.table = step.scan_tables + scan * step.scan_table_stride;
    return found;
}

// Normalises and rotates a token's queries and keys, head by head in place. `scratch`: 2 x pairs numbers.
inline void prepare_heads(
    const Model& m, const AttentionShape& shape, const Step& step, int64_t token, float* scratch
) {
    float* row = m.wide + token * m.ld + shape.column;
    float *cosines = scratch, *sines = scratch + shape.pairs;
    for (int64_t i = 0; i < shape.pairs; i++) {
        const float* at = shape.rotations + step.positions[token * step.axes + shape.axes[i]] * 2 * shape.pairs + i;
        cosines[i] = at[0], sines[i] = at[shape.pairs];
    }
    if (shape.norm_whole) {
        const int64_t queries = shape.q_heads * shape.width;
        rms_norm(row, shape.q_norm, queries, shape.norm_eps, row);
        rms_norm(row + queries, shape.k_norm, shape.kv_heads * shape.width, shape.norm_eps, row + queries);
    }
    for (int64_t head = 0; head < shape.q_heads + shape.kv_heads; head++, row += shape.width) {
        const float* norm = head < shape.q_heads ? shape.q_norm : shape.k_norm;
        if (norm && !shape.norm_whole) rms_norm(row, norm, shape.width, shape.norm_eps, row);
        float *first = row, *second = row + shape.pairs;
#pragma omp simd
        for (int64_t i = 0; i < shape.pairs; i++) {
            const float x = first[i], y = second[i];
            first[i] = x * cosines[i] - y * sines[i], second[i] = y * cosines[i] + x * sines[i];
        }
    }
}

// Attention's output for a token, times the sigmoid of the row's gates, which are stored after its values.
inline void gate_row(const Model& m, const AttentionShape& shape, int64_t token, float* out) {
    const float *from = m.mid + token * m.mid_ld,
                *gates = m.wide + token * m.ld + shape.column + (shape.q_heads + 2 * shape.kv_heads) * shape.width;
    if (shape.head_gate) {
        for (int64_t head = 0; head < shape.q_heads; head++, from += shape.width, out += shape.width) {
            const float divisor = 1.0f + fast_exp(-gates[head]);
#pragma omp simd
            for (int64_t i = 0; i < shape.width; i++) out[i] = from[i] / divisor;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < shape.q_heads * shape.width; i++) out[i] = from[i] / (1.0f + fast_exp(-gates[i]));
}

// first_read(begin, end): the first of these tokens whose outputs are computed.
template <typename T, typename FirstRead>
void attention(
    const Model& m, const Op& op, const Step& step, int64_t unit, FirstRead&& first_read, std::vector<float>& scratch
) {
    const AttentionShape& shape = *op.attention;
    const AttentionUnits units(m, shape, step);
    PagedRow<T> source = paged_row<T>(m, op, step, units, unit);
    if (source.first >= source.end) return;
    source.write_pages(step.places);
    source.first = first_read(source.first, source.end);
    // tokens of padding, or without a key that they may attend to
    for (; source.first < source.end && source.last(0) < op.first_key; source.first++) {
        float* out = m.mid + source.first * m.mid_ld + source.head * source.group_size * shape.width;
        std::fill(out, out + source.heads * source.group_size * shape.width, 0.0f);
    }
    const int64_t queries = (source.end - source.first) * source.group_size;
    if (queries <= 0) return;
    if (queries > MAX_FEW_QUERIES || shape.width % CellsOf<T>::EACH) {
        for (int64_t h = 0; h < source.heads; h++)
            attend_many<T>(shape.width, shape.scale, source.for_head(h), queries, scratch);
        return;
    }
    const int64_t next_unit = unit + 1;  // a thread's units are neighbours
    const bool follows = next_unit < units.rows * units.units_per_row;
    const PagedRow<T> next = paged_row<T>(m, op, step, units, follows ? next_unit : unit);
    attend_few<T>(
        shape.width, shape.scale, source, source.heads, source.head_stride(), queries, follows ? &next : nullptr,
        scratch
    );
}

}  // namespace
