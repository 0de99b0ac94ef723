// The mixer of the gated delta rule between its projections: one row and one key head with its value heads.
//
// A state is [key, value], so lanes are values: p = S^T k and s = S^T q are sums of rows of S, one chain per value in the
// order of the keys, in a register from the first row to the last. No sum is across lanes, and how values are divided into
// vectors, or tokens into blocks, does not affect rounding.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activations.h"
#include "numbers.h"
#include "recurrent.h"
#include "structs.h"

namespace {

// -- the recurrence ----------------------------------------------------------------------------------------------------------

template <typename S>
struct DeltaBlock {  // of a block of tokens and one value head
    int64_t tokens, keys, values;
    const float *q, *k;                // [tokens, keys], of length 1
    const float *kq, *decay, *beta;    // [tokens]
    const S* before;                   // state [keys, values] ...
    S* after;                          // ... and after the block, which may be the same
    float* read;                       // [2, values]: what the next token reads of a state, p and s
    float* tile;                       // [keys, 16 * DELTA_VECTORS], rounded like `after`
    float* out;                        // [tokens, ld]: values v, which become what is read out
    int64_t ld;
};

constexpr int DELTA_VECTORS = 2;  // of values whose states stay in the first-level cache for a block: 16 KB for 128 keys
constexpr int DELTA_WIDE = VECTOR_REGISTERS == 1 ? 8 : DELTA_VECTORS;  // the same where a state comes from memory or goes there at once: whole rows of 128 values

// W vectors of a row of values; all lanes are used unless W is 1.
template <int W>
struct Values {
    Floats at[W];
    Values() {
        for (int w = 0; w < W; w++) at[w] = zero();
    }
};

template <int W>
struct Lane {  // which lanes: those of the mask where W is 1
    Mask mask;
    template <typename S>
    Floats load(const S* p) const { return W > 1 ? load_all(p) : load16(p, mask); }
    template <typename S>
    void store(S* p, Floats v) const {
        if (W > 1) store_all(p, v);
        else store16(p, mask, v);
    }
};

// p = S^T k; s = S^T q.
template <int W, typename S>
inline void read_state(Lane<W> lane, const S* from, int64_t ld, int64_t keys, const float* k, const float* q, Values<W>& p, Values<W>& s) {
    for (int64_t i = 0; i < keys; i++, from += ld) {
        const Floats by_k = splat(k[i]), by_q = splat(q[i]);
        for (int w = 0; w < W; w++) {
            const Floats row = lane.load(from + 16 * w);
            p.at[w] = fmadd(by_k, row, p.at[w]);
            s.at[w] = fmadd(by_q, row, s.at[w]);
        }
    }
}

// S = g S + k d^T. Of states in bfloat16, which take more instructions for a byte, the next head's is asked for meanwhile.
template <int W, typename From, typename S>
inline void write_state(Lane<W> lane, const From* from, int64_t ld, int64_t keys, const float* k, Floats decay, const Values<W>& d, S* to, int64_t ld_to) {
    for (int64_t i = 0; i < keys; i++, from += ld, to += ld_to) {
        const Floats in = splat(k[i]);
        if (sizeof(From) == 2 && ld == 16 * W)
            for (int w = 0; w < W; w += 2) prefetch_far(from + keys * ld + 16 * w);
        for (int w = 0; w < W; w++)
            lane.store(to + 16 * w, fmadd(in, d.at[w], decay * lane.load(from + 16 * w)));
    }
}

// The same, to a tile of states, rounded as they are `stored`; also p and s of the changed state for the next token.
template <int W, typename From, typename S>
inline void step_state(
    const S* stored, Lane<W> lane, const From* from, int64_t ld, int64_t keys, const float* k, const float* q, Floats decay, const Values<W>& d, float* to,
    Values<W>& p, Values<W>& s
) {
    const float *next_k = k + keys, *next_q = q + keys;
    for (int64_t i = 0; i < keys; i++, from += ld, to += 16 * W) {
        const Floats in = splat(k[i]), by_k = splat(next_k[i]), by_q = splat(next_q[i]);
        Floats row[W];
        for (int w = 0; w < W; w++) row[w] = fmadd(in, d.at[w], decay * lane.load(from + 16 * w));
        for (int w = 0; w + 1 < W; w += 2) keep_both(stored, row[w], row[w + 1]);
        if (W % 2) row[W - 1] = kept16(stored, row[W - 1]);
        for (int w = 0; w < W; w++) {
            lane.store(to + 16 * w, row[w]);
            p.at[w] = fmadd(by_k, row[w], p.at[w]);
            s.at[w] = fmadd(by_q, row[w], s.at[w]);
        }
    }
}

// p and s for the first token.
template <int W, typename S>
void delta_read(const DeltaBlock<S>& b, int64_t first) {
    const Lane<W> lane{lanes(b.values - first)};
    Values<W> p, s;
    read_state(lane, b.before + first, b.values, b.keys, b.k, b.q, p, s);
    for (int w = 0; w < W; w++) {
        lane.store(b.read + first + 16 * w, p.at[w]);
        lane.store(b.read + b.values + first + 16 * w, s.at[w]);
    }
}

// Processes the tokens of the block. The state stays in `tile` meanwhile if W is small enough, or if there is only one
// token.
template <int W, typename S>
void delta_tokens(const DeltaBlock<S>& b, int64_t first) {
    const Lane<W> lane{lanes(b.values - first)};
    const S* before = b.before + first;
    S* after = b.after + first;
    const float *k = b.k, *q = b.q;
    float* out = b.out + first;
    Values<W> p, s, d;
    for (int w = 0; w < W; w++) {
        p.at[w] = lane.load(b.read + first + 16 * w);
        s.at[w] = lane.load(b.read + b.values + first + 16 * w);
    }
    for (int64_t t = 0; t < b.tokens; t++, k += b.keys, q += b.keys, out += b.ld) {
        // d = beta (v - g p); o = g s + (k . q) d.
        const Floats decay = splat(b.decay[t]), beta = splat(b.beta[t]), kq = splat(b.kq[t]);
        for (int w = 0; w < W; w++) {
            d.at[w] = beta * fnmadd(decay, p.at[w], lane.load(out + 16 * w));
            lane.store(out + 16 * w, fmadd(kq, d.at[w], decay * s.at[w]));
        }
        if (b.tokens == 1) {
            write_state(lane, before, b.values, b.keys, k, decay, d, after, b.values);
        } else if (W <= DELTA_VECTORS && t + 1 == b.tokens) {
            write_state(lane, b.tile, 16 * W, b.keys, k, decay, d, after, b.values);
        } else if (W <= DELTA_VECTORS) {
            p = Values<W>(), s = Values<W>();
            if (t == 0) step_state(after, lane, before, b.values, b.keys, k, q, decay, d, b.tile, p, s);
            else step_state(after, lane, b.tile, 16 * W, b.keys, k, q, decay, d, b.tile, p, s);
        }
    }
}

template <typename S>
void delta_head(const DeltaBlock<S>& b) {
    for (int64_t first = 0; first < b.values;) {
        const int64_t left = b.values - first;
        if (left >= 16 * DELTA_WIDE) delta_read<DELTA_WIDE>(b, first), first += 16 * DELTA_WIDE;
        else if (left >= 16 * DELTA_VECTORS) delta_read<DELTA_VECTORS>(b, first), first += 16 * DELTA_VECTORS;
        else delta_read<1>(b, first), first += 16;
    }
    for (int64_t first = 0; first < b.values;) {
        const int64_t left = b.values - first;
        if (b.tokens == 1 && left >= 16 * DELTA_WIDE) delta_tokens<DELTA_WIDE>(b, first), first += 16 * DELTA_WIDE;
        else if (left >= 16 * DELTA_VECTORS) delta_tokens<DELTA_VECTORS>(b, first), first += 16 * DELTA_VECTORS;
        else delta_tokens<1>(b, first), first += 16;
    }
}

// -- a key head and its value heads ------------------------------------------------------------------------------------------

template <typename T, typename S>
class DeltaGroup : public RecurrentGroup<T, S> {
    using Base = RecurrentGroup<T, S>;
    using Base::m_, Base::op_;

