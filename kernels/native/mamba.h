// The Mamba-2 mixer between its projections, one row and one group of heads.
//
// Token after token in float32, whatever the blocks: how a row was cut, and who takes it further, changes no bit of it.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activations.h"
#include "numbers.h"
#include "structs.h"

namespace {

constexpr int64_t BLOCK = 32;  // tokens of a row that heads work through while rows of their states stay in registers
constexpr int64_t ROWS_AHEAD = 32;  // rows of a state that are asked for before they are needed

// -- the recurrence ----------------------------------------------------------------------------------------------------------

struct Recurrence {  // of a block of tokens: x [tokens, width] times its step, decays [tokens, heads], b and c [tokens, n]
    int64_t tokens, width, head, heads;
    const float *x, *decays, *b, *c;
    const float* before;  // states [width, n] ...
    float *states, *out;  // ... and after the block, which may be the same; [tokens, width], to which the read-out is added
    // What is read afterwards, and asked for meanwhile: gates [tokens, width]; x, B and C of the next block. Null: nothing.
    const float *gates, *next[3];
    int64_t ld;  // of all of these
};

// Two rows of sixteen partial sums become one: eight of the first, eight of the second.
inline __m512 fold(__m512 first, __m512 second) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44), _mm512_shuffle_f32x4(first, second, 0xee));
}

// Eight such pairs become the sums of sixteen rows.
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

// n = 16 * V, heads of an even size, a width of sixteens. Two rows of the state stay in registers for the whole block and
// share the loads of B and C; their products with C are summed up for sixteen rows together.
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

void advance_any(const Recurrence& r, int64_t n) {
    for (int64_t p = 0; p < r.width; p++) {
        const int64_t h = p / r.head;
        float* s = r.states + p * n;
        if (r.before != r.states) std::copy_n(r.before + p * n, n, s);
        for (int64_t t = 0; t < r.tokens; t++) {
            const float in = r.x[t * r.width + p], decay = r.decays[t * r.heads + h], *b = r.b + t * n, *c = r.c + t * n;
            float y = 0;
#pragma omp simd reduction(+ : y)
            for (int64_t i = 0; i < n; i++) {
                s[i] = s[i] * decay + in * b[i];
                y += s[i] * c[i];
            }
            r.out[t * r.width + p] += y;
        }
    }
}

// log(1 + exp(x)) within 4 ulp: max(x, 0) + 2 artanh(z / (2 + z)) with z = exp(-|x|).
inline __m512 softplus16(__m512 x) {
    const __m512 z = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    const __m512 s = _mm512_div_ps(z, _mm512_add_ps(z, _mm512_set1_ps(2.0f))), square = _mm512_mul_ps(s, s);
    __m512 p = _mm512_set1_ps(2.0f / 15);
    for (float c : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3})
        p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(c));
    const __m512 rest = _mm512_fmadd_ps(_mm512_mul_ps(p, square), s, _mm512_add_ps(s, s));
    return _mm512_add_ps(_mm512_max_ps(_mm512_setzero_ps(), x), rest);
}

// -- a group of heads --------------------------------------------------------------------------------------------------------

struct Projected {  // of a few tokens, `ld` apart: x, B and C before the convolution, then steps in time [conv + heads]
    const float* rows;
    int64_t ld, tokens;
    bool gated, more;  // gates lie before the inputs, and are read next; as many tokens behind these come after that
};

// What a load finds of a number that went to memory of this type.
inline __m512 kept16(const float*, __m512 v) { return v; }
inline __m512 kept16(const uint16_t*, __m512 v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}

template <typename T>
struct RowState {  // a row's window [taps - 1, conv], and the states [width, n] of a group
    T* window;
    float* states;
};

