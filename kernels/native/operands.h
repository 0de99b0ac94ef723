// Operands: float rows in the form that a kind of weight is multiplied with.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "numbers.h"
#include "panels.h"
#include "structs.h"

namespace {

// 127 / SMALLEST_MAGNITUDE is finite, and SMALLEST_MAGNITUDE / 127 is not subnormal.
constexpr float SMALLEST_MAGNITUDE = 0x1p-119f;
constexpr float LARGEST_INTEGER = 32639.0f;  // of 16 bits that are two signed bytes: 127 * 256 + 127

// The bits of the magnitudes of MAGNITUDES numbers of a row from `i` on; each lane has the larger of two. As integers,
// the bits of a NaN are larger than those of infinity, and these are larger than those of any other number.
constexpr int64_t MAGNITUDES = 32;
template <typename T>
inline Words magnitude_bits(const T* values, int64_t k, int64_t i) {
    const Words most = splat_word(0x7fffffff);
    return larger(as_words(numbers_at(values, k, i)) & most, as_words(numbers_at(values, k, i + 16)) & most);
}
inline Words magnitude_bits(const uint16_t* values, int64_t k, int64_t i) {
    if (i + MAGNITUDES > k) return magnitude_bits<uint16_t>(values, k, i);
    const Words pairs = load_words(values + i), most = splat_word(0x7fff0000);
    return larger(pairs & most, shift_left32<16>(pairs) & most);
}

// The largest magnitude of a row. NaN and infinity do not become integers: if the row has one, the result is NaN, and
// so are scales computed from it.
template <typename T>
float largest_magnitude(const T* values, int64_t k) {
    Words largest[2] = {zero_words(), zero_words()};
    for (int64_t i = 0; i < k; i += 2 * MAGNITUDES)
        for (int64_t half = 0; half < 2; half++)
            largest[half] = larger(largest[half], magnitude_bits(values, k, i + half * MAGNITUDES));
    const int32_t bits = largest_of(larger(largest[0], largest[1]));
    float top;
    std::memcpy(&top, &bits, 4);
    return std::isfinite(top) ? top : std::numeric_limits<float>::quiet_NaN();
}

// Stores sixteen numbers of 16 bits: of each four the first and the third, then the second and the fourth.
inline void store_halves(int8_t* p, Words x) {
    alignas(16) static constexpr int8_t ORDER[16] = {0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1};
    alignas(64) int8_t quarters[64];
    store_words(quarters, shuffle_bytes(x, splat_quarter(ORDER)));
    for (int i = 0; i < 4; i++) std::memcpy(p + 8 * i, quarters + 16 * i, 8);
}

// A row as integers, in steps of its largest value / LARGEST_INTEGER: 256 high + low, both signed bytes in the order of
// BYTE_PLANES, or one number of 16 bits (INTEGER_HALVES). Weights are stored unsigned, with an offset, so the row is
// followed by the corrections of its sums: for each group of inputs, -offset times the sum of the lows, and of the
// highs.
void make_integers(const float* values, int64_t k, int64_t kind, int8_t* out, float* scale) {
    const float top = largest_magnitude(values, k);
    *scale = top / LARGEST_INTEGER;
    const Floats inverse = splat(top > 0 ? LARGEST_INTEGER / top : 0.0f);
    const int64_t kpad = padded_inputs(k, kind), group = kind == INT4 ? GROUP : kpad, offset = kind == INT4 ? 8 : 128;
    int8_t* sums = out + 2 * kpad;
    for (int64_t begin = 0; begin < kpad; begin += group) {
        Words lows = zero_words(), highs = zero_words();
        for (int64_t i = begin; i < begin + group; i += 16) {
            const Words whole = to_integers(numbers_at(values, k, i) * inverse);
            const Words high = shift_right32<8>(add32(whole, splat_word(128)));
            const Words low = sub32(whole, shift_left32<8>(high));
            lows = add32(lows, low), highs = add32(highs, high);
            if (INTEGER_HALVES) store_halves(out + 2 * i, whole);
            else if (BYTE_PLANES) store_low_bytes(out + i, low), store_low_bytes(out + kpad + i, high);
            else store_bytes_in_fours(out + 2 * i, low, high);
        }
        const int32_t both[2] = {int32_t(-offset * total_of(lows)), int32_t(-offset * total_of(highs))};
        std::memcpy(sums, both, 8);
        sums += 8;
    }
}

// Writes -8 times the sums of the first 0, SUMMED, 2 * SUMMED ... numbers of a row: the difference of two of these
// removes the offset of int4 weights from the sum of a group.
class BlockSums {
  public:
    explicit BlockSums(int8_t* to) : to_(to) { store(0); }
    void add(Words block) {  // whose lanes together are the sum of a block
        blocks_[count_++] = to_floats(block);
        if (count_ == 16) finish();
    }
    void finish() {
        if (!count_) return;
        for (int64_t i = count_; i < 16; i++) blocks_[i] = zero();
        Floats pairs[8];
        for (int i = 0; i < 8; i++) pairs[i] = fold(blocks_[2 * i], blocks_[2 * i + 1]);
        int32_t sums[16];
        store_words(sums, to_integers(sums_of(pairs) * splat(-8.0f)));
        for (int64_t i = 0; i < count_; i++) store(total_ + uint32_t(sums[i]));
        count_ = 0;
    }

