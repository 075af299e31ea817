// SPDX-License-Identifier: Apache-2.0
#include "model/llama.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <string>

#include "attend/window.h"
#include "base/cancel.h"
#include "base/finite.h"
#include "base/threads.h"
#include "kernels/dequantise.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/distributed_attention.h"

namespace lode {

namespace {

/// Calls body(step, sequence, first row in the batch's matrices, tokens) for each sequence; returns all rows.
template <class Body>
std::int64_t for_each_sequence(std::span<const Step> batch, const Body& body) {
  std::int64_t row = 0;
  for (const Step& step : batch) {
    for (const SequenceTokens& s : step.sequences) {
      const auto tokens = static_cast<std::int64_t>(s.tokens.size());
      body(step, s, row, tokens);
      row += tokens;
    }
  }
  return row;
}

std::span<const float> rows_of(const std::vector<float>& m, std::int64_t row, std::int64_t rows,
                               std::int64_t cols) {
  return {m.data() + row * cols, static_cast<std::size_t>(rows * cols)};
}

void scale(std::span<float> x, double factor) {
  if (factor == 1) return;
  for (float& value : x) value *= static_cast<float>(factor);
}

float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

float gelu_tanh(float x) {
  constexpr auto kFactor = static_cast<float>(std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
  return 0.5f * x * (1.0f + std::tanh(kFactor * (x + 0.044715f * x * x * x)));
}

/// With g at most `limit` and u within it of 0: g sigmoid(1.702 g) (u + 1).
float clamped_silu(float g, float u, float limit) {
  constexpr float kAlpha = 1.702f;
  g = std::min(g, limit);
  return g / (1.0f + std::exp(-kAlpha * g)) * (std::clamp(u, -limit, limit) + 1.0f);
}

void finish_logits(const ModelPlan& plan, std::vector<float>& logits) {
  scale(logits, 1 / plan.logit_divisor);
  if (plan.logit_cap == 0) return;
  const auto cap = static_cast<float>(plan.logit_cap);
  for (float& x : logits) x = cap * std::tanh(x / cap);
}

/// Each sequence's document rows of a layer become its block's, and its own rows the tail.
std::vector<TailRows> take_tails(const Step& step, const LayerGeometry& geometry, int most_heads,
                                 std::span<QueryBlock> blocks) {
  const auto first = static_cast<std::size_t>(geometry.layer) * static_cast<std::size_t>(most_heads);
  const auto heads = static_cast<std::size_t>(geometry.kv_heads);
  std::vector<TailRows> tails;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::span<const KvRows> rows = step.sequences[i].document.subspan(first, heads);
    tails.push_back({.kv = blocks[i].kv, .seam = static_cast<Position>(rows.front().rows)});
    blocks[i].kv = {.heads = rows, .tokens = rows.front().rows};
  }
  return tails;
}

void check_finite(const std::vector<float>& logits) {
  if (!all_finite(logits))
    throw RunError(
        "the model gave a logit that is not a finite number: weights or cached keys are damaged or overflow");
}

}  // namespace

namespace {

/// Of the layers that turn by the local base; the model's where none does.
int local_head_dim(const ModelConfig& c) {
  for (int layer = 0; layer < c.layers; ++layer)
    if (c.plan.layer(layer).turn == Turn::local) return c.head_dim_of(layer);
  return c.head_dim;
}

}  // namespace

Llama::Llama(const ModelConfig& config, const ModelWeights& weights, ThreadPool& pool)
    : config_(config),
      weights_(weights),
      pool_(pool),
      local_rope_({.head_dim = local_head_dim(config),
                   .rotary_dim = config.plan.rotary_dim,
                   .theta = config.plan.local_theta > 0 ? config.plan.local_theta : config.rope_theta},
                  config.max_positions),
      no_rope_(Rope::none(config.head_dim)),
      linear_(pool),
      experts_(config.plan, config.hidden, linear_, pool),
      delta_(config.plan, config.norm_eps, linear_, pool),
      latent_(config, linear_, pool) {
  for (const LayerPlan& layer : config.plan.layers)
    if (!layer.own_rows()) made_[layer.rows_of] = {};
}

ForwardWork Llama::forward(const Step& given, const Rope& rope, LogitRows rows, std::vector<float>& logits) {
  Step step = given;
  step.rope = &rope;
  step.rows = rows;
  const ForwardWork work = forward({&step, 1}, logits);
  if (rows != LogitRows::none) check_finite(logits);
  for_each_sequence({&step, 1}, [](const Step&, const SequenceTokens& s, std::int64_t, std::int64_t tokens) {
    s.kv->commit(tokens);
  });
  return work;
}

ForwardWork Llama::forward(Batch batch, std::vector<float>& logits) {
  ForwardWork work;
  linear_.clear();
  tokens_ = for_each_sequence(
      batch, [&](const Step& step, const SequenceTokens& s, std::int64_t, std::int64_t tokens) {
        linear_.add_rows(tokens, step.phase == Phase::generation, s.kv->shape().type == DType::f32);
      });
  resize(tokens_);
  embed(batch);
  make_inputs(batch);
  for (int i = 0; i < config_.layers; ++i) {
    check_cancel();
    layer(i, batch, work);
    if (batch.front().hooks != nullptr && batch.front().hooks->layer_done)
      batch.front().hooks->layer_done(i, b_.x);
  }
  head(batch, logits);
  return work;
}

// One layer in the order of the diagram in src/README.md.
void Llama::layer(int index, Batch batch, ForwardWork& work) {
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(index)];
  rms_norm(b_.x, tokens_, w.attention_norm, b_.h);  // h: [T, D]
  if (config_.plan.layer(index).recurrent)
    recurrence(index, batch);
  else
    attention(index, batch, work);
  add_to_stream(w.attention_post_norm);  // x: [T, D]
  rms_norm(b_.x, tokens_, w.mlp_norm, b_.h);
  add_feed_forward(index);  // x: [T, D]
  add_inputs(index);
  if (w.factor.data != nullptr) scale(b_.x, numbers_of(w.factor)[0]);
}

