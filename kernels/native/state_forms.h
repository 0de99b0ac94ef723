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

// WRITTEN: torch operations will write it without reading it
enum class Form : int64_t { BLOCKS = 0, PLAIN = 1, WRITTEN = 2 };

struct PlainStrides {  // of a state in the form of torch operations: elements from a channel, or an input, to the next
    int64_t channel, input;
};

// One step of `each_number`: R rows of 16 channels, from row `at` on.
template <class Shape, typename S, int R, int V, typename P, typename F>
void one_number(P* slice, int64_t rest, int64_t at, int v, int64_t h, int64_t lane, F&& f) {
    Floats rows[R][1], sum[2][1] = {{zero()}, {zero()}};
    set_zero(rows);
    add_state<Shape, S, R, V>(slice, rest, at, v, splat(1.0f), rows);
    for (int r = 0; r < R; r++) sum[r][0] = rows[r][0];
    if (!f(sum, at, h, lane + 16 * v)) return;
    for (int r = 0; r < R; r++) rows[r][0] = sum[r][0];
    if constexpr (!std::is_const_v<P>) store_state<Shape, S, R, V>(slice, rest, at, v, rows);
}

// f(rows, input, head, channel): called with two rows of 16 channels at a time; returns whether they are to be stored.
template <class Cells, typename S, typename P, typename F>
void each_number(const BlockShape<Cells, S>& shape, P* state, F&& f) {
    using Shape = BlockShape<Cells, S>;
    shape.each_slice([&](int64_t h, int64_t lane, auto vectors) {
        constexpr int V = vectors();
        P* slice = shape.slice_of(state, h, lane);
        for (int64_t at = 0; at < shape.rows; at += 2)
            for (int v = 0; v < V; v++) {
                if (Shape::PAIRS || at + 2 <= shape.rows)
                    one_number<Shape, S, 2, V>(slice, shape.rest_at(), at, v, h, lane, f);
                else if constexpr (!Shape::PAIRS) one_number<Shape, S, 1, V>(slice, shape.rest_at(), at, v, h, lane, f);
            }
    });
}

template <class Cells, typename S>
int64_t plain_at(const BlockShape<Cells, S>& shape, PlainStrides strides, int64_t h, int64_t channel, int64_t input) {
    return h * shape.head * shape.n + channel * strides.channel + input * strides.input;
}

// Copies a state without pending tokens from its slices to numbers with these strides, and back.
template <class Cells, typename S>
void state_to_plain(const BlockShape<Cells, S>& shape, const S* state, PlainStrides strides, S* plain) {
    each_number(shape, state, [&](Floats(&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
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
    each_number(shape, state, [&](Floats(&sum)[2][1], int64_t at, int64_t h, int64_t lane) {
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
