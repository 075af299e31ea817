// SPDX-License-Identifier: Apache-2.0
#include "lab/train/saap/examples.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "kernels/sgemm.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kBlock = 32;  // queries whose scores are computed at a time

/// Position of the highest score in [begin, end), the first of equal ones.
std::int64_t best_of(std::span<const float> scores, std::int64_t begin, std::int64_t end) {
  return std::max_element(scores.begin() + begin, scores.begin() + end) - scores.begin();
}

bool passes(std::span<const float> scores, std::int64_t position, const SaapFilter& filter) {
  if (!filter.queries) return true;
  const std::int64_t end = filter.causal ? position + 1 : std::ssize(scores);
  if (filter.sink >= end) return false;
  return std::abs(best_of(scores, filter.sink, end) - position) > filter.distance;
}

/// The row of A H_k: softmax over the far keys, summed by bucket.
void fill_target(std::span<const float> scores, const SaapFilter::Ranges& far,
                 std::span<const std::int32_t> labels, std::vector<double>& sums, std::span<float> target) {
  const float most = best_score(scores, far);
  sums.assign(target.size(), 0.0);
  double total = 0.0;
  far.for_each([&](std::size_t k) {
    const float weight = std::exp(scores[k] - most);
    sums[static_cast<std::size_t>(labels[k])] += weight;
    total += weight;
  });
  for (std::size_t c = 0; c < target.size(); ++c) target[c] = static_cast<float>(sums[c] / total);
}

}  // namespace

SaapFilter::Ranges SaapFilter::far(std::int64_t position, std::int64_t keys) const {
  keys = std::max(keys, sink);  // a text that ends inside the sink has no far keys
  const std::int64_t reach = pairs ? window : 0;
  // The window of a query at p is (p - window, p]; what lies `window` or more behind it is as far.
  const std::int64_t first_end = pairs ? position + 1 - reach : position + 1;
  Ranges ranges = {.begin = sink,
                   .first_end = std::max(sink, std::min(first_end, keys)),
                   .second_begin = keys,
                   .end = keys};
  if (!causal) ranges.second_begin = std::clamp(position + std::max<std::int64_t>(1, reach), sink, keys);
  return ranges;
}

void SaapExamples::add(std::span<const float> q, std::span<const float> target) {
  LODE_ASSERT(std::ssize(q) == d_ && std::ssize(target) == buckets_);
  q_.insert(q_.end(), q.begin(), q.end());
  targets_.resize(targets_.size() + target.size());
  kernels().narrow(target.data(), buckets_, DType::f16, targets_.data() + targets_.size() - target.size());
}

void SaapExamples::add(std::span<const float> q, std::span<const f16> target) {
  LODE_ASSERT(std::ssize(q) == d_ && std::ssize(target) == buckets_);
  q_.insert(q_.end(), q.begin(), q.end());
  targets_.insert(targets_.end(), target.begin(), target.end());
}

void SaapExamples::read(std::int64_t i, std::span<float> q, std::span<float> target) const {
  std::copy_n(q_.begin() + i * d_, d_, q.begin());
  kernels().widen(targets_.data() + i * buckets_, DType::f16, buckets_, target.data());
}

SaapKeys read_saap_keys(const KvRows& kv, const Rope& rope, const BucketNet& keys, std::int64_t sink) {
  return read_saap_keys(kv, rope, keys, sink,
                        [](const BucketNet& by, Matrix<const float> plain, std::span<std::int32_t> labels) {
                          by.label(plain, labels);
                        });
}

std::vector<std::int64_t> count_labels(std::span<const std::int32_t> labels, std::int64_t buckets,
                                       std::int64_t sink) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(buckets), 0);
  for (std::int64_t row = sink; row < std::ssize(labels); ++row)
    ++counts[static_cast<std::size_t>(labels[static_cast<std::size_t>(row)])];
  return counts;
}

