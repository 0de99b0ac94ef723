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
    // Of a job whose first operation is `first`; all tokens are read if it runs no KEEP, or has nothing to keep.
    Kept(const Model& m, const Step& step, int64_t first)
        : m_(m), tokens_(step.kept), end_(step.kept + step.kept_count), after_(step) {
        if (!step.keeps) return;
        for (keep_ = first; keep_ < m.count && m.ops[keep_].code != KEEP;) keep_++;
        if (keep_ == m.count) return;
        for (mixer_ = keep_ - 1; mixer_ >= 0 && !mixes(m.ops[mixer_]);) mixer_--;
        for (entry_ = mixer_; entry_ > 0 && enters(m.ops[entry_ - 1]);) entry_--;
        after_.tokens = step.kept_count;
    }

    // The step of an operation after KEEP; null for the others.
    const Step* after(int64_t op) const { return op > keep_ ? &after_ : nullptr; }

    // The first of tokens [begin, end) whose outputs the mixer `op` has to compute; `end` if there is none.
    int64_t first_read(int64_t op, int64_t begin, int64_t end) const {
        if (op != mixer_) return begin;
        const int64_t* found = std::lower_bound(tokens_, end_, begin);
        return found == end_ ? end : std::min(*found, end);
    }

    // Whether nothing reads what operation `op` would make of this token: the conversion of the mixer's outputs.
    bool leaves_out(int64_t op, int64_t token) const {
        return mixer_ < op && op < keep_ && !std::binary_search(tokens_, end_, token);
    }

    // Of the product `op`, the number of outputs, the first ones, that are read for kept tokens only.
    int64_t outputs_of_kept(int64_t op) const {
        if (op < entry_ || op >= mixer_) return 0;
        return std::clamp<int64_t>(first_part(m_.ops[mixer_]) - m_.ops[op].column, 0, m_.ops[op].weight.n);
    }

    // visit(from, to) for each run of neighbouring kept tokens in [begin, end).
    template <typename Visit>
    void each_run(int64_t begin, int64_t end, Visit&& visit) const {
        for (const int64_t* at = std::lower_bound(tokens_, end_, begin); at < end_ && *at < end;) {
            const int64_t from = *at;
            int64_t to = from;
            while (at < end_ && *at == to && to < end) at++, to++;
            visit(from, to);
        }
    }

  private:
    static bool mixes(const Op& op) { return op.code == MAMBA || op.code == DELTA || op.code == ATTENTION; }
    static bool enters(const Op& op) {
        return op.code == HEADS || op.code == NORM || (op.code == LINEAR && op.target == WIDE);
    }
    int64_t first_part(const Op& mixer) const {
        if (mixer.code == MAMBA) return m_.inner;
        return mixer.code == DELTA ? mixer.delta->heads * mixer.delta->value
                                   : mixer.attention->q_heads * mixer.attention->width;
    }

    const Model& m_;
    const int64_t *tokens_, *end_;
    Step after_;
    // operations: KEEP, the mixer before it, the first for its inputs
    int64_t keep_ = INT64_MAX, mixer_ = INT64_MAX, entry_ = INT64_MAX;
};

}  // namespace
