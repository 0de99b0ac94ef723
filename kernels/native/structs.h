// Structs that Python passes; structs.py mirrors them, README.md has the layouts.

#pragma once

#include <cstdint>

namespace {

// How a weight, or the rows that it is multiplied with, is stored; README.md describes the kinds. BYTES and
// SUMMED_BYTES are kinds of rows only: signed bytes, for weights in INT8, and for those in INT4 and UINT8. COMPACT_ROWS
// is one of tables only.
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
    UINT8 = 11,
};
// How the results of a product are stored: as float32, added to float32, or as bfloat16.
enum Store : int64_t { STORE = 0, ADD = 1, STORE_BF16 = 2 };
// Operations of a decoder step; README.md describes them.
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
    SHORT_CONV = 19,
    ADD_NORM = 20,
};
// Where an operation's result goes; see Op.
enum Target : int64_t { WIDE = 0, RESIDUAL = 1, LOGITS = 2, MID = 3, OPERAND = 4, STREAM = 5, INNER = 6 };

}  // namespace

extern "C" {

// A packed weight W [n, k] of a product x W^T; see "Products with packed weights" in README.md.
struct Weight {
    int64_t kind, n, k, kpad;  // kpad: k with padding, as it is stored
    const void* data;
    const float* scale;  // INT8: [panels * 64]; INT4, FP8, UINT4, UINT8: [panels, groups, 64]
    const float* bias;   // [n], or null
    // whether, of each 32 outputs, 16 are gates, and the others what f(gate) is multiplied with; n is a multiple of 32
    int64_t gated;
    int64_t operand;     // the kind of the rows x: F32, BF16, INT8, INT4, BYTES or SUMMED_BYTES
    int64_t group;       // inputs that share a scale: INT4, FP8, NVFP4 (whose group scales are in `data`), UINT4, UINT8
    const float* zeros;  // zero points, with the shape of `scale`; null: 8 for INT4 and UINT4, 128 for UINT8
    const float* outer;  // NVFP4: [panels * 64], factors of the finished sums
    // instead of `scale`, where several groups of INT4, FP8, UINT4 or UINT8 have scales that are exactly bfloat16
    const uint16_t* bf16_scale;
    // COMPACT_BF16, COMPACT_ROWS, see compact.h: [panels + 1, 2]: the first exception, and base; [exceptions]
    const int64_t *compact, *exceptions;
};

// A mixture of experts; see experts.h.
struct Experts {
    int64_t count, chosen;  // experts, and how many of them a token chooses
    int64_t groups, kept;   // groups of adjacent experts, and from how many groups a token chooses
    int64_t normalise;      // whether a token's weights are divided by their sum
    float scaling;          // factor of the weights
    float epsilon;          // what is added to the sum by which they are divided; not with a softmax
    // [count]: what is added to the sigmoids by which experts are chosen; null: a softmax over the chosen experts
    const float* correction;
    const Weight *up, *down;  // [count]
    float* shared;  // [rows], or null: the shared expert's gate of each token, the sigmoid of the router's last output
};

// Attention of one layer. A row of `wide` has a token's queries, keys, values and, if GATE follows, a gate for each
// number of the queries, or for each head.
struct AttentionShape {
    int64_t q_heads, kv_heads, width;  // width: of a head
    float scale;                       // of products of queries and keys
    // HEADS:
    float norm_eps;
    const float *q_norm, *k_norm;  // [width], or null
    int64_t pairs;                 // numbers i and i + pairs of each head are rotated together; 0: no rotation
    const float* rotations;        // [positions, 2, pairs]: cosines, sines
    const int64_t* axes;           // [pairs]: the axis of the positions that rotates a pair
    int64_t column;                // of `wide`, where the queries begin
    // HEADS: whether all queries of a token have one norm together, and all keys; q_norm and k_norm have a number for
    // each
    int64_t norm_whole;
    int64_t window;     // ATTENTION: how many latest keys a token attends to, its own included; 0: all
    int64_t head_gate;  // GATE: whether a head has one gate
};

// A mixer of the gated delta rule.
struct DeltaShape {
    int64_t key_heads, heads;  // heads: value heads
    int64_t key, value;        // widths of a key head and a value head
    int64_t taps;              // of the convolution
    float eps;                 // of the gated norm of its outputs
    float beta_scale;          // factor of the weights of the changes
};

// One operation of a step. Most fields are of some codes only, which their comments name.
struct Op {
    int64_t code;   // Code
    int64_t kind;   // Kind of the operand that the operation makes, or that KEEP moves
    int64_t width;  // numbers in a row of that operand
    // LINEAR; EXPERTS: the first expert's; EMBED: the table if it is packed, otherwise without `data`
    Weight weight;
    // Where the result goes, a Target.
    // LINEAR: WIDE, RESIDUAL (added to x), STREAM (x itself), LOGITS, MID or INNER: f(y) lies in `wide` as rows that a
    // plain weight multiplies, `width` numbers of `kind` each; a LINEAR with a width and another target multiplies such
    // rows. COMBINE: RESIDUAL or MID; GATHER: from WIDE or float OPERAND; EXPERTS: WIDE for the first product, RESIDUAL
    // for the second; MAMBA, DELTA, SHORT_CONV: MID, or OPERAND of a product of F32 or BF16
    int64_t target;
    // NORM, MAMBA, DELTA, NORM_PAIR, ADD_NORM: weight. Null: NORM only converts x; MAMBA has a gate without a norm
    const float* norm;
    // MAMBA, DELTA, SHORT_CONV: [slots, taps - 1, channels], the last inputs of the convolution; elements between slots
    void* windows;
    int64_t window_stride;
    // MAMBA, DELTA: [slots], each as in state_shape.h, or as torch operations store it: [heads, head, state] (DELTA:
    // [heads, key, value]); elements between slots
    void* states;
    int64_t state_stride;
    // MAMBA, DELTA, SHORT_CONV: [taps, channels], [channels] or null; then, of each head, A, D (null for DELTA) and the
    // bias of dt
    const float *conv, *conv_bias, *a, *d, *dt_bias;
    // ATTENTION: [pages, 2, kv_heads, page, width]; elements between pages. EMBED: [vocab, hidden], unless the table is
    // `weight`
    void* kv;
    int64_t kv_stride;
    // MAMBA, DELTA, SHORT_CONV, or null: [batch slots, steps, channels + heads] (DELTA: two of each head; SHORT_CONV:
    // only channels), inputs since the state in a slot: as projected, or SHORT_CONV's products; elements between batch
    // slots
    float* ring;
    int64_t ring_stride;
    const Experts* experts;           // from ROUTE to COMBINE
    const DeltaShape* delta;          // DELTA
    int64_t first_key;                // ATTENTION: index of the first key that queries attend to
    const AttentionShape* attention;  // HEADS, ATTENTION, GATE
    int64_t activation;               // f. LINEAR, EXPERTS: of the product, or of its gates; ACTIVATE, PICKED_ACTIVATE
    int64_t gated;                    // ACTIVATE, PICKED_ACTIVATE: f(first `width` numbers) times the next `width`
    // factor of what a LINEAR, COMBINE or ADD_NORM adds to x, of MAMBA's gates, and of EMBED's rows, which are then
    // rounded to the table's dtype
    float scale;
    const float* row_scale;  // LINEAR: [rows], or null: a further factor of each row
    int64_t column;          // LINEAR to WIDE: where its outputs begin
    // Whether rows that become bytes are bfloat16 instead of float32 in between: as LINEAR stores them to INNER, MAMBA,
    // DELTA and SHORT_CONV to MID, and as ACTIVATE (from INNER, without f) and CONVERT (from MID) read them.
    int64_t bf16_rows;
    int64_t taps;        // SHORT_CONV: of the convolution, 2 to 8
    int64_t norm_first;  // MAMBA: whether the norm comes before the gate
};

// A decoder: its operations, and the buffers between them, with a row for each token of a step.
struct Model {
    int64_t count;  // of operations
    const Op* ops;
    int64_t threads, hidden, vocab;  // hidden: width of the residual stream
    // MAMBA: heads, width of a head, groups of heads, numbers of the state per channel, taps and channels of the
    // convolution, and width of the gates, which is that of all heads
    int64_t heads, head, groups, state, taps, conv_dim, inner;
    int64_t page;           // tokens of a page of keys and values
    int64_t positions;      // number of positions in a table of rotations
    int64_t stored_bf16;    // whether windows and pages are bfloat16; else float32
    int64_t states_bf16;    // whether states are bfloat16; else float32
    float eps;              // of norms
    float dt_low, dt_high;  // MAMBA: limits of dt
    float* x;               // [rows, hidden]: the residual stream
    float* wide;            // [rows, ld]: outputs of a product
    float* mid;             // [rows, mid_ld]: outputs of a mixer, or of experts
    int64_t ld, mid_ld;
    void* operand;  // [rows, operand_ld] of 4 bytes at most: rows of the next product
    int64_t operand_ld;
    float* operand_scale;  // [rows]
    // A pick is one token's choice of one expert; a token's picks are in the order of experts. Rows of picks are stored
    // expert by expert.
    int64_t *picks, *places;  // [rows, chosen]: which expert, and which row it got
    float* shares;            // [rows, chosen]: the expert's weight
    int64_t* runs;            // how many experts were picked; then an ExpertRun of each, in ascending order
    void* picked;             // like operand, operand_scale and wide, with a row for each pick
    float *picked_scale, *picked_wide;
};

// A row's window and state before this token are also stored in this slot.
struct Save {
    int64_t row, token, slot;
};

// The state in a slot (-1: in `target`), advanced by the first steps of a batch slot's ring, is stored in `target`.
struct Advance {
    int64_t batch_slot, slot, target, steps;
};

// What a model computes in one call: the tokens of one or several sequences. A row is the tokens of one sequence.
struct Step {
    int64_t tokens;
    int64_t rows;
    // Row r is tokens [starts[r], starts[r + 1]). MAMBA, DELTA, SHORT_CONV: its state slot, -1 for padding; and whether
    // its state is that in the slot, or zeros.
    const int64_t *starts, *slots, *initial;
    int64_t save_count;  // of `saves`
    const Save* saves;
    // ATTENTION, of each token: number of keys, its own included; the pages of its row; and where its key and value are
    // stored: page * tokens of a page + index, -1 for nowhere. lengths and tables are without the tokens of the last
    // `scans` rows.
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

struct VarlenAttention {  // attention within each of several packed sequences
    // q: (row r, head h, feature i) at r * stride + h * head_stride + i, in elements; k and v: likewise, for head
    // h / group
    const void *q, *k, *v;
    void* out;  // (r, h, i) at r * out_stride + h * width + i
    int64_t stride, head_stride, out_stride;
    int64_t stored_bf16, out_bf16;  // whether q, k and v, and whether out, are bfloat16; else float32
    int64_t kind;                   // of the products' factors: BF16 or F32; sums are float32
    int64_t heads, group;           // group: heads that share keys and values
    int64_t width, sequences;
    const int32_t* bounds;  // [sequences + 1]
    float scale;            // above 0
};
}
