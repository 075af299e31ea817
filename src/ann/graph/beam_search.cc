// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/beam_search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "kernels/score_order.h"

namespace lode {

namespace {

constexpr std::size_t kWordsPerStore = 8;  // of 64 bits, cleared in the time of one at a random place
constexpr std::size_t kCountedRanks = 32;  // at most: counting takes a square of them

/// How many of n falling numbers are above x. Takes no branch that depends on them.
std::size_t places_above(const std::uint64_t* falling, std::size_t n, std::uint64_t x) {
  const std::uint64_t* base = falling;
  while (n > 1) {
    const std::size_t half = n / 2;
    base += half & (std::size_t{0} - static_cast<std::size_t>(base[half - 1] > x));
    n -= half;
  }
  return static_cast<std::size_t>(base - falling) + (n == 1 && *base > x ? 1 : 0);
}

void prefetch(const void* from, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const std::byte*>(from) + at);
}

}  // namespace

void BeamSearch::begin(const KeyGraph& graph, const BeamKeys& keys, const float* q, std::int64_t keep,
                       bool may_widen) {
  if (seen_.size() * kWordsPerStore > visited_.size()) {
    std::fill(visited_.begin(), visited_.end(), 0);
  } else {
    for (const Node node : seen_) visited_[static_cast<std::size_t>(node) >> 6] = 0;
  }
  seen_.clear();
  chosen_.clear();
  best_.clear();
  dropped_.clear();
  graph_ = &graph;
  keys_ = keys;
  code_query({q, static_cast<std::size_t>(keys.d)}, q_);
  keep_ = static_cast<std::size_t>(keep);
  may_widen_ = may_widen;
  first_pending_ = 0;
  scored_ = expanded_ = 0;
  const auto words = static_cast<std::size_t>((graph.nodes() + 63) / 64);
  if (visited_.size() < words) visited_.resize(words);
}

void BeamSearch::visit(std::span<const Node> nodes) {
  const std::size_t before = seen_.size();
  seen_.resize(before + nodes.size());
  Node* end = seen_.data() + before;
  for (const Node node : nodes) end = collect(node, end);
  seen_.resize(static_cast<std::size_t>(end - seen_.data()));
  score_collected();
  merge();
}

void BeamSearch::run(std::int64_t beam) {
  while (turn(beam)) {
  }
}

bool BeamSearch::turn(std::int64_t beam) {
  if (!chosen_.empty()) {
    const std::size_t before = seen_.size();
    seen_.resize(before + chosen_.size() * static_cast<std::size_t>(graph_->degree()));
    Node* end = seen_.data() + before;
    for (const Node node : chosen_) {
      const Link* const links = graph_->row(node);
      for (int i = 0; i < graph_->degree() && links[i] != kNoLink; ++i)
        end = collect(target_of(links[i]), end);
    }
    seen_.resize(static_cast<std::size_t>(end - seen_.data()));
    chosen_.clear();
    return true;
  }
  score_collected();
  merge();
  choose(beam);
  return !chosen_.empty();
}

void BeamSearch::widen(std::int64_t keep) {
  keep_ = static_cast<std::size_t>(keep);
  fresh_.swap(dropped_);
  dropped_.clear();
  merge();
}

/// Takes the best nodes that are not expanded, of the best `beam`, and asks for their links.
void BeamSearch::choose(std::int64_t beam) {
  const std::size_t end = std::min({keep_, static_cast<std::size_t>(beam), best_.size()});
  while (first_pending_ < end && chosen_.size() < kExpandTogether) {
    Entry& entry = best_[first_pending_++];
    if ((entry & 1u) == 0) continue;
    entry &= ~Entry{1};
    chosen_.push_back(node_of(entry));
    prefetch(graph_->row(chosen_.back()), graph_->degree() * std::int64_t{sizeof(Link)});
  }
  expanded_ += std::ssize(chosen_);
}

