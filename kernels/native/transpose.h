// Transposition of rows of 16 words in registers.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace {

// Words 4 k + j of four rows are quarter k of columns[j].
inline void columns_of(const Words row[4], Words (&columns)[4]) {
    const Words a = low_words(row[0], row[1]), b = high_words(row[0], row[1]);
    const Words c = low_words(row[2], row[3]), d = high_words(row[2], row[3]);
    columns[0] = low_pairs(a, c), columns[1] = high_pairs(a, c), columns[2] = low_pairs(b, d),
    columns[3] = high_pairs(b, d);
}

// Word i of row r goes to out[i * ld + r], for four rows.
inline void transpose4(const Words row[4], uint32_t* out, int64_t ld) {
    Words quads[4];
    columns_of(row, quads);
    for (int j = 0; j < 4; j++) {
        store_quarter<0>(out + j * ld, quads[j]);
        store_quarter<1>(out + (4 + j) * ld, quads[j]);
        store_quarter<2>(out + (8 + j) * ld, quads[j]);
        store_quarter<3>(out + (12 + j) * ld, quads[j]);
    }
}

// The same for sixteen rows: row(r) gives one.
template <typename Row>
inline ALWAYS void transpose16(Row&& row, uint32_t* out, int64_t ld) {
    Words columns[4][4];  // of each four rows
    for (int four = 0; four < 4; four++) {
        const Words rows[4] = {row(4 * four), row(4 * four + 1), row(4 * four + 2), row(4 * four + 3)};
        columns_of(rows, columns[four]);
    }
    for (int j = 0; j < 4; j++) {
        Words found[4] = {columns[0][j], columns[1][j], columns[2][j], columns[3][j]};
        transpose_quarters(found);
        for (int k = 0; k < 4; k++) store_words(out + (4 * k + j) * ld, found[k]);
    }
}

}  // namespace
