// The mixer of the gated delta rule between its projections: one row and one key head with its value heads.

#pragma once

#include <algorithm>
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
class DeltaGroup : public RecurrentGroup<T, S> {
    using Base = RecurrentGroup<T, S>;
    using Base::blocks_, Base::m_, Base::op_, Base::rest_;

  public:
    using typename Base::Place, typename Base::Shape;

    static Shape shape(const DeltaShape& d) { return {d.heads / d.key_heads, d.value, d.key}; }
    static int64_t channels(const DeltaShape& d) { return 2 * d.key_heads * d.key + d.heads * d.value; }

    DeltaGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : Base(
              m, op, group, op.delta->key_heads, shape(*op.delta), 2, {1, op.delta->value}, op.delta->taps,
              channels(*op.delta), scratch
          ),
          d_(*op.delta), heads_(d_.heads / d_.key_heads), first_(group * heads_), width_(heads_ * d_.value),
          out_(rest_), q_(out_ + BLOCK_TOKENS * width_), k_(q_ + BLOCK_TOKENS * d_.key),
          log_decays_(k_ + BLOCK_TOKENS * d_.key), betas_(log_decays_ + BLOCK_TOKENS * heads_) {
        const int64_t keys = d_.key_heads * d_.key, inputs = 2 * keys + d_.heads * d_.value;
        this->channel_ranges_[0] = {group * d_.key, d_.key, q_},
        this->channel_ranges_[1] = {keys + group * d_.key, d_.key, k_};
        this->channel_ranges_[2] = {2 * keys + first_ * d_.value, width_, out_};
        this->other_ranges_[0] = {inputs + first_, heads_, nullptr},
        this->other_ranges_[1] = {inputs + d_.heads + first_, heads_, nullptr};
        this->gate_range_ = {first_ * d_.value - first_channel(), width_, nullptr};
    }

    static int64_t scratch(const DeltaShape& d) {  // floats
        return BLOCK_TOKENS * (shape(d).heads * (d.value + 2) + 2 * d.key) +
               Base::scratch(shape(d), 2, d.taps, channels(d));
    }

    int64_t first_channel() const { return d_.heads * d_.value; }  // gates come first
    int64_t step_width() const { return channels(d_) + 2 * d_.heads; }

    // As HeadGroup::advance_by.
    const S* advance_by(Place to, Projected in, const S* before) {
        if (in.tokens == 1) blocks_.prefetch(to.pending, before);
        this->convolve(to, in);
        norm_keys(in.tokens);
        set_gates(in);
        const DeltaTokens tokens{betas_, log_decays_, k_, q_};
        const ReadNext next{in, this->channel_ranges_, this->gate_range_};
        return blocks_.each_part(to.pending, in.tokens, before, to.states, [&](BlockPart part, const S* state) ALWAYS {
            blocks_.append(to.pending, part, tokens);
            blocks_.solve(to.pending, part, state, tokens, out_, next);
        });
    }

    // Stores the last outputs, normalised and gated, as those of the step's tokens from `token` on.
    void write(int64_t token, int64_t tokens) const {
        const int64_t first = first_ * d_.value;
        with_outputs(m_, op_, [&](auto* out, int64_t ld) {
            for (int64_t t = 0; t < tokens; t++)
                write_token(t, m_.wide + (token + t) * m_.ld + first, out + (token + t) * ld + first);
        });
    }

  private:
    // Normalises queries and keys to length 1, and divides queries by the square root of a key's width.
    void norm_keys(int64_t tokens) {
        const float scale = 1.0f / std::sqrt(float(d_.key));
        for (int64_t t = 0; t < tokens; t++) {
            float *q = q_ + t * d_.key, *k = k_ + t * d_.key;
            Floats qq = zero(), kk = qq;
            for (int64_t i = 0; i < d_.key; i += 16) {
                const Mask mask = lanes(d_.key - i);
                const Floats a = load16(q + i, mask), b = load16(k + i, mask);
                qq = fmadd(a, a, qq), kk = fmadd(b, b, kk);
            }
            const float by_q = scale / std::sqrt(total_of(qq) + 1e-6f);
            const float by_k = 1.0f / std::sqrt(total_of(kk) + 1e-6f);
            for (int64_t i = 0; i < d_.key; i += 16) {
                const Mask mask = lanes(d_.key - i);
                store16(q + i, mask, splat(by_q) * load16(q + i, mask));
                store16(k + i, mask, splat(by_k) * load16(k + i, mask));
            }
        }
    }

    // Computes the logarithms of decays, a softplus(input + bias), and the weights of the changes, the sigmoid of the
    // other input times `beta_scale`, of sixteen tokens at a time.
    void set_gates(Projected in) {
        for (int64_t h = 0; h < heads_; h++) {
            const Floats a = splat(op_.a[first_ + h]), bias = splat(op_.dt_bias[first_ + h]);
            const float* rows = in.rows + channels(d_) + first_ + h;
            for (int64_t first = 0; first < in.tokens; first += 16) {
                alignas(64) float beta[16] = {}, log_decay[16] = {};
                for (int64_t t = 0; t < std::min<int64_t>(16, in.tokens - first); t++) {
                    beta[t] = rows[(first + t) * in.ld];
                    log_decay[t] = rows[(first + t) * in.ld + d_.heads];
                }
                const Floats dt = softplus16(load_floats(log_decay) + bias), scale = splat(d_.beta_scale);
                store_floats(log_decay, dt * a), store_floats(beta, times_sigmoid(scale, load_floats(beta)));
                for (int64_t t = 0; t < std::min<int64_t>(16, in.tokens - first); t++)
                    log_decays_[(first + t) * heads_ + h] = log_decay[t], betas_[(first + t) * heads_ + h] = beta[t];
            }
        }
    }

    // One token's outputs divided by their root mean square, head by head, times SiLU of their gates.
    template <typename To>
    void write_token(int64_t t, const float* gate, To* out) const {
        for (int64_t h = 0; h < heads_; h++, gate += d_.value, out += d_.value) {
            const float *y = out_ + t * width_ + h * d_.value, *weight = op_.norm + (first_ + h) * d_.value;
            Floats squares = zero();
            for (int64_t i = 0; i < d_.value; i += 16) {
                const Floats v = load16(y + i, lanes(d_.value - i));
                squares = fmadd(v, v, squares);
            }
            const Floats inverse = splat(1.0f / std::sqrt(total_of(squares) / d_.value + d_.eps));
            for (int64_t i = 0; i < d_.value; i += 16) {
                const Mask mask = lanes(d_.value - i);
                const Floats g = load16(gate + i, mask), scale = inverse * load16(weight + i, mask);
                store16(out + i, mask, (load16(y + i, mask) * scale) * times_sigmoid_in<T>(g, g));
            }
        }
    }

    const DeltaShape& d_;
    const int64_t heads_, first_, width_;  // the group's value heads: how many, the first one, and their channels
    // [BLOCK_TOKENS, ...] of width_ (values, then outputs), d_.key, d_.key, heads_ and heads_
    float *const out_, *const q_, *const k_, *const log_decays_, *const betas_;
};

}  // namespace
