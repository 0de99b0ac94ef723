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

constexpr int64_t TOKEN_LANES = 10 * LANES;  // queries of a unit: each packs the row's keys for itself

inline int64_t tokens_of_unit(const AttentionShape& shape) {
    return std::max<int64_t>(TOKEN_LANES / (shape.q_heads / shape.kv_heads), 1);
}

// Blocks of a scanned row; other rows are one block each.
inline int64_t most_blocks(const AttentionShape& shape, const Step& step) {
    const int64_t each = tokens_of_unit(shape);
    int64_t most = 1;
    for (int64_t row = step.rows - step.scans; row < step.rows; row++)
        most = std::max(most, (step.starts[row + 1] - step.starts[row] + each - 1) / each);
    return most;
}

// Heads per unit of a row that is not scanned: all of them, so that pages are read sequentially, unless threads would
// be idle.
inline int64_t heads_together(const Model& m, const AttentionShape& shape, const Step& step) {
    const int64_t rows = step.rows - step.scans;
    int64_t parts = 1;
    while (parts < shape.kv_heads && rows * parts % m.threads && rows * parts < 4 * m.threads) parts++;
    return (shape.kv_heads + parts - 1) / parts;
}

struct AttentionUnits {
    int64_t rows, together, groups, most, count;  // rows that are not scanned; their heads of a unit, and units
    AttentionUnits(const Model& m, const AttentionShape& shape, const Step& step)
        : rows(step.rows - step.scans), together(heads_together(m, shape, step)),
          groups((shape.kv_heads + together - 1) / together), most(most_blocks(shape, step)),
          count(rows * groups + step.scans * most * shape.kv_heads) {}
};

// Queries are tokens [first, behind), and for each token the heads that share a key/value head.
template <typename T>
struct PagedRow {
    const Model& m;
    const Op& op;
    const AttentionShape& shape;
    int64_t head, heads, share;  // the first of how many key/value heads
    int64_t begin, before;       // the row's first token, and how many keys come before its own
    int64_t first, behind;
    const int64_t* table;

