// The Mamba-2 mixer between its projections: one row and one group of heads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activations.h"
#include "numbers.h"
#include "recurrent.h"
#include "structs.h"

namespace {

constexpr int64_t ROWS_AHEAD = 32;  // rows of a state that are asked for before they are needed

// -- the recurrence ----------------------------------------------------------------------------------------------------------

template <typename S>
struct Recurrence {  // of a block of tokens: x [tokens, width] times its step, decays [tokens, heads], b and c [tokens, n]
    int64_t tokens, width, head, heads;
    const float *x, *decays, *b, *c;
    const S* before;  // states [width, n] ...
    S* states;        // ... and after the block, which may be the same
    float* out;       // [tokens, width], to which the read-out is added
    // Memory that is read afterwards and prefetched meanwhile: gates [tokens, width]; x, B and C of the next block. May be
    // null.
    const float *gates, *next[3];
    int64_t ld;  // of all of these
};

// For n = 16 * V, heads of an even size, a width that is a multiple of 16. Two rows of the state stay in registers for the
// whole block (part by part if there are few registers) and share the loads of B and C; their products with C are reduced for sixteen rows together.
template <int V, typename S>
void advance(const Recurrence<S>& r) {
    constexpr int W = VECTOR_REGISTERS == 1 ? V : 2;  // of a row of the state, so many vectors fit the registers
    Floats pairs[BLOCK][8], sums[W < V ? BLOCK : 1][2];
    for (int64_t first = 0; first < r.width; first += 16) {
        for (int64_t pair = 0; pair < 8; pair++) {
            const int64_t p = first + 2 * pair, h = p / r.head;
            const S* before = r.before + p * 16 * V;
            S* after = r.states + p * 16 * V;
            for (int part = 0; part < V; part += W) {
                Floats s[2][W];
                for (int j = 0; j < 2; j++)
                    for (int v = 0; v < W; v++) {
                        s[j][v] = load_all(before + (j * V + part + v) * 16);
                        const bool line = (part + v) * 16 * sizeof(S) % 64 == 0;
                        if (line && p + ROWS_AHEAD < r.width) prefetch_near(before + ((j + ROWS_AHEAD) * V + part + v) * 16);
                    }
                for (int64_t t = 0; t < r.tokens; t++) {
                    if (t)  // the last store rounds by itself
                        for (int v = 0; v < W; v++) keep_both(after, s[0][v], s[1][v]);
                    const float* x = r.x + t * r.width + p;
                    const Floats decay = splat(r.decays[t * r.heads + h]);
                    const Floats in[2] = {splat(x[0]), splat(x[1])};
                    Floats sum[2] = {part ? sums[t][0] : zero(), part ? sums[t][1] : zero()};
                    for (int v = 0; v < W; v++) {
                        const int64_t at = (t * V + part + v) * 16;
                        const Floats b = load_floats(r.b + at), c = load_floats(r.c + at);
                        for (int j = 0; j < 2; j++) {
                            s[j][v] = fmadd(in[j], b, s[j][v] * decay);
                            sum[j] = fmadd(s[j][v], c, sum[j]);
                        }
                    }
                    if (part + W < V) sums[t][0] = sum[0], sums[t][1] = sum[1];
                    else pairs[t][pair] = fold(sum[0], sum[1]);
                }
                for (int j = 0; j < 2; j++)
                    for (int v = 0; v < W; v++) store_all(after + (j * V + part + v) * 16, s[j][v]);
            }
        }
        for (int64_t t = 0; t < r.tokens; t++) {
            float* out = r.out + t * r.width + first;
            store_floats(out, load_floats(out) + sums_of(pairs[t]));
            if (r.gates) prefetch_far(r.gates + t * r.ld + first);
            for (int part = 0; r.next[0] && part < (first < 16 * V ? 3 : 1); part++)
                prefetch_far(r.next[part] + t * r.ld + first);
        }
    }
}

// Any other shape. Also written with vectors: a scalar loop that the compiler vectorises could sum in a different order in
// each function that it is inlined into.
template <typename S>
void advance_any(const Recurrence<S>& r, int64_t n) {
    for (int64_t p = 0; p < r.width; p++) {
        S* s = r.states + p * n;
        if (r.before != r.states) std::copy_n(r.before + p * n, n, s);
        for (int64_t t = 0; t < r.tokens; t++) {
            const Floats in = splat(r.x[t * r.width + p]), decay = splat(r.decays[t * r.heads + p / r.head]);
            const float *b = r.b + t * n, *c = r.c + t * n;
            Floats y = zero();
            for (int64_t i = 0; i < n; i += 16) {
                const Mask mask = lanes(n - i);
                const Floats next = fmadd(in, load16(b + i, mask), load16(s + i, mask) * decay);
                store16(s + i, mask, next);
                y = fmadd(next, load16(c + i, mask), y);
            }
            r.out[t * r.width + p] += total_of(y);
        }
    }
}

// -- a group of heads --------------------------------------------------------------------------------------------------------

template <typename T, typename S>
class HeadGroup : public RecurrentGroup<T, S> {
    using Base = RecurrentGroup<T, S>;
    using Base::m_, Base::op_;

