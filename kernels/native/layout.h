// The layout of the structs that Python mirrors, from the compiler: layout.py compares it with structs.py and tower.py
// when the library is loaded. One line each: "Struct size", "Struct.field offset size", "Enum.NAME value".

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "compact.h"
#include "draft.h"
#include "pack.h"
#include "products.h"
#include "sample.h"
#include "scaled.h"
#include "state_forms.h"
#include "structs.h"
#include "tower.h"

namespace {

class Layout {
  public:
    void add(const char* name, int64_t value) { lines_ += std::string(name) + " " + std::to_string(value) + "\n"; }
    void add(const char* name, int64_t offset, int64_t size) {
        lines_ += std::string(name) + " " + std::to_string(offset) + " " + std::to_string(size) + "\n";
    }
    const std::string& lines() const { return lines_; }

  private:
    std::string lines_;
};

#define STRUCT(S) layout.add(#S, sizeof(S))
#define FIELD(S, member) layout.add(#S "." #member, offsetof(S, member), sizeof(S::member))
#define VALUE_AS(E, value, name) layout.add(#E "." #name, int64_t(value))
#define VALUE(E, name) VALUE_AS(E, name, name)

// clang-format off: tables of names

void add_weight(Layout& layout) {
    STRUCT(Weight);
    FIELD(Weight, kind); FIELD(Weight, n); FIELD(Weight, k); FIELD(Weight, kpad); FIELD(Weight, data);
    FIELD(Weight, scale); FIELD(Weight, bias); FIELD(Weight, gated); FIELD(Weight, operand); FIELD(Weight, group);
    FIELD(Weight, zeros); FIELD(Weight, outer); FIELD(Weight, bf16_scale);
    FIELD(Weight, compact); FIELD(Weight, exceptions);
}

void add_experts(Layout& layout) {
    STRUCT(Experts);
    FIELD(Experts, count); FIELD(Experts, chosen); FIELD(Experts, groups); FIELD(Experts, kept);
    FIELD(Experts, normalise); FIELD(Experts, scaling); FIELD(Experts, epsilon); FIELD(Experts, correction);
    FIELD(Experts, up); FIELD(Experts, down); FIELD(Experts, shared);
}

void add_attention_shape(Layout& layout) {
    STRUCT(AttentionShape);
    FIELD(AttentionShape, q_heads); FIELD(AttentionShape, kv_heads); FIELD(AttentionShape, width);
    FIELD(AttentionShape, scale); FIELD(AttentionShape, norm_eps); FIELD(AttentionShape, q_norm);
    FIELD(AttentionShape, k_norm); FIELD(AttentionShape, pairs); FIELD(AttentionShape, rotations);
    FIELD(AttentionShape, axes); FIELD(AttentionShape, column); FIELD(AttentionShape, norm_whole);
    FIELD(AttentionShape, window); FIELD(AttentionShape, head_gate);
}

void add_delta_shape(Layout& layout) {
    STRUCT(DeltaShape);
    FIELD(DeltaShape, key_heads); FIELD(DeltaShape, heads); FIELD(DeltaShape, key); FIELD(DeltaShape, value);
    FIELD(DeltaShape, taps);
    FIELD(DeltaShape, eps); FIELD(DeltaShape, beta_scale);
}

void add_op(Layout& layout) {
    STRUCT(Op);
    FIELD(Op, code); FIELD(Op, kind); FIELD(Op, width); FIELD(Op, weight); FIELD(Op, target); FIELD(Op, norm);
    FIELD(Op, windows); FIELD(Op, window_stride); FIELD(Op, states); FIELD(Op, state_stride); FIELD(Op, conv);
    FIELD(Op, conv_bias); FIELD(Op, a); FIELD(Op, d); FIELD(Op, dt_bias); FIELD(Op, kv); FIELD(Op, kv_stride);
    FIELD(Op, ring); FIELD(Op, ring_stride); FIELD(Op, experts); FIELD(Op, delta); FIELD(Op, first_key);
    FIELD(Op, attention); FIELD(Op, activation); FIELD(Op, gated); FIELD(Op, scale); FIELD(Op, row_scale);
    FIELD(Op, column); FIELD(Op, bf16_rows); FIELD(Op, taps); FIELD(Op, norm_first);
}

void add_model(Layout& layout) {
    STRUCT(Model);
    FIELD(Model, count); FIELD(Model, ops); FIELD(Model, threads); FIELD(Model, hidden); FIELD(Model, vocab);
    FIELD(Model, heads); FIELD(Model, head); FIELD(Model, groups); FIELD(Model, state); FIELD(Model, taps);
    FIELD(Model, conv_dim); FIELD(Model, inner); FIELD(Model, page); FIELD(Model, positions);
    FIELD(Model, stored_bf16); FIELD(Model, states_bf16); FIELD(Model, eps); FIELD(Model, dt_low);
    FIELD(Model, dt_high);
    FIELD(Model, x); FIELD(Model, wide); FIELD(Model, mid); FIELD(Model, ld); FIELD(Model, mid_ld);
    FIELD(Model, operand);
    FIELD(Model, operand_ld); FIELD(Model, operand_scale); FIELD(Model, picks); FIELD(Model, places);
    FIELD(Model, shares); FIELD(Model, runs); FIELD(Model, picked); FIELD(Model, picked_scale);
    FIELD(Model, picked_wide);
}

void add_step(Layout& layout) {
    STRUCT(Step);
    FIELD(Step, tokens); FIELD(Step, rows); FIELD(Step, starts); FIELD(Step, slots); FIELD(Step, initial);
    FIELD(Step, save_count); FIELD(Step, saves); FIELD(Step, lengths); FIELD(Step, tables); FIELD(Step, places);
    FIELD(Step, table_stride); FIELD(Step, logits); FIELD(Step, origins); FIELD(Step, batch_slots);
    FIELD(Step, counts); FIELD(Step, scans); FIELD(Step, scan_computed); FIELD(Step, scan_tables);
    FIELD(Step, scan_table_stride); FIELD(Step, ids); FIELD(Step, largest); FIELD(Step, positions);
    FIELD(Step, axes); FIELD(Step, keeps); FIELD(Step, kept); FIELD(Step, kept_count);
}

void add_varlen_attention(Layout& layout) {
    STRUCT(VarlenAttention);
    FIELD(VarlenAttention, q); FIELD(VarlenAttention, k); FIELD(VarlenAttention, v); FIELD(VarlenAttention, out);
    FIELD(VarlenAttention, stride); FIELD(VarlenAttention, head_stride); FIELD(VarlenAttention, out_stride);
    FIELD(VarlenAttention, stored_bf16); FIELD(VarlenAttention, out_bf16); FIELD(VarlenAttention, kind);
    FIELD(VarlenAttention, heads); FIELD(VarlenAttention, group); FIELD(VarlenAttention, width);
    FIELD(VarlenAttention, sequences); FIELD(VarlenAttention, bounds); FIELD(VarlenAttention, scale);
}

void add_sample_params(Layout& layout) {
    STRUCT(SampleParams);
    FIELD(SampleParams, temperature); FIELD(SampleParams, top_p); FIELD(SampleParams, min_p);
    FIELD(SampleParams, repetition); FIELD(SampleParams, presence); FIELD(SampleParams, frequency);
    FIELD(SampleParams, top_k); FIELD(SampleParams, sample); FIELD(SampleParams, seed); FIELD(SampleParams, logprobs);
    FIELD(SampleParams, bias_count); FIELD(SampleParams, end_count); FIELD(SampleParams, bias_ids);
    FIELD(SampleParams, ends); FIELD(SampleParams, bias);
}

void add_draw(Layout& layout) {
    STRUCT(Draw);
    FIELD(Draw, params); FIELD(Draw, position); FIELD(Draw, masked); FIELD(Draw, prompt); FIELD(Draw, known);
    FIELD(Draw, tokens); FIELD(Draw, mask);
}

void add_drafting(Layout& layout) {
    STRUCT(Drafting);
    FIELD(Drafting, due); FIELD(Drafting, rows); FIELD(Drafting, passes); FIELD(Drafting, enter);
    FIELD(Drafting, draft_vocab); FIELD(Drafting, is_bf16); FIELD(Drafting, embeddings); FIELD(Drafting, given);
    FIELD(Drafting, norm);
    FIELD(Drafting, ids); FIELD(Drafting, places); FIELD(Drafting, lengths); FIELD(Drafting, counts);
    FIELD(Drafting, draws); FIELD(Drafting, out); FIELD(Drafting, positions); FIELD(Drafting, axes);
    FIELD(Drafting, table);
}

void add_packing(Layout& layout) {
    STRUCT(Packing);
    FIELD(Packing, kind); FIELD(Packing, n); FIELD(Packing, k); FIELD(Packing, kpad); FIELD(Packing, rows);
    FIELD(Packing, stride); FIELD(Packing, order); FIELD(Packing, scales); FIELD(Packing, scale_stride);
    FIELD(Packing, out); FIELD(Packing, begin); FIELD(Packing, end);
}

void add_compacting(Layout& layout) {
    STRUCT(Compacting);
    FIELD(Compacting, plain); FIELD(Compacting, kpad); FIELD(Compacting, outputs); FIELD(Compacting, compact);
    FIELD(Compacting, heads); FIELD(Compacting, exceptions); FIELD(Compacting, most);
}

void add_tower_op(Layout& layout) {
    STRUCT(TowerOp);
    FIELD(TowerOp, code); FIELD(TowerOp, of); FIELD(TowerOp, weight); FIELD(TowerOp, source);
    FIELD(TowerOp, ld_source); FIELD(TowerOp, target); FIELD(TowerOp, ld_target);
    FIELD(TowerOp, store); FIELD(TowerOp, activation); FIELD(TowerOp, norm); FIELD(TowerOp, bias); FIELD(TowerOp, eps);
}

void add_tower(Layout& layout) {
    STRUCT(Tower);
    FIELD(Tower, count); FIELD(Tower, ops); FIELD(Tower, threads); FIELD(Tower, kind); FIELD(Tower, hidden);
    FIELD(Tower, heads); FIELD(Tower, kv_heads); FIELD(Tower, taps); FIELD(Tower, merged); FIELD(Tower, scratch);
    FIELD(Tower, table_rows); FIELD(Tower, table);
    FIELD(Tower, token_norm); FIELD(Tower, token_eps); FIELD(Tower, scale);
}

void add_tower_step(Layout& layout) {
    STRUCT(TowerStep);
    FIELD(TowerStep, rows); FIELD(TowerStep, patches); FIELD(TowerStep, tokens); FIELD(TowerStep, x);
    FIELD(TowerStep, pixels); FIELD(TowerStep, positions); FIELD(TowerStep, source); FIELD(TowerStep, token_rows);
    FIELD(TowerStep, sequences); FIELD(TowerStep, bounds); FIELD(TowerStep, rotations); FIELD(TowerStep, neighbours);
    FIELD(TowerStep, normed); FIELD(TowerStep, wide); FIELD(TowerStep, out);
}

void add_numbers(Layout& layout) {
    VALUE(Kind, F32); VALUE(Kind, BF16); VALUE(Kind, INT8); VALUE(Kind, INT4); VALUE(Kind, FP8); VALUE(Kind, NVFP4);
    VALUE(Kind, UINT4); VALUE(Kind, BYTES); VALUE(Kind, SUMMED_BYTES); VALUE(Kind, COMPACT_BF16);
    VALUE(Kind, UINT8);
    VALUE(Kind, COMPACT_ROWS);
    VALUE(Code, NORM); VALUE(Code, LINEAR); VALUE(Code, MAMBA); VALUE(Code, ATTENTION); VALUE(Code, CONVERT);
    VALUE(Code, ACTIVATE); VALUE(Code, ROUTE); VALUE(Code, GROUP_PICKS); VALUE(Code, GATHER); VALUE(Code, EXPERTS);
    VALUE(Code, PICKED_ACTIVATE); VALUE(Code, COMBINE); VALUE(Code, NORM_PAIR); VALUE(Code, EMBED);
    VALUE(Code, LARGEST); VALUE(Code, HEADS); VALUE(Code, GATE); VALUE(Code, DELTA); VALUE(Code, KEEP);
    VALUE(Code, SHORT_CONV); VALUE(Code, ADD_NORM);
    VALUE(Target, WIDE); VALUE(Target, RESIDUAL); VALUE(Target, LOGITS); VALUE(Target, MID); VALUE(Target, OPERAND);
    VALUE(Target, STREAM); VALUE(Target, INNER);
    VALUE_AS(Activation, Activation::NONE, NONE); VALUE_AS(Activation, Activation::RELU_SQUARED, RELU_SQUARED);
    VALUE_AS(Activation, Activation::RELU, RELU); VALUE_AS(Activation, Activation::GELU, GELU);
    VALUE_AS(Activation, Activation::GELU_TANH, GELU_TANH); VALUE_AS(Activation, Activation::GELU_QUICK, GELU_QUICK);
    VALUE_AS(Activation, Activation::SILU, SILU);
    VALUE_AS(TowerCode, TOWER_LINEAR, LINEAR); VALUE_AS(TowerCode, TOWER_EMBED, EMBED);
    VALUE_AS(TowerCode, TOWER_NORM, NORM); VALUE_AS(TowerCode, TOWER_GATE, GATE);
    VALUE_AS(TowerCode, TOWER_TOKEN, TOKEN); VALUE_AS(TowerCode, TOWER_ATTENTION, ATTENTION);
    VALUE_AS(TowerCode, TOWER_ROTATE, ROTATE); VALUE_AS(TowerCode, TOWER_CONVOLVE, CONVOLVE);
    VALUE_AS(Of, OF_ROWS, ROWS); VALUE_AS(Of, OF_PATCHES, PATCHES); VALUE_AS(Of, OF_TOKENS, TOKENS);
    VALUE_AS(Place, IN_PIXELS, PIXELS); VALUE_AS(Place, IN_NORMED, NORMED); VALUE_AS(Place, IN_WIDE, WIDE);
    VALUE_AS(Place, IN_STREAM, STREAM); VALUE_AS(Place, IN_OUT, OUT);
    VALUE_AS(Store, STORE, FLOAT32); VALUE(Store, ADD); VALUE_AS(Store, STORE_BF16, BFLOAT16);
    VALUE_AS(Form, Form::BLOCKS, BLOCKS); VALUE_AS(Form, Form::PLAIN, PLAIN); VALUE_AS(Form, Form::WRITTEN, WRITTEN);
    layout.add("PANEL", PANEL), layout.add("GROUP", GROUP), layout.add("SUMMED", SUMMED);
    layout.add("BLOCK_TOKENS", BLOCK_TOKENS);
}

// clang-format on

#undef STRUCT
#undef FIELD
#undef VALUE_AS
#undef VALUE

const char* layout_lines() {
    static const std::string lines = [] {
        Layout layout;
        for (auto* add :
             {add_weight, add_experts, add_attention_shape, add_delta_shape, add_op, add_model, add_step,
              add_varlen_attention, add_sample_params, add_draw, add_drafting, add_packing, add_compacting,
              add_tower_op, add_tower, add_tower_step, add_numbers})
            add(layout);
        return layout.lines();
    }();
    return lines.c_str();
}

}  // namespace
