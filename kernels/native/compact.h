// bfloat16 weights in 12 bits a number, without loss.
//
// In a panel of trained or random weights nearly all exponents are among 16 adjacent ones, from `base` on, so that four
// bits say which one a number has. Two inputs of a panel take three lines of 64 bytes instead of four. Line v < 3 has
// the numbers of outputs [16 v, 16 v + 16), as [16][2] words of 16 bits:
//
//     bit 15         sign
//     bits 14 to 11  four bits of a number of outputs [48, 64)
//     bits 10 to 7   exponent - base
//     bits 6 to 0    fraction
//
// The four bits are: in line 0 the other number's exponent - base, in line 1 bits 3 to 0 of its fraction, in line 2 its
// sign and bits 6 to 4 of its fraction. Numbers with other exponents, such as zero, are exceptions: the panel's list
// has their places, and they are replaced after unpacking. So products have the bits of those with plain weights.
//
// In a table whose rows are only read (COMPACT_ROWS) each row is a panel, which has its numbers in their order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "panels.h"
#include "processor.h"
#include "structs.h"
#include "threads.h"
#include "tiles.h"

extern "C" {

struct Compacting {               // structs.py mirrors it
    const uint16_t* plain;        // [panels, kpad / 2, 64, 2]
    int64_t kpad, outputs;        // of all panels; exceptions of outputs beyond these are not listed
    uint8_t* compact;             // [panels, kpad / 2, 3, 64]
    int64_t *heads, *exceptions;  // [panels, 2]: the number of exceptions, and base; [panels, most]
    int64_t most;                 // exceptions of a panel that are listed; all are counted
};
}

namespace {

constexpr int64_t COMPACT_LINES = 3;   // of a pair of inputs
constexpr int64_t PAIR = 2 * PANEL;    // numbers of a pair of inputs
constexpr uint16_t OWN_BITS = 0x87ff;  // of a word: all but the four bits of another number
constexpr int FOURTH_SHIFT = 11;       // the first of those four bits
constexpr uint16_t FRACTION = 0x7f;    // of a bfloat16

// Iterates over the exceptions of a panel, from a pair of inputs on.
class Exceptions {
  public:
    Exceptions(const Weight& w, int64_t panel, int64_t pair)
        : at_(w.exceptions + w.compact[2 * panel]), end_(w.exceptions + w.compact[2 * panel + 2]) {
        at_ = std::lower_bound(at_, end_, pair * PAIR << 16);
    }
    // The next pair of inputs with an exception; after the last one, none.
    int64_t pair() const { return at_ < end_ ? (*at_ >> 16) / PAIR : INT64_MAX; }
    // Replaces the numbers of that pair, [64][2], or `count` of them from `first` on.
    void replace(uint16_t* numbers, int64_t first = 0, int64_t count = PAIR) {
        for (const int64_t now = pair(); pair() == now; at_++) {
            const int64_t place = (*at_ >> 16) % PAIR - first;
            if (place >= 0 && place < count) numbers[place] = uint16_t(*at_);
        }
    }

  private:
    const int64_t *at_, *end_;  // (place in the plain panel) << 16 | the number's bits, ascending
};

inline uint16_t base_of(const Weight& w, int64_t panel) { return uint16_t(w.compact[2 * panel + 1]); }

// Vector v of a pair of inputs. `base`: the panel's, in the exponent's place.
inline ALWAYS Words unpack_compact(const uint8_t* lines, int v, Words base) {
    if (v < COMPACT_LINES) return add16(load_words(lines + v * LINE) & splat_half(int16_t(OWN_BITS)), base);
    const Words exponent = shift_right16(load_words(lines), 4),
                low = shift_right16(load_words(lines + LINE), FOURTH_SHIFT);
    const Words last = load_words(lines + 2 * LINE);
    const Words sign_and_high = choose_bits(splat_half(int16_t(0x8000)), add16(last, last), shift_right16(last, 7));
    const Words rest = choose_bits(splat_half(0x0780), exponent, low);
    return add16(choose_bits(splat_half(int16_t(0x8070)), sign_and_high, rest), base);
}

#if AMX_TILES
// The numbers of a compact panel, unpacked in the order of the inputs from `input` on.
class CompactNumbers {
  public:
    CompactNumbers(const Weight& w, int64_t panel, int64_t input)
        : lines_(panel_data(w, panel)), base_(splat_half(int16_t(base_of(w, panel)))),
          exceptions_{Exceptions(w, panel, input / 2), Exceptions(w, panel, input / 2)} {
        for (int i = 0; i < 2; i++) exception_[i] = exceptions_[i].pair();
    }

    // Prefetches as many lines as these inputs have, PREFETCH_BYTES bytes behind them.
    ALWAYS void fetch(int64_t input, int64_t count) const {
        const auto* lines = reinterpret_cast<const char*>(lines_ + input / 2 * COMPACT_LINES * LINE) + PREFETCH_BYTES;
        for (int64_t i = 0; i < count / 2 * COMPACT_LINES; i++) fetch_line(lines + i * LINE);
    }

