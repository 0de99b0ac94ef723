// What differs between processors of one instruction set.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__)
// AMD processors of family 25.
inline bool is_zen_3_or_4() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx || !__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return false;
    return (eax >> 8 & 15) + (eax >> 20 & 255) == 25;
}
#else
inline bool is_zen_3_or_4() { return false; }
#endif

// Products of one or two rows prefetch one in so many cache lines of a packed weight. Zen 4 reads a tenth faster if its
// own prefetchers follow the other lines; Zen 5 reads a fifth to a third slower.
const int64_t PREFETCHED_LINE_STEP = is_zen_3_or_4() ? 4 : 1;

}  // namespace
