// Cells: 32 bits of a row, sixteen of which one operation multiplies with sixteen others; the arithmetic of attention
// and of recurrent states.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "activations.h"
#include "numbers.h"

namespace {

#if BF16_PAIRS
struct Bf16Cells {  // two bfloat16, summed in float32
    static constexpr int64_t EACH = 2;
    static Floats multiply(Floats sum, Words a, Words b) { return dot_pairs(sum, a, b); }
    // 16 cells of a row of `width` numbers, from cell `cell` on; zeros after its end.
    static Words row(const uint16_t* p, int64_t width, int64_t cell) {
        return load_pairs(p + 2 * cell, width - 2 * cell);
    }
    static Words row(const float* p, int64_t width, int64_t cell) {
        const Floats low = load16(p + 2 * cell, lanes(width - 2 * cell));
        const Floats high = load16(p + 2 * cell + 16, lanes(width - 2 * cell - 16));
        return pairs_after(low, high);
    }
    // 16 cells of two rows: each has a number of a in its lower half, and of b in its upper one.
    static Words beside(Floats a, Floats b) { return pairs_beside(a, b); }
    // Stores the cells of a row of 32 numbers.
    static void store(uint32_t* to, const Floats (&row)[2]) { store_words(to, pairs_after(row[0], row[1])); }
    // The same as `beside` for two rows of 32 numbers in memory, of which the first `left` are valid.
    static void between(const uint16_t* a, const uint16_t* b, int64_t left, Words (&cells)[2]) {
        pairs_between(load_pairs(a, left), load_pairs(b, left), cells);
    }
#else
struct Bf16Cells {  // one bfloat16, widened to float32
    static constexpr int64_t EACH = 1;
    static Floats multiply(Floats sum, Words a, Words b) { return fmadd(as_floats(a), as_floats(b), sum); }
    static Words row(const uint16_t* p, int64_t width, int64_t cell) {
        return as_words(load16(p + cell, lanes(width - cell)));
    }
    static Words row(const float* p, int64_t width, int64_t cell) {
        return as_words(rounded_bf16(load16(p + cell, lanes(width - cell))));
    }
    static Words beside(Floats a, Floats) { return as_words(rounded_bf16(a)); }
    static void store(uint32_t* to, const Floats (&row)[2]) {
        for (int i = 0; i < 2; i++) store_words(to + 16 * i, as_words(rounded_bf16(row[i])));
    }
    static void between(const uint16_t* a, const uint16_t*, int64_t left, Words (&cells)[2]) {
        cells[0] = row(a, left, 0), cells[1] = row(a, left, 16);
    }
#endif
    static Floats exp2(Floats x) {  // 2^x within 9e-5 of itself, a twentieth of what rounding to bfloat16 may take
        const Floats rest = above_floor(x);
        Floats p = fmadd(rest, splat(0.07706704231f), splat(0.2276449907f));
        p = fmadd(p, rest, splat(0.6951167866f));
        p = fmadd(p, rest, splat(1.0f));
        return times_power(p, x);
    }
};

struct F32Cells {
    static constexpr int64_t EACH = 1;
    static Floats multiply(Floats sum, Words a, Words b) { return fmadd(as_floats(a), as_floats(b), sum); }
    template <typename T>
    static Words row(const T* p, int64_t width, int64_t cell) {
        return as_words(load16(p + cell, lanes(width - cell)));
    }
    static Words beside(Floats a, Floats) { return as_words(a); }
    static void store(uint32_t* to, const Floats (&row)[2]) {
        for (int i = 0; i < 2; i++) store_words(to + 16 * i, as_words(row[i]));
    }
    static void between(const float* a, const float*, int64_t left, Words (&cells)[2]) {
        cells[0] = row(a, left, 0), cells[1] = row(a, left, 16);
    }
    static Floats exp2(Floats x) {  // 2^x within 2 ulp
        const Floats whole = nearest(x), rest = from_nearest(x);
        Floats p = fmadd(rest, splat(0.0001535336192f), splat(0.001339887441f));
        p = fmadd(p, rest, splat(0.009618437358f));
        p = fmadd(p, rest, splat(0.05550332471f));
        p = fmadd(p, rest, splat(0.2402264791f));
        p = fmadd(p, rest, splat(0.6931472029f));
        p = fmadd(p, rest, splat(1.0f));
        return times_power(p, whole);
    }
};

// x / (1 + exp(-t)) in a model of type T: of bfloat16 within 2^-12 of itself, an eighth of what rounding to bfloat16
// may take.
template <typename T>
inline Floats times_sigmoid_in(Floats x, Floats t) {
    if constexpr (std::is_same_v<T, float>) return times_sigmoid(x, t);
    else return x * rough_inverse(splat(1.0f) + Bf16Cells::exp2(t * splat(-LOG2_E)));
}

template <typename T>
using CellsOf = std::conditional_t<std::is_same_v<T, float>, F32Cells, Bf16Cells>;

}  // namespace
