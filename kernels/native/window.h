// Keys and values of several heads that attention reads together, and prefetching of those that come after them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

// Keys [begin, end) of a row and their values. The numbers of one key in two neighbouring heads are `apart` numbers from each other.
template <typename T>
struct Window {
    int64_t begin, end, apart;
    const T *const *keys, *const *values;  // of the first head, from `begin` on

    // The last key is repeated behind the end.
    const T* row(const T* const* rows, int64_t at, int64_t head) const { return rows[std::min(at, end - 1) - begin] + head * apart; }
};

// Memory that is needed later: a few lines of 64 bytes are prefetched between computations, because a processor ignores
// prefetches while it waits for as many lines as it can. Lines alternate between keys, values and two pages: neighbouring lines
// would come from one memory channel.
template <int64_t SPAN>
class Upcoming {
  public:
    explicit Upcoming(const void* unused) { rows_[0] = static_cast<const char*>(unused); }  // nothing is needed
    // SPAN keys and as many values of so many bytes, `skip` numbers behind these pointers.
    template <typename T>
    Upcoming(const T* const* keys, const T* const* values, int64_t bytes, int64_t skip) {
        while (64 << shift_ < bytes) shift_++;
        last_ = (2 * SPAN << shift_) - 1;
        for (int64_t i = 0; i < SPAN / 2; i++)
            for (int64_t half = 0; half < 2; half++) {
                rows_[4 * i + 2 * half] = reinterpret_cast<const char*>(keys[i + half * SPAN / 2] + skip);
                rows_[4 * i + 2 * half + 1] = reinterpret_cast<const char*>(values[i + half * SPAN / 2] + skip);
            }
    }
    inline __attribute__((always_inline)) void fetch(int lines) {  // after the last line, that one again: cheaper than a branch
        for (int i = 0; i < lines; i++) {
            const int64_t at = std::min(line_++, last_);
            fetch_line(rows_[at >> shift_] + (at & ((int64_t(1) << shift_) - 1)) * 64);
        }
    }

  private:
    int64_t shift_ = 0, last_ = 0, line_ = 0;  // a row has 1 << shift lines
    const char* rows_[2 * SPAN];
};

}  // namespace
