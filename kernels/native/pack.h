// Weights from rows, as files store them, to the panels that products read (README.md; packed_numbers.h for FP8, NVFP4,
// UINT4 and UINT8).

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "panels.h"
#include "structs.h"
#include "threads.h"

extern "C" {

struct Packing {  // structs.py mirrors it
    int64_t kind, n, k, kpad;
    const uint8_t* rows;    // bfloat16, bytes, or two numbers a byte, the even one in the low half
    int64_t stride;         // bytes between rows
    const int64_t* order;   // [n]: the row of each output, -1 for zeros; null: rows are in order
    const uint8_t* scales;  // NVFP4: [rows, k / 16], e4m3
    int64_t scale_stride;
    uint8_t* out;
    int64_t begin, end;  // panels; the first is stored at `out`
};
}

namespace {

constexpr int64_t MOVED_WORDS = 16;                               // words of each row that are packed together
enum Refused : int64_t { NOT_A_NUMBER = 1, NEGATIVE_SCALE = 2 };  // bits

// Four numbers of four bits, in the lower half of a word, as a byte each; and the reverse for the lower halves of four
// bytes.
inline uint32_t nibbles_to_bytes(uint32_t four) {
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
}
inline uint32_t bytes_to_nibbles(uint32_t bytes) {
    bytes &= 0x0f0f0f0f;
    bytes = (bytes | bytes >> 4) & 0x00ff00ff;
    return (bytes | bytes >> 8) & 0xffff;
}

// For each e4m3 number that is not negative, the byte that Nvfp4 reads: of (1 + m / 8) * 2^(8 - d), m in bits 4 to 6,
// the lowest bit of d in bit 7, the others in bits 0 to 3; 0 for zero.
struct ScaleBytes {
    uint8_t bytes[128];
    ScaleBytes() {
        bytes[0] = 0;
        for (int i = 1; i < 128; i++) {
            int m = i & 7, d = 15 - (i >> 3);
            if (i < 8)  // subnormal: m / 8 * 2^-6
                for (d = 14; m < 8; d++) m *= 2;
            bytes[i] = uint8_t((m & 7) << 4 | (d & 1) << 7 | d >> 1);
        }
    }
};

// Packs one panel, which is a unit of work.
class PanelOfRows {
  public:
    PanelOfRows(const Packing& job, int64_t panel) : job_(job), out_(job.out) {
        const bool halves = job.kind == INT4 || job.kind == UINT4 || job.kind == NVFP4;
        bytes_ = job.kind == BF16 ? 2 * job.k : halves ? (job.k + 1) / 2 : job.k;
        words_ = job.kind == BF16 ? job.kpad / 2 : halves ? job.kpad / 8 : job.kpad / 4;
        out_ += (panel - job.begin) *
                (job.kind == NVFP4 ? job.kpad / NVFP4_GROUP * NVFP4_GROUP_BYTES : words_ * PANEL * 4);
        for (int64_t r = 0; r < PANEL; r++) {
            const int64_t output = panel * PANEL + r, row = output >= job.n ? -1
                                                            : job.order     ? job.order[output]
                                                                            : output;
            rows_[r] = row < 0 ? nullptr : job.rows + row * job.stride;
            scales_[r] = row < 0 || !job.scales ? nullptr : job.scales + row * job.scale_stride;
        }
    }

    // Returns what the compiled products do not take: a combination of `Refused`.
    int64_t pack() {
        for (int64_t begin = 0; begin < words_; begin += MOVED_WORDS) {
            const int64_t count = std::min(MOVED_WORDS, words_ - begin);
            for (int64_t r = 0; r < PANEL; r++) read(r, begin);
            switch (job_.kind) {
                case FP8: put_fp8(begin, count); break;
                case NVFP4: put_nvfp4(begin, count); break;
                case INT4: put_int4(begin, count); break;
                default: put_words(begin, count);
            }
        }
        return (has_nan_ ? NOT_A_NUMBER : 0) | (is_negative_ ? NEGATIVE_SCALE : 0);
    }

  private:
    // Words [begin, begin + MOVED_WORDS) of a row; zero numbers behind its end.
    void read(int64_t r, int64_t begin) {
        const int64_t at = 4 * begin, available = rows_[r] ? std::min(4 * MOVED_WORDS, bytes_ - at) : 0;
        uint8_t* to = reinterpret_cast<uint8_t*>(moved_[r]);
        if (available == 4 * MOVED_WORDS) std::memcpy(to, rows_[r] + at, 4 * MOVED_WORDS);
        else {
            std::memset(to, job_.kind == INT4 ? 0x88 : 0, 4 * MOVED_WORDS);
            if (available > 0) std::memcpy(to, rows_[r] + at, available);
        }
        if (job_.kind == INT4 && job_.k % 2 && available > 0 && at + available == bytes_)
            to[available - 1] = uint8_t((to[available - 1] & 15) | 0x80);
    }

