// SPDX-License-Identifier: Apache-2.0
// Codes queries, and chooses the kernels of coded products that go with the table that kernels() has chosen.
#include "kernels/select/int8_dot.h"

#include <algorithm>
#include <cmath>

#include "kernels/family.h"

namespace lode {

extern const Int8DotKernels kScalarInt8Dot;
#if defined(__x86_64__)
extern const Int8DotKernels kAvx2Int8Dot;
extern const Int8DotKernels kAvx512Int8Dot;
extern const Int8DotKernels kAvx512VnniInt8Dot;
#endif

namespace {

const KernelFamily<Int8DotKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<Int8DotKernels> all(
      &kScalarInt8Dot, &kAvx2Int8Dot, &kAvx512Int8Dot,
      __builtin_cpu_supports("avx512vnni") ? &kAvx512VnniInt8Dot : nullptr);
#else
  static const KernelFamily<Int8DotKernels> all(&kScalarInt8Dot);
#endif
  return all;
}

}  // namespace

void code_query(std::span<const float> q, CodedQuery& out) {
  float most = 0.0f;
  bool finite = true;
  for (const float x : q) {
    most = std::max(most, std::abs(x));
    finite = finite && std::isfinite(x);
  }
  // Of subnormal numbers the reciprocal is infinite; they count as 0.
  const int limit = most_coded(std::ssize(q));
  const float inverse = finite && most > 0.0f ? static_cast<float>(limit) / most : 0.0f;
  const float factor = std::isfinite(inverse) ? inverse : 0.0f;
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const int whole =
        factor > 0.0f ? std::clamp(static_cast<int>(std::nearbyint(q[i] * factor)), -limit, limit) : 0;
    const int high = (whole + 128) >> 8;
    out.whole[i] = static_cast<std::int16_t>(whole);
    out.high[i] = static_cast<std::int8_t>(high);
    out.low[i] = static_cast<std::int8_t>(whole - 256 * high);
    sum += static_cast<std::uint32_t>(whole);
  }
  for (std::size_t i = q.size(); i < out.numbers; ++i) out.whole[i] = out.high[i] = out.low[i] = 0;
  out.numbers = q.size();
  out.offset = 128 * sum;
}

std::span<const Int8DotKernels* const> supported_int8_dot_kernels() {
  return family().supported();
}

const Int8DotKernels& int8_dot_kernels() {
  return family().best();
}

}  // namespace lode
