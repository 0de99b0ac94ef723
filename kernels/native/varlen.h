// Attention within each of several packed sequences, without a mask.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flash_amx.h"
#include "structs.h"

namespace {

inline int64_t query_blocks(const VarlenAttention& a, int64_t sequence) {
    return (a.bounds[sequence + 1] - a.bounds[sequence] + UNIT_QUERIES - 1) / UNIT_QUERIES;
}

// A unit is a block of queries of one head of a sequence.
int64_t varlen_units(const VarlenAttention& a) {
    int64_t count = 0;
    for (int64_t sequence = 0; sequence < a.sequences; sequence++) count += query_blocks(a, sequence);
    return count * a.heads;
}

template <typename T>
struct PackedSequence {  // a source, see `attend`: one head of a sequence; `first`: the unit's first query
    const VarlenAttention& a;
    const int64_t begin, rows, head, first;

    const T* row(const void* rows_of_all, int64_t i, int64_t of_head) const {
        return static_cast<const T*>(rows_of_all) + (begin + i) * a.stride + of_head * a.head_stride;
    }
    int64_t first_key(int64_t) const { return 0; }
    const T* query_row(int64_t i) const { return row(a.q, first + i, head); }
    int64_t last(int64_t) const { return rows - 1; }
    template <typename Cells>
    Words query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(query_row(i), a.width, cell);
    }
    void fetch_query(int64_t i) const { fetch(query_row(i), a.width); }
    struct KeysAndValues {
        const T *keys, *values;
        int64_t stride, width, count;
        void fetch_all() const {
            for (int64_t i = 0; i < count; i++) fetch(keys + i * stride, width), fetch(values + i * stride, width);
        }
        template <typename Cells>
        Words key(Cells, int64_t i, int64_t cell) const {
            return Cells::row(keys + i * stride, width, cell);
        }
        Floats value(int64_t i, int64_t feature) const {
            return load16(values + i * stride + feature, lanes(width - feature));
        }
    };
    KeysAndValues keys_and_values(int64_t position, int64_t count) const {
        return {row(a.k, position, head / a.group), row(a.v, position, head / a.group), a.stride, a.width, count};
    }
    void write(int64_t i, const float* numbers) const {
        const int64_t place = (begin + first + i) * a.out_stride + head * a.width;
        if (a.out_bf16) {
            uint16_t* out = static_cast<uint16_t*>(a.out) + place;
#pragma omp simd
            for (int64_t j = 0; j < a.width; j++) out[j] = float_to_bf16(numbers[j]);
        } else {
            std::copy(numbers, numbers + a.width, static_cast<float*>(a.out) + place);
        }
    }
};

// Blocks of a sequence are multiples of BLOCK_QUERIES and nearly equal.
void varlen_unit(const VarlenAttention& a, int64_t unit, std::vector<float>& scratch) {
    int64_t sequence = 0, part = unit / a.heads;
    for (; part >= query_blocks(a, sequence); sequence++) part -= query_blocks(a, sequence);
    const int64_t begin = a.bounds[sequence], rows = a.bounds[sequence + 1] - begin, blocks = query_blocks(a, sequence);
    const int64_t whole = (rows + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
    const int64_t first = whole * part / blocks * BLOCK_QUERIES,
                  end = std::min(whole * (part + 1) / blocks * BLOCK_QUERIES, rows);
    const auto attend_with = [&](const auto& source) {
        if (a.kind == BF16) attend_many<uint16_t>(a.width, a.scale, source, end - first, scratch);
        else attend_many<float>(a.width, a.scale, source, end - first, scratch);
    };
    if (a.stored_bf16) attend_with(PackedSequence<uint16_t>{a, begin, rows, unit % a.heads, first});
    else attend_with(PackedSequence<float>{a, begin, rows, unit % a.heads, first});
}

}  // namespace
