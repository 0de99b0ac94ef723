// The tokens of a row, and of a ring, for one group of a recurrent layer's heads.

#pragma once

#include <algorithm>
#include <cstdint>

#include "convolution.h"
#include "mixers.h"
#include "state_shape.h"
#include "structs.h"

namespace {

// `Group` is HeadGroup or DeltaGroup. Besides what RecurrentGroup has:
//   first_channel(): the index of a token's channels in its row of `wide`; step_width(): the number of its inputs from
//   there on;
//   advance_by(place, in, before): advances the states `before` by at most BLOCK_TOKENS tokens, and returns where they
//   are afterwards: still `before`, or the place's;
//   write(token, tokens): stores the outputs of the last advance_by as those of the step's tokens from `token` on.

// The first `count` steps of a batch slot's ring, applied to a place; their outputs are not computed.
template <typename Group, typename Place>
void replay(const Op& op, Group& group, Place place, int64_t batch_slot, int64_t count) {
    group.advance_by(
        place, {op.ring + batch_slot * op.ring_stride, group.step_width(), count, false, false}, place.states
    );
}

// A row whose tokens may be rejected: the ring's steps are applied to the slot, whose state then does not change; the
// row's inputs start the ring anew. Neither the ring nor the row has more than BLOCK_TOKENS tokens.
template <typename Group>
void row_on_ring(const Model& m, const Op& op, const Step& step, int64_t row, Group& group) {
    const int64_t begin = step.starts[row], batch_slot = step.batch_slots[row];
    const Projected in{m.wide + begin * m.ld + group.first_channel(), m.ld, step.starts[row + 1] - begin, true, false};
    const auto slot = group.in_slot(step.slots[row]), place = group.in_scratch();
    if (step.counts[row]) replay(op, group, slot, batch_slot, step.counts[row]);
    group.copy_window(slot, place);
    group.copy_to_ring(in, op.ring + batch_slot * op.ring_stride, group.step_width());
    group.advance_by(place, in, slot.states);
    group.write(begin, in.tokens);
}

// One row of a step. Outputs are computed only for tokens from `first_read` on.
template <typename Group>
void recurrent_row(const Model& m, const Op& op, const Step& step, int64_t row, int64_t first_read, Group group) {
    if (step.batch_slots && step.batch_slots[row] >= 0) {
        row_on_ring(m, op, step, row, group);
        return;
    }
    const int64_t slot = step.slots[row], last = step.starts[row + 1];
    // Slot -1 is padding: its state starts from zeros and is not kept.
    const auto place = slot < 0 ? group.in_scratch() : group.in_slot(slot);
    const auto* before = place.states;
    if (step.origins && step.origins[row] >= 0 && step.origins[row] != slot) {
        group.copy_window(group.in_slot(step.origins[row]), place);
        before = group.in_slot(step.origins[row]).states;
    }
    if (slot < 0 || !step.initial[row]) before = group.clear(place);
    const RowSaves saves(step, row);
    for (int64_t begin = step.starts[row]; begin < last;) {
        int64_t end = std::min(last, begin + BLOCK_TOKENS);
        const bool is_read = begin >= first_read;
        if (!is_read) end = std::min(end, first_read);
        end = saves.next(begin, end);
        const float* rows = m.wide + begin * m.ld + group.first_channel();
        before = group.advance_by(place, {rows, m.ld, end - begin, is_read, last - end >= end - begin}, before);
        if (is_read) group.write(begin, end - begin);
        saves.each_slot(end, [&](int64_t saved) {
            before = group.copy_states(place, before);
            group.copy(place, group.in_slot(saved));
        });
        begin = end;
    }
    if (slot >= 0) group.copy_states(place, before);
}

template <typename Group>
void advance_row(const Op& op, const Advance& job, Group group) {
    const auto target = group.in_slot(job.target);
    if (job.slot >= 0 && job.slot != job.target) group.copy(group.in_slot(job.slot), target);
    replay(op, group, target, job.batch_slot, job.steps);
}

}  // namespace
