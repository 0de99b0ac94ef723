// Products with int4 weights of rows of SUMMED_BYTES.
//
// The first tile of rows unpacks a panel in registers. If there are more tiles, it stores the bytes for them,
// [4 / UNPACKED_VECTORS][k / 4][UNPACKED_VECTORS][16][4]: of as many vectors of outputs as they multiply at a time.
// Sums of a group are multiplied by scales, so a tile needs two registers for each of its sums: with 32 of them, six
// rows and two vectors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "finish.h"
#include "panels.h"
#include "processor.h"
#include "row_tiles.h"
#include "structs.h"
#include "tiles.h"

namespace {

constexpr bool INT4_TILES = VECTOR_REGISTERS == 1;  // whether there are enough registers
constexpr int UNPACKED_VECTORS = INT4_TILES ? 2 : 4;

// Where the bytes of a vector of outputs begin in an unpacked panel.
inline int64_t unpacked_at(const Weight& w, int64_t vector) {
    return vector / UNPACKED_VECTORS * (w.kpad / 4 * UNPACKED_VECTORS * LINE) + vector % UNPACKED_VECTORS * LINE;
}

// A group of int4 weights of a panel, and the rows that it is multiplied with.
struct Int4Group {
    const Weight& w;
    int64_t scales, count;      // index of the first output's scale; inputs
    const int8_t* a;            // the first row, from the group's first input on
    int64_t lda;                // bytes between rows
    const int32_t* correction;  // of each row
    bool is_first;              // whether results are stored, rather than added to those of the groups before
    float* out;                 // [rows, PANEL]
};

// Sums of a group of int4 weights with rows of SUMMED_BYTES are exact integers. They begin with `correction`, for the
// weights' offset of 8: of each row, -8 times the sum of its numbers in the group. ZEROS: zero points are subtracted as
// float32 instead, exactly up to 8,192 inputs a group.
template <int R, int V, bool ZEROS>
inline ALWAYS void begin_group(const int32_t* correction, Words (&sum)[R][V]) {
    unrolled<R>([&](int r) ALWAYS {
        unrolled<V>([&](int v) ALWAYS { sum[r][v] = ZEROS ? zero_words() : splat_word(correction[r]); });
    });
}

// A group's sums for 16 outputs, times their scales, added to `total`. `scales`: index of those outputs' first zero
// point.
template <bool ZEROS>
inline ALWAYS Floats add_scaled(
    Words sum, Floats correction, const Weight& w, int64_t scales, Floats scale, Floats total
) {
    Floats exact = to_floats(sum);
    if constexpr (ZEROS) exact = fmadd(correction * splat(0.125f), load_floats(w.zeros + scales), exact);
    return fmadd(exact, scale, total);
}

// Adds the sums, times the scales of their outputs, to the group's results.
template <int R, int V, bool ZEROS>
inline ALWAYS void finish_group(Words (&sum)[R][V], const Int4Group& of) {
    const Int4Group group = of;  // a copy, which no store of a vector can change
    const Weight& w = group.w;
    in_registers(sum);
    unrolled<V>([&](int v) ALWAYS {
        const int64_t scales = group.scales + v * 16;
        const Floats scale = group_scales(w, scales);
        unrolled<R>([&](int r) ALWAYS {
            float* const total = group.out + r * PANEL + v * 16;
            const Floats before = group.is_first ? zero() : load_floats(total);
            const Floats correction = splat(float(group.correction[r]));
            store_floats(total, add_scaled<ZEROS>(sum[r][v], correction, w, scales, scale, before));
        });
    });
}

#if !BYTE_DOTS
// Adds the products of SUMMED inputs: sums of 16 products of at most 15 x 127 fit 16 bits. load(i, column) loads what
// the words `i` of the rows are multiplied with.
template <int R, int V, class Load>
inline ALWAYS void add_block(const int8_t* a, int64_t lda, const Load& load, Words (&sum)[R][V]) {
    Words half_sum[R][V];
    unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { half_sum[r][v] = zero_words(); }); });
    for (int i = 0; i < SUMMED / 4; i++) {
        Words column[V];
        load(i, column);
        unrolled<R>([&](int r) ALWAYS {
            const Words x = word_of_row(a + r * lda + 4 * i);
            unrolled<V>([&](int v) ALWAYS { half_sum[r][v] = dot_in_halves(half_sum[r][v], column[v], x); });
        });
    }
    in_registers(half_sum);
    unrolled<R>([&](int r) ALWAYS {
        unrolled<V>([&](int v) ALWAYS { sum[r][v] = dot_halves(sum[r][v], half_sum[r][v], splat_half(1)); });
    });
}
#endif

