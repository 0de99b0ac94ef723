// Rows of embeddings as numbers: of a packed weight, where they are tied to the vocabulary projection, or of a compact
// table.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "compact.h"
#include "numbers.h"
#include "panels.h"
#include "structs.h"
#include "threads.h"

namespace {

inline float e4m3_to_float(uint8_t v) {
    const int exponent = v >> 3 & 15, fraction = v & 7;
    const float size = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7) : std::ldexp(fraction / 8.0f, -6);
    return v & 128 ? -size : size;
}

// One row of a weight that is not gated, number by number, as `Quantised.dequantise` computes it (pack.h has the
// layouts).
class PackedRow {
  public:
    PackedRow(const Weight& w, int64_t row) : w_(w), row_(row % PANEL), panel_(row / PANEL) {
        data_ = panel_data(w, panel_);
    }

    void read(float* to) const {
        switch (w_.kind) {
            case BF16:
                each(to, w_.k, [&](int64_t i) {
                    return bf16_to_float(word(2 * (i / 2 * 2 * PANEL + row_ * 2 + i % 2)));
                });
                break;
            case COMPACT_BF16: read_compact(w_, panel_, row_, to); break;
            case INT8: read_int8(to); break;
            case INT4: by_group(to, [&](int64_t i) { return float(int4(i)); }, w_.zeros, 8.0f); break;
            case UINT4: by_group(to, [&](int64_t i) { return float(uint4(i)); }, w_.zeros, 8.0f); break;
            case UINT8: by_group(to, [&](int64_t i) { return float(in_fours(i)); }, w_.zeros, 128.0f); break;
            case FP8: by_group(to, [&](int64_t i) { return fp8_[data_[in_pairs(i)]]; }); break;
            case NVFP4: read_nvfp4(to); break;
        }
    }

  private:
    template <class F>
    static void each(float* to, int64_t count, const F& number) {
        for (int64_t i = 0; i < count; i++) to[i] = number(i);
    }
    // (number - zero point) * scale, of groups of inputs.
    template <class F>
    void by_group(float* to, const F& number, const float* zeros = nullptr, float zero = 0.0f) const {
        const int64_t group = w_.group, groups = scale_groups(w_);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (panel_ * groups + g) * PANEL + row_, end = std::min(w_.k, (g + 1) * group);
            const float scale = w_.bf16_scale ? bf16_to_float(w_.bf16_scale[at]) : w_.scale[at],
                        zero_point = zeros ? zeros[at] : zero;
            for (int64_t i = g * group; i < end; i++) to[i] = (number(i) - zero_point) * scale;
        }
    }
    void read_int8(float* to) const {
        const float scale = w_.scale[panel_ * PANEL + row_];
        each(to, w_.k, [&](int64_t i) { return float(int8_t(in_fours(i) ^ 0x80)) * scale; });
    }
    void read_nvfp4(float* to) const {
        static constexpr float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        const float outer = w_.outer[panel_ * PANEL + row_];
        for (int64_t begin = 0; begin < w_.k; begin += NVFP4_GROUP) {
            const uint8_t *block = data_ + begin / NVFP4_GROUP * NVFP4_GROUP_BYTES, byte = block[row_];
            const float scale = scales_.numbers[byte];
            for (int64_t j = 0; j < NVFP4_GROUP; j++) {
                const uint8_t pair = block[PANEL + j / 8 * 4 * PANEL + in_pairs(j % 4)],
                              code = j & 4 ? pair >> 4 : pair & 15;
                to[begin + j] = (code & 8 ? -sizes[code & 7] : sizes[code]) * scale * outer;
            }
        }
    }
    uint16_t word(int64_t at) const {
        uint16_t found;
        std::memcpy(&found, data_ + at, 2);
        return found;
    }
    uint8_t in_fours(int64_t i) const { return data_[(i / 4 * PANEL + row_) * 4 + i % 4]; }
    int int4(int64_t i) const {
        const uint8_t pair = data_[(i / 4 * (PANEL / 2) + row_ % (PANEL / 2)) * 4 + i % 4];
        return row_ < PANEL / 2 ? pair & 15 : pair >> 4;
    }
    int uint4(int64_t i) const { return word((i / 8 * PANEL + row_) * 4 + i % 2 * 2) >> (i % 8 / 2 * 4) & 15; }
    // The index of input i's byte in fp8: 4 inputs of 4 outputs are stored together, the lower two inputs of each
    // first.
    int64_t in_pairs(int64_t i) const {
        return i / 4 * 4 * PANEL + row_ / 4 * 16 + i % 4 / 2 * 8 + row_ % 4 * 2 + i % 2;
    }

    // The number of each byte.
    struct E4m3 {
        float numbers[256];
        E4m3() {
            for (int i = 0; i < 256; i++) numbers[i] = e4m3_to_float(uint8_t(i));
        }
        float operator[](uint8_t v) const { return numbers[v]; }
    };
    // The scale of each byte that `ScaleBytes` makes; of zero any number, since all numbers of that group are zero.
    struct Scales {
        float numbers[256];
        Scales() {
            for (int i = 0; i < 256; i++)
                numbers[i] = std::ldexp(1.0f + (i >> 4 & 7) / 8.0f, 8 - ((i & 15) << 1 | i >> 7));
        }
    };
    static inline const E4m3 fp8_;
    static inline const Scales scales_;
    const Weight& w_;
    const int64_t row_, panel_;  // the row within its panel
    const uint8_t* data_;        // of the panel
};

// Row `id` of a table that is a packed weight, rounded to bfloat16 if that is the table's dtype.
inline void table_row(const Weight& table, int64_t id, bool is_bf16, float* to) {
    if (table.kind == COMPACT_ROWS) return read_compact_row(table, id, to);
    PackedRow(table, id).read(to);
    if (!is_bf16 || table.kind == BF16 || table.kind == COMPACT_BF16) return;
    for (int64_t i = 0; i < table.k; i++) to[i] = bf16_to_float(float_to_bf16(to[i]));
}

class TableJob : public Job {
  public:
    TableJob(const Weight& table, const int64_t* ids, int64_t count, float* out)
        : table_(table), ids_(ids), count_(count), out_(out) {}
    int64_t phases() const override { return 1; }
    int64_t units(int64_t) const override { return count_; }
    void run(int64_t, int64_t unit, std::vector<float>&) const override {
        table_row(table_, ids_[unit], false, out_ + unit * table_.k);
    }

  private:
    const Weight& table_;
    const int64_t* ids_;
    const int64_t count_;
    float* out_;
};

}  // namespace
