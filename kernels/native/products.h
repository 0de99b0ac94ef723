// Matrix products over packed weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "finish.h"
#include "group_tiles.h"
#include "numbers.h"
#include "operands.h"
#include "panels.h"
#include "row_tiles.h"
#include "scratch.h"
#include "structs.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int64_t INTEGER_TILE_ROWS = 3;  // MOST_TILE_ROWS for integers of 16 bits, whose rows are two of bytes
constexpr int64_t ROW_BLOCK = 192;        // rows of a unit of work, at most
// A thread with at least so many rows of its own reads all weights for them. With 64, products are 13 % slower.
constexpr int64_t LEAST_THREAD_ROWS = 128;
// Inputs of a panel that all tiles multiply before the next ones, if there are at most MOST_SLICED_TILES tiles.
#if BF16_PAIRS
constexpr int64_t SLICE_INPUTS = 1024, MOST_SLICED_TILES = 8;
#else
// Unpacked to float32 that is 16 KB: it stays in the first-level cache.
constexpr int64_t SLICE_INPUTS = 64, MOST_SLICED_TILES = ROW_BLOCK / MOST_TILE_ROWS;
#endif
// If there are at most so many tiles, each unpacks a compact panel for itself: storing it would take longer.
constexpr int64_t TILES_UNPACKING_EACH = 2;
constexpr int64_t LEAST_DIVIDED_INPUTS = 1024;  // only panels of at least so many inputs are divided among threads

#if AMX_TILES
// From LONG_INPUTS on, the rows of a unit of work and a panel would not both fit in the second-level cache, so that
// each panel would read all rows from beyond it. Units of LONG_ROWS to LONG_BLOCK rows then have up to LONG_PANELS
// panels, all of which are multiplied with LONG_BYTES of each row before the next ones.
constexpr int64_t LONG_INPUTS = 3072, LONG_BYTES = 2048, LONG_ROWS = 64, LONG_BLOCK = 256, LONG_PANELS = 8;
// In products_amx.h.
void amx_tiles(const Product& product, int64_t begin, int64_t end, PanelPart part, int64_t panels_end);
#else
constexpr int64_t LONG_INPUTS = INT64_MAX, LONG_BLOCK = 1, LONG_ROWS = 1, LONG_PANELS = 1;
#endif
// In other products by tiles of AMX, the rows of a unit have about so many bytes, 0.6 to 1.6 times as many. More rows
// share the cost of unpacking a panel.
constexpr int64_t UNIT_ROW_BYTES = 1 << 20;

// In scaled.h.
template <int R>
void tile_scaled(const Product& product, int64_t row, int64_t panel, Inputs inputs, Prefetch ahead, float* out);

// R rows, from row `row` on, times V vectors of a panel's outputs, from vector `first` on, for some of the inputs. They
// are added to `sums` [R, PANEL], unless they are the first inputs. After the last inputs the outputs are stored.
template <int R, int V>
void tile(
    const Product& product, int64_t row, int64_t panel, int64_t first, Inputs inputs, Prefetch ahead, float* sums
) {
    const Weight& w = *product.weight;
    const int64_t begin = panel * PANEL + first * 16;
    const bool last = inputs.end == w.kpad;
    if (last) fetch_outputs<R, V>(product, row, begin);
#if !AMX_TILES
    if (w.kind == BF16) tile_bf16<R, V>(product, row, panel, first, inputs, ahead, sums);
#endif
    if (w.kind == F32) tile_f32<R>(product, row, panel, sums);
    if constexpr (V == 4) {
        if (is_unpacked(w)) tile_scaled<R>(product, row, panel, inputs, ahead, sums);
        if (w.operand == SUMMED_BYTES) tile_groups<R>(product, row, panel, ahead, sums);
    }
    if constexpr (R <= INTEGER_TILE_ROWS) {
        if (w.operand == INT8) tile_int8<R, V>(product, row, panel, first, ahead, sums);
        if (w.operand == INT4) tile_int4<R>(product, row, panel, ahead, sums);
    }
    if (last) finish<V>(product, sums, row, R, begin);
}

// tile<rows, V>.
template <int V, int R = 1>
void tile_of(
    int64_t rows, const Product& product, int64_t row, int64_t panel, int64_t first, Inputs inputs, Prefetch ahead,
    float* sums
) {
    if constexpr (R < MOST_TILE_ROWS) {
        if (rows > R) return tile_of<V, R + 1>(rows, product, row, panel, first, inputs, ahead, sums);
    }
    tile<R, V>(product, row, panel, first, inputs, ahead, sums);
}

