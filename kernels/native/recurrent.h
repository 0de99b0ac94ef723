// Common parts of recurrent mixers: rows of tokens on slots of windows and states, one group of heads at a time.
//
// How a row is divided, and which code continues it, does not affect rounding: blocks of tokens end at fixed places of a sequence.
// States may be stored in bfloat16 (S); they are then rounded after every block.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "activations.h"
#include "cells.h"
#include "numbers.h"
#include "state_blocks.h"
#include "structs.h"

namespace {

constexpr int64_t BLOCK = 32;  // tokens of a row that a group of heads works through at a time

struct Projected {  // of a few tokens, `ld` apart: the channels before the convolution, then the inputs behind them
    const float* rows;
    int64_t ld, tokens;
    bool gated, more;  // gates lie before the channels, and are read next; as many tokens behind these come after that
};

template <typename T, typename S>
struct RowState {  // a row's window [taps - 1, channels]; a group's states before the unfinished block, and the block's tokens
    T* window;
    S* states;
    Pending pending;
};

struct Part {  // some of the channels, or of the inputs behind them
    int64_t begin, count;
    float* out;  // where the convolution's outputs go, [tokens, count]
};

// log(1 + exp(x)) within 4 ulp: max(x, 0) + 2 artanh(z / (2 + z)) with z = exp(-|x|).
inline Floats softplus16(Floats x) {
    const Floats z = exp16(zero() - magnitude(x));
    const Floats s = z / (z + splat(2.0f)), square = s * s;
    Floats p = splat(2.0f / 15);
    for (float c : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3})
        p = fmadd(p, square, splat(c));
    const Floats rest = fmadd(p * square, s, s + s);
    return larger(zero(), x) + rest;
}

inline float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

enum class Form : int64_t { BLOCKS = 0, PLAIN = 1, WRITTEN = 2 };  // WRITTEN: torch operations will write it without reading it

// The channels and states of a group. Derived classes define how tokens advance them. In a slot, the states of all groups come before the
// pending tokens of all groups.
template <typename T, typename S>
class RecurrentGroup {
  public:
    using Place = RowState<T, S>;

    Place in_slot(int64_t slot) const {
        char* of_slot = reinterpret_cast<char*>(static_cast<S*>(op_.states) + slot * op_.state_stride);
        char* pending = of_slot + groups_ * shape_.state_bytes() + group_ * 4 * shape_.pending_words;
        return place(static_cast<T*>(op_.windows) + slot * op_.window_stride, of_slot + group_ * shape_.state_bytes(), pending);
    }

    // Memory without an owner.
    Place in_scratch() const {
        char* spare = reinterpret_cast<char*>(spare_);
        return place(reinterpret_cast<T*>(spare + shape_.bytes()), spare, spare + shape_.state_bytes());
    }

    // Zeros; returns the states that a row then starts from.
    const S* clear(Place to) const {
        each_of_window([&](int64_t begin, int64_t count) { std::fill_n(to.window + begin, count, 0); });
        to.pending.set_count(0);
        return nullptr;
    }

    // Has a row's states in its place, if they are still where it started from. Returns them.
    const S* settle(Place to, const S* before) const {
        if (!before) std::memset(to.states, 0, shape_.state_bytes());
        else if (before != to.states) std::memcpy(to.states, before, shape_.state_bytes());
        return to.states;
    }

    void copy(Place from, Place to) const {
        copy_window(from, to);
        std::memcpy(to.states, from.states, shape_.state_bytes());
    }

    void copy_window(Place from, Place to) const {  // and what is pending
        each_of_window([&](int64_t begin, int64_t count) { std::copy_n(from.window + begin, count, to.window + begin); });
        std::memcpy(to.pending.words, from.pending.words, 4 * shape_.pending_words);
    }

    // A slot's state with its pending tokens in the form of torch operations, or from it without any; `mark`: nothing but that it is plain.
    void to_plain(int64_t slot, S* plain) const {
        const Place at = in_slot(slot);
        const int64_t count = at.pending.count();
        if (count > 0) {
            uint32_t* b = at.pending.words + shape_.b_at;
            std::fill(b + count * shape_.row, b + GRID * shape_.row, 0);  // weights of 0 meet numbers
            blocks_.advance(at.pending, count, at.states, at.states);
        }
        blocks_.to_plain(at.states, plain_, plain);
    }
    void from_plain(int64_t slot, const S* plain) const {
        blocks_.from_plain(plain, plain_, in_slot(slot).states);
        in_slot(slot).pending.set_count(0);
    }
    bool is_plain(int64_t slot) const { return in_slot(slot).pending.count() == PLAIN; }
    void mark_plain(int64_t slot) const { in_slot(slot).pending.set_count(PLAIN); }
    int64_t numbers() const { return shape_.heads * shape_.head * shape_.n; }  // of a plain state