void Llama::attention(int index, Batch batch, ForwardWork& work) {
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(index)];
  size_heads(index);
  project_qkv(index, w);  // q: [T, Hq, d]   k, v: [T, Hkv, d]
  rotate(index, batch);
  take_given(index, batch.front().given);
  write_kv(index, batch);            // KV store, then the selectors that listen
  attend_layer(index, batch, work);  // select -> attend -> merge: attention [T, Hq, d]
  add_sinks(w);
  gate_attention(w);
  const bool latent = config_.plan.latent.kv_rank > 0;
  if (latent) latent_.unfold(w.latent, b_.attention, tokens_, b_.values);
  linear_(latent ? b_.values : b_.attention, {{&w.o, &w.o_bias, &b_.h}});  // h: [T, D]
}

/// A sequence that branches from a document has its states in its own store from the start.
void Llama::recurrence(int index, Batch batch) {
  std::vector<DeltaNet::Rows> rows;
  for_each_sequence(batch, [&](const Step&, const SequenceTokens& s, std::int64_t row, std::int64_t tokens) {
    RecurrentStates& states = s.kv->recurrent();
    rows.push_back({row, tokens, states.before(index), states.after(index)});
  });
  delta_.run(weights_.layers[static_cast<std::size_t>(index)].delta, b_.h, tokens_, rows, b_.h);
}

void Llama::resize(std::int64_t tokens) {
  const auto size = [&](std::int64_t cols) { return static_cast<std::size_t>(tokens * cols); };
  for (std::vector<float>* m : {&b_.x, &b_.h}) m->resize(size(config_.hidden));
  b_.inputs.resize(size(std::int64_t{config_.layers} * config_.plan.inputs.width));
  b_.shared.resize(size(config_.plan.experts.shared_gate ? 1 : 0));
  b_.lse.resize(size(config_.plan.sinks ? config_.query_heads : 0));
}

/// What attention of a layer works on.
void Llama::size_heads(int index) {
  const auto size = [&](int heads) {
    return static_cast<std::size_t>(tokens_ * heads * config_.head_dim_of(index));
  };
  for (std::vector<float>* m : {&b_.q_unrotated, &b_.q, &b_.attention}) m->resize(size(config_.query_heads));
  for (std::vector<float>* m : {&b_.k_unrotated, &b_.k, &b_.v}) m->resize(size(config_.kv_heads_of(index)));
}

