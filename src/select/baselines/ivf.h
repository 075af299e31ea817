// SPDX-License-Identifier: Apache-2.0
// What a device needs of ivf to choose in its place.
#pragma once

#include <cstdint>
#include <optional>

#include "lodestone/spec.h"
#include "select/shared/buckets.h"

namespace lode {

struct IvfOptions {
  std::optional<Amount> lists;  ///< nlist
  Amount probes = {16, false};  ///< nprobe, a share of the lists there are
  Amount k = {100, false};

  static IvfOptions of(const Spec& spec);
  std::int64_t lists_for(std::int64_t keys) const;
  std::int64_t probes_for(std::int64_t of_lists) const;
};

/// A selector whose keys are in the lists of centroids, taken as they are stored.
class KeyLists {
 public:
  struct Lists {
    const BucketIndex* index = nullptr;  ///< null until there is one
    std::int64_t version = 0;            ///< another one: other centroids
  };
  virtual ~KeyLists() = default;
  /// Of the sequence 0.
  virtual Lists key_lists() const = 0;
};

}  // namespace lode
