// SPDX-License-Identifier: Apache-2.0
// Algorithms 1, 2, 4 and 5 of the paper; neighbours by the heuristic of algorithm 4 without its two options,
// as the authors' program has them.
#include "ann/graph/hnsw.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/cancel.h"
#include "base/rng.h"
#include "kernels/kernels.h"
#include "kernels/kv_row.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Scored = HnswScratch::Scored;
constexpr int kMostLevels = 32;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// The key of a node as numbers; one that is not finite counts as 0.
void read_key(std::int32_t node, const GraphKeys& keys, std::vector<float>& out) {
  const std::int64_t row = std::int64_t{keys.first} + node;
  out.resize(at(keys.rows.d));
  read_key_row(keys.rows, row, out.data());
  if (!std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }))
    std::fill(out.begin(), out.end(), 0.0f);
}

std::int64_t used(std::span<const std::int32_t> slots) {
  return std::find(slots.begin(), slots.end(), -1) - slots.begin();
}

}  // namespace

/// floor(-ln(uniform) / ln M), by the node's number.
int Hnsw::level_of(std::int64_t node) const {
  Rng rng(hash_seed(shape_.seed, node));
  const double level = -std::log(1.0 - rng.uniform()) / std::log(static_cast<double>(shape_.m));
  return static_cast<int>(std::min<double>(level, kMostLevels));
}

std::span<const std::int32_t> Hnsw::links(std::int32_t node, int level) const {
  const auto all = level == 0 ? std::span(ground_).subspan(at(std::int64_t{node} * width(0)), at(width(0)))
                              : std::span(upper_[at(node)]).subspan(at((level - 1) * shape_.m), at(shape_.m));
  return all.first(at(used(all)));
}

std::span<std::int32_t> Hnsw::slots(std::int32_t node, int level) {
  return level == 0 ? std::span(ground_).subspan(at(std::int64_t{node} * width(0)), at(width(0)))
                    : std::span(upper_[at(node)]).subspan(at((level - 1) * shape_.m), at(shape_.m));
}

/// Room for the next node, without links.
void Hnsw::push_node() {
  const int level = level_of(nodes());
  levels_.push_back(static_cast<std::uint8_t>(level));
  ground_.resize(ground_.size() + at(width(0)), -1);
  upper_.emplace_back(at(level * shape_.m), -1);
}

void Hnsw::set_links(std::int32_t node, int level, std::span<const std::int32_t> targets) {
  const std::span<std::int32_t> place = slots(node, level);
  if (!added_.empty() && node != nodes() - 1)
    changes_.push_back({node, level, std::vector<std::int32_t>(place.begin(), place.end())});
  std::fill(std::copy(targets.begin(), targets.end(), place.begin()), place.end(), -1);
}

/// s.scores := of s.nodes; a score that is no number is below all.
void Hnsw::score(const float* q, const GraphKeys& keys, HnswScratch& s) const {
  const auto count = std::ssize(s.nodes);
  s.rows.clear();
  for (const std::int32_t node : s.nodes) s.rows.push_back(keys.first + node);
  s.scores.resize(s.nodes.size());
  kernels().score_rows(q, 1, keys.rows, s.rows.data(), count, s.scores.data(), count);
  for (float& x : s.scores) x = std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
  s.scored += count;
}

/// Algorithm 2: from the nodes in s.best, which have been visited, to the `ef` nearest on a level.
void Hnsw::search_level(const float* q, int level, std::int64_t ef, const GraphKeys& keys,
                        HnswScratch& s) const {
  s.open = s.best;
  std::make_heap(s.open.begin(), s.open.end());                    // the best on top
  std::make_heap(s.best.begin(), s.best.end(), std::greater<>());  // the worst on top
  while (!s.open.empty()) {
    std::pop_heap(s.open.begin(), s.open.end());
    const Scored next = s.open.back();
    s.open.pop_back();
    if (std::ssize(s.best) >= ef && next < s.best.front()) break;
    s.nodes.clear();
    for (const std::int32_t node : links(next.second, level)) {
      if (std::exchange(s.visited[at(node)], s.search) != s.search) s.nodes.push_back(node);
    }
    ++s.expanded;
    score(q, keys, s);
    for (std::size_t i = 0; i < s.nodes.size(); ++i) {
      const Scored found = {s.scores[i], s.nodes[i]};
      if (std::ssize(s.best) >= ef && found < s.best.front()) continue;
      s.open.push_back(found);
      std::push_heap(s.open.begin(), s.open.end());
      s.best.push_back(found);
      std::push_heap(s.best.begin(), s.best.end(), std::greater<>());
      if (std::ssize(s.best) <= ef) continue;
      std::pop_heap(s.best.begin(), s.best.end(), std::greater<>());
      s.best.pop_back();
    }
  }
}

