// SPDX-License-Identifier: Apache-2.0
// What holds for a method's selectors together, one a layer and null for dense layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lodestone/selector.h"

namespace lode {

/// Selector::joint_query_tokens, which is the same in all layers; 1 where none chooses.
inline std::int64_t joint_query_tokens(std::span<Selector* const> selectors) {
  for (const Selector* const selector : selectors)
    if (selector != nullptr) return selector->joint_query_tokens();
  return 1;
}

/// Whether one goes by what keys have weighed (Selector::wants_mass).
inline bool goes_by_mass(std::span<Selector* const> selectors) {
  return std::ranges::any_of(selectors, [](const Selector* s) { return s != nullptr && s->wants_mass(); });
}

}  // namespace lode