SaapRows read_saap_rows(const KvRows& kv, const Rope& rope) {
  const auto numbers = static_cast<std::size_t>(kv.rows * kv.d);
  SaapRows rows = {.rotated = std::vector<float>(numbers), .plain = std::vector<float>(numbers)};
  for (std::int64_t row = 0; row < kv.rows; ++row) {
    const auto key_of = [&](std::vector<float>& all) {
      return std::span(all).subspan(static_cast<std::size_t>(row * kv.d), static_cast<std::size_t>(kv.d));
    };
    read_stored_keys({&kv, 1}, static_cast<Position>(row), nullptr, key_of(rows.rotated));
    read_stored_keys({&kv, 1}, static_cast<Position>(row), &rope, key_of(rows.plain));
  }
  return rows;
}

SaapKeys read_saap_keys(const KvRows& kv, const Rope& rope, const BucketNet& keys, std::int64_t sink,
                        const SaapLabeller& label) {
  SaapRows rows = read_saap_rows(kv, rope);
  SaapKeys read = {.rotated = std::move(rows.rotated),
                   .labels = std::vector<std::int32_t>(static_cast<std::size_t>(kv.rows)),
                   .counts = {}};
  label(keys, {rows.plain.data(), kv.rows, kv.d}, read.labels);
  read.counts = count_labels(read.labels, keys.buckets, sink);
  return read;
}

float best_score(std::span<const float> scores, const SaapFilter::Ranges& far) {
  float most = -std::numeric_limits<float>::infinity();
  far.for_each([&](std::size_t k) { most = std::max(most, scores[k]); });
  return most;
}

std::vector<float> scored_queries(std::span<const float> q, std::span<const Position> positions,
                                  std::span<const Position> further, const Rope& rope, float scale) {
  std::vector<float> turned(q.begin(), q.end());
  const std::size_t d = positions.empty() ? 0 : q.size() / positions.size();
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::span<float> own = std::span(turned).subspan(i * d, d);
    rope.rotate(own, positions[i] + further[i]);
    for (float& x : own) x *= scale;
  }
  return turned;
}

std::int64_t for_each_scored(const SaapCandidates& candidates, Matrix<const float> rotated_keys,
                             const Rope& rope, float scale, const SaapFilter& filter, std::int64_t wanted,
                             const SaapScored& body) {
  const std::int64_t all = std::ssize(candidates.positions), n = rotated_keys.rows, d = rotated_keys.cols;
  std::vector<float> scores(static_cast<std::size_t>(kBlock * n));
  std::int64_t at = 0;
  for (; at < all && wanted > 0; at += kBlock) {
    const std::int64_t some = std::min(kBlock, all - at);
    const auto part = [&](const auto& from, std::int64_t width) {
      return std::span(from).subspan(static_cast<std::size_t>(at * width),
                                     static_cast<std::size_t>(some * width));
    };
    const std::vector<float> rotated = scored_queries(part(candidates.q, d), part(candidates.positions, 1),
                                                      part(candidates.further, 1), rope, scale);
    sgemm(some, n, d, {rotated.data(), d}, {rotated_keys.data, d, true}, 0.0f, scores.data(), n);
    for (std::int64_t i = 0; i < some && wanted > 0; ++i) {
      const std::int64_t position = candidates.positions[static_cast<std::size_t>(at + i)];
      const std::span<const float> row(scores.data() + i * n, static_cast<std::size_t>(n));
      const SaapFilter::Ranges far = filter.far(position, n);
      if (far.empty() || !passes(row, position, filter)) continue;
      body(at + i, row, far);
      --wanted;
    }
  }
  return std::min(at, all);
}

std::int64_t add_saap_examples(const SaapCandidates& candidates, const SaapKeys& keys, const Rope& rope,
                               float scale, const SaapFilter& filter, std::int64_t wanted,
                               SaapExamples& examples) {
  if (keys.labels.empty()) return 0;
  const auto n = std::ssize(keys.labels), d = std::ssize(keys.rotated) / n;
  std::vector<float> target(keys.counts.size());
  std::vector<double> sums;
  return for_each_scored(candidates, {keys.rotated.data(), n, d}, rope, scale, filter, wanted,
                         [&](std::int64_t at, std::span<const float> scores, const SaapFilter::Ranges& far) {
                           fill_target(scores, far, keys.labels, sums, target);
                           examples.add({candidates.q.data() + at * d, static_cast<std::size_t>(d)}, target);
                         });
}

}  // namespace lode
