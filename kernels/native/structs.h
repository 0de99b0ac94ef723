// Structs that Python passes; structs.py mirrors them, README.md has the layouts.

#pragma once

#include <cstdint>

namespace {

// BYTES and SUMMED_BYTES are forms of rows only: signed bytes, for weights in INT8 and in INT4. COMPACT_ROWS is one of
// tables only.
enum Kind : int64_t {
    F32 = 0,
    BF16 = 1,
    INT8 = 2,
    INT4 = 3,
    FP8 = 4,
    NVFP4 = 5,
    UINT4 = 6,
    BYTES = 7,
    SUMMED_BYTES = 8,
    COMPACT_BF16 = 9,
    COMPACT_ROWS = 10,
};
enum Store : int64_t { STORE = 0, ADD = 1, STORE_BF16 = 2 };
enum Code : int64_t {
    NORM = 0,
    LINEAR = 1,
    MAMBA = 2,
    ATTENTION = 3,
    CONVERT = 4,
    ACTIVATE = 5,
    ROUTE = 6,
    GROUP_PICKS = 7,
    GATHER = 8,
    EXPERTS = 9,
    PICKED_ACTIVATE = 10,
    COMBINE = 11,
    NORM_PAIR = 12,
    EMBED = 13,
    LARGEST = 14,
    HEADS = 15,
    GATE = 16,
    DELTA = 17,
    KEEP = 18,
};
enum Target : int64_t { WIDE = 0, RESIDUAL = 1, LOGITS = 2, MID = 3, OPERAND = 4, STREAM = 5, INNER = 6 };

}  // namespace