void Hnsw::search(const float* q, std::int64_t ef, const GraphKeys& keys, HnswScratch& s) const {
  s.best.clear();
  if (entry_ < 0) return;
  if (std::ssize(s.visited) < nodes()) s.visited.resize(at(nodes()), 0);
  s.nodes = {entry_};
  score(q, keys, s);
  s.best = {{s.scores[0], entry_}};
  for (int level = levels_[at(entry_)]; level >= 0; --level) {
    // A level's search may come by nodes that the one above has seen.
    if (++s.search == 0) std::fill(s.visited.begin(), s.visited.end(), 0), s.search = 1;
    for (const Scored& start : s.best) s.visited[at(start.second)] = s.search;
    search_level(q, level, level > 0 ? 1 : ef, keys, s);
  }
}

/// Algorithm 4: candidates, nearest first, that are nearer to the node than to any chosen before them.
std::vector<std::int32_t> Hnsw::choose(std::vector<Scored> candidates, int most, const GraphKeys& keys,
                                       HnswScratch& s) {
  std::sort(candidates.begin(), candidates.end(), std::greater<>());
  std::vector<std::int32_t> chosen;
  for (const auto& [score, node] : candidates) {
    if (std::ssize(chosen) >= most) break;
    s.rows.clear();
    for (const std::int32_t other : chosen) s.rows.push_back(keys.first + other);
    s.scores.resize(chosen.size());
    read_key(node, keys, s.other);
    kernels().score_rows(s.other.data(), 1, keys.rows, s.rows.data(), std::ssize(chosen), s.scores.data(),
                         std::ssize(chosen));
    const float nearness = score;
    if (std::none_of(s.scores.begin(), s.scores.end(), [&](float x) { return x > nearness; }))
      chosen.push_back(node);
  }
  return chosen;
}

/// Links the newest node, whose candidates are in s.best and key in s.key, to its neighbours on a level and
/// back.
void Hnsw::link(std::int32_t node, int level, const GraphKeys& keys, HnswScratch& s) {
  const std::vector<std::int32_t> neighbours = choose(s.best, shape_.m, keys, s);
  set_links(node, level, neighbours);
  for (const std::int32_t neighbour : neighbours) {
    const std::span<const std::int32_t> theirs = links(neighbour, level);
    std::vector<std::int32_t> targets(theirs.begin(), theirs.end());
    targets.push_back(node);
    if (std::ssize(targets) > width(level)) {
      read_key(neighbour, keys, s.other);
      s.nodes = targets;
      score(s.other.data(), keys, s);
      std::vector<Scored> candidates;
      for (std::size_t i = 0; i < targets.size(); ++i) candidates.emplace_back(s.scores[i], targets[i]);
      targets = choose(std::move(candidates), width(level), keys, s);
    }
    set_links(neighbour, level, targets);
  }
}

/// Algorithm 1.
void Hnsw::add(const GraphKeys& keys, HnswScratch& s) {
  const auto node = static_cast<std::int32_t>(nodes());
  if (node >= settled_) added_.push_back({changes_.size(), entry_});
  push_node();
  if (entry_ < 0) {
    entry_ = node;
    return;
  }
  if (std::ssize(s.visited) < nodes()) s.visited.resize(at(nodes()), 0);
  read_key(node, keys, s.key);
  s.nodes = {entry_};
  score(s.key.data(), keys, s);
  s.best = {{s.scores[0], entry_}};
  const int own = levels_[at(node)], top = levels_[at(entry_)];
  for (int level = top; level >= 0; --level) {
    if (++s.search == 0) std::fill(s.visited.begin(), s.visited.end(), 0), s.search = 1;
    for (const Scored& start : s.best) s.visited[at(start.second)] = s.search;
    search_level(s.key.data(), level, level > own ? 1 : shape_.ef_construction, keys, s);
    if (level <= own) {
      const std::vector<Scored> found = s.best;
      link(node, level, keys, s);
      s.best = found;
    }
  }
  if (own > top) entry_ = node;
}

