// SPDX-License-Identifier: Apache-2.0
// The forward pass of a model over a batch of ragged sequences: the page where tokens become logits. It walks
// the config's plan (layer_plan.h).
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "attend/attend.h"
#include "kernels/rope.h"
#include "kv/store.h"
#include "lodestone/selector.h"
#include "model/config.h"
#include "model/delta_net.h"
#include "model/experts.h"
#include "model/latent.h"
#include "model/linear.h"
#include "model/weights.h"

namespace lode {

class ThreadPool;

/// New tokens of one sequence.
struct SequenceTokens {
  std::span<const TokenId> tokens;            // [T], at least one
  KvStore* kv = nullptr;                      ///< holds the earlier tokens; takes the new ones
  std::int32_t id = 0;                        ///< the sequence's number for the selectors
  Position far_limit = QueryBlock::kNoLimit;  ///< keys from here on are never far
  /// Of the document that the sequence branches from: rows of every layer and head, behind which those of `kv`
  /// follow. Empty: `kv` holds all earlier tokens. far_limit then lies at the document's end or before.
  std::span<const KvRows> document = {};  // [L, ModelConfig::most_kv_heads()]

  std::int64_t document_tokens() const { return document.empty() ? 0 : document.front().rows; }
  /// Position of the first new token.
  Position begin() const { return static_cast<Position>(document_tokens() + kv->tokens()); }
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
  float least_mass = 0.0f;  ///< keys that got less from every query may be left out of `mass`

  // What a GPU, and a sequence with a document, calls in place of `attended`; without these two, and with others, a
  // step of a GPU's runs on the host.
  /// Whether outputs of this sparse call, whose first query stands at `begin`, are to be compared.
  std::function<bool(int layer, Position begin)> samples = {};
  /// Outputs [rows, d] of the call and of full attention; what it leaves in the former goes on.
  std::function<void(int layer, std::int64_t d, std::span<float> outputs, std::span<const float> exact)>
      compare = {};
};

/// Work of one forward pass, summed over layers.
struct ForwardWork {
  AttendWork attend;
  SelectWork select;
  std::int64_t sparse_tokens = 0;  ///< tokens times layers that went through a selector

  ForwardWork& operator+=(const ForwardWork& other) {
    attend += other.attend;
    select.bytes += other.select.bytes;
    select.keys_scored += other.select.keys_scored;
    sparse_tokens += other.sparse_tokens;
    return *this;
  }
};

/// For measurements: queries of a step of one token that take the place of the projections'.
struct QueryOverride {
  std::span<const float> q_unrotated, q;  // [L, Hq, d]; empty: none are given
};

/// Which rows of a step get logits.
enum class LogitRows { none, last_of_each, all };

class DistributedAttention;  // model/distributed_attention.h

/// Sequences that attend the same way. A batch is any number of steps: all of their rows share the linear layers.
/// Either none of a step's sequences has a document, or all have the same.
struct Step {
  std::span<const SequenceTokens> sequences;
  Phase phase = Phase::context;
  std::span<Selector* const> selectors;  ///< [L], null entries are dense; empty = all dense
  LocalWindow dense;                     ///< sink and window beside the selectors' choice
  std::span<const std::vector<Selector*>>
      listeners;  ///< [L] selectors whose on_write is called; empty = none
  const ForwardHooks* hooks = nullptr;
  QueryOverride given = {};
  LogitRows rows = LogitRows::none;
  const Rope* rope = nullptr;
  // For sequences with a document; `work` also for a step of one sequence without:
  std::span<const std::uint8_t> by_id =
      {};                            ///< [L] selectors that know sequences by id; for others all are 0
  std::mutex* choosing = nullptr;    ///< held while the selectors are used
  std::span<ForwardWork> work = {};  ///< one a sequence, to add to
  DistributedAttention* distributed =
      nullptr;  ///< attends in place of this process alone; null: nobody else does
};

class Llama {
 public:
  /// All arguments outlive the object.
  Llama(const ModelConfig& config, const ModelWeights& weights, ThreadPool& pool);

  /// Runs the step, appends its tokens to the KV stores, and writes logits [rows, V] of the wanted rows, in
  /// order of the sequences. RunError when a logit is not finite. On any exception the KV stores hold what
  /// they held before.
  ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows, std::vector<float>& logits);

  /// The same for a batch, each step with its own rope and logits; logits follow each other as the sequences do.
  /// They are not checked. The bits of a sequence's rows depend on that sequence alone: generated tokens go
  /// through the products together, the tokens of a question or context by themselves, or together where the
  /// product gives a row the same bits in any company. Returns the work of sequences without a document.
  ForwardWork forward(std::span<const Step> batch, std::vector<float>& logits);

