// Matrix products over packed weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "finish.h"
#include "int4_tiles.h"
#include "numbers.h"
#include "operands.h"
#include "panels.h"
#include "row_tiles.h"
#include "structs.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int64_t INT_ROWS = 3;     // ROWS for integers of 16 bits, whose rows are two of bytes
constexpr int64_t ROW_BLOCK = 192;  // rows that a unit of work covers
// Rows of a thread for which it reads all weights. With 64, products are 13 % slower.
constexpr int64_t OWN_ROWS = 128;
#if BF16_PAIRS
constexpr int64_t SLICE = 1024;  // inputs of a bfloat16 panel that all tiles multiply before the next ones ...
constexpr int64_t SLICED = 8;    // ... where there are at most so many tiles
#else
// Unpacked to float32 that is 16 KB: it stays in the first-level cache
constexpr int64_t SLICE = 64, SLICED = ROW_BLOCK / ROWS;
#endif
// Tiles of rows, up to which each unpacks a compact panel for itself: stores would take longer
constexpr int64_t UNPACKED_EACH = 2;
constexpr int64_t DIVISIBLE = 1024;  // inputs from which on a panel may be divided among threads

#if AMX_TILES
// From LONG_INPUTS on, the rows of a unit of work and a panel would not both fit in the second-level cache, so that
// each panel would read all rows from beyond it. Units of LONG_ROWS to LONG_BLOCK rows then have several panels, which
// take LONG_BYTES of the rows after the others.
constexpr int64_t LONG_INPUTS = 3072, LONG_BYTES = 2048, LONG_ROWS = 64, LONG_BLOCK = 256, LONG_PANELS = 8;
// products_amx.h
void amx_tiles(
    const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t panels_end, int64_t first, int64_t count,
    const char* next
);
#else
constexpr int64_t LONG_INPUTS = INT64_MAX, LONG_BLOCK = 1, LONG_ROWS = 1, LONG_PANELS = 1;
#endif
// Bytes of the rows of a unit of other products by tiles of AMX, 0.6 to 1.6 times as many. More rows share the cost of
// unpacking a panel.
constexpr int64_t ROWS_MEMORY = 1 << 20;

// scaled.h
int64_t summed_groups(const Weight& w);
template <int R>
void tile_scaled(
    const void* rows, int64_t row, int64_t lda, const Weight& w, int64_t panel, Inputs inputs, void* unpacked,
    bool first_rows, Ahead ahead, float* out
);

// `sums`: [R, PANEL], which keep what the inputs before these gave. The last inputs finish them.
template <int R, int V>
void tile(const Product& job, int64_t row, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* sums) {
    const Weight& w = *job.weight;
    const int64_t begin = panel * PANEL + first * 16;
    const bool last = inputs.end == w.kpad;
    if (last) fetch_outputs<R, V>(job, row, begin);
    const uint16_t* a = static_cast<const uint16_t*>(job.a) + row * job.lda;
#if !AMX_TILES
    if (w.kind == BF16)
        tile_bf16<R, V>(
            a, job.lda, w, panel, first, inputs, static_cast<float*>(job.unpacked), job.first_rows, ahead, sums
        );
#endif
    if (w.kind == F32) tile_f32<R>(static_cast<const float*>(job.a) + row * job.lda, job.lda, w, panel, sums);
    if constexpr (V == 4)
        if (w.kind >= FP8)
            tile_scaled<R>(job.a, row, job.lda, w, panel, inputs, job.unpacked, job.first_rows, ahead, sums);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(a);
    if constexpr (V == 4)
        if (w.operand == SUMMED_BYTES)
            tile_int4_bytes<R>(
                bytes, 2 * job.lda, job.scales + row, w, panel, static_cast<uint8_t*>(job.unpacked), job.first_rows,
                ahead, sums
            );
    if constexpr (R <= INT_ROWS) {
        if (w.operand == INT8) tile_int8<R, V>(bytes, 2 * job.lda, job.scales + row, w, panel, first, ahead, sums);
        if (w.operand == INT4) tile_int4<R>(bytes, 2 * job.lda, job.scales + row, w, panel, ahead, sums);
    }
    if (last) finish<V>(job, sums, row, R, begin);
}

