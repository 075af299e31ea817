// SPDX-License-Identifier: Apache-2.0
// How kernels ask the compiler for what their speed rests on: accumulators stay in registers only when every
// helper is inlined and every index of their arrays is a constant before the optimiser looks.
#pragma once

#include <cstddef>
#include <cstdint>

#define LODE_INLINE inline __attribute__((always_inline))
// Phases stay apart, so that each has all registers for itself.
#define LODE_NOINLINE __attribute__((noinline))
#define LODE_INLINE_LAMBDA __attribute__((always_inline))

namespace lode {
namespace {

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};
template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

template <class F, int... I>
LODE_INLINE void unroll_indices(F& f, Indices<I...>) {
  (f(Index<I>{}), ...);
}
/// f(0), f(1), ... f(N - 1), written out.
template <int N, class F>
LODE_INLINE void unroll(F f) {
  unroll_indices(f, typename MakeIndices<N>::type{});
}

/// Asks the memory for some bytes.
LODE_INLINE void prefetch(const std::byte* p, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 3);
}

}  // namespace
}  // namespace lode
