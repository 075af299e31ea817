// SPDX-License-Identifier: Apache-2.0
// For methods whose sets may carry an estimate of the keys that they skip.
#pragma once

#include "lodestone/selector.h"

namespace lode {

class EstimatesRest {
 public:
  virtual ~EstimatesRest() = default;
  /// Whether a set may carry one, now or later.
  virtual bool estimates_rest() const = 0;
};

/// Of a layer's selector, which may be null.
inline bool estimates_rest(const Selector* selector) {
  const auto* const method = dynamic_cast<const EstimatesRest*>(selector);
  return method != nullptr && method->estimates_rest();
}

}  // namespace lode