// tile<rows, V>.
template <int V, int R = 1>
void tile_of(
    int64_t rows, const Product& job, int64_t row, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* sums
) {
    if constexpr (R < ROWS) {
        if (rows > R) return tile_of<V, R + 1>(rows, job, row, panel, first, inputs, ahead, sums);
    }
    tile<R, V>(job, row, panel, first, inputs, ahead, sums);
}

// Inputs of a slice for `pieces` tiles: no group whose sums are scaled is divided. Unpacked slices are longer if many
// tiles share the cost of unpacking beyond the first-level cache, because each tile loads and stores its sums once a
// slice.
int64_t slice_of(const Weight& w, int64_t pieces) {
    const int64_t step = w.kind >= FP8 && summed_groups(w) > 1 ? std::lcm<int64_t>(w.group, 16) : 16;
    const int64_t longest = BF16_PAIRS ? SLICE : SLICE * std::min<int64_t>(std::max<int64_t>(pieces / 8, 1), 4);
    const int64_t slices = (w.kpad + longest - 1) / longest, each = (w.kpad + slices - 1) / slices;
    return (each + step - 1) / step * step;
}

// How the rows of a unit are divided: into tiles of nearly equal height, which multiply `length` inputs at a time. A
// few tiles multiply a slice of the inputs before the next one: a long panel and the one that is prefetched would not
// both fit in the second-level cache. A row's sums go through the inputs in order all the same.
struct Division {
    int64_t pieces, length;
    bool sliced;
    Division(const Weight& w, int64_t rows) {
        const int64_t height = w.operand == INT8 || w.operand == INT4 ? INT_ROWS : ROWS;
        const bool floats = !BF16_PAIRS || w.operand == F32;
        pieces = (rows + height - 1) / height;
        sliced = pieces > 1 && pieces <= SLICED &&
                 (w.kind == BF16 || w.kind == COMPACT_BF16 || (w.kind >= FP8 && floats));
        length = sliced ? slice_of(w, pieces) : w.kpad;
    }
};

// Size, in numbers of 4 bytes, of the memory where the first tile stores inputs in the form in which the others
// multiply them; 0: the panel has this form, or each tile unpacks them.
int64_t unpacked_size(const Weight& w, const Division& division) {
    if (division.pieces == 1) return 0;
    if (w.operand == SUMMED_BYTES) return division.length * PANEL / 4;
    if (w.kind == COMPACT_BF16 && division.pieces <= UNPACKED_EACH) return 0;
    return w.kind >= FP8 || (division.sliced && !BF16_PAIRS) ? division.length * PANEL : 0;
}

// Whether tiles multiply words of whole panels, so that `row_tiles` has them.
bool are_words(const Weight& w, const Division& division) {
    if (division.pieces == 1) return false;
    if (w.operand == SUMMED_BYTES) return INT4_TILES;
    return BF16_PAIRS && w.operand == BF16 && !division.sliced &&
           (w.kind == BF16 || (w.kind >= FP8 && summed_groups(w) == 1));
}

// `tiles` below, for such panels. `there`: whether the panel is unpacked already.
void word_tiles(
    Product& job, const Division& division, bool there, int64_t begin, int64_t end, int64_t panel, int64_t first,
    int64_t count, const char* next
) {
    const Weight& w = *job.weight;
    if (job.unpacked && !there) {  // the first tile stores the panel for the others
        alignas(64) float sums[ROWS * PANEL];
        const int64_t lowest = (end - begin) / division.pieces;
        job.first_rows = true;
        tile_of<4>(lowest, job, begin, panel, first, {0, w.kpad}, {}, sums);
        begin += lowest;
    }
    if (w.operand == SUMMED_BYTES) return int4_tiles<UNPACKED_VECTORS>(job, begin, end, panel, next);
#if PAIR_PRODUCTS
    const void* const columns = job.unpacked ? job.unpacked
                                             : static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    row_tiles<WordTiles<PairWords>>(job, begin, end, static_cast<const uint8_t*>(columns), panel, first, count, next);
#endif
}

