// SPDX-License-Identifier: Apache-2.0
// Made-up keys and queries that lie apart as attention's do: what keys differ in most, queries hardly see.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rng.h"

namespace lode {

/// A number with mean 0 and variance 1, close to normal within three deviations: four uniform numbers of 16
/// bits, added. Ten times faster than a true one, and billions are needed.
float quick_normal(Rng& rng);

/// Keys and queries of one layer, as after RoPE. They are held
/// to two figures of the RetrievalAttention paper (2b, Llama-3-8B at 128k): at d 128 an inverted file must
/// scan 30 % of the keys for 0.95 of a query's 100 best ones, and 4 % where keys ask as queries.
///
/// A key has a topic, from which it strays little, in 3/16 of d directions, and another one, from which it
/// strays much and which is shorter, in half as many. Queries have topics of their own, one set per query
/// head, in the same directions, but look at the first ones with a fifth of the weight. Both stand off the
/// origin, each its own way, and have some noise in all directions. Topics' sizes follow Zipf's law.
class OodVectors {
 public:
  OodVectors(int query_heads, int kv_heads, int head_dim, Rng& rng);
  void key(int kv_head, Rng& rng, float* out /*[d]*/) const;
  void query(int query_head, Rng& rng, float* out /*[d]*/) const;

 private:
  const float* topic(const std::vector<float>& topics, std::int64_t head, int width, Rng& rng) const;
  void spread(const std::vector<float>& seen, int kv_head, const float* origin, Rng& rng, float* out) const;

  int d_, told_, asked_, group_;
  std::vector<double> cumulative_;   // [kTopics] of topic sizes
  std::vector<float> basis_;         // [Hkv, told + asked, d]
  std::vector<float> key_topics_;    // [Hkv, kTopics, told]
  std::vector<float> asked_topics_;  // [Hkv, kTopics, asked]
  std::vector<float> query_topics_;  // [Hq, kTopics, told + asked]
  std::vector<float> key_origin_;    // [Hkv, d]
  std::vector<float> query_origin_;  // [Hq, d]
};

}  // namespace lode