std::int64_t Llama::scratch_bytes(std::int64_t tokens) const {
  const std::int64_t q_cols = config_.most_query_columns(), kv_cols = config_.most_kv_columns();
  const std::int64_t inputs = std::int64_t{2} * config_.layers * config_.plan.inputs.width;
  std::int64_t made = 0;  // k and v for later layers
  std::set<int> sources;
  for (const LayerPlan& layer : config_.plan.layers)
    if (!layer.own_rows() && sources.insert(layer.rows_of).second) made += 2 * kv_cols;
  const std::int64_t floats = 2 * config_.hidden + 3 * q_cols + 3 * kv_cols + inputs + made +
                              2 * config_.intermediate + experts_.scratch_floats() + delta_.scratch_floats() +
                              latent_.scratch_floats() + (config_.plan.attention_gate ? q_cols : 0);
  const std::int64_t rounded =
      std::max(config_.intermediate, std::max(config_.hidden, q_cols));  // for products, 2 bytes
  return tokens * (floats * static_cast<std::int64_t>(sizeof(float)) + 2 * rounded);
}

void Llama::embed(Batch batch) {
  const Weight& e = weights_.embedding;
  const std::int64_t row_bytes = bytes_of(e.type, e.cols);
  for_each_sequence(batch, [&](const Step&, const SequenceTokens& s, std::int64_t row, std::int64_t) {
    for (const TokenId id : s.tokens) {
      if (id < 0 || id >= e.rows) {
        throw InputError("expected token ids from 0 to " + std::to_string(e.rows - 1) + ", found " +
                         std::to_string(id));
      }
      dequantise(e.type, e.data + id * row_bytes, e.cols, b_.x.data() + row++ * e.cols);
    }
  });
  scale(b_.x, config_.plan.embedding_multiplier);
}

/// Numbers of each token for each layer: (norm(projection of the stream / sqrt(D)) + embedding * sqrt(width)) /
/// sqrt(2).
void Llama::make_inputs(Batch batch) {
  const std::int64_t width = config_.plan.inputs.width, cols = config_.layers * width;
  if (width == 0) return;
  linear_(b_.x, {{&weights_.input_projection, nullptr, &b_.inputs}});
  scale(b_.inputs, 1 / std::sqrt(static_cast<double>(config_.hidden)));
  rms_norm(b_.inputs, tokens_ * config_.layers, weights_.input_projection_norm, b_.inputs);
  const Weight& e = weights_.input_embedding;
  const auto size = static_cast<float>(std::sqrt(static_cast<double>(width))),
             half = static_cast<float>(1 / std::numbers::sqrt2);
  std::vector<float> own(static_cast<std::size_t>(cols));
  for_each_sequence(batch, [&](const Step&, const SequenceTokens& s, std::int64_t row, std::int64_t) {
    for (const TokenId id : s.tokens) {
      if (id >= e.rows)
        throw InputError("expected token ids from 0 to " + std::to_string(e.rows - 1) +
                         ", which have numbers for each layer, found " + std::to_string(id));
      dequantise(e.type, e.data + id * bytes_of(e.type, e.cols), e.cols, own.data());
      float* const to = b_.inputs.data() + row++ * cols;
      for (std::int64_t i = 0; i < cols; ++i)
        to[i] = (to[i] + own[static_cast<std::size_t>(i)] * size) * half;
    }
  });
}

void Llama::rms_norm(const std::vector<float>& x, std::int64_t rows, const Weight& weight,
                     std::vector<float>& out) const {
  const std::int64_t d = weight.cols;
  std::vector<float> gain(static_cast<std::size_t>(d));
  dequantise(weight.type, weight.data, d, gain.data());
  if (config_.plan.norm_plus_one)
    for (float& g : gain) g += 1.0f;
  pool_.for_each((rows + 31) / 32, [&](std::int64_t block, int) {
    for (std::int64_t t = block * 32; t < std::min(rows, block * 32 + 32); ++t) {
      const float* from = x.data() + t * d;
      float* to = out.data() + t * d;
      const double mean_square = kernels().dot(from, from, d) / static_cast<double>(d);
      const auto inverse = static_cast<float>(1.0 / std::sqrt(mean_square + config_.norm_eps));
      for (std::int64_t i = 0; i < d; ++i) to[i] = from[i] * inverse * gain[static_cast<std::size_t>(i)];
    }
  });
}

