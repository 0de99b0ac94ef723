// The Mamba-2 mixer between its projections, one row and one group of heads.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "structs.h"

namespace {

// Channels [begin, begin + count): the window moves on by one input, and `out` is the convolution through SiLU.
template <typename T>
void convolve(const Model& m, const Op& op, T* window, const float* in, int64_t begin, int64_t count, float* out) {
    const int64_t keep = m.taps - 1, channels = m.conv_dim;
    for (int64_t i = 0; i < count; i++) out[i] = op.conv_bias ? op.conv_bias[begin + i] : 0.0f;
    const float* last = op.conv + keep * channels + begin;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] += last[i] * in[begin + i];
    for (int64_t tap = 0; tap < keep; tap++) {
        const float* weight = op.conv + tap * channels + begin;
        T* row = window + tap * channels + begin;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] += weight[i] * load(row, i);
        if (tap + 1 < keep) std::memcpy(row, row + channels, count * sizeof(T));
    }
    if (keep > 0) {
        T* row = window + (keep - 1) * channels + begin;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) store(row, i, in[begin + i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] = silu(out[i]);
}

constexpr int64_t BLOCK = 32;  // tokens of a row that a head works through while its state stays in the cache

inline int64_t mamba_scratch(const Model& m) {  // floats
    const int64_t width = m.heads / m.groups * m.head;
    return BLOCK * (2 * width + 2 * m.state + 2 * m.heads / m.groups) + width * m.state + m.taps * m.conv_dim;
}

// Rows of a pool's part that belongs to a group of heads: the channels of x, B and C in a window, the states of the heads.
template <typename T, typename F>
void each_part(const Model& m, const Op& op, int64_t slot, int64_t group, F&& visit) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head;
    T* window = static_cast<T*>(op.windows) + slot * op.window_stride;
    for (int64_t tap = 0; tap + 1 < m.taps; tap++) {
        T* row = window + tap * m.conv_dim;
        visit(row + group * width, width);
        visit(row + m.inner + group * m.state, m.state);
        visit(row + m.inner + (m.groups + group) * m.state, m.state);
    }
    visit(op.states + slot * op.state_stride + group * width * m.state, width * m.state);
}

template <typename T>
void save_state(const Model& m, const Op& op, int64_t from, int64_t to, int64_t group) {
    std::vector<const void*> sources;
    if (from >= 0) each_part<T>(m, op, from, group, [&](auto* part, int64_t) { sources.push_back(part); });
    size_t next = 0;
    each_part<T>(m, op, to, group, [&](auto* part, int64_t count) {
        if (from >= 0) std::memcpy(part, sources[next++], count * sizeof(*part));
    });
}

struct Recurrence {  // of a block of tokens: x [tokens, width], steps and decays [tokens, heads], b and c [tokens, n], d [heads]
    int64_t tokens, width, head, heads, ldo;
    const float *x, *steps, *decays, *b, *c, *d;
    float *states, *out;  // [width, n], [tokens, ldo]
};

// n = 16 * V: two rows of the state stay in registers for the whole block, and share the loads of B and C.
template <int V>
void advance(const Recurrence& r) {
    for (int64_t p = 0; p < r.width; p += 2) {
        const int64_t h = p / r.head;
        float* rows[2] = {r.states + p * 16 * V, r.states + (p + 1) * 16 * V};
        __m512 s[2][V];
        for (int j = 0; j < 2; j++)
            for (int v = 0; v < V; v++) s[j][v] = _mm512_loadu_ps(rows[j] + 16 * v);
        for (int64_t t = 0; t < r.tokens; t++) {
            const float* x = r.x + t * r.width + p;
            const float step = r.steps[t * r.heads + h];
            const __m512 decay = _mm512_set1_ps(r.decays[t * r.heads + h]);
            const __m512 in[2] = {_mm512_set1_ps(x[0] * step), _mm512_set1_ps(x[1] * step)};
            __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int v = 0; v < V; v++) {
                const __m512 b = _mm512_loadu_ps(r.b + (t * V + v) * 16), c = _mm512_loadu_ps(r.c + (t * V + v) * 16);
                for (int j = 0; j < 2; j++) {
                    s[j][v] = _mm512_fmadd_ps(in[j], b, _mm512_mul_ps(s[j][v], decay));
                    sum[j] = _mm512_fmadd_ps(s[j][v], c, sum[j]);
                }
            }
            for (int j = 0; j < 2; j++) r.out[t * r.ldo + p + j] = _mm512_reduce_add_ps(sum[j]) + r.d[h] * x[j];
        }
        for (int j = 0; j < 2; j++)
            for (int v = 0; v < V; v++) _mm512_storeu_ps(rows[j] + 16 * v, s[j][v]);
    }
}