template <typename T>
class HeadGroup {
  public:
    HeadGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : m_(m), op_(op), group_(group), heads_(m.heads / m.groups), width_(heads_ * m.head), n_(m.state),
          x_at_(group * width_), b_at_(m.inner + group * n_), c_at_(b_at_ + m.groups * n_),
          out_(reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64)), x_(out_ + BLOCK * width_),
          b_(x_ + BLOCK * width_), c_(b_ + BLOCK * n_), steps_(c_ + BLOCK * n_), decays_(steps_ + BLOCK * heads_) {}

    static int64_t scratch(const Model& m) {  // floats; a vector that begins in the middle of a line costs two loads
        const int64_t heads = m.heads / m.groups, width = heads * m.head;
        return BLOCK * 2 * (width + m.state + heads) + width * m.state + m.taps * m.conv_dim + 16;
    }

    RowState<T> in_slot(int64_t slot) const {
        T* window = static_cast<T*>(op_.windows) + slot * op_.window_stride;
        return {window, op_.states + slot * op_.state_stride + group_ * width_ * n_};
    }

    RowState<T> in_scratch() const {
        float* states = decays_ + BLOCK * heads_;
        return {reinterpret_cast<T*>(states + width_ * n_), states};
    }

    void clear(RowState<T> place) const {
        each_part([&](auto of, int64_t begin, int64_t count) { std::fill_n(place.*of + begin, count, 0); });
    }

    void copy(RowState<T> from, RowState<T> to) const {
        each_part([&](auto of, int64_t begin, int64_t count) { std::copy_n(from.*of + begin, count, to.*of + begin); });
    }

    void copy_window(RowState<T> from, RowState<T> to) const {
        each_of_window([&](int64_t begin, int64_t count) { std::copy_n(from.window + begin, count, to.window + begin); });
    }

    // A block of tokens: what the heads read out is left for `write`, the place advances.
    void advance_by(RowState<T> place, Projected in) { advance_by(place, in, place.states); }

    // The same, from other states than the place's.
    void advance_by(RowState<T> place, Projected in, const float* before) {
        each_channels([&](int64_t begin, int64_t count, float* out) {
            if (m_.taps == 4) convolve<3>(place.window + begin, in, begin, count, out);
            else if (m_.taps == 3) convolve<2>(place.window + begin, in, begin, count, out);
            else convolve<1>(place.window + begin, in, begin, count, out);
        });
        discretise(in);
        Recurrence r{in.tokens, width_, m_.head, heads_, x_, decays_, b_, c_, before, place.states, out_, nullptr, {}, in.ld};
        if (in.gated) r.gates = in.rows - m_.inner + x_at_;
        if (in.more) {
            const float* next = in.rows + in.tokens * in.ld;
            r.next[0] = next + x_at_, r.next[1] = next + b_at_, r.next[2] = next + c_at_;
        }
        const bool even = m_.head % 2 == 0 && width_ % 16 == 0;
        if (n_ == 128 && even) advance<8>(r);
        else if (n_ == 64 && even) advance<4>(r);
        else if (n_ == 32 && even) advance<2>(r);
        else advance_any(r, n_);
    }

    // The block's outputs, gated and normed, as the step's tokens from `token` on: to `mid`, or as the operand that is multiplied.
    void write(int64_t token, int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) {
            const float* gate = m_.wide + (token + t) * m_.ld + x_at_;
            const int64_t at = (token + t) * m_.operand_ld + x_at_;
            if (op_.target == MID) norm(t, gate, m_.mid + (token + t) * m_.ld + x_at_);
            else if (op_.kind == BF16) norm(t, gate, static_cast<uint16_t*>(m_.operand) + at);
            else norm(t, gate, static_cast<float*>(m_.operand) + at);
        }
    }

    // A row's inputs of this group to a ring.
    void keep(Projected in, float* ring) const {
        const int64_t wide = m_.conv_dim + m_.heads;
        for (int64_t t = 0; t < in.tokens; t++) {
            const auto copy = [&](int64_t begin, int64_t count, float*) {
                std::copy_n(in.rows + t * in.ld + begin, count, ring + t * wide + begin);
            };
            each_channels(copy);
            copy(m_.conv_dim + group_ * heads_, heads_, nullptr);
        }
    }

  private:
    // Calls visit(first channel, count, where the convolution's outputs go) for x, B and C.
    template <typename F>
    void each_channels(F&& visit) const {
        visit(x_at_, width_, x_);
        visit(b_at_, n_, b_);
        visit(c_at_, n_, c_);
    }

    template <typename F>
    void each_of_window(F&& visit) const {
        for (int64_t tap = 0; tap + 1 < m_.taps; tap++)
            each_channels([&](int64_t begin, int64_t count, float*) { visit(tap * m_.conv_dim + begin, count); });
    }

    // Calls visit(window or states, first, count) for what a place holds of this group.
    template <typename F>
    void each_part(F&& visit) const {
        each_of_window([&](int64_t begin, int64_t count) { visit(&RowState<T>::window, begin, count); });
        visit(&RowState<T>::states, 0, width_ * n_);
    }

    // KEEP + 1 taps, then SiLU. An input is rounded to what the window holds once it is no longer the newest.
    template <int KEEP>
    void convolve(T* window, Projected in, int64_t begin, int64_t count, float* out) const {
        for (int64_t i = 0; i < count; i += 16) {
            const __mmask16 mask = lanes(count - i);
            const float* weights = op_.conv + begin + i;
            const __m512 bias = op_.conv_bias ? load16(op_.conv_bias + begin + i, mask) : _mm512_setzero_ps();
            __m512 weight[KEEP + 1], past[KEEP];
            for (int k = 0; k <= KEEP; k++) weight[k] = load16(weights + k * m_.conv_dim, mask);
            for (int k = 0; k < KEEP; k++) past[k] = load16(window + k * m_.conv_dim + i, mask);
            for (int64_t t = 0; t < in.tokens; t++) {
                const __m512 x = load16(in.rows + t * in.ld + begin + i, mask);
                __m512 sum = _mm512_fmadd_ps(weight[KEEP], x, bias);
                for (int k = 0; k < KEEP; k++) sum = _mm512_fmadd_ps(weight[k], past[k], sum);
                for (int k = 0; k + 1 < KEEP; k++) past[k] = past[k + 1];
                past[KEEP - 1] = kept16(window, x);
                store16(out + t * count + i, mask, times_sigmoid(sum, sum));
            }
            for (int k = 0; k < KEEP; k++) store16(window + k * m_.conv_dim + i, mask, past[k]);
        }
    }

    // Steps in time and decays; x goes on as x times its step, D x as the beginning of the output.
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

    // One token's outputs times SiLU of their gate, over the root of their mean square.
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

    const Model& m_;
    const Op& op_;
    const int64_t group_, heads_, width_, n_;
    const int64_t x_at_, b_at_, c_at_;  // channels
    float *const out_, *const x_, *const b_, *const c_, *const steps_, *const decays_;
};

