// SPDX-License-Identifier: Apache-2.0
#include "gpu/layers/latent_layers.h"

#include <algorithm>

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float);

std::int64_t query_columns(const ModelConfig& c) {
  return std::int64_t{c.query_heads} * (c.plan.latent.nope + c.plan.latent.rope);
}
/// Behind W_k or W_v.
std::int64_t head_columns(const ModelConfig& c) {
  return std::int64_t{c.query_heads} * std::max(c.plan.latent.kv_rank, c.plan.latent.value);
}
std::int64_t scratch_bytes(const ModelConfig& c, std::int64_t tokens) {
  return cuda::heads_scratch_bytes(tokens, c.query_heads,
                                   std::max(c.plan.latent.nope, c.plan.latent.kv_rank));
}

}  // namespace

std::int64_t LatentLayers::most_columns(const ModelConfig& c) {
  const LatentPlan& p = c.plan.latent;
  return std::max({query_columns(c), std::int64_t{p.q_rank}, std::int64_t{p.row()},
                   std::int64_t{c.query_heads} * p.value});
}

std::int64_t LatentLayers::bytes(const ModelConfig& c, std::int64_t tokens) {
  const LatentPlan& p = c.plan.latent;
  if (p.kv_rank == 0) return 0;
  return tokens * kFloat * (p.q_rank + query_columns(c) + p.row() + head_columns(c)) +
         scratch_bytes(c, tokens);
}

LatentLayers::LatentLayers(const ModelConfig& config, std::int64_t tokens, cuda::StreamHandle stream,
                           cuda::Precision precision)
    : config_(config), stream_(stream), precision_(precision) {
  const LatentPlan& p = config.plan.latent;
  if (p.kv_rank == 0) return;
  const char* const what = "latent rows of a chunk";
  const auto buffer = [&](std::int64_t columns) { return cuda::Buffer(tokens * columns * kFloat, what); };
  low_ = buffer(p.q_rank);
  q_ = buffer(query_columns(config));
  kv_ = buffer(p.row());
  by_head_ = buffer(head_columns(config));
  scratch_ = cuda::Buffer(scratch_bytes(config, tokens), what);
}

cuda::LatentShape LatentLayers::shape() const {
  const LatentPlan& p = config_.plan.latent;
  return {.kv_rank = p.kv_rank, .rope = p.rope, .nope = p.nope, .interleaved = p.interleaved};
}

void LatentLayers::multiply_heads(const cuda::HeadProduct& product, bool few) const {
  if (few) return cuda::multiply_heads_few(product, stream_);
  cuda::multiply_heads(product, precision_, scratch_.as<void>(), stream_);
}

void LatentLayers::project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv,
                           const cuda::Queries& where, bool few, const Product& product) const {
  const LatentPlan& p = config_.plan.latent;
  const CudaModel::Latent& l = w.latent;
  if (p.q_rank > 0) {
    product(qkv.x, w.attention_norm, l.q_a, low_.as<float>());
    product(low_.as<float>(), l.q_a_norm, l.q_b, q_.as<float>());
  } else {
    product(qkv.x, w.attention_norm, l.q_b, q_.as<float>());
  }
  product(qkv.x, w.attention_norm, l.kv_a, kv_.as<float>());
  const cuda::HeadInput standing = {.x = q_.as<float>(), .stride = p.nope + p.rope, .split = p.nope};
  multiply_heads({.input = standing,
                  .tokens = where.count,
                  .heads = config_.query_heads,
                  .w = l.k_b,
                  .y = by_head_.as<float>()},
                 few);
  cuda::put_latent_rows({.shape = shape(),
                         .q = q_.as<float>(),
                         .folded = by_head_.as<float>(),
                         .kv = kv_.as<float>(),
                         .kv_norm = l.kv_a_norm,
                         .eps = static_cast<float>(config_.norm_eps),
                         .frequencies = qkv.frequencies,
                         .rope_scale = qkv.rope_scale,
                         .q_out = qkv.q_out,
                         .q_unrotated = qkv.q_unrotated,
                         .k_out = qkv.k_out,
                         .k_unrotated = qkv.k_unrotated,
                         .v_out = qkv.v_out},
                        where, stream_);
}

const float* LatentLayers::unfold(const CudaModel::Layer& w, const float* attended, std::int64_t n,
                                  bool few) const {
  const cuda::LatentShape s = shape();
  const int turning = s.rope / 2;
  multiply_heads({.input = {.x = attended,
                            .stride = s.row(),
                            .first = turning,
                            .split = s.in_half(),
                            .second = s.row() / 2 + turning},
                  .tokens = n,
                  .heads = config_.query_heads,
                  .w = w.latent.v_b,
                  .y = by_head_.as<float>()},
                 few);
  return by_head_.as<float>();
}

}  // namespace lode