void advance_any(const Recurrence& r, int64_t n) {
    for (int64_t p = 0; p < r.width; p++) {
        const int64_t h = p / r.head;
        float* s = r.states + p * n;
        for (int64_t t = 0; t < r.tokens; t++) {
            const float value = r.x[t * r.width + p], in = value * r.steps[t * r.heads + h];
            const float decay = r.decays[t * r.heads + h], *b = r.b + t * n, *c = r.c + t * n;
            float y = 0;
#pragma omp simd reduction(+ : y)
            for (int64_t i = 0; i < n; i++) {
                s[i] = s[i] * decay + in * b[i];
                y += s[i] * c[i];
            }
            r.out[t * r.ldo + p] = y + r.d[h] * value;
        }
    }
}

// A block of tokens of one row and one group of heads, from their projected inputs. `window` and `states` advance.
template <typename T>
void mamba_block(
    const Model& m, const Op& op, T* window, float* states, const float* inputs, int64_t ldi, int64_t tokens, float* out,
    int64_t ldo, int64_t group, float* scratch
) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head, n = m.state;
    float *x = scratch, *b = x + BLOCK * width, *c = b + BLOCK * n, *steps = c + BLOCK * n, *decays = steps + BLOCK * heads;
    for (int64_t t = 0; t < tokens; t++) {
        const float* in = inputs + t * ldi;
        const float* raw = in + m.conv_dim + group * heads;
        convolve(m, op, window, in, group * width, width, x + t * width);
        convolve(m, op, window, in, m.inner + group * n, n, b + t * n);
        convolve(m, op, window, in, m.inner + (m.groups + group) * n, n, c + t * n);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t index = group * heads + h;
            steps[t * heads + h] = std::min(std::max(softplus(raw[h] + op.dt_bias[index]), m.dt_low), m.dt_high);
            decays[t * heads + h] = std::exp(steps[t * heads + h] * op.a[index]);
        }
    }
    const Recurrence r{tokens, width, m.head, heads, ldo, x, steps, decays, b, c, op.d + group * heads, states, out};
    if (n == 128 && m.head % 2 == 0) advance<8>(r);
    else if (n == 64 && m.head % 2 == 0) advance<4>(r);
    else if (n == 32 && m.head % 2 == 0) advance<2>(r);
    else advance_any(r, n);
}

void gate_and_norm(const Model& m, const Op& op, int64_t begin, int64_t end, int64_t group) {
    const int64_t width = m.heads / m.groups * m.head;
    const float* weight = op.norm + group * width;
    for (int64_t t = begin; t < end; t++) {
        const float* gate = m.wide + t * m.ld + group * width;
        float* y = m.mid + t * m.ld + group * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) {
            y[i] *= silu(gate[i]);
            squares += y[i] * y[i];
        }
        const float inverse = 1.0f / std::sqrt(squares / width + m.eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) y[i] *= inverse * weight[i];
    }
}

// The first `count` steps of a seat's ring, on `window` and `states`; nobody wants their outputs.
template <typename T>
void replay(const Model& m, const Op& op, T* window, float* states, int64_t seat, int64_t count, int64_t group, float* scratch) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head;
    float* unread = scratch + BLOCK * (width + 2 * m.state + 2 * heads);
    mamba_block(
        m, op, window, states, op.ring + seat * op.ring_stride, m.conv_dim + m.heads, count, unread, width, group, scratch
    );
}

