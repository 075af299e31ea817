// SPDX-License-Identifier: Apache-2.0
#include "model/latent.h"

#include <algorithm>

#include "base/threads.h"

namespace lode {

std::int64_t LatentAttention::place_of_latent(std::int64_t i) const {
  const std::int64_t turning = plan_.rope / 2, in_half = plan_.row() / 2 - turning;
  return i < in_half ? turning + i : plan_.row() / 2 + turning + i - in_half;
}

std::int64_t LatentAttention::place_of_turning(std::int64_t i) const {
  const std::int64_t pair = plan_.interleaved ? i / 2 : i % (plan_.rope / 2);
  const bool second = plan_.interleaved ? i % 2 == 1 : i >= plan_.rope / 2;
  return pair + (second ? plan_.row() / 2 : 0);
}

/// out [Hq, T, w.rows] of x [Hq, T, w.cols], each head by a weight of its own.
void LatentAttention::multiply_heads(const std::vector<Weight>& w, std::int64_t tokens,
                                     const std::vector<float>& x, std::vector<float>& out) {
  const std::int64_t rows = w.front().rows;
  out.resize(static_cast<std::size_t>(heads_ * tokens * rows));
  std::vector<RowsProduct> products;
  for (std::int64_t h = 0; h < heads_; ++h)
    for (const LinearLayers::Rows& together : linear_.rows())
      products.push_back({.w = &w[static_cast<std::size_t>(h)],
                          .first = h * tokens + together.first,
                          .rows = together.count,
                          .out = out.data() + (h * tokens + together.first) * rows,
                          .narrow = together.narrow,
                          .bf16 = together.bf16});
  linear_.grouped(x, heads_ * tokens, products);
}

void LatentAttention::write_rows(std::int64_t tokens, std::vector<float>& q, std::vector<float>& k) {
  const std::int64_t row = plan_.row(), rank = plan_.kv_rank, part = plan_.nope + plan_.rope;
  pool_.for_each(tokens, [&](std::int64_t t, int) {
    const float* const key = kv_.data() + t * row;
    for (std::int64_t h = 0; h < row_heads_; ++h) {
      float* const to = k.data() + (t * row_heads_ + h) * row;
      for (std::int64_t i = 0; i < rank; ++i) to[place_of_latent(i)] = key[i];
      for (std::int64_t i = 0; i < plan_.rope; ++i) to[place_of_turning(i)] = key[rank + i];
    }
    for (std::int64_t h = 0; h < heads_; ++h) {
      float* const to = q.data() + (t * heads_ + h) * row;
      const float* const folded = latent_.data() + (h * tokens + t) * rank;
      const float* const turning = q_.data() + (t * heads_ + h) * part + plan_.nope;
      for (std::int64_t i = 0; i < rank; ++i) to[place_of_latent(i)] = folded[i];
      for (std::int64_t i = 0; i < plan_.rope; ++i) to[place_of_turning(i)] = turning[i];
    }
  });
}

void LatentAttention::project(const LatentWeights& w, const std::vector<float>& h, std::int64_t tokens,
                              std::vector<float>& q, std::vector<float>& k) {
  const std::int64_t part = plan_.nope + plan_.rope;
  const auto size = [&](std::int64_t cols) { return static_cast<std::size_t>(tokens * cols); };
  q_.resize(size(heads_ * part));
  kv_.resize(size(plan_.row()));
  if (plan_.q_rank > 0) {
    low_.resize(size(plan_.q_rank));
    linear_(h, {{&w.q_a, nullptr, &low_}, {&w.kv_a, nullptr, &kv_}});
    normalise_rows(w.q_a_norm, norm_eps_, tokens, plan_.q_rank, low_);
    linear_(low_, {{&w.q_b, nullptr, &q_}});
  } else {
    linear_(h, {{&w.q_b, nullptr, &q_}, {&w.kv_a, nullptr, &kv_}});
  }
  normalise_rows(w.kv_a_norm, norm_eps_, tokens, plan_.row(), kv_);
  by_head_.resize(size(heads_ * plan_.nope));
  for (std::int64_t head = 0; head < heads_; ++head)
    for (std::int64_t t = 0; t < tokens; ++t)
      std::copy_n(q_.begin() + (t * heads_ + head) * part, plan_.nope,
                  by_head_.begin() + (head * tokens + t) * plan_.nope);
  multiply_heads(w.k_b, tokens, by_head_, latent_);
  write_rows(tokens, q, k);
}

void LatentAttention::unfold(const LatentWeights& w, const std::vector<float>& attended, std::int64_t tokens,
                             std::vector<float>& values) {
  const std::int64_t row = plan_.row(), rank = plan_.kv_rank;
  by_head_.resize(static_cast<std::size_t>(heads_ * tokens * rank));
  for (std::int64_t h = 0; h < heads_; ++h)
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* const from = attended.data() + (t * heads_ + h) * row;
      float* const to = by_head_.data() + (h * tokens + t) * rank;
      for (std::int64_t i = 0; i < rank; ++i) to[i] = from[place_of_latent(i)];
    }
  multiply_heads(w.v_b, tokens, by_head_, latent_);
  values.resize(static_cast<std::size_t>(tokens * heads_ * plan_.value));
  for (std::int64_t h = 0; h < heads_; ++h)
    for (std::int64_t t = 0; t < tokens; ++t)
      std::copy_n(latent_.begin() + (h * tokens + t) * plan_.value, plan_.value,
                  values.begin() + (t * heads_ + h) * plan_.value);
}

std::int64_t LatentAttention::scratch_floats() const {
  if (plan_.kv_rank == 0) return 0;
  return plan_.q_rank + plan_.row() + heads_ * (plan_.nope + plan_.rope + plan_.value + 2 * plan_.kv_rank);
}

}  // namespace lode
