// SPDX-License-Identifier: Apache-2.0
#include "select/captured_queries.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr float kMost = 3e38f;  // what rounds to a finite bf16

}  // namespace

bool CapturedQueries::wanted(Position position) const {
  return (hash_seed(0, position) & ((std::uint64_t{1} << level_) - 1)) == 0;
}

void CapturedQueries::take(const KvWrite& write) {
  cut(write.begin);
  const auto row = static_cast<std::size_t>(query_heads_) * static_cast<std::size_t>(head_dim_);
  for (std::int64_t t = 0; t < write.tokens; ++t) {
    const auto position = static_cast<Position>(write.begin + t);
    if (!wanted(position)) continue;
    const std::span<const float> q = write.q.subspan(static_cast<std::size_t>(t) * row, row);
    if (!std::all_of(q.begin(), q.end(), [](float x) { return std::abs(x) < kMost; })) continue;
    positions_.push_back(position);
    queries_.resize(queries_.size() + row);
    kernels().narrow(q.data(), static_cast<std::int64_t>(row), DType::bf16,
                     queries_.data() + queries_.size() - row);
    while (tokens() > most_tokens_) thin();
  }
}

void CapturedQueries::thin() {
  ++level_;
  const auto row = static_cast<std::size_t>(query_heads_) * static_cast<std::size_t>(head_dim_);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    if (!wanted(positions_[i])) continue;
    positions_[kept] = positions_[i];
    std::copy_n(queries_.begin() + static_cast<std::ptrdiff_t>(i * row), row,
                queries_.begin() + static_cast<std::ptrdiff_t>(kept++ * row));
  }
  positions_.resize(kept);
  queries_.resize(kept * row);
}

void CapturedQueries::cut(std::int64_t tokens) {
  const auto row = static_cast<std::size_t>(query_heads_) * static_cast<std::size_t>(head_dim_);
  while (!positions_.empty() && positions_.back() >= tokens) positions_.pop_back();
  queries_.resize(positions_.size() * row);
  if (positions_.empty()) level_ = 0;
}

void CapturedQueries::clear() {
  level_ = 0;
  positions_ = std::vector<Position>();  // gives the memory back, which = {} would not
  queries_ = std::vector<bf16>();
}

std::vector<float> CapturedQueries::of_heads(int first, int heads) const {
  const std::int64_t d = head_dim_, part = heads * d;
  std::vector<float> out(static_cast<std::size_t>(tokens() * part));
  for (std::int64_t t = 0; t < tokens(); ++t)
    kernels().widen(queries_.data() + (t * query_heads_ + first) * d, DType::bf16, part,
                    out.data() + t * part);
  return out;
}

std::int64_t CapturedQueries::bytes() const {
  return static_cast<std::int64_t>(positions_.capacity() * sizeof(Position) +
                                   queries_.capacity() * sizeof(bf16));
}

}  // namespace lode
