// SPDX-License-Identifier: Apache-2.0
// How a selector names buckets, for a device that chooses in its place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "select/saap/bucket_net.h"
#include "select/shared/buckets.h"

namespace lode {

/// Of a partition among whose buckets a GPU chooses.
inline constexpr std::int64_t kMostBucketsOfGpu = 8192;

/// Networks of one layer. A key is in the bucket of its highest score under `keys`; a query attends the
/// `probes` buckets of the highest scores under `queries`, those without far keys passed over. Which of
/// several `queries` scores is said by the query's position.
struct BucketChoice {
  std::vector<BucketNet> keys;       // [Hkv]
  std::vector<BucketNet> queries;    // [K, Hkv]
  std::vector<Position> from = {0};  // [K] first query position of each, rising
  std::int64_t probes = 0;
  bool roped = false;    ///< keys and queries enter as they are stored, after RoPE
  bool softmax = true;   ///< scores: probabilities summed over the heads of the group; false: of their sum
  float per_key = 0.0f;  ///< scores are divided by (far keys of the bucket)^per_key
};

/// A selector that chooses so.
class BucketChooser {
 public:
  virtual ~BucketChooser() = default;
  /// Nothing where the device cannot take its place: a fallback, heads that choose apart, ...
  virtual std::optional<BucketChoice> bucket_choice() const = 0;
  /// The document's buckets, where the host knows them: their labels are then taken over as they are. Else null.
  virtual const BucketIndex* buckets() const { return nullptr; }
  /// How many keys of the context the device found in each bucket when it was indexed.
  virtual void take_bucket_sizes(std::span<const std::int64_t> /*[Hkv, C]*/) {}
};

}  // namespace lode
