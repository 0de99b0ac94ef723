// A drafting head: it makes keys and values of tokens that the trunk has computed, then drafts in passes. A pass draws
// a token per row, from which the next pass continues.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "products.h"
#include "sample.h"
#include "structs.h"
#include "table.h"

extern "C" {

struct Drafting {  // structs.py mirrors it
    // An entry is a token's key and value of the head. due: tokens whose entries are made without drafting; rows: those
    // that draft; passes: the largest number of drafts of a row.
    int64_t due, rows, passes;
    int64_t enter;             // operations of a pass up to the one that makes an entry
    int64_t draft_vocab;       // ids below this have logits: the outputs of the head's last product
    int64_t is_bf16;           // `embeddings` and `given`; else float32
    const void* embeddings;    // [vocab, hidden]
    const void* given;         // [due + rows, hidden]: the trunk's rows, before its final norm ...
    const float* norm;         // ... whose weight this is
    const int64_t* ids;        // [due + rows]: tokens of the entries
    int64_t* places;           // [due + rows]: where entries are stored, as in Step; changed by each pass
    int64_t* lengths;          // [rows]: number of keys, as in Step; grows with each pass
    const int64_t* counts;     // [rows]: drafts of each
    const Draw* draws;         // [rows]: of the first pass
    int64_t* out;              // [passes, rows]: the drafted tokens
    const int64_t* positions;  // [due + passes * rows, axes] of entries, or null
    int64_t axes;
    const Weight* table;  // or null: a packed weight, instead of `embeddings`
};
}

namespace {

// Writes the head's inputs, which are rows of `wide`: a token's embedding, then the hidden row of the token before it.
class HeadInputs {
  public:
    HeadInputs(const Model& m, const Drafting& d) : m_(m), d_(d), row_(m.hidden) {}

    void embed(int64_t row, int64_t id) const {
        float* to = m_.wide + row * m_.ld;
        if (d_.table) return table_row(*d_.table, id, d_.is_bf16, to);
        for (int64_t i = 0; i < m_.hidden; i++) to[i] = number(d_.embeddings, id * m_.hidden + i);
    }
    void hidden_of_trunk(int64_t row, int64_t given) {
        for (int64_t i = 0; i < m_.hidden; i++) row_[i] = number(d_.given, given * m_.hidden + i);
        rms_norm(row_.data(), d_.norm, m_.hidden, m_.eps, m_.wide + row * m_.ld + m_.hidden);
    }
    void hidden_of_head(int64_t row) const {  // what the last operation of a pass leaves
        const float* from = static_cast<const float*>(m_.operand) + row * m_.operand_ld;
        std::copy(from, from + m_.hidden, m_.wide + row * m_.ld + m_.hidden);
    }

  private:
    float number(const void* numbers, int64_t i) const {
        return d_.is_bf16 ? bf16_to_float(static_cast<const uint16_t*>(numbers)[i])
                          : static_cast<const float*>(numbers)[i];
    }
    const Model& m_;
    const Drafting& d_;
    std::vector<float> row_;
};

// `run(first, last)` runs operations on `step`.
template <typename Run>
void draft(const Model& m, const Drafting& d, Step& step, Run&& run) {
    HeadInputs inputs(m, d);
    if (d.due) {
        std::vector<int64_t> unread_lengths(d.due);  // zeros: no key is attended to
        for (int64_t t = 0; t < d.due; t++) inputs.embed(t, d.ids[t]), inputs.hidden_of_trunk(t, t);
        step.tokens = step.rows = d.due, step.places = d.places, step.lengths = unread_lengths.data();
        step.positions = d.positions, step.axes = d.axes;
        run(0, d.enter);
    }
    if (!d.rows) return;
    std::vector<int64_t> ids(d.ids + d.due, d.ids + d.due + d.rows);
    std::vector<Draw> draws(d.draws, d.draws + d.rows);
    std::vector<SampleParams> params(d.rows);
    for (int64_t r = 0; r < d.rows; r++) {  // log-probabilities of drafts are not reported, and no end is masked
        params[r] = *draws[r].params, params[r].logprobs = -1, params[r].end_count = 0;
        draws[r].params = &params[r];
    }
    Sampler sampler;
    int64_t* places = d.places + d.due;
    step.tokens = step.rows = d.rows, step.places = places, step.lengths = d.lengths;
    for (int64_t pass = 0; pass < d.passes; pass++) {
        for (int64_t r = 0; r < d.rows; r++) {
            inputs.embed(r, ids[r]);
            if (pass) inputs.hidden_of_head(r);
            else inputs.hidden_of_trunk(r, d.due + r);
            if (pass && pass < d.counts[r]) {
                const int64_t at = d.lengths[r]++;
                places[r] = step.tables[r * step.table_stride + at / m.page] * m.page + at % m.page;
            } else if (pass) {
                places[r] = -1;  // it has all its drafts, and further ones are not read
            }
        }
        if (d.positions) step.positions = d.positions + (d.due + pass * d.rows) * d.axes, step.axes = d.axes;
        run(0, m.count);
        for (int64_t r = 0; r < d.rows; r++) {
            ids[r] = d.out[pass * d.rows + r] =
                sampler.draw(step.logits + r * d.draft_vocab, d.draft_vocab, draws[r], nullptr, nullptr, nullptr);
            draws[r].position++;
        }
    }
}

}  // namespace