// Inputs of a slice for `tile_count` tiles. No group whose sums are scaled is divided. Without instructions for pairs,
// slices are longer if many tiles share the cost of unpacking beyond the first-level cache, because each tile loads and
// stores its sums once a slice.
int64_t slice_length(const Weight& w, int64_t tile_count) {
    const int64_t step = is_unpacked(w) && summed_groups(w) > 1 ? std::lcm<int64_t>(w.group, 16) : 16;
    const int64_t longest = BF16_PAIRS ? SLICE_INPUTS
                                       : SLICE_INPUTS * std::min<int64_t>(std::max<int64_t>(tile_count / 8, 1), 4);
    const int64_t slices = (w.kpad + longest - 1) / longest, each = (w.kpad + slices - 1) / slices;
    return (each + step - 1) / step * step;
}

// How the rows of a unit are divided: into tiles of nearly equal height, which multiply `length` inputs at a time. A
// few tiles multiply a slice of the inputs before the next one: a long panel and the one that is prefetched would not
// both fit in the second-level cache. A row's sums go through the inputs in order all the same.
struct Division {
    int64_t tile_count;
    int64_t length;  // inputs of a slice; all of them unless `sliced`
    bool sliced;
    Division(const Weight& w, int64_t rows) {
        const int64_t height = w.operand == INT8 || w.operand == INT4 ? INTEGER_TILE_ROWS : MOST_TILE_ROWS;
        const bool floats = !BF16_PAIRS || w.operand == F32;  // whether numbers are unpacked to float32
        tile_count = (rows + height - 1) / height;
        sliced = tile_count > 1 && tile_count <= MOST_SLICED_TILES &&
                 (w.kind == BF16 || w.kind == COMPACT_BF16 || (is_unpacked(w) && floats));
        length = sliced ? slice_length(w, tile_count) : w.kpad;
    }
};

// Size, in numbers of 4 bytes, of the memory where the first tile stores inputs in the form in which the others
// multiply them; 0: the panel has this form, or each tile unpacks them.
int64_t unpacked_size(const Weight& w, const Division& division) {
    if (division.tile_count == 1) return 0;
    if (w.operand == SUMMED_BYTES) return w.kind == INT4 ? division.length * PANEL / 4 : 0;
    if (w.kind == COMPACT_BF16 && division.tile_count <= TILES_UNPACKING_EACH) return 0;
    return is_unpacked(w) || (division.sliced && !BF16_PAIRS) ? division.length * PANEL : 0;
}

// Whether tiles multiply words of whole panels, so that `row_tiles` has them.
bool are_words(const Weight& w, const Division& division) {
    if (division.tile_count == 1) return false;
    if (w.operand == SUMMED_BYTES) return GROUP_TILES;
    return BF16_PAIRS && w.operand == BF16 && !division.sliced &&
           (w.kind == BF16 || (is_unpacked(w) && summed_groups(w) == 1));
}

// `tiles` below, for such panels. `already_unpacked`: whether product.unpacked holds the panel.
void word_tiles(
    Product& product, const Division& division, bool already_unpacked, int64_t begin, int64_t end, PanelPart part
) {
    const Weight& w = *product.weight;
    if (product.unpacked && !already_unpacked) {  // the first tile stores the panel for the others
        alignas(64) float sums[MOST_TILE_ROWS * PANEL];
        const int64_t rows = (end - begin) / division.tile_count;
        product.unpacks = true;
        tile_of<4>(rows, product, begin, part.panel, part.first, {0, w.kpad}, {}, sums);
        begin += rows;
    }
    if (w.operand == SUMMED_BYTES) {
        const auto* const columns = static_cast<const uint8_t*>(product.unpacked);
        return group_tiles<UnpackedInt4, UNPACKED_VECTORS>(product, begin, end, columns, part);
    }
#if PAIR_PRODUCTS
    const void* const columns = product.unpacked ? product.unpacked : panel_data(w, part.panel);
    row_tiles<WordTiles<PairWords>>(product, begin, end, static_cast<const uint8_t*>(columns), part);
#endif
}

