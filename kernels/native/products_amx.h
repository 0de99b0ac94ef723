// Products of rows with panels by tiles of AMX: rows of bfloat16 with weights that are bfloat16 or unpacked to it, and
// rows of bytes with weights of bytes. Integers of 16 bits are two bytes, so 16 rows of them are two tiles: of lows and
// of highs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "finish.h"
#include "panels.h"
#include "scaled.h"
#include "slices_amx.h"
#include "scratch.h"
#include "structs.h"
#include "tiles_amx.h"

namespace {

#if AMX_TILES

// Turns sums of bytes [rows, PANEL], of V vectors of a panel from `first` on, into outputs as float32, in place. The
// correction for the weights' offset is stored after a row's bytes (make_bytes).
template <int V>
void scale_bytes(const Product& product, int64_t row, int64_t rows, int64_t panel, int64_t first, float* sums) {
    const Weight& w = *product.weight;
    const int8_t* corrections = product.row_bytes(row) + w.kpad;
    Floats scale[V];
    for (int v = 0; v < V; v++) scale[v] = load_floats(w.scale + panel * PANEL + (first + v) * 16);
    for (int64_t r = 0; r < rows; r++, corrections += product.ld_bytes(), sums += PANEL)
        for (int v = 0; v < V; v++) {
            const Words sum = add32(load_words(sums + v * 16), broadcast_word(corrections));
            store_floats(sums + v * 16, (to_floats(sum) * splat(product.scales[row + r])) * scale[v]);
        }
}

// The same for rows of 16 bits. sums [2, AMX_ROWS, PANEL]: of the lows, which the outputs replace, and of the highs.
// Two corrections are stored after a row (make_integers).
template <int V>
void scale_integers(const Product& product, int64_t row, int64_t rows, int64_t panel, int64_t first, float* sums) {
    const Weight& w = *product.weight;
    const int8_t* corrections = product.row_bytes(row) + 2 * w.kpad;
    for (int64_t r = 0; r < rows; r++, corrections += product.ld_bytes(), sums += PANEL)
        for (int v = 0; v < V; v++) {
            const Words low = load_words(sums + v * 16), high = load_words(sums + AMX_ROWS * PANEL + v * 16);
            const LongSum sum =
                LongSum::of(add32(low, broadcast_word(corrections)), add32(high, broadcast_word(corrections + 4)));
            const Floats scale = load_floats(w.scale + panel * PANEL + (first + v) * 16);
            store_floats(sums + v * 16, (sum.rounded() * scale) * splat(product.scales[row + r]));
        }
}

// Multiplies sums [rows, PANEL] by the scales of their outputs, if the weight has them.
inline void scale_outputs(const Weight& w, int64_t panel, int64_t rows, float* sums) {
    const float* const scales = output_scales(w);
    if (!scales) return;
    for (int64_t i = 0; i < rows * PANEL; i += 16)
        store_floats(sums + i, load_floats(sums + i) * load_floats(scales + panel * PANEL + i % PANEL));
}

// Stores the outputs of rows whose sums are complete, of V vectors of a panel from `first` on. `groups`: of inputs
// whose sums were scaled separately.
template <int V>
void finish_tiles(
    const Product& product, int64_t row, int64_t rows, int64_t panel, int64_t first, int64_t groups, float* sums
) {
    const Weight& w = *product.weight;
    if (w.operand == BYTES) scale_bytes<V>(product, row, rows, panel, first, sums);
    else if (w.operand == INT8) scale_integers<V>(product, row, rows, panel, first, sums);
    else if (groups == 1) scale_outputs(w, panel, rows, sums);
    finish<V>(product, sums, row, rows, panel * PANEL + first * 16);
}

// f(numbers) with the numbers of V vectors of a panel from `first` on, of inputs from `input` on. Only whole panels
// need unpacking.
template <class Dot, int V, class F>
void with_columns(const Weight& w, int64_t panel, int64_t first, int64_t input, const F& f) {
    if constexpr (Dot::SIZE == 2 && V == 4)
        if (w.kind != BF16) return with_panel(w, panel, input, f);
    PlainNumbers<Dot::SIZE> numbers(panel_data<char>(w, panel) + first * AMX_BYTES);
    f(numbers);
}

// At most AMX_ROWS rows times V vectors of a panel.
template <class Dot, int V>
void one_tile(const Product& product, int64_t row, int64_t rows, int64_t panel, int64_t first) {
    using Block = TileBlock<Dot, 1, V>;
    const Weight& w = *product.weight;
    const int64_t groups = summed_groups(w), length = w.kpad * Dot::SIZE,
                  width = groups > 1 ? w.group * Dot::SIZE : length;
    const TileRows a = TileRows::consecutive(product.row_bytes(row), product.ld_bytes(), rows);
    alignas(64) float sums[AMX_ROWS * PANEL], totals[AMX_ROWS * PANEL];
    for (int64_t r = 0; r < rows; r++) fetch_outputs<1, V>(product, row + r, panel * PANEL + first * 16);
    Block::begin(a);
    if (Dot::SIZE == 1 || w.kind == BF16) {  // the processor's own prefetchers follow a panel that is read as it is
        Stream nothing;
        Block::add(a, 0, panel_data<char>(w, panel) + first * AMX_BYTES, 4 * PANEL, length, nothing);
        Block::store(sums);
    } else if constexpr (Dot::SIZE == 2 && V == 4) {
        alignas(64) char cells[2 * AMX_ROWS * 4 * AMX_BYTES];
        with_panel(w, panel, 0, [&](auto& numbers) {
            for (int64_t g = 0; g < groups; g++) {
                if (g) Block::zero();
                unpack_between(a, numbers, {g * width, std::min(length, (g + 1) * width)}, cells);
                Block::store(sums);
                if (groups > 1) add_group_sums<0, V>(w, panel, g, rows, sums, totals);
            }
        });
    }
    release_tiles();
    finish_tiles<V>(product, row, rows, panel, first, groups, groups > 1 ? totals : sums);
}

// Rows [begin, end) times V vectors of panels [part.panel, panels_end), in slices. Several panels are multiplied in
// turn with LONG_BYTES of the rows, which stay in the second-level cache for all of them.
template <class Dot, int V>
void sliced_panels(const Product& product, int64_t begin, int64_t end, PanelPart part, int64_t panels_end) {
    const int64_t first = part.first;
    const Weight& w = *product.weight;
    const RowBlocks blocks{product, begin, end, w.operand == INT8};
    const int64_t groups = summed_groups(w), length = w.kpad * Dot::SIZE, size = blocks.count() * HEIGHT * PANEL;
    const int64_t each = panels_end - part.panel > 1 ? LONG_BYTES : length;
    float* const sums = thread_memory<Use::ROWS_OR_SUMS>(size * (panels_end - part.panel));
    // where panel p stores the inputs from byte `at` of the rows on
    const auto stored = [&](int64_t p, int64_t at) { return panel_data<char>(w, p) + panel_bytes(w) * at / length; };
    for (int64_t at = 0; at < length; at += each)
        for (int64_t p = part.panel; p < panels_end; p++) {
            const Inputs inputs{at, std::min(length, at + each)};
            const char* const following = p + 1 < panels_end    ? stored(p + 1, at)
                                          : inputs.end < length ? stored(part.panel, inputs.end)
                                                                : part.next;
            SlicedProduct<Dot, V> sliced(blocks, groups, sums + (p - part.panel) * size);
            const int64_t ahead = panel_bytes(w) * std::min(sliced.slice(), length) / length;
            Stream stream(
                stored(p, at), stored(p, inputs.end) - stored(p, at), ahead, following,
                sliced.steps(inputs.end - at, blocks.count())
            );
            with_columns<Dot, V>(w, p, first, at / Dot::SIZE, [&](auto& numbers) {
                sliced.add(
                    numbers, p, inputs, stream,
                    // a few outputs at a time: reads of the rows would wait for more
                    [&](int64_t block, Inputs slice) {
                        const int64_t rows = blocks.rows(), row = blocks.first(block);
                        for (int64_t r = rows * slice.begin / length; r < rows * slice.end / length; r++)
                            fetch_outputs<1, V>(product, row + r, p * PANEL + first * 16);
                    },
                    [&](int64_t block, float* complete) {
                        const int64_t repeated = blocks.repeated(block);
                        finish_tiles<V>(
                            product, blocks.first(block) + repeated, blocks.rows() - repeated, p, first, groups,
                            complete + repeated * PANEL
                        );
                    }
                );
            });
        }
}

// `tiles` in products.h, by tiles of AMX, for the same part of panels [part.panel, panels_end).
void amx_tiles(const Product& product, int64_t begin, int64_t end, PanelPart part, int64_t panels_end) {
    const Weight& w = *product.weight;
    with_vectors(part.count, [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        const int64_t rows = end - begin;
        const auto run = [&](auto dot) {
            using Dot = decltype(dot);
            if (w.operand == INT8 || rows > AMX_ROWS) sliced_panels<Dot, V>(product, begin, end, part, panels_end);
            else one_tile<Dot, V>(product, begin, rows, part.panel, part.first);
        };
        if (w.operand == BF16) run(DotBf16());
        else run(DotBytes());
    });
}

#endif

}  // namespace
