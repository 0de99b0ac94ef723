// Instructions of AMX on eight tiles of up to 16 rows of 64 bytes. With SACCADE_EMULATE_AMX they are computed by
// AVX-512, with the bits that Intel's manual defines (Software Developer's Manual, volume 2, TDPBF16PS and TDPBSUD), so
// that a processor without AMX can test what uses them.
//
//   configure_tiles      sets the size of each tile and zeroes them; release_tiles: after the last use
//   zero_tile<T>
//   load_tile<T>         rows that are `stride` bytes apart; store_tile<T>: the same in the other direction
//   dot_bf16<C, A, B>    C[m][n] += the sum over k of A[m][k] B[k][n], products of pairs of bfloat16, in float32
//   dot_bytes4<C, A, B>  the same for products of four signed bytes of A and four unsigned bytes of B, in int32

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t AMX_ROWS = 16;   // of a tile, at most
constexpr int64_t AMX_BYTES = 64;  // of a tile's row, at most

struct TileConfig {  // as LDTILECFG reads it
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of each tile's rows
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(SACCADE_EMULATE_AMX)

struct EmulatedTile {
    int64_t rows = 0, bytes = 0;
    alignas(64) uint8_t data[AMX_ROWS][AMX_BYTES] = {};
};
thread_local EmulatedTile emulated_tiles[8];

inline void configure_tiles(const TileConfig& config) {
    for (int i = 0; i < 8; i++) emulated_tiles[i] = {config.rows[i], config.bytes[i], {}};
}
inline void release_tiles() { configure_tiles({}); }
template <int T>
void zero_tile() {
    std::memset(emulated_tiles[T].data, 0, sizeof emulated_tiles[T].data);
}
template <int T>
void load_tile(const void* from, int64_t stride) {
    EmulatedTile& tile = emulated_tiles[T];
    for (int64_t r = 0; r < tile.rows; r++)
        std::memcpy(tile.data[r], static_cast<const char*>(from) + r * stride, tile.bytes);
}
template <int T>
void store_tile(void* to, int64_t stride) {
    const EmulatedTile& tile = emulated_tiles[T];
    for (int64_t r = 0; r < tile.rows; r++) std::memcpy(static_cast<char*>(to) + r * stride, tile.data[r], tile.bytes);
}

// Sizes that do not match are an invalid instruction.
inline void check_tiles(const EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
    if (!a.rows || a.rows != c.rows || a.bytes != 4 * b.rows || b.bytes != AMX_BYTES || c.bytes != AMX_BYTES)
        __builtin_trap();
}

// Even and odd inputs have sums of their own, which begin at zero.
__attribute__((noinline)) void emulated_dot_bf16(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
    const __m512i odd_bits = _mm512_set1_epi32(int32_t(0xffff0000));
    for (int64_t m = 0; m < a.rows; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int64_t k = 0; k < b.rows; k++) {
            int32_t pair;
            std::memcpy(&pair, a.data[m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(pair), w = _mm512_load_si512(b.data[k]);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(w, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, odd_bits), (__m512)_mm512_and_si512(w, odd_bits), odd);
        }
        float* sums = reinterpret_cast<float*>(c.data[m]);
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(even, odd)));
    }
}
template <int C, int A, int B>
void dot_bf16() {
    check_tiles(emulated_tiles[C], emulated_tiles[A], emulated_tiles[B]);
    const uint32_t control = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // subnormal numbers are zeros, before and after; to nearest; no exceptions
    emulated_dot_bf16(emulated_tiles[C], emulated_tiles[A], emulated_tiles[B]);
    _mm_setcsr(control);
}
template <int C, int A, int B>
void dot_bytes4() {
    EmulatedTile &c = emulated_tiles[C], &a = emulated_tiles[A], &b = emulated_tiles[B];
    check_tiles(c, a, b);
    for (int64_t m = 0; m < a.rows; m++)
        for (int64_t k = 0; k < b.rows; k++) {
            int32_t four;
            std::memcpy(&four, a.data[m] + 4 * k, 4);
            const __m512i sum = _mm512_load_si512(c.data[m]), w = _mm512_load_si512(b.data[k]);
            _mm512_store_si512(c.data[m], _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four)));
        }
}

#else

// Not the compiler's intrinsics, because those of GCC 12 take no template parameter as a tile.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }
template <int T>
void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
void dot_bytes4() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

inline TileConfig full_tiles() {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.rows[i] = uint8_t(AMX_ROWS), config.bytes[i] = uint16_t(AMX_BYTES);
    return config;
}

// The first N tiles, at most four: those that sums are in.
template <int N>
inline void zero_tiles() {
    zero_tile<0>();
    if constexpr (N > 1) zero_tile<1>();
    if constexpr (N > 2) zero_tile<2>();
    if constexpr (N > 3) zero_tile<3>();
}

}  // namespace
