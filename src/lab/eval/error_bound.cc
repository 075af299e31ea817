// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/error_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

void ErrorBound::extend(const KvRows& kv, std::int64_t keys) {
  const auto d = static_cast<std::size_t>(kv.d);
  std::vector<float> row(d);
  for (; keys_ < keys; ++keys_) {
    const auto at = static_cast<Position>(keys_);
    if (keys_ % kPage == 0) {
      least_.resize(least_.size() + d, std::numeric_limits<float>::infinity());
      largest_.resize(largest_.size() + d, -std::numeric_limits<float>::infinity());
    }
    const std::size_t page = static_cast<std::size_t>(keys_ / kPage) * d;
    read_stored_keys({&kv, 1}, at, nullptr, row);
    for (std::size_t c = 0; c < d; ++c) {
      least_[page + c] = std::min(least_[page + c], row[c]);
      largest_[page + c] = std::max(largest_[page + c], row[c]);
    }
    read_stored_values({&kv, 1}, at, row);
    double square = 0;
    for (const float x : row) square += static_cast<double>(x) * x;
    longest_value_ = std::max(longest_value_, std::sqrt(square));
  }
}

double ErrorBound::page_bound(std::span<const float> q, std::int64_t page) const {
  const float* const least = least_.data() + static_cast<std::size_t>(page) * q.size();
  const float* const largest = largest_.data() + static_cast<std::size_t>(page) * q.size();
  float sum = 0;
  for (std::size_t c = 0; c < q.size(); ++c) sum += std::max(q[c] * least[c], q[c] * largest[c]);
  return sum;
}

double ErrorBound::of(std::span<const float> q, std::span<const char> attended, std::span<const float> scores,
                      std::span<const float> output) const {
  const std::int64_t n = std::ssize(attended);
  LODE_ASSERT(n <= keys_);
  std::vector<double> bounds;         // of pages with keys that were left out
  std::vector<std::int64_t> missing;  // how many
  double peak = -std::numeric_limits<double>::infinity();
  for (std::int64_t first = 0; first < n; first += kPage) {
    const auto page = attended.subspan(static_cast<std::size_t>(first),
                                       static_cast<std::size_t>(std::min(kPage, n - first)));
    const auto count = std::count(page.begin(), page.end(), char{0});
    if (count == 0) continue;
    bounds.push_back(page_bound(q, first / kPage));
    missing.push_back(count);
    peak = std::max(peak, bounds.back());
  }
  if (bounds.empty()) return 0;
  for (std::size_t i = 0; i < attended.size(); ++i)
    if (attended[i] != 0) peak = std::max(peak, static_cast<double>(scores[i]));
  double on = 0, off = 0;
  for (std::size_t i = 0; i < attended.size(); ++i)
    if (attended[i] != 0) on += std::exp(scores[i] - peak);
  for (std::size_t i = 0; i < bounds.size(); ++i)
    off += static_cast<double>(missing[i]) * std::exp(bounds[i] - peak);
  double square = 0;
  for (const float x : output) square += static_cast<double>(x) * x;
  return off / (on + off) * (longest_value_ + std::sqrt(square));
}

}  // namespace lode
