// Work that a step leaves out because only some tokens' rows are read at its end, as in prompts.
//
// KEEP is before the output projection of the last mixer: from there on no token depends on another, and the operations
// are for the kept tokens only. That mixer itself reads every token, but only its outputs for the kept tokens are
// needed, and so are those outputs of its input projection that nothing else depends on: gates or queries, which come
// first.

#pragma once

#include <algorithm>
#include <cstdint>

#include "structs.h"

namespace {

class Kept {
  public:
    // Of a job whose first operation is `first`. If it runs no KEEP, or the step keeps all tokens, nothing is left out.
    Kept(const Model& m, const Step& step, int64_t first)
        : m_(m), tokens_(step.kept), tokens_end_(step.kept + step.kept_count), step_after_(step) {
        if (!step.keeps) return;
        for (keep_ = first; keep_ < m.count && m.ops[keep_].code != KEEP;) keep_++;
        if (keep_ == m.count) return;
        for (mixer_ = keep_ - 1; mixer_ >= 0 && !is_mixer(m.ops[mixer_]);) mixer_--;
        for (first_input_ = mixer_; first_input_ > 0 && is_mixer_input(m.ops[first_input_ - 1]);) first_input_--;
        step_after_.tokens = step.kept_count;
    }

    // The step of an operation after KEEP; null for the others.
    const Step* step_after(int64_t op) const { return op > keep_ ? &step_after_ : nullptr; }

    // The first of tokens [begin, end) whose outputs the mixer `op` has to compute; `end` if there is none.
    int64_t first_read(int64_t op, int64_t begin, int64_t end) const {
        if (op != mixer_) return begin;
        const int64_t* found = std::lower_bound(tokens_, tokens_end_, begin);
        return found == tokens_end_ ? end : std::min(*found, end);
    }

    // Whether nothing reads what operation `op` would make of this token: the conversion of the mixer's outputs.
    bool skips(int64_t op, int64_t token) const {
        return mixer_ < op && op < keep_ && !std::binary_search(tokens_, tokens_end_, token);
    }

    // Of the product `op`, the number of outputs, the first ones, that are read for kept tokens only.
    int64_t outputs_of_kept(int64_t op) const {
        if (op < first_input_ || op >= mixer_) return 0;
        return std::clamp<int64_t>(gate_or_query_outputs(m_.ops[mixer_]) - m_.ops[op].column, 0, m_.ops[op].weight.n);
    }

    // visit(from, to) for each run of neighbouring kept tokens in [begin, end).
    template <typename Visit>
    void each_run(int64_t begin, int64_t end, Visit&& visit) const {
        for (const int64_t* at = std::lower_bound(tokens_, tokens_end_, begin); at < tokens_end_ && *at < end;) {
            const int64_t from = *at;
            int64_t to = from;
            while (at < tokens_end_ && *at == to && to < end) at++, to++;
            visit(from, to);
        }
    }

  private:
    static bool is_mixer(const Op& op) {
        return op.code == MAMBA || op.code == DELTA || op.code == SHORT_CONV || op.code == ATTENTION;
    }
    static bool is_mixer_input(const Op& op) {
        return op.code == HEADS || op.code == NORM || (op.code == LINEAR && op.target == WIDE);
    }
    // Width of the mixer's gates or queries, which are the first part of its inputs (but not those of SHORT_CONV).
    int64_t gate_or_query_outputs(const Op& mixer) const {
        if (mixer.code == SHORT_CONV) return 0;
        if (mixer.code == MAMBA) return m_.inner;
        return mixer.code == DELTA ? mixer.delta->heads * mixer.delta->value
                                   : mixer.attention->q_heads * mixer.attention->width;
    }

    const Model& m_;
    const int64_t *tokens_, *tokens_end_;
    Step step_after_;
    // Indices of operations: KEEP, the mixer before it, and the first one that only computes this mixer's inputs.
    int64_t keep_ = INT64_MAX, mixer_ = INT64_MAX, first_input_ = INT64_MAX;
};

}  // namespace
