// Products of rows of SUMMED_BYTES with weights of integers in groups of inputs (INT4, UINT8), whose sums are scaled.
//
// A panel of bytes is multiplied as it is. Of int4, the first tile of rows unpacks a panel in registers. If there are
// more tiles, it stores the bytes for them, [4 / UNPACKED_VECTORS][k / 4][UNPACKED_VECTORS][16][4]: of as many vectors
// of outputs as they multiply at a time. Sums of a group are multiplied by scales, so a tile needs two registers for
// each of its sums: with 32 of them, six rows and two vectors.

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

constexpr bool GROUP_TILES = VECTOR_REGISTERS == 1;  // whether there are enough registers for sums and totals
constexpr int UNPACKED_VECTORS = GROUP_TILES ? 2 : 4;
constexpr int WHOLE_PANEL_ROWS = 3;  // rows of a tile whose sums and totals of four vectors fit the registers

// Where the bytes of a vector of outputs begin in an unpacked panel.
inline int64_t unpacked_at(const Weight& w, int64_t vector) {
    return vector / UNPACKED_VECTORS * (w.kpad / 4 * UNPACKED_VECTORS * LINE) + vector % UNPACKED_VECTORS * LINE;
}

// A group of a panel's weights, and the rows that it is multiplied with.
struct RowGroup {
    const Weight& w;
    int64_t scales, count;      // index of the first output's scale; inputs
    const int8_t* a;            // the first row, from the group's first input on
    int64_t lda;                // bytes between rows
    const int32_t* correction;  // of each row, see below
    bool is_first;              // whether results are stored, rather than added to those of the groups before
    float* out;                 // [rows, PANEL]
};

// Bytes as tiles multiply them. STRIDE: bytes between those of four inputs and of the next four. A sum begins with
// begin(correction), where `correction` is -8 times the sum of the row's numbers in the group (BlockSums): what the
// weights' offset adds. With zero points it begins with zero, and they are subtracted, less OFFSET.
struct UnpackedInt4 {
    static constexpr int64_t STRIDE = UNPACKED_VECTORS * LINE;
    static constexpr int OFFSET = 0, LEAST_ROWS = LEAST_TILE_ROWS;
    static constexpr bool BELOW_16 = true;
    static constexpr int beside(int) { return UNPACKED_VECTORS; }
    static int64_t at(const Weight& w, int64_t vector) { return unpacked_at(w, vector); }
    static Words column(const uint8_t* b) { return in_register(load_words(b)); }
    static Words begin(Words correction) { return correction; }
};
// Where products take signed bytes only, columns are without their offset of 128.
struct StoredBytes {
    static constexpr int64_t STRIDE = 4 * LINE;
    static constexpr int OFFSET = SIGNED_DOTS ? 128 : 0, LEAST_ROWS = 1;
    static constexpr bool BELOW_16 = false;
    static constexpr int beside(int rows) { return rows <= WHOLE_PANEL_ROWS ? 4 : 2; }
    static int64_t at(const Weight&, int64_t vector) { return vector * LINE; }
    static Words column(const uint8_t* b) { return in_register(without_offset(load_words(b))); }
    static Words begin(Words correction) { return SIGNED_DOTS ? zero_words() : shift_left32<4>(correction); }
};

// Sums of a group, which are exact integers. ZEROS: whether there are zero points.
template <class Bytes, int R, int V, bool ZEROS>
inline ALWAYS void begin_group(const int32_t* correction, Words (&sum)[R][V]) {
    unrolled<R>([&](int r) ALWAYS {
        const Words first = ZEROS ? zero_words() : Bytes::begin(splat_word(correction[r]));
        unrolled<V>([&](int v) ALWAYS { sum[r][v] = first; });
    });
}

// The zero points of 16 outputs, from index `scales` on.
template <class Bytes>
inline ALWAYS Words zero_points(const Weight& w, int64_t scales) {
    const Words zeros = to_integers(load_floats(w.zeros + scales));
    return Bytes::OFFSET ? sub32(zeros, splat_word(Bytes::OFFSET)) : zeros;
}

// A group's sums for 16 outputs less those of zero points, times their scales, added to `total`.
template <bool ZEROS>
inline ALWAYS Floats add_scaled(Words sum, Words correction, Words zeros, Floats scale, Floats total) {
    if constexpr (ZEROS) sum = add32(sum, mul32(zeros, shift_right32<3>(correction)));
    return fmadd(to_floats(sum), scale, total);
}

