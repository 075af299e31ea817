// SPDX-License-Identifier: Apache-2.0
#include "ann/walk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "kernels/kernels.h"

namespace lode {

namespace {

/// Nodes expanded together: their links' keys come from memory at the same time, and what is found is merged
/// once. On the queue, not on the scores, walks spend their time otherwise.
constexpr std::size_t kExpandTogether = 4;

/// Unsigned numbers in the order of the scores; NaN below every number.
std::uint64_t ordered(float score) {
  if (std::isnan(score)) return 0;
  const auto u = std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 and 0 are one number
  return std::uint64_t{u & 0x80000000u ? ~u : u | 0x80000000u} << 32;
}

void prefetch(const std::byte* from, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

}  // namespace

void Walk::begin(const KeyGraph& graph, const WalkKeys& keys, const float* q, std::int64_t keep) {
  for (const Node node : touched_) visited_[static_cast<std::size_t>(node) >> 6] = 0;
  touched_.clear();
  best_.clear();
  dropped_.clear();
  collected_.clear();
  graph_ = &graph;
  keys_ = keys;
  q_ = q;
  keep_ = static_cast<std::size_t>(keep);
  first_pending_ = 0;
  scored_ = expanded_ = 0;
  const auto words = static_cast<std::size_t>((graph.nodes() + 63) / 64);
  if (visited_.size() < words) visited_.resize(words);
}

void Walk::visit(std::span<const Node> nodes) {
  for (const Node node : nodes) collect(node);
  score_collected();
  merge();
}

void Walk::run(std::int64_t beam) {
  const std::size_t most = std::min(keep_, static_cast<std::size_t>(beam));
  for (;;) {
    std::size_t together = 0;
    while (first_pending_ < std::min(most, best_.size()) && together < kExpandTogether) {
      Entry& entry = best_[first_pending_++];
      if ((entry & 1u) == 0) continue;
      entry &= ~Entry{1};
      for (const Link link : graph_->links(node_of(entry))) collect(target_of(link));
      ++together;
    }
    if (together == 0) return;
    expanded_ += static_cast<std::int64_t>(together);
    score_collected();
    merge();
  }
}

void Walk::widen(std::int64_t keep) {
  keep_ = static_cast<std::size_t>(keep);
  fresh_.swap(dropped_);
  dropped_.clear();
  merge();
}

/// Notes a node to be scored, unless it was before.
void Walk::collect(Node node) {
  const auto at = static_cast<std::size_t>(node);
  std::uint64_t& word = visited_[at >> 6];
  const std::uint64_t bit = std::uint64_t{1} << (at & 63);
  if ((word & bit) != 0) return;
  word |= bit;
  touched_.push_back(node);
  collected_.push_back(node);
  prefetch(keys_.rows.k + node * keys_.rows.row_bytes(), keys_.rows.row_bytes());
  __builtin_prefetch(keys_.rows.k_scale + node);
}

void Walk::score_collected() {
  fresh_.clear();
  const auto count = std::ssize(collected_);
  if (count == 0) return;
  scores_.resize(collected_.size());
  kernels().score_rows(q_, 1, keys_.rows, collected_.data(), count, scores_.data(), count);
  scored_ += count;
  for (std::size_t i = 0; i < collected_.size(); ++i)
    fresh_.push_back(ordered(scores_[i]) | static_cast<std::uint32_t>(collected_[i]) << 1 | 1u);
  collected_.clear();
}

/// Puts fresh_ in its places among the best.
void Walk::merge() {
  if (best_.size() >= keep_) {
    const Entry last = best_[keep_ - 1];
    const auto worse = std::partition(fresh_.begin(), fresh_.end(), [&](Entry e) { return e > last; });
    dropped_.insert(dropped_.end(), worse, fresh_.end());
    fresh_.erase(worse, fresh_.end());
  }
  if (fresh_.empty()) return;
  std::sort(fresh_.begin(), fresh_.end(), std::greater<>());
  const auto place = std::lower_bound(best_.begin(), best_.end(), fresh_.front(), std::greater<>());
  first_pending_ = std::min(first_pending_, static_cast<std::size_t>(place - best_.begin()));
  merged_.resize(best_.size() + fresh_.size());
  std::merge(best_.begin(), best_.end(), fresh_.begin(), fresh_.end(), merged_.begin(), std::greater<>());
  if (merged_.size() > keep_) {
    dropped_.insert(dropped_.end(), merged_.begin() + static_cast<std::ptrdiff_t>(keep_), merged_.end());
    merged_.resize(keep_);
  }
  best_.swap(merged_);
  // The links of the next node to be expanded will be needed first.
  if (first_pending_ < best_.size()) __builtin_prefetch(graph_->row(node_of(best_[first_pending_])));
}

}  // namespace lode
