// The Mamba-2 mixer between its projections: one row and one group of heads.

#pragma once

#include <cmath>
#include <cstdint>

#include "activations.h"
#include "mixers.h"
#include "numbers.h"
#include "recurrent.h"
#include "state_blocks.h"
#include "structs.h"

namespace {

template <typename T, typename S>
class HeadGroup : public RecurrentGroup<T, S> {
    using Base = RecurrentGroup<T, S>;
    using Base::blocks_, Base::group_, Base::m_, Base::op_, Base::rest_, Base::shape_;

  public:
    using typename Base::Place, typename Base::Shape;

    static Shape shape(const Model& m) { return {m.heads / m.groups, m.head, m.state}; }

    HeadGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : Base(m, op, group, m.groups, shape(m), 1, {m.state, 1}, m.taps, m.conv_dim, scratch), heads_(shape_.heads),
          width_(heads_ * m.head), n_(m.state), first_(group * width_), out_(rest_), x_(out_ + BLOCK_TOKENS * width_),
          b_(x_ + BLOCK_TOKENS * width_), c_(b_ + BLOCK_TOKENS * n_), steps_(c_ + BLOCK_TOKENS * n_),
          log_decays_(steps_ + BLOCK_TOKENS * heads_) {
        const int64_t b_at = m.inner + group * n_;
        this->channel_ranges_[0] = {first_, width_, x_}, this->channel_ranges_[1] = {b_at, n_, b_};
        this->channel_ranges_[2] = {b_at + m.groups * n_, n_, c_};
        this->other_ranges_[0] = {m.conv_dim + group * heads_, heads_, nullptr};
        this->gate_range_ = {first_ - first_channel(), width_, nullptr};
    }

    static int64_t scratch(const Model& m) {  // floats
        return BLOCK_TOKENS * 2 * (shape(m).heads * (m.head + 1) + m.state) +
               Base::scratch(shape(m), 1, m.taps, m.conv_dim);
    }

    int64_t first_channel() const { return m_.inner; }  // gates come first
    int64_t step_width() const { return m_.conv_dim + m_.heads; }

    // Advances by at most BLOCK_TOKENS tokens; computes their outputs if `in` asks for them. `before` (null: zeros) is
    // the state before the unfinished block. Returns where that is after these tokens.
    const S* advance_by(Place to, Projected in, const S* before) {
        if (in.tokens == 1) blocks_.prefetch(to.pending, before);
        this->convolve(to, in);
        discretise(in);
        const BlockTokens tokens{steps_, log_decays_, x_, b_, c_, op_.d + group_ * heads_};
        const ReadNext next{in, this->channel_ranges_, this->gate_range_};
        return blocks_.each_part(to.pending, in.tokens, before, to.states, [&](BlockPart part, const S* state) ALWAYS {
            blocks_.append(to.pending, part, tokens);
            if (!in.with_outputs) return;
            blocks_.read(to.pending, part, state, tokens, out_, next);
        });
    }

    // Stores the last outputs, gated and normalised, as those of the step's tokens from `token` on.
    void write(int64_t token, int64_t tokens) {
        with_outputs(m_, op_, [&](auto* out, int64_t ld) {
            for (int64_t t = 0; t < tokens; t++)
                norm(t, m_.wide + (token + t) * m_.ld + first_, out + (token + t) * ld + first_);
        });
    }

  private:
    // Computes step sizes dt, and the logarithms of decays, dt A.
    void discretise(Projected in) {
        const Floats low = splat(m_.dt_low), high = splat(m_.dt_high);
        const int64_t first = group_ * heads_;
        for (int64_t t = 0; t < in.tokens; t++) {
            const float* raw = in.rows + t * in.ld + m_.conv_dim + first;
            for (int64_t h = 0; h < heads_; h += 16) {
                const Mask mask = lanes(heads_ - h);
                const Floats dt = load16(raw + h, mask) + load16(op_.dt_bias + first + h, mask);
                const Floats step = smaller(high, larger(low, softplus16(dt)));
                store16(steps_ + t * heads_ + h, mask, step);
                store16(log_decays_ + t * heads_ + h, mask, step * load16(op_.a + first + h, mask));
            }
        }
    }

    // One token's outputs times SiLU of their gates, and divided by their root mean square before or after that, if at
    // all.
    template <typename To>
    void norm(int64_t t, const float* gate, To* out) {
        float* y = out_ + t * width_;
        Floats squares = zero();
        for (int64_t i = 0; i < width_; i += 16) {
            const Mask mask = lanes(width_ - i);
            Floats value = load16(y + i, mask);
            if (!op_.norm_first) value = value * gated(gate + i, mask);
            squares = fmadd(value, value, squares);
            if (op_.norm) store16(y + i, mask, value);
            else store16(out + i, mask, value);
        }
        if (!op_.norm) return;
        const float* weight = op_.norm + first_;
        const Floats inverse = splat(1.0f / std::sqrt(total_of(squares) / width_ + m_.eps));
        for (int64_t i = 0; i < width_; i += 16) {
            const Mask mask = lanes(width_ - i);
            const Floats scale = inverse * load16(weight + i, mask), value = load16(y + i, mask) * scale;
            store16(out + i, mask, op_.norm_first ? value * gated(gate + i, mask) : value);
        }
    }

    Floats gated(const float* gate, Mask mask) const {
        const Floats g = splat(op_.scale) * load16(gate, mask);
        return times_sigmoid_in<T>(g, g);
    }

    const int64_t heads_, width_, n_;  // of the group: heads, their channels; numbers of the state per channel
    const int64_t first_;              // the group's first channel
    // [BLOCK_TOKENS, ...] of width_, width_, n_, n_, heads_ and heads_
    float *const out_, *const x_, *const b_, *const c_, *const steps_, *const log_decays_;
};

}  // namespace
