// Products of rows of bfloat16 or float32 with weights of 8 and 4 bits (FP8, NVFP4, UINT4, UINT8), and the loops over
// panels that are unpacked, also of compact.h.
//
// bfloat16 represents a weight's small number exactly: e4m3 has 4 significant bits, e2m1 times its e4m3 scale 6, int4
// minus its zero point 5, int8 minus its zero point 8. The sums equal those of the same rows times the unpacked
// numbers. The other scales are float32 (of groups also bfloat16): the sum of a row or of a group is multiplied by its
// scale. Rows are pairs of bfloat16, or float32: the numbers are then widened by a shift.
//
// The first tile of rows unpacks numbers in registers, in parallel with its products. If there are more tiles, it
// stores them as pairs of bfloat16, [k / 2][64][2], which the other tiles multiply. All tiles add in the same order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "compact.h"
#include "packed_numbers.h"
#include "processor.h"
#include "products.h"
#include "scratch.h"

namespace {

// A pair of inputs of a row (Cell) times those of 16 outputs (Column). keep() stores a column for `tile_unpacked`: pair
// `at` of a panel, from output `output` on.
#if PAIR_PRODUCTS
struct PairsOfBf16 {
    using Element = uint16_t;
    using Cell = Words;
    static Cell cell(const Element* a) { return broadcast_word(a); }
    struct Column {
        Words pair;
        Column() = default;
        explicit Column(Words words) : pair(in_register(words)) {}
        void keep(Element* panel, int64_t at, int64_t output) const {
            store_words(panel + 2 * (at * PANEL + output), pair);
        }
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
            : even(as_floats(shift_left32<16>(words))), odd(as_floats(words & splat_word(int32_t(0xffff0000)))) {}
        void keep(Element* panel, int64_t at, int64_t output) const {
            store_floats(panel + 2 * at * PANEL + output, even),
                store_floats(panel + (2 * at + 1) * PANEL + output, odd);
        }
    };
    static Floats add(Floats sum, const Cell& x, const Column& w) {
        return fmadd(x.odd, w.odd, fmadd(x.even, w.even, sum));
    }
    static Floats add_at(Floats sum, const Element* a, const Column& w) { return add(sum, cell(a), w); }
};

// Stores sums times the scales of their outputs. Loops over sums that are not unrolled would have GCC keep them in
// memory throughout.
template <int R, int V>
inline ALWAYS void store_scaled(const Weight& w, int64_t panel, int64_t first, const Floats (&sum)[R][V], float* out) {
    const float* scales = output_scales(w) + panel * PANEL + first * 16;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) store_floats(out + r * PANEL + v * 16, sum[r][v] * load_floats(scales + v * 16));
    }
}

// totals = sum * scale for the first group of inputs, or += for a later group g, whose scales have index `scales`. The
// totals, at `out` [R, PANEL], are in memory: no registers are left for them.
template <int R, int V>
inline ALWAYS void add_group(
    const Weight& w, int64_t scales, int64_t g, int64_t first, const Floats (&sum)[R][V], float* out
) {
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

// Adds the products of CHUNK inputs of R rows, at `a`, with V vectors of outputs, at `chunk`.
template <class Rows, class Numbers, bool KEPT, int R, int V>
inline ALWAYS void add_chunk(
    const Numbers& numbers, const typename Numbers::Group (&group)[V], const typename Rows::Element* a, int64_t lda,
    const uint8_t* chunk, int64_t first, typename Rows::Element* keep, Floats (&sum)[R][V]
) {
    if constexpr (Numbers::FLOATS) {
        unrolled<CHUNK>([&](int input) ALWAYS {
            Floats column[V];
            unrolled<V>([&](int v) ALWAYS {
                column[v] = in_register(numbers.input(chunk + v * 64, input, group[v]));
                if constexpr (KEPT) store_floats(keep + input * PANEL + (first + v) * 16, column[v]);
            });
            unrolled<R>([&](int r) ALWAYS {
                const Floats x = splat(a[r * lda + input]);
                unrolled<V>([&](int v) ALWAYS { sum[r][v] = fmadd(x, column[v], sum[r][v]); });
            });
        });
    } else {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            Words words[V][2];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) numbers.unpack(chunk + v * 64, half, group[v], words[v]);
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; pair++) {
                const int64_t at = 2 * half + pair;
                typename Rows::Column column[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    column[v] = typename Rows::Column(words[v][pair]);
                    if constexpr (KEPT) column[v].keep(keep, at, (first + v) * 16);
                }
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const auto x = Rows::cell(a + r * lda + 2 * at);
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) sum[r][v] = Rows::add(sum[r][v], x, column[v]);
                }
            }
        }
    }
}