    PagedRow of(int64_t index) const {
        PagedRow one = *this;
        one.head += index;
        return one;
    }
    int64_t apart() const { return m.page * shape.width; }  // numbers between a token's keys in neighbouring heads
    const float* fresh(int64_t token, int64_t index) const { return m.wide + token * m.ld + index * shape.width; }
    // This step's keys and values are read from the product's output: other threads may be writing them to the pages
    // now.
    struct Lines {
        int64_t width, count, old;  // how many of them lie in pages
        const T* stored[2][LINES];
        const float* fresh[2];
        int64_t stride;  // of fresh ones
        void fetch_all() const {
            for (int64_t side = 0; side < 2; side++)
                for (int64_t i = 0; i < count; i++)
                    if (i < old) fetch(stored[side][i], width);
                    else fetch(fresh[side] + (i - old) * stride, width);
        }
        template <typename Visit>
        auto at(int64_t side, int64_t i, Visit&& visit) const {
            return i < old ? visit(stored[side][i]) : visit(fresh[side] + (i - old) * stride);
        }
        template <typename Cells>
        Words key(Cells, int64_t i, int64_t cell) const {
            return at(0, i, [&](const auto* row) { return Cells::row(row, width, cell); });
        }
        Floats value(int64_t i, int64_t feature) const {
            return at(1, i, [&](const auto* row) { return load16(row + feature, lanes(width - feature)); });
        }
    };
    Lines lines(int64_t position, int64_t count) const {
        Lines found{shape.width, count, std::min(std::max<int64_t>(before - position, 0), count), {}, {}, m.ld};
        const int64_t side = shape.kv_heads * apart();
        for (int64_t i = 0, index = position / m.page, place = position % m.page; i < found.old; i++, place++) {
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
    int64_t last(int64_t i) const { return before + first - begin + i / share; }
    template <typename Cells>
    Words query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(fresh(first + i / share, head * share + i % share), shape.width, cell);
    }
    void fetch_query(int64_t i) const { fetch(fresh(first + i / share, head * share + i % share), shape.width); }
    void write(int64_t i, const float* numbers) const {
        float* out = m.mid + (first + i / share) * m.mid_ld + (head * share + i % share) * shape.width;
        std::copy(numbers, numbers + shape.width, out);
    }
    void keep(const int64_t* places) const {  // the new keys and values
        for (int64_t token = first; token < behind; token++) {
            if (places[token] < 0) continue;
            for (int64_t side = 0; side < 2; side++) {
                const float* from = fresh(token, shape.q_heads + side * shape.kv_heads + head);
                T* to = static_cast<T*>(op.kv) + places[token] / m.page * op.kv_stride +
                        ((side * shape.kv_heads + head) * m.page + places[token] % m.page) * shape.width;
                for (int64_t h = 0; h < heads; h++, to += apart(), from += shape.width) {
#pragma omp simd
                    for (int64_t i = 0; i < shape.width; i++) store(to, i, from[i]);
                }
            }
        }
    }
};

// The work of a unit; no queries if nothing is left for it.
template <typename T>
PagedRow<T> paged_row(const Model& m, const Op& op, const Step& step, const AttentionUnits& units, int64_t unit) {
    const AttentionShape& shape = *op.attention;
    PagedRow<T> found{m, op, shape, 0, 1, shape.q_heads / shape.kv_heads, 0, 0, 0, 0, nullptr};
    if (unit < units.rows * units.groups) {
        const int64_t row = unit / units.groups;
        found.head = unit % units.groups * units.together,
        found.heads = std::min(units.together, shape.kv_heads - found.head);
        found.begin = found.first = step.starts[row], found.behind = step.starts[row + 1];
        found.before = step.lengths[found.begin] - 1, found.table = step.tables + found.begin * step.table_stride;
        return found;
    }
    unit -= units.rows * units.groups;
    const int64_t part = unit / shape.kv_heads, scan = part / units.most;
    const int64_t block = units.most - 1 - part % units.most;  // those with most keys first
    found.head = unit % shape.kv_heads;
    found.begin = step.starts[units.rows + scan], found.first = found.begin + block * tokens_of_unit(shape);
    found.behind = std::min(found.first + tokens_of_unit(shape), step.starts[units.rows + scan + 1]);
    found.before = step.scan_computed[scan], found.table = step.scan_tables + scan * step.scan_table_stride;
    return found;
}

// Normalises and rotates a token's queries and keys, head by head in place. `scratch`: 2 x pairs numbers.
inline void prepare_heads(
    const Model& m, const AttentionShape& shape, const Step& step, int64_t token, float* scratch
) {
    float* row = m.wide + token * m.ld;
    float *cosines = scratch, *sines = scratch + shape.pairs;
    for (int64_t i = 0; i < shape.pairs; i++) {
        const float* at = shape.rotations + step.positions[token * step.axes + shape.axes[i]] * 2 * shape.pairs + i;
        cosines[i] = at[0], sines[i] = at[shape.pairs];
    }
    for (int64_t head = 0; head < shape.q_heads + shape.kv_heads; head++, row += shape.width) {
        const float* norm = head < shape.q_heads ? shape.q_norm : shape.k_norm;
        if (norm) rms_norm(row, norm, shape.width, shape.norm_eps, row);
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
                *gates = m.wide + token * m.ld + (shape.q_heads + 2 * shape.kv_heads) * shape.width;
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
    if (source.first >= source.behind) return;
    source.keep(step.places);
    source.first = first_read(source.first, source.behind);
    // padding, or nothing to look at yet
    for (; source.first < source.behind && source.last(0) < op.first_key; source.first++) {
        float* out = m.mid + source.first * m.mid_ld + source.head * source.share * shape.width;
        std::fill(out, out + source.heads * source.share * shape.width, 0.0f);
    }
    const int64_t queries = (source.behind - source.first) * source.share;
    if (queries <= 0) return;
    if (queries > FEW || shape.width % CellsOf<T>::EACH) {
        for (int64_t h = 0; h < source.heads; h++)
            attend_many<T>(shape.width, shape.scale, source.of(h), queries, op.first_key, scratch);
        return;
    }
    const int64_t then = unit + 1;  // a thread's units are neighbours
    const bool follows = then < units.rows * units.groups;
    const PagedRow<T> next = paged_row<T>(m, op, step, units, follows ? then : unit);
    attend_few<T>(
        shape.width, shape.scale, source, source.heads, source.apart(), queries, op.first_key,
        follows ? &next : nullptr, scratch
    );
}

}  // namespace