// `tiles` below for others, one tile at a time.
void slice_tiles(
    Product& product, const Division& division, bool already_unpacked, int64_t begin, int64_t end, PanelPart part
) {
    const Weight& w = *product.weight;
    const char* const stored = panel_data<char>(w, part.panel);
    const int64_t tile_count = division.tile_count,
                  inputs_each = (w.kind == INT8 || w.kind == INT4 || w.operand == SUMMED_BYTES ? 4 : 2) *
                                PREFETCH_STEPS;
    alignas(64) float sums[MOST_SLICED_TILES * MOST_TILE_ROWS * PANEL];
    for (int64_t at = 0; at < w.kpad; at += division.length) {
        const Inputs inputs{at, std::min(at + division.length, w.kpad)};
        const int64_t bytes = panel_bytes(w) * (inputs.end - at) / w.kpad, steps = (inputs.end - at) / inputs_each + 1;
        const char* const following =
            part.count == 4 && inputs.end < w.kpad ? stored + panel_bytes(w) * inputs.end / w.kpad : part.next;
        for (int64_t i = 0; i < tile_count; i++) {
            product.unpacks = i == 0 && !already_unpacked;
            const int64_t from = begin + (end - begin) * i / tile_count,
                          to = begin + (end - begin) * (i + 1) / tile_count;
            const Prefetch ahead = prefetch_of(i, tile_count, tile_count > 1 ? following : nullptr, bytes, steps);
            float* const kept = sums + (division.sliced ? (from - begin) * PANEL : 0);
            with_vectors(part.count, [&](auto vectors) {
                tile_of<vectors()>(to - from, product, from, part.panel, part.first, inputs, ahead, kept);
            });
        }
    }
}

// Whether `byte_group_tiles` multiplies all rows of SUMMED_BYTES.
bool has_byte_groups(const Weight& w) { return GROUP_TILES && w.kind == UINT8 && w.operand == SUMMED_BYTES; }

// Whether vectors of a panel can be multiplied without the others: one by one, or at least two.
bool divisible(const Weight& w) { return w.kind == BF16 || w.kind == INT8 || has_byte_groups(w); }
bool in_halves(const Weight& w) { return w.gated || has_byte_groups(w); }