extern "C" {

// [n, k]; kpad: k as it is stored; scale: int8 [panels * 64], int4 [panels, groups, 64]; bias: [n] or null
struct Weight {
    int64_t kind, n, k, kpad;
    const void* data;
    const float* scale;
    const float* bias;
    // of each 32 outputs 16 are gates, and the others what f(gate) is multiplied with; n is a multiple of 32
    int64_t gated;
    int64_t operand;  // the kind of the rows that it is multiplied with: F32, BF16, INT8, INT4, BYTES or SUMMED_BYTES
    // group: inputs that share a scale (INT4, FP8, NVFP4, UINT4; the scales of NVFP4 are in `data`). zeros: zero points
    // of INT4 and UINT4, with the shape of `scale`; null: 8. outer: [panels * 64], NVFP4: factors of the finished sums.
    int64_t group;
    const float *zeros, *outer;
    // instead of `scale`, where several groups of INT4, FP8 or UINT4 have scales that are exactly bfloat16
    const uint16_t* bf16_scale;
    // COMPACT_BF16, COMPACT_ROWS, see compact.h: [panels + 1, 2]: the first exception, and base; [exceptions]
    const int64_t *compact, *exceptions;
};

struct Experts {  // a mixture of experts
    int64_t count, chosen, groups, kept, normalise;
    float scaling;
    const float* correction;  // [count]; null: the weights are a softmax over the chosen experts
    const Weight *up, *down;  // [count]
    float* shared;  // [rows], or null: the shared expert's gate of each token, the sigmoid of the router's last output
};

// Rows of `wide` are queries, keys, values and, if GATE follows, a gate for each element of the queries
struct AttentionShape {
    int64_t q_heads, kv_heads, width;
    float scale;                   // of products of queries and keys
    float norm_eps;                // HEADS:
    const float *q_norm, *k_norm;  // [width], or null
    int64_t pairs;                 // elements i and i + pairs of each head are rotated together; 0: no rotation
    const float* rotations;        // [positions, 2, pairs]: cosines, sines
    const int64_t* axes;           // [pairs]: the axis of the positions that rotates a pair
};

struct DeltaShape {                              // shape of a mixer of the gated delta rule
    int64_t key_heads, heads, key, value, taps;  // heads: value heads; key, value: widths of a head
    float eps;                                   // of the gated norm of its outputs
};

struct Op {
    // kind: of the operand that the operation makes, or that KEEP moves; width: of the operand's rows
    int64_t code, kind, width;
    // LINEAR; EXPERTS: the first expert's; EMBED: the table if it is packed, otherwise without `data`
    Weight weight;
    // LINEAR: WIDE, RESIDUAL (added to x), STREAM (x itself), LOGITS or INNER: f(y) lies in `wide` as rows that a plain
    // weight multiplies, `width` numbers of `kind` each; a LINEAR with a width and another target multiplies such rows.
    // COMBINE: RESIDUAL or MID; GATHER: from WIDE or float OPERAND; EXPERTS: WIDE for the first product, RESIDUAL for
    // the second; MAMBA, DELTA: MID, or OPERAND of a product of F32 or BF16
    int64_t target;
    const float* norm;      // NORM, MAMBA, DELTA, NORM_PAIR: weight
    void* windows;          // MAMBA, DELTA: [slots, taps - 1, conv] ...
    int64_t window_stride;  // ... elements between slots
    // [slots], as in state_shape.h, or as torch operations store them: [heads, head, state] (DELTA: [heads, key,
    // value])
    void* states;
    int64_t state_stride;
    const float *conv, *conv_bias, *a, *d, *dt_bias;  // conv: [taps, conv]
    // ATTENTION: [pages, 2, kv_heads, page, width]; EMBED: [vocab, hidden], unless the table is `weight`
    void* kv;
    int64_t kv_stride;  // ... elements between pages
    // MAMBA, DELTA, or null: [batch slots, steps, conv + heads] (DELTA: two of each head), projected inputs since the
    // state in a slot
    float* ring;
    int64_t ring_stride;
    const Experts* experts;           // from ROUTE to COMBINE
    const DeltaShape* delta;          // DELTA
    int64_t first_key;                // ATTENTION: index of the first key that queries attend to
    const AttentionShape* attention;  // HEADS, ATTENTION, GATE
    int64_t activation;               // f. LINEAR, EXPERTS: of the product, or of its gates; ACTIVATE, PICKED_ACTIVATE
    int64_t gated;                    // ACTIVATE, PICKED_ACTIVATE: f(first `width` numbers) times the next `width`
    // factor of what a LINEAR or COMBINE adds to x, and of EMBED's rows, which are then rounded to the table's dtype
    float scale;
    const float* row_scale;  // LINEAR: [rows], or null: a further factor of each row
    int64_t column;          // LINEAR to WIDE: where its outputs begin
    // Whether rows that become bytes are bfloat16 instead of float32 in between: as LINEAR stores them to INNER, MAMBA
    // and DELTA to MID, and as ACTIVATE (from INNER, without f) and CONVERT (from MID) read them.
    int64_t bf16_rows;
};

struct Model {
    int64_t count;
    const Op* ops;
    int64_t threads, hidden, vocab;
    int64_t heads, head, groups, state, taps, conv_dim, inner;
    int64_t page;
    int64_t positions;    // number of positions in a table of rotations
    int64_t stored_bf16;  // whether windows and pages are bfloat16; else float32
    int64_t states_bf16;  // whether states are bfloat16; else float32
    float eps, dt_low, dt_high;
    float *x, *wide, *mid;  // [rows, hidden], [rows, ld], [rows, mid_ld]
    int64_t ld, mid_ld;
    void* operand;  // [rows, operand_ld] of 4 bytes at most
    int64_t operand_ld;
    float* operand_scale;
    // A pick is one token's choice of one expert; a token's picks are in the order of experts. Rows of picks are stored
    // expert by expert.
    int64_t *picks, *places;  // [rows, chosen]: which expert, and which row it got
    float* shares;            // [rows, chosen]
    // how many experts were picked; then of each, ascending: expert, first row, row behind the last
    int64_t* runs;
    void* picked;  // like operand, operand_scale and wide, with a row for each pick
    float *picked_scale, *picked_wide;
};

struct Step {
    int64_t tokens;
    int64_t rows;                             // MAMBA, DELTA: row r is tokens [starts[r], starts[r + 1]) ...
    const int64_t *starts, *slots, *initial;  // ... and begins with zeros unless initial[r]
    int64_t save_count;
    // [saves, 3]: (row, token, slot): the row's window and state before that token are also stored in that slot
    const int64_t* saves;
    // ATTENTION: of each token; lengths and tables without the tokens of the last `scans` rows
    const int64_t *lengths, *tables, *places;
    int64_t table_stride;
    float* logits;  // [tokens, outputs of the product]
    // For rows whose tokens may be rejected (drafts). Null, or [rows]. `origins`: the state slot that a row starts
    // from, if not its own. `batch_slots`, `counts`: the first `counts` steps of the ring of that batch slot are
    // applied to the row's state slot before the row; the state slot then does not change, and the row's inputs are
    // written to the ring. Batch slot -1: no ring.
    const int64_t *origins, *batch_slots, *counts;
    // ATTENTION: the last rows may have many tokens each. For each of these: the number of keys before its first token,
    // and its pages.
    int64_t scans;
    const int64_t *scan_computed, *scan_tables;
    int64_t scan_table_stride;
    const int64_t* ids;        // EMBED: [tokens]; null: x has its rows already
    int64_t* largest;          // LARGEST, or null: [tokens], ids of the largest logits
    const int64_t* positions;  // HEADS, or null: [tokens, axes]
    int64_t axes;
    int64_t keeps;        // KEEP: whether only these tokens' rows are read after it
    const int64_t* kept;  // [kept_count], ascending
    int64_t kept_count;
};

struct VarlenAttention {    // attention within each of several packed sequences
    const void *q, *k, *v;  // (row r, head h, feature i) at r * stride + h * head_stride + i, in elements
    void* out;              // (r, h, i) at r * out_stride + h * width + i
    int64_t stride, head_stride, out_stride;
    int64_t stored_bf16, out_bf16;  // whether q, k and v, and whether out, are bfloat16; else float32
    int64_t kind;                   // of the products' factors: BF16 or F32; sums are float32
    int64_t heads, width, sequences;
    const int32_t* bounds;  // [sequences + 1]
    float scale;            // above 0
};
}
