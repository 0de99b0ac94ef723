// Products of rows with a panel by tiles of AMX, which are loaded from memory only: numbers of 12, 8 and 4 bits are
// stored as bfloat16 first.
//
// One tile of rows waits for the panel (`unpack_between`). More rows are multiplied in slices of the inputs: the
// columns of a slice and of two vectors are unpacked, or copied, to 16 KB that lie one after the other and stay in the
// first-level cache, and are multiplied with all rows of a unit of work; the sums are in memory between slices. If both
// factors of a product came from the second-level cache, it would take a third longer.

#pragma once

#include <algorithm>
#include <cstdint>

#include "finish.h"
#include "panels.h"
#include "scaled.h"
#include "scratch.h"
#include "structs.h"
#include "tiles_amx.h"

namespace {

#if AMX_TILES

constexpr int64_t HEIGHT = 2 * AMX_ROWS;  // rows of a block
constexpr int64_t SLICE_BYTES = 512;      // of a row, in a slice
constexpr int64_t CHUNK_BYTES = 16;       // of a row, whose columns are unpacked together: CHUNK inputs of bfloat16
constexpr int64_t PIECE_BYTES = 256;      // of a row, whose columns are unpacked before they are multiplied
static_assert(CHUNK_BYTES == 2 * CHUNK);

// Prefetches the stored bytes of a panel, or of some of its inputs, and the first bytes of what follows, evenly while
// the panel is multiplied.
class Stream {
  public:
    Stream() = default;
    // `ahead`: how many of the bytes have been prefetched before, and will be of those at `next`, which follow (or
    // null). `steps`: how often step() will be called.
    Stream(const char* from, int64_t bytes, int64_t ahead, const char* next, int64_t steps)
        : at_(from + std::min(bytes, ahead)), end_(from + bytes), next_(next), next_bytes_(std::min(bytes, ahead)),
          step_bytes_((bytes + LINE * steps - 1) / (LINE * steps) * LINE) {}
    void step() {
        if (at_ >= end_) {
            if (!next_) return;
            at_ = next_, end_ = next_ + next_bytes_, next_ = nullptr;
        }
        for (const char* const stop = at_ + step_bytes_; at_ < stop; at_ += LINE) fetch_line(at_);
    }

  private:
    const char *at_ = nullptr, *end_ = nullptr, *next_ = nullptr;
    int64_t next_bytes_ = 0, step_bytes_ = 0;
};

// The numbers of a panel that tiles multiply as they are stored, SIZE bytes each. `data`: the first vector that is
// multiplied.
template <int64_t SIZE>
class PlainNumbers {
  public:
    explicit PlainNumbers(const char* data) : data_(data) {}

    // Copies vectors [FIRST, FIRST + V) of `count` inputs, as [count * SIZE / 4][V][16] words.
    template <int FIRST, int V>
    ALWAYS void unpack(int64_t input, int64_t count, void* to) {
        const char* from = data_ + input * SIZE * PANEL + FIRST * AMX_BYTES;
        char* out = static_cast<char*>(to);
        for (int64_t i = 0; i < count * SIZE / 4; i++, from += 4 * PANEL, out += V * AMX_BYTES)
            unrolled<V>([&](int v) ALWAYS { store_words(out + v * AMX_BYTES, load_words(from + v * AMX_BYTES)); });
    }

