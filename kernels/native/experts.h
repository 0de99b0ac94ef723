// A mixture of experts.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "activations.h"
#include "numbers.h"
#include "products.h"
#include "structs.h"

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The largest value's index, the lowest among equals; the value is then removed.
int64_t take_largest(float* values, int64_t count) {
    const int64_t best = std::max_element(values, values + count) - values;
    values[best] = -INFINITE;
    return best;
}

inline float sigmoid(float x) {  // NaN stays NaN
    const float y = 1.0f / (1.0f + fast_exp(-x));
    return x == x ? y : x;
}

// A token's experts (m.picks) and their weights (m.shares), from the router's products in `wide`. The correction is
// used for the choice only. `scratch`: [2 * count + groups].
void route(const Model& m, const Op& op, int64_t token, float* scratch) {
    const Experts& experts = *op.experts;
    const int64_t size = experts.count / experts.groups;
    const float* logits = m.wide + token * m.ld;
    float *scores = scratch, *choice = scores + experts.count, *group_score = choice + experts.count;
    if (experts.correction) {
#pragma omp simd
        for (int64_t e = 0; e < experts.count; e++) {
            scores[e] = sigmoid(logits[e]);
            const float corrected = scores[e] + experts.correction[e];
            choice[e] = corrected == corrected ? corrected : INFINITE;
        }
    } else {
        for (int64_t e = 0; e < experts.count; e++) {
            scores[e] = logits[e];
            choice[e] = scores[e] == scores[e] ? scores[e] : INFINITE;
        }
    }
    if (experts.kept < experts.groups) {
        for (int64_t g = 0; g < experts.groups; g++) {  // a group counts as much as its two best
            float first = -INFINITE, second = -INFINITE;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                second = std::max(second, std::min(first, choice[e]));
                first = std::max(first, choice[e]);
            }
            group_score[g] = size > 1 ? first + second : first;
        }
        for (int64_t i = 0; i < experts.kept; i++) take_largest(group_score, experts.groups);
        for (int64_t g = 0; g < experts.groups; g++)
            if (group_score[g] != -INFINITE) std::fill(choice + g * size, choice + (g + 1) * size, -INFINITE);
    }
    int64_t* picks = m.picks + token * experts.chosen;
    float *shares = m.shares + token * experts.chosen, sum = experts.correction ? experts.epsilon : 0.0f;
    for (int64_t i = 0; i < experts.chosen; i++) picks[i] = take_largest(choice, experts.count);
    std::sort(picks, picks + experts.chosen);
    if (!experts.correction) {  // a softmax; the largest exponent is 0
        float largest = -INFINITE;
        for (int64_t i = 0; i < experts.chosen; i++) largest = std::max(largest, scores[picks[i]]);
        for (int64_t i = 0; i < experts.chosen; i++) {
            float& score = scores[picks[i]];
            score = score == score ? fast_exp(score - largest) : score;
        }
    }
    for (int64_t i = 0; i < experts.chosen; i++) sum += shares[i] = scores[picks[i]];
    if (experts.shared) experts.shared[token] = sigmoid(logits[experts.count]);
    for (int64_t i = 0; i < experts.chosen; i++)
        shares[i] = (experts.normalise ? shares[i] / sum : shares[i]) * experts.scaling;
}

// Rows [begin, end) of picks, which are those of one expert.
struct ExpertRun {
    int64_t expert, begin, end;
};

inline ExpertRun* runs_of(const Model& m) { return reinterpret_cast<ExpertRun*>(m.runs + 1); }

// Assigns rows to all picks, expert by expert (m.places), and lists the experts that were picked (m.runs).
void group_picks(const Model& m, const Op& op, int64_t tokens) {
    const int64_t picks = tokens * op.experts->chosen;
    std::vector<int64_t> rows(op.experts->count);
    for (int64_t i = 0; i < picks; i++) rows[m.picks[i]]++;
    int64_t found = 0, begin = 0;
    for (int64_t e = 0; e < op.experts->count; e++) {
        if (!rows[e]) continue;
        const ExpertRun run{e, begin, begin + rows[e]};
        runs_of(m)[found++] = run;
        rows[e] = begin, begin = run.end;
    }
    m.runs[0] = found;
    for (int64_t i = 0; i < picks; i++) m.places[i] = rows[m.picks[i]]++;
}

// The row of a pick: its token's, as the operand of its expert's product.
void gather(const Model& m, const Op& op, int64_t pick) {
    const int64_t token = pick / op.experts->chosen;
    const float* from = op.target == WIDE ? m.wide + token * m.ld
                                          : static_cast<const float*>(m.operand) + token * m.operand_ld;
    make_operand(from, op.width, op.kind, m.picked, m.operand_ld, m.picked_scale, m.places[pick]);
}

// PICKED_ACTIVATE: the operand of a pick's second product.
inline void activate_pick(const Model& m, const Op& op, int64_t pick, float* scratch) {
    activate_row(m.picked_wide + pick * m.ld, op.width, Activation(op.activation), op.gated, scratch);
    make_operand(scratch, op.width, op.kind, m.picked, m.operand_ld, m.picked_scale, pick);
}

// Upper bound of the number of experts that a step may pick, so that fewer units are counted.
int64_t most_experts(const Op& op, const Step& step) {
    return std::min(op.experts->count, step.tokens * op.experts->chosen);
}

// Unit `unit` of the products of all experts that were picked.
void run_expert(const Model& m, const Op& op, const Step& step, int64_t unit) {
    const Units units(op.weight, 1, m.threads, most_experts(op, step));
    const int64_t index = unit / units.count;
    if (index >= m.runs[0]) return;
    const ExpertRun& run = runs_of(m)[index];
    const Weight* weight = (op.target == WIDE ? op.experts->up : op.experts->down) + run.expert;
    const Product product{weight,        m.picked, m.operand_ld, m.picked_scale,
                          m.picked_wide, m.ld,     STORE,        Activation(op.activation),
                          weight->n / 2};
    run_unit(product, units, unit % units.count, run.end - run.begin, run.begin);
}

// Sums the outputs of a token's experts, expert after expert.
void combine(const Model& m, const Op& op, int64_t token, float* sum) {
    const int64_t chosen = op.experts->chosen;
    std::fill(sum, sum + op.width, 0.0f);
    for (int64_t i = token * chosen; i < (token + 1) * chosen; i++) {
        const float *y = m.picked_wide + m.places[i] * m.ld, share = m.shares[i];
#pragma omp simd
        for (int64_t c = 0; c < op.width; c++) sum[c] += share * y[c];
    }
    if (op.target == MID) {
        std::memcpy(m.mid + token * m.mid_ld, sum, op.width * sizeof(float));
        return;
    }
    float* x = m.x + token * m.hidden;
#pragma omp simd
    for (int64_t c = 0; c < op.width; c++) x[c] += op.scale * sum[c];
}

}  // namespace
