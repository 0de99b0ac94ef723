// The gated short convolution between its projections: one row and some of its channels.
//
// A token's row in `wide` has its first gates B, its second gates C and its inputs x, each with a number for every
// channel. Outputs are C * convolution(B * x), without an activation. The window has the last products B * x.
//
// How a row is divided, and which code continues it, does not affect rounding.

#pragma once

#include <algorithm>
#include <cstdint>

#include "mixers.h"
#include "numbers.h"
#include "structs.h"

namespace {

constexpr int64_t SHORT_CHANNELS = 128;  // of a work unit
constexpr int MAX_SHORT_TAPS = 8;

inline int64_t short_conv_groups(const Op& op) { return (op.width + SHORT_CHANNELS - 1) / SHORT_CHANNELS; }

// Up to 16 channels of a convolution with PAST + 1 taps, and their last inputs. An input is rounded to the window's
// type T once it is no longer the newest.
template <int PAST, typename T>
class ShortTaps {
  public:
    ShortTaps(const Op& op, int64_t channel, Mask mask) : channels_(op.width), mask_(mask) {
        for (int k = 0; k <= PAST; k++) weight_[k] = load16(op.conv + k * channels_ + channel, mask);
        bias_ = op.conv_bias ? load16(op.conv_bias + channel, mask) : zero();
    }
    void load(const T* window) {  // null: zeros
        for (int k = 0; k < PAST; k++) past_[k] = window ? load16(window + k * channels_, mask_) : zero();
    }
    void store(T* window) const {
        for (int k = 0; k < PAST; k++) store16(window + k * channels_, mask_, past_[k]);
    }
    inline ALWAYS Floats output(Floats input) const {
        Floats sum = fmadd(weight_[PAST], input, bias_);
        for (int k = 0; k < PAST; k++) sum = fmadd(weight_[k], past_[k], sum);
        return sum;
    }
    inline ALWAYS void take(Floats input) {
        for (int k = 0; k + 1 < PAST; k++) past_[k] = past_[k + 1];
        past_[PAST - 1] = kept16(static_cast<const T*>(nullptr), input);
    }

  private:
    const int64_t channels_;
    const Mask mask_;
    Floats weight_[PAST + 1], bias_, past_[PAST];
};

template <typename T>
class ShortConvGroup {
  public:
    ShortConvGroup(const Model& m, const Op& op, int64_t group)
        : m_(m), op_(op), first_(group * SHORT_CHANNELS), last_(std::min(op.width, first_ + SHORT_CHANNELS)) {}

    // One row of a step; outputs are computed only for tokens from `first_read` on.
    void run(const Step& step, int64_t row, int64_t first_read) const {
        with_outputs(m_, op_, [&](auto* out, int64_t ld) {
            if (step.batch_slots && step.batch_slots[row] >= 0) run_on_ring(step, row, out, ld);
            else run_in_slot(step, row, first_read, out, ld);
        });
    }

    void advance(const Advance& job) const {
        const T* from = window(job.slot < 0 ? job.target : job.slot);
        T* to = window(job.target);
        each_part([&](auto taps, int64_t i) {
            taps.load(from + i);
            replay(taps, job.batch_slot, job.steps, i);
            taps.store(to + i);
        });
    }

  private:
    T* window(int64_t slot) const { return static_cast<T*>(op_.windows) + slot * op_.window_stride; }
    float* ring(int64_t batch_slot) const { return op_.ring + batch_slot * op_.ring_stride; }

    // visit(taps, channel) for every 16 channels.
    template <typename F>
    void each_part(F&& visit) const {
        for (int64_t i = first_; i < last_; i += 16) visit_part<MAX_SHORT_TAPS - 1>(i, visit);
    }

    // Of a convolution with at most PAST + 1 taps.
    template <int PAST, typename F>
    void visit_part(int64_t i, F&& visit) const {
        if constexpr (PAST > 1)
            if (op_.taps <= PAST) return visit_part<PAST - 1>(i, visit);
        visit(ShortTaps<PAST, T>(op_, i, lanes(last_ - i)), i);
    }

    // Takes in the first `count` steps of a batch slot's ring.
    template <typename Taps>
    void replay(Taps& taps, int64_t batch_slot, int64_t count, int64_t i) const {
        const float* from = ring(batch_slot) + i;
        for (int64_t t = 0; t < count; t++) taps.take(load16(from + t * op_.width, lanes(last_ - i)));
    }

    // A row whose tokens may be rejected: the ring's steps are applied to the slot, whose window then does not change;
    // the row's inputs start the ring anew.
    template <typename To>
    void run_on_ring(const Step& step, int64_t row, To* out, int64_t ld) const {
        const int64_t begin = step.starts[row], batch_slot = step.batch_slots[row];
        T* const own = window(step.slots[row]);
        each_part([&](auto taps, int64_t i) {
            taps.load(own + i);
            replay(taps, batch_slot, step.counts[row], i);
            taps.store(own + i);
            float* const kept = ring(batch_slot) + i;
            take_tokens(taps, i, begin, step.starts[row + 1], begin, out + i, ld, [&](int64_t t, Floats input) ALWAYS {
                store16(kept + (t - begin) * op_.width, lanes(last_ - i), input);
            });
        });
    }

    template <typename To>
    void run_in_slot(const Step& step, int64_t row, int64_t first_read, To* out, int64_t ld) const {
        // Slot -1 is padding: its window starts from zeros and is not kept.
        const int64_t slot = step.slots[row], last = step.starts[row + 1];
        const bool has_origin = step.origins && step.origins[row] >= 0;
        const T* const from = slot < 0 || !step.initial[row] ? nullptr : window(has_origin ? step.origins[row] : slot);
        const RowSaves saves(step, row);
        each_part([&](auto taps, int64_t i) {
            taps.load(from ? from + i : nullptr);
            for (int64_t begin = step.starts[row]; begin < last;) {
                const int64_t end = saves.next(begin, last);
                take_tokens(taps, i, begin, end, first_read, out + i, ld, [](int64_t, Floats) ALWAYS {});
                saves.each_slot(end, [&](int64_t saved) { taps.store(window(saved) + i); });
                begin = end;
            }
            if (slot >= 0) taps.store(window(slot) + i);
        });
    }

    // Takes in tokens [begin, end), and stores outputs of those from `first_read` on. visit(token, input) for each.
    template <typename Taps, typename To, typename F>
    inline ALWAYS void take_tokens(
        Taps& taps, int64_t i, int64_t begin, int64_t end, int64_t first_read, To* out, int64_t ld, F&& visit
    ) const {
        const Mask mask = lanes(last_ - i);
        for (int64_t t = begin; t < end; t++) {
            const float *first = m_.wide + t * m_.ld + i, *second = first + op_.width, *x = second + op_.width;
            // rows are too far apart for the processor's own prefetchers
            prefetch_near(first + 16), prefetch_near(second + 16), prefetch_near(x + 16);
            const Floats input = load16(first, mask) * load16(x, mask);
            visit(t, input);
            if (t >= first_read) store16(out + t * ld, mask, load16(second, mask) * taps.output(input));
            taps.take(input);
        }
    }

    const Model& m_;
    const Op& op_;
    const int64_t first_, last_;  // channels of the group
};

}  // namespace
