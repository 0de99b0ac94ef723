// Products of plain rows with weights of 8 and 4 bits: fp8, nvfp4, int4 in groups.
//
// A weight's small number is exactly a bfloat16: e4m3 has 4 significant bits, e2m1 times its e4m3 scale 6, int4 less its
// zero point 5. The sums equal those of the same rows times the unpacked numbers. The other scales are float32 (of groups also
// bfloat16): the sum of a row or of a group is multiplied by its scale. Rows are pairs of bfloat16, or float32: the numbers are then widened by a
// shift.
//
// The first tile of rows unpacks numbers in registers, in parallel with its products. If there are more tiles, it stores
// them as pairs of bfloat16, [k / 2][64][2], which the other tiles multiply. All tiles add in the same order.
//
// Layouts, in panels of 64 outputs. fp8 [k / 4][4][64] bytes: 16 outputs and 4 inputs, in an order that two instructions
// unpack to two vectors of pairs. nvfp4 [k / 16] of 64 bytes of scales (see Nvfp4), then [2][4][64] bytes: 16 outputs, 4
// inputs as in fp8 in the low halves, and the next 4 in the high halves. int4 [k / 8][4][16][2] words: 16 outputs, even
// and odd inputs, four inputs two apart, the first in the lowest bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "compact.h"
#include "products.h"

namespace {

constexpr int64_t CHUNK = 8;         // inputs that are unpacked together
constexpr int64_t E4M3_GROUP = 16;   // inputs that share a scale in nvfp4
constexpr int LARGEST_EXPONENT = 8;  // of e4m3

// The bits of a bfloat16; `value` is exactly one.
inline uint16_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t(bits >> 16);
}

// A table of 128 bfloat16, as a table of upper bytes and one of lower bytes.
struct ByteTables {
    Words upper[2], lower[2];
    template <class F>
    explicit ByteTables(const F& word) {
        alignas(64) uint8_t high[128], low[128];
        for (int i = 0; i < 128; i++) high[i] = uint8_t(word(i) >> 8), low[i] = uint8_t(word(i));
        for (int i = 0; i < 2; i++) upper[i] = load_words(high + 64 * i), lower[i] = load_words(low + 64 * i);
    }
    // Bit 7 of an index is ignored.
    Words high(Words index) const { return lookup_bytes(upper, index); }
    Words low(Words index) const { return lookup_bytes(lower, index); }
};

// Unpackers, one for each kind. begin() prepares the scales or zero points of a group for 16 outputs; unpack() returns two
// vectors of pairs: half a chunk of inputs for 16 outputs. BYTES: of a chunk, of one output. SPARSE: whether
// one line in four is prefetched for one or two rows, because the processor's own prefetchers follow the others.

// e4m3 bytes. NaN is rejected when the weight is packed.
struct Fp8 {
    static constexpr int64_t KIND = FP8, BYTES = 8;
    static constexpr bool SPARSE = true;
    struct Group {};
    const ByteTables tables = made();
    static ByteTables made() {
        static const ByteTables all([](int i) {
            return bits_of(i < 8 ? std::ldexp(i / 8.0f, -6) : std::ldexp(1.0f + (i & 7) / 8.0f, (i >> 3) - 7));
        });
        return all;
    }
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) { return panel + i * PANEL; }
    Group begin(const Weight&, const uint8_t*, int64_t, int64_t, int64_t) const { return {}; }
    void unpack(const uint8_t* from, int half, const Group&, Words (&words)[2]) const {
        const Words bytes = in_register(load_words(from + half * 4 * PANEL)), low = tables.low(bytes);
        const Words sign = splat_byte(int8_t(0x80));
        const Words high = or_and(tables.high(bytes), bytes, sign);
        words[0] = low_bytes(low, high), words[1] = high_bytes(low, high);
    }
};

