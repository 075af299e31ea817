// SPDX-License-Identifier: Apache-2.0
#include "select/shared/captured_queries.h"

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

bf16* CapturedQueries::queries_of(std::int64_t token) {
  return blocks_[static_cast<std::size_t>(token / kBlockTokens)].data() +
         static_cast<std::size_t>(token % kBlockTokens) * row();
}

const bf16* CapturedQueries::queries_of(std::int64_t token) const {
  return const_cast<CapturedQueries*>(this)->queries_of(token);
}

void CapturedQueries::take(const KvWrite& write) {
  cut(write.begin);
  for (std::int64_t t = 0; t < write.tokens; ++t) {
    const auto position = static_cast<Position>(write.begin + t);
    if (!wanted(position)) continue;
    const std::span<const float> q = write.q.subspan(static_cast<std::size_t>(t) * row(), row());
    if (!std::all_of(q.begin(), q.end(), [](float x) { return std::abs(x) < kMost; })) continue;
    positions_.push_back(position);
    if (tokens() > std::ssize(blocks_) * kBlockTokens)
      blocks_.emplace_back(static_cast<std::size_t>(kBlockTokens) * row());
    kernels().narrow(q.data(), static_cast<std::int64_t>(row()), DType::bf16, queries_of(tokens() - 1));
    while (tokens() > most_tokens_) thin();
  }
}

void CapturedQueries::thin() {
  ++level_;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < tokens(); ++i) {
    const Position position = positions_[static_cast<std::size_t>(i)];
    if (!wanted(position)) continue;
    positions_[static_cast<std::size_t>(kept)] = position;
    if (kept < i) std::copy_n(queries_of(i), row(), queries_of(kept));
    ++kept;
  }
  positions_.resize(static_cast<std::size_t>(kept));
}

void CapturedQueries::cut(std::int64_t tokens) {
  while (!positions_.empty() && positions_.back() >= tokens) positions_.pop_back();
  if (positions_.empty()) clear();
}

void CapturedQueries::clear() {
  level_ = 0;
  positions_ = std::vector<Position>();  // gives the memory back, which = {} would not
  blocks_ = std::vector<std::vector<bf16>>();
}

std::vector<float> CapturedQueries::of_heads(int first, int heads, std::int64_t most) const {
  const std::int64_t part = std::int64_t{heads} * head_dim_, count = std::min(most, tokens());
  std::vector<float> out(static_cast<std::size_t>(count * part));
  for (std::int64_t i = 0; i < count; ++i)
    kernels().widen(queries_of(i * tokens() / count) + std::int64_t{first} * head_dim_, DType::bf16, part,
                    out.data() + i * part);
  return out;
}

std::int64_t CapturedQueries::bytes() const {
  return static_cast<std::int64_t>(positions_.capacity() * sizeof(Position) +
                                   blocks_.size() * static_cast<std::size_t>(kBlockTokens) * row() *
                                       sizeof(bf16));
}

std::int64_t CapturedQueries::bytes_for(std::int64_t tokens) const {
  const std::int64_t most = std::min(tokens, most_tokens_ + 1);
  const auto block = kBlockTokens * static_cast<std::int64_t>(row() * sizeof(bf16));
  return (most + kBlockTokens - 1) / kBlockTokens * block + most * std::int64_t{sizeof(Position)};
}

}  // namespace lode