void Llama::project_qkv(int index, const LayerWeights& w) {
  const LayerPlan layer = config_.plan.layer(index);
  if (config_.plan.latent.kv_rank > 0)
    return latent_.project(w.latent, b_.h, tokens_, b_.q_unrotated, b_.k_unrotated);
  if (!layer.own_rows()) return take_rows(index, w);
  if (layer.value_is_key) {
    linear_(b_.h, {{&w.q, &w.q_bias, &b_.q_unrotated}, {&w.k, &w.k_bias, &b_.k_unrotated}});
    b_.v = b_.k_unrotated;
  } else {
    linear_(
        b_.h,
        {{&w.q, &w.q_bias, &b_.q_unrotated}, {&w.k, &w.k_bias, &b_.k_unrotated}, {&w.v, &w.v_bias, &b_.v}});
  }
  if (w.attention_gate.data != nullptr) {
    b_.gates.resize(b_.attention.size());
    linear_(b_.h, {{&w.attention_gate, nullptr, &b_.gates}});
  }
  normalise_heads(index, w);
  const auto made = made_.find(index);
  if (made != made_.end()) made->second = {b_.k_unrotated, b_.v};
}

/// Of a layer that attends to an earlier one's keys and values.
void Llama::take_rows(int index, const LayerWeights& w) {
  linear_(b_.h, {{&w.q, &w.q_bias, &b_.q_unrotated}});
  rms_norm(b_.q_unrotated, tokens_ * config_.query_heads, w.q_norm, b_.q_unrotated);
  const MadeRows& made = made_.at(config_.plan.layer(index).rows_of);
  b_.k_unrotated = made.k_unrotated;
  b_.v = made.v;
}

void Llama::normalise_heads(int index, const LayerWeights& w) {
  const std::int64_t rows = tokens_ * config_.kv_heads_of(index), d = config_.head_dim_of(index);
  if (config_.plan.qk_norm) {
    rms_norm(b_.q_unrotated, tokens_ * config_.query_heads, w.q_norm, b_.q_unrotated);
    rms_norm(b_.k_unrotated, rows, w.k_norm, b_.k_unrotated);
  }
  if (!config_.plan.v_norm) return;
  pool_.for_each(rows, [&](std::int64_t row, int) {
    const std::span<float> v(b_.v.data() + row * d, static_cast<std::size_t>(d));
    const double mean_square = kernels().dot(v.data(), v.data(), d) / static_cast<double>(d);
    scale(v, 1.0 / std::sqrt(mean_square + config_.norm_eps));
  });
}

const Rope& Llama::rope_of(int index, const Rope& usual) const {
  const Turn turn = config_.plan.layer(index).turn;
  return turn == Turn::usual ? usual : turn == Turn::local ? local_rope_ : no_rope_;
}

void Llama::grow_queries(Batch batch) {
  const ModelPlan& p = config_.plan;
  if (p.query_growth == 0) return;
  const std::int64_t cols = std::ssize(b_.q_unrotated) / tokens_;
  for_each_sequence(batch, [&](const Step&, const SequenceTokens& s, std::int64_t row, std::int64_t tokens) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t stretches = (s.begin() + t) / p.query_growth_start;
      scale({b_.q_unrotated.data() + (row + t) * cols, static_cast<std::size_t>(cols)},
            1 + p.query_growth * std::log1p(static_cast<double>(stretches)));
    }
  });
}

void Llama::rotate(int index, Batch batch) {
  grow_queries(batch);
  b_.q = b_.q_unrotated;
  b_.k = b_.k_unrotated;
  const std::size_t q_cols = b_.q.size() / static_cast<std::size_t>(tokens_),
                    kv_cols = b_.k.size() / static_cast<std::size_t>(tokens_);
  for_each_sequence(batch,
                    [&](const Step& step, const SequenceTokens& s, std::int64_t row, std::int64_t tokens) {
                      const Rope& rope = rope_of(index, *step.rope);
                      pool_.for_each(tokens, [&](std::int64_t t, int) {
                        const auto position = s.begin() + static_cast<Position>(t);
                        const auto at = static_cast<std::size_t>(row + t);
                        rope.rotate({b_.q.data() + at * q_cols, q_cols}, position);
                        rope.rotate({b_.k.data() + at * kv_cols, kv_cols}, position);
                      });
                    });
}

void Llama::take_given(int index, const QueryOverride& given) {
  if (given.q.empty()) return;
  LODE_ASSERT(tokens_ == 1);
  const std::size_t one = b_.q.size(), at = static_cast<std::size_t>(index) * one;
  std::copy_n(given.q.begin() + static_cast<std::ptrdiff_t>(at), one, b_.q.begin());
  std::copy_n(given.q_unrotated.begin() + static_cast<std::ptrdiff_t>(at), one, b_.q_unrotated.begin());
}

