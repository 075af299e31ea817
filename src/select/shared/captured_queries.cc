// SPDX-License-Identifier: Apache-2.0
#include "select/shared/captured_queries.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "base/rng.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr float kMost = 3e38f;  // what rounds to a finite bf16

bool is_drawn(Position position, int level) {
  return (hash_seed(0, position) & ((std::uint64_t{1} << level) - 1)) == 0;
}

}  // namespace

bf16* CapturedQueries::queries_of(std::int64_t token) {
  return blocks_[static_cast<std::size_t>(token / kBlockTokens)].data() +
         static_cast<std::size_t>(token % kBlockTokens) * row();
}

const bf16* CapturedQueries::queries_of(std::int64_t token) const {
  return const_cast<CapturedQueries*>(this)->queries_of(token);
}

std::vector<Position> CapturedQueries::wanted_of(Position begin, std::int64_t tokens) const {
  const int level = positions_.empty() || positions_.front() >= begin ? 0 : level_;  // as cut() leaves it
  std::vector<Position> positions;
  for (std::int64_t t = 0; t < tokens; ++t)
    if (const auto position = static_cast<Position>(begin + t); is_drawn(position, level))
      positions.push_back(position);
  return positions;
}

void CapturedQueries::take(const KvWrite& write) {
  cut(write.begin);
  for (std::int64_t t = 0; t < write.tokens; ++t)
    add(static_cast<Position>(write.begin + t), write.q.subspan(static_cast<std::size_t>(t) * row(), row()));
}

void CapturedQueries::take_wanted(const SampledQueries& chunk) {
  cut(chunk.begin);
  for (std::size_t i = 0; i < chunk.positions.size(); ++i)
    add(chunk.positions[i], chunk.q.subspan(i * row(), row()));
}

void CapturedQueries::add(Position position, std::span<const float> q) {
  if (!is_drawn(position, level_)) return;
  if (!std::all_of(q.begin(), q.end(), [](float x) { return std::abs(x) < kMost; })) return;
  kernels().narrow(q.data(), static_cast<std::int64_t>(row()), DType::bf16, make_room(position));
  while (tokens() > most_tokens_) thin();
}

/// For the queries of a token behind all others.
bf16* CapturedQueries::make_room(Position position) {
  positions_.push_back(position);
  if (tokens() > std::ssize(blocks_) * kBlockTokens)
    blocks_.emplace_back(static_cast<std::size_t>(kBlockTokens) * row());
  return queries_of(tokens() - 1);
}

KeptQueries CapturedQueries::kept(Position begin, Position end) const {
  KeptQueries kept = {.stride = std::int64_t{1} << level_, .positions = {}, .rows = {}};
  for (std::int64_t i = 0; i < tokens(); ++i) {
    const Position position = positions_[static_cast<std::size_t>(i)];
    if (position < begin || position >= end) continue;
    kept.positions.push_back(position);
    const auto queries = std::as_bytes(std::span(queries_of(i), row()));
    kept.rows.insert(kept.rows.end(), queries.begin(), queries.end());
  }
  return kept;
}

bool CapturedQueries::take_back(const KeptQueries& kept) {
  const std::size_t row_bytes = row() * sizeof(bf16);
  const std::vector<Position>& more = kept.positions;
  if (!std::has_single_bit(static_cast<std::uint64_t>(kept.stride)) || kept.stride > KeptQueries::kMostStride)
    return false;
  const int level = std::countr_zero(static_cast<std::uint64_t>(kept.stride));
  const auto is_off = [&](Position p) { return p < 0 || !is_drawn(p, level); };
  if (level < level_ || std::ranges::any_of(more, is_off) ||
      std::ranges::adjacent_find(more, std::ranges::greater_equal()) != more.end() ||
      kept.rows.size() != more.size() * row_bytes || tokens() + std::ssize(more) > 2 * most_tokens_ ||
      (!more.empty() && !positions_.empty() && more.front() <= positions_.back()))
    return false;
  while (level_ < level) thin();
  for (std::size_t i = 0; i < more.size(); ++i)
    std::memcpy(make_room(more[i]), kept.rows.data() + i * row_bytes, row_bytes);
  return true;
}

void CapturedQueries::thin() {
  ++level_;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < tokens(); ++i) {
    const Position position = positions_[static_cast<std::size_t>(i)];
    if (!is_drawn(position, level_)) continue;
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

std::int64_t CapturedQueries::bytes_in_pieces(std::int64_t tokens) const {
  return KeptQueries::rows_in_pieces(tokens, most_tokens_) *
         static_cast<std::int64_t>(row() * sizeof(bf16) + sizeof(Position));
}

std::int64_t CapturedQueries::bytes_for(std::int64_t tokens) const {
  const std::int64_t most = std::min(tokens, most_tokens_ + 1);
  const auto block = kBlockTokens * static_cast<std::int64_t>(row() * sizeof(bf16));
  return (most + kBlockTokens - 1) / kBlockTokens * block + most * std::int64_t{sizeof(Position)};
}

}  // namespace lode