// Adds the sums, times the scales of their outputs, to the group's results.
template <class Bytes, int R, int V, bool ZEROS>
inline ALWAYS void finish_group(Words (&sum)[R][V], const RowGroup& of) {
    const RowGroup group = of;  // a copy, which no store of a vector can change
    const Weight& w = group.w;
    in_registers(sum);
    unrolled<V>([&](int v) ALWAYS {
        const int64_t scales = group.scales + v * 16;
        const Floats scale = group_scales(w, scales);
        const Words zeros = ZEROS ? zero_points<Bytes>(w, scales) : zero_words();
        unrolled<R>([&](int r) ALWAYS {
            float* const total = group.out + r * PANEL + v * 16;
            const Floats before = group.is_first ? zero() : load_floats(total);
            store_floats(total, add_scaled<ZEROS>(sum[r][v], splat_word(group.correction[r]), zeros, scale, before));
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

// Adds the products of the inputs from `a` to `stop`, which are a multiple of SUMMED; `a` is `stop` then.
template <class Bytes, int R, int V, class Load>
inline ALWAYS void add_columns(
    const int8_t*& a, const int8_t* stop, int64_t lda, const Load& load, Words (&sum)[R][V]
) {
#if !BYTE_DOTS
    if constexpr (Bytes::BELOW_16) {
        for (; a < stop; a += SUMMED) add_block(a, lda, load, sum);
        return;
    }
#endif
    for (; a < stop; a += 4) {
        Words column[V];
        load(0, column);
        add_bytes_of(a, lda, column, sum);
    }
}

// A group whose bytes are in memory. Each group is a call: in a loop over groups, GCC would keep sums in memory.
template <class Bytes, int R, int V, bool ZEROS>
__attribute__((noinline)) void add_stored_group(const RowGroup& group, const uint8_t* b, Prefetch& ahead) {
    const int8_t *a = group.a, *const a_end = a + group.count;
    const int64_t lda = group.lda;
    constexpr bool FROM_MEMORY = GROUP_TILES && V == 4;  // otherwise other passes or tiles read the same lines
    Words sum[R][V];
    begin_group<Bytes, R, V, ZEROS>(group.correction, sum);
    const auto load = [&](int, Words(&column)[V]) ALWAYS {
        unrolled<V>([&](int v) ALWAYS { column[v] = Bytes::column(b + v * LINE); });
        b += Bytes::STRIDE;
    };
    while (a < a_end) {
        const bool fetches = ahead.step();
        if (FROM_MEMORY)
            for (int64_t at = 0; at < SUMMED * PANEL; at += LINE) prefetch_far(b + at + PREFETCH_BYTES);
        const int8_t* const stop = fetches || FROM_MEMORY ? a + SUMMED : a_end;
        add_columns<Bytes>(a, stop, lda, load, sum);
    }
    finish_group<Bytes, R, V, ZEROS>(sum, group);
}

// A group whose numbers are unpacked in registers and, if KEPT, stored for other tiles.
template <int R, int V, bool KEPT, bool ZEROS>
__attribute__((noinline)) void add_packed_group(
    const RowGroup& group, const uint8_t* b, uint8_t* unpacked, int64_t first, Prefetch& ahead
) {
    const Weight& w = group.w;
    const int64_t step = R <= 2 ? PREFETCHED_LINE_STEP * LINE : LINE;
    const int8_t *a = group.a, *const a_end = a + group.count;
    const int64_t lda = group.lda;
    Words sum[R][V];
    begin_group<UnpackedInt4, R, V, ZEROS>(group.correction, sum);
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
    finish_group<UnpackedInt4, R, V, ZEROS>(sum, group);
}

// R rows of SUMMED_BYTES, from row `row` on, times a panel.
template <int R>
void tile_groups(const Product& product, int64_t row, int64_t panel, Prefetch ahead, float* out) {
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
                const RowGroup group{w, at, end - begin, a + begin, lda, correction, !g, out + first * 16};
                if (w.kind == UINT8) {
                    if constexpr (!GROUP_TILES || R > WHOLE_PANEL_ROWS)
                        add_stored_group<StoredBytes, R, V, ZEROS>(group, packed + begin * PANEL + first * LINE, ahead);
                    continue;
                }
                uint8_t* const bytes = unpacked ? unpacked + unpacked_at(w, first) + begin / 4 * UNPACKED_VECTORS * LINE
                                                : nullptr;
                const uint8_t* const b = packed + begin * PANEL / 2;
                if (!bytes) add_packed_group<R, V, false, ZEROS>(group, b, bytes, first, ahead);
                else if constexpr (R >= LEAST_TILE_ROWS) {
                    if (product.unpacks) add_packed_group<R, V, true, ZEROS>(group, b, bytes, first, ahead);
                    else if constexpr (!GROUP_TILES) add_stored_group<UnpackedInt4, R, V, ZEROS>(group, bytes, ahead);
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

// Sums and totals in registers, for `row_tiles`.
template <class Bytes, bool ZEROS>
struct GroupWords {
    static constexpr int LEAST_ROWS = Bytes::LEAST_ROWS;
    static int64_t steps(const Weight& w) { return w.kpad / 4; }
    static constexpr int beside(int rows) { return Bytes::beside(rows); }

    template <int R, int V, class Finish>
    static __attribute__((noinline)) void add(
        const Product& product, int64_t row, int64_t count, const uint8_t* columns, int64_t panel, int64_t first,
        TilesPrefetch ahead, const Finish& finish
    ) {
        const Weight& w = *product.weight;
        const int64_t lda = product.ld_bytes(), begin = panel * PANEL + first * 16, inputs = w.kpad, group = w.group,
                      groups = scale_groups(w);
        const int8_t* a = product.row_bytes(row);
        columns += Bytes::at(w, first);
        for (int64_t left = count; left; left--, row += R, a += R * lda) {
            fetch_outputs<R, V>(product, row, begin);
            const int64_t lines = left <= ahead.tiles ? ahead.lines : 0;
            const int8_t *const a_end = a + inputs, *x = a, *block_sums = a_end;
            const uint8_t* b = columns;
            Floats total[R][V];
            unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { total[r][v] = zero(); }); });
            int64_t scales = panel * groups * PANEL + first * 16;
            for (int64_t g = groups; g; g--, scales += PANEL) {
                const int8_t* const stop = g > 1 ? x + group : a_end;
                const int64_t block_bytes = (stop - x) / SUMMED * 4;
                Words correction[R], sum[R][V];
                unrolled<R>([&](int r) ALWAYS {
                    const int8_t* const before = block_sums + r * lda;
                    correction[r] = sub32(broadcast_word(before + block_bytes), broadcast_word(before));
                    const Words start = ZEROS ? zero_words() : Bytes::begin(correction[r]);
                    unrolled<V>([&](int v) ALWAYS { sum[r][v] = start; });
                });
                block_sums += block_bytes;
                const auto load = [&](int, Words(&column)[V]) ALWAYS {
                    for (int64_t line = 0; line < lines; line++, ahead.at += LINE) prefetch_far(ahead.at);
                    unrolled<V>([&](int v) ALWAYS { column[v] = Bytes::column(b + v * LINE); });
                    b += Bytes::STRIDE;
                };
                add_columns<Bytes>(x, stop, lda, load, sum);
                in_registers(sum);
                unrolled<V>([&](int v) ALWAYS {
                    const Floats scale = group_scales(w, scales + v * 16);
                    const Words zeros = ZEROS ? zero_points<Bytes>(w, scales + v * 16) : zero_words();
                    unrolled<R>([&](int r) ALWAYS {
                        total[r][v] = add_scaled<ZEROS>(sum[r][v], correction[r], zeros, scale, total[r][v]);
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

// Rows [begin, end) times vectors of a panel, at `columns`, V at a time.
template <class Bytes, int V>
void group_tiles(const Product& product, int64_t begin, int64_t end, const uint8_t* columns, PanelPart part) {
    if constexpr (GROUP_TILES) {
        const Weight& w = *product.weight;
        const int64_t last = std::min(part.first + part.count, (w.n - part.panel * PANEL + 15) / 16);
        for (; part.first < last; part.first += V, part.next = nullptr) {
            if (w.zeros) row_tiles<GroupWords<Bytes, true>, V>(product, begin, end, columns, part);
            else row_tiles<GroupWords<Bytes, false>, V>(product, begin, end, columns, part);
        }
    }
}

}  // namespace
