// SPDX-License-Identifier: Apache-2.0
// What a text is indexed for when nobody says.
#pragma once

#include <cstdint>
#include <vector>

#include "lodestone/spec.h"

namespace lode {

/// What loses nothing that could be measured at any length (docs/results/quality.md), where a text is long enough for
/// it to read less; else nothing.
inline std::vector<Spec> usual_methods(std::int64_t tokens) {
  constexpr std::int64_t kLong = 8192;
  if (tokens < kLong) return {};
  return {parse_spec("squeezed:sparsity=0.7")};
}

}  // namespace lode
