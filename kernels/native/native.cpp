// Compiled code for CPUs: matrix products over packed weights, and a whole decode step or tower layer as one list of
// operations that a few threads process together, written with the vectors of vectors.h. README.md has layouts and
// maths.
//
// The order in which a row's values are computed depends on that row only: a request gets the same results in any
// batch, and with any number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "compact.h"
#include "delta.h"
#include "draft.h"
#include "experts.h"
#include "kept.h"
#include "layout.h"
#include "mamba.h"
#include "numbers.h"
#include "pack.h"
#include "products.h"
#include "products_amx.h"
#include "recurrent_rows.h"
#include "sample.h"
#include "scratch.h"
#include "short_conv.h"
#include "state_forms.h"
#include "structs.h"
#include "threads.h"
#include "tower.h"
#include "varlen.h"

namespace {

constexpr int64_t ROWS_PER_UNIT = 4;  // in operations with little work per row

// ADD_NORM: adds a row's norm to the residual stream.
void add_norm(const Model& m, const Op& op, int64_t row, float* scratch) {
    float* x = m.x + row * m.hidden;
    rms_norm(m.mid + row * m.mid_ld, op.norm, m.hidden, m.eps, scratch);
#pragma omp simd
    for (int64_t i = 0; i < m.hidden; i++) x[i] += op.scale * scratch[i];
}

// NORM, NORM_PAIR, CONVERT, ACTIVATE and GATE: one row of the operand of the next product.
void make_row(const Model& m, const Op& op, int64_t row, float* scratch) {
    const float* from = op.code == NORM      ? m.x + row * m.hidden
                        : op.code == CONVERT ? m.mid + row * m.mid_ld
                                             : m.wide + row * m.ld;
    const int64_t width = op.width;
    if (op.bf16_rows) {
        const uint16_t* rounded = op.code == CONVERT ? reinterpret_cast<uint16_t*>(m.mid) + row * m.mid_ld
                                                     : reinterpret_cast<uint16_t*>(m.wide) + row * width;
        auto* out = reinterpret_cast<int8_t*>(static_cast<uint16_t*>(m.operand) + row * m.operand_ld);
        return make_bytes_of_kind(rounded, width, op.kind, out, m.operand_scale + row);
    }
    if (op.norm &&
        (op.code == NORM || op.code == NORM_PAIR)) {  // a pair: two rows side by side, each with its own norm
        const int64_t part = op.code == NORM ? width : width / 2;
        for (int64_t i = 0; i < width; i += part) rms_norm(from + i, op.norm + i, part, m.eps, scratch + i);
        from = scratch;
    } else if (op.code == ACTIVATE && (op.activation || op.gated)) {
        activate_row(from, width, Activation(op.activation), op.gated, scratch);
        from = scratch;
    } else if (op.code == GATE) {
        gate_row(m, *op.attention, row, scratch);
        from = scratch;
    }
    make_operand(from, width, op.kind, m.operand, m.operand_ld, m.operand_scale, row);
}

// The product of a LINEAR.
Product product_of(const Model& m, const Op& op, const Step& step) {
    Product product{&op.weight, m.operand, m.operand_ld, m.operand_scale, m.wide, m.ld, STORE};
    product.activation = Activation(op.activation);
    if (op.weight.gated) product.outputs = op.target == INNER ? op.width : op.weight.n / 2;
    if (op.target == RESIDUAL)
        product.out = m.x, product.ldo = m.hidden, product.store = ADD, product.scale = op.scale,
        product.row_scale = op.row_scale;
    if (op.target == STREAM) product.out = m.x, product.ldo = m.hidden;
    if (op.target == LOGITS) product.out = step.logits, product.ldo = op.weight.n;
    if (op.target == WIDE) product.out = m.wide + op.column;
    if (op.target == MID) product.out = m.mid, product.ldo = m.mid_ld;
    if (op.target == INNER) {
        product.ldo = op.width, product.store = op.kind == BF16 || op.bf16_rows ? STORE_BF16 : STORE;
    } else if (op.width) {
        product.a = m.wide, product.lda = op.width;
    }
    return product;
}

// Number of independent groups of heads of a recurrent mixer; 0 for other operations.
int64_t groups_of(const Model& m, const Op& op) {
    return op.code == MAMBA ? m.groups : op.code == DELTA ? op.delta->key_heads : 0;
}

// Calls work(T(), S()), where windows have numbers of type T, and states of type S.
template <typename F>
auto with_types(const Model& m, F&& work) {
    if (m.stored_bf16 && m.states_bf16) return work(uint16_t(), uint16_t());
    if (m.stored_bf16) return work(uint16_t(), float());
    if (m.states_bf16) return work(float(), uint16_t());
    return work(float(), float());
}

// Calls work(group) with group number `group` of a recurrent mixer.
template <typename T, typename S, typename F>
void with_group_of(const Model& m, const Op& op, int64_t group, std::vector<float>& scratch, F&& work) {
    const int64_t needed = op.code == MAMBA ? HeadGroup<T, S>::scratch(m) : DeltaGroup<T, S>::scratch(*op.delta);
    float* const floats = grown(scratch, needed);
    if (op.code == MAMBA) work(HeadGroup<T, S>(m, op, group, floats));
    else work(DeltaGroup<T, S>(m, op, group, floats));
}

template <typename F>
void with_group(const Model& m, const Op& op, int64_t group, std::vector<float>& scratch, F&& work) {
    with_types(m, [&](auto window, auto state) {
        with_group_of<decltype(window), decltype(state)>(m, op, group, scratch, work);
    });
}

// Calls work(group) with some channels of a short convolution.
template <typename F>
void with_short_conv(const Model& m, const Op& op, int64_t group, F&& work) {
    if (m.stored_bf16) work(ShortConvGroup<uint16_t>(m, op, group));
    else work(ShortConvGroup<float>(m, op, group));
}

// Number of work units of an operation.
int64_t units_of(const Model& m, const Op& op, const Step& step) {
    switch (op.code) {
        case LINEAR: return Units(op.weight, step.tokens, m.threads).count;
        case MAMBA:
        case DELTA: return step.rows * groups_of(m, op);
        case SHORT_CONV: return step.rows * short_conv_groups(op);
        case ATTENTION: return AttentionUnits(m, *op.attention, step).count;
        case GROUP_PICKS: return 1;
        case ROUTE:
        case COMBINE: return step.tokens;
        case EMBED: return step.ids ? step.tokens : 0;
        case LARGEST: return step.largest ? step.tokens : 0;
        case KEEP: return step.keeps ? 1 : 0;
        case GATHER:
        case PICKED_ACTIVATE: return step.tokens * op.experts->chosen;
        case EXPERTS: return most_experts(op, step) * Units(op.weight, 1, m.threads, most_experts(op, step)).count;
        default: return (step.tokens + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT;
    }
}

// Operations [first, last) of a step.
class StepJob : public Job {
  public:
    StepJob(const Model& m, const Step& step, int64_t first, int64_t last)
        : m_(m), step_(step), kept_(m, step, first), first_(first), last_(last) {}
    int64_t phases() const override { return last_ - first_; }
    int64_t units(int64_t phase) const override { return units_of(m_, m_.ops[first_ + phase], step_of(phase)); }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        const Op& op = m_.ops[first_ + phase];
        const Step& step = step_of(phase);
        const int64_t route_floats = op.code == ROUTE ? 3 * op.experts->count : 0;
        float* const floats = grown(scratch, std::max(m_.ld, route_floats));
        switch (op.code) {
            case LINEAR: run_linear(phase, unit); break;
            case MAMBA:
            case DELTA: mix(first_ + phase, unit, scratch); break;
            case SHORT_CONV: convolve_row(first_ + phase, unit); break;
            case ATTENTION: attend(first_ + phase, unit, scratch); break;
            case ROUTE: route(m_, op, unit, floats); break;
            case GROUP_PICKS: group_picks(m_, op, step.tokens); break;
            case GATHER: gather(m_, op, unit); break;
            case EXPERTS: run_expert(m_, op, step, unit); break;
            case PICKED_ACTIVATE: activate_pick(m_, op, unit, floats); break;
            case COMBINE: combine(m_, op, unit, floats); break;
            case EMBED: embed(op, unit); break;
            case LARGEST: step.largest[unit] = first_largest(step.logits + unit * m_.vocab, m_.vocab); break;
            case KEEP: keep(op); break;
            default:
                for (int64_t row = ROWS_PER_UNIT * unit; row < std::min(step.tokens, ROWS_PER_UNIT * (unit + 1));
                     row++) {
                    if (kept_.skips(first_ + phase, row)) continue;
                    if (op.code == HEADS) prepare_heads(m_, *op.attention, step, row, floats);
                    else if (op.code == ADD_NORM) add_norm(m_, op, row, floats);
                    else make_row(m_, op, row, floats);
                }
        }
    }

  private:
    const Step& step_of(int64_t phase) const {
        const Step* after = kept_.step_after(first_ + phase);
        return after ? *after : step_;
    }

    // Moves the kept tokens' rows to the front: of the residual stream, and of the operand of the next product.
    void keep(const Op& op) const {
        const int64_t stride = m_.operand_ld * (op.kind == F32 ? 4 : 2);
        char* operand = static_cast<char*>(m_.operand);
        for (int64_t row = 0; row < step_.kept_count; row++) {
            const int64_t from = step_.kept[row];
            if (from == row) continue;
            std::memcpy(m_.x + row * m_.hidden, m_.x + from * m_.hidden, m_.hidden * sizeof(float));
            std::memcpy(operand + row * stride, operand + from * stride, stride);
            m_.operand_scale[row] = m_.operand_scale[from];
        }
    }

    void embed(const Op& op, int64_t token) const {
        float* x = m_.x + token * m_.hidden;
        const int64_t id = step_.ids[token], from = id * m_.hidden;
        const auto copy = [&](const auto* table) {
#pragma omp simd
            for (int64_t i = 0; i < m_.hidden; i++) x[i] = load(table + from, i);
        };
        if (op.weight.data) {
            table_row(op.weight, id, op.kind == BF16, x);
        } else if (op.kind == BF16) {
            copy(static_cast<const uint16_t*>(op.kv));
        } else {
            copy(static_cast<const float*>(op.kv));
        }
        if (op.scale == 1.0f) return;
        for (int64_t i = 0; i < m_.hidden; i++)
            x[i] = op.kind == BF16 ? bf16_to_float(float_to_bf16(op.scale * x[i])) : op.scale * x[i];
    }

    void run_linear(int64_t phase, int64_t unit) const {
        const Op& op = m_.ops[first_ + phase];
        const Step& step = step_of(phase);
        Product product = product_of(m_, op, step);
        for (int64_t i = first_ + phase + 1; i < last_ && !product.next; i++)
            if (m_.ops[i].code == LINEAR) product.next = &m_.ops[i].weight;
        const Units units(op.weight, step.tokens, m_.threads);
        if (units.end_of_outputs(unit) > kept_.outputs_of_kept(first_ + phase)) {
            run_unit(product, units, unit, step.tokens);
            return;
        }
        const auto [begin, end] = units.rows_of(unit, step.tokens);
        kept_.each_run(begin, end, [&](int64_t from, int64_t to) { run_rows(product, units, unit, from, to); });
    }

    void mix(int64_t index, int64_t unit, std::vector<float>& scratch) const {
        const Op& op = m_.ops[index];
        const int64_t groups = groups_of(m_, op), row = unit / groups;
        const int64_t first_read = kept_.first_read(index, step_.starts[row], step_.starts[row + 1]);
        with_group(m_, op, unit % groups, scratch, [&](auto group) {
            recurrent_row(m_, op, step_, row, first_read, group);
        });
    }

    void attend(int64_t index, int64_t unit, std::vector<float>& scratch) const {
        const auto first_read = [&](int64_t begin, int64_t end) { return kept_.first_read(index, begin, end); };
        if (m_.stored_bf16) attention<uint16_t>(m_, m_.ops[index], step_, unit, first_read, scratch);
        else attention<float>(m_, m_.ops[index], step_, unit, first_read, scratch);
    }

    void convolve_row(int64_t index, int64_t unit) const {
        const Op& op = m_.ops[index];
        const int64_t groups = short_conv_groups(op), row = unit / groups;
        const int64_t first_read = kept_.first_read(index, step_.starts[row], step_.starts[row + 1]);
        with_short_conv(m_, op, unit % groups, [&](auto group) { group.run(step_, row, first_read); });
    }

    const Model& m_;
    const Step& step_;
    const Kept kept_;
    const int64_t first_, last_;
};

// Advances states by steps of rings in each recurrent layer and each short convolution.
class AdvanceJob : public Job {
  public:
    AdvanceJob(const Model& m, int64_t rows, const Advance* jobs) : m_(m), rows_(rows), jobs_(jobs) {}
    int64_t phases() const override { return m_.count; }
    int64_t units(int64_t phase) const override {
        const Op& op = m_.ops[phase];
        return rows_ * (op.code == SHORT_CONV ? short_conv_groups(op) : groups_of(m_, op));
    }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        const Op& op = m_.ops[phase];
        if (op.code == SHORT_CONV) {
            const int64_t groups = short_conv_groups(op);
            with_short_conv(m_, op, unit % groups, [&](auto group) { group.advance(jobs_[unit / groups]); });
            return;
        }
        const int64_t groups = groups_of(m_, op);
        with_group(m_, op, unit % groups, scratch, [&](auto group) { advance_row(op, jobs_[unit / groups], group); });
    }