/// Notes a node to be scored at `end`, unless it was before, and asks for its key; returns the new end. Takes
/// no branch on whether it was, which would be foreseen as a coin is.
Node* BeamSearch::collect(Node node, Node* end) {
  const auto at = static_cast<std::size_t>(node);
  std::uint64_t& word = visited_[at >> 6];
  const std::uint64_t before = word;
  word = before | std::uint64_t{1} << (at & 63);
  *end = node;
  end += 1 - (before >> (at & 63) & 1);
  prefetch(keys_.codes(node), keys_.rows.stride);
  return end;
}

/// Scores what was collected; what is good enough to be kept is fresh then.
void BeamSearch::score_collected() {
  fresh_.clear();
  const std::span<const Node> collected = std::span(seen_).subspan(static_cast<std::size_t>(scored_));
  if (collected.empty()) return;
  const std::size_t count = collected.size();
  scores_.resize(count);
  int8_dot_kernels().score(q_, keys_.rows, collected.data(), std::ssize(collected), scores_.data());
  scored_ += std::ssize(collected);
  const Entry last = best_.size() >= keep_ && keep_ > 0 ? best_[keep_ - 1] : 0;
  fresh_.resize(count);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Entry entry =
        std::uint64_t{ordered(scores_[i])} << 32 | static_cast<std::uint32_t>(collected[i]) << 1 | 1u;
    fresh_[kept] = entry;
    kept += entry > last ? 1 : 0;
    if (may_widen_ && entry <= last) dropped_.push_back(entry);
  }
  fresh_.resize(kept);
}

/// sorted_ = fresh_, falling. Of few numbers each is put where it belongs by counting those above it, which
/// takes no branch; a sort's would be foreseen half of the time.
void BeamSearch::sort_fresh() {
  const std::size_t count = fresh_.size();
  sorted_.assign(fresh_.begin(), fresh_.end());
  if (count > kCountedRanks) return std::sort(sorted_.begin(), sorted_.end(), std::greater<>());
  rank_.assign(count, 0);
  for (std::size_t i = 1; i < count; ++i) {
    std::int32_t above = 0;
    for (std::size_t j = 0; j < i; ++j) {
      const std::int32_t less = fresh_[j] < fresh_[i] ? 1 : 0;
      rank_[j] += less;
      above += 1 - less;
    }
    rank_[i] = above;
  }
  for (std::size_t i = 0; i < count; ++i) sorted_[static_cast<std::size_t>(rank_[i])] = fresh_[i];
}

/// Puts fresh_ in its places among the best.
void BeamSearch::merge() {
  if (fresh_.empty()) return;
  sort_fresh();
  // All places first: searches that do not wait for one another overlap.
  std::size_t old = best_.size();
  rank_.resize(sorted_.size());
  for (std::size_t i = 0; i < sorted_.size(); ++i)
    rank_[i] = static_cast<std::int32_t>(places_above(best_.data(), old, sorted_[i]));
  // From the worst on, in place: whole stretches of what was there move up, by as many as come before them.
  best_.resize(old + sorted_.size());
  for (std::size_t ahead = sorted_.size(); ahead > 0; --ahead) {
    const auto at = static_cast<std::size_t>(rank_[ahead - 1]);
    if (old > at) std::memmove(&best_[at + ahead], &best_[at], (old - at) * sizeof(Entry));
    best_[at + ahead - 1] = sorted_[ahead - 1];
    old = at;
  }
  first_pending_ = std::min(first_pending_, old);
  if (best_.size() <= keep_) return;
  if (may_widen_)
    dropped_.insert(dropped_.end(), best_.begin() + static_cast<std::ptrdiff_t>(keep_), best_.end());
  best_.resize(keep_);
}

void run_together(std::span<BeamSearch> walks, std::int64_t beam) {
  for (bool any = true; any;) {
    any = false;
    for (BeamSearch& walk : walks) any |= walk.turn(beam);
  }
}

}  // namespace lode
