// SPDX-License-Identifier: Apache-2.0
// A trained key classifier f_k instead of nearest centroids: a variant that section 6.5 of SAAP names and
// does not define. It is learned jointly with an f_q on samples of prompts, both under partition_loss
// (loss.h), and starts as the centroids: its linear path are they. What comes out is f_k; the f_q that is
// kept learns anew, by equation 1, from the buckets that f_k's largest score assigns. On the CPU, whatever
// reads the prompts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "lab/train/adam.h"
#include "lab/train/saap/classifier.h"
#include "lab/train/saap/examples.h"

namespace lode {

class Checkpoint;

/// What one prompt teaches about one head.
struct SaapKeySample {
  std::vector<float> q, k;        // [n_q, d], [n_k, d] before RoPE
  std::vector<float> stands_for;  // [n_k] how many keys of the prompt
  /// [n_q, n_k] attention on far keys, of a key times the keys it stands for: a row sums to 1 on average over
  /// draws. Divided by its own sum it would be biased towards queries' lesser keys.
  std::vector<f16> attention;
  std::int64_t queries(std::int64_t d) const { return std::ssize(q) / d; }
};

/// The first `queries` candidates that pass the filter, and about `keys` of the keys behind the sink: a key's
/// chance grows with the attention that it has of those, and never falls below half of an even one's. On the
/// calling thread.
SaapKeySample sample_saap_keys(const SaapCandidates& candidates, const SaapRows& rows, const Rope& rope,
                               float scale, const SaapFilter& filter, std::int64_t queries, std::int64_t keys,
                               Rng& rng);

/// f_k of one head and the f_q beside it, while they are learned.
class SaapKeyTrainer {
 public:
  struct Shape {
    std::int64_t d = 0, hidden = 0, buckets = 0;
  };
  SaapKeyTrainer(const Shape& shape, std::span<const float> centroids /*[C, d]*/, double rate,
                 std::uint64_t seed);

  /// One step on some of the sample's queries and all of its keys; the loss before it.
  double step(const SaapKeySample& sample, std::span<const std::int32_t> queries, double rate_scale);
  std::int64_t steps() const { return of_keys_.steps(); }
  void put(Checkpoint& checkpoint, const std::string& prefix);
  void get(const Checkpoint& checkpoint, const std::string& prefix, const std::string& where);
  BucketNet exported(DType type) const { return keys_.exported(type); }

 private:
  SaapClassifier keys_, queries_;
  Adam of_keys_, of_queries_;
};

}  // namespace lode