  public:
    HeadGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : Base(m, op, m.taps, m.conv_dim), group_(group), heads_(m.heads / m.groups), width_(heads_ * m.head), n_(m.state),
          x_at_(group * width_), out_(aligned(scratch)), x_(out_ + BLOCK * width_), b_(x_ + BLOCK * width_), c_(b_ + BLOCK * n_),
          steps_(c_ + BLOCK * n_), decays_(steps_ + BLOCK * heads_) {
        const int64_t b_at = m.inner + group * n_;
        this->parts_[0] = {x_at_, width_, x_}, this->parts_[1] = {b_at, n_, b_};
        this->parts_[2] = {b_at + m.groups * n_, n_, c_};
        this->behind_[0] = {m.conv_dim + group * heads_, heads_, nullptr};
        this->states_at_ = group * width_ * n_, this->states_count_ = width_ * n_;
        this->spare_ = decays_ + BLOCK * heads_;
    }

    static int64_t scratch(const Model& m) {  // floats; a vector that begins in the middle of a line costs two loads
        const int64_t heads = m.heads / m.groups, width = heads * m.head;
        return BLOCK * 2 * (width + m.state + heads) + Base::spare(width * m.state, m.taps, m.conv_dim) + 16;
    }

    int64_t first_channel() const { return m_.inner; }  // gates come first
    int64_t step_width() const { return m_.conv_dim + m_.heads; }

    void advance_by(RowState<T, S> place, Projected in, const S* before) {
        this->convolve(place, in);
        discretise(in);
        Recurrence<S> r{in.tokens, width_, m_.head, heads_, x_, decays_, b_, c_, before, place.states, out_, nullptr, {}, in.ld};
        if (in.gated) r.gates = in.rows - m_.inner + x_at_;
        for (int part = 0; in.more && part < 3; part++) r.next[part] = in.rows + in.tokens * in.ld + this->parts_[part].begin;
        const bool even = m_.head % 2 == 0 && width_ % 16 == 0;
        if (n_ == 128 && even) advance<8>(r);
        else if (n_ == 64 && even) advance<4>(r);
        else if (n_ == 32 && even) advance<2>(r);
        else advance_any(r, n_);
    }

    // The block's outputs, gated and normalised, for the step's tokens from `token` on: to `mid`, or as the next product's
    // operand.
    void write(int64_t token, int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) {
            const float* gate = m_.wide + (token + t) * m_.ld + x_at_;
            const int64_t at = (token + t) * m_.operand_ld + x_at_;
            if (op_.target == MID) norm(t, gate, m_.mid + (token + t) * m_.ld + x_at_);
            else if (op_.kind == BF16) norm(t, gate, static_cast<uint16_t*>(m_.operand) + at);
            else norm(t, gate, static_cast<float*>(m_.operand) + at);
        }
    }

  private:
    // Step sizes and decays; x becomes x times its step size, D x the initial output.
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
                store16(decays_ + t * heads_ + h, mask, exp16(step * load16(op_.a + first + h, mask)));
            }
            for (int64_t h = 0; h < heads_; h++) {
                const float step = steps_[t * heads_ + h], d = op_.d[first + h];
                float *x = x_ + t * width_ + h * m_.head, *out = out_ + t * width_ + h * m_.head;
#pragma omp simd
                for (int64_t i = 0; i < m_.head; i++) {
                    out[i] = d * x[i];
                    x[i] *= step;
                }
            }
        }
    }

    // One token's outputs times SiLU of their gates, divided by their root mean square.
    template <typename To>
    void norm(int64_t t, const float* gate, To* out) {
        float* y = out_ + t * width_;
        const float* weight = op_.norm + x_at_;
        Floats squares = zero();
        for (int64_t i = 0; i < width_; i += 16) {
            const Mask mask = lanes(width_ - i);
            const Floats g = load16(gate + i, mask), gated = load16(y + i, mask) * times_sigmoid(g, g);
            squares = fmadd(gated, gated, squares);
            store16(y + i, mask, gated);
        }
        const Floats inverse = splat(1.0f / std::sqrt(total_of(squares) / width_ + m_.eps));
        for (int64_t i = 0; i < width_; i += 16) {
            const Mask mask = lanes(width_ - i);
            const Floats scale = inverse * load16(weight + i, mask);
            store16(out + i, mask, load16(y + i, mask) * scale);
        }
    }

    const int64_t group_, heads_, width_, n_;
    const int64_t x_at_;  // channel
    float *const out_, *const x_, *const b_, *const c_, *const steps_, *const decays_;
};

}  // namespace
