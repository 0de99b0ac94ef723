// The causal convolution before a recurrence.

#pragma once

#include <cstdint>

#include "cells.h"
#include "numbers.h"
#include "structs.h"

namespace {

// Rows of a few tokens, `ld` apart: the channels before the convolution, then the other inputs of the recurrence
struct Projected {
    const float* rows;
    int64_t ld, tokens;
    bool gated, more;  // gates lie before the channels, and are read next; as many tokens behind these come after that
};

struct Part {  // some of the channels, or of the inputs after them
    int64_t begin, count;
    float* out;  // where the convolution's outputs go, [tokens, count]
};

// KEEP + 1 taps, then SiLU. An input is rounded to the window's type once it is no longer the newest.
template <int KEEP, typename T>
void convolve_part(const Op& op, int64_t channels, T* window, Projected in, const Part& part) {
    for (int64_t i = 0; i < part.count; i += 16) {
        const Mask mask = lanes(part.count - i);
        const float* weights = op.conv + part.begin + i;
        const Floats bias = op.conv_bias ? load16(op.conv_bias + part.begin + i, mask) : zero();
        Floats weight[KEEP + 1], past[KEEP];
        for (int k = 0; k <= KEEP; k++) weight[k] = load16(weights + k * channels, mask);
        for (int k = 0; k < KEEP; k++) {
            past[k] = load16(window + k * channels + i, mask);
            if (in.tokens == 1) prefetch_far(window + k * channels + i + part.count);  // the next group's
        }
        for (int64_t t = 0; t < in.tokens; t++) {
            // rows are too far apart for the processor's own prefetchers
            prefetch_near(in.rows + t * in.ld + part.begin + i + 16);
            const Floats x = load16(in.rows + t * in.ld + part.begin + i, mask);
            Floats sum = fmadd(weight[KEEP], x, bias);
            for (int k = 0; k < KEEP; k++) sum = fmadd(weight[k], past[k], sum);
            for (int k = 0; k + 1 < KEEP; k++) past[k] = past[k + 1];
            past[KEEP - 1] = kept16(window, x);
            store16(part.out + t * part.count + i, mask, times_sigmoid_in<T>(sum, sum));
        }
        for (int k = 0; k < KEEP; k++) store16(window + k * channels + i, mask, past[k]);
    }
}

template <typename T>
void convolve_channels(const Op& op, int64_t taps, int64_t channels, T* window, Projected in, const Part& part) {
    if (taps == 4) convolve_part<3>(op, channels, window, in, part);
    else if (taps == 3) convolve_part<2>(op, channels, window, in, part);
    else convolve_part<1>(op, channels, window, in, part);
}

}  // namespace
