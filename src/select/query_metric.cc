// SPDX-License-Identifier: Apache-2.0
#include "select/query_metric.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace lode {

namespace {

constexpr double kRidge = 0.1;
constexpr Position kSpread = 256;  // positions of questions and answers behind the context

/// Cholesky's factor of a symmetric positive definite matrix [d, d], in place below the diagonal, zeros
/// above.
void factor(std::vector<double>& a, std::size_t d) {
  for (std::size_t j = 0; j < d; ++j) {
    for (std::size_t i = j; i < d; ++i) {
      double sum = a[i * d + j];
      for (std::size_t k = 0; k < j; ++k) sum -= a[i * d + k] * a[j * d + k];
      a[i * d + j] = i == j ? std::sqrt(sum) : sum / a[j * d + j];
    }
    for (std::size_t i = 0; i < j; ++i) a[i * d + j] = 0.0;
  }
}

/// sum += q q^T below the diagonal, unless q holds a number that is none.
void add_square(std::span<const float> q, std::vector<double>& sum) {
  if (!std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); })) return;
  for (std::size_t i = 0; i < q.size(); ++i) {
    for (std::size_t j = 0; j <= i; ++j) sum[i * q.size() + j] += static_cast<double>(q[i]) * q[j];
  }
}

}  // namespace

void QuerySample::take(const KvWrite& write) {
  if (write.phase != Phase::context || write.tokens == 0 || write.q_unrotated.empty()) return;
  width_ = std::ssize(write.q_unrotated) / write.tokens;
  roll_back(write.begin);
  for (std::int64_t t = 0; t < write.tokens; ++t) {
    const std::int64_t position = write.begin + t;
    if (position % stride_ != 0) continue;
    positions_.push_back(static_cast<Position>(position));
    q_.insert(q_.end(), write.q_unrotated.begin() + t * width_, write.q_unrotated.begin() + (t + 1) * width_);
    if (tokens() <= kMost) continue;
    stride_ *= 2;
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < tokens(); ++i) {
      if (positions_[static_cast<std::size_t>(i)] % stride_ != 0) continue;
      positions_[static_cast<std::size_t>(kept)] = positions_[static_cast<std::size_t>(i)];
      std::copy_n(q_.begin() + i * width_, width_, q_.begin() + kept++ * width_);
    }
    positions_.resize(static_cast<std::size_t>(kept));
    q_.resize(static_cast<std::size_t>(kept * width_));
  }
}

void QuerySample::roll_back(std::int64_t tokens) {
  while (!positions_.empty() && positions_.back() >= tokens) positions_.pop_back();
  q_.resize(positions_.size() * static_cast<std::size_t>(width_));
  if (positions_.empty()) stride_ = 1;
}

std::vector<std::vector<float>> query_metric(const QuerySample& sample, const LayerGeometry& geometry,
                                             Position position) {
  const auto d = static_cast<std::size_t>(geometry.head_dim),
             group = static_cast<std::size_t>(geometry.group());
  std::vector<std::vector<double>> squares(static_cast<std::size_t>(geometry.kv_heads),
                                           std::vector<double>(d * d));  // [Hkv][d, d]
  std::vector<float> q;
  for (std::int64_t i = 0; i < sample.tokens(); ++i) {
    const std::span<const float> token = sample.token(i);
    q.assign(token.begin(), token.end());
    if (geometry.rope != nullptr)
      geometry.rope->rotate(q, position + static_cast<Position>(i * kSpread / sample.tokens()));
    for (std::size_t head = 0; head * d < q.size(); ++head)
      add_square(std::span(q).subspan(head * d, d), squares[head / group]);
  }
  std::vector<std::vector<float>> out;
  for (std::vector<double>& a : squares) {
    double trace = 0.0;
    for (std::size_t i = 0; i < d; ++i) trace += a[i * d + i];
    const double mean = trace / static_cast<double>(d), scale = geometry.scale;
    const bool known = std::isfinite(mean) && mean > 0.0;
    const double queries = static_cast<double>(sample.tokens()) * geometry.group();
    for (std::size_t i = 0; i < d * d; ++i) {
      const double one = i % (d + 1) == 0 ? 1.0 : 0.0;
      a[i] = known ? (a[i] + kRidge * mean * one) * scale * scale / queries : one;
    }
    factor(a, d);
    out.emplace_back(a.begin(), a.end());
  }
  return out;
}

}  // namespace lode