// Rows of SUMMED_BYTES times such a panel. All vectors of a panel that comes from memory are read at once: by a few
// rows with totals in registers, otherwise by the first tile of more than WHOLE_PANEL_ROWS rows.
void byte_group_tiles(const Product& product, int64_t begin, int64_t end, PanelPart part) {
    const uint8_t* const columns = panel_data(*product.weight, part.panel);
    if (part.count < 4) return group_tiles<StoredBytes, 2>(product, begin, end, columns, part);
    if (end - begin <= WHOLE_PANEL_ROWS) return group_tiles<StoredBytes, 4>(product, begin, end, columns, part);
    const int64_t count = (end - begin + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, rows = (end - begin + count - 1) / count;
    alignas(64) float sums[MOST_TILE_ROWS * PANEL];
    tile_of<4>(rows, product, begin, part.panel, 0, {0, product.weight->kpad}, {}, sums);
    if (begin + rows < end) group_tiles<StoredBytes, 2>(product, begin + rows, end, columns, part);
}

// Whether tiles of AMX multiply many rows of such weights (slices_amx.h).
bool multiplies_slices(const Weight& w) {
    return AMX_TILES && (w.operand == BF16 || w.operand == BYTES || w.operand == INT8);
}

// Rows [begin, end) times a part of a panel. A single tile does not prefetch.
void tiles(const Product& original, int64_t begin, int64_t end, PanelPart part) {
    const Weight& w = *original.weight;
#if AMX_TILES
    // Rows that are multiplied without tiles of AMX.
    const int64_t few = w.operand == BF16 ? 0 : w.operand == BYTES ? MOST_TILE_ROWS : INTEGER_TILE_ROWS;
    if (multiplies_slices(w) && end - begin > few) return amx_tiles(original, begin, end, part, part.panel + 1);
#endif
    if (w.operand == BYTES)
        return row_tiles<WordTiles<ByteWords>>(original, begin, end, panel_data(w, part.panel), part);
    if (has_byte_groups(w)) return byte_group_tiles(original, begin, end, part);
    const Division division(w, end - begin);
    Product product = original;
    if (const int64_t size = unpacked_size(w, division)) product.unpacked = thread_memory<Use::PANEL>(size);
    const bool already_unpacked = product.unpacked &&
                                  unpacked_before(w, division.length == w.kpad && part.count == 4 ? part.panel : -1);
    if (are_words(w, division)) word_tiles(product, division, already_unpacked, begin, end, part);
    else slice_tiles(product, division, already_unpacked, begin, end, part);
}

// Whether rows and a panel are too long for the second-level cache.
bool is_long(const Weight& w) { return w.kpad >= LONG_INPUTS && w.operand == BF16 && summed_groups(w) == 1; }

// Units of a product: (panel, block of rows), or parts of panels if there would be too few for the threads: quarters,
// or halves for gated weights; or several long panels. Many rows are first divided into groups of rows for each thread,
// or for some of them: what a thread computes of a row it also reads in the operations between products, and another
// core's caches may be far away.
struct Units {
    // The rows of a product are divided into `row_groups`, and these into `blocks`; its outputs into panels, of which a
    // unit has `unit_panels`, or one of the `parts` of one. count: of all units.
    int64_t rows, threads, row_groups, parts, unit_panels, blocks, count;
    Units(const Weight& w, int64_t rows, int64_t threads, int64_t products = 1) : rows(rows), threads(threads) {
        const int64_t panels = panels_of(w);
        row_groups = std::clamp<int64_t>(rows / LEAST_THREAD_ROWS, 1, threads);
        while (threads % row_groups) row_groups--;
        if (multiplies_slices(w) && !is_long(w)) {
            const int64_t bytes = rows / row_groups * w.kpad * (w.operand == BYTES ? 1 : 2);
            row_groups *= std::max<int64_t>((bytes + UNIT_ROW_BYTES * 2 / 5) / UNIT_ROW_BYTES, 1);
            blocks = 1;
        } else {
            const int64_t most = row_groups * (is_long(w) ? LONG_BLOCK : ROW_BLOCK);
            blocks = (rows + most - 1) / most;
        }
        // For one row a quarter panel has the same latency of sums as a whole one: it pays where memory is the
        // bottleneck.
        const bool large = divisible(w) && threads > 1 && w.kpad >= LEAST_DIVIDED_INPUTS;
        parts = large && products * panels * row_groups * blocks < 6 * threads ? in_halves(w) ? 2 : 4 : 1;
        const bool many = is_long(w) && parts == 1 && rows >= LONG_ROWS * row_groups * blocks;
        unit_panels = many ? std::clamp<int64_t>(panels * row_groups * blocks / (2 * threads), 1, LONG_PANELS) : 1;
        count = row_groups * ((panels + unit_panels - 1) / unit_panels) * parts * blocks;
    }
    int64_t panel_of(int64_t unit) const { return unit % (count / row_groups) / blocks / parts * unit_panels; }
    int64_t first_part(int64_t unit) const { return unit / blocks % parts; }
    int64_t end_of_outputs(int64_t unit) const { return (panel_of(unit) + unit_panels) * PANEL; }
    std::pair<int64_t, int64_t> rows_of(int64_t unit, int64_t rows) const {
        const int64_t all = row_groups * blocks, block = unit / (count / row_groups) * blocks + unit % blocks;
        return {rows * block / all, rows * (block + 1) / all};
    }
};

// The panel that a thread will probably take after a unit: the next of its lane, or the first of its lane in the
// following product. Null if that panel is loaded already.
const char* next_panel(const Product& product, const Units& units, int64_t unit) {
    const int64_t lane = ((unit + 1) * units.threads - 1) / units.count,
                  last = lane_begin(units.count, units.threads, lane + 1) - 1;
    const Weight* weight = unit < last ? product.weight : product.next;
    if (units.parts > 1 || !weight || weight->kind == F32) return nullptr;
    const Units next = unit < last ? units : Units(*weight, units.rows, units.threads);
    const int64_t panel = next.panel_of(unit < last ? unit + 1 : lane_begin(next.count, next.threads, lane));
    if (unit < last && panel == units.panel_of(unit)) return nullptr;
    return panel_data<char>(*weight, panel);
}

// A unit for rows [begin, end).
void run_rows(const Product& product, const Units& units, int64_t unit, int64_t begin, int64_t end) {
    const char* const next = next_panel(product, units, unit);
    const int64_t from = units.panel_of(unit), to = std::min(from + units.unit_panels, panels_of(*product.weight)),
                  first = units.first_part(unit) * (4 / units.parts);
#if AMX_TILES
    if (units.unit_panels > 1 && end - begin >= LONG_ROWS)
        return amx_tiles(product, begin, end, {from, 0, 4, next}, to);
#endif
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t left = product.weight->n - panel * PANEL - first * 16;
        if (left <= 0) return;
        const int64_t needed = left > 32 || !divisible(*product.weight)  ? 4
                               : left > 16 || in_halves(*product.weight) ? 2
                                                                         : 1;
        tiles(product, begin, end, {panel, first, std::min(4 / units.parts, needed), next});
    }
}

void run_unit(const Product& product, const Units& units, int64_t unit, int64_t rows, int64_t before = 0) {
    const auto [begin, end] = units.rows_of(unit, rows);
    run_rows(product, units, unit, before + begin, before + end);
}

}  // namespace
