// Products of one or two tiles of rows with a panel that is unpacked meanwhile.
//
// Tiles are loaded from memory only, so numbers of 12, 8 and 4 bits are stored as bfloat16 first. Those of a step of 32 inputs are unpacked
// between the instructions on the tiles of the step before: the processor does both at once, and keeps reading the panel.

#pragma once

#include <algorithm>
#include <cstdint>

#include "products_amx.h"
#include "scaled.h"

namespace {

#if AMX_TILES

constexpr int64_t STEP_INPUTS = AMX_BYTES / 2;  // of a step of tiles

// Where unpacked inputs are stored: all of a panel, or two steps in turn.
struct Unpacked {
    uint16_t* to;
    bool all;
    uint16_t* at(int64_t input) const { return to + (all ? input : input % (2 * STEP_INPUTS)) * PANEL; }
};

// Adds products of rows with vectors [FIRST, FIRST + 4 / T) of some inputs of a panel, of which the first is a multiple of CHUNK.
template <int T, int FIRST, class Numbers>
void unpack_and_add(const TileRows& rows, Numbers& numbers, Inputs inputs, const Unpacked& unpacked, Ahead& ahead) {
    constexpr int V = 4 / T;
    using Block = TileBlock<DotBf16, T, V>;
    const int64_t steps = (inputs.end - inputs.begin) / STEP_INPUTS, end = inputs.begin + steps * STEP_INPUTS;
    const auto place = [&](int64_t input) { return unpacked.at(unpacked.all ? input : input - inputs.begin); };
    const auto unpack = [&](int64_t input, int64_t count) ALWAYS { numbers.template unpack<FIRST, V>(input, count, place(input)); };
    numbers.start(inputs.begin);
    for (int64_t i = inputs.begin; i < std::min(end, inputs.begin + STEP_INPUTS); i += CHUNK) unpack(i, CHUNK);
    for (int64_t i = inputs.begin; i < end; i += STEP_INPUTS) {
        const bool more = i + STEP_INPUTS < end;
        ahead.step();
        Block::step(rows.at + 2 * i, rows.lda, rows.next, reinterpret_cast<const char*>(place(i) + FIRST * 32), Block::LDB, [&](int part) ALWAYS {
            if (more) unpack(i + STEP_INPUTS + part * CHUNK, CHUNK);
        });
    }
    for (int64_t i = end; i < inputs.end; i += CHUNK) unpack(i, std::min(CHUNK, inputs.end - i));
    Block::add(rows, 2 * end, reinterpret_cast<const char*>(place(end) + FIRST * 32), 2 * (inputs.end - end), ahead);
}

template <int T, class Numbers>
void unpack_and_multiply(
    const Product& job, int64_t row, int64_t rows, int64_t panel, Numbers& numbers, const Unpacked& unpacked, const char* next
) {
    using Block = TileBlock<DotBf16, T, 4 / T>;
    const Weight& w = *job.weight;
    const int64_t groups = summed_groups(w), width = groups > 1 ? w.group : w.kpad;
    const TileRows a = TileRows::consecutive(static_cast<const uint16_t*>(job.a) + row * job.lda, 2 * job.lda, rows);
    alignas(64) float sums[T * AMX_ROWS * PANEL], totals[T * AMX_ROWS * PANEL];
    for (int64_t r = 0; r < rows; r++) fetch_outputs<1, 4>(job, row + r, panel * PANEL);
    // Half of the next panel is read while the second half of this one's outputs is computed, the other half as it is unpacked.
    const int64_t half = panel_bytes(w) / 2 / LINE * LINE, steps = w.kpad / STEP_INPUTS + 1;
    Ahead nothing, ahead{next, next ? next + half : next, (half / LINE + steps - 1) / steps * LINE};
    Block::begin(a);
    for (int64_t g = 0; g < groups; g++) {
        const Inputs inputs{g * width, std::min(w.kpad, (g + 1) * width)};
        if (g) Block::zero();
        unpack_and_add<T, 0>(a, numbers, inputs, unpacked, nothing);
        Block::store(sums);
        if constexpr (T == 2) {
            Block::zero();
            unpack_and_add<T, 2>(a, numbers, inputs, unpacked, ahead);
            Block::store(sums + 32);
        }
        if (groups > 1) add_group(w, panel, g, rows, sums, totals);
    }
    release_tiles();
    if (groups == 1) scale_outputs(w, panel, rows, sums);
    finish_rows<4>(job, groups > 1 ? totals : sums, row, rows, panel * PANEL);
}

// At most HEIGHT rows times a panel. `unpacked`: where it is stored for more rows, or null. `next`: the panel that follows, or null.
void unpack_and_multiply(const Product& job, int64_t row, int64_t rows, int64_t panel, uint16_t* unpacked, const char* next) {
    alignas(64) uint16_t two_steps[2 * STEP_INPUTS * PANEL];
    const Unpacked to{unpacked ? unpacked : two_steps, unpacked != nullptr};
    with_panel(*job.weight, panel, [&](auto& numbers) {
        if (rows > AMX_ROWS) unpack_and_multiply<2>(job, row, rows, panel, numbers, to, next);
        else unpack_and_multiply<1>(job, row, rows, panel, numbers, to, next);
    });
}

#endif

}  // namespace
