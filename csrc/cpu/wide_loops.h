// SPDX-License-Identifier: Apache-2.0
//
// Runs a loop with the widest vectors this processor has, in a library that still runs on every processor of its kind.
//
// The library is compiled without -march, so that a wheel, or a build folder on a shared file system, works on all
// machines. Loops that compute (rather than copy) are compiled a second time for AVX2, and the choice is made when they
// run. Both give the same bits: the build forbids fused multiply-adds (-ffp-contract=off).
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FSMOE_AVX2 __attribute__((target("avx2")))
#else
#define FSMOE_AVX2
#endif
#define FSMOE_INLINE inline __attribute__((always_inline))

namespace fsmoe {

inline bool has_avx2() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found = __builtin_cpu_supports("avx2");
  return found;
#else
  return false;
#endif
}

// Loop::run must be FSMOE_INLINE: it is compiled as part of these two.
template <typename Loop, typename... Arguments>
void run_baseline(const Arguments&... arguments) {
  Loop::run(arguments...);
}

template <typename Loop, typename... Arguments>
FSMOE_AVX2 void run_avx2(const Arguments&... arguments) {
  Loop::run(arguments...);
}

template <typename Loop, typename... Arguments>
void run_wide(const Arguments&... arguments) {
  if (has_avx2()) {
    run_avx2<Loop>(arguments...);
  } else {
    run_baseline<Loop>(arguments...);
  }
}

}  // namespace fsmoe
