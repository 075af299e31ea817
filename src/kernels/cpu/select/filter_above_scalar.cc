// SPDX-License-Identifier: Apache-2.0
// The search for large scores in plain C++.
#include "kernels/select/filter_above.h"

namespace lode {
namespace {

std::int64_t collect(const float* scores, std::int64_t n, float least, std::int32_t* places) noexcept {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i)
    if (!(scores[i] < least)) places[count++] = static_cast<std::int32_t>(i);
  return count;
}

}  // namespace

extern const FilterAboveKernels kScalarFilterAbove;
constinit const FilterAboveKernels kScalarFilterAbove = {.name = "scalar", .collect = collect};

}  // namespace lode
