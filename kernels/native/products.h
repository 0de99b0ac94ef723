// Matrix products over packed weights.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "numbers.h"
#include "structs.h"
#include "threads.h"

namespace {

constexpr int64_t PANEL = 64;       // columns of a packed weight that lie together
constexpr int64_t GROUP = 128;      // inputs that share a scale in int4
constexpr int64_t ROWS = 6;         // rows of a register tile: 6 x 4 accumulators of 16
constexpr int64_t INT_ROWS = 3;     // the same for integers, whose rows count twice
constexpr int64_t ROW_BLOCK = 192;  // rows that a unit of work covers
constexpr int64_t LINE = 64;        // bytes that are read from memory together
constexpr int64_t STRIDE = 4;       // steps through the inputs between two looks at what is needed next
constexpr int64_t SPREAD = 4;       // tiles of rows over which reading the next panel is spread
constexpr int64_t SLICE = 1024;     // inputs of a bfloat16 panel that all tiles meet before they meet the next ones ...
constexpr int64_t SLICED = 8;       // ... where there are at most so many tiles
constexpr int64_t DIVISIBLE = 1024; // inputs from which on a panel may be divided among threads
constexpr float LIMIT = 32639.0f;   // 127 * 256 + 127: the largest number that two signed bytes make

// Inputs as they are stored.
inline int64_t padded_inputs(int64_t k, int64_t kind) {
    const int64_t step = kind == F32 ? 1 : kind == BF16 ? 2 : kind == INT8 ? 16 : GROUP;
    return (k + step - 1) / step * step;
}

inline int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

// Number i of a row of a table with `width` numbers per row, which is a packed bfloat16 weight unless `kpad` is 0.
inline int64_t in_table(int64_t row, int64_t i, int64_t width, int64_t kpad) {
    return kpad ? row / PANEL * PANEL * kpad + i / 2 * 2 * PANEL + row % PANEL * 2 + i % 2 : row * width + i;
}

inline int64_t panel_bytes(const Weight& w) {
    if (w.kind == NVFP4) return w.kpad / 16 * 9 * PANEL;  // numbers of half a byte, and a byte for each 16 of them
    return w.kpad * PANEL * 2 / (w.kind == BF16 ? 1 : w.kind == INT8 || w.kind == FP8 ? 2 : 4);
}

// -- operands: float rows in the form that a kind of weight is multiplied with -------------------------------------------

// x in steps of its row's largest value / LIMIT, as 256 high + low, both signed bytes: for each 4 inputs the 4 lows, then
// the 4 highs. Weights are stored unsigned, so the row is followed by what that adds to a sum: for each group of inputs
// -offset times the sum of lows, and of highs.
void make_integers(const float* values, int64_t k, int64_t kind, int8_t* out, float* scale) {
    Floats largest = zero(), poison = zero();  // NaN and infinity have no integers: they pass through the scale
    for (int64_t i = 0; i < k; i += 16) {
        const Floats x = load16(values + i, first_lanes(k - i));
        largest = larger(magnitude(x), largest);
        poison = fmadd(x, zero(), poison);
    }
    const float top = largest_of(largest);
    *scale = top / LIMIT + total_of(poison);
    const Floats inverse = splat(top > 0 ? LIMIT / top : 0.0f);
    const int64_t kpad = padded_inputs(k, kind), group = kind == INT4 ? GROUP : kpad, offset = kind == INT4 ? 8 : 128;
    int8_t* sums = out + 2 * kpad;
    for (int64_t begin = 0; begin < kpad; begin += group) {
        Words lows = zero_words(), highs = zero_words();
        for (int64_t i = begin; i < begin + group; i += 16) {
            const Floats x = load16(values + i, first_lanes(std::max<int64_t>(0, k - i)));
            const Words whole = to_integers(x * inverse);
            const Words high = shift_right32<8>(add32(whole, splat_word(128)));
            const Words low = sub32(whole, shift_left32<8>(high));
            lows = add32(lows, low), highs = add32(highs, high);
            store_bytes_in_fours(out + 2 * i, low, high);
        }
        const int32_t both[2] = {int32_t(-offset * total_of(lows)), int32_t(-offset * total_of(highs))};
        std::memcpy(sums, both, 8);
        sums += 8;
    }
}

// `values` [k] -> row `row` of the operand, whose rows are `ld` elements apart; the padding is zero.
void make_operand(const float* values, int64_t k, int64_t kind, void* operand, int64_t ld, float* scales, int64_t row) {
    if (kind == F32) {
        std::memcpy(static_cast<float*>(operand) + row * ld, values, k * sizeof(float));
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(operand) + row * ld;
    if (kind != BF16) {
        make_integers(values, k, kind, reinterpret_cast<int8_t*>(out), scales + row);
        return;
    }
    for (int64_t i = 0; i < k; i += 16) {
        const Mask m = first_lanes(k - i);
        store16(out + i, m, load16(values + i, m));
    }
    std::fill(out + k, out + padded_inputs(k, kind), 0);
}

// -- products --------------------------------------------------------------------------------------------------------------

inline Words broadcast_word(const void* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return splat_word(v);
}

// Memory that is needed next, prefetched into the second-level cache while the current panel is multiplied: some lines
// every STRIDE steps of the inputs.
struct Ahead {
    const char *at, *end;
    int64_t bytes;
    bool step() {  // whether there was something to read
        if (at >= end) return false;
        const char* stop = std::min(at + bytes, end);
        for (; at < stop; at += LINE) prefetch_far(at);
        return true;
    }
};

struct Inputs {  // [begin, end) of a product's, begin a multiple of 2
    int64_t begin, end;
};

// R rows times 16 * V columns, from column 16 * first of a panel: the sums of some inputs, added to `sums` unless these are the
// FIRST ones. Never inlined: the loop needs most of the registers.
template <int R, int V, bool FIRST>
__attribute__((noinline)) void tile_bf16(
    const uint16_t* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* sums
) {
    const uint16_t* b = static_cast<const uint16_t*>(w.data) + (panel * w.kpad + inputs.begin) * PANEL + first * 32;
    const uint16_t* const a_end = a + inputs.end;
    a += inputs.begin;
    Floats sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = FIRST ? zero() : load_floats(sums + r * PANEL + v * 16);
    while (a < a_end) {
        const uint16_t* const stop = ahead.step() ? std::min(a_end, a + 2 * STRIDE) : a_end;
        for (; a < stop; a += 2, b += 2 * PANEL) {
            Words column[V];
            for (int v = 0; v < V; v++) column[v] = in_register(load_words(b + v * 32));
            for (int r = 0; r < R; r++) {
                const Words x = broadcast_word(a + r * lda);
                for (int v = 0; v < V; v++) sum[r][v] = dot_pairs(sum[r][v], x, column[v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store_floats(sums + r * PANEL + v * 16, sum[r][v]);
}

// Sums of low and high bytes -> sums of 256 high + low.
inline Floats joined(const Words* sums) {
    return fmadd(to_floats(sums[1]), splat(256.0f), to_floats(sums[0]));
}

// Products of unsigned 1-byte integers with 2-byte integers: R rows are 2 R rows of bytes. `sum` is initialised with the
// values after the rows.
template <int R, int V>
inline void begin_sums(const int8_t* behind, int64_t lda, Words (&sum)[V][R][2]) {
    for (int v = 0; v < V; v++)
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) sum[v][r][half] = broadcast_word(behind + r * lda + 4 * half);
}

template <int R, int V>
inline void add_products(const int8_t* a, int64_t lda, const Words (&column)[V], Words (&sum)[V][R][2]) {
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            const Words x = broadcast_word(a + r * lda + 4 * half);
            for (int v = 0; v < V; v++) sum[v][r][half] = dot_bytes(sum[v][r][half], column[v], x);
        }
}

template <int R, int V>
__attribute__((noinline)) void tile_int8(
    const int8_t* a, int64_t lda, const float* scales, const Weight& w, int64_t panel, int64_t first, Ahead ahead, float* out
) {
    const uint8_t* b = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL + first * 64;
    const int8_t* const a_end = a + 2 * w.kpad;
    Words sum[V][R][2];
    begin_sums<R, V>(a_end, lda, sum);
    while (a < a_end) {
        const int8_t* const stop = ahead.step() ? std::min(a_end, a + 8 * STRIDE) : a_end;
        for (; a < stop; a += 8, b += 4 * PANEL) {
            Words column[V];
            for (int v = 0; v < V; v++) column[v] = in_register(load_words(b + v * 64));
            add_products<R, V>(a, lda, column, sum);
        }
    }
    for (int v = 0; v < V; v++) {
        const Floats scale = load_floats(w.scale + panel * PANEL + (first + v) * 16);
        for (int r = 0; r < R; r++) {
            const Floats y = (joined(sum[v][r]) * scale) * splat(scales[r]);
            store_floats(out + r * PANEL + v * 16, y);
        }
    }
}

// All 64 columns: a byte holds the same input of columns 0..31 (low half) and 32..63 (high half).
template <int R>
__attribute__((noinline)) void tile_int4(
    const int8_t* a, int64_t lda, const float* scales, const Weight& w, int64_t panel, Ahead ahead, float* out
) {
    const int64_t groups = w.kpad / GROUP;
    const uint8_t* b = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL / 2;
    const int8_t* behind = a + 2 * w.kpad;
    const Words low = splat_byte(15);
    Floats total[4][R];
    for (int v = 0; v < 4; v++)
        for (int r = 0; r < R; r++) total[v][r] = zero();
    for (int64_t g = 0; g < groups; g++, behind += 8) {
        Words sum[4][R][2];
        begin_sums<R, 4>(behind, lda, sum);
        for (const int8_t* const a_end = a + 2 * GROUP; a < a_end;) {
            ahead.step();
            for (const int8_t* const stop = a + 8 * STRIDE; a < stop; a += 8, b += 2 * PANEL) {
                const Words one = in_register(load_words(b)), two = in_register(load_words(b + 64));
                const Words column[4] = {
                    one & low, two & low, shift_right16(one, 4) & low, shift_right16(two, 4) & low,
                };
                add_products<R, 4>(a, lda, column, sum);
            }
        }
        for (int v = 0; v < 4; v++) {
            const Floats scale = load_floats(w.scale + (panel * groups + g) * PANEL + v * 16);
            for (int r = 0; r < R; r++) total[v][r] = fmadd(joined(sum[v][r]), scale, total[v][r]);
        }
    }
    for (int v = 0; v < 4; v++)
        for (int r = 0; r < R; r++)
            store_floats(out + r * PANEL + v * 16, total[v][r] * splat(scales[r]));
}

// float32 weights stay in rows: columns of a panel are dot products, four at a time.
template <int R>
void tile_f32(const float* a, int64_t lda, const Weight& w, int64_t panel, float* out) {
    const float* data = static_cast<const float*>(w.data);
    const int64_t last = std::min(w.n, (panel + 1) * PANEL) - 1;
    for (int64_t c = 0; c < PANEL && panel * PANEL + c <= last; c += 4) {
        const float* b[4];
        for (int v = 0; v < 4; v++) b[v] = data + std::min(panel * PANEL + c + v, last) * w.k;
        Floats sum[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) sum[r][v] = zero();
        for (int64_t i = 0; i < w.k; i += 16) {
            const Mask m = w.k - i >= 16 ? Mask(0xffff) : Mask((1 << (w.k - i)) - 1);
            Floats column[4];
            for (int v = 0; v < 4; v++) column[v] = load16(b[v] + i, m);
            for (int r = 0; r < R; r++) {
                const Floats x = load16(a + r * lda + i, m);
                for (int v = 0; v < 4; v++) sum[r][v] = fmadd(x, column[v], sum[r][v]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) out[r * PANEL + c + v] = total_of(sum[r][v]);
    }
}

struct Product {
    const Weight* weight;
    const void* a;
    int64_t lda;
    const float* scales;
    void* out;
    int64_t ldo, store;
    Activation activation = Activation::NONE;
    int64_t outputs = 0;               // of a gated weight: numbers that a row gets
    float scale = 1.0f;                // ADD: of what is added ...
    const float* row_scale = nullptr;  // ... and of each row's
    const Weight* next = nullptr;      // what is multiplied after this, if that is known
    uint32_t* unpacked = nullptr;      // scaled.h: the first tile of rows stores the panel here in bfloat16 for the others
    bool first_rows = false;           // whether this is the first tile
};

// Stores R rows of sums, V * 16 wide (the last columns may not be outputs): + bias, the activation, then stored or added.
// For a gated weight, vectors of gates and of gated outputs alternate, and half as many results are stored. A row is read
// before it is written: a store may wait for its cache line, and later reads would wait with it.
template <int64_t STORED, int R, int V, bool WHOLE, bool GATED>
void finish(const Product& job, const float* sums, int64_t row, int64_t begin) {
    constexpr int OUT = GATED ? V / 2 : V;
    const Weight& w = *job.weight;
    const int64_t first = GATED ? begin / 2 : begin, outputs = GATED ? job.outputs : w.n;
    Mask m[OUT];
    for (int v = 0; v < OUT; v++) m[v] = first_lanes(std::max<int64_t>(0, outputs - first - v * 16));
    const Activation activation = job.activation;
    int64_t place = row * job.ldo + first;
    for (int r = 0; r < R; r++, sums += PANEL, place += job.ldo) {
        Floats sum[V], y[OUT];
        for (int v = 0; v < V; v++) sum[v] = load_floats(sums + v * 16);
        if (w.bias)
            for (int v = 0; v < V; v++) {
                const Mask there = first_lanes(std::max<int64_t>(0, w.n - begin - v * 16));
                sum[v] = sum[v] + load16(w.bias + begin + v * 16, there);
            }
        for (int v = 0; v < OUT; v++) y[v] = sum[GATED ? 2 * v : v];
        activate(y, activation);
        if constexpr (GATED)
            for (int v = 0; v < OUT; v++) y[v] = y[v] * sum[2 * v + 1];
        if constexpr (STORED == STORE_BF16) {
            uint16_t* to = static_cast<uint16_t*>(job.out) + place;
            for (int v = 0; v < OUT; v++) store16(to + v * 16, WHOLE ? Mask(0xffff) : m[v], y[v]);
        } else {
            float* to = static_cast<float*>(job.out) + place;
            if constexpr (STORED == ADD) {
                const Floats scale = splat(job.row_scale ? job.scale * job.row_scale[row + r] : job.scale);
                for (int v = 0; v < OUT; v++) y[v] = fmadd(y[v], scale, load16(to + v * 16, m[v]));
            }
            for (int v = 0; v < OUT; v++) {
                if constexpr (WHOLE) store_floats(to + v * 16, y[v]);
                else store_some(to + v * 16, m[v], y[v]);
            }
        }
    }
}

template <int64_t STORED, int R, int V>
void finish(const Product& job, const float* sums, int64_t row, int64_t begin) {
    if constexpr (STORED != ADD && V > 1)
        if (job.weight->gated) {
            if (job.outputs - begin / 2 >= 8 * V) finish<STORED, R, V, true, true>(job, sums, row, begin);
            else finish<STORED, R, V, false, true>(job, sums, row, begin);
            return;
        }
    if (job.weight->n - begin >= 16 * V) finish<STORED, R, V, true, false>(job, sums, row, begin);
    else finish<STORED, R, V, false, false>(job, sums, row, begin);
}

// scaled.h
uint32_t* unpacked_panel(const Weight& w);
template <int R>
void tile_scaled(
    const void* rows, int64_t row, int64_t lda, const Weight& w, int64_t panel, uint32_t* unpacked, bool first_rows, Ahead ahead, float* out);

// `sums`: [R, PANEL], which keep what the inputs before these gave. The last inputs finish them.
template <int R, int V>
void tile(const Product& job, int64_t row, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* sums) {
    const Weight& w = *job.weight;
    const int64_t begin = panel * PANEL + first * 16;
    const bool last = inputs.end == w.kpad;
    if (last && job.store == ADD)  // by the time that there are sums to add, it is there
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) prefetch_near(static_cast<const float*>(job.out) + (row + r) * job.ldo + begin + v * 16);
    const uint16_t* a = static_cast<const uint16_t*>(job.a) + row * job.lda;
    if (w.kind == BF16 && !inputs.begin) tile_bf16<R, V, true>(a, job.lda, w, panel, first, inputs, ahead, sums);
    if (w.kind == BF16 && inputs.begin) tile_bf16<R, V, false>(a, job.lda, w, panel, first, inputs, ahead, sums);
    if (w.kind == F32) tile_f32<R>(static_cast<const float*>(job.a) + row * job.lda, job.lda, w, panel, sums);
    if constexpr (V == 4)
        if (w.kind >= FP8) tile_scaled<R>(job.a, row, job.lda, w, panel, job.unpacked, job.first_rows, ahead, sums);
    if constexpr (R <= INT_ROWS) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(a);
        if (w.kind == INT8) tile_int8<R, V>(bytes, 2 * job.lda, job.scales + row, w, panel, first, ahead, sums);
        if (w.kind == INT4) tile_int4<R>(bytes, 2 * job.lda, job.scales + row, w, panel, ahead, sums);
    }
    if (!last) return;
    if (job.store == STORE_BF16) finish<STORE_BF16, R, V>(job, sums, row, begin);
    else if (job.store == ADD) finish<ADD, R, V>(job, sums, row, begin);
    else finish<STORE, R, V>(job, sums, row, begin);
}

// tile<rows, V>.
template <int V, int R = 1>
void tile_of(int64_t rows, const Product& job, int64_t row, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* sums) {
    if constexpr (R < ROWS) {
        if (rows > R) return tile_of<V, R + 1>(rows, job, row, panel, first, inputs, ahead, sums);
    }
    tile<R, V>(job, row, panel, first, inputs, ahead, sums);
}

// What tile `tile` of `pieces` reads ahead of `bytes` at `next`: nothing, but for the last tiles. `looks`: how often it asks.
Ahead ahead_of(int64_t tile, int64_t pieces, const char* next, int64_t bytes, int64_t looks) {
    const int64_t spread = std::min(pieces, SPREAD), share = tile - (pieces - spread);
    if (!next || share < 0) return {nullptr, nullptr, 0};
    Ahead ahead{next + bytes * share / spread / LINE * LINE, next + bytes * (share + 1) / spread / LINE * LINE, 0};
    ahead.bytes = (ahead.end - ahead.at + looks * LINE - 1) / (looks * LINE) * LINE;
    return ahead;
}

// Rows [begin, end) in tiles of nearly equal height. A few tiles meet a slice of the inputs before the next one: a long
// panel and the one that is prefetched would not both fit in the second-level cache. A row's sums go through the inputs in
// order all the same. `next`: a panel to prefetch during the last tiles; a single tile does not prefetch.
void tiles(const Product& product, int64_t begin, int64_t end, int64_t panel, int64_t first, int64_t count, const char* next) {
    Product job = product;
    const Weight& w = *job.weight;
    const bool bytes_or_less = w.kind == INT8 || w.kind == INT4;
    const int64_t height = bytes_or_less ? INT_ROWS : ROWS, pieces = (end - begin + height - 1) / height;
    const bool sliced = w.kind == BF16 && w.kpad > SLICE && pieces > 1 && pieces <= SLICED;
    const int64_t slices = sliced ? (w.kpad + SLICE - 1) / SLICE : 1;
    if (w.kind >= FP8 && pieces > 1) job.unpacked = unpacked_panel(w);
    alignas(64) float sums[SLICED * ROWS * PANEL];
    for (int64_t slice = 0; slice < slices; slice++) {
        const auto bound = [&](int64_t i) { return i == slices ? w.kpad : w.kpad * i / slices / 16 * 16; };
        const Inputs inputs{bound(slice), bound(slice + 1)};
        const int64_t length = inputs.end - inputs.begin, bytes = sliced ? 2 * PANEL * length : panel_bytes(w);
        const int64_t looks = length / (bytes_or_less ? 4 : 2) / STRIDE + 1;
        const char* soon = next;
        if (count == 4 && inputs.end < w.kpad) soon = static_cast<const char*>(w.data) + 2 * PANEL * (panel * w.kpad + inputs.end);
        for (int64_t i = 0; i < pieces; i++) {
            job.first_rows = i == 0;
            const int64_t from = begin + (end - begin) * i / pieces, to = begin + (end - begin) * (i + 1) / pieces;
            const Ahead ahead = ahead_of(i, pieces, pieces > 1 ? soon : nullptr, bytes, looks);
            float* const kept = sums + (sliced ? (from - begin) * PANEL : 0);
            if (count == 4) tile_of<4>(to - from, job, from, panel, first, inputs, ahead, kept);
            else if (count == 2) tile_of<2>(to - from, job, from, panel, first, inputs, ahead, kept);
            else tile_of<1>(to - from, job, from, panel, first, inputs, ahead, kept);
        }
    }
}

// Units of a product: (panel, block of rows), or parts of panels if there would be too few for the threads: quarters, or
// halves for gated weights.
struct Units {
    int64_t threads, parts, blocks, count;
    Units(const Weight& w, int64_t rows, int64_t threads, int64_t products = 1) : threads(threads) {
        const int64_t panels = panels_of(w);
        blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        // For one row a quarter panel has the same latency of sums as a whole one: it pays where memory is the bottleneck.
        const bool divisible = (w.kind == BF16 || w.kind == INT8) && threads > 1 && w.kpad >= DIVISIBLE;
        parts = divisible && products * panels * blocks < 6 * threads ? w.gated ? 2 : 4 : 1;
        count = panels * blocks * parts;
    }
};

// The panel that a thread will probably take after a unit: the next of its lane, or the first of its lane in the following
// product. Null if that panel is loaded already.
const char* next_panel(const Product& job, const Units& units, int64_t unit) {
    const int64_t lane = ((unit + 1) * units.threads - 1) / units.count, last = lane_begin(units.count, units.threads, lane + 1) - 1;
    const Weight* weight = unit < last ? job.weight : job.next;
    if (units.parts > 1 || !weight || weight->kind == F32) return nullptr;
    const int64_t panel = unit < last ? (unit + 1) / units.blocks : lane_begin(panels_of(*weight), units.threads, lane);
    if (unit < last && panel == unit / units.blocks) return nullptr;
    return static_cast<const char*>(weight->data) + panel * panel_bytes(*weight);
}

void run_unit(const Product& job, const Units& units, int64_t unit, int64_t rows, int64_t before = 0) {
    const int64_t block = unit % units.blocks, part = unit / units.blocks;
    const int64_t panel = part / units.parts, vectors = 4 / units.parts, first = part % units.parts * vectors;
    if (panel * PANEL + first * 16 >= job.weight->n) return;
    const int64_t begin = before + rows * block / units.blocks, end = before + rows * (block + 1) / units.blocks;
    tiles(job, begin, end, panel, first, vectors, next_panel(job, units, unit));
}

}  // namespace