// e2m1 numbers times the scale of their group, (1 + m / 8) * 2^(8 - d). The byte of a scale has m in bits 4 to 6, the lowest
// bit of d in bit 7 and its other bits in bits 0 to 3. The table is indexed by m and the number and has the product for
// d = 0; d is then subtracted from the exponent. Zero is stored as 0x8000 (-0), the only word that a saturating subtraction
// leaves unchanged; in a group whose scale is zero, all numbers are packed as zeros.
struct Nvfp4 {
    static constexpr int64_t KIND = NVFP4, BYTES = 4;
    static constexpr bool SPARSE = false;
    struct Group {
        Words scale, exponent;  // the scale of each byte's output; d of each word's output
    };
    const ByteTables tables = made();
    static ByteTables made() {
        static const ByteTables all([](int i) {
            const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f}, size = e2m1[i & 7] * (1.0f + (i >> 4) / 8.0f);
            return size == 0.0f ? uint16_t(0x8000) : bits_of(std::ldexp(i & 8 ? -size : size, LARGEST_EXPONENT));
        });
        return all;
    }
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) {
        return panel + i / E4M3_GROUP * (E4M3_GROUP / 2 + 1) * PANEL + PANEL + i % E4M3_GROUP * (PANEL / 2);
    }
    Group begin(const Weight&, const uint8_t* panel, int64_t, int64_t input, int64_t vector) const {
        const uint8_t* scales = chunk(panel, input) - PANEL + vector * 16;
        const Words each = splat_quarter(scales);
        alignas(64) static const uint64_t order[8] = {  // for each lane's 4 outputs, the scale in all four bytes of the output
            0x0303020201010000, 0x0303020201010000, 0x0707060605050404, 0x0707060605050404, 0x0b0b0a0a09090808, 0x0b0b0a0a09090808,
            0x0f0f0e0e0d0d0c0c, 0x0f0f0e0e0d0d0c0c};
        const Words bytes = shuffle_bytes(each, load_words(order));
        return {bytes, low_bytes(bytes, bytes) & splat_half(0x0f80)};
    }
    void unpack(const uint8_t* from, int half, const Group& group, Words (&words)[2]) const {
        const Words bytes = load_words(from), code = half ? shift_right16(bytes, 4) : bytes;
        const Words index = choose_bits(splat_byte(15), code, group.scale);
        const Words low = tables.low(index), high = tables.high(index);
        words[0] = sub16_saturating(low_bytes(low, high), group.exponent);
        words[1] = sub16_saturating(high_bytes(low, high), group.exponent);
    }
};

// Four bits less 8, or less a zero point, in the lowest bits of words, by a table of 32 words. Bit 4 of an index is undefined, so
// the table repeats itself; with zero points the index is number - zero point + 16.
template <bool ZEROS>
struct Uint4 {
    static constexpr int64_t KIND = UINT4, BYTES = 4;
    static constexpr bool SPARSE = true;
    struct Group {
        Words shift;  // of even and odd inputs
    };
    const HalfTable table = made();
    static HalfTable made() {
        uint16_t halves[32];
        for (int i = 0; i < 32; i++) halves[i] = bits_of(float(ZEROS ? i - 16 : (i & 15) - 8));
        return HalfTable(halves);
    }
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) { return panel + i * (PANEL / 2); }
    Group begin(const Weight& w, const uint8_t*, int64_t scales, int64_t, int64_t vector) const {
        if (!ZEROS) return {zero_words()};
        const Words zeros = to_integers(load_floats(w.zeros + scales + vector * 16));
        const Words shift = sub32(splat_word(16), zeros);
        return {shift | shift_left32<16>(shift)};
    }
    void unpack(const uint8_t* from, int half, const Group& group, Words (&words)[2]) const {
        const Words four = load_words(from);
        for (int pair = 0; pair < 2; pair++) {
            const int shift = 8 * half + 4 * pair;
            Words index = shift ? shift_right16(four, shift) : four;
            if constexpr (ZEROS) index = add16(index & splat_half(15), group.shift);
            words[pair] = lookup_halves(index, table);
        }
    }
};

// A pair of inputs of a row times those of 16 outputs. keep() stores a pair of 16 outputs for `tile_unpacked` or `tile_floats`.
#if PAIR_PRODUCTS
struct PairsOfBf16 {
    using Element = uint16_t;
    using Cell = Words;
    static Cell cell(const Element* a) { return broadcast_word(a); }
    struct Column {
        Words pair;
        Column() = default;
        explicit Column(Words words) : pair(in_register(words)) {}
        void keep(Element* panel, int64_t at, int64_t output) const { store_words(panel + 2 * (at * PANEL + output), pair); }
    };
    static Floats add(Floats sum, const Cell& x, const Column& w) { return dot_pairs(sum, x, w.pair); }
    static Floats add_at(Floats sum, const Element* a, const Column& w) { return dot_pairs_at(sum, a, w.pair); }
};
#endif