  public:
    DeltaGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : Base(m, op, op.delta->taps, channels(*op.delta)), shape_(*op.delta), first_(group * shape_.heads / shape_.key_heads),
          heads_(shape_.heads / shape_.key_heads), width_(heads_ * shape_.value), out_(aligned(scratch)), q_(out_ + BLOCK * width_),
          k_(q_ + BLOCK * shape_.key), tile_(k_ + BLOCK * shape_.key), read_(tile_ + shape_.key * 16 * DELTA_VECTORS),
          kq_(read_ + 2 * shape_.value), decays_(kq_ + BLOCK), betas_(decays_ + heads_ * BLOCK) {
        const int64_t keys = shape_.key_heads * shape_.key, inputs = 2 * keys + shape_.heads * shape_.value;
        this->parts_[0] = {group * shape_.key, shape_.key, q_}, this->parts_[1] = {keys + group * shape_.key, shape_.key, k_};
        this->parts_[2] = {2 * keys + first_ * shape_.value, width_, out_};
        this->behind_[0] = {inputs + first_, heads_, nullptr}, this->behind_[1] = {inputs + shape_.heads + first_, heads_, nullptr};
        this->states_count_ = heads_ * shape_.key * shape_.value, this->states_at_ = group * this->states_count_;
        this->spare_ = betas_ + heads_ * BLOCK;
    }

    static int64_t channels(const DeltaShape& d) { return 2 * d.key_heads * d.key + d.heads * d.value; }

    static int64_t scratch(const DeltaShape& d) {  // floats
        const int64_t heads = d.heads / d.key_heads, width = heads * d.value;
        return BLOCK * (width + 2 * d.key + 1 + 2 * heads) + d.key * 16 * DELTA_VECTORS + 2 * d.value +
               Base::spare(width * d.key, d.taps, channels(d)) + 16;
    }

    int64_t first_channel() const { return shape_.heads * shape_.value; }  // gates come first
    int64_t step_width() const { return channels(shape_) + 2 * shape_.heads; }