    // Vectors [FIRST, FIRST + V) of some inputs, as [count / 2][16 V][2]. FIRST is 0 or 2.
    template <int FIRST, int V>
    ALWAYS void unpack(int64_t input, int64_t count, uint16_t* to) {
        const uint8_t* lines = lines_ + input / 2 * COMPACT_LINES * LINE;
        for (int64_t i = 0; i < count / 2; i++, lines += COMPACT_LINES * LINE)
            unrolled<V>([&](int v) ALWAYS {
                store_words(to + (i * V + v) * 32, unpack_compact(lines, FIRST + v, base_));
            });
        int64_t& next = exception_[FIRST / 2];
        while (__builtin_expect(next < (input + count) / 2, 0)) {
            exceptions_[FIRST / 2].replace(to + (next - input / 2) * V * 32, FIRST * 32, V * 32);
            next = exceptions_[FIRST / 2].pair();
        }
    }

  private:
    const uint8_t* const lines_;
    const Words base_;
    Exceptions exceptions_[2];  // of vectors from 0 on, and from 2 on
    int64_t exception_[2];      // the next pair of inputs with one
};
#endif

// R rows times vectors [FIRST, FIRST + V) of a panel, unpacked in registers and, if KEPT, stored in `keep` for other
// rows, as scaled.h does. `a` and `keep` begin with the first of the inputs; `sums` has what those before them gave.
// One vector after the other is unpacked and multiplied with all rows, so that six rows leave enough registers; fewer
// rows whose numbers are stored take less time if all vectors are unpacked first.
template <class Rows, bool KEPT, int R, int FIRST, int V>
__attribute__((noinline)) void tile_compact(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, Inputs inputs,
    typename Rows::Element* keep, Prefetch ahead, float* sums
) {
    constexpr bool TOGETHER = KEPT && (R + 3) * V <= REGISTERS;
    const int64_t end = inputs.end / 2;
    int64_t i = inputs.begin / 2;
    const uint8_t* lines = panel_data(w, panel) + i * COMPACT_LINES * LINE;
    const Words base = splat_half(int16_t(base_of(w, panel)));
    Exceptions exceptions(w, panel, i);
    int64_t exception = exceptions.pair();
    Floats sum[R][V];
    load_sums(!inputs.begin, sums, sum);
    alignas(64) uint16_t numbers[PAIR];
    while (i < end) {
        const int64_t stop = std::min(end, i + PREFETCH_STEPS);
        ahead.step();
        for (; i < stop; i++, lines += COMPACT_LINES * LINE, a += 2) {
            if constexpr (FIRST == 0)  // for the other vectors, too
                for (int64_t line = 0; line < COMPACT_LINES; line += R <= 2 ? PREFETCHED_LINE_STEP : 1)
                    fetch_line(reinterpret_cast<const char*>(lines) + PREFETCH_BYTES + line * LINE);
            const bool replaced = __builtin_expect(i == exception, 0);
            if (replaced) {
                unrolled<V>([&](int v) ALWAYS {
                    store_words(numbers + (FIRST + v) * 32, unpack_compact(lines, FIRST + v, base));
                });
                exceptions.replace(numbers);
                exception = exceptions.pair();
            }
            const auto column_of = [&](int v) ALWAYS {
                const Words words = replaced ? load_words(numbers + (FIRST + v) * 32)
                                             : unpack_compact(lines, FIRST + v, base);
                const typename Rows::Column column(words);
                if constexpr (KEPT) column.keep(keep, 0, (FIRST + v) * 16);
                return column;
            };
            if constexpr (TOGETHER) {
                typename Rows::Column column[V];
                unrolled<V>([&](int v) ALWAYS { column[v] = column_of(v); });
                unrolled<R>([&](int r) ALWAYS {
                    const auto x = Rows::cell(a + r * lda);
                    unrolled<V>([&](int v) ALWAYS { sum[r][v] = Rows::add(sum[r][v], x, column[v]); });
                });
            } else {
                unrolled<V>([&](int v) ALWAYS {
                    const auto column = column_of(v);
                    unrolled<R>([&](int r) ALWAYS { sum[r][v] = Rows::add_at(sum[r][v], a + r * lda, column); });
                });
            }
            if constexpr (KEPT) keep += PAIR;
        }
    }
    store_sums(sum, sums);
}

// Packs panels from the plain layout; each is a unit of work.
class CompactJob : public Job {
  public:
    explicit CompactJob(const Compacting& job) : job_(job) {}
    int64_t phases() const override { return 1; }
    int64_t units(int64_t) const override { return (job_.outputs + PANEL - 1) / PANEL; }
    void run(int64_t, int64_t panel, std::vector<float>&) const override {
        const int64_t count = std::min(PANEL, job_.outputs - panel * PANEL), pairs = job_.kpad / 2;
        const uint16_t* numbers = job_.plain + panel * pairs * PAIR;
        const int base = best_base(numbers, pairs, 2 * count);
        uint8_t* lines = job_.compact + panel * pairs * COMPACT_LINES * LINE;
        int64_t exception_count = 0;
        for (int64_t i = 0; i < pairs; i++, numbers += PAIR, lines += COMPACT_LINES * LINE) {
            uint16_t small[PAIR], outside = 0;
            for (int64_t j = 0; j < PAIR; j++) {
                const int code = (numbers[j] >> 7 & 255) - base;
                const bool is_outside = unsigned(code) > 15;
                outside |= is_outside;
                small[j] = uint16_t((numbers[j] & (0x8000 | FRACTION)) | (is_outside ? 0 : code << 7));
            }
            if (outside)
                for (int64_t j = 0; j < 2 * count; j++)
                    if (unsigned((numbers[j] >> 7 & 255) - base) > 15) {
                        if (exception_count < job_.most)
                            job_.exceptions[panel * job_.most + exception_count] = (i * PAIR + j) << 16 | numbers[j];
                        exception_count++;
                    }
            for (int64_t j = 0; j < 32; j++) {
                const uint16_t last = small[3 * 32 + j], parts[3] = {
                                                             uint16_t(last >> 7 & 15), uint16_t(last & 15),
                                                             uint16_t((last >> 15) << 3 | (last >> 4 & 7))
                                                         };
                for (int v = 0; v < COMPACT_LINES; v++) small[v * 32 + j] |= uint16_t(parts[v] << FOURTH_SHIFT);
            }
            std::memcpy(lines, small, COMPACT_LINES * LINE);
        }
        job_.heads[2 * panel] = exception_count, job_.heads[2 * panel + 1] = base << 7;
    }