struct PairsOfF32 {
    using Element = float;
    struct Cell {
        Floats even, odd;
    };
    static Cell cell(const Element* a) { return {splat(a[0]), splat(a[1])}; }
    struct Column {
        Floats even, odd;
        Column() = default;
        explicit Column(Words words)
            : even(as_floats(shift_left32<16>(words))),
              odd(as_floats(words & splat_word(int32_t(0xffff0000)))) {}
        void keep(Element* panel, int64_t at, int64_t output) const {
            store_floats(panel + 2 * at * PANEL + output, even), store_floats(panel + (2 * at + 1) * PANEL + output, odd);
        }
    };
    static Floats add(Floats sum, const Cell& x, const Column& w) {
        return fmadd(x.odd, w.odd, fmadd(x.even, w.even, sum));
    }
    static Floats add_at(Floats sum, const Element* a, const Column& w) { return add(sum, cell(a), w); }
};

// Groups of inputs whose sums are scaled separately; 1 if the scales are part of the numbers, or belong to whole rows.
int64_t summed_groups(const Weight& w) { return w.kind == NVFP4 || w.kind == COMPACT_BF16 ? 1 : (w.kpad + w.group - 1) / w.group; }

// Stores sums times the scales of their outputs. Loops over sums that are not unrolled would have GCC keep them in memory throughout.
template <int R, int V>
inline ALWAYS void store_scaled(const Weight& w, int64_t panel, int64_t first, const Floats (&sum)[R][V], float* out) {
    const float* scales = (w.kind == NVFP4 ? w.outer : w.scale) + panel * PANEL + first * 16;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) store_floats(out + r * PANEL + v * 16, sum[r][v] * load_floats(scales + v * 16));
    }
}

// The totals at `out` = sum * scale, of the first group, or += of a later group g, whose scales begin at `scales`. In registers there is no place
// for them.
template <int R, int V>
inline ALWAYS void add_group(const Weight& w, int64_t scales, int64_t g, int64_t first, const Floats (&sum)[R][V], float* out) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        const Floats scale = group_scales(w, scales + (first + v) * 16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            float* const total = out + r * PANEL + v * 16;
            store_floats(total, fmadd(sum[r][v], scale, g ? load_floats(total) : zero()));
        }
    }
}

// R rows times V vectors of outputs, from vector `first` of a panel on. Numbers are unpacked in registers, and if KEPT, stored in
// `keep` for other rows. `a` and `keep` begin with the first of the inputs; `out` has what those before them gave.
template <class Rows, class Numbers, bool KEPT, int R, int V>
__attribute__((noinline)) void tile_packed(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, Inputs inputs,
    typename Rows::Element* keep, Ahead ahead, float* out
) {
    const Numbers numbers;
    const int64_t step = Numbers::SPARSE && R <= 2 ? LINES_FOLLOWED * LINE : LINE;
    const uint8_t* const data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const int64_t groups = (w.kpad + w.group - 1) / w.group;
    const bool grouped = Numbers::KIND != NVFP4 && groups > 1;
    Floats sum[R][V];
    load_sums(grouped || !inputs.begin, out, sum);
    int64_t g = inputs.begin / w.group;
    for (int64_t i = inputs.begin; i < inputs.end; g++) {
        const int64_t end = std::min(inputs.end, (g + 1) * w.group), scales = (panel * groups + g) * PANEL;
        typename Numbers::Group group[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) group[v] = numbers.begin(w, data, scales, i, first + v);
        for (; i < end; i += CHUNK) {
            const uint8_t* const chunk = Numbers::chunk(data, i) + first * 64;
            ahead.step();
            const int64_t lines = first ? 0 : Numbers::BYTES * PANEL;  // the first vectors' pass reads for the others
            for (int64_t at = Numbers::KIND == NVFP4 ? -LINE : 0; at < lines; at += step) prefetch_far(chunk + at + FETCHED);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Words words[V][2];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) numbers.unpack(chunk + v * 64, half, group[v], words[v]);
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++) {
                    const int64_t at = 2 * half + pair, input = i - inputs.begin + 2 * at;
                    typename Rows::Column column[V];
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) {
                        column[v] = typename Rows::Column(words[v][pair]);
                        if constexpr (KEPT) column[v].keep(keep, at, (first + v) * 16);
                    }
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        const auto x = Rows::cell(a + r * lda + input);
#pragma GCC unroll 4
                        for (int v = 0; v < V; v++) sum[r][v] = Rows::add(sum[r][v], x, column[v]);
                    }
                }
            }
            if constexpr (KEPT) keep += CHUNK * PANEL;
        }
        if (grouped) {
            add_group(w, scales, g, first, sum, out);
            set_zero(sum);
        }
    }
    if (grouped) return;
    if (inputs.end < w.kpad) store_sums(sum, out);
    else store_scaled(w, panel, first, sum, out);
}