    // Copies a row's inputs of this group to a ring, whose steps have `wide` numbers.
    void keep(Projected in, float* ring, int64_t wide) const {
        for (int64_t t = 0; t < in.tokens; t++) {
            for (const Part& part : parts_) std::copy_n(in.rows + t * in.ld + part.begin, part.count, ring + t * wide + part.begin);
            for (const Part& part : behind_) std::copy_n(in.rows + t * in.ld + part.begin, part.count, ring + t * wide + part.begin);
        }
    }

  protected:
    // `reads`: rows of C of a token. Scratch memory is aligned; what remains of it begins at `rest_`.
    RecurrentGroup(
        const Model& m, const Op& op, int64_t group, int64_t groups, BlockShape<T, S> shape, int64_t reads, PlainStrides plain, int64_t taps,
        int64_t channels, float* scratch
    )
        : m_(m), op_(op), shape_(shape), plain_(plain), group_(group), groups_(groups), taps_(taps), channels_(channels),
          blocks_(shape, reads, group + 1 < groups, aligned(scratch)), spare_(aligned(scratch) + Blocks<T, S>::scratch(shape, reads)),
          rest_(aligned(spare_ + spare(shape, taps, channels))) {}

    static int64_t scratch(BlockShape<T, S> shape, int64_t reads, int64_t taps, int64_t channels) {  // floats
        return Blocks<T, S>::scratch(shape, reads) + spare(shape, taps, channels) + 2 * 16;
    }

    // Memory that is read afterwards: a token's gates for a slice of the group's outputs, and as many inputs of the next block.
    void prefetch_beside(Projected in, int64_t t, int64_t output) const {
        const float* rows = in.rows + t * in.ld;
        for (int64_t i = output; i < std::min(output + STATE_SLICE, gates_.count); i += 16) {
            prefetch_far(rows + gates_.begin + i);
            for (const Part& part : parts_)
                if (in.more && i < part.count) prefetch_far(rows + in.tokens * in.ld + part.begin + i);
        }
    }

    void convolve(RowState<T, S> place, Projected in) const {
        for (const Part& part : parts_) {
            T* window = place.window + part.begin;
            if (taps_ == 4) convolve<3>(window, in, part);
            else if (taps_ == 3) convolve<2>(window, in, part);
            else convolve<1>(window, in, part);
        }
    }

    const Model& m_;
    const Op& op_;
    const BlockShape<T, S> shape_;
    const PlainStrides plain_;
    const int64_t group_, groups_, taps_, channels_;
    Part parts_[3] = {}, behind_[2] = {}, gates_ = {};  // of the channels; of the inputs behind them; of the gates before them
    const Blocks<T, S> blocks_;
    float *const spare_, *const rest_;

  private:
    static int64_t spare(BlockShape<T, S> shape, int64_t taps, int64_t channels) { return shape.bytes() / 4 + taps * channels; }  // floats

    static Place place(T* window, char* states, char* pending) {
        return {window, reinterpret_cast<S*>(states), {reinterpret_cast<uint32_t*>(pending)}};
    }

    template <typename F>
    void each_of_window(F&& visit) const {
        for (int64_t tap = 0; tap + 1 < taps_; tap++)
            for (const Part& part : parts_) visit(tap * channels_ + part.begin, part.count);
    }

    // KEEP + 1 taps, then SiLU. An input is rounded to the window's type once it is no longer the newest.
    template <int KEEP>
    void convolve(T* window, Projected in, const Part& part) const {
        for (int64_t i = 0; i < part.count; i += 16) {
            const Mask mask = lanes(part.count - i);
            const float* weights = op_.conv + part.begin + i;
            const Floats bias = op_.conv_bias ? load16(op_.conv_bias + part.begin + i, mask) : zero();
            Floats weight[KEEP + 1], past[KEEP];
            for (int k = 0; k <= KEEP; k++) weight[k] = load16(weights + k * channels_, mask);
            for (int k = 0; k < KEEP; k++) {
                past[k] = load16(window + k * channels_ + i, mask);
                if (in.tokens == 1) prefetch_far(window + k * channels_ + i + part.count);  // the next group's
            }
            for (int64_t t = 0; t < in.tokens; t++) {
                prefetch_near(in.rows + t * in.ld + part.begin + i + 16);  // rows are too far apart for the processor's own prefetchers
                const Floats x = load16(in.rows + t * in.ld + part.begin + i, mask);
                Floats sum = fmadd(weight[KEEP], x, bias);
                for (int k = 0; k < KEEP; k++) sum = fmadd(weight[k], past[k], sum);
                for (int k = 0; k + 1 < KEEP; k++) past[k] = past[k + 1];
                past[KEEP - 1] = kept16(window, x);
                store16(part.out + t * part.count + i, mask, times_sigmoid_in<T>(sum, sum));
            }
            for (int k = 0; k < KEEP; k++) store16(window + k * channels_ + i, mask, past[k]);
        }
    }
};

