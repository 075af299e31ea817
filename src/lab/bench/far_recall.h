// SPDX-License-Identifier: Apache-2.0
// What a method's selections hold of the best far keys, and how many keys it compared with a query for that.
#pragma once

#include <span>

#include "lodestone/selector.h"

namespace lode {

struct FarRecall {
  std::int64_t wanted = 0, found = 0;     ///< best far keys of all queries; of them chosen
  std::int64_t far_keys = 0, scored = 0;  ///< of all queries; keys or index entries compared with one

  /// Has the selector choose for the blocks and compares with the exact `top` best far keys of each query
  /// head and token.
  void look(Selector& selector, const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
            std::int64_t top);
  double recall() const {
    return wanted == 0 ? 1.0 : static_cast<double>(found) / static_cast<double>(wanted);
  }
  double scanned() const {
    return far_keys == 0 ? 0.0 : static_cast<double>(scored) / static_cast<double>(far_keys);
  }
};

}  // namespace lode
