// SPDX-License-Identifier: Apache-2.0
// Attention over latent rows (layer_plan.h, LatentPlan): a token's key and value are one short row that all heads share.
// The projections that would unfold it for each head are moved to the query's and the output's side, so that rows are
// attended to as they lie.
#pragma once

#include <vector>

#include "kernels/rope.h"
#include "model/config.h"
#include "model/linear.h"
#include "model/weights.h"

namespace lode {

class LatentAttention {
 public:
  LatentAttention(const ModelConfig& config, LinearLayers& linear, ThreadPool& pool)
      : plan_(config.plan.latent),
        heads_(config.query_heads),
        row_heads_(config.kv_heads),
        norm_eps_(config.norm_eps),
        linear_(linear),
        pool_(pool) {}

  /// q [T, Hq, row] and k [T, Hkv, row] before RoPE, of h [T, D]. All KV heads have the same row.
  void project(const LatentWeights& w, const std::vector<float>& h, std::int64_t tokens,
               std::vector<float>& q, std::vector<float>& k);
  /// values [T, Hq, value] of attended rows [T, Hq, row].
  void unfold(const LatentWeights& w, const std::vector<float>& attended, std::int64_t tokens,
              std::vector<float>& values);

  std::int64_t scratch_floats() const;

 private:
  /// Where in a row the i-th latent number lies, and the i-th of those that turn: Rope turns the first numbers of the
  /// row's two halves.
  std::int64_t place_of_latent(std::int64_t i) const;
  std::int64_t place_of_turning(std::int64_t i) const;
  void multiply_heads(const std::vector<Weight>& w, std::int64_t tokens, const std::vector<float>& x,
                      std::vector<float>& out);
  void write_rows(std::int64_t tokens, std::vector<float>& q, std::vector<float>& k);

  LatentPlan plan_;
  std::int64_t heads_, row_heads_;
  double norm_eps_;
  LinearLayers& linear_;
  ThreadPool& pool_;
  std::vector<float> low_, q_, kv_;      // [T, q_rank], [T, Hq, nope + rope], [T, kv_rank + rope]
  std::vector<float> by_head_, latent_;  // [Hq, T, nope or kv_rank], [Hq, T, kv_rank or value]
};

}  // namespace lode