void Llama::write_kv(int index, Batch batch) {
  const std::int64_t q_cols = std::ssize(b_.q) / tokens_, kv_cols = std::ssize(b_.k) / tokens_;
  const auto write_sequence = [&](const Step& step, const SequenceTokens& s, std::int64_t row,
                                  std::int64_t tokens) {
    const KvWrite write = {.sequence = s.id,
                           .phase = step.phase,
                           .begin = s.begin(),
                           .tokens = tokens,
                           .q_unrotated = rows_of(b_.q_unrotated, row, tokens, q_cols),
                           .k_unrotated = rows_of(b_.k_unrotated, row, tokens, kv_cols),
                           .q = rows_of(b_.q, row, tokens, q_cols),
                           .k = rows_of(b_.k, row, tokens, kv_cols),
                           // A latent row is both.
                           .v = rows_of(config_.plan.latent.kv_rank > 0 ? b_.k : b_.v, row, tokens, kv_cols)};
    if (config_.plan.layer(index).own_rows()) s.kv->write(index, tokens, write.k, write.v, &pool_);
    if (step.listeners.empty() || config_.plan.layer(index).window > 0) return;
    std::unique_lock<std::mutex> choosing;
    if (step.choosing != nullptr) choosing = std::unique_lock(*step.choosing);
    for (Selector* listener : step.listeners[static_cast<std::size_t>(index)]) listener->on_write(write);
  };
  for_each_sequence(batch, write_sequence);
}

void Llama::attend_layer(int index, Batch batch, ForwardWork& work) {
  std::int64_t row = 0;
  for (const Step& step : batch) {
    attend_step(index, step, row, work);
    for (const SequenceTokens& s : step.sequences) row += std::ssize(s.tokens);
  }
}

void Llama::attend_step(int index, const Step& step, std::int64_t row, ForwardWork& work) {
  const bool windowed = config_.plan.layer(index).window > 0;
  Selector* selector =
      step.selectors.empty() || windowed ? nullptr : step.selectors[static_cast<std::size_t>(index)];
  const int d = config_.head_dim_of(index);
  const std::int64_t q_cols = std::int64_t{config_.query_heads} * d;
  LayerGeometry geometry = {.layer = index,
                            .query_heads = config_.query_heads,
                            .kv_heads = config_.kv_heads_of(index),
                            .head_dim = d,
                            .scale = score_scale(config_),
                            .dense = step.dense,
                            .rope = &rope_of(index, *step.rope),
                            .pool = &pool_};
  std::vector<QueryBlock> blocks;
  std::vector<float*> outputs, lse;  // per block: [T, Hq, d], [T, Hq]; the second only where there are sinks
  std::int64_t tokens = 0;
  for (const SequenceTokens& s : step.sequences) {
    const std::int64_t first = row + tokens, count = std::ssize(s.tokens);
    blocks.push_back({.sequence = s.id,
                      .phase = step.phase,
                      .begin = s.begin(),
                      .tokens = count,
                      .q = rows_of(b_.q, first, count, q_cols),
                      .q_unrotated = rows_of(b_.q_unrotated, first, count, q_cols),
                      .kv = s.kv->layer(index, count),
                      .far_begin = static_cast<Position>(geometry.dense.sink),
                      .far_limit = s.far_limit});
    outputs.push_back(b_.attention.data() + first * q_cols);
    if (config_.plan.sinks) lse.push_back(b_.lse.data() + first * config_.query_heads);
    tokens += count;
  }
  if (step.distributed != nullptr)
    return step.distributed->attend({.step = step,
                                     .selector = selector,
                                     .window = config_.plan.layer(index).window,
                                     .geometry = geometry,
                                     .tails = take_tails(step, geometry, config_.most_kv_heads(), blocks),
                                     .blocks = blocks,
                                     .outputs = outputs,
                                     .lse = lse});
  MassSink mass;
  const bool selector_wants = selector != nullptr && selector->wants_mass();
  if (selector_wants || (step.hooks != nullptr && step.hooks->mass)) {
    mass = {[&](const AttentionMass& m) {
              if (selector_wants) selector->observe(m);
              if (step.hooks != nullptr && step.hooks->mass) step.hooks->mass(geometry, m);
            },
            selector_wants ? 0.0f : step.hooks->least_mass};
  }
  const std::vector<TailRows> uncoded = take_uncoded(step, geometry, row, blocks);
  if (windowed) {
    attend_window_step(step, geometry, blocks, uncoded, outputs, lse, work);
  } else if (!uncoded.empty()) {
    std::vector<AttendWork> attended(blocks.size());
    attend_branches({blocks, uncoded, outputs, {}, attended, lse}, geometry, mass);
    work.attend += attended.front();
  } else if (!step.sequences.front().document.empty()) {
    attend_branch_step(step, selector, geometry, blocks, outputs, lse, mass);
  } else if (selector == nullptr) {
    (step.work.empty() ? work : step.work.front()).attend +=
        attend_full(blocks, geometry, outputs, mass, lse);
  } else {
    for (const QueryBlock& block : blocks) {
      selector->append(block.sequence, block.kv, block.far_end(block.tokens - 1, geometry.dense));
    }
    selection_.clear();
    selector->select(blocks, selection_);
    work.attend += attend(blocks, selection_, geometry, outputs, mass, lse);
    const SelectWork select = selector->take_work();
    work.select.bytes += select.bytes;
    work.select.keys_scored += select.keys_scored;
    work.sparse_tokens += tokens;
  }
  if (step.hooks != nullptr && step.hooks->attended) {
    step.hooks->attended(geometry, blocks, selector != nullptr ? &selection_ : nullptr, outputs);
  }
}

