// SPDX-License-Identifier: Apache-2.0
// What SAAP's query classifier learns from: sampled queries of a prompt, each with the share of its attention
// that lies in each bucket, the rows of A H_k of equation 1.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/types.h"
#include "select/saap/bucket_net.h"

namespace lode {

class Rope;

/// Which queries and keys take part.
struct SaapFilter {
  std::int64_t sink = 1;
  /// Pairs less than this far apart are left out: the dense window covers them (section 4; 2047).
  std::int64_t window = 2047;
  /// Queries whose best key, the sink aside, is at most this far away are left out (appendix A; 1024).
  std::int64_t distance = 1024;
  bool pairs = true, queries = true;  ///< which of the two filters is on
  /// A query sees only the keys before it; otherwise all of its prompt's (the paper found no gain).
  bool causal = false;

  /// Far keys of a query at p in a prompt of n keys: [begin, first_end) and [second_begin, n).
  struct Ranges {
    std::int64_t begin = 0, first_end = 0, second_begin = 0, end = 0;
    bool empty() const { return begin >= first_end && second_begin >= end; }
    bool holds(std::int64_t key) const {
      return (key >= begin && key < first_end) || (key >= second_begin && key < end);
    }
    template <class Body>
    void for_each(const Body& body) const {  ///< body(key)
      for (std::int64_t k = begin; k < first_end; ++k) body(static_cast<std::size_t>(k));
      for (std::int64_t k = second_begin; k < end; ++k) body(static_cast<std::size_t>(k));
    }
  };
  Ranges far(std::int64_t position, std::int64_t keys) const;
};

/// Queries of one KV head with their targets, prompt after prompt.
class SaapExamples {
 public:
  SaapExamples(std::int64_t d, std::int64_t buckets) : d_(d), buckets_(buckets), prompts_(1, 0) {}

  void add(std::span<const float> q /*[d]*/, std::span<const float> target /*[C]*/);
  void add(std::span<const float> q /*[d]*/, std::span<const f16> target /*[C]*/);
  void end_prompt() { prompts_.push_back(count()); }

  std::int64_t count() const { return std::ssize(q_) / d_; }
  std::int64_t prompts() const { return std::ssize(prompts_) - 1; }
  std::int64_t begin_of(std::int64_t prompt) const { return prompts_[static_cast<std::size_t>(prompt)]; }
  std::int64_t end_of(std::int64_t prompt) const { return prompts_[static_cast<std::size_t>(prompt + 1)]; }
  /// Query i and its target as float32.
  void read(std::int64_t i, std::span<float> q, std::span<float> target) const;
  std::int64_t bytes() const { return std::ssize(q_) * 4 + std::ssize(targets_) * 2; }
  std::span<const float> queries() const { return q_; }      // [n, d]
  std::span<const f16> targets() const { return targets_; }  // [n, C]

 private:
  std::int64_t d_, buckets_;
  std::vector<float> q_;      // [n, d] before RoPE
  std::vector<f16> targets_;  // [n, C]
  std::vector<std::int64_t> prompts_;
};

/// Candidates of one prompt and KV head, before RoPE, with their positions.
struct SaapCandidates {
  std::vector<float> q;             // [n, d]
  std::vector<Position> positions;  // [n]
  /// [n] how many positions further from all keys a query is scored than it stands
  std::vector<Position> further;
};

/// Keys of one head of a prompt as they are stored and before RoPE; numbers that are not finite are 0.
struct SaapRows {
  std::vector<float> rotated, plain;  // [n, d]
};
SaapRows read_saap_rows(const KvRows& kv, const Rope& rope);

/// Keys of one head of a prompt: as attention sees them, and their buckets.
struct SaapKeys {
  std::vector<float> rotated;        // [n, d] as stored; numbers that are not finite are 0
  std::vector<std::int32_t> labels;  // [n]
  std::vector<std::int64_t> counts;  // [C] behind the sink
};
/// Who finds the buckets of keys before RoPE, [n, d].
using SaapLabeller =
    std::function<void(const BucketNet& keys, Matrix<const float> plain, std::span<std::int32_t> labels)>;
SaapKeys read_saap_keys(const KvRows& kv, const Rope& rope, const BucketNet& keys, std::int64_t sink,
                        const SaapLabeller& label);
SaapKeys read_saap_keys(const KvRows& kv, const Rope& rope, const BucketNet& keys, std::int64_t sink);
/// How many keys behind the sink lie in each bucket.
std::vector<std::int64_t> count_labels(std::span<const std::int32_t> labels, std::int64_t buckets,
                                       std::int64_t sink);

/// Queries [n, d] as they meet the keys: turned to where they are scored from, times `scale`.
std::vector<float> scored_queries(std::span<const float> q, std::span<const Position> positions,
                                  std::span<const Position> further, const Rope& rope, float scale);

/// Calls body(candidate, scores [n], its far keys) for the first `wanted` candidates that pass the filter, in
/// their order, and returns how many were looked at. On the calling thread.
using SaapScored =
    std::function<void(std::int64_t candidate, std::span<const float> scores, const SaapFilter::Ranges& far)>;
std::int64_t for_each_scored(const SaapCandidates& candidates, Matrix<const float> rotated /*[n, d]*/,
                             const Rope& rope, float scale, const SaapFilter& filter, std::int64_t wanted,
                             const SaapScored& body);

/// The largest score of a far key.
float best_score(std::span<const float> scores, const SaapFilter::Ranges& far);

/// Adds up to `wanted` candidates that pass the filter, in their order, to `examples`; returns how many were
/// looked at. On the calling thread.
std::int64_t add_saap_examples(const SaapCandidates& candidates, const SaapKeys& keys, const Rope& rope,
                               float scale, const SaapFilter& filter, std::int64_t wanted,
                               SaapExamples& examples);

}  // namespace lode