    // [words][64]: BF16, INT8, UINT8, UINT4.
    void put_words(int64_t begin, int64_t count) {
        uint32_t* to = reinterpret_cast<uint32_t*>(out_) + begin * PANEL;
        for (int64_t i = 0; i < count; i++, to += PANEL)
            for (int64_t r = 0; r < PANEL; r++) {
                uint32_t word = moved_[r][i];
                if (job_.kind == INT8 || job_.kind == UINT8) word ^= 0x80808080;
                if (job_.kind == UINT4) word = bytes_to_nibbles(word) | bytes_to_nibbles(word >> 4) << 16;
                to[r] = word;
            }
    }

    // [inputs / 4][4][32]: the low halves of a byte are outputs 0 to 31, the high halves 32 to 63.
    void put_int4(int64_t begin, int64_t count) {
        uint32_t* to = reinterpret_cast<uint32_t*>(out_) + begin * PANEL;
        for (int64_t i = 0; i < count; i++, to += PANEL)
            for (int64_t r = 0; r < PANEL / 2; r++) {
                const uint32_t low = moved_[r][i], high = moved_[r + PANEL / 2][i];
                to[r] = nibbles_to_bytes(low & 0xffff) | nibbles_to_bytes(high & 0xffff) << 4;
                to[r + PANEL / 2] = nibbles_to_bytes(low >> 16) | nibbles_to_bytes(high >> 16) << 4;
            }
    }

    // Stores word i of all rows: in each 16 bytes the lower pairs of bytes of four outputs, then their upper pairs.
    void put_in_pairs(int64_t i, uint8_t* to) {
        for (int64_t r = 0; r < PANEL; r += 4) {
            uint64_t pairs[2] = {0, 0};
            for (int o = 0; o < 4; o++) {
                const uint32_t word = moved_[r + o][i];
                pairs[0] |= uint64_t(word & 0xffff) << 16 * o, pairs[1] |= uint64_t(word >> 16) << 16 * o;
            }
            std::memcpy(to + 4 * r, pairs, 16);
        }
    }

    void put_fp8(int64_t begin, int64_t count) {
        uint32_t carries = 0;  // e4m3 has NaN as 127 and 255: adding 1 to the lower 7 bits sets a byte's upper bit
        for (int64_t r = 0; r < PANEL; r++)
            for (int64_t i = 0; i < count; i++) carries |= (moved_[r][i] & 0x7f7f7f7f) + 0x01010101;
        has_nan_ = has_nan_ || carries & 0x80808080;
        for (int64_t i = 0; i < count; i++) put_in_pairs(i, out_ + (begin + i) * PANEL * 4);
    }

    // Groups of 16 inputs: their scales, then their numbers. In a group whose scale is zero, all numbers are zero.
    void put_nvfp4(int64_t begin, int64_t count) {
        static const ScaleBytes scale_bytes;
        for (int64_t i = 0; i < count; i += 2) {
            uint8_t* const to = out_ + (begin + i) / 2 * NVFP4_GROUP_BYTES;
            for (int64_t r = 0; r < PANEL; r++) {
                const uint8_t scale = scales_[r] ? scales_[r][(begin + i) / 2] : 0;
                has_nan_ = has_nan_ || (scale & 127) == 127;
                is_negative_ = is_negative_ || scale > 127;
                to[r] = scale_bytes.bytes[scale & 127];
                for (uint32_t* word = moved_[r] + i; word < moved_[r] + i + 2; word++)
                    *word = scale ? nibbles_to_bytes(*word & 0xffff) | nibbles_to_bytes(*word >> 16) << 4 : 0;
            }
            put_in_pairs(i, to + PANEL);  // after the scales, 4 bytes of each output
            put_in_pairs(i + 1, to + PANEL + 4 * PANEL);
        }
    }

    const Packing& job_;
    uint8_t* out_;
    int64_t bytes_, words_;                        // of a row: as it is stored, and as it is packed
    const uint8_t *rows_[PANEL], *scales_[PANEL];  // of each output; null: zeros
    uint32_t moved_[PANEL][MOVED_WORDS];           // the words that are being packed
    bool has_nan_ = false, is_negative_ = false;
};

class PackJob : public Job {
  public:
    explicit PackJob(const Packing& job) : job_(job) {}
    int64_t phases() const override { return 1; }
    int64_t units(int64_t) const override { return job_.end - job_.begin; }
    void run(int64_t, int64_t unit, std::vector<float>&) const override {
        refused_.fetch_or(PanelOfRows(job_, job_.begin + unit).pack(), std::memory_order_relaxed);
    }
    int64_t refused() const { return refused_.load(); }

  private:
    const Packing& job_;
    mutable std::atomic<int64_t> refused_{0};
};

}  // namespace