  private:
    const char* const data_;
};

// Adds products of bytes [inputs.begin, inputs.end) of two tiles of rows with V vectors, from FIRST on, which are
// unpacked to `cells`, [bytes / 4][V][16] words. Stores and the loads of tiles that need them would delay each other if
// fewer than PIECE_BYTES of the rows were between them.
template <class Dot, int V, int FIRST, class Numbers>
void unpack_and_add(const TileRows& rows, Numbers& numbers, Inputs inputs, char* cells, Stream& stream) {
    constexpr int64_t EACH = V * AMX_BYTES / 4;  // bytes of cells for a byte of a row
    for (int64_t begin = inputs.begin; begin < inputs.end; begin += PIECE_BYTES) {
        const int64_t end = std::min(begin + PIECE_BYTES, inputs.end);
        char* const to = cells + (begin - inputs.begin) * EACH;
        for (int64_t at = begin; at < end; at += CHUNK_BYTES) {
            stream.step();
            numbers.template unpack<FIRST, V>(
                at / Dot::SIZE, std::min(CHUNK_BYTES, end - at) / Dot::SIZE,
                reinterpret_cast<uint16_t*>(to + (at - begin) * EACH)
            );
        }
        TileBlock<Dot, 2, V>::add(rows, begin, to, V * AMX_BYTES, end - begin, stream);
    }
}

// The same for one tile of rows and a whole panel. The numbers for a step of 64 bytes of the rows are unpacked between
// the instructions on the tiles of the previous step: that takes longer than the above, but never stops reading the
// panel. `cells`: of two steps, [2][16][64] words.
template <class Numbers>
void unpack_between(const TileRows& rows, Numbers& numbers, Inputs inputs, char* cells) {
    using Block = TileBlock<DotBf16, 1, 4>;
    constexpr int64_t EACH = PANEL;  // bytes of cells for a byte of a row
    const int64_t end = inputs.begin + (inputs.end - inputs.begin) / AMX_BYTES * AMX_BYTES;
    const auto place = [&](int64_t at) { return cells + (at - inputs.begin) % (2 * AMX_BYTES) * EACH; };
    const auto unpack = [&](int64_t at, int64_t bytes) ALWAYS {
        numbers.fetch(at / 2, bytes / 2);
        numbers.template unpack<0, 4>(at / 2, bytes / 2, reinterpret_cast<uint16_t*>(place(at)));
    };
    for (int64_t at = inputs.begin; at < std::min(end, inputs.begin + AMX_BYTES); at += CHUNK_BYTES)
        unpack(at, CHUNK_BYTES);
    for (int64_t at = inputs.begin; at < end; at += AMX_BYTES) {
        const bool more = at + AMX_BYTES < end;
        Block::step(rows.at + at, rows.lda, rows.next, place(at), 4 * AMX_BYTES, [&](int part) ALWAYS {
            if (more) unpack(at + AMX_BYTES + part * CHUNK_BYTES, CHUNK_BYTES);
        });
    }
    for (int64_t at = end; at < inputs.end; at += CHUNK_BYTES) unpack(at, std::min(CHUNK_BYTES, inputs.end - at));
    Stream nothing;
    Block::add(rows, end, place(end), 4 * AMX_BYTES, inputs.end - end, nothing);
}

// totals = sums * scale for the first group g of inputs, or += for a later one: [rows, PANEL], of V vectors from FIRST
// on.
template <int FIRST, int V>
void add_group_sums(const Weight& w, int64_t panel, int64_t g, int64_t rows, const float* sums, float* totals) {
    const int64_t at = (panel * summed_groups(w) + g) * PANEL;
    Floats scale[V];
    for (int v = 0; v < V; v++) scale[v] = group_scales(w, at + (FIRST + v) * 16);
    for (int64_t i = 0; i < rows * PANEL; i += PANEL)
        for (int v = 0; v < V; v++) {
            float* const total = totals + i + v * 16;
            store_floats(total, fmadd(load_floats(sums + i + v * 16), scale[v], g ? load_floats(total) : zero()));
        }
}

// The rows of a unit of work in blocks of two tiles: of 32 rows, or of the lows and highs of 16. The last block has as
// many rows as the others, the first of which are in the block before it too, so that tiles are configured once.
struct RowBlocks {
    const Product& product;
    int64_t begin, end;
    bool planes;  // whether the two tiles are the lows and the highs of the same rows

    int64_t height() const { return planes ? AMX_ROWS : HEIGHT; }
    int64_t count() const { return (end - begin + height() - 1) / height(); }
    int64_t first(int64_t block) const { return std::max(begin, std::min(begin + block * height(), end - height())); }
    int64_t rows() const { return std::min(height(), end - begin); }
    // The number of the block's first rows that are in the block before it too.
    int64_t repeated(int64_t block) const { return begin + block * height() - first(block); }
    TileRows tiles(int64_t block) const {
        const void* const at = product.row_bytes(first(block));
        return planes ? TileRows::planes(at, product.ld_bytes(), rows(), product.weight->kpad)
                      : TileRows::consecutive(at, product.ld_bytes(), rows());
    }
};

// Products of blocks of rows with COUNT vectors of a panel, in slices.
template <class Dot, int COUNT>
class SlicedProduct {
    static constexpr int V = COUNT < 2 ? COUNT : 2;
    using Block = TileBlock<Dot, 2, V>;