void Hnsw::grow(std::int64_t nodes, std::int64_t settled, const GraphKeys& keys, HnswScratch& s) {
  if (this->nodes() == 0) settled_ = settled;
  while (this->nodes() < nodes) {
    if (this->nodes() % 64 == 0) check_cancel();
    add(keys, s);
  }
}

void Hnsw::undo_last() {
  const Added last = added_.back();
  while (changes_.size() > last.changes) {
    const Change& change = changes_.back();
    const std::span<std::int32_t> place = slots(change.node, change.level);
    std::copy(change.before.begin(), change.before.end(), place.begin());
    changes_.pop_back();
  }
  entry_ = last.entry;
  added_.pop_back();
  levels_.pop_back();
  upper_.pop_back();
  ground_.resize(ground_.size() - at(width(0)));
}

void Hnsw::cut(std::int64_t nodes) {
  while (this->nodes() > nodes && !added_.empty()) undo_last();
  if (this->nodes() <= nodes) return;
  const Shape shape = shape_;
  *this = Hnsw(shape);
}

std::int64_t Hnsw::bytes() const {
  std::size_t bytes = levels_.capacity() + ground_.capacity() * sizeof(ground_[0]) +
                      upper_.capacity() * sizeof(upper_[0]) + added_.capacity() * sizeof(Added) +
                      changes_.capacity() * sizeof(Change);
  for (const auto& own : upper_) bytes += own.capacity() * sizeof(own[0]);
  for (const Change& change : changes_) bytes += change.before.capacity() * sizeof(std::int32_t);
  return static_cast<std::int64_t>(bytes);
}

std::vector<std::int32_t> Hnsw::upper() const {
  std::vector<std::int32_t> all;
  for (const auto& own : upper_) all.insert(all.end(), own.begin(), own.end());
  return all;
}

Hnsw Hnsw::restore(const Shape& shape, std::int64_t nodes, std::span<const std::int32_t> ground,
                   std::span<const std::int32_t> upper, const std::string& where) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError(where + ": expected " + what + ", found otherwise");
  };
  Hnsw graph(shape);
  require(nodes >= 0 && std::ssize(ground) == nodes * graph.width(0), "2 M links of each node");
  graph.settled_ = nodes;
  std::size_t taken = 0;
  for (std::int64_t node = 0; node < nodes; ++node) {
    graph.push_node();
    std::vector<std::int32_t>& own = graph.upper_.back();
    require(own.size() <= upper.size() - taken, "M links of each node and upper level");
    std::copy_n(upper.begin() + static_cast<std::ptrdiff_t>(taken), own.size(), own.begin());
    taken += own.size();
    if (graph.entry_ < 0 || graph.levels_.back() > graph.levels_[at(graph.entry_)])
      graph.entry_ = static_cast<std::int32_t>(node);
  }
  require(taken == upper.size(), "M links of each node and upper level");
  graph.ground_.assign(ground.begin(), ground.end());
  for (std::int32_t node = 0; node < nodes; ++node) {
    for (int level = 0; level <= graph.levels_[at(node)]; ++level) {
      const std::span<const std::int32_t> all = graph.slots(node, level);
      const std::int64_t count = used(all);
      for (const std::int32_t target : all.first(at(count)))
        require(target >= 0 && target < nodes && target != node && graph.levels_[at(target)] >= level,
                "links to other nodes of the same level");
      require(std::all_of(all.begin() + count, all.end(), [](std::int32_t x) { return x == -1; }),
              "no links behind the last one");
    }
  }
  return graph;
}

}  // namespace lode
