// A vision tower: layers of unmasked attention and of MLPs, on concatenated rows of several images.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "products.h"
#include "scratch.h"
#include "structs.h"
#include "threads.h"
#include "varlen.h"

namespace {

enum TowerCode : int64_t {
    TOWER_LINEAR = 0,
    TOWER_EMBED = 1,
    TOWER_NORM = 2,
    TOWER_GATE = 3,
    TOWER_TOKEN = 4,
    TOWER_ATTENTION = 5,
    TOWER_ROTATE = 6,
    TOWER_CONVOLVE = 7
};
enum Of : int64_t { OF_ROWS = 0, OF_PATCHES = 1, OF_TOKENS = 2 };
enum Place : int64_t { IN_PIXELS = 0, IN_NORMED = 1, IN_WIDE = 2, IN_STREAM = 3, IN_OUT = 4 };

}  // namespace

extern "C" {  // tower.py mirrors these

struct TowerOp {
    int64_t code, of;  // TowerCode; Of: to which rows it is applied
    Weight weight;     // LINEAR
    // LINEAR: where rows are read and stored (Place), with elements from a row to the next; store: Store. GATE: only
    // ld_source, of the rows of `wide`
    int64_t source, ld_source, target, ld_target, store;
    int64_t activation;  // LINEAR, GATE
    // NORM; TOKEN and EMBED, or null: of a layer norm or, without a bias, an RMS norm. ROTATE, or null: of RMS norms of
    // each head's queries and keys, [2, head width]. CONVOLVE: weights, [taps, hidden]
    const float *norm, *bias;
    float eps;
};

struct Tower {
    int64_t count;
    const TowerOp* ops;
    int64_t threads, kind;    // kind: BF16 or F32, of operands, positions and results
    int64_t hidden;           // width of the residual stream
    int64_t heads, kv_heads;  // of queries, and of keys and values
    int64_t taps;             // of convolutions
    int64_t merged;           // rows that an image token is made of
    int64_t scratch;          // floats that an operation on a row may need
    int64_t table_rows;       // rows of `table`: prefix tokens
    const float* table;       // [table_rows, hidden]
    const float* token_norm;  // [merged * hidden], weight of the RMS norm of TOKEN, or null
    float token_eps;          // of this norm
    float scale;              // of attention's scores
};

struct TowerStep {
    int64_t rows, patches, tokens;       // rows of the tower: patches and prefix tokens; image tokens for the decoder
    float* x;                            // [rows, hidden]: the residual stream
    const void *pixels, *positions;      // [patches, k of the projection]; [patches, hidden], or null
    const int64_t *source, *token_rows;  // [rows]: a table row, or table_rows + a patch; [tokens, merged]
    int64_t sequences;
    const int32_t* bounds;  // [sequences + 1]: rows of one image attend to one another
    // [patches, hidden / heads], or null: cosines of pairs of a head's features, and sines
    const float* rotations;
    const int32_t* neighbours;  // [rows, taps], or null: the row under each tap of a convolution, or -1
    void* normed;               // operands of products: outputs of NORM, ATTENTION, CONVOLVE and TOKEN
    void* wide;                 // outputs of products
    void* out;                  // [tokens, n of the last product]
};
}

namespace {

constexpr int64_t TOWER_ROWS_PER_UNIT = 8;  // rows of a unit of work that is not a product

// The mean is subtracted before squares are summed.
void layer_norm(const float* from, const float* weight, const float* bias, int64_t width, float eps, float* out) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += from[i];
    const float mean = sum / width;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += (from[i] - mean) * (from[i] - mean);
    const float inverse = 1.0f / std::sqrt(squares / width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = (from[i] - mean) * inverse * weight[i] + bias[i];
}

class TowerJob : public Job {
  public:
    TowerJob(const Tower& tower, const TowerStep& step, int64_t first, int64_t last)
        : tower_(tower), step_(step), first_(first), last_(last) {}
    int64_t phases() const override { return last_ - first_; }
    int64_t units(int64_t phase) const override {
        const TowerOp& op = tower_.ops[first_ + phase];
        const int64_t rows = rows_of(op);
        if (op.code == TOWER_LINEAR) return Units(op.weight, rows, tower_.threads).count;
        if (op.code == TOWER_ATTENTION) return varlen_units(attention());
        return (rows + TOWER_ROWS_PER_UNIT - 1) / TOWER_ROWS_PER_UNIT;
    }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        const TowerOp& op = tower_.ops[first_ + phase];
        const int64_t rows = rows_of(op);
        if (op.code == TOWER_LINEAR) {
            const Product product{&op.weight,       place(op.source), op.ld_source, nullptr,
                                  place(op.target), op.ld_target,     op.store,     Activation(op.activation)};
            run_unit(product, Units(op.weight, rows, tower_.threads), unit, rows);
            return;
        }
        if (op.code == TOWER_ATTENTION) {
            varlen_unit(attention(), unit, scratch);
            return;
        }
        float* const floats = grown(scratch, tower_.scratch);
        for (int64_t row = unit * TOWER_ROWS_PER_UNIT; row < std::min(rows, (unit + 1) * TOWER_ROWS_PER_UNIT); row++) {
            switch (op.code) {
                case TOWER_EMBED: embed(op, row); break;
                case TOWER_NORM: norm(op, row, floats); break;
                case TOWER_GATE: gate(op, row, floats); break;
                case TOWER_TOKEN: token(op, row, floats); break;
                case TOWER_ROTATE: rotate(op, row, floats); break;
                case TOWER_CONVOLVE: convolve(op, row, floats); break;
            }
        }
    }