  public:
    // `groups`: of inputs whose sums are scaled separately. sums [blocks, HEIGHT, PANEL].
    SlicedProduct(const RowBlocks& blocks, int64_t groups, float* sums)
        : blocks_(blocks), w_(*blocks.product.weight), groups_(groups), group_(groups > 1 ? w_.group * Dot::SIZE : 0),
          slice_(
              groups > 1           ? std::max<int64_t>(SLICE_BYTES / group_, 1) * group_
              : blocks.count() > 1 ? SLICE_BYTES
                                   : PIECE_BYTES
          ),
          cells_(reinterpret_cast<char*>(thread_memory<Use::SLICE>((slice_ + AMX_BYTES) * V * AMX_BYTES / 16))),
          sums_(sums) {
        Block::begin(blocks.tiles(0));
    }
    ~SlicedProduct() { release_tiles(); }
    SlicedProduct(const SlicedProduct&) = delete;

    int64_t slice() const { return slice_; }  // in bytes of a row
    // How often a stream is asked while `bytes` of the rows are multiplied.
    static int64_t steps(int64_t bytes, int64_t blocks) {
        return (bytes / CHUNK_BYTES + bytes / AMX_BYTES * blocks + 1) * (COUNT / V);
    }

    // Adds the products with bytes [inputs.begin, inputs.end) of the rows to the sums, which begin with the first
    // inputs. before(block, slice): called before each slice of a block; after(block, sums): after the last inputs of
    // the weight.
    template <class Numbers, class Before, class After>
    void add(Numbers& numbers, int64_t panel, Inputs inputs, Stream& stream, const Before& before, const After& after) {
        for (int64_t at = inputs.begin; at < inputs.end; at += slice_) {
            const Inputs slice{at, std::min(at + slice_, inputs.end)};
            add_slice<0>(numbers, panel, slice, stream, before, after);
        }
    }

  private:
    template <int FIRST, class Numbers, class Before, class After>
    void add_slice(
        Numbers& numbers, int64_t panel, Inputs slice, Stream& stream, const Before& before, const After& after
    ) {
        const bool ends = slice.end == w_.kpad * Dot::SIZE && FIRST + V == COUNT;
        for (int64_t block = 0; block < blocks_.count(); block++) {
            float* const sums = sums_ + block * HEIGHT * PANEL;
            if (FIRST == 0) before(block, slice);
            if (groups_ > 1) {
                add_groups<FIRST>(block, numbers, panel, slice, sums + FIRST * 16, stream);
            } else {
                if (slice.begin) Block::load(sums + FIRST * 16);
                else Block::zero();
                add_products<FIRST>(block, numbers, slice, cells_, stream);
                Block::store(sums + FIRST * 16);
            }
            if (ends) after(block, sums);
        }
        if constexpr (FIRST + V < COUNT) add_slice<FIRST + V>(numbers, panel, slice, stream, before, after);
    }

    // The first block unpacks the columns for the others.
    template <int FIRST, class Numbers>
    void add_products(int64_t block, Numbers& numbers, Inputs part, char* cells, Stream& stream) {
        const TileRows rows = blocks_.tiles(block);
        if (block) Block::add(rows, part.begin, cells, V * AMX_BYTES, part.end - part.begin, stream);
        else unpack_and_add<Dot, V, FIRST>(rows, numbers, part, cells, stream);
    }

    template <int FIRST, class Numbers>
    void add_groups(int64_t block, Numbers& numbers, int64_t panel, Inputs slice, float* totals, Stream& stream) {
        alignas(64) float sums[HEIGHT * PANEL];
        for (int64_t at = slice.begin; at < slice.end; at += group_) {
            const Inputs part{at, std::min(at + group_, slice.end)};
            Block::zero();
            add_products<FIRST>(block, numbers, part, cells_ + (at - slice.begin) * V * AMX_BYTES / 4, stream);
            Block::store(sums);
            add_group_sums<FIRST, V>(w_, panel, at / group_, blocks_.rows(), sums, totals);
        }
    }

    const RowBlocks blocks_;
    const Weight& w_;
    const int64_t groups_, group_, slice_;  // the last two in bytes of a row
    char* const cells_;
    float* const sums_;
};

#endif

}  // namespace
