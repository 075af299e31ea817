// SPDX-License-Identifier: Apache-2.0
// Which methods a list of specs names.
#pragma once

#include <algorithm>
#include <span>

#include "lodestone/spec.h"

namespace lode {

/// Whether one of them is the same method, files by whatever path they are named.
inline bool holds(std::span<const Spec> specs, const Spec& spec) {
  return std::ranges::any_of(specs, [&](const Spec& known) { return same_method(known, spec); });
}

}  // namespace lode
