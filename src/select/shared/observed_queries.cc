// SPDX-License-Identifier: Apache-2.0
#include "select/shared/observed_queries.h"

#include <algorithm>
#include <cmath>

namespace lode {

std::vector<Position> ObservedQueries::wanted_of(Position begin, std::int64_t tokens) const {
  std::vector<Position> positions;
  for (std::int64_t t = tokens - std::min(tokens, most_); t < tokens; ++t)
    positions.push_back(static_cast<Position>(begin + t));
  return positions;
}

void ObservedQueries::take(const KvWrite& write) {
  if (write.tokens == 0) return;
  width_ = std::ssize(write.q) / write.tokens;
  take_last(write.begin, write.tokens, write.q);
}

void ObservedQueries::take_wanted(const SampledQueries& chunk) {
  if (chunk.positions.empty()) return;
  width_ = std::ssize(chunk.q) / std::ssize(chunk.positions);
  take_last(chunk.begin, chunk.tokens, chunk.q);
}

/// `last` ends with the chunk's last queries, as many as count.
void ObservedQueries::take_last(Position begin, std::int64_t tokens, std::span<const float> last) {
  roll_back(begin);
  if (begin_ + this->tokens() != begin) {
    q_.clear();
    begin_ = begin;
  }
  const std::int64_t taken = std::min(tokens, most_);
  const std::int64_t dropped = std::max<std::int64_t>(0, this->tokens() + tokens - most_);
  begin_ += static_cast<Position>(dropped);
  q_.erase(q_.begin(), q_.begin() + std::min<std::int64_t>(std::ssize(q_), dropped * width_));
  q_.insert(q_.end(), last.end() - taken * width_, last.end());
}

void ObservedQueries::roll_back(std::int64_t tokens) {
  const std::int64_t kept = std::clamp<std::int64_t>(tokens - begin_, 0, this->tokens());
  q_.resize(static_cast<std::size_t>(kept * width_));
}

std::vector<float> ObservedQueries::of_heads(int first, int heads, int head_dim) const {
  const auto d = static_cast<std::size_t>(head_dim);
  std::vector<float> out;
  for (std::int64_t t = 0; t < tokens(); ++t) {
    for (int head = first; head < first + heads; ++head) {
      const std::span<const float> q =
          std::span(q_).subspan(static_cast<std::size_t>(t * width_) + static_cast<std::size_t>(head) * d, d);
      if (std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); }))
        out.insert(out.end(), q.begin(), q.end());
    }
  }
  return out;
}

}  // namespace lode
