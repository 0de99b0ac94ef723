// Common parts of recurrent mixers: a group of heads, with its windows and states in slots.
//
// How a row is divided, and which code continues it, does not affect rounding: blocks of tokens end at fixed places of
// a sequence. States may be stored in bfloat16 (S); they are then rounded after every block.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "convolution.h"
#include "scratch.h"
#include "state_blocks.h"
#include "state_forms.h"
#include "state_shape.h"
#include "structs.h"

namespace {

// Where a row's state is stored: the window [taps - 1, channels], a group's states before the unfinished block, and the
// block's tokens.
template <typename T, typename S>
struct RowState {
    T* window;
    S* states;
    Pending pending;
};

// The channels and states of a group. Derived classes define how tokens advance them. In a slot, the states of all
// groups come before the pending tokens of all groups.
template <typename T, typename S>
class RecurrentGroup {
  public:
    using Place = RowState<T, S>;
    using Shape = BlockShape<StateCells<T>, S>;

    Place in_slot(int64_t slot) const {
        char* slot_memory = reinterpret_cast<char*>(static_cast<S*>(op_.states) + slot * op_.state_stride);
        char* pending = slot_memory + groups_ * shape_.state_bytes() + group_ * 4 * shape_.pending_words;
        return place(
            static_cast<T*>(op_.windows) + slot * op_.window_stride, slot_memory + group_ * shape_.state_bytes(),
            pending
        );
    }

    // In scratch memory, for rows that have no slot.
    Place in_scratch() const {
        char* memory = reinterpret_cast<char*>(slot_);
        return place(reinterpret_cast<T*>(memory + shape_.bytes()), memory, memory + shape_.state_bytes());
    }

    // Clears window and pending tokens; returns the states that a row then starts from: null, which means zeros.
    const S* clear(Place to) const {
        each_window_range([&](int64_t begin, int64_t count) { std::fill_n(to.window + begin, count, 0); });
        to.pending.set_count(0);
        return nullptr;
    }

    // Copies a row's states to its place, unless they are there already: `before` is where the row started from (null:
    // zeros). Returns the place's states.
    const S* copy_states(Place to, const S* before) const {
        if (!before) std::memset(to.states, 0, shape_.state_bytes());
        else if (before != to.states) std::memcpy(to.states, before, shape_.state_bytes());
        return to.states;
    }

    void copy(Place from, Place to) const {
        copy_window(from, to);
        std::memcpy(to.states, from.states, shape_.state_bytes());
    }

    void copy_window(Place from, Place to) const {  // and the pending tokens
        each_window_range([&](int64_t begin, int64_t count) {
            std::copy_n(from.window + begin, count, to.window + begin);
        });
        std::memcpy(to.pending.words, from.pending.words, 4 * shape_.pending_words);
    }

    // Conversions between a slot's state with its pending tokens and the form of torch operations. mark_plain only
    // records that the slot has that form.
    void to_plain(int64_t slot, S* plain) const {
        const Place at = in_slot(slot);
        const int64_t count = at.pending.count();
        if (count > 0) {
            // rows of missing tokens are multiplied by 0, so they must not be NaN
            std::fill(shape_.b_of(at.pending, count), shape_.b_of(at.pending, BLOCK_TOKENS), 0);
            blocks_.advance(at.pending, count, at.states, at.states);
        }
        state_to_plain(shape_, at.states, plain_, plain);
    }
    void from_plain(int64_t slot, const S* plain) const {
        state_from_plain(shape_, plain, plain_, in_slot(slot).states);
        in_slot(slot).pending.set_count(0);
    }
    bool is_plain(int64_t slot) const { return in_slot(slot).pending.count() == PLAIN; }
    void mark_plain(int64_t slot) const { in_slot(slot).pending.set_count(PLAIN); }
    int64_t numbers() const { return shape_.numbers(); }  // of a plain state

    // Copies the group's inputs of these tokens to a ring, whose steps have `step_width` numbers.
    void copy_to_ring(Projected in, float* ring, int64_t step_width) const {
        for (int64_t t = 0; t < in.tokens; t++) {
            for (const InputRange& range : channel_ranges_)
                std::copy_n(in.rows + t * in.ld + range.begin, range.count, ring + t * step_width + range.begin);
            for (const InputRange& range : other_ranges_)
                std::copy_n(in.rows + t * in.ld + range.begin, range.count, ring + t * step_width + range.begin);
        }
    }

  protected:
    using GroupBlocks = Blocks<StateCells<T>, S>;

    // `reads`: rows of C of a token. `scratch`: for the blocks, then for one slot (`slot_`), then for the derived class
    // (`rest_`), each aligned to 64 bytes.
    RecurrentGroup(
        const Model& m, const Op& op, int64_t group, int64_t groups, Shape shape, int64_t reads, PlainStrides plain,
        int64_t taps, int64_t channels, float* scratch
    )
        : m_(m), op_(op), shape_(shape), plain_(plain), group_(group), groups_(groups), taps_(taps),
          channels_(channels), blocks_(shape, reads, group + 1 < groups, aligned(scratch)),
          slot_(aligned(scratch) + GroupBlocks::scratch(shape, reads)),
          rest_(aligned(slot_ + scratch_floats(shape, taps, channels))) {}

    static int64_t scratch(Shape shape, int64_t reads, int64_t taps, int64_t channels) {  // floats
        return GroupBlocks::scratch(shape, reads) + scratch_floats(shape, taps, channels) + 2 * 16;
    }

    void convolve(RowState<T, S> place, Projected in) const {
        for (const InputRange& range : channel_ranges_)
            convolve_channels(op_, taps_, channels_, place.window + range.begin, in, range);
    }

    const Model& m_;
    const Op& op_;
    const Shape shape_;
    const PlainStrides plain_;
    const int64_t group_, groups_, taps_, channels_;
    // the group's channels, its inputs after the channels, and its gates, which are before the channels
    InputRange channel_ranges_[3] = {}, other_ranges_[2] = {}, gate_range_ = {};
    const GroupBlocks blocks_;
    float *const slot_, *const rest_;

  private:
    // For a state with its pending tokens, and a row's window.
    static int64_t scratch_floats(Shape shape, int64_t taps, int64_t channels) {
        return shape.bytes() / 4 + taps * channels;
    }

    static Place place(T* window, char* states, char* pending) {
        return {window, reinterpret_cast<S*>(states), {reinterpret_cast<uint32_t*>(pending)}};
    }

    template <typename F>
    void each_window_range(F&& visit) const {
        for (int64_t tap = 0; tap + 1 < taps_; tap++)
            for (const InputRange& range : channel_ranges_) visit(tap * channels_ + range.begin, range.count);
    }
};

}  // namespace
