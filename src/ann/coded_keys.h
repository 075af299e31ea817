// SPDX-License-Identifier: Apache-2.0
// Keys as a walk over a graph sees them: int8 with one scale a key. Exact keys rank what a walk found.
#pragma once

#include <cstdint>
#include <span>

#include "base/huge_pages.h"
#include "lodestone/kv_view.h"

namespace lode {

/// Keys of the nodes of a graph, and their squared norms, from which distances follow.
struct WalkKeys {
  KvRows rows;                     ///< q8, K only; row = node
  const float* squares = nullptr;  // [nodes]
};

class CodedKeys {
 public:
  explicit CodedKeys(int head_dim) : head_dim_(head_dim) {}

  std::int64_t size() const { return std::ssize(scales_); }
  /// Makes room; the keys themselves are then put one by one, in any order, by any thread.
  void resize(std::int64_t keys);
  /// A key that is not finite counts as 0, so that no distance is spoiled by it.
  void put(std::int64_t at, std::span<const float> key /*[d]*/);
  WalkKeys view() const;
  std::int64_t bytes() const;  ///< memory held

 private:
  int head_dim_;
  HugeVector<std::int8_t> codes_;       // [n, d]
  HugeVector<float> scales_, squares_;  // [n]
};

}  // namespace lode
