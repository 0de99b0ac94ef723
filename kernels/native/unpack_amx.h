// Products of rows with panels that are unpacked meanwhile, and with several long panels in slices of the inputs.
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

// Adds products of rows with vectors [FIRST, FIRST + 4 / T) of some inputs of a panel, of which the first is a multiple of CHUNK. `to`: where the
// unpacked inputs are stored, all of them or two steps in turn.
template <int T, int FIRST, class Numbers>
void unpack_and_add(const TileRows& rows, Numbers& numbers, Inputs inputs, uint16_t* to, bool all, Ahead& ahead) {
    constexpr int V = 4 / T;
    using Block = TileBlock<DotBf16, T, V>;
    const int64_t steps = (inputs.end - inputs.begin) / STEP_INPUTS, end = inputs.begin + steps * STEP_INPUTS;
    const auto place = [&](int64_t input) { return to + (all ? input - inputs.begin : (input - inputs.begin) % (2 * STEP_INPUTS)) * PANEL; };
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

// At most T tiles of rows times a panel. `to` and `all` as above. `next`: the panel that follows, or null.
template <int T, class Numbers>
void unpack_and_multiply(
    const Product& job, int64_t row, int64_t rows, int64_t panel, Numbers& numbers, uint16_t* to, bool all, const char* next
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
        uint16_t* const place = to + (all ? inputs.begin * PANEL : 0);
        unpack_and_add<T, 0>(a, numbers, inputs, place, all, nothing);
        Block::store(sums);
        if constexpr (T == 2) {
            Block::zero();
            unpack_and_add<T, 2>(a, numbers, inputs, place, all, ahead);
            Block::store(sums + 32);
        }
        if (groups > 1) add_group(w, panel, g, rows, sums, totals);
    }
    release_tiles();
    if (groups == 1) scale_outputs(w, panel, rows, sums);
    finish<4>(job, groups > 1 ? totals : sums, row, rows, panel * PANEL);
}

// Adds products of rows [begin, end) with a slice of a panel to sums [rows, PANEL], which begin with the first slice.
void add_slice_of_panel(
    const Product& job, int64_t begin, int64_t end, int64_t panel, Inputs inputs, uint16_t* unpacked, float* sums, const char* next
) {
    using Single = TileBlock<DotBf16, 1, 4>;
    using Pair = TileBlock<DotBf16, 2, 2>;
    const Weight& w = *job.weight;
    const auto rows_from = [&](int64_t row, int64_t most) {
        return TileRows::consecutive(static_cast<const uint16_t*>(job.a) + row * job.lda, 2 * job.lda, std::min(most, end - row));
    };
    const auto start = [&](auto block, float* from) {
        if (inputs.begin) decltype(block)::load(from);
        else decltype(block)::zero();
    };
    int64_t row = begin;
    const char* columns = static_cast<const char*>(w.data) + panel * panel_bytes(w) + 2 * inputs.begin * PANEL;
    Ahead nothing;
    if (w.kind != BF16) {
        const TileRows a = rows_from(row, AMX_ROWS);
        Single::begin(a);
        start(Single(), sums);
        with_panel(w, panel, [&](auto& numbers) { unpack_and_add<1, 0>(a, numbers, inputs, unpacked, true, nothing); });
        Single::store(sums);
        row += AMX_ROWS, sums += AMX_ROWS * PANEL, columns = reinterpret_cast<const char*>(unpacked);
    }
    const int64_t length = inputs.end - inputs.begin, pieces = (end - row + HEIGHT - 1) / HEIGHT;
    const int64_t bytes = length * (panel_bytes(w) / w.kpad), steps = length / STEP_INPUTS * 2 + 1;
    for (int64_t i = 0; i < pieces; i++, row += HEIGHT, sums += HEIGHT * PANEL) {
        const TileRows a = rows_from(row, HEIGHT);
        Ahead ahead = ahead_of(i, pieces, next, bytes, steps);
        if (a.count[1] == 0) {
            Single::begin(a);
            start(Single(), sums);
            Single::add(a, 2 * inputs.begin, columns, 2 * length, ahead);
            Single::store(sums);
            continue;
        }
        Pair::begin(a);
        for (int v = 0; v < 2; v++) {
            start(Pair(), sums + 32 * v);
            Pair::add(a, 2 * inputs.begin, columns + 2 * v * AMX_BYTES, 2 * length, ahead);
            Pair::store(sums + 32 * v);
        }
    }
    release_tiles();
}

// At most HEIGHT rows times a panel. `unpacked`: where it is stored for more rows, or null.
void unpack_and_multiply(const Product& job, int64_t row, int64_t rows, int64_t panel, uint16_t* unpacked, const char* next) {
    alignas(64) uint16_t two_steps[2 * STEP_INPUTS * PANEL];
    uint16_t* const to = unpacked ? unpacked : two_steps;
    with_panel(*job.weight, panel, [&](auto& numbers) {
        if (rows > AMX_ROWS) unpack_and_multiply<2>(job, row, rows, panel, numbers, to, unpacked, next);
        else unpack_and_multiply<1>(job, row, rows, panel, numbers, to, unpacked, next);
    });
}

// Rows [begin, end) times panels [panel, panels_end), in slices of the inputs: the rows' numbers of a slice stay in the second-level cache for
// all of these panels. Sums are in memory between slices; they are float32 there as in tiles.
void long_panels(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t panels_end, const char* next) {
    const Weight& w = *job.weight;
    const int64_t size = (end - begin) * PANEL, slices = (w.kpad + LONG_SLICE - 1) / LONG_SLICE;
    is_unpacked(w, -1);  // what this thread unpacked before is lost
    auto* const unpacked = reinterpret_cast<uint16_t*>(own_memory<0>(LONG_SLICE * PANEL / 2));
    float* const all_sums = own_memory<1>(size * (panels_end - panel));
    const auto slice_of = [&](int64_t p, int64_t slice) {  // as it is stored
        return static_cast<const char*>(w.data) + p * panel_bytes(w) + slice * LONG_SLICE * (panel_bytes(w) / w.kpad);
    };
    for (int64_t slice = 0; slice < slices; slice++)
        for (int64_t p = panel; p < panels_end; p++) {
            const Inputs inputs{slice * LONG_SLICE, std::min(w.kpad, (slice + 1) * LONG_SLICE)};
            const char* const soon = p + 1 < panels_end ? slice_of(p + 1, slice) : slice + 1 < slices ? slice_of(panel, slice + 1) : next;
            add_slice_of_panel(job, begin, end, p, inputs, unpacked, all_sums + (p - panel) * size, soon);
        }
    for (int64_t p = panel; p < panels_end; p++) {
        float* const sums = all_sums + (p - panel) * size;
        scale_outputs(w, p, end - begin, sums);
        finish<4>(job, sums, begin, end - begin, p * PANEL);
    }
}

#endif

}  // namespace