// R rows times W vectors of outputs, from vector `first` of an unpacked panel on. `a` and `unpacked` begin with the first of the inputs.
template <int R, int W, class T>
__attribute__((noinline)) void tile_unpacked(
    const T* a, int64_t lda, const Weight& w, const T* unpacked, int64_t panel, int64_t first, Inputs inputs, Ahead ahead, float* out
) {
    const int64_t groups = summed_groups(w), width = groups > 1 ? w.group : w.kpad;
    const bool grouped = groups > 1;
    Floats sum[R][W];
    int64_t g = inputs.begin / width;
    for (int64_t i = inputs.begin; i < inputs.end; g++) {
        const int64_t end = std::min(inputs.end, (g + 1) * width), from = i - inputs.begin;
        load_sums(grouped || !i, out, sum);
        add_inputs(a + from, lda, end - i, unpacked + from * PANEL + first * (LINE / int64_t(sizeof(T))), W < 4 && !first, ahead, sum);
        i = end;
        if (grouped) add_group(w, (panel * groups + g) * PANEL, g, first, sum, out);
    }
    if (grouped) return;
    if (inputs.end < w.kpad || w.kind == COMPACT_BF16) store_sums(sum, out);
    else store_scaled(w, panel, first, sum, out);
}

// Calls work(Type<...>()) with the unpacker of a weight.
template <class T>
struct Type {
    using type = T;
};
template <class F>
void with_numbers(const Weight& w, const F& work) {
    if (w.kind == FP8) work(Type<Fp8>());
    else if (w.kind == NVFP4) work(Type<Nvfp4>());
    else if (w.zeros) work(Type<Uint4<true>>());
    else work(Type<Uint4<false>>());
}

#if AMX_TILES
// The numbers of a panel as bfloat16, in the order of the inputs.
template <class Numbers>
class PackedNumbers {
  public:
    PackedNumbers(const Weight& w, int64_t panel)
        : w_(w), panel_(panel), data_(static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w)), groups_((w.kpad + w.group - 1) / w.group) {}

    // The next input to be unpacked.
    void start(int64_t input) { group_end_ = input; }

    // Vectors [FIRST, FIRST + V) of CHUNK inputs, as [CHUNK / 2][64][2].
    template <int FIRST, int V>
    ALWAYS void unpack(int64_t input, int64_t, uint16_t* to) {
        if (input == group_end_) {
            const int64_t g = input / w_.group;
            group_end_ = (g + 1) * w_.group;
            for (int v = FIRST; v < FIRST + V; v++) group_[v] = numbers_.begin(w_, data_, (panel_ * groups_ + g) * PANEL, input, v);
        }
        const uint8_t* const chunk = Numbers::chunk(data_, input);
        if constexpr (FIRST == 0)  // for the other vectors, too
            for (int64_t at = Numbers::KIND == NVFP4 ? -LINE : 0; at < Numbers::BYTES * PANEL; at += LINE) prefetch_far(chunk + at + FETCHED);
        for (int half = 0; half < 2; half++)
            unrolled<V>([&](int v) ALWAYS {
                Words words[2];
                numbers_.unpack(chunk + (FIRST + v) * 64, half, group_[FIRST + v], words);
                for (int pair = 0; pair < 2; pair++) store_words(to + (2 * half + pair) * PAIR + (FIRST + v) * 32, words[pair]);
            });
    }

  private:
    const Numbers numbers_;
    const Weight& w_;
    const int64_t panel_;
    const uint8_t* const data_;
    const int64_t groups_;
    typename Numbers::Group group_[4];
    int64_t group_end_ = 0;
};

