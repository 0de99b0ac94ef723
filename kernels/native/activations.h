// Activation functions of 16 numbers. NaN stays NaN.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

enum class Activation : int64_t {
    NONE = 0,
    RELU_SQUARED = 1,
    RELU = 2,
    GELU = 3,
    GELU_TANH = 4,
    GELU_QUICK = 5,
    SILU = 6
};

// fast_exp of 16 numbers.
inline Floats exp16(Floats x) {
    // min and max return the second operand if one is NaN.
    x = smaller(splat(88.0f), larger(splat(-87.0f), x));
    const Floats n = nearest(x * splat(LOG2_E));
    Floats r = fnmadd(n, splat(0.693359375f), x);
    r = fmadd(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fmadd(p, r, splat(c));
    p = fmadd(p * r, r, r);
    return times_power(p + splat(1.0f), n);
}

// log(1 + exp(x)) within 4 ulp: max(x, 0) + 2 artanh(z / (2 + z)) with z = exp(-|x|).
inline Floats softplus16(Floats x) {
    const Floats z = exp16(zero() - magnitude(x));
    const Floats s = z / (z + splat(2.0f)), square = s * s;
    Floats p = splat(2.0f / 15);
    for (float c : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3}) p = fmadd(p, square, splat(c));
    const Floats rest = fmadd(p * square, s, s + s);
    return larger(zero(), x) + rest;
}

// erf within 6e-7. erf(x) / x is a polynomial of x^2 on [0, 3.9], a least-squares fit reweighted until the largest
// error was smallest; it is written in u = 2 (x / 3.9)^2 - 1, whose powers do not cancel. Beyond 3.9, erf is 1.
inline Floats erf16(Floats x) {
    const Floats edge = splat(3.9f);
    x = smaller(edge, larger(zero() - edge, x));
    const Floats u = fmsub(x * splat(2.0f / (3.9f * 3.9f)), x, splat(1.0f));
    Floats p = splat(-0.00342248543f);
    for (float c :
         {0.00823636141f, -0.00533974327f, 0.00542208878f, -0.020020859f, 0.034325886f, -0.04294746f, 0.0562190256f,
          -0.0736924343f, 0.0909295133f, -0.109549626f, 0.134676207f, -0.181010436f, 0.362584111f})
        p = fmadd(p, u, splat(c));
    p = p * x;
    return select(at_least(magnitude(x), edge), nearest(p), p);
}

inline Floats times_sigmoid(Floats x, Floats t) {  // x / (1 + exp(-t))
    const Floats one = splat(1.0f);
    return x / (one + exp16(zero() - t));
}

inline Floats relu(Floats x) { return larger(zero(), x); }
inline Floats relu_squared(Floats x) { return relu(x) * relu(x); }
inline Floats gelu(Floats x) {
    const Floats half = x * splat(0.5f);
    return fmadd(half, erf16(x * splat(0.707106781f)), half);
}
inline Floats gelu_tanh(Floats x) {  // (1 + tanh(t)) / 2 = sigmoid(2 t)
    const Floats cubic = fmadd(x * x, splat(0.0713548163f), splat(1.59576912f));
    return times_sigmoid(x, x * cubic);
}
inline Floats gelu_quick(Floats x) { return times_sigmoid(x, x * splat(1.702f)); }
inline Floats silu16(Floats x) { return times_sigmoid(x, x); }

// All at once, so that the function is selected once and the dependency chains overlap.
template <int V>
inline void activate(Floats (&y)[V], Activation activation) {
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
        const Mask m = first_lanes(width - i);
        Floats y[1] = {load16(from + i, m)};
        activate(y, activation);
        if (gated) y[0] = y[0] * load16(from + width + i, m);
        store_some(out + i, m, y[0]);
    }
}

}  // namespace