// A group that another tile has unpacked to bytes. Each group is a call: in a loop over groups, GCC would keep sums in
// memory.
template <int R, int V, bool ZEROS>
__attribute__((noinline)) void add_unpacked_group(const Int4Group& group, const uint8_t* b, Prefetch& ahead) {
    const int8_t *a = group.a, *const a_end = a + group.count;
    const int64_t lda = group.lda;
    Words sum[R][V];
    begin_group<R, V, ZEROS>(group.correction, sum);
#if !BYTE_DOTS
    for (; a < a_end; a += SUMMED, b += SUMMED / 4 * UNPACKED_VECTORS * LINE) {
        ahead.step(), ahead.step();
        add_block(
            a, lda,
            [&](int i, Words(&column)[V]) ALWAYS {
                unrolled<V>([&](int v) ALWAYS {
                    column[v] = in_register(load_words(b + (i * UNPACKED_VECTORS + v) * LINE));
                });
            },
            sum
        );
    }
#else
    while (a < a_end) {
        const int8_t* const stop = ahead.step() ? std::min(a_end, a + 8 * PREFETCH_STEPS) : a_end;
        for (; a < stop; a += 4, b += UNPACKED_VECTORS * LINE) {
            Words column[V];
            unrolled<V>([&](int v) ALWAYS { column[v] = in_register(load_words(b + v * LINE)); });
            add_bytes_of(a, lda, column, sum);
        }
    }
#endif
    finish_group<R, V, ZEROS>(sum, group);
}

// A group whose numbers are unpacked in registers and, if KEPT, stored for other tiles.
template <int R, int V, bool KEPT, bool ZEROS>
__attribute__((noinline)) void add_packed_group(
    const Int4Group& group, const uint8_t* b, uint8_t* unpacked, int64_t first, Prefetch& ahead
) {
    const Weight& w = group.w;
    const int64_t step = R <= 2 ? PREFETCHED_LINE_STEP * LINE : LINE;
    const int8_t *a = group.a, *const a_end = a + group.count;
    const int64_t lda = group.lda;
    Words sum[R][V];
    begin_group<R, V, ZEROS>(group.correction, sum);
    constexpr int64_t INPUTS = BYTE_DOTS ? 4 * PREFETCH_STEPS : SUMMED;  // at a time
    for (; a < a_end; a += INPUTS) {
        ahead.step();
        const int64_t lines = first ? 0 : INPUTS * PANEL / 2;  // the first vectors' pass reads for the others
        for (int64_t at = 0; at < lines; at += step) prefetch_far(b + at + PREFETCH_BYTES);
        const auto unpack = [&](int, Words(&column)[V]) ALWAYS {
            unpack_int4(b, first, column);
            b += 2 * PANEL;
            if constexpr (KEPT)
                unrolled<V>([&](int v) ALWAYS { store_words(unpacked + unpacked_at(w, v), column[v]); });
            if constexpr (KEPT) unpacked += UNPACKED_VECTORS * LINE;
        };
#if BYTE_DOTS
        unrolled<PREFETCH_STEPS>([&](int i) ALWAYS {
            Words column[V];
            unpack(i, column);
            add_bytes_of(a + 4 * i, lda, column, sum);
        });
#else
        add_block(a, lda, unpack, sum);
#endif
    }
    finish_group<R, V, ZEROS>(sum, group);
}

// R rows of SUMMED_BYTES, from row `row` on, times a panel of int4 weights.
template <int R>
void tile_int4_bytes(const Product& product, int64_t row, int64_t panel, Prefetch ahead, float* out) {
    const Weight& w = *product.weight;
    const int8_t* const a = product.row_bytes(row);
    const int64_t lda = product.ld_bytes();
    uint8_t* const unpacked = static_cast<uint8_t*>(product.unpacked);
    constexpr int V = bytes_beside(R);
    const int64_t groups = scale_groups(w);
    const uint8_t* const packed = panel_data(w, panel);
    const auto run = [&](auto zeros) {
        constexpr bool ZEROS = decltype(zeros)::value;
        for (int first = 0; first < 4; first += V)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t begin = g * w.group, end = g + 1 < groups ? begin + w.group : w.kpad;
                const int64_t at = (panel * groups + g) * PANEL + first * 16;
                int32_t correction[R];
                for (int r = 0; r < R; r++) {
                    uint32_t before, all;
                    std::memcpy(&before, a + r * lda + w.kpad + begin / SUMMED * 4, 4);
                    std::memcpy(&all, a + r * lda + w.kpad + end / SUMMED * 4, 4);
                    correction[r] = int32_t(all - before);
                }
                uint8_t* const bytes = unpacked ? unpacked + unpacked_at(w, first) + begin / 4 * UNPACKED_VECTORS * LINE
                                                : nullptr;
                const uint8_t* const b = packed + begin * PANEL / 2;
                const Int4Group group{w, at, end - begin, a + begin, lda, correction, !g, out + first * 16};
                if (!bytes) add_packed_group<R, V, false, ZEROS>(group, b, bytes, first, ahead);
                else if constexpr (R >= LEAST_TILE_ROWS) {
                    if (product.unpacks) add_packed_group<R, V, true, ZEROS>(group, b, bytes, first, ahead);
                    else if constexpr (!INT4_TILES) add_unpacked_group<R, V, ZEROS>(group, bytes, ahead);
                }
            }
    };
    if (w.zeros) run(std::true_type());
    else run(std::false_type());
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++)
            store_floats(
                out + r * PANEL + v * 16, load_floats(out + r * PANEL + v * 16) * splat(product.scales[row + r])
            );
}