  private:
    const Model& m_;
    const int64_t rows_;
    const Advance* jobs_;
};

// Converts states to the form that compiled code or torch operations compute with.
class ConvertJob : public Job {
  public:
    ConvertJob(const Model& m, Form form, int64_t count, const int64_t* slots)
        : m_(m), form_(form), count_(count), slots_(slots) {}
    int64_t phases() const override { return m_.count; }
    int64_t units(int64_t phase) const override { return groups_of(m_, m_.ops[phase]) ? count_ : 0; }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        const Op& op = m_.ops[phase];
        with_types(m_, [&](auto window, auto state) {
            convert_state<decltype(state)>(op, groups_of(m_, op), slots_[unit], form_, [&](int64_t group, auto&& work) {
                with_group_of<decltype(window), decltype(state)>(m_, op, group, scratch, work);
            });
        });
    }

  private:
    const Model& m_;
    const Form form_;
    const int64_t count_;
    const int64_t* slots_;
};

// Converts x to the weight's operand form if necessary, then multiplies.
class LinearJob : public Job {
  public:
    LinearJob(
        const Product& product, const void* x, int64_t ldx, bool is_bf16, void* operand, float* scales, int64_t rows,
        int64_t threads
    )
        : product_(product), x_(x), ldx_(ldx), is_bf16_(is_bf16), operand_(operand), scales_(scales), rows_(rows),
          units_(*product.weight, rows, threads) {}
    int64_t phases() const override { return 2; }
    int64_t units(int64_t phase) const override { return phase ? units_.count : product_.a == operand_ ? rows_ : 0; }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        if (phase) {
            run_unit(product_, units_, unit, rows_);
            return;
        }
        const Weight& w = *product_.weight;
        const float* from = static_cast<const float*>(x_) + unit * ldx_;
        if (is_bf16_) {
            const uint16_t* bits = static_cast<const uint16_t*>(x_) + unit * ldx_;
            float* const widened = grown(scratch, w.k);
            for (int64_t i = 0; i < w.k; i++) widened[i] = bf16_to_float(bits[i]);
            from = widened;
        }
        make_operand(from, w.k, w.operand, operand_, product_.lda, scales_, unit);
    }

  private:
    const Product product_;
    const void* x_;
    const int64_t ldx_;
    const bool is_bf16_;
    void* operand_;
    float* scales_;
    const int64_t rows_;
    const Units units_;
};