    const S* advance_by(RowState<T, S> place, Projected in, const S* before) {
        this->convolve(place, in);
        norm_keys(in.tokens);
        gates(in);
        const int64_t state = shape_.key * shape_.value;
        for (int64_t h = 0; h < heads_; h++)
            delta_head<S>({in.tokens, shape_.key, shape_.value, q_, k_, kq_, decays_ + h * BLOCK, betas_ + h * BLOCK,
                        before + h * state, place.states + h * state, read_, tile_, out_ + h * shape_.value, width_});
        return place.states;
    }

    // The block's outputs, normalised and gated, for the step's tokens from `token` on: to `mid`, or as the next product's
    // operand.
    void write(int64_t token, int64_t tokens) const {
        const int64_t first = first_ * shape_.value;
        for (int64_t t = token; t < token + tokens; t++) {
            const float* gate = m_.wide + t * m_.ld + first;
            const int64_t at = t * m_.operand_ld + first;
            const int64_t mid = t * m_.mid_ld + first;
            if (op_.target == MID && op_.bf16_rows) write_token(t - token, gate, reinterpret_cast<uint16_t*>(m_.mid) + mid);
            else if (op_.target == MID) write_token(t - token, gate, m_.mid + mid);
            else if (op_.kind == BF16) write_token(t - token, gate, static_cast<uint16_t*>(m_.operand) + at);
            else write_token(t - token, gate, static_cast<float*>(m_.operand) + at);
        }
    }

  private:
    // Normalises queries and keys to length 1 (queries also times key ** -0.5), and computes their products.
    void norm_keys(int64_t tokens) {
        const float scale = 1.0f / std::sqrt(float(shape_.key));
        for (int64_t t = 0; t < tokens; t++) {
            float *q = q_ + t * shape_.key, *k = k_ + t * shape_.key;
            Floats qq = zero(), kk = qq, kq = qq;
            for (int64_t i = 0; i < shape_.key; i += 16) {
                const Mask mask = lanes(shape_.key - i);
                const Floats a = load16(q + i, mask), b = load16(k + i, mask);
                qq = fmadd(a, a, qq), kk = fmadd(b, b, kk), kq = fmadd(a, b, kq);
            }
            const float by_q = scale / std::sqrt(total_of(qq) + 1e-6f);
            const float by_k = 1.0f / std::sqrt(total_of(kk) + 1e-6f);
            kq_[t] = total_of(kq) * by_q * by_k;
            for (int64_t i = 0; i < shape_.key; i += 16) {
                const Mask mask = lanes(shape_.key - i);
                store16(q + i, mask, splat(by_q) * load16(q + i, mask));
                store16(k + i, mask, splat(by_k) * load16(k + i, mask));
            }
        }
    }

    // Decays exp(a softplus(input + bias)), and the weights of the changes, sigmoid of the other input. Sixteen tokens at
    // once.
    void gates(Projected in) {
        for (int64_t h = 0; h < heads_; h++) {
            const Floats a = splat(op_.a[first_ + h]), bias = splat(op_.dt_bias[first_ + h]);
            const float* rows = in.rows + channels(shape_) + first_ + h;
            for (int64_t first = 0; first < in.tokens; first += 16) {
                alignas(64) float beta[16] = {}, step[16] = {};
                for (int64_t t = 0; t < std::min<int64_t>(16, in.tokens - first); t++) {
                    beta[t] = rows[(first + t) * in.ld];
                    step[t] = rows[(first + t) * in.ld + shape_.heads];
                }
                const Floats time = softplus16(load_floats(step) + bias), one = splat(1.0f);
                store_floats(decays_ + h * BLOCK + first, exp16(time * a));
                store_floats(betas_ + h * BLOCK + first, times_sigmoid(one, load_floats(beta)));
            }
        }
    }

    // One token's outputs divided by their root mean square, head by head, times SiLU of their gates.
    template <typename To>
    void write_token(int64_t t, const float* gate, To* out) const {
        for (int64_t h = 0; h < heads_; h++, gate += shape_.value, out += shape_.value) {
            const float *y = out_ + t * width_ + h * shape_.value, *weight = op_.norm + (first_ + h) * shape_.value;
            Floats squares = zero();
            for (int64_t i = 0; i < shape_.value; i += 16) {
                const Floats v = load16(y + i, lanes(shape_.value - i));
                squares = fmadd(v, v, squares);
            }
            const Floats inverse = splat(1.0f / std::sqrt(total_of(squares) / shape_.value + shape_.eps));
            for (int64_t i = 0; i < shape_.value; i += 16) {
                const Mask mask = lanes(shape_.value - i);
                const Floats g = load16(gate + i, mask), scale = inverse * load16(weight + i, mask);
                store16(out + i, mask, (load16(y + i, mask) * scale) * times_sigmoid_in<T>(g, g));
            }
        }
    }

    const DeltaShape& shape_;
    const int64_t first_, heads_, width_;  // of its value heads: the first one, how many, their values
    float *const out_, *const q_, *const k_, *const tile_, *const read_, *const kq_, *const decays_, *const betas_;
};

}  // namespace
