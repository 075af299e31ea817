// SPDX-License-Identifier: Apache-2.0
#include "select/shared/query_metric.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/threads.h"
#include "kernels/exponentials.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "lodestone/error.h"

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

/// sum += weight q q^T below the diagonal, unless q holds a number that is none; returns what was added.
double add_square(std::span<const float> q, double weight, std::vector<double>& sum) {
  if (!std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); })) return 0.0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    for (std::size_t j = 0; j <= i; ++j) sum[i * q.size() + j] += weight * q[i] * q[j];
  }
  return weight;
}

/// The root of sum p^2 of each query over the keys of its KV head; 0 for one that is not a number. The
/// queries of a group go over the keys together.
std::vector<double> sharpness(std::span<const float> queries /*[n, d]*/, const LayerGeometry& geometry,
                              const KeyRange& keys) {
  const std::int64_t d = geometry.head_dim, group = geometry.group(), count = keys.end - keys.begin;
  std::vector<double> out(queries.size() / static_cast<std::size_t>(d), 1.0);
  if (count <= 0) return out;
  const KeysOnDevice on_device = {geometry.layer, heads_in_layer(geometry), keys.begin, keys.end};
  if (keys.device != nullptr && keys.device->takes(on_device, std::ssize(out) / geometry.kv_heads))
    return keys.device->sharpness(on_device, queries, static_cast<int>(group), geometry.scale);
  std::vector<std::vector<float>> scratch(static_cast<std::size_t>(geometry.pool->size()));
  geometry.pool->for_each(std::ssize(out) / group, [&](std::int64_t item, int worker) {
    std::vector<float>& z = scratch[static_cast<std::size_t>(worker)];  // [G, count]
    z.resize(static_cast<std::size_t>(group * count));
    const auto begin = queries.begin() + item * group * d;
    std::vector<float> q(begin, begin + group * d);
    for (float& x : q) x *= geometry.scale;
    kernels().score_run(q.data(), static_cast<int>(group),
                        keys.kv.heads[static_cast<std::size_t>(item % geometry.kv_heads)], keys.begin,
                        keys.end, z.data(), count);
    for (std::int64_t r = 0; r < group; ++r) {
      const std::span<float> own =
          std::span(z).subspan(static_cast<std::size_t>(r * count), static_cast<std::size_t>(count));
      const double total = exponential_kernels().weigh(own.data(), nullptr, count);
      double squares = 0.0;
      for (const float x : own) squares += static_cast<double>(x) * x;
      out[static_cast<std::size_t>(item * group + r)] = total > 0.0 ? std::sqrt(squares) / total : 0.0;
    }
  });
  return out;
}

}  // namespace

std::vector<Position> QuerySample::wanted(Position begin, std::int64_t tokens) const {
  QuerySample cut;  // to where the chunk begins, as it will be when the chunk is taken
  cut.stride_ = stride_;
  cut.positions_ = positions_;
  cut.roll_back(begin);
  const std::int64_t stride = cut.stride_;
  std::vector<Position> positions;
  for (std::int64_t p = (begin + stride - 1) / stride * stride; p < begin + tokens; p += stride)
    positions.push_back(static_cast<Position>(p));
  return positions;
}

void QuerySample::take(const KvWrite& write) {
  if (write.phase != Phase::context || write.q_unrotated.empty()) return;
  width_ = std::ssize(write.q_unrotated) / write.tokens;
  roll_back(write.begin);
  for (std::int64_t t = 0; t < write.tokens; ++t)
    add(static_cast<Position>(write.begin + t),
        write.q_unrotated.subspan(static_cast<std::size_t>(t * width_), static_cast<std::size_t>(width_)));
}

void QuerySample::take_wanted(const SampledQueries& chunk) {
  if (chunk.positions.empty()) return;
  width_ = std::ssize(chunk.q) / std::ssize(chunk.positions);
  roll_back(chunk.begin);
  LODE_ASSERT(std::ranges::equal(chunk.positions, wanted(chunk.begin, chunk.tokens)));
  for (std::size_t i = 0; i < chunk.positions.size(); ++i)
    add(chunk.positions[i],
        chunk.q.subspan(i * static_cast<std::size_t>(width_), static_cast<std::size_t>(width_)));
}

void QuerySample::add(Position position, std::span<const float> q) {
  if (position % stride_ != 0) return;
  positions_.push_back(position);
  // A vector that grows by itself would hold up to twice what it needs.
  if (q_.size() == q_.capacity())
    q_.reserve(std::min(2 * q_.size(), static_cast<std::size_t>(kMost * width_)) +
               static_cast<std::size_t>(width_));
  q_.insert(q_.end(), q.begin(), q.end());
  if (tokens() > kMost) thin_to(2 * stride_);
}

void QuerySample::thin_to(std::int64_t stride) {
  stride_ = coarsest_ = stride;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < tokens(); ++i) {
    if (positions_[static_cast<std::size_t>(i)] % stride_ != 0) continue;
    positions_[static_cast<std::size_t>(kept)] = positions_[static_cast<std::size_t>(i)];
    std::copy_n(q_.begin() + i * width_, width_, q_.begin() + kept++ * width_);
  }
  positions_.resize(static_cast<std::size_t>(kept));
  q_.resize(static_cast<std::size_t>(kept * width_));
}