/// Each sequence chooses by itself, so that no choice depends on who else asks.
void Llama::attend_branch_step(const Step& step, Selector* selector, const LayerGeometry& geometry,
                               std::span<QueryBlock> blocks, std::span<float* const> outputs,
                               std::span<float* const> lse, const MassSink& mass) {
  const auto layer = static_cast<std::size_t>(geometry.layer);
  const std::vector<TailRows> tails = take_tails(step, geometry, config_.most_kv_heads(), blocks);
  std::unique_lock<std::mutex> choosing;
  if (selector != nullptr && step.choosing != nullptr) choosing = std::unique_lock(*step.choosing);
  selections_.resize(selector != nullptr ? blocks.size() : 0);
  for (std::size_t i = 0; i < selections_.size(); ++i) {
    if (step.by_id.empty() || step.by_id[layer] == 0) blocks[i].sequence = 0;
    selections_[i].clear();
    selector->select(blocks.subspan(i, 1), selections_[i]);
    const SelectWork select = selector->take_work();
    step.work[i].select.bytes += select.bytes;
    step.work[i].select.keys_scored += select.keys_scored;
    step.work[i].sparse_tokens += blocks[i].tokens;
  }
  std::vector<AttendWork> attended(blocks.size());
  attend_branches({blocks, tails, outputs, selections_, attended, lse}, geometry, mass);
  for (std::size_t i = 0; i < blocks.size(); ++i) step.work[i].attend += attended[i];
  if (selector != nullptr && step.hooks != nullptr && step.hooks->samples &&
      step.hooks->samples(geometry.layer, blocks.front().begin))
    compare_branch(*step.hooks, geometry, {blocks, tails, outputs, {}, attended});
}

/// Shows a sequence's outputs beside those of full attention.
void Llama::compare_branch(const ForwardHooks& hooks, const LayerGeometry& geometry, BranchCall call) {
  LODE_ASSERT(call.blocks.size() == 1);  // a sequence that is looked into has a step of its own
  std::vector<float> exact(call.blocks.front().q.size());
  std::span<float> outputs = {call.outputs.front(), exact.size()};
  float* const exact_output = exact.data();
  call.outputs = {&exact_output, 1};
  attend_branches(call, geometry);
  hooks.compare(geometry.layer, geometry.head_dim, outputs, exact);
}

/// Rows of 4 bits cost a model most while it reads: there a text's tokens attend to those of their own chunk as they are
/// before they are coded. The layer's, from `row` of the step on, become the tail of the block, whose keys then end in front of them.
/// Empty: nothing is read, or rows are of another type.
std::vector<TailRows> Llama::take_uncoded(const Step& step, const LayerGeometry& geometry, std::int64_t row,
                                          std::span<QueryBlock> blocks) {
  const KvStore& store = *step.sequences.front().kv;
  const std::int64_t count = blocks.front().tokens;
  if (store.shape().type != DType::q4 || step.phase != Phase::context || step.sequences.size() > 1 ||
      !step.selectors.empty() || !step.sequences.front().document.empty() || store.shape().shared_rows ||
      !config_.plan.layer(geometry.layer).own_rows() ||
      !store.shape().recurrent.empty())  // whose tokens are read again, one by one, where a text is cut
    return {};
  const KvShape shape = {.layers = 1,
                         .kv_heads = geometry.kv_heads,
                         .head_dim = geometry.head_dim,
                         .type = DType::f16,
                         .max_tokens = std::max<std::int64_t>(count, tokens_)};
  std::optional<KvStore>& uncoded = uncoded_[{shape.kv_heads, shape.head_dim}];
  if (!uncoded || uncoded->shape().max_tokens < shape.max_tokens) uncoded.emplace(shape);
  const std::int64_t columns = std::int64_t{geometry.kv_heads} * geometry.head_dim;
  uncoded->write(0, count, rows_of(b_.k, row, count, columns), rows_of(b_.v, row, count, columns), &pool_);
  QueryBlock& block = blocks.front();
  document_rows_.assign(block.kv.heads.begin(), block.kv.heads.end());
  for (KvRows& head : document_rows_) head.rows = block.begin;
  block.kv = {.heads = document_rows_, .tokens = block.begin};
  return {{.kv = uncoded->layer(0, count), .seam = block.begin}};
}

