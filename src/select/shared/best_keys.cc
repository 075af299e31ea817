// SPDX-License-Identifier: Apache-2.0
#include "select/shared/best_keys.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/kernels.h"

namespace lode {

double weight_below(float score, float peak) {
  if (std::isnan(score)) return 0.0;
  return score == peak ? 1.0 : std::exp(static_cast<double>(score) - peak);
}

// Only scores that reach the k-th largest maximum of small blocks can be among the k largest, and they are
// few.
void top_count(std::span<const float> scores, std::int64_t k, Position offset, std::vector<Position>& out) {
  constexpr std::size_t kLanes = 16, kBlock = 64;
  const std::size_t blocks = scores.size() / kBlock;  // what remains behind them only adds candidates
  if (k <= 0 || static_cast<std::size_t>(k) * 4 > blocks) return top_k(scores, k, offset, out);
  std::vector<float> peaks(blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    float lane[kLanes];
    std::fill_n(lane, kLanes, -std::numeric_limits<float>::infinity());
    const float* const s = scores.data() + b * kBlock;
    for (std::size_t i = 0; i < kBlock; i += kLanes) {
      for (std::size_t j = 0; j < kLanes; ++j)
        lane[j] = s[i + j] > lane[j] ? s[i + j] : lane[j];  // NaN stays out
    }
    peaks[b] = *std::max_element(lane, lane + kLanes);
  }
  std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), std::greater<>());
  const float floor = peaks[static_cast<std::size_t>(k - 1)];
  std::vector<float> candidates;
  std::vector<Position> at;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] < floor) continue;  // a NaN comes along and sorts last
    candidates.push_back(scores[i]);
    at.push_back(offset + static_cast<Position>(i));
  }
  top_k(candidates, k, 0, out);
  for (Position& row : out) row = at[static_cast<std::size_t>(row)];
}

void top_mass(std::span<const float> scores, double mass, Position offset, std::vector<Position>& out) {
  out.clear();
  float peak = -std::numeric_limits<float>::infinity();
  for (const float s : scores) peak = std::max(peak, s);  // NaN compares false and stays out
  if (peak == -std::numeric_limits<float>::infinity()) return;
  double total = 0.0;
  for (const float s : scores) total += weight_below(s, peak);
  // Keys lighter than this weigh together less than what may be left out.
  const double light = (1.0 - mass) * total / static_cast<double>(scores.size());
  std::vector<std::pair<double, Position>> heavy;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (const double w = weight_below(scores[i], peak); w >= light)
      heavy.emplace_back(w, offset + static_cast<Position>(i));
  }
  // Halve the range in which the last key taken lies; all before `low` are taken.
  auto low = heavy.begin(), high = heavy.end();
  double taken = 0.0;
  constexpr std::ptrdiff_t kFew = 32;
  while (high - low > kFew) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, std::greater<>());
    double upper = 0.0;
    for (auto i = low; i != middle; ++i) upper += i->first;
    if (taken + upper >= mass * total) {
      high = middle;
    } else {
      taken += upper;
      low = middle;
    }
  }
  std::sort(low, high, std::greater<>());
  for (; low != high && taken < mass * total; ++low) taken += low->first;
  for (auto i = heavy.begin(); i != low; ++i) out.push_back(i->second);
  std::sort(out.begin(), out.end());
}

bool take_mass(std::span<const float> scores, double mass, float peak, double unseen,
               std::vector<Position>& out) {
  out.clear();
  if (peak == -std::numeric_limits<float>::infinity()) return true;
  std::vector<std::pair<double, Position>> weights;
  double total = unseen;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (std::isnan(scores[i])) continue;
    weights.emplace_back(weight_below(scores[i], peak), static_cast<Position>(i));
    total += weights.back().first;
  }
  std::sort(weights.begin(), weights.end(), std::greater<>());
  double taken = 0.0;
  std::size_t count = 0;
  while (count < weights.size() && taken < mass * total) taken += weights[count++].first;
  if (taken < mass * total) return false;
  for (std::size_t i = 0; i < count; ++i) out.push_back(weights[i].second);
  std::sort(out.begin(), out.end());
  return true;
}

}  // namespace lode
