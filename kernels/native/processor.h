// What differs between processors of one instruction set.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__)
// Whether this is an AMD processor of family 25: Zen 3 or Zen 4.
inline bool is_family_25() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx || !__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return false;
    return (eax >> 8 & 15) + (eax >> 20 & 255) == 25;
}
#else
inline bool is_family_25() { return false; }
#endif

// Lines of a packed weight from one prefetch to the next, in products of one or two rows. Zen 4 reads a tenth faster if
// its own prefetchers follow most of them; Zen 5 reads a fifth to a third slower.
const int64_t LINES_FOLLOWED = is_family_25() ? 4 : 1;

}  // namespace
