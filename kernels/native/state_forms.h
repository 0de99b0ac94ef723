// The forms of a recurrent state: in blocks of tokens, and plain, as torch operations store it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "state_arithmetic.h"
#include "state_shape.h"
#include "structs.h"

namespace {

// PLAIN: as torch operations store it; WRITTEN: plain, but its numbers need not be converted, because torch operations
// will write them without reading them.
enum class Form : int64_t { BLOCKS = 0, PLAIN = 1, WRITTEN = 2 };

struct PlainStrides {  // of a state in the form of torch operations: elements from a channel, or an input, to the next
    int64_t channel, input;
};

// One step of `each_row_pair`: R rows of 16 channels, from row `at` on of vector `v` of a slice.
template <class Shape, typename S, int R, int V, typename P, typename F>
void visit_row_pair(P* slice, int64_t rest, int64_t at, int v, int64_t h, int64_t lane, F&& f) {
    Floats rows[R][1], sum[2][1] = {{zero()}, {zero()}};
    set_zero(rows);
    add_state<Shape, S, R, V>(slice, rest, at, v, splat(1.0f), rows);
    for (int r = 0; r < R; r++) sum[r][0] = rows[r][0];
    if (!f(sum, at, h, lane + 16 * v)) return;
    for (int r = 0; r < R; r++) rows[r][0] = sum[r][0];
    if constexpr (!std::is_const_v<P>) store_state<Shape, S, R, V>(slice, rest, at, v, rows);
}

// Calls f(rows, input, head, channel) for each two inputs and 16 channels of a state, from these on, with their numbers
// as two vectors. It returns whether to store them.
template <class Cells, typename S, typename P, typename F>
void each_row_pair(const BlockShape<Cells, S>& shape, P* state, F&& f) {
    using Shape = BlockShape<Cells, S>;
    shape.each_slice([&](int64_t h, int64_t lane, auto vectors) {
        constexpr int V = vectors();
        P* slice = shape.slice_of(state, h, lane);
        for (int64_t at = 0; at < shape.padded_n; at += 2)
            for (int v = 0; v < V; v++) {
                if (Shape::PAIRS || at + 2 <= shape.padded_n)
                    visit_row_pair<Shape, S, 2, V>(slice, shape.rest_at(), at, v, h, lane, f);
                else if constexpr (!Shape::PAIRS)
                    visit_row_pair<Shape, S, 1, V>(slice, shape.rest_at(), at, v, h, lane, f);
            }
    });
}

// Index of a number of a plain state.
template <class Cells, typename S>
int64_t plain_at(const BlockShape<Cells, S>& shape, PlainStrides strides, int64_t h, int64_t channel, int64_t input) {
    return h * shape.head * shape.n + channel * strides.channel + input * strides.input;
}

// Copies a state without pending tokens from its slices to numbers with these strides, and back.
template <class Cells, typename S>
void state_to_plain(const BlockShape<Cells, S>& shape, const S* state, PlainStrides strides, S* plain) {
    each_row_pair(shape, state, [&](Floats(&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
        alignas(64) float numbers[16];
        for (int64_t r = 0; r < 2 && at + r < shape.n; r++) {
            store_floats(numbers, sum[r][0]);
            for (int64_t i = 0; i < 16 && lane + i < shape.head; i++)
                store(plain, plain_at(shape, strides, h, lane + i, at + r), numbers[i]);
        }
        return false;
    });
}
template <class Cells, typename S>
void state_from_plain(const BlockShape<Cells, S>& shape, const S* plain, PlainStrides strides, S* state) {
    each_row_pair(shape, state, [&](Floats(&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
        for (int64_t r = 0; r < 2; r++) {
            alignas(64) float numbers[16] = {};
            for (int64_t i = 0; i < 16 && lane + i < shape.head && at + r < shape.n; i++)
                numbers[i] = load(plain, plain_at(shape, strides, h, lane + i, at + r));
            sum[r][0] = load_floats(numbers);
        }
        return true;
    });
}

// Converts a slot's state of one layer to this form, unless it has it. A group's memory in one form overlaps that of
// other groups in the other. with_group(group, work): calls work with one of the groups.
template <typename S, typename WithGroup>
void convert_state(const Op& op, int64_t groups, int64_t slot, Form form, WithGroup&& with_group) {
    S* plain = static_cast<S*>(op.states) + slot * op.state_stride;
    int64_t numbers_per_group = 0;
    bool is_plain = false;
    with_group(0, [&](const auto& group) { numbers_per_group = group.numbers(), is_plain = group.is_plain(slot); });
    std::vector<S> plain_copy;
    if (form == Form::BLOCKS && is_plain) plain_copy.assign(plain, plain + groups * numbers_per_group);
    if (form == Form::PLAIN && !is_plain) plain_copy.resize(groups * numbers_per_group);
    for (int64_t g = 0; g < groups; g++)
        with_group(g, [&](const auto& group) {
            if (form == Form::BLOCKS && is_plain) group.from_plain(slot, plain_copy.data() + g * numbers_per_group);
            if (form == Form::PLAIN && !is_plain) group.to_plain(slot, plain_copy.data() + g * numbers_per_group);
            if (form != Form::BLOCKS) group.mark_plain(slot);
        });
    if (form == Form::PLAIN) std::copy(plain_copy.begin(), plain_copy.end(), plain);
}

}  // namespace
