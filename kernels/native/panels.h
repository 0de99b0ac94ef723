// How packed weights and rows of integers are stored: sizes, and what depends on the instruction set.

#pragma once

#include <cstdint>

#include "structs.h"
#include "vectors.h"

#if defined(__AMX_BF16__) || defined(SACCADE_EMULATE_AMX)
#define AMX_TILES 1
#else
#define AMX_TILES 0
#endif
// Whether rows of bfloat16 are multiplied by vectors of pairs: tiles of AMX multiply all of them.
#define PAIR_PRODUCTS (BF16_PAIRS && !AMX_TILES)

namespace {

constexpr int64_t PANEL = 64;  // outputs of a packed weight that are stored together
// Inputs that share a scale in int4 with rows of 16 bits. int4 is padded to them.
constexpr int64_t GROUP = 128;
constexpr int64_t SUMMED = 32;  // inputs of a row of SUMMED_BYTES whose sum is stored
// nvfp4: inputs that share an e4m3 scale; bytes of these in a panel: a scale for each output, and halves of bytes.
constexpr int64_t NVFP4_GROUP = 16, NVFP4_GROUP_BYTES = PANEL + NVFP4_GROUP / 2 * PANEL;

// How rows of integers of 16 bits are stored. Without instructions for products of bytes they are multiplied as they
// are, by widened weights: for each 4 inputs the first and the third, then the second and the fourth.
constexpr bool INTEGER_HALVES = !BYTE_DOTS && !AMX_TILES;
// Otherwise each is two signed bytes, 256 high + low: for each 4 inputs the 4 lows, then the 4 highs, or, where tiles
// of AMX multiply them, all lows of a row, then all highs.
constexpr bool BYTE_PLANES = AMX_TILES;
constexpr int64_t FOUR_INPUTS = BYTE_PLANES ? 4 : 8;  // bytes from the lows of 4 inputs to those of the next
// Bytes from the lows of 4 inputs to their highs.
inline int64_t highs_at(int64_t kpad) { return BYTE_PLANES ? kpad : 4; }

// The number of inputs as stored, with padding.
inline int64_t padded_inputs(int64_t k, int64_t kind) {
    const int64_t step = kind == F32 ? 1 : kind == BF16 ? 2 : kind == INT8 || kind == BYTES ? 16 : GROUP;
    return (k + step - 1) / step * step;
}

inline int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

inline int64_t panel_bytes(const Weight& w) {
    if (w.kind == COMPACT_BF16) return w.kpad * PANEL * 3 / 2;
    if (w.kind == NVFP4) return w.kpad / NVFP4_GROUP * NVFP4_GROUP_BYTES;
    return w.kpad * PANEL * 2 / (w.kind == BF16 ? 1 : w.kind == INT8 || w.kind == FP8 || w.kind == UINT8 ? 2 : 4);
}

// Whether numbers are unpacked to float32 or bfloat16 before they are multiplied.
inline bool is_unpacked(const Weight& w) {
    return w.kind == FP8 || w.kind == NVFP4 || w.kind == UINT4 || w.kind == COMPACT_BF16 ||
           (w.kind == UINT8 && w.operand != SUMMED_BYTES);
}

// Groups of inputs that share a scale, of a weight that has them.
inline int64_t scale_groups(const Weight& w) { return (w.k + w.group - 1) / w.group; }

// Groups of inputs whose sums are scaled separately; 1 if the scales are part of the numbers or belong to whole rows,
// or there are none.
inline int64_t summed_groups(const Weight& w) {
    const bool whole = w.kind == BF16 || w.kind == INT8 || w.kind == NVFP4 || w.kind == COMPACT_BF16;
    return whole ? 1 : scale_groups(w);
}

// Of an unpacked weight whose sums are not scaled group by group: the scales of its outputs, or null if it has none.
inline const float* output_scales(const Weight& w) {
    return w.kind == NVFP4 ? w.outer : w.kind == FP8 || w.kind == UINT4 || w.kind == UINT8 ? w.scale : nullptr;
}

// Where a panel is stored. T: a type of one byte.
template <class T = uint8_t>
inline const T* panel_data(const Weight& w, int64_t panel) {
    return static_cast<const T*>(w.data) + panel * panel_bytes(w);
}

}  // namespace