  private:
    int64_t rows_of(const TowerOp& op) const {
        return op.of == OF_PATCHES ? step_.patches : op.of == OF_TOKENS ? step_.tokens : step_.rows;
    }

    void* place(int64_t which) const {
        switch (which) {
            case IN_PIXELS: return const_cast<void*>(step_.pixels);
            case IN_NORMED: return step_.normed;
            case IN_WIDE: return step_.wide;
            case IN_STREAM: return step_.x;
            default: return step_.out;
        }
    }

    // Elements from a row of q, k and v to the next, which are side by side in `wide`.
    int64_t qkv_width() const { return (tower_.heads + 2 * tower_.kv_heads) * head_width(); }
    int64_t head_width() const { return tower_.hidden / tower_.heads; }

    VarlenAttention attention() const {  // from `wide` to `normed`
        const int64_t bf16 = tower_.kind == BF16, bytes = head_width() * (bf16 ? 2 : 4);
        char* q = static_cast<char*>(step_.wide);
        VarlenAttention all{};
        all.q = q, all.k = q + tower_.heads * bytes, all.v = q + (tower_.heads + tower_.kv_heads) * bytes;
        all.out = step_.normed, all.stride = qkv_width(), all.head_stride = head_width();
        all.out_stride = tower_.hidden, all.stored_bf16 = all.out_bf16 = bf16, all.kind = tower_.kind;
        all.heads = tower_.heads, all.group = tower_.heads / tower_.kv_heads, all.width = head_width();
        all.sequences = step_.sequences, all.bounds = step_.bounds, all.scale = tower_.scale;
        return all;
    }

    // A row of the stream: an entry of the table, or an embedded patch plus its position if there are positions; after
    // a norm if there is one.
    void embed(const TowerOp& op, int64_t row) const {
        const int64_t width = tower_.hidden, patch = step_.source[row] - tower_.table_rows;
        const float* embedded = static_cast<const float*>(step_.wide) + patch * width;
        float* x = step_.x + row * width;
        if (patch < 0) std::copy_n(tower_.table + step_.source[row] * width, width, x);
        else if (!step_.positions) std::copy_n(embedded, width, x);
        else if (tower_.kind == BF16)
            add_position(embedded, static_cast<const uint16_t*>(step_.positions) + patch * width, x);
        else add_position(embedded, static_cast<const float*>(step_.positions) + patch * width, x);
        if (op.norm) normalise(op, x, x);
    }

    template <typename T>
    void add_position(const float* embedded, const T* position, float* x) const {
#pragma omp simd
        for (int64_t i = 0; i < tower_.hidden; i++) x[i] = embedded[i] + load(position, i);
    }

    // Queries and keys of a row, in `wide`: the norm of each head, if there is one; then those of patches are rotated:
    // feature i of a head is paired with feature i of its second half.
    void rotate(const TowerOp& op, int64_t row, float* scratch) const {
        const int64_t patch = step_.source[row] - tower_.table_rows, width = head_width();
        const float* cosines = patch < 0 ? nullptr : step_.rotations + patch * width;
        for (int64_t head = 0; head < tower_.heads + tower_.kv_heads; head++) {
            const float* norm = op.norm ? op.norm + (head < tower_.heads ? 0 : width) : nullptr;
            const int64_t at = row * qkv_width() + head * width;
            if (tower_.kind == BF16) rotate_head(op, static_cast<uint16_t*>(step_.wide) + at, norm, cosines, scratch);
            else rotate_head(op, static_cast<float*>(step_.wide) + at, norm, cosines, scratch);
        }
    }

