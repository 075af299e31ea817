// SPDX-License-Identifier: Apache-2.0
// What a model computes beside the sizes of its matrices, as data: the forward passes walk it, and a family
// of models is a way to fill it in. The defaults are Llama's.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace lode {

enum class ActivationKind {
  silu,
  gelu_tanh,
  /// With g at most L and u within L of 0: g sigmoid(1.702 g) (u + 1), L = activation_limit (gpt-oss).
  clamped_silu
};

/// How queries and keys of a layer get their positions.
enum class Turn {
  usual,  ///< by the model's RoPE
  local,  ///< by one with the base local_theta and without scaling
  none    ///< not at all
};

struct LayerPlan {
  static constexpr std::int64_t kUsual = -1;
  static constexpr int kOwn = -1;
  std::int64_t window = 0;  ///< keys that a query attends to, its own included; 0 = all up to its own
  Turn turn = Turn::usual;
  bool recurrent =
      false;             ///< no attention: a gated delta rule (DeltaPlan), whose state stands for all tokens
  bool experts = false;  ///< a mixture of experts is added to the feed-forward
  std::int64_t width = kUsual;  ///< of the feed-forward that every token goes through; 0 = none
  // Where heads differ from layer to layer:
  int kv_heads = 0, head_dim = 0;  ///< 0: the model's
  bool value_is_key = false;  ///< values are keys before their norm and RoPE: there is no projection of v
  int rows_of = kOwn;         ///< the earlier layer whose keys and values it attends to
  bool own_rows() const { return rows_of == kOwn; }
  /// Whether a method can choose among its keys: all are there, and some can be far.
  bool chooses() const { return window == 0 && !recurrent; }
};

/// A recurrent layer: q, k and v go through a causal convolution of each channel and SiLU; every value head has a
/// matrix S [key_dim, value_dim] as its state, S = exp(g) S + k (beta (v - exp(g) S^T k))^T, and puts out S^T q,
/// normalised and gated (Gated DeltaNet, arXiv 2412.06464, equation 10).
struct DeltaPlan {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int kernel = 0;         ///< tokens that the convolution sees
  bool tiled = false;     ///< value head h has key head h % key_heads, not h / (value_heads / key_heads)
  bool decay_log = true;  ///< the decay's weight is log A; false: -A
  std::int64_t keys() const { return std::int64_t{key_heads} * key_dim; }
  std::int64_t values() const { return std::int64_t{value_heads} * value_dim; }
  std::int64_t channels() const { return 2 * keys() + values(); }
  /// Inputs of the convolution before the next token [kernel - 1, channels], then S of each value head.
  std::int64_t state_floats() const { return (kernel - 1) * channels() + key_dim * values(); }
  bool operator==(const DeltaPlan&) const = default;
};

/// A mixture of experts: a router scores all, a token goes through those with the best scores.
struct ExpertPlan {
  int count = 0, used = 0;  ///< E; how many a token goes through
  std::int64_t width = 0;   ///< of an expert's feed-forward
  enum class Score { softmax, sigmoid } score = Score::softmax;
  bool score_chosen = false;  ///< the softmax is over the chosen experts' logits alone
  bool normalise = false;     ///< weights of the chosen are divided by their sum
  double scale = 1;           ///< of their weights, afterwards
  /// Experts lie in groups of one size; only those of the best groups are chosen from.
  int groups = 1, groups_used = 1;
  int group_best = 1;  ///< a group's score is the sum of its so many best experts'
  bool router_bias = false;
  bool choice_bias = false;  ///< added to scores for the choice, not to weights
  bool biases = false;       ///< of gate, up and down
  bool shared_gate = false;  ///< the feed-forward of every token is multiplied by sigmoid(h . gate)
  /// Router and experts read the stream through norms of their own, and what they and the feed-forward of every token
  /// put out is normalised before it is added up; an expert's weight has a factor of its own.
  bool apart = false;
  bool operator==(const ExpertPlan&) const = default;
};