  private:
    void store(uint32_t total) {
        total_ = total;
        std::memcpy(to_, &total, 4);
        to_ += 4;
    }
    int8_t* to_;
    uint32_t total_ = 0;  // of a row with NaN it overflows; its scale is NaN, too
    Floats blocks_[16];
    int64_t count_ = 0;
};

// Stores the scale of a row, its largest value / 127, and returns 127 / that value. A scale is never 0: the largest
// value of a row counts as SMALLEST_MAGNITUDE at least.
template <typename T>
float scale_of_bytes(const T* values, int64_t k, float* scale) {
    const float top = std::max(largest_magnitude(values, k), SMALLEST_MAGNITUDE);  // the first one if that is NaN
    *scale = top / 127.0f;
    return 127.0f / top;
}

// Numbers [begin, end) of a row as signed bytes, in steps of 1 / inverse; returns their sum, in parts: one in each
// lane.
template <typename T>
inline Words to_bytes(const T* values, int64_t k, int64_t begin, int64_t end, float inverse, int8_t* out) {
    const Floats steps = splat(inverse);
    Words sum = zero_words();
    int64_t i = begin;
    for (; i + 64 <= end; i += 64) {
        Words whole[4];
        for (int64_t part = 0; part < 4; part++)
            whole[part] = to_integers(numbers_at(values, k, i + part * 16) * steps);
        sum = dot_bytes(sum, splat_byte(1), store_bytes(out + i, whole));
    }
    for (; i < end; i += 16) {
        const Words whole = to_integers(numbers_at(values, k, i) * steps);
        sum = add32(sum, whole);
        store_low_bytes(out + i, whole);
    }
    return sum;
}

// A row for weights in INT8: bytes [kpad], and the correction of its sums for the weights' offset of 128.
template <typename T>
void make_bytes(const T* values, int64_t k, int8_t* out, float* scale) {
    const float inverse = scale_of_bytes(values, k, scale);
    const int64_t kpad = padded_inputs(k, BYTES);
    const int32_t correction = int32_t(-128 * int64_t(total_of(to_bytes(values, k, 0, kpad, inverse, out))));
    std::memcpy(out + kpad, &correction, 4);
}

// A row for weights in INT4: bytes [kpad], and its BlockSums.
template <typename T>
void make_summed_bytes(const T* values, int64_t k, int8_t* out, float* scale) {
    const float inverse = scale_of_bytes(values, k, scale);
    const int64_t kpad = padded_inputs(k, SUMMED_BYTES);
    BlockSums sums(out + kpad);
    for (int64_t i = 0; i < kpad; i += SUMMED) sums.add(to_bytes(values, k, i, i + SUMMED, inverse, out));
    sums.finish();
}

template <typename T>
void make_bytes_of_kind(const T* values, int64_t k, int64_t kind, int8_t* out, float* scale) {
    if (kind == BYTES) make_bytes(values, k, out, scale);
    else make_summed_bytes(values, k, out, scale);
}

// `values` [k] -> row `row` of the operand, whose rows are `ld` elements apart; the padding is zero.
void make_operand(const float* values, int64_t k, int64_t kind, void* operand, int64_t ld, float* scales, int64_t row) {
    if (kind == F32) {
        std::memcpy(static_cast<float*>(operand) + row * ld, values, k * sizeof(float));
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(operand) + row * ld;
    int8_t* const bytes = reinterpret_cast<int8_t*>(out);
    if (kind == BYTES || kind == SUMMED_BYTES) return make_bytes_of_kind(values, k, kind, bytes, scales + row);
    if (kind != BF16) return make_integers(values, k, kind, bytes, scales + row);
    for (int64_t i = 0; i < k; i += 16) {
        const Mask m = first_lanes(k - i);
        store16(out + i, m, load16(values + i, m));
    }
    std::fill(out + k, out + padded_inputs(k, kind), 0);
}

}  // namespace
