// SPDX-License-Identifier: Apache-2.0
// Keys that a search has met within its limit, and how far they are; buffers that only grow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lodestone/types.h"

namespace lode {

struct HammingHits {
  std::vector<Position> keys;           // [room]
  std::vector<std::uint16_t> distance;  // [room]
  std::int64_t size = 0;

  void make_room(std::int64_t more) {
    if (std::ssize(keys) >= size + more) return;
    keys.resize(static_cast<std::size_t>(std::max(size + more, 2 * std::ssize(keys))));
    distance.resize(keys.size());
  }
  Position* next_key() { return keys.data() + size; }
  std::uint16_t* next_distance() { return distance.data() + size; }
};

}  // namespace lode