void Llama::attend_window_step(const Step& step, const LayerGeometry& geometry, std::span<QueryBlock> blocks,
                               std::span<const TailRows> uncoded, std::span<float* const> outputs,
                               std::span<float* const> lse, ForwardWork& work) {
  const bool branches = !step.sequences.front().document.empty();
  const auto tails = branches ? take_tails(step, geometry, config_.most_kv_heads(), blocks)
                              : std::vector<TailRows>(uncoded.begin(), uncoded.end());
  std::vector<AttendWork> attended(blocks.size());
  attend_window(blocks, tails, geometry, config_.plan.layer(geometry.layer).window, outputs, attended, lse);
  for (std::size_t i = 0; i < blocks.size(); ++i) (branches ? step.work[i] : work).attend += attended[i];
}

/// A sink is a logit without a value: it takes its share of the softmax, once, when all keys have theirs.
void Llama::add_sinks(const LayerWeights& w) {
  if (!config_.plan.sinks) return;
  const std::vector<float> sinks = numbers_of(w.sinks);
  const std::int64_t heads = config_.query_heads, d = std::ssize(b_.attention) / (tokens_ * heads);
  pool_.for_each(tokens_, [&](std::int64_t t, int) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const float beyond =
          sinks[static_cast<std::size_t>(h)] - b_.lse[static_cast<std::size_t>(t * heads + h)];
      scale({b_.attention.data() + (t * heads + h) * d, static_cast<std::size_t>(d)},
            1.0f / (1.0f + std::exp(beyond)));
    }
  });
}

void Llama::gate_attention(const LayerWeights& w) {
  if (w.attention_gate.data == nullptr) return;
  for (std::size_t i = 0; i < b_.attention.size(); ++i) b_.attention[i] /= 1.0f + std::exp(-b_.gates[i]);
}

/// What every token goes through, then what each chose.
void Llama::add_feed_forward(int index) {
  const LayerWeights& w = weights_.layers[static_cast<std::size_t>(index)];
  std::vector<float>& out = w.experts.empty() ? b_.h : b_.mixed;
  out.resize(b_.h.size());
  if (w.gate.data == nullptr) {
    std::fill(out.begin(), out.end(), 0.0f);
  } else {
    for (std::vector<float>* m : {&b_.gate, &b_.up})
      m->resize(static_cast<std::size_t>(tokens_ * w.gate.rows));
    linear_(b_.h, {{&w.gate, &w.gate_bias, &b_.gate}, {&w.up, &w.up_bias, &b_.up}});
    activate(b_.gate, b_.up, tokens_);
    linear_(b_.gate, {{&w.down, &w.down_bias, &out}});
  }
  if (!w.experts.empty()) {
    if (config_.plan.experts.apart)
      add_experts_apart(w, out);
    else
      add_experts(w, out);
    std::swap(b_.h, b_.mixed);
  }
  add_to_stream(w.mlp_post_norm);
}

void Llama::add_experts(const LayerWeights& w, std::vector<float>& out) {
  weigh_shared(w);
  experts_.add(
      w, b_.h, b_.h, tokens_,
      [this](auto& gate, const auto& up, std::int64_t rows) { activate(gate, up, rows); }, out);
}

