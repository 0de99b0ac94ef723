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
#include "state_blocks.h"
#include "structs.h"

namespace {

// -- a group of heads --------------------------------------------------------------------------------------------------------

// In a slot: the states of all groups before the unfinished block, then the pending tokens of all groups.
template <typename T, typename S>
struct MambaState : RowState<T, S> {
    Pending pending;
};

template <typename T, typename S>
BlockShape<T, S> block_shape(const Model& m) { return {m.heads / m.groups, m.head, m.state}; }

template <typename T, typename S>
class HeadGroup : public RecurrentGroup<T, S> {
    using Base = RecurrentGroup<T, S>;
    using Base::m_, Base::op_;
    using Place = MambaState<T, S>;

  public:
    HeadGroup(const Model& m, const Op& op, int64_t group, float* scratch)
        : Base(m, op, m.taps, m.conv_dim), shape_(block_shape<T, S>(m)), group_(group), heads_(shape_.heads),
          width_(heads_ * m.head), n_(m.state), x_at_(group * width_), out_(aligned(scratch)), x_(out_ + BLOCK * width_),
          b_(x_ + BLOCK * width_), c_(b_ + BLOCK * n_), steps_(c_ + BLOCK * n_), log_decays_(steps_ + BLOCK * heads_),
          blocks_(shape_, aligned(log_decays_ + BLOCK * heads_)) {
        const int64_t b_at = m.inner + group * n_;
        this->parts_[0] = {x_at_, width_, x_}, this->parts_[1] = {b_at, n_, b_};
        this->parts_[2] = {b_at + m.groups * n_, n_, c_};
        this->behind_[0] = {m.conv_dim + group * heads_, heads_, nullptr};
        this->spare_ = aligned(aligned(log_decays_ + BLOCK * heads_) + Blocks<T, S>::scratch(shape_));
    }

    static int64_t scratch(const Model& m) {  // floats; a vector that begins in the middle of a line costs two loads
        const BlockShape<T, S> shape = block_shape<T, S>(m);
        return BLOCK * 2 * (shape.heads * m.head + m.state + shape.heads) + Blocks<T, S>::scratch(shape)
            + Base::spare(shape.bytes() / 4, m.taps, m.conv_dim) + 3 * 16;
    }

    int64_t first_channel() const { return m_.inner; }  // gates come first
    int64_t step_width() const { return m_.conv_dim + m_.heads; }

    Place in_slot(int64_t slot) const {
        char* of_slot = reinterpret_cast<char*>(static_cast<S*>(op_.states) + slot * op_.state_stride);
        char* pending = of_slot + m_.groups * shape_.state_bytes() + group_ * 4 * shape_.pending_words;
        return place(Base::in_slot(slot).window, of_slot + group_ * shape_.state_bytes(), pending);
    }

    Place in_scratch() const {
        char* spare = reinterpret_cast<char*>(this->spare_);
        return place(reinterpret_cast<T*>(spare + shape_.bytes()), spare, spare + shape_.state_bytes());
    }

    const S* clear(Place to) const {
        Base::clear_window(to);
        to.pending.set_count(0);
        return nullptr;
    }

    void copy_window(Place from, Place to) const {  // and what is pending
        Base::copy_window(from, to);
        std::memcpy(to.pending.words, from.pending.words, 4 * shape_.pending_words);
    }

    void copy(Place from, Place to) const {
        copy_window(from, to);
        std::memcpy(to.states, from.states, shape_.state_bytes());
    }

    const S* settle(Place to, const S* before) const {
        if (!before) std::memset(to.states, 0, shape_.state_bytes());
        else if (before != to.states) std::memcpy(to.states, before, shape_.state_bytes());
        return to.states;
    }

    // `before` (null: zeros) is the state before the unfinished block. Returns where it is after these tokens.
    const S* advance_by(Place to, Projected in, const S* before) {
        if (in.tokens == 1) blocks_.prefetch(to.pending, before);
        this->convolve(to, in);
        discretise(in);
        const BlockTokens tokens{steps_, log_decays_, x_, b_, c_, op_.d + group_ * heads_};
        for (int64_t first = 0; first < in.tokens;) {
            const int64_t begin = to.pending.count(), count = std::min(in.tokens - first, GRID - begin);
            blocks_.take(to.pending, first, count, tokens);
            if (in.gated)
                blocks_.read(to.pending, begin, first, count, before, tokens, out_ + first * width_, [&](int64_t h, int64_t lane, int64_t t) ALWAYS {
                    prefetch_beside(in, first + t, h * m_.head + lane);
                });
            if (begin + count == GRID) blocks_.advance(to.pending, GRID, before, to.states), before = to.states;
            to.pending.set_count((begin + count) % GRID);
            first += count;
        }
        return before;
    }

