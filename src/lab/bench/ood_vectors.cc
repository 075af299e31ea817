// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/ood_vectors.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace lode {

namespace {

constexpr int kTopics = 1024;
constexpr float kKeyStray = 0.2f, kAskedStray = 0.6f, kQueryStray = 0.6f;  // of a vector from its topic
constexpr float kAskedLength = 0.6f;  // of a key's part that queries look at
constexpr float kToldWeight = 0.2f;   // of the other part in a query
constexpr float kNoise = 0.2f;

std::vector<float> normal(std::int64_t count, float deviation, Rng& rng) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = deviation * quick_normal(rng);
  return out;
}

/// Between a topic and a vector of no topic, of the same variance.
void stray(const float* topic, float far, Rng& rng, std::span<float> out) {
  const float near = std::sqrt(1.0f - far * far);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = near * topic[i] + far * quick_normal(rng);
}

}  // namespace

float quick_normal(Rng& rng) {
  const std::uint64_t u = rng.next();
  const auto sum =
      static_cast<std::int64_t>((u & 0xffff) + (u >> 16 & 0xffff) + (u >> 32 & 0xffff) + (u >> 48));
  return static_cast<float>(sum - 2 * 0xffff) * (1.7320508f / 65536.0f);
}

OodVectors::OodVectors(int query_heads, int kv_heads, int head_dim, Rng& rng)
    : d_(head_dim),
      told_(std::max(2, head_dim * 3 / 16)),
      asked_(std::max(1, told_ / 2)),
      group_(query_heads / kv_heads) {
  double sum = 0.0;
  for (int c = 0; c < kTopics; ++c) cumulative_.push_back(sum += 1.0 / (c + 1));
  for (double& x : cumulative_) x /= sum;
  const float unit = 1.0f / std::sqrt(static_cast<float>(d_));
  const std::int64_t d = d_, keys = kv_heads, queries = query_heads;
  basis_ = normal(keys * (told_ + asked_) * d, unit, rng);
  key_topics_ = normal(keys * kTopics * told_, 1.0f, rng);
  asked_topics_ = normal(keys * kTopics * asked_, 1.0f, rng);
  query_topics_ = normal(queries * kTopics * (told_ + asked_), 1.0f, rng);
  key_origin_ = normal(keys * d, unit, rng);
  query_origin_ = normal(queries * d, unit, rng);
}

const float* OodVectors::topic(const std::vector<float>& topics, std::int64_t head, int width,
                               Rng& rng) const {
  const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, rng.uniform());
  return topics.data() + (head * kTopics + (found - cumulative_.begin())) * width;
}

void OodVectors::key(int kv_head, Rng& rng, float* out) const {
  std::vector<float> seen(static_cast<std::size_t>(told_ + asked_));
  const auto told = static_cast<std::size_t>(told_);
  stray(topic(key_topics_, kv_head, told_, rng), kKeyStray, rng, std::span(seen).first(told));
  stray(topic(asked_topics_, kv_head, asked_, rng), kAskedStray, rng, std::span(seen).subspan(told));
  for (std::size_t i = told; i < seen.size(); ++i) seen[i] *= kAskedLength;
  spread(seen, kv_head, key_origin_.data() + std::int64_t{kv_head} * d_, rng, out);
}

void OodVectors::query(int query_head, Rng& rng, float* out) const {
  std::vector<float> seen(static_cast<std::size_t>(told_ + asked_));
  stray(topic(query_topics_, query_head, told_ + asked_, rng), kQueryStray, rng, seen);
  for (std::size_t i = 0; i < static_cast<std::size_t>(told_); ++i) seen[i] *= kToldWeight;
  spread(seen, query_head / group_, query_origin_.data() + std::int64_t{query_head} * d_, rng, out);
}

/// out = origin + basis^T seen + noise.
void OodVectors::spread(const std::vector<float>& seen, int kv_head, const float* origin, Rng& rng,
                        float* out) const {
  const float noise = kNoise * std::sqrt(static_cast<float>(seen.size()) / static_cast<float>(d_));
  for (int j = 0; j < d_; ++j) out[j] = origin[j] + noise * quick_normal(rng);
  const float* row = basis_.data() + std::int64_t{kv_head} * std::ssize(seen) * d_;
  for (const float x : seen) {
    for (int j = 0; j < d_; ++j) out[j] += x * row[j];
    row += d_;
  }
}

}  // namespace lode