// -- rows --------------------------------------------------------------------------------------------------------------------

// A group also has: first_channel() and step_width(), the index of a token's channels in `wide` and the number of its
// inputs; advance_by(place, in, before), which advances by a block of tokens from the states `before`, returns where they are
// afterwards, and keeps the outputs of the heads for write(token, tokens), which stores them as the step's tokens from `token` on.

// The first `count` steps of a batch slot's ring, applied to a place; their outputs are not computed.
template <typename Group, typename Place>
void replay(const Op& op, Group& group, Place place, int64_t batch_slot, int64_t count) {
    group.advance_by(place, {op.ring + batch_slot * op.ring_stride, group.step_width(), count, false, false}, place.states);
}

// A row whose tokens may be rejected: the ring's steps are applied to the slot, whose state then does not change; the row's
// inputs start the ring anew.
template <typename Group>
void row_on_ring(const Model& m, const Op& op, const Step& step, int64_t row, Group& group) {
    const int64_t begin = step.starts[row], batch_slot = step.batch_slots[row];
    const Projected in{m.wide + begin * m.ld + group.first_channel(), m.ld, step.starts[row + 1] - begin, true, false};
    const auto slot = group.in_slot(step.slots[row]), place = group.in_scratch();
    if (step.counts[row]) replay(op, group, slot, batch_slot, step.counts[row]);
    group.copy_window(slot, place);
    group.keep(in, op.ring + batch_slot * op.ring_stride, group.step_width());
    group.advance_by(place, in, slot.states);
    group.write(begin, in.tokens);
}

// Outputs are computed of tokens from `first_read` on.
template <typename Group>
void recurrent_row(const Model& m, const Op& op, const Step& step, int64_t row, int64_t first_read, Group group) {
    if (step.batch_slots && step.batch_slots[row] >= 0) {
        row_on_ring(m, op, step, row, group);
        return;
    }
    const int64_t slot = step.slots[row], last = step.starts[row + 1];
    const auto place = slot < 0 ? group.in_scratch() : group.in_slot(slot);  // padding: zeros that nobody keeps
    const auto* before = place.states;
    if (step.from && step.from[row] >= 0 && step.from[row] != slot) {
        group.copy_window(group.in_slot(step.from[row]), place);
        before = group.in_slot(step.from[row]).states;
    }
    if (slot < 0 || !step.initial[row]) before = group.clear(place);
    for (int64_t begin = step.starts[row]; begin < last;) {
        int64_t end = std::min(last, begin + BLOCK);
        const bool is_read = begin >= first_read;
        if (!is_read) end = std::min(end, first_read);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && begin < save[1] && save[1] < end) end = save[1];
        }
        const float* rows = m.wide + begin * m.ld + group.first_channel();
        before = group.advance_by(place, {rows, m.ld, end - begin, is_read, last - end >= end - begin}, before);
        if (is_read) group.write(begin, end - begin);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] != row || save[1] != end) continue;
            before = group.settle(place, before);
            group.copy(place, group.in_slot(save[2]));
        }
        begin = end;
    }
    if (slot >= 0) group.settle(place, before);
}

// The state in a slot, after the first steps of a ring, is stored in a target. job: batch slot, slot, target, steps.
template <typename Group>
void advance_row(const Op& op, const int64_t* job, Group group) {
    const auto target = group.in_slot(job[2]);
    if (job[1] >= 0 && job[1] != job[2]) group.copy(group.in_slot(job[1]), target);
    replay(op, group, target, job[0], job[3]);
}

// -- states as torch operations have them ------------------------------------------------------------------------------------

// Gives a slot's state of one layer this form, unless it has it. Its groups' memory overlaps that of other groups in the other form.
// with_group(group, work): calls work with one of the groups.
template <typename S, typename WithGroup>
void convert_state(const Op& op, int64_t groups, int64_t slot, Form form, WithGroup&& with_group) {
    S* plain = static_cast<S*>(op.states) + slot * op.state_stride;
    int64_t each = 0;
    bool is_plain = false;
    with_group(0, [&](const auto& group) { each = group.numbers(), is_plain = group.is_plain(slot); });
    std::vector<S> copy;
    if (form == Form::BLOCKS && is_plain) copy.assign(plain, plain + groups * each);
    if (form == Form::PLAIN && !is_plain) copy.resize(groups * each);
    for (int64_t g = 0; g < groups; g++)
        with_group(g, [&](const auto& group) {
            if (form == Form::BLOCKS && is_plain) group.from_plain(slot, copy.data() + g * each);
            if (form == Form::PLAIN && !is_plain) group.to_plain(slot, copy.data() + g * each);
            if (form != Form::BLOCKS) group.mark_plain(slot);
        });
    if (form == Form::PLAIN) std::copy(copy.begin(), copy.end(), plain);
}

}  // namespace