  /// The rotation of a layer: the context's `usual` one, unless the plan says otherwise.
  const Rope& rope_of(int index, const Rope& usual) const;

  /// Bytes of working memory that a step of that many tokens takes.
  std::int64_t scratch_bytes(std::int64_t tokens) const;

 private:
  struct Buffers {
    std::vector<float> x, h;            // [T, D] residual stream; normalised input
    std::vector<float> q_unrotated, q;  // [T, Hq, d] before and after RoPE
    std::vector<float> k_unrotated, k;  // [T, Hkv, d]
    std::vector<float> v;               // [T, Hkv, d]
    std::vector<float> attention;       // [T, Hq, d]
    std::vector<float> values;          // [T, Hq, value] unfolded from latent rows
    std::vector<float> gates;           // [T, Hq, d] of outputs that are gated
    std::vector<float> lse;             // [T, Hq] of layers with sinks
    std::vector<float> gate, up;        // [T, F]
    std::vector<float> mixed;           // [T, D] of layers with experts
    std::vector<float> shared;          // [T, 1]
    std::vector<float> inputs;          // [T, L, width] of plans with numbers for each layer
  };
  /// Of the running step, for the layers that attend to this layer's rows: k before RoPE, and v.
  struct MadeRows {
    std::vector<float> k_unrotated, v;  // [T, Hkv, d]
  };

  using Batch = std::span<const Step>;

  void resize(std::int64_t tokens);
  void embed(Batch batch);
  void layer(int index, Batch batch, ForwardWork& work);
  void attention(int index, Batch batch, ForwardWork& work);
  void recurrence(int index, Batch batch);
  void gate_attention(const LayerWeights& w);
  void make_inputs(Batch batch);
  void size_heads(int index);
  void project_qkv(int index, const LayerWeights& w);
  void take_rows(int index, const LayerWeights& w);
  void normalise_heads(int index, const LayerWeights& w);
  void rotate(int index, Batch batch);
  void grow_queries(Batch batch);
  void take_given(int index, const QueryOverride& given);
  void write_kv(int index, Batch batch);
  void attend_layer(int index, Batch batch, ForwardWork& work);
  void attend_step(int index, const Step& step, std::int64_t row, ForwardWork& work);
  void attend_branch_step(const Step& step, Selector* selector, const LayerGeometry& geometry,
                          std::span<QueryBlock> blocks, std::span<float* const> outputs,
                          std::span<float* const> lse, const MassSink& mass);
  void compare_branch(const ForwardHooks& hooks, const LayerGeometry& geometry, BranchCall call);
  std::vector<TailRows> take_uncoded(const Step& step, const LayerGeometry& geometry, std::int64_t row,
                                     std::span<QueryBlock> blocks);
  void attend_window_step(const Step& step, const LayerGeometry& geometry, std::span<QueryBlock> blocks,
                          std::span<const TailRows> uncoded, std::span<float* const> outputs,
                          std::span<float* const> lse, ForwardWork& work);
  void add_sinks(const LayerWeights& w);
  void add_feed_forward(int index);
  void add_experts(const LayerWeights& w, std::vector<float>& out);
  void add_experts_apart(const LayerWeights& w, std::vector<float>& out);
  void add_inputs(int index);
  void weigh_shared(const LayerWeights& w);
  void head(Batch batch, std::vector<float>& logits);
  /// out = norm of x [rows, weight.cols]; both may be the same.
  void rms_norm(const std::vector<float>& x, std::int64_t rows, const Weight& weight,
                std::vector<float>& out) const;
  /// gate [rows, F] = activation(gate) * up.
  void activate(std::vector<float>& gate, const std::vector<float>& up, std::int64_t rows) const;
  /// x += h, times the plan's multiplier, after a norm where there is one behind.
  void add_to_stream(const Weight& post_norm);

  const ModelConfig& config_;
  const ModelWeights& weights_;
  ThreadPool& pool_;
  Rope local_rope_, no_rope_;  // of layers that do not turn as the others do
  Buffers b_;
  std::map<int, MadeRows> made_;  // by layer, of those that later ones attend to
  LinearLayers linear_;
  Experts experts_;
  DeltaNet delta_;
  LatentAttention latent_;
  std::int64_t tokens_ = 0;  // T of the running step, all sequences together
  Selection selection_;
  std::vector<Selection> selections_;  // of a step's sequences, where they have a document
  /// By heads and their dimension, of one layer: the rows of a chunk of text before they are coded.
  std::map<std::pair<int, int>, std::optional<KvStore>> uncoded_;
  std::vector<KvRows> document_rows_;  // [Hkv] those in front of the chunk
};

}  // namespace lode
