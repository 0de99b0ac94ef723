// Activation functions of 16 numbers. NaN stays NaN.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "numbers.h"

namespace {

enum class Activation : int64_t { NONE = 0, RELU_SQUARED = 1, RELU = 2, GELU = 3, GELU_TANH = 4, GELU_QUICK = 5, SILU = 6 };

// fast_exp of 16 numbers.
inline __m512 exp16(__m512 x) {
    // min and max return the second operand if one is NaN.
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r);
    return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0f)), n);
}

// erf within 6e-7. erf(x) / x is a polynomial of x^2 on [0, 3.9], a least-squares fit reweighted until the largest error
// was smallest; it is written in u = 2 (x / 3.9)^2 - 1, whose powers do not cancel. Beyond 3.9, erf is 1.
inline __m512 erf16(__m512 x) {
    const __m512 edge = _mm512_set1_ps(3.9f);
    x = _mm512_min_ps(edge, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), edge), x));
    const __m512 u = _mm512_fmsub_ps(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / (3.9f * 3.9f))), x, _mm512_set1_ps(1.0f));
    __m512 p = _mm512_set1_ps(-0.00342248543f);
    for (float c : {0.00823636141f, -0.00533974327f, 0.00542208878f, -0.020020859f, 0.034325886f, -0.04294746f, 0.0562190256f,
                    -0.0736924343f, 0.0909295133f, -0.109549626f, 0.134676207f, -0.181010436f, 0.362584111f})
        p = _mm512_fmadd_ps(p, u, _mm512_set1_ps(c));
    p = _mm512_mul_ps(p, x);
    return _mm512_mask_roundscale_ps(p, _mm512_cmp_ps_mask(_mm512_abs_ps(x), edge, _CMP_GE_OQ), p, 0);
}

inline __m512 times_sigmoid(__m512 x, __m512 t) {  // x / (1 + exp(-t))
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), t))));
}

inline __m512 relu(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }
inline __m512 relu_squared(__m512 x) { return _mm512_mul_ps(relu(x), relu(x)); }
inline __m512 gelu(__m512 x) {
    const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, erf16(_mm512_mul_ps(x, _mm512_set1_ps(0.707106781f))), half);
}
inline __m512 gelu_tanh(__m512 x) {  // (1 + tanh(t)) / 2 = sigmoid(2 t)
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.59576912f));
    return times_sigmoid(x, _mm512_mul_ps(x, cubic));
}
inline __m512 gelu_quick(__m512 x) { return times_sigmoid(x, _mm512_mul_ps(x, _mm512_set1_ps(1.702f))); }
inline __m512 silu16(__m512 x) { return times_sigmoid(x, x); }

// All at once, so that the function is selected once and the dependency chains overlap.
template <int V>
inline void activate(__m512 (&y)[V], Activation activation) {
    const auto each = [&](auto f) {
        for (int v = 0; v < V; v++) y[v] = f(y[v]);
    };
    switch (activation) {
        case Activation::RELU: each(relu); break;
        case Activation::RELU_SQUARED: each(relu_squared); break;
        case Activation::GELU: each(gelu); break;
        case Activation::GELU_TANH: each(gelu_tanh); break;
        case Activation::GELU_QUICK: each(gelu_quick); break;
        case Activation::SILU: each(silu16); break;
        default: break;
    }
}

// f(from); if gated, f(from) times the next `width` numbers.
void activate_row(const float* from, int64_t width, Activation activation, bool gated, float* out) {
    for (int64_t i = 0; i < width; i += 16) {
        const __mmask16 m = first_lanes(width - i);
        __m512 y[1] = {_mm512_maskz_loadu_ps(m, from + i)};
        activate(y, activation);
        if (gated) y[0] = _mm512_mul_ps(y[0], _mm512_maskz_loadu_ps(m, from + width + i));
        _mm512_mask_storeu_ps(out + i, m, y[0]);
    }
}

}  // namespace