// -- rows --------------------------------------------------------------------------------------------------------------------

// Advances the state in `place` by the first `count` steps of a batch slot's ring, without outputs.
template <typename T>
void replay(const Model& m, const Op& op, HeadGroup<T>& group, RowState<T> place, int64_t batch_slot, int64_t count) {
    group.advance_by(place, {op.ring + batch_slot * op.ring_stride, m.conv_dim + m.heads, count, false, false});
}

// A row whose tokens may be taken back: the ring's steps go into the slot, whose state then stays as it is; its inputs begin
// the ring anew.
template <typename T>
void mamba_on_ring(const Model& m, const Op& op, const Step& step, int64_t row, HeadGroup<T>& group) {
    const int64_t begin = step.starts[row], batch_slot = step.batch_slots[row];
    const Projected in{m.wide + begin * m.ld + m.inner, m.ld, step.starts[row + 1] - begin, true, false};
    const RowState<T> slot = group.in_slot(step.slots[row]), place = group.in_scratch();
    if (step.counts[row]) replay(m, op, group, slot, batch_slot, step.counts[row]);
    group.copy_window(slot, place);
    group.keep(in, op.ring + batch_slot * op.ring_stride);
    group.advance_by(place, in, slot.states);
    group.write(begin, in.tokens);
}

template <typename T>
void mamba(const Model& m, const Op& op, const Step& step, int64_t row, HeadGroup<T> group) {
    if (step.batch_slots && step.batch_slots[row] >= 0) {
        mamba_on_ring<T>(m, op, step, row, group);
        return;
    }
    const int64_t slot = step.slots[row], last = step.starts[row + 1];
    const RowState<T> place = slot < 0 ? group.in_scratch() : group.in_slot(slot);  // padding: zeros that nobody keeps
    if (step.from && step.from[row] >= 0 && step.from[row] != slot) group.copy(group.in_slot(step.from[row]), place);
    if (slot < 0 || !step.initial[row]) group.clear(place);
    for (int64_t begin = step.starts[row]; begin < last;) {
        int64_t end = std::min(last, begin + BLOCK);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && begin < save[1] && save[1] < end) end = save[1];
        }
        group.advance_by(place, {m.wide + begin * m.ld + m.inner, m.ld, end - begin, true, last - end >= end - begin});
        group.write(begin, end - begin);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && save[1] == end) group.copy(place, group.in_slot(save[2]));
        }
        begin = end;
    }
}

}  // namespace