    static uint16_t converted(float x, const uint16_t*) { return float_to_bf16(x); }
    static float converted(float x, const float*) { return x; }

    template <typename T>
    void rotate_head(const TowerOp& op, T* x, const float* norm, const float* cosines, float* scratch) const {
        const int64_t width = head_width(), half = width / 2;
        if (norm) {
            widen(x, width, scratch);
            rms_norm(scratch, norm, width, op.eps, scratch);
            for (int64_t i = 0; i < width; i++) x[i] = converted(scratch[i], x);
        }
        if (!cosines) return;
        const float* sines = cosines + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const float a = load(x, i), b = load(x, half + i);
            x[i] = converted(a * cosines[i] - b * sines[i], x);
            x[half + i] = converted(b * cosines[i] + a * sines[i], x);
        }
    }

    void normalise(const TowerOp& op, const float* x, float* out) const {
        if (op.bias) layer_norm(x, op.norm, op.bias, tower_.hidden, op.eps, out);
        else rms_norm(x, op.norm, tower_.hidden, op.eps, out);
    }

    void norm(const TowerOp& op, int64_t row, float* scratch) const {
        const int64_t width = tower_.hidden;
        normalise(op, step_.x + row * width, scratch);
        make_operand(scratch, width, tower_.kind, step_.normed, width, nullptr, row);
    }

    // A depthwise convolution of rows of gates b and c, and of x, which are side by side in `wide`: c times the sum
    // over the taps of their weights times b x of the row there.
    void convolve(const TowerOp& op, int64_t row, float* scratch) const {
        if (tower_.kind == BF16) convolve(op, static_cast<const uint16_t*>(step_.wide), row, scratch);
        else convolve(op, static_cast<const float*>(step_.wide), row, scratch);
        make_operand(scratch, tower_.hidden, tower_.kind, step_.normed, tower_.hidden, nullptr, row);
    }

    template <typename T>
    void convolve(const TowerOp& op, const T* rows, int64_t row, float* sums) const {
        const int64_t width = tower_.hidden;
        std::fill_n(sums, width, 0.0f);
        for (int64_t tap = 0; tap < tower_.taps; tap++) {
            const int64_t from = step_.neighbours[row * tower_.taps + tap];
            if (from < 0) continue;
            const T *b = rows + from * 3 * width, *x = b + 2 * width;
            const float* weights = op.norm + tap * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sums[i] += weights[i] * (load(b, i) * load(x, i));
        }
        const T* c = rows + (row * 3 + 1) * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) sums[i] *= load(c, i);
    }

    // A row of gates and gated outputs: the product overwrites the gates.
    void gate(const TowerOp& op, int64_t row, float* scratch) const {
        const int64_t width = op.ld_source / 2;
        if (tower_.kind == BF16)
            widen(static_cast<const uint16_t*>(step_.wide) + row * op.ld_source, op.ld_source, scratch);
        else widen(static_cast<const float*>(step_.wide) + row * op.ld_source, op.ld_source, scratch);
        for (int64_t i = 0; i < width; i += 16) {
            const Mask mask = width - i >= 16 ? Mask(0xffff) : Mask((1 << (width - i)) - 1);
            Floats gates[1] = {load16(scratch + i, mask)};
            activate(gates, Activation(op.activation));
            store_some(scratch + i, mask, gates[0] * load16(scratch + width + i, mask));
        }
        make_operand(scratch, width, tower_.kind, step_.wide, op.ld_source, nullptr, row);
    }

    template <typename T>
    static void widen(const T* from, int64_t count, float* out) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] = load(from, i);
    }

    // Concatenates the rows under an image token, each after the final norm if there is one, then applies the RMS norm
    // if there is one.
    void token(const TowerOp& op, int64_t token, float* scratch) const {
        const int64_t width = tower_.hidden, merged = tower_.merged, all = width * merged;
        for (int64_t i = 0; i < merged; i++) {
            const float* x = step_.x + step_.token_rows[token * merged + i] * width;
            if (op.norm) normalise(op, x, scratch + i * width);
            else std::copy_n(x, width, scratch + i * width);
        }
        if (tower_.token_norm) rms_norm(scratch, tower_.token_norm, all, tower_.token_eps, scratch);
        make_operand(scratch, all, tower_.kind, step_.normed, all, nullptr, token);
    }

    const Tower& tower_;
    const TowerStep& step_;
    const int64_t first_, last_;
};

}  // namespace
