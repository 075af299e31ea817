// SPDX-License-Identifier: Apache-2.0
// Keys as a walk over a graph sees them: the numbers that a KeySpace gives, in int8 with one scale a key.
// Exact keys rank what a walk found.
#pragma once

#include <cstdint>
#include <span>

#include "base/huge_pages.h"
#include "kernels/select/int8_dot.h"

namespace lode {

/// Keys of the nodes of a graph, and their squared norms, from which distances follow.
struct BeamKeys {
  CodedRows rows;                  ///< row = node
  int d = 0;                       ///< numbers of a key
  const float* squares = nullptr;  // [nodes]
  const std::int8_t* codes(std::int64_t node) const {
    return reinterpret_cast<const std::int8_t*>(rows.data) + node * rows.stride;
  }
  float scale(std::int64_t node) const;
};

class QuantizedKeys {
 public:
  explicit QuantizedKeys(int numbers) : d_(numbers), stride_(CodedRows::stride_for(numbers)) {}

  std::int64_t size() const { return std::ssize(squares_); }
  /// Makes room; the keys themselves are then put one by one, in any order, by any thread.
  void resize(std::int64_t keys);
  /// A key that is not finite counts as 0, so that no distance is spoiled by it.
  void put(std::int64_t at, std::span<const float> key /*[d]*/);
  BeamKeys view() const;
  std::int64_t bytes() const;  ///< memory held

 private:
  int d_, stride_;
  HugeVector<std::byte> rows_;  // [n, stride]
  HugeVector<float> squares_;   // [n]
};

}  // namespace lode