// R rows times V vectors of outputs, from vector `first` of a panel on. Numbers are unpacked in registers, and if KEPT,
// stored in `keep` for other rows. `a` and `keep` begin with the first of the inputs; `out` has what those before them
// gave.
template <class Rows, class Numbers, bool KEPT, int R, int V>
__attribute__((noinline)) void tile_packed(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, Inputs inputs,
    typename Rows::Element* keep, Prefetch ahead, float* out
) {
    const Numbers numbers{};
    const int64_t step = Numbers::SPARSE && R <= 2 ? PREFETCHED_LINE_STEP * LINE : LINE;
    const uint8_t* const data = panel_data(w, panel);
    const int64_t groups = scale_groups(w);
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
            for (int64_t at = Numbers::KIND == NVFP4 ? -LINE : 0; at < lines; at += step)
                prefetch_far(chunk + at + PREFETCH_BYTES);
            add_chunk<Rows, Numbers, KEPT>(numbers, group, a + i - inputs.begin, lda, chunk, first, keep, sum);
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

// R rows times W vectors of outputs, from vector `first` of an unpacked panel on. `a` and `unpacked` begin with the
// first of the inputs.
template <int R, int W, class T>
__attribute__((noinline)) void tile_unpacked(
    const T* a, int64_t lda, const Weight& w, const T* unpacked, int64_t panel, int64_t first, Inputs inputs,
    Prefetch ahead, float* out
) {
    const int64_t groups = summed_groups(w), width = groups > 1 ? w.group : w.kpad;
    const bool grouped = groups > 1;
    Floats sum[R][W];
    int64_t g = inputs.begin / width;
    for (int64_t i = inputs.begin; i < inputs.end; g++) {
        const int64_t end = std::min(inputs.end, (g + 1) * width), from = i - inputs.begin;
        load_sums(grouped || !i, out, sum);
        add_inputs(
            a + from, lda, end - i, unpacked + from * PANEL + first * (LINE / int64_t(sizeof(T))), W < 4 && !first,
            ahead, sum
        );
        i = end;
        if (grouped) add_group(w, (panel * groups + g) * PANEL, g, first, sum, out);
    }
    if (grouped) return;
    if (inputs.end < w.kpad || w.kind == COMPACT_BF16) store_sums(sum, out);
    else store_scaled(w, panel, first, sum, out);
}

// Calls work(Type<...>()) with the unpacker of a weight, for rows of float32 or of pairs.
template <class T>
struct Type {
    using type = T;
};
template <bool FLOATS, class F>
void with_numbers(const Weight& w, const F& work) {
    constexpr bool BYTES = FLOATS && SLOW_BYTE_TABLES, HALVES = FLOATS && SLOW_HALF_TABLES;
    if (w.kind == FP8) work(Type<std::conditional_t<BYTES, Fp8Floats, Fp8>>());
    else if (w.kind == NVFP4) work(Type<std::conditional_t<BYTES, Nvfp4Floats, Nvfp4>>());
    else if (w.kind == UINT8) work(Type<std::conditional_t<FLOATS, Uint8Floats, Uint8>>());
    else if (w.zeros) work(Type<std::conditional_t<HALVES, Uint4Floats<true>, Uint4<true>>>());
    else work(Type<std::conditional_t<HALVES, Uint4Floats<false>, Uint4<false>>>());
}

#if AMX_TILES
// The numbers of a panel as bfloat16, in the order of the inputs from `input` on.
template <class Numbers>
class PackedNumbers {
  public:
    PackedNumbers(const Weight& w, int64_t panel, int64_t input)
        : w_(w), panel_(panel), data_(panel_data(w, panel)), groups_(scale_groups(w)), group_end_{input, input} {}

    // Prefetches as many lines as CHUNK inputs have, PREFETCH_BYTES bytes behind them.
    ALWAYS void fetch(int64_t input, int64_t) const {
        const uint8_t* const chunk = Numbers::chunk(data_, input);
        for (int64_t at = Numbers::KIND == NVFP4 ? -LINE : 0; at < Numbers::BYTES * PANEL; at += LINE)
            prefetch_far(chunk + at + PREFETCH_BYTES);
    }

    // Vectors [FIRST, FIRST + V) of CHUNK inputs, as [CHUNK / 2][16 V][2]. FIRST is 0 or 2.
    template <int FIRST, int V>
    ALWAYS void unpack(int64_t input, int64_t, uint16_t* to) {
        int64_t& end = group_end_[FIRST / 2];
        if (input == end) {
            const int64_t g = input / w_.group;
            end = (g + 1) * w_.group;
            for (int v = FIRST; v < FIRST + V; v++)
                group_[v] = numbers_.begin(w_, data_, (panel_ * groups_ + g) * PANEL, input, v);
        }
        const uint8_t* const chunk = Numbers::chunk(data_, input);
        for (int half = 0; half < 2; half++)
            unrolled<V>([&](int v) ALWAYS {
                Words words[2];
                numbers_.unpack(chunk + (FIRST + v) * 64, half, group_[FIRST + v], words);
                for (int pair = 0; pair < 2; pair++) store_words(to + ((2 * half + pair) * V + v) * 32, words[pair]);
            });
    }

  private:
    const Numbers numbers_{};
    const Weight& w_;
    const int64_t panel_;
    const uint8_t* const data_;
    const int64_t groups_;
    typename Numbers::Group group_[4];
    int64_t group_end_[2];  // of vectors from 0 on, and from 2 on
};

// f(numbers) with the numbers of a packed panel from an input on.
template <class F>
void with_panel(const Weight& w, int64_t panel, int64_t input, const F& f) {
    if (w.kind == COMPACT_BF16) {
        CompactNumbers numbers(w, panel, input);
        return f(numbers);
    }
    with_numbers<false>(w, [&](auto type) {
        PackedNumbers<typename decltype(type)::type> numbers(w, panel, input);
        f(numbers);
    });
}
#endif

// Vectors [FIRST, END) of a compact panel, for as many at a time as there are registers for.
template <class Rows, bool KEPT, int R, int FIRST, int END>
void tiles_compact(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, Inputs inputs,
    typename Rows::Element* keep, Prefetch ahead, float* out
) {
    constexpr int V = std::min(VECTOR_REGISTERS > 1 && R > 2 ? 1 : vectors_beside(R), END - FIRST);
    tile_compact<Rows, KEPT, R, FIRST, V>(
        a, lda, w, panel, inputs, keep, FIRST + V < END ? Prefetch{} : ahead, out + FIRST * 16
    );
    if constexpr (FIRST + V < END)
        tiles_compact<Rows, KEPT, R, FIRST + V, END>(a, lda, w, panel, inputs, keep, ahead, out);
}

// R rows times a panel, whose numbers are unpacked in registers and, if KEPT, stored in `keep`.
template <class Rows, bool KEPT, int R>
void tile_of_numbers(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, Inputs inputs,
    typename Rows::Element* keep, Prefetch ahead, float* out
) {
    if (w.kind == COMPACT_BF16) return tiles_compact<Rows, KEPT, R, 0, 4>(a, lda, w, panel, inputs, keep, ahead, out);
    with_numbers<std::is_same_v<typename Rows::Element, float>>(w, [&](auto type) {
        using Numbers = typename decltype(type)::type;
        constexpr int V = VECTOR_REGISTERS == 1 ? R <= 3 ? 4 : 2 : Numbers::FLOATS && R <= 2 ? 2 : 1;
        for (int64_t first = 0; first < 4; first += V)
            tile_packed<Rows, Numbers, KEPT, R, V>(
                a, lda, w, panel, first, inputs, keep, first + V < 4 ? Prefetch{} : ahead, out + first * 16
            );
    });
}

// R rows times a panel. Without instructions for bfloat16, rows of it are widened first.
template <int R>
void tile_scaled(const Product& product, int64_t row, int64_t panel, Inputs inputs, Prefetch ahead, float* out) {
    const Weight& w = *product.weight;
    const auto run = [&](auto kind, const auto* a, int64_t apart) {
        using Rows = decltype(kind);
        if constexpr (R >= LEAST_TILE_ROWS)
            if (auto* const numbers = static_cast<typename Rows::Element*>(product.unpacked)) {
                if (product.unpacks)
                    return tile_of_numbers<Rows, true, R>(a, apart, w, panel, inputs, numbers, ahead, out);
                constexpr int W = vectors_beside(R);
                for (int64_t first = 0; first < 4; first += W)
                    tile_unpacked<R, W>(
                        a, apart, w, numbers, panel, first, inputs, first + W < 4 ? Prefetch{} : ahead, out + first * 16
                    );
                return;
            }
        tile_of_numbers<Rows, false, R>(a, apart, w, panel, inputs, nullptr, ahead, out);
    };
    if (w.operand != BF16) return run(PairsOfF32(), product.row<float>(row) + inputs.begin, product.lda);
#if PAIR_PRODUCTS
    run(PairsOfBf16(), product.row<uint16_t>(row) + inputs.begin, product.lda);
#elif !AMX_TILES
    // Rows that are a power of two apart would share sets of the cache.
    const int64_t count = inputs.end - inputs.begin, apart = count + 16;
    float* const widened = thread_memory<Use::ROWS_OR_SUMS>(R * apart);
    widen_rows(product.row<uint16_t>(row) + inputs.begin, product.lda, R, count, widened, apart);
    run(PairsOfF32(), widened, apart);
#endif
}

}  // namespace