// `tiles` below for others, one tile at a time.
void slice_tiles(
    Product& job, const Division& division, bool there, int64_t begin, int64_t end, int64_t panel, int64_t first,
    int64_t count, const char* next
) {
    const Weight& w = *job.weight;
    const char* const stored = static_cast<const char*>(w.data) + panel * panel_bytes(w);
    const int64_t pieces = division.pieces, inputs_each = (w.kind == INT8 || w.kind == INT4 ? 4 : 2) * STRIDE;
    alignas(64) float sums[SLICED * ROWS * PANEL];
    for (int64_t at = 0; at < w.kpad; at += division.length) {
        const Inputs inputs{at, std::min(at + division.length, w.kpad)};
        const int64_t bytes = panel_bytes(w) * (inputs.end - at) / w.kpad, looks = (inputs.end - at) / inputs_each + 1;
        const char* const soon = count == 4 && inputs.end < w.kpad ? stored + panel_bytes(w) * inputs.end / w.kpad
                                                                   : next;
        for (int64_t i = 0; i < pieces; i++) {
            job.first_rows = i == 0 && !there;
            const int64_t from = begin + (end - begin) * i / pieces, to = begin + (end - begin) * (i + 1) / pieces;
            const Ahead ahead = ahead_of(i, pieces, pieces > 1 ? soon : nullptr, bytes, looks);
            float* const kept = sums + (division.sliced ? (from - begin) * PANEL : 0);
            if (count == 4) tile_of<4>(to - from, job, from, panel, first, inputs, ahead, kept);
            else if (count == 2) tile_of<2>(to - from, job, from, panel, first, inputs, ahead, kept);
            else tile_of<1>(to - from, job, from, panel, first, inputs, ahead, kept);
        }
    }
}

// Whether tiles of AMX multiply many rows of such weights (slices_amx.h).
bool multiplies_slices(const Weight& w) {
    return AMX_TILES && (w.operand == BF16 || w.operand == BYTES || w.operand == INT8);
}

// Rows [begin, end) times `count` vectors of a panel, from vector `first` on. `next`: a panel to prefetch during the
// last tiles; a single tile does not prefetch.
void tiles(
    const Product& product, int64_t begin, int64_t end, int64_t panel, int64_t first, int64_t count, const char* next
) {
    const Weight& w = *product.weight;
#if AMX_TILES
    // Rows that are multiplied without tiles of AMX.
    const int64_t few = w.operand == BF16 ? 0 : w.operand == BYTES ? ROWS : INT_ROWS;
    if (multiplies_slices(w) && end - begin > few)
        return amx_tiles(product, begin, end, panel, panel + 1, first, count, next);
#endif
    if (w.operand == BYTES) {
        const uint8_t* const columns = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
        return row_tiles<WordTiles<ByteWords>>(product, begin, end, columns, panel, first, count, next);
    }
    const Division division(w, end - begin);
    Product job = product;
    if (const int64_t size = unpacked_size(w, division)) job.unpacked = own_memory<0>(size);
    const bool there = job.unpacked && is_unpacked(w, division.length == w.kpad && count == 4 ? panel : -1);
    if (are_words(w, division)) word_tiles(job, division, there, begin, end, panel, first, count, next);
    else slice_tiles(job, division, there, begin, end, panel, first, count, next);
}

// Whether rows and a panel are too long for the second-level cache.
bool is_long(const Weight& w) { return w.kpad >= LONG_INPUTS && w.operand == BF16 && summed_groups(w) == 1; }

// Whether vectors of a panel can be multiplied without the others.
bool divisible(const Weight& w) { return w.kind == BF16 || w.kind == INT8; }

