// SPDX-License-Identifier: Apache-2.0
// How unevenly a trained k-means assigns keys that are not those it was trained on: SAAP's figure 2.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "lodestone/engine.h"

namespace lode {

struct BucketDriftOptions {
  ContextOptions context;
  std::vector<int> layers;     ///< empty: the first, the middle and the last
  std::int64_t tokens = 4096;  ///< that are read of each text
  std::int64_t clusters = 64;
  std::int64_t keys = 2048;  ///< assigned at a time
  int repeats = 10;
  std::uint64_t seed = 0;
  std::function<void(std::int64_t tokens)> progress;  ///< tokens read, of all texts
};

/// The standard deviation of bucket sizes over their mean, when so many keys of the first KV head are
/// assigned to a spherical k-means of the training texts' keys, by where they are drawn from and for keys
/// after and before RoPE: [{"layer", "samples": [{"of", "rope": bool, "deviations": [repeats]}]}]. "of" is
/// "training texts", "other texts", "one text" and "one stretch" (a narrow range of positions, over all other
/// texts), and "queries" (of the first query head, other texts). Both lists hold two texts or more, each of
/// `tokens` tokens at least; InputError otherwise.
std::vector<Json> bucket_drift(const std::shared_ptr<const Model>& model,
                               const std::vector<std::string>& training,
                               const std::vector<std::string>& others, const BucketDriftOptions& options);

/// Standard deviation over mean of how often each of `buckets` labels occurs.
double size_deviation(const std::vector<std::int32_t>& labels, std::int64_t buckets);

}  // namespace lode
