// Memory of a thread for intermediate results.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace {

// The first address from `p` on at which a cache line of 64 bytes begins.
inline float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// `memory`, with at least this many floats.
inline float* grown(std::vector<float>& memory, int64_t floats) {
    if (int64_t(memory.size()) < floats) memory.resize(floats);
    return memory.data();
}

// Parts of a thread's memory, each aligned to 64 bytes.
class Scratch {
  public:
    Scratch(std::vector<float>& memory, int64_t floats)
        : at_(reinterpret_cast<char*>(aligned(grown(memory, floats + 16)))) {}
    template <typename T>
    static int64_t floats(int64_t count) {
        return (count * int64_t(sizeof(T)) + 63) / 64 * 16;
    }
    template <typename T>
    T* take(int64_t count) {
        return reinterpret_cast<T*>(std::exchange(at_, at_ + floats<T>(count) * sizeof(float)));
    }

  private:
    char* at_;
};

// A thread's memory for `floats` numbers, aligned to cache lines. Each use has its own: panels and slices of panels in
// the form in which they are multiplied, and rows in that form or sums.
enum class Use { PANEL, ROWS_OR_SUMS, SLICE };
template <Use>
inline float* thread_memory(int64_t floats) {
    static thread_local std::vector<float> memory;
    return aligned(grown(memory, floats + 16));
}

}  // namespace