// Of an unpacked panel, for `row_tiles`.
template <bool ZEROS>
struct Int4Words {
    static constexpr int LEAST_ROWS = LEAST_TILE_ROWS;
    static int64_t steps(const Weight& w) { return w.kpad / 4; }
    static constexpr int beside(int) { return UNPACKED_VECTORS; }

    template <int R, int V, class Finish>
    static __attribute__((noinline)) void add(
        const Product& product, int64_t row, int64_t count, const uint8_t* columns, int64_t panel, int64_t first,
        TilesPrefetch ahead, const Finish& finish
    ) {
        const Weight& w = *product.weight;
        const int64_t lda = product.ld_bytes(), begin = panel * PANEL + first * 16, inputs = w.kpad, group = w.group,
                      groups = scale_groups(w);
        const char* a = reinterpret_cast<const char*>(product.row_bytes(row));
        for (int64_t left = count; left; left--, row += R, a += R * lda) {
            fetch_outputs<R, V>(product, row, begin);
            const int64_t lines = left <= ahead.tiles ? ahead.lines : 0;
            const char *const a_end = a + inputs, *x = a, *block_sums = a_end;
            const uint8_t* b = columns;
            Floats total[R][V];
            unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { total[r][v] = zero(); }); });
            int64_t scales = panel * groups * PANEL + first * 16;
            for (int64_t g = groups; g; g--, scales += PANEL) {
                const char* const stop = g > 1 ? x + group : a_end;
                const int64_t block_bytes = (stop - x) / SUMMED * 4;
                Words correction[R], sum[R][V];
                unrolled<R>([&](int r) ALWAYS {
                    const int8_t* const before = reinterpret_cast<const int8_t*>(block_sums + r * lda);
                    correction[r] = sub32(broadcast_word(before + block_bytes), broadcast_word(before));
                    unrolled<V>([&](int v) ALWAYS { sum[r][v] = ZEROS ? zero_words() : correction[r]; });
                });
                block_sums += block_bytes;
                const auto load = [&](int, Words(&column)[V]) ALWAYS {
                    for (int64_t line = 0; line < lines; line++, ahead.at += LINE) prefetch_far(ahead.at);
                    unrolled<V>([&](int v) ALWAYS { column[v] = in_register(load_words(b + v * LINE)); });
                    b += V * LINE;
                };
#if BYTE_DOTS
                for (; x < stop; x += 4) {
                    Words column[V];
                    load(0, column);
                    add_bytes_of(reinterpret_cast<const int8_t*>(x), lda, column, sum);
                }
#else
                for (; x < stop; x += SUMMED) add_block(reinterpret_cast<const int8_t*>(x), lda, load, sum);
#endif
                in_registers(sum);
                unrolled<V>([&](int v) ALWAYS {
                    const Floats scale = group_scales(w, scales + v * 16);
                    unrolled<R>([&](int r) ALWAYS {
                        total[r][v] = add_scaled<ZEROS>(
                            sum[r][v], to_floats(correction[r]), w, scales + v * 16, scale, total[r][v]
                        );
                    });
                });
            }
            in_registers(total);
            finish(row, [&](const auto& finish_row) ALWAYS {
                unrolled<R>([&](int r) ALWAYS {
                    const Floats scale = splat(product.scales[row + r]);
                    Floats y[V];
                    unrolled<V>([&](int v) ALWAYS { y[v] = total[r][v] * scale; });
                    finish_row(r, y);
                });
            });
        }
    }
};

// Rows [begin, end) times an unpacked panel.
template <int V>
void int4_tiles(const Product& product, int64_t begin, int64_t end, PanelPart part) {
    if constexpr (INT4_TILES) {
        const Weight& w = *product.weight;
        const auto* const bytes = static_cast<const uint8_t*>(product.unpacked);
        for (part.first = 0; part.first < 4 && part.panel * PANEL + part.first * 16 < w.n;
             part.first += V, part.next = nullptr) {
            const uint8_t* const columns = bytes + unpacked_at(w, part.first);
            if (w.zeros) row_tiles<Int4Words<true>, V>(product, begin, end, columns, part);
            else row_tiles<Int4Words<false>, V>(product, begin, end, columns, part);
        }
    }
}

}  // namespace
