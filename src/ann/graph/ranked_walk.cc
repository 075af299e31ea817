// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/ranked_walk.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "ann/graph/beam_search.h"
#include "ann/radix_sort.h"
#include "kernels/score_order.h"
#include "kernels/select/int8_dot.h"

namespace lode {

namespace {

constexpr std::int64_t kScoredTogether = 256;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

constexpr std::uint64_t bit(std::int64_t rank) {
  return std::uint64_t{1} << (rank & 63);
}

}  // namespace

void RankedWalk::begin(const KeyGraph& graph, const BeamKeys& keys, const float* q) {
  graph_ = &graph;
  rank(keys, q);
  const std::size_t words = at((graph.nodes() + 63) / 64);
  found_.assign(words, 0);
  pending_.assign(words, 0);
  beam_ = inside_ = first_pending_ = 0;
  end_ = graph.nodes();
  fresh_.resize(std::max(graph.entries().size(), BeamSearch::kExpandTogether * at(graph.degree())) + 1);
  fresh_count_ = 0;
  for (const Node node : graph.entries()) find(node);
}

void RankedWalk::rank(const BeamKeys& keys, const float* q) {
  const std::int64_t count = graph_->nodes();
  CodedQuery query;
  code_query({q, at(keys.d)}, query);
  order_.resize(at(count));
  std::array<Node, kScoredTogether> nodes;
  std::array<float, kScoredTogether> scores;
  for (std::int64_t first = 0; first < count; first += kScoredTogether) {
    const std::int64_t some = std::min(kScoredTogether, count - first);
    std::iota(nodes.begin(), nodes.begin() + some, static_cast<Node>(first));
    int8_dot_kernels().score(query, keys.rows, nodes.data(), some, scores.data());
    // Of equal scores the larger node comes first, as in BeamSearch: sorting leaves them as they stand here.
    for (std::int64_t i = 0; i < some; ++i)
      order_[at(count - 1 - first - i)] =
          ~(std::uint64_t{ordered(scores[at(i)])} << 32 | static_cast<std::uint32_t>(first + i));
  }
  radix_sort(order_, spare_, 32, 64);
  rank_.resize(at(count));
  for (std::int64_t r = 0; r < count; ++r) rank_[at(node_at(r))] = static_cast<std::int32_t>(r);
}

void RankedWalk::run(std::int64_t beam) {
  beam_ = beam;
  while (inside_ < beam_ && end_ < graph_->nodes()) {
    end_ = first_of(found_, end_, graph_->nodes());
    if (end_ < graph_->nodes()) ++end_, ++inside_;
  }
  do take_fresh();
  while (expand());
}

/// Follows the links of the best nodes that are not expanded, of the best `beam_`. False where all are expanded.
bool RankedWalk::expand() {
  std::array<Node, BeamSearch::kExpandTogether> chosen;
  std::size_t count = 0;
  while (count < chosen.size()) {
    first_pending_ = first_of(pending_, first_pending_, end_);
    if (first_pending_ == end_) break;
    pending_[at(first_pending_ >> 6)] &= ~bit(first_pending_);
    chosen[count++] = node_at(first_pending_);
  }
  prefetch_next();
  for (const Node node : std::span(chosen).first(count)) {
    const Link* const links = graph_->row(node);
    for (int i = 0; i < graph_->degree() && links[i] != kNoLink; ++i) find(target_of(links[i]));
  }
  return count > 0;
}

/// Asks for the links of the nodes that are expanded next unless better ones are found.
void RankedWalk::prefetch_next() const {
  std::int64_t rank = first_pending_;
  for (std::size_t i = 0; i < 2 * BeamSearch::kExpandTogether; ++i, ++rank) {
    rank = first_of(pending_, rank, end_);
    if (rank == end_) return;
    const auto* const links = reinterpret_cast<const std::byte*>(graph_->row(node_at(rank)));
    for (std::size_t line = 0; line < at(graph_->degree()) * sizeof(Link); line += 64)
      __builtin_prefetch(links + line);
  }
}

/// Takes no branch on whether the node was found before, which would be foreseen as a coin is.
void RankedWalk::find(Node node) {
  const std::int32_t rank = rank_[at(node)];
  std::uint64_t& word = found_[at(rank >> 6)];
  const std::uint64_t before = word;
  word = before | bit(rank);
  fresh_[fresh_count_] = rank;
  fresh_count_ += 1 - (before >> (rank & 63) & 1);
}

/// Nodes that were found are pending, and the best `beam_` of all end where they do now.
void RankedWalk::take_fresh() {
  for (const std::int32_t rank : std::span(fresh_).first(fresh_count_)) {
    pending_[at(rank >> 6)] |= bit(rank);
    first_pending_ = std::min<std::int64_t>(first_pending_, rank);
    inside_ += rank < end_ ? 1 : 0;
  }
  fresh_count_ = 0;
  for (; inside_ > beam_; --inside_) end_ = last_before(found_, end_);
}

std::int64_t RankedWalk::found_of(std::span<const Node> nodes, std::int64_t count) const {
  std::size_t word = 0;
  std::int64_t before = 0;  // found in earlier words
  while (word < found_.size() && before + std::popcount(found_[word]) <= count)
    before += std::popcount(found_[word++]);
  const auto counts = [&](Node node) {
    const std::int64_t rank = rank_[at(node)], own = rank >> 6;
    if ((found_[at(own)] & bit(rank)) == 0) return false;
    if (at(own) != word) return at(own) < word;
    return before + std::popcount(found_[word] & (bit(rank) - 1)) < count;
  };
  return std::ranges::count_if(nodes, counts);
}

/// The first bit in [begin, end) that is set, else `end`.
std::int64_t RankedWalk::first_of(const Bits& bits, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return end;
  std::int64_t word = begin >> 6;
  for (std::uint64_t rest = bits[at(word)] & ~(bit(begin) - 1);; rest = bits[at(word)]) {
    if (rest != 0) return std::min(end, word * 64 + std::countr_zero(rest));
    if (++word * 64 >= end) return end;
  }
}

/// The last bit before `end` that is set; there is one.
std::int64_t RankedWalk::last_before(const Bits& bits, std::int64_t end) {
  std::int64_t word = (end - 1) >> 6;
  std::uint64_t rest = bits[at(word)] & (~std::uint64_t{0} >> (63 - ((end - 1) & 63)));
  while (rest == 0) rest = bits[at(--word)];
  return word * 64 + 63 - std::countl_zero(rest);
}

}  // namespace lode