// f with the numbers of a panel.
template <class F>
void with_panel(const Weight& w, int64_t panel, const F& f) {
    if (w.kind == COMPACT_BF16) {
        CompactNumbers numbers(w, panel);
        return f(numbers);
    }
    with_numbers(w, [&](auto type) {
        PackedNumbers<typename decltype(type)::type> numbers(w, panel);
        f(numbers);
    });
}
#endif

// Vectors [FIRST, END) of a compact panel, for as many at a time as there are registers for.
template <class Rows, bool KEPT, int R, int FIRST, int END>
void tiles_compact(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, Inputs inputs, typename Rows::Element* keep, Ahead ahead,
    float* out
) {
    constexpr int V = std::min(VECTOR_REGISTERS > 1 && R > 2 ? 1 : vectors_beside(R), END - FIRST);
    tile_compact<Rows, KEPT, R, FIRST, V>(a, lda, w, panel, inputs, keep, FIRST + V < END ? Ahead{} : ahead, out + FIRST * 16);
    if constexpr (FIRST + V < END) tiles_compact<Rows, KEPT, R, FIRST + V, END>(a, lda, w, panel, inputs, keep, ahead, out);
}

// R rows times a panel, whose numbers are unpacked in registers and, if KEPT, stored in `keep`.
template <class Rows, bool KEPT, int R>
void tile_of_numbers(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, Inputs inputs, typename Rows::Element* keep, Ahead ahead,
    float* out
) {
    if (w.kind == COMPACT_BF16) return tiles_compact<Rows, KEPT, R, 0, 4>(a, lda, w, panel, inputs, keep, ahead, out);
    with_numbers(w, [&](auto numbers) {
        constexpr int V = VECTOR_REGISTERS > 1 ? 1 : R <= 3 ? 4 : 2;
        for (int64_t first = 0; first < 4; first += V)
            tile_packed<Rows, typename decltype(numbers)::type, KEPT, R, V>(
                a, lda, w, panel, first, inputs, keep, first + V < 4 ? Ahead{} : ahead, out + first * 16);
    });
}

// R rows times a panel. `unpacked`: null if there is only one tile; else the first tile stores these inputs of the panel there for
// the others. Without instructions for bfloat16, rows of it are widened first.
template <int R>
void tile_scaled(
    const void* rows, int64_t row, int64_t lda, const Weight& w, int64_t panel, Inputs inputs, void* unpacked, bool first_rows, Ahead ahead,
    float* out
) {
    const auto run = [&](auto kind, const auto* a, int64_t apart) {
        using Rows = decltype(kind);
        if constexpr (R >= LEAST_OF_SEVERAL)
            if (auto* const numbers = static_cast<typename Rows::Element*>(unpacked)) {
                if (first_rows) return tile_of_numbers<Rows, true, R>(a, apart, w, panel, inputs, numbers, ahead, out);
                constexpr int W = vectors_beside(R);
                for (int64_t first = 0; first < 4; first += W)
                    tile_unpacked<R, W>(a, apart, w, numbers, panel, first, inputs, first + W < 4 ? Ahead{} : ahead, out + first * 16);
                return;
            }
        tile_of_numbers<Rows, false, R>(a, apart, w, panel, inputs, nullptr, ahead, out);
    };
    if (w.operand != BF16) return run(PairsOfF32(), static_cast<const float*>(rows) + row * lda + inputs.begin, lda);
#if PAIR_PRODUCTS
    run(PairsOfBf16(), static_cast<const uint16_t*>(rows) + row * lda + inputs.begin, lda);
#elif !AMX_TILES
    const uint16_t* a = static_cast<const uint16_t*>(rows) + row * lda + inputs.begin;
    const int64_t count = inputs.end - inputs.begin, apart = count + 16;  // rows a power of two apart would share lines of the cache
    float* const widened = own_memory<1>(R * apart);
    widen_rows(a, lda, R, count, widened, apart);
    run(PairsOfF32(), widened, apart);
#endif
}

}  // namespace
