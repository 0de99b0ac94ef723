// What MAMBA, DELTA and SHORT_CONV share.

#pragma once

#include <algorithm>
#include <cstdint>

#include "structs.h"

namespace {

// Calls work(rows, ld) with where the outputs of a mixer are stored: in `mid`, or as the next product's operand.
template <typename F>
void with_outputs(const Model& m, const Op& op, F&& work) {
    if (op.target == MID && op.bf16_rows) work(reinterpret_cast<uint16_t*>(m.mid), m.mid_ld);
    else if (op.target == MID) work(m.mid, m.mid_ld);
    else if (op.kind == BF16) work(static_cast<uint16_t*>(m.operand), m.operand_ld);
    else work(static_cast<float*>(m.operand), m.operand_ld);
}

// The tokens of a row before which its window and state are also stored in other slots.
class RowSaves {
  public:
    RowSaves(const Step& step, int64_t row) : row_(row), first_(step.saves), last_(step.saves + step.save_count) {
        while (first_ < last_ && first_->row != row) first_++;
        while (first_ < last_ && last_[-1].row != row) last_--;
    }

    // The first token after `begin` before which the state is saved; at most `end`.
    int64_t next(int64_t begin, int64_t end) const {
        for (const Save* save = first_; save < last_; save++)
            if (save->row == row_ && begin < save->token) end = std::min(end, save->token);
        return end;
    }

    // visit(slot) for each slot in which the state before this token is saved.
    template <typename Visit>
    void each_slot(int64_t token, Visit&& visit) const {
        for (const Save* save = first_; save < last_; save++)
            if (save->row == row_ && save->token == token) visit(save->slot);
    }

  private:
    const int64_t row_;
    const Save *first_, *last_;  // those of the row are in [first, last)
};

}  // namespace
