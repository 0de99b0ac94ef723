// What a matrix product computes, and from which rows.

#pragma once

#include <cstdint>
#include <type_traits>

#include "activations.h"
#include "structs.h"

namespace {

// out = f(a W^T + b), where f is `activation`; rows are divided into units of work (`Units`).
struct Product {
    const Weight* weight;
    const void* a;        // rows in the form that `make_operand` gives them for the weight's `operand` ...
    int64_t lda;          // ... elements between rows, of float32 if `operand` is F32, otherwise of 16 bits
    const float* scales;  // of each row, if rows are integers
    void* out;
    int64_t ldo, store;  // numbers between rows of `out`; STORE, ADD or STORE_BF16
    Activation activation = Activation::NONE;
    int64_t outputs = 0;               // of a gated weight: outputs per row
    float scale = 1.0f;                // ADD: what is added is multiplied by this ...
    const float* row_scale = nullptr;  // ... and by that of its row, unless null
    const Weight* next = nullptr;      // the weight of the product after this one, if that is known
    // If a panel is not stored in the form in which tiles of rows multiply it, the first tile stores that form here for
    // the others. It is the thread's own memory, so the next block of rows may find the panel there. Null: each tile
    // multiplies what is stored.
    void* unpacked = nullptr;
    bool unpacks = false;  // whether the current tile is to fill `unpacked`, rather than to read it

    // A row of float32 or bfloat16, or of bytes, which are `ld_bytes` apart.
    template <class T>
    const T* row(int64_t r) const {
        return static_cast<const T*>(a) + r * lda;
    }
    const int8_t* row_bytes(int64_t r) const { return reinterpret_cast<const int8_t*>(row<uint16_t>(r)); }
    int64_t ld_bytes() const { return 2 * lda; }
};

// `count` vectors of 16 outputs of a panel, from vector `first` on.
struct PanelPart {
    int64_t panel, first, count;
    const char* next;  // the panel that the last tiles of rows prefetch, or null
};

// f(count) with the number of vectors, which is 1, 2 or 4, as a constant.
template <class F>
void with_vectors(int64_t count, F&& f) {
    if (count == 4) f(std::integral_constant<int, 4>());
    else if (count == 2) f(std::integral_constant<int, 2>());
    else f(std::integral_constant<int, 1>());
}

}  // namespace
