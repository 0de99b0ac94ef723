// The causal convolution before a recurrence.

#pragma once

#include <cstdint>

#include "cells.h"
#include "numbers.h"
#include "structs.h"

namespace {

// A mixer's projected inputs of a few tokens. A row has a token's gates, then, from `rows` on, its channels before the
// convolution, then its other inputs of the recurrence.
struct Projected {
    const float* rows;   // the first token's channels
    int64_t ld, tokens;  // ld: numbers from a token's channels to the next token's
    bool with_outputs;   // whether these tokens' outputs are computed, which reads their gates
    bool has_next;       // whether at least as many tokens of the same row follow
};

struct InputRange {        // some of the channels, of the inputs after them, or of the gates before them
    int64_t begin, count;  // numbers; begin: from the first channel on
    float* out;            // channels: the convolution's outputs, [tokens, count]
};

// Convolves some channels with PAST + 1 taps and applies SiLU; window [PAST, channels] has their last inputs. An input
// is rounded to the window's type once it is no longer the newest.
template <int PAST, typename T>
void convolve_part(const Op& op, int64_t channels, T* window, Projected in, const InputRange& range) {
    for (int64_t i = 0; i < range.count; i += 16) {
        const Mask mask = lanes(range.count - i);
        const float* weights = op.conv + range.begin + i;
        const Floats bias = op.conv_bias ? load16(op.conv_bias + range.begin + i, mask) : zero();
        Floats weight[PAST + 1], past[PAST];
        for (int k = 0; k <= PAST; k++) weight[k] = load16(weights + k * channels, mask);
        for (int k = 0; k < PAST; k++) {
            past[k] = load16(window + k * channels + i, mask);
            if (in.tokens == 1) prefetch_far(window + k * channels + i + range.count);  // the next group's
        }
        for (int64_t t = 0; t < in.tokens; t++) {
            // rows are too far apart for the processor's own prefetchers
            prefetch_near(in.rows + t * in.ld + range.begin + i + 16);
            const Floats x = load16(in.rows + t * in.ld + range.begin + i, mask);
            Floats sum = fmadd(weight[PAST], x, bias);
            for (int k = 0; k < PAST; k++) sum = fmadd(weight[k], past[k], sum);
            for (int k = 0; k + 1 < PAST; k++) past[k] = past[k + 1];
            past[PAST - 1] = kept16(window, x);
            store16(range.out + t * range.count + i, mask, times_sigmoid_in<T>(sum, sum));
        }
        for (int k = 0; k < PAST; k++) store16(window + k * channels + i, mask, past[k]);
    }
}

// `taps` is 2, 3 or 4.
template <typename T>
void convolve_channels(const Op& op, int64_t taps, int64_t channels, T* window, Projected in, const InputRange& range) {
    if (taps == 4) convolve_part<3>(op, channels, window, in, range);
    else if (taps == 3) convolve_part<2>(op, channels, window, in, range);
    else convolve_part<1>(op, channels, window, in, range);
}

}  // namespace