// Units of a product: (panel, block of rows), or parts of panels if there would be too few for the threads: quarters,
// or halves for gated weights; or several long panels. Many rows are first divided into groups of rows for each thread,
// or for some of them: what a thread computes of a row it also reads in the operations between products, and another
// core's caches may be far away.
struct Units {
    // together: panels of a unit; blocks: of a group of rows
    int64_t rows, threads, row_groups, parts, together, blocks, count;
    Units(const Weight& w, int64_t rows, int64_t threads, int64_t products = 1) : rows(rows), threads(threads) {
        const int64_t panels = panels_of(w);
        for (row_groups = threads; row_groups > 1 && (threads % row_groups || rows < OWN_ROWS * row_groups);)
            row_groups--;
        if (multiplies_slices(w) && !is_long(w)) {
            const int64_t bytes = rows / row_groups * w.kpad * (w.operand == BYTES ? 1 : 2);
            row_groups *= std::max<int64_t>((bytes + ROWS_MEMORY * 2 / 5) / ROWS_MEMORY, 1);
            blocks = 1;
        } else {
            const int64_t most = row_groups * (is_long(w) ? LONG_BLOCK : ROW_BLOCK);
            blocks = (rows + most - 1) / most;
        }
        // For one row a quarter panel has the same latency of sums as a whole one: it pays where memory is the
        // bottleneck.
        const bool large = divisible(w) && threads > 1 && w.kpad >= DIVISIBLE;
        parts = large && products * panels * row_groups * blocks < 6 * threads ? w.gated ? 2 : 4 : 1;
        const bool many = is_long(w) && parts == 1 && rows >= LONG_ROWS * row_groups * blocks;
        together = many ? std::clamp<int64_t>(panels * row_groups * blocks / (2 * threads), 1, LONG_PANELS) : 1;
        count = row_groups * ((panels + together - 1) / together) * parts * blocks;
    }
    int64_t panel_of(int64_t unit) const { return unit % (count / row_groups) / blocks / parts * together; }
    int64_t first_part(int64_t unit) const { return unit / blocks % parts; }
    int64_t end_of_outputs(int64_t unit) const { return (panel_of(unit) + together) * PANEL; }
    std::pair<int64_t, int64_t> rows_of(int64_t unit, int64_t rows) const {
        const int64_t all = row_groups * blocks, block = unit / (count / row_groups) * blocks + unit % blocks;
        return {rows * block / all, rows * (block + 1) / all};
    }
};

// The panel that a thread will probably take after a unit: the next of its lane, or the first of its lane in the
// following product. Null if that panel is loaded already.
const char* next_panel(const Product& job, const Units& units, int64_t unit) {
    const int64_t lane = ((unit + 1) * units.threads - 1) / units.count,
                  last = lane_begin(units.count, units.threads, lane + 1) - 1;
    const Weight* weight = unit < last ? job.weight : job.next;
    if (units.parts > 1 || !weight || weight->kind == F32) return nullptr;
    const Units of = unit < last ? units : Units(*weight, units.rows, units.threads);
    const int64_t panel = of.panel_of(unit < last ? unit + 1 : lane_begin(of.count, of.threads, lane));
    if (unit < last && panel == units.panel_of(unit)) return nullptr;
    return static_cast<const char*>(weight->data) + panel * panel_bytes(*weight);
}

// A unit for rows [begin, end).
void run_rows(const Product& job, const Units& units, int64_t unit, int64_t begin, int64_t end) {
    const char* const next = next_panel(job, units, unit);
    const int64_t from = units.panel_of(unit), to = std::min(from + units.together, panels_of(*job.weight)),
                  first = units.first_part(unit) * (4 / units.parts);
#if AMX_TILES
    if (units.together > 1 && end - begin >= LONG_ROWS) return amx_tiles(job, begin, end, from, to, 0, 4, next);
#endif
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t left = job.weight->n - panel * PANEL - first * 16;
        if (left <= 0) return;
        const int64_t needed = left > 32 || !divisible(*job.weight) ? 4 : left > 16 || job.weight->gated ? 2 : 1;
        tiles(job, begin, end, panel, first, std::min(4 / units.parts, needed), next);
    }
}

void run_unit(const Product& job, const Units& units, int64_t unit, int64_t rows, int64_t before = 0) {
    const auto [begin, end] = units.rows_of(unit, rows);
    run_rows(job, units, unit, before + begin, before + end);
}

}  // namespace