/// Router and experts read the stream, each through a norm of its own.
void Llama::add_experts_apart(const LayerWeights& w, std::vector<float>& out) {
  rms_norm(out, tokens_, w.apart.dense_post_norm, out);
  std::vector<float> routed(b_.x.size()), mixed(b_.x.size(), 0.0f);
  rms_norm(b_.x, tokens_, w.apart.router_norm, routed);
  scale(routed, 1 / std::sqrt(static_cast<double>(config_.hidden)));
  rms_norm(b_.x, tokens_, w.apart.norm, b_.h);
  experts_.add(
      w, routed, b_.h, tokens_,
      [this](auto& gate, const auto& up, std::int64_t rows) { activate(gate, up, rows); }, mixed);
  rms_norm(mixed, tokens_, w.apart.post_norm, mixed);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += mixed[i];
}

/// What a layer makes of the numbers that it is given beside the stream.
void Llama::add_inputs(int index) {
  const std::int64_t width = config_.plan.inputs.width;
  if (width == 0) return;
  const LayerInputWeights& w = weights_.layers[static_cast<std::size_t>(index)].inputs;
  for (std::vector<float>* m : {&b_.gate, &b_.up}) m->resize(static_cast<std::size_t>(tokens_ * width));
  linear_(b_.x, {{&w.gate, nullptr, &b_.gate}});
  for (std::int64_t t = 0; t < tokens_; ++t)
    std::copy_n(b_.inputs.begin() + (t * config_.layers + index) * width, width, b_.up.begin() + t * width);
  activate(b_.gate, b_.up, tokens_);
  linear_(b_.gate, {{&w.out, nullptr, &b_.h}});
  add_to_stream(w.norm);
}

/// Each token's gate of the feed-forward that all go through beside the experts.
void Llama::weigh_shared(const LayerWeights& w) {
  if (w.shared_gate.data == nullptr) return;
  const std::int64_t d = config_.hidden;
  linear_(b_.h, {{&w.shared_gate, nullptr, &b_.shared, true}});
  pool_.for_each(tokens_, [&](std::int64_t t, int) {
    scale({b_.mixed.data() + t * d, static_cast<std::size_t>(d)},
          1.0f / (1.0f + std::exp(-b_.shared[static_cast<std::size_t>(t)])));
  });
}

void Llama::activate(std::vector<float>& gate, const std::vector<float>& up, std::int64_t rows) const {
  const std::int64_t f = std::ssize(gate) / std::max<std::int64_t>(rows, 1);
  const auto apply = [&](auto function) {
    pool_.for_each(rows, [&](std::int64_t t, int) {
      for (std::int64_t i = t * f; i < (t + 1) * f; ++i) {
        const auto at = static_cast<std::size_t>(i);
        gate[at] = function(gate[at], up[at]);
      }
    });
  };
  const auto limit = static_cast<float>(config_.plan.activation_limit);
  switch (config_.plan.activation) {
    case ActivationKind::silu:
      return apply([](float g, float u) { return silu(g) * u; });
    case ActivationKind::gelu_tanh:
      return apply([](float g, float u) { return gelu_tanh(g) * u; });
    case ActivationKind::clamped_silu:
      return apply([=](float g, float u) { return clamped_silu(g, u, limit); });
  }
}

void Llama::add_to_stream(const Weight& post_norm) {
  if (post_norm.data != nullptr) rms_norm(b_.h, tokens_, post_norm, b_.h);
  scale(b_.h, config_.plan.residual_multiplier);
  for (std::size_t i = 0; i < b_.x.size(); ++i) b_.x[i] += b_.h[i];
}

/// The last token of a sequence is one row, whichever phase it is of.
void Llama::head(Batch batch, std::vector<float>& logits) {
  const std::int64_t d = config_.hidden;
  linear_.clear();
  tokens_ = 0;
  for_each_sequence(
      batch, [&](const Step& step, const SequenceTokens&, std::int64_t row, std::int64_t count) {
        if (step.rows == LogitRows::none) return;
        const std::int64_t rows = step.rows == LogitRows::all ? count : 1, first = row + count - rows;
        if (first != tokens_) std::copy_n(b_.x.data() + first * d, rows * d, b_.x.data() + tokens_ * d);
        linear_.add_rows(rows, rows == 1 || step.phase == Phase::generation, true);
        tokens_ += rows;
      });
  if (tokens_ == 0) return;
  rms_norm(b_.x, tokens_, weights_.final_norm, b_.h);
  logits.resize(static_cast<std::size_t>(tokens_ * weights_.output.rows));
  linear_(b_.h, {{&weights_.output, nullptr, &logits}});
  finish_logits(config_.plan, logits);
}

}  // namespace lode
