// Keys and values of several heads that attention reads together, and prefetching of those that come after them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

// Keys [begin, end) of a row and their values, for several heads.
template <typename T>
struct Window {
    int64_t begin, end, head_stride;       // head_stride: numbers from a key to that of the next head
    const T *const *keys, *const *values;  // of the first head, from `begin` on

    // The key (or value) at a position, for a head; at the end and later positions the last one.
    const T* row(const T* const* rows, int64_t at, int64_t head) const {
        return rows[std::min(at, end - 1) - begin] + head * head_stride;
    }
};

// Keys and values that are needed later: a few lines of 64 bytes are prefetched between computations, because a
// processor ignores prefetches while it waits for as many lines as it can. Lines alternate between keys and values, and
// rows between two pages: neighbouring lines would come from one memory channel.
template <typename T, int64_t SPAN>
class Prefetcher {
  public:
    Prefetcher() = default;  // prefetches nothing
    // SPAN keys and as many values of this many bytes each, `skip` numbers after these pointers.
    Prefetcher(const T* const* keys, const T* const* values, int64_t bytes, int64_t skip)
        : keys_(keys), values_(values), bytes_(bytes), skip_(skip), row_(0) {
        start_row();
    }
    // The next lines of a key and of a value, `times` of each.
    inline ALWAYS void fetch(int times = 1) {
        for (; times > 0 && row_ < SPAN; times--) {
            fetch_line(key_ + line_), fetch_line(value_ + line_);
            line_ += 64;
            if (line_ < bytes_) continue;
            line_ = 0;
            if (++row_ < SPAN) start_row();
        }
    }
    void fetch_rest() {
        while (row_ < SPAN) fetch();
    }

  private:
    inline ALWAYS void start_row() {
        const int64_t i = row_ % 2 * (SPAN / 2) + row_ / 2;
        key_ = reinterpret_cast<const char*>(keys_[i] + skip_),
        value_ = reinterpret_cast<const char*>(values_[i] + skip_);
    }

    const T *const *keys_ = nullptr, *const *values_ = nullptr;
    int64_t bytes_ = 0, skip_ = 0, row_ = SPAN, line_ = 0;
    const char *key_ = nullptr, *value_ = nullptr;
};

}  // namespace
