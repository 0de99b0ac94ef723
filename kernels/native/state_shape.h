// Sizes and layout of recurrent states in blocks of 16 tokens.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cells.h"
#include "tiles_amx.h"

namespace {

constexpr int64_t BLOCK_TOKENS = 16;  // as many as a vector has lanes
constexpr int64_t COUNT_WORDS = 16;   // words of the number of pending tokens: a line of 64 bytes
// Stored instead of the number of pending tokens if the state has the form of torch operations.
constexpr int32_t PLAIN = -1;
constexpr int64_t STATE_SLICE = 64;  // channels that are computed together; the rest of a head in slices of 32 and 16

// The cells that products multiply: pairs of bfloat16 if the model is in bfloat16 and there are instructions for them,
// else float32.
template <typename T>
using StateCells = std::conditional_t<BF16_PAIRS && std::is_same_v<T, uint16_t>, Bf16Cells, F32Cells>;

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Pending {  // tokens of an unfinished block; BlockShape has the places of their numbers
    uint32_t* words;
    int32_t count() const {
        int32_t n;
        std::memcpy(&n, words, 4);
        return n;
    }
    void set_count(int32_t n) const { std::memcpy(words, &n, 4); }
    float* sums(int64_t h) const { return reinterpret_cast<float*>(words + COUNT_WORDS) + h * BLOCK_TOKENS; }
};

// Sizes of a group of heads, for products of CELLS and states of type S. A word has 32 bits.
template <class CELLS, typename S>
struct BlockShape {
    using Cells = CELLS;
    // whether cells are pairs of bfloat16; whether float32 states are stored in two parts; whether products use AMX
    static constexpr bool PAIRS = Cells::EACH == 2, SPLIT = PAIRS && sizeof(S) == 4, TILES = PAIRS && AMX_TILES;
    static constexpr int64_t TOKEN_CELLS = BLOCK_TOKENS / Cells::EACH;  // cells of a block's tokens

    BlockShape(int64_t heads, int64_t head, int64_t n)
        : heads(heads), head(head), n(n), padded_head(rounded_up(head, 16)), padded_n(rounded_up(n, Cells::EACH)),
          cells(padded_n / Cells::EACH), row_words(rounded_up(cells, 16)), x_at(COUNT_WORDS + heads * BLOCK_TOKENS),
          b_at(x_at + heads * TOKEN_CELLS * padded_head), pending_words(b_at + BLOCK_TOKENS * row_words) {}

    // heads of the group, channels of a head, and inputs: numbers of the state for each channel
    const int64_t heads, head, n;
    // `head` and `n` with padding, cells of `n` inputs, and words of a stored row of B (or a key)
    const int64_t padded_head, padded_n, cells, row_words;
    // The words of pending tokens: their count, in COUNT_WORDS; sums of dt A [heads, BLOCK_TOKENS]; from x_at on, x dt
    // [heads, TOKEN_CELLS, padded_head]; from b_at on, B [BLOCK_TOKENS, row_words].
    const int64_t x_at, b_at, pending_words;

    // A head's x dt, from a channel on; B, from a token on.
    uint32_t* x_of(Pending pending, int64_t h, int64_t lane = 0) const {
        return pending.words + x_at + h * TOKEN_CELLS * padded_head + lane;
    }
    uint32_t* b_of(Pending pending, int64_t token = 0) const { return pending.words + b_at + token * row_words; }

    // A state is [heads, slices, cells, channels of a slice] words of bfloat16 pairs, and if SPLIT as many words again
    // for the rest of float32: a number's bits are those of its bfloat16, rounded half up, followed by 16 zeros, plus a
    // signed rest of 16 bits. Without pairs it is [heads, slices, n, channels of a slice] numbers of type S.
    int64_t state_bytes() const {
        return rounded_up(heads * padded_head * (PAIRS ? 4 * cells * (SPLIT ? 2 : 1) : n * sizeof(S)), 64);
    }
    // Bytes of the state and the pending tokens.
    int64_t bytes() const { return state_bytes() + 4 * pending_words; }
    int64_t rest_at() const {
        return heads * padded_head * cells;
    }  // words from a number's bfloat16 to its rest, if SPLIT
    int64_t numbers() const { return heads * head * n; }  // of a plain state
    // Cells of this many tokens.
    static int64_t token_cells(int64_t tokens) { return (tokens + Cells::EACH - 1) / Cells::EACH; }

    // A slice of a head's channels, from `lane` on.
    template <typename P>
    P* slice_of(P* state, int64_t h, int64_t lane) const {
        return state + (h * padded_head + lane) * (PAIRS ? cells * 4 / int64_t(sizeof(S)) : n);
    }

    // Calls f(head, first channel, vectors of 16 channels) for each slice.
    template <typename F>
    void each_slice(F&& f) const {
        for (int64_t h = 0; h < heads; h++) {
            int64_t lane = 0;
            for (; lane + 64 <= padded_head; lane += 64) f(h, lane, std::integral_constant<int, 4>());
            if ((padded_head - lane) & 32) f(h, lane, std::integral_constant<int, 2>()), lane += 32;
            if ((padded_head - lane) & 16) f(h, lane, std::integral_constant<int, 1>());
        }
    }
};

}  // namespace