  private:
    // The first of the 16 adjacent exponents that most of these numbers have: of each pair of inputs the first `count`.
    static int best_base(const uint16_t* numbers, int64_t pairs, int64_t count) {
        int64_t counts[256] = {};
        for (int64_t i = 0; i < pairs; i++, numbers += PAIR)
            for (int64_t j = 0; j < count; j++) counts[numbers[j] >> 7 & 255]++;
        int64_t inside = 0, most = -1;
        int best = 0;
        for (int e = 0; e < 256; e++) {
            inside += counts[e];
            if (e > 15) inside -= counts[e - 16];
            if (e >= 15 && inside > most) most = inside, best = e - 15;
        }
        return best;
    }

    const Compacting& job_;
};

// Row r of a panel, as numbers [k].
inline void read_compact(const Weight& w, int64_t panel, int64_t r, float* to) {
    const uint8_t* lines = panel_data(w, panel);
    for (int64_t i = 0; i < w.k; i++) {
        uint16_t words[COMPACT_LINES];
        const uint8_t* const place = lines + i / 2 * COMPACT_LINES * LINE + (2 * r + i % 2) % 32 * 2;
        for (int v = 0; v < COMPACT_LINES; v++) std::memcpy(words + v, place + v * LINE, 2);
        int number = r < 48 ? words[r / 16] & OWN_BITS : 0;
        if (r >= 48) {
            const int parts[COMPACT_LINES] = {
                words[0] >> FOURTH_SHIFT & 15, words[1] >> FOURTH_SHIFT & 15, words[2] >> FOURTH_SHIFT & 15
            };
            number = (parts[2] >> 3) << 15 | parts[0] << 7 | (parts[2] & 7) << 4 | parts[1];
        }
        to[i] = bf16_to_float(uint16_t(number + base_of(w, panel)));
    }
    for (int64_t e = w.compact[2 * panel]; e < w.compact[2 * panel + 2]; e++) {
        const int64_t place = w.exceptions[e] >> 16, input = place / PAIR * 2 + place % 2;
        if (place % PAIR / 2 == r && input < w.k) to[input] = bf16_to_float(uint16_t(w.exceptions[e]));
    }
}

// Row `id` of a table in COMPACT_ROWS, as numbers [k]: those of a panel in the order in which it has them.
inline void read_compact_row(const Weight& table, int64_t id, float* to) {
    const uint8_t* lines = static_cast<const uint8_t*>(table.data) + id * table.k / PAIR * COMPACT_LINES * LINE;
    const Words base = splat_half(int16_t(base_of(table, id)));
    alignas(64) uint16_t numbers[PAIR];
    for (int64_t at = 0; at < table.k; at += PAIR, lines += COMPACT_LINES * LINE) {
        for (int v = 0; v < 4; v++) store_words(numbers + v * 32, unpack_compact(lines, v, base));
        for (int64_t i = 0; i < PAIR; i++) to[at + i] = bf16_to_float(numbers[i]);
    }
    for (int64_t e = table.compact[2 * id]; e < table.compact[2 * id + 2]; e++)
        to[table.exceptions[e] >> 16] = bf16_to_float(uint16_t(table.exceptions[e]));
}

}  // namespace
