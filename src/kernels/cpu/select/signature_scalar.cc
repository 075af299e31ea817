// SPDX-License-Identifier: Apache-2.0
// The signature kernels in plain C++: the specification of the others.
#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cpu/simd/vec_scalar.h"
//
#include "kernels/cpu/select/signature-inl.h"

namespace lode {
namespace {

void distances(const std::uint32_t* keys, std::int64_t n, int words, const std::uint32_t* queries, int count,
               bool add, std::uint16_t* distance) noexcept {
  for (std::int64_t i = 0; i < n; ++i) {
    int sum = add ? distance[i] : 0;
    for (int q = 0; q < count; ++q) {
      for (int w = 0; w < words; ++w) sum += std::popcount(keys[i * words + w] ^ queries[q * words + w]);
    }
    distance[i] = static_cast<std::uint16_t>(sum);
  }
}

std::uint16_t least(const std::uint16_t* x, std::int64_t n) noexcept {
  std::uint16_t low = std::numeric_limits<std::uint16_t>::max();
  for (std::int64_t i = 0; i < n; ++i) low = std::min(low, x[i]);
  return low;
}

std::int64_t count_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit) noexcept {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += x[i] <= limit ? 1 : 0;
  return count;
}

std::int64_t collect_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit, Position offset,
                           Position* rows) noexcept {
  Position* to = rows;
  for (std::int64_t i = 0; i < n; ++i) {
    if (x[i] <= limit) *to++ = offset + static_cast<Position>(i);
  }
  return to - rows;
}

}  // namespace

extern const SignatureKernels kScalarSignatures;
constinit const SignatureKernels kScalarSignatures = LODE_SIGNATURE_TABLE("scalar");

}  // namespace lode