class VarlenJob : public Job {
  public:
    explicit VarlenJob(const VarlenAttention& a) : a_(a) {}
    int64_t phases() const override { return 1; }
    int64_t units(int64_t) const override { return varlen_units(a_); }
    void run(int64_t, int64_t unit, std::vector<float>& scratch) const override { varlen_unit(a_, unit, scratch); }

  private:
    const VarlenAttention& a_;
};

// Why operations [first, last) cannot use these positions, or null if they can. `positions`: [tokens, axes] or null.
const char* position_error(
    const Model& m, int64_t first, int64_t last, const int64_t* positions, int64_t tokens, int64_t axes
) {
    for (int64_t i = first; i < last; i++) {
        const Op& op = m.ops[i];
        if (op.code != HEADS || !op.attention->pairs) continue;
        if (!positions) return "a layer reads positions, and there are none";
        return all_within(positions, tokens * axes, m.positions) ? nullptr : "a position is in no table";
    }
    return nullptr;
}

}  // namespace

extern "C" {

// The layout of the structs that Python mirrors; see layout.h.
const char* saccade_layout() { return layout_lines(); }

// Functions that return a string return null on success; otherwise it says which index is out of range.

// Runs the model's operations [first, last) on `m.x`.
const char* saccade_step(const Model* model, const Step* step, int64_t first, int64_t last) {
    if (step->ids && !all_within(step->ids, step->tokens, model->vocab)) return "a token is not in the vocabulary";
    if (const char* reason = position_error(*model, first, last, step->positions, step->tokens, step->axes))
        return reason;
    pool().run(StepJob(*model, *step, first, last), model->threads);
    return nullptr;
}

// Runs the tower's operations [first, last) on `step.x`.
void saccade_tower(const Tower* tower, const TowerStep* step, int64_t first, int64_t last) {
    pool().run(TowerJob(*tower, *step, first, last), tower->threads);
}

// Makes the due entries of a drafting head, then drafts; `model` has the operations of one pass of the head.
const char* saccade_draft(const Model* model, Step* step, const Drafting* drafting) {
    if (!all_within(drafting->ids, drafting->due + drafting->rows, model->vocab))
        return "a token is not in the vocabulary";
    const int64_t entries = drafting->due + drafting->passes * drafting->rows;
    if (const char* reason = position_error(*model, 0, model->count, drafting->positions, entries, drafting->axes))
        return reason;
    if (const char* reason =
            draw_error(drafting->draws, drafting->rows, model->vocab, drafting->draft_vocab, model->vocab))
        return reason;
    draft(*model, *drafting, *step, [&](int64_t first, int64_t last) {
        pool().run(StepJob(*model, *step, first, last), model->threads);
    });
    return nullptr;
}

// Advances states by steps of rings. jobs: [rows]
void saccade_advance(const Model* model, int64_t rows, const Advance* jobs) {
    pool().run(AdvanceJob(*model, rows, jobs), model->threads);
}

// Gives the states in these slots a form (`Form` in state_forms.h), in all layers.
void saccade_convert_states(const Model* model, int64_t form, int64_t count, const int64_t* slots) {
    pool().run(ConvertJob(*model, Form(form), count, slots), model->threads);
}

// Bytes of the state of an operation MAMBA or DELTA in a slot, with its pending tokens.
int64_t saccade_state_bytes(const Model* model, int64_t operation) {
    const Op& op = model->ops[operation];
    return with_types(*model, [&](auto window, auto state) {
        using T = decltype(window);
        using S = decltype(state);
        const auto shape = op.code == MAMBA ? HeadGroup<T, S>::shape(*model) : DeltaGroup<T, S>::shape(*op.delta);
        return groups_of(*model, op) * shape.bytes();
    });
}

// Attention within each of several packed sequences.
void saccade_varlen_attention(const VarlenAttention* attention, int64_t threads) {
    pool().run(VarlenJob(*attention), threads);
}

// Draws tokens [rows] from logits [rows, vocab]. For rows that ask for them: logprobs [rows]; top_ids and top [rows,
// width], the likeliest tokens and their log-probabilities. `draws` null: the largest of each row.
const char* saccade_sample(
    const float* logits, int64_t rows, int64_t vocab, const Draw* draws, int64_t* tokens, float* logprobs,
    int64_t* top_ids, float* top, int64_t width, int64_t threads
) {
    if (const char* reason = draw_error(draws, rows, vocab, vocab, logprobs ? width : -1)) return reason;
    pool().run(SampleJob(logits, rows, vocab, draws, tokens, logprobs, top_ids, top, width), std::min(rows, threads));
    return nullptr;
}

// Packs panels of a weight. Returns why the weight cannot be multiplied.
const char* saccade_pack(const Packing* packing, int64_t threads) {
    const PackJob job(*packing);
    pool().run(job, threads);
    return job.refused() & NOT_A_NUMBER ? "an e4m3 number is not a number"
           : job.refused()              ? "a scale is negative"
                                        : nullptr;
}

// Plain panels of bfloat16 to compact ones.
void saccade_compact(const Compacting* panels, int64_t threads) { pool().run(CompactJob(*panels), threads); }

// out[count, k]: the rows `ids` of a packed weight, all of which must exist.
void saccade_rows(const Weight* weight, const int64_t* ids, int64_t count, float* out, int64_t threads) {
    pool().run(TableJob(*weight, ids, count, out), threads);
}

// out[rows, n] = x[rows, k] W^T + b, `x` and `out` both float32 or both bfloat16.
void saccade_linear(
    const Weight* weight, const void* x, int64_t ldx, int64_t is_bf16, void* out, int64_t ldo, int64_t rows,
    int64_t activation, int64_t threads, void* operand, int64_t operand_ld, float* scales
) {
    const Weight& w = *weight;
    Product product{
        weight,
        operand,
        operand_ld,
        scales,
        out,
        ldo,
        is_bf16 ? STORE_BF16 : STORE,
        Activation(activation),
        w.gated ? ldo : w.n
    };
    if (is_bf16 ? w.operand == BF16 && w.k % 2 == 0 : w.operand == F32) product.a = x, product.lda = ldx;
    pool().run(LinearJob(product, x, ldx, is_bf16, operand, scales, rows, threads), threads);
}
}