/// Numbers of each token that every layer is given beside the stream (per-layer embeddings): of an embedding [V, L,
/// width], and of a projection of the stream's beginning, normalised. A layer's output h gets
/// norm(W_out (act(W_in h) * numbers)) added.
struct LayerInputPlan {
  int width = 0;           ///< 0: there are none
  std::int64_t vocab = 0;  ///< of the embedding
  bool operator==(const LayerInputPlan&) const = default;
};

/// Attention over latent rows (MLA of DeepSeek-V2, arXiv 2405.04434): key and value of a token are one row of kv_rank
/// numbers, which W_k and W_v would unfold for each head, and `rope` numbers that turn, which all heads share. Here
/// W_k is applied to the query and W_v to the output, so that attention is over the rows themselves: d_k is the row,
/// d_v its latent part.
struct LatentPlan {
  int kv_rank = 0;                    ///< 0: the model has none
  int q_rank = 0;                     ///< of the query's own low-rank projection; 0 = none
  int nope = 0, rope = 0, value = 0;  ///< of a head: numbers that stand still, that turn, of its value
  bool interleaved = true;            ///< neighbours turn together
  int row() const { return kv_rank + rope; }
  bool operator==(const LatentPlan&) const = default;
};

struct ModelPlan {
  // Attention
  bool q_bias = false, k_bias = false, v_bias = false, o_bias = false;
  bool qk_norm = false;  ///< RMS norm of each head of q and k before RoPE
  bool v_norm = false;   ///< RMS norm of each head of v, without gains
  int rotary_dim = 0;    ///< dimensions of a head that turn; 0 = all
  /// Of models that see: pairs that turn with a token's time, height and width, which are one in a text. For files alone.
  std::array<int, 3> rope_sections = {};
  double local_theta = 0;  ///< base of the RoPE of Turn::local
  double score_scale = 0;  ///< of q.k; 0 = 1 / sqrt(d)
  /// Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / query_growth_start)).
  double query_growth = 0;
  std::int64_t query_growth_start = 1;
  bool attention_gate = false;  ///< outputs are multiplied by sigmoid of a projection of their own
  DeltaPlan delta;              ///< of the recurrent layers
  LatentPlan latent;            ///< of all attention
  bool sinks = false;           ///< the softmax has a learned logit more in its denominator, one a query head
  // Feed-forward: down(activation(gate(h)) * up(h))
  ActivationKind activation = ActivationKind::silu;
  double activation_limit = 0;
  bool gate_bias = false, up_bias = false, down_bias = false;
  ExpertPlan experts;  ///< of the layers that have them
  // Norms
  bool norm_plus_one = false;  ///< gains are 1 + weight
  bool post_norms = false;     ///< attention and feed-forward have a norm behind them too
  // The residual stream
  double embedding_multiplier = 1, residual_multiplier = 1;
  double logit_divisor = 1, logit_cap = 0;  ///< cap 0: none; else cap * tanh(logit / cap)
  bool layer_factor = false;  ///< the stream behind a layer is multiplied by a number of its own
  LayerInputPlan inputs;

  int draft_layers = 0;  ///< behind the model's own in its files: for drafts, not read

  std::vector<LayerPlan> layers = {};  ///< [L]; empty: all are alike
  LayerPlan layer(int index) const {
    return layers.empty() ? LayerPlan{} : layers[static_cast<std::size_t>(index)];
  }
  /// [L] floats of each layer's state; empty when none is recurrent.
  std::vector<std::int64_t> recurrent_floats() const {
    std::vector<std::int64_t> floats;
    bool any = false;
    for (const LayerPlan& layer : layers) {
      floats.push_back(layer.recurrent ? delta.state_floats() : 0);
      any = any || layer.recurrent;
    }
    return any ? floats : std::vector<std::int64_t>{};
  }
};

}  // namespace lode