    // A slot's state with its pending tokens, as [heads, head, n] in `plain`, or from it without any; `mark`: nothing but that it is plain.
    void to_plain(int64_t slot, S* plain) const {
        const Place at = in_slot(slot);
        const int64_t count = at.pending.count();
        if (count > 0) {
            uint32_t* b = at.pending.words + shape_.b_at;
            std::fill(b + count * shape_.row, b + GRID * shape_.row, 0);  // weights of 0 meet numbers
            blocks_.advance(at.pending, count, at.states, at.states);
        }
        blocks_.to_plain(at.states, plain);
    }
    void from_plain(int64_t slot, const S* plain) const {
        blocks_.from_plain(plain, in_slot(slot).states);
        in_slot(slot).pending.set_count(0);
    }
    bool is_plain(int64_t slot) const { return in_slot(slot).pending.count() == PLAIN; }
    void mark_plain(int64_t slot) const { in_slot(slot).pending.set_count(PLAIN); }

    // The block's outputs, gated and normalised, for the step's tokens from `token` on: to `mid`, or as the next product's
    // operand.
    void write(int64_t token, int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) {
            const float* gate = m_.wide + (token + t) * m_.ld + x_at_;
            const int64_t at = (token + t) * m_.operand_ld + x_at_;
            const int64_t mid = (token + t) * m_.mid_ld + x_at_;
            if (op_.target == MID && op_.bf16_rows) norm(t, gate, reinterpret_cast<uint16_t*>(m_.mid) + mid);
            else if (op_.target == MID) norm(t, gate, m_.mid + mid);
            else if (op_.kind == BF16) norm(t, gate, static_cast<uint16_t*>(m_.operand) + at);
            else norm(t, gate, static_cast<float*>(m_.operand) + at);
        }
    }

  private:
    static Place place(T* window, char* states, char* pending) {
        Place to;
        to.window = window, to.states = reinterpret_cast<S*>(states), to.pending = {reinterpret_cast<uint32_t*>(pending)};
        return to;
    }

    // Memory that is read afterwards: a token's gates; x, B and C of the next block.
    void prefetch_beside(Projected in, int64_t t, int64_t at) const {
        const float* rows = in.rows + t * in.ld;
        for (int64_t i = at; i < std::min(at + STATE_SLICE, width_); i += 16) {
            prefetch_far(rows - m_.inner + x_at_ + i);
            for (int part = 0; in.more && part < (i < n_ ? 3 : 1); part++)
                prefetch_far(rows + in.tokens * in.ld + this->parts_[part].begin + i);
        }
    }

    // Step sizes, and logarithms of decays.
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

    // One token's outputs times SiLU of their gates, divided by their root mean square.
    template <typename To>
    void norm(int64_t t, const float* gate, To* out) {
        float* y = out_ + t * width_;
        const float* weight = op_.norm + x_at_;
        Floats squares = zero();
        for (int64_t i = 0; i < width_; i += 16) {
            const Mask mask = lanes(width_ - i);
            const Floats g = load16(gate + i, mask), gated = load16(y + i, mask) * times_sigmoid_in<T>(g, g);
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

    const BlockShape<T, S> shape_;
    const int64_t group_, heads_, width_, n_;
    const int64_t x_at_;  // channel
    float *const out_, *const x_, *const b_, *const c_, *const steps_, *const log_decays_;
    const Blocks<T, S> blocks_;
};

// -- states as torch operations have them ------------------------------------------------------------------------------------

enum class Form : int64_t { BLOCKS = 0, PLAIN = 1, WRITTEN = 2 };  // WRITTEN: torch operations will write it without reading it

// Gives a slot's state of one layer this form, unless it has it. Its groups' memory overlaps that of other groups in the other form.
template <typename T, typename S>
void convert_state(const Model& m, const Op& op, int64_t slot, Form form, float* scratch) {
    S* plain = static_cast<S*>(op.states) + slot * op.state_stride;
    const int64_t each = m.heads / m.groups * m.head * m.state;
    const bool is_plain = HeadGroup<T, S>(m, op, 0, scratch).is_plain(slot);
    std::vector<S> copy;
    if (form == Form::BLOCKS && is_plain) copy.assign(plain, plain + m.groups * each);
    if (form == Form::PLAIN && !is_plain) copy.resize(m.groups * each);
    for (int64_t group = 0; group < m.groups; group++) {
        const HeadGroup<T, S> heads(m, op, group, scratch);
        if (form == Form::BLOCKS && is_plain) heads.from_plain(slot, copy.data() + group * each);
        if (form == Form::PLAIN && !is_plain) heads.to_plain(slot, copy.data() + group * each);
        if (form != Form::BLOCKS) heads.mark_plain(slot);
    }
    if (form == Form::PLAIN) std::copy(copy.begin(), copy.end(), plain);
}

}  // namespace
