// SPDX-License-Identifier: Apache-2.0
// What a device needs of snapkv to attend its keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/spec.h"

namespace lode {

struct SnapKvOptions {
  std::int64_t window = 64, kernel = 5;  // window_size, kernel_size
  Amount capacity = {320, false};        // max_capacity_prompt
  bool max_pooling = false, per_kv_head = false;

  static SnapKvOptions of(const Spec& spec);
  /// Keys to choose out of n.
  std::int64_t budget(std::int64_t n) const;
};

/// A selector whose queries all attend the same far keys until its index changes.
class KeyKeeper {
 public:
  struct Kept {
    std::int64_t version = 0;                     ///< another one: other keys
    std::span<const std::vector<Position>> rows;  // [Hq or Hkv] rising, below `from`; empty: of no head
    Position from = 0;                            ///< every key from here on
  };
  virtual ~KeyKeeper() = default;
  /// Of the sequence 0.
  virtual Kept kept_keys() const = 0;
};

}  // namespace lode