void QuerySample::roll_back(std::int64_t tokens) {
  const std::size_t before = positions_.size();
  while (!positions_.empty() && positions_.back() >= tokens) positions_.pop_back();
  if (positions_.size() == before) return;  // nothing was cut, and the stride is that of the whole text
  q_.resize(positions_.size() * static_cast<std::size_t>(width_));
  if (positions_.empty()) stride_ = coarsest_ = 1;
  // As fine as what is left allows: what comes next is sampled as it would be behind a text of that length.
  while (stride_ > 1 && (tokens - begin() + stride_ / 2 - 1) / (stride_ / 2) <= kMost) stride_ /= 2;
}

KeptQueries QuerySample::kept(Position begin, Position end) const {
  const auto first = std::ranges::lower_bound(positions_, begin),
             last = std::ranges::lower_bound(positions_, end);
  const auto place = [&](auto at) { return static_cast<std::size_t>(width_ * (at - positions_.begin())); };
  const auto rows = std::as_bytes(std::span(q_).subspan(place(first), place(last) - place(first)));
  return {
      .stride = std::max(stride_, coarsest_), .positions = {first, last}, .rows = {rows.begin(), rows.end()}};
}

bool QuerySample::take_back(const KeptQueries& kept) {
  const std::vector<Position>& more = kept.positions;
  const std::int64_t floats = std::ssize(kept.rows) / std::int64_t{sizeof(float)};
  const std::int64_t width = more.empty() ? width_ : floats / std::ssize(more);
  const auto is_off = [&](Position p) { return p < 0 || p % kept.stride != 0; };
  if (kept.stride < stride_ || kept.stride > KeptQueries::kMostStride || kept.stride % stride_ != 0 ||
      std::ranges::any_of(more, is_off) || tokens() + std::ssize(more) > 2 * kMost ||
      std::ranges::adjacent_find(more, std::ranges::greater_equal()) != more.end() ||
      (!more.empty() && !positions_.empty() && (more.front() <= positions_.back() || width != width_)) ||
      std::ssize(kept.rows) != std::ssize(more) * width * std::int64_t{sizeof(float)})
    return false;
  width_ = width;
  thin_to(kept.stride);
  positions_.insert(positions_.end(), more.begin(), more.end());
  const std::size_t before = q_.size();
  q_.resize(before + static_cast<std::size_t>(floats));
  std::ranges::copy(kept.rows, std::as_writable_bytes(std::span(q_).subspan(before)).begin());
  return true;
}

std::int64_t QuerySample::bytes_for(const LayerGeometry& geometry, std::int64_t tokens) {
  return std::min(tokens, kMost + 1) * geometry.query_heads * geometry.head_dim * std::int64_t{sizeof(float)};
}

std::vector<float> queries_behind(const QuerySample& sample, std::span<const std::int64_t> which,
                                  const LayerGeometry& geometry, Position position) {
  std::vector<float> out;
  for (std::int64_t i = 0; i < std::ssize(which); ++i) {
    const std::span<const float> token = sample.token(which[static_cast<std::size_t>(i)]);
    out.insert(out.end(), token.begin(), token.end());
    if (geometry.rope != nullptr)
      geometry.rope->rotate(std::span(out).last(token.size()),
                            position + static_cast<Position>(i * kSpread / std::ssize(which)));
  }
  return out;
}

std::vector<std::vector<float>> query_metric(const QuerySample& sample, const LayerGeometry& geometry,
                                             Position position, const KeyRange& keys) {
  const auto d = static_cast<std::size_t>(geometry.head_dim),
             group = static_cast<std::size_t>(geometry.group());
  std::vector<std::vector<double>> squares(static_cast<std::size_t>(geometry.kv_heads),
                                           std::vector<double>(d * d));  // [Hkv][d, d]
  std::vector<double> totals(squares.size());
  std::vector<std::int64_t> all(static_cast<std::size_t>(sample.tokens()));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<float> queries = queries_behind(sample, all, geometry, position);
  const std::vector<double> weights = sharpness(queries, geometry, keys);
  std::vector<std::vector<float>> out(squares.size());
  geometry.pool->for_each(geometry.kv_heads, [&](std::int64_t item, int) {
    const auto head = static_cast<std::size_t>(item);
    std::vector<double>& a = squares[head];
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (i % static_cast<std::size_t>(geometry.query_heads) / group != head) continue;
      totals[head] += add_square(std::span(queries).subspan(i * d, d), weights[i], a);
    }
    double trace = 0.0;
    for (std::size_t i = 0; i < d; ++i) trace += a[i * d + i];
    const double mean = trace / static_cast<double>(d), scale = geometry.scale;
    const bool known = std::isfinite(mean) && mean > 0.0;
    for (std::size_t i = 0; i < d * d; ++i) {
      const double one = i % (d + 1) == 0 ? 1.0 : 0.0;
      a[i] = known ? (a[i] + kRidge * mean * one) * scale * scale / totals[head] : one;
    }
    factor(a, d);
    out[head].assign(a.begin(), a.end());
  });
  return out;
}

}  // namespace lode
