// Conversions, and functions of single numbers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

inline float bf16_to_float(uint16_t v) {
    uint32_t bits = uint32_t(v) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t float_to_bf16(float f) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t(f != f ? 0x7fc0 : rounded);
}

inline Mask first_lanes(int64_t left) { return left >= 16 ? Mask(0xffff) : Mask((1 << left) - 1); }

constexpr float LOG2_E = 1.44269504f;

// exp within 2 ulp on [-87, 88], clamped outside: 2^n times a polynomial of the remainder (Cephes' coefficients).
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyint(x * LOG2_E);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t(int32_t(n)) + 127) << 23;  // arbitrary if x is NaN: p is NaN, too
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Access to memory that holds float32 or bfloat16.
template <typename T>
inline float load(const T* p, int64_t i);
template <>
inline float load<float>(const float* p, int64_t i) {
    return p[i];
}
template <>
inline float load<uint16_t>(const uint16_t* p, int64_t i) {
    return bf16_to_float(p[i]);
}
inline void store(float* p, int64_t i, float v) { p[i] = v; }
inline void store(uint16_t* p, int64_t i, float v) { p[i] = float_to_bf16(v); }

// Sixteen numbers at a time; fewer at the end of a row, where the other lanes are zero. A bfloat16 below 2^-126 is
// stored as zero, as products treat it.
inline Mask lanes(int64_t left) { return left >= 16 ? Mask(0xffff) : left <= 0 ? Mask(0) : Mask((1 << left) - 1); }
inline Floats load_all(const float* p) { return load_floats(p); }
inline Floats load_all(const uint16_t* p) { return load_bf16(p); }
inline void store_all(float* p, Floats v) { store_floats(p, v); }
inline void store_all(uint16_t* p, Floats v) { store_bf16(p, v); }
// The value that a load returns for a number stored with this type.
inline Floats kept16(const float*, Floats v) { return v; }
inline Floats kept16(const uint16_t*, Floats v) { return rounded_bf16(v); }
// A full store is not masked, since masked stores of bfloat16 take several times as long.
inline void store16(float* p, Mask m, Floats v) {
    if (m == 0xffff) store_floats(p, v);
    else store_some(p, m, v);
}
inline void store16(uint16_t* p, Mask m, Floats v) {
    if (m == 0xffff) store_bf16(p, v);
    else store_some_bf16(p, m, v);
}

// Sixteen numbers of a row from `i` on; zeros behind its end.
template <typename T>
inline Floats numbers_at(const T* values, int64_t k, int64_t i) {
    return i + 16 <= k ? load_all(values + i) : load16(values + i, first_lanes(std::max<int64_t>(0, k - i)));
}

void rms_norm(const float* from, const float* weight, int64_t width, float eps, float* out) {
    Floats squares[4];  // chains of additions
    for (Floats& sum : squares) sum = zero();
    for (int64_t begin = 0; begin < width; begin += 64)
        for (int64_t i = 0; i < 4; i++) {
            const Floats x = numbers_at(from, width, begin + i * 16);
            squares[i] = fmadd(x, x, squares[i]);
        }
    const float sum = total_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const Floats inverse = splat(1.0f / std::sqrt(sum / width + eps));
    for (int64_t i = 0; i < width; i += 16)
        store16(out + i, lanes(width - i), numbers_at(from, width, i) * inverse * numbers_at(weight, width, i));
}

}  // namespace