// A row whose tokens may be taken back: the ring's steps go into the slot, whose state then stays as it is; its inputs begin
// the ring anew.
template <typename T>
void mamba_on_ring(const Model& m, const Op& op, const Step& step, int64_t row, int64_t group, float* scratch) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head, wide = m.conv_dim + m.heads;
    const int64_t begin = step.starts[row], end = step.starts[row + 1], seat = step.seats[row];
    float* slot_states = op.states + step.slots[row] * op.state_stride + group * width * m.state;
    T* slot_window = static_cast<T*>(op.windows) + step.slots[row] * op.window_stride;
    if (step.counts[row]) replay(m, op, slot_window, slot_states, seat, step.counts[row], group, scratch);
    float* states = scratch + mamba_scratch(m) - width * m.state - m.taps * m.conv_dim;
    T* window = reinterpret_cast<T*>(states + width * m.state);
    std::memcpy(states, slot_states, width * m.state * sizeof(float));
    const int64_t begins[4] = {group * width, m.inner + group * m.state, m.inner + (m.groups + group) * m.state, m.conv_dim + group * heads};
    const int64_t sizes[4] = {width, m.state, m.state, heads};
    for (int64_t part = 0; part < 3; part++)
        for (int64_t tap = 0; tap + 1 < m.taps; tap++) {
            const int64_t at = tap * m.conv_dim + begins[part];
            std::memcpy(window + at, slot_window + at, sizes[part] * sizeof(T));
        }
    for (int64_t t = begin; t < end; t++)
        for (int64_t part = 0; part < 4; part++) {
            float* kept = op.ring + seat * op.ring_stride + (t - begin) * wide + begins[part];
            std::memcpy(kept, m.wide + t * m.ld + m.inner + begins[part], sizes[part] * sizeof(float));
        }
    float* out = m.mid + begin * m.ld + group * width;
    mamba_block(m, op, window, states, m.wide + begin * m.ld + m.inner, m.ld, end - begin, out, m.ld, group, scratch);
    gate_and_norm(m, op, begin, end, group);
}

template <typename T>
void mamba(const Model& m, const Op& op, const Step& step, int64_t row, int64_t group, float* scratch) {
    if (step.seats && step.seats[row] >= 0) {
        mamba_on_ring<T>(m, op, step, row, group, scratch);
        return;
    }
    const int64_t slot = step.slots[row], width = m.heads / m.groups * m.head, last = step.starts[row + 1];
    if (step.from && step.from[row] != slot) save_state<T>(m, op, step.from[row], slot, group);
    T* window = slot < 0 ? nullptr : static_cast<T*>(op.windows) + slot * op.window_stride;
    float* states = slot < 0 ? nullptr : op.states + slot * op.state_stride + group * width * m.state;
    if (slot < 0) {  // padding: zeros that nobody keeps
        states = scratch + mamba_scratch(m) - width * m.state - m.taps * m.conv_dim;
        window = reinterpret_cast<T*>(states + width * m.state);
        std::fill(states, states + width * m.state + m.taps * m.conv_dim, 0.0f);
    } else if (!step.initial[row]) {
        each_part<T>(m, op, slot, group, [](auto* part, int64_t count) { std::memset(part, 0, count * sizeof(*part)); });
    }
    for (int64_t begin = step.starts[row]; begin < last;) {
        int64_t end = std::min(last, begin + BLOCK);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && begin < save[1] && save[1] < end) end = save[1];
        }
        float* out = m.mid + begin * m.ld + group * width;
        mamba_block(m, op, window, states, m.wide + begin * m.ld + m.inner, m.ld, end - begin, out, m.ld, group, scratch);
        gate_and_norm(m, op, begin, end, group);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && save[1] == end) save_state<T>(m, op, slot, save[2], group);
        }
        begin = end;
    }
}

}  // namespace
