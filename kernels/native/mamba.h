// The Mamba-2 mixer between its projections: one row and one group of heads.

#pragma once

#include <immintrin.h>

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

struct Recurrence {  // of a block of tokens: x [tokens, width] times its step, decays [tokens, heads], b and c [tokens, n]
    int64_t tokens, width, head, heads;
    const float *x, *decays, *b, *c;
    const float* before;  // states [width, n] ...
    float *states, *out;  // ... and after the block, which may be the same; [tokens, width], to which the read-out is added
    // Memory that is read afterwards and prefetched meanwhile: gates [tokens, width]; x, B and C of the next block. May be
    // null.
    const float *gates, *next[3];
    int64_t ld;  // of all of these
};

// Reduces two rows of sixteen partial sums to one: eight of the first, eight of the second.
inline __m512 fold(__m512 first, __m512 second) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44), _mm512_shuffle_f32x4(first, second, 0xee));
}

// Reduces eight such pairs to the sums of sixteen rows.
inline __m512 sums_of(const __m512 pairs[8]) {
    __m512 fours[4], twos[2];
    for (int i = 0; i < 4; i++) {
        const __m512 a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        twos[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    const __m512 mixed = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed);
}

// For n = 16 * V, heads of an even size, a width that is a multiple of 16. Two rows of the state stay in registers for the
// whole block and share the loads of B and C; their products with C are reduced for sixteen rows together.
template <int V>
void advance(const Recurrence& r) {
    __m512 pairs[BLOCK][8];
    for (int64_t first = 0; first < r.width; first += 16) {
        for (int64_t pair = 0; pair < 8; pair++) {
            const int64_t p = first + 2 * pair, h = p / r.head;
            const float* before = r.before + p * 16 * V;
            float* after = r.states + p * 16 * V;
            __m512 s[2][V];
            for (int j = 0; j < 2; j++)
                for (int v = 0; v < V; v++) {
                    s[j][v] = _mm512_loadu_ps(before + (j * V + v) * 16);
                    if (p + ROWS_AHEAD < r.width) _mm_prefetch(before + ((j + ROWS_AHEAD) * V + v) * 16, _MM_HINT_T0);
                }
            for (int64_t t = 0; t < r.tokens; t++) {
                const float* x = r.x + t * r.width + p;
                const __m512 decay = _mm512_set1_ps(r.decays[t * r.heads + h]);
                const __m512 in[2] = {_mm512_set1_ps(x[0]), _mm512_set1_ps(x[1])};
                __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
                for (int v = 0; v < V; v++) {
                    const __m512 b = _mm512_loadu_ps(r.b + (t * V + v) * 16), c = _mm512_loadu_ps(r.c + (t * V + v) * 16);
                    for (int j = 0; j < 2; j++) {
                        s[j][v] = _mm512_fmadd_ps(in[j], b, _mm512_mul_ps(s[j][v], decay));
                        sum[j] = _mm512_fmadd_ps(s[j][v], c, sum[j]);
                    }
                }
                pairs[t][pair] = fold(sum[0], sum[1]);
            }
            for (int j = 0; j < 2; j++)
                for (int v = 0; v < V; v++) _mm512_storeu_ps(after + (j * V + v) * 16, s[j][v]);
        }
        for (int64_t t = 0; t < r.tokens; t++) {
            float* out = r.out + t * r.width + first;
            _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sums_of(pairs[t])));
            if (r.gates) _mm_prefetch(r.gates + t * r.ld + first, _MM_HINT_T1);
            for (int part = 0; r.next[0] && part < (first < 16 * V ? 3 : 1); part++)
                _mm_prefetch(r.next[part] + t * r.ld + first, _MM_HINT_T1);
        }
    }
}

// Any other shape. Also written with vectors: a scalar loop that the compiler vectorises could sum in a different order in
// each function that it is inlined into.
void advance_any(const Recurrence& r, int64_t n) {
    for (int64_t p = 0; p < r.width; p++) {
        float* s = r.states + p * n;
        if (r.before != r.states) std::copy_n(r.before + p * n, n, s);
        for (int64_t t = 0; t < r.tokens; t++) {
            const __m512 in = _mm512_set1_ps(r.x[t * r.width + p]), decay = _mm512_set1_ps(r.decays[t * r.heads + p / r.head]);
            const float *b = r.b + t * n, *c = r.c + t * n;
            __m512 y = _mm512_setzero_ps();
            for (int64_t i = 0; i < n; i += 16) {
                const __mmask16 mask = lanes(n - i);
                const __m512 next = _mm512_fmadd_ps(in, load16(b + i, mask), _mm512_mul_ps(load16(s + i, mask), decay));
                store16(s + i, mask, next);
                y = _mm512_fmadd_ps(next, load16(c + i, mask), y);
            }
            r.out[t * r.width + p] += _mm512_reduce_add_ps(y);
        }
    }
}

// -- a group of heads --------------------------------------------------------------------------------------------------------

template <typename T>
class HeadGroup : public RecurrentGroup<T> {
    using Base = RecurrentGroup<T>;
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

    void advance_by(RowState<T> place, Projected in, const float* before) {
        this->convolve(place, in);
        discretise(in);
        Recurrence r{in.tokens, width_, m_.head, heads_, x_, decays_, b_, c_, before, place.states, out_, nullptr, {}, in.ld};
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
        const __m512 low = _mm512_set1_ps(m_.dt_low), high = _mm512_set1_ps(m_.dt_high);
        const int64_t first = group_ * heads_;
        for (int64_t t = 0; t < in.tokens; t++) {
            const float* raw = in.rows + t * in.ld + m_.conv_dim + first;
            for (int64_t h = 0; h < heads_; h += 16) {
                const __mmask16 mask = lanes(heads_ - h);
                const __m512 dt = _mm512_add_ps(load16(raw + h, mask), load16(op_.dt_bias + first + h, mask));
                const __m512 step = _mm512_min_ps(high, _mm512_max_ps(low, softplus16(dt)));
                store16(steps_ + t * heads_ + h, mask, step);
                store16(decays_ + t * heads_ + h, mask, exp16(_mm512_mul_ps(step, load16(op_.a + first + h, mask))));
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
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width_; i += 16) {
            const __mmask16 mask = lanes(width_ - i);
            const __m512 g = load16(gate + i, mask), gated = _mm512_mul_ps(load16(y + i, mask), times_sigmoid(g, g));
            squares = _mm512_fmadd_ps(gated, gated, squares);
            store16(y + i, mask, gated);
        }
        const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width_ + m_.eps));
        for (int64_t i = 0; i < width_; i += 16) {
            const __mmask16 mask = lanes(width_ - i);
            const __m512 scale = _mm512_mul_ps(inverse, load16(weight + i, mask));
            store16(out + i, mask, _mm512_mul_ps(load16(y + i, mask), scale));
        }
    }

    const int64_t group_, heads_, width_, n_;
    const int64_t x_at_;  // channel
    float *const out_, *const x_, *const b_, *const c_, *const steps_, *const decays_;
};

}  // namespace
