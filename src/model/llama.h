// SPDX-License-Identifier: Apache-2.0
// The forward pass of a Llama-family model over a batch of ragged sequences: the page where tokens become
// logits.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "attend/attend.h"
#include "kv/store.h"
#include "lodestone/selector.h"
#include "model/config.h"
#include "model/rope.h"
#include "model/weights.h"

namespace lode {

class ThreadPool;

/// New tokens of one sequence.
struct SequenceTokens {
  std::span<const TokenId> tokens;            // [T], at least one
  KvStore* kv = nullptr;                      ///< holds the earlier tokens; takes the new ones
  std::int32_t id = 0;                        ///< the sequence's number for the selectors
  Position far_limit = QueryBlock::kNoLimit;  ///< keys from here on are never far
};

/// What is told about each layer's attention while it runs; all optional.
struct ForwardHooks {
  /// After a layer attended: its query blocks, the selection (null when dense) and the outputs [T, Hq, d] per
  /// block.
  std::function<void(const LayerGeometry&, std::span<const QueryBlock>, const Selection*,
                     std::span<float* const>)>
      attended;
  /// The residual stream x [T, D] that leaves a layer.
  std::function<void(int layer, std::span<const float> x)> layer_done;
  /// Attention mass per attended key of each (token, KV head).
  std::function<void(const LayerGeometry&, const AttentionMass&)> mass;
};

/// Work of one forward pass, summed over layers.
struct ForwardWork {
  AttendWork attend;
  SelectWork select;
  std::int64_t sparse_tokens = 0;  ///< tokens times layers that went through a selector
};

/// For measurements: queries of a step of one token that take the place of the projections'.
struct GivenQueries {
  std::span<const float> q_unrotated, q;  // [L, Hq, d]; empty: none are given
};

/// One forward pass of a batch. All sequences attend the same way.
struct Step {
  std::span<const SequenceTokens> sequences;
  Phase phase = Phase::context;
  std::span<Selector* const> selectors;  ///< [L], null entries are dense; empty = all dense
  DenseParts dense;                      ///< sink and window beside the selectors' choice
  std::span<const std::vector<Selector*>>
      listeners;  ///< [L] selectors whose on_write is called; empty = none
  const ForwardHooks* hooks = nullptr;
  GivenQueries given = {};
};

/// Which rows of a step get logits.
enum class LogitRows { none, last_of_each, all };

class Llama {
 public:
  /// All arguments outlive the object.
  Llama(const ModelConfig& config, const ModelWeights& weights, ThreadPool& pool);

  /// Runs the step, appends its tokens to the KV stores, and writes logits [rows, V] of the wanted rows, in
  /// order of the sequences. RunError when a logit is not finite. On any exception the KV stores hold what
  /// they held before.
  ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows, std::vector<float>& logits);

  /// Bytes of working memory that a step of that many tokens takes.
  std::int64_t scratch_bytes(std::int64_t tokens) const;

 private:
  struct Buffers {
    std::vector<float> x, h;            // [T, D] residual stream; normalised input
    std::vector<float> q_unrotated, q;  // [T, Hq, d] before and after RoPE
    std::vector<float> k_unrotated, k;  // [T, Hkv, d]
    std::vector<float> v;               // [T, Hkv, d]
    std::vector<float> attention;       // [T, Hq, d]
    std::vector<float> gate, up;        // [T, F]
  };

  void resize(std::int64_t tokens);
  void embed(const Step& step);
  void layer(int index, const Step& step, const Rope& rope, ForwardWork& work);
  void project_qkv(const LayerWeights& w);
  void rotate(const Step& step, const Rope& rope);
  void take_given(int index, const GivenQueries& given);
  void write_kv(int index, const Step& step);
  void attend_layer(int index, const Step& step, const Rope& rope, ForwardWork& work);
  void add_projection(const LayerWeights& w);
  void add_feed_forward(const LayerWeights& w);
  void head(const Step& step, LogitRows rows, std::vector<float>& logits);
  void rms_norm(const std::vector<float>& x, const Weight& weight, std::vector<float>& out) const;
  /// out [T, w.rows] = x [T, w.cols] w^T + bias.
  void linear(const std::vector<float>& x, const Weight& w, const Weight& bias, std::vector<float>& out);

  const ModelConfig& config_;
  const ModelWeights& weights_;
  ThreadPool& pool_;
  Buffers b_;
  std::int64_t tokens_ = 0;  // T of the running step, all sequences together
  Selection selection_;
};

}  // namespace lode
