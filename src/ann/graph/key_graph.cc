// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/key_graph.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "ann/graph/beam_search.h"
#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kNearBeam = 16;  // of the walk that looks for a lost node's parent
constexpr float kFar = std::numeric_limits<float>::infinity();

constexpr bool in_tree(Link link) {
  return (link & kTreeLink) != 0;
}

/// Which of `order`, nearest to `node` first, lie nearer to one before them than to `node`. One that is
/// occluded itself occludes others only where it is `fixed`: it stays.
std::vector<bool> find_occluded(Node node, std::span<const Node> order, const std::vector<bool>& fixed,
                                const BeamKeys& keys) {
  const std::size_t count = order.size(), d = static_cast<std::size_t>(keys.d);
  std::vector<float> own(d), rows(count * d), distance(count), products(count);
  decode_key(node, keys, own);
  for (std::size_t i = 0; i < count; ++i) {
    decode_key(order[i], keys, std::span(rows).subspan(i * d, d));
    distance[i] = keys.squares[node] + keys.squares[order[i]] -
                  2 * kernels().dot(own.data(), rows.data() + i * d, keys.d);
  }
  const KvRows kv = {.type = DType::f32,
                     .k = reinterpret_cast<const std::byte*>(rows.data()),
                     .rows = std::ssize(order),
                     .d = keys.d};
  std::vector<bool> occluded(count, false);
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (occluded[i] && !fixed[i]) continue;
    kernels().score_run(rows.data() + i * d, 1, kv, static_cast<Position>(i + 1),
                        static_cast<Position>(count), products.data() + i + 1, std::ssize(order));
    for (std::size_t j = i + 1; j < count; ++j)
      if (keys.squares[order[i]] + keys.squares[order[j]] - 2 * products[j] < distance[j]) occluded[j] = true;
  }
  return occluded;
}

}  // namespace

void decode_key(Node node, const BeamKeys& keys, std::span<float> out) {
  const std::int8_t* const codes = keys.codes(node);
  const float scale = keys.scale(node);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(codes[i]) * scale;
}

void distances_to(Node from, std::span<const Node> to, const BeamKeys& keys, std::span<float> out) {
  std::vector<float> key(static_cast<std::size_t>(keys.d)), other(key.size());
  decode_key(from, keys, key);
  for (std::size_t i = 0; i < to.size(); ++i) {
    decode_key(to[i], keys, other);
    out[i] = keys.squares[from] + keys.squares[to[i]] - 2 * kernels().dot(key.data(), other.data(), keys.d);
  }
}

void sort_by_distance(Node from, std::vector<Node>& nodes, const BeamKeys& keys) {
  std::vector<float> distance(nodes.size());
  distances_to(from, nodes, keys, distance);
  std::vector<std::pair<float, Node>> order(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i)
    order[i] = {std::isnan(distance[i]) ? kFar : distance[i], nodes[i]};
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < nodes.size(); ++i) nodes[i] = order[i].second;
}

KeyGraph::KeyGraph(int degree, std::span<const Node> rows, std::vector<Node> entries, const BeamKeys& keys,
                   ThreadPool& pool)
    : degree_(degree), links_(rows.size()), entries_(std::move(entries)) {
  LODE_ASSERT(degree >= kLeastDegree && std::ssize(rows) % degree == 0 && entries_.empty() == rows.empty());
  std::transform(rows.begin(), rows.end(), links_.begin(),
                 [](Node node) { return node < 0 ? kNoLink : static_cast<Link>(node); });
  connect(keys, pool);
}

KeyGraph KeyGraph::restore(int degree, std::span<const Link> rows, std::span<const Node> entries,
                           std::string_view where) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError(std::string(where) + ": expected " + what + ", found otherwise");
  };
  require(degree >= kLeastDegree && std::ssize(rows) % degree == 0, "whole rows of links");
  KeyGraph graph(degree);
  graph.links_.assign(rows.begin(), rows.end());
  graph.entries_.assign(entries.begin(), entries.end());
  const std::int64_t nodes = graph.nodes();
  require(entries.empty() == (nodes == 0) && entries.size() <= kEntries, "1 to 16 entries");
  for (const Node entry : entries) require(entry >= 0 && entry < nodes, "entries that are nodes");
  std::vector<bool> child(static_cast<std::size_t>(nodes), false);
  for (Node node = 0; node < nodes; ++node) {
    const std::span<const Link> links = graph.links(node);
    for (const Link link : links) {
      require(target_of(link) < nodes && target_of(link) != node, "links to other nodes");
      if (!in_tree(link)) continue;
      require(!child[static_cast<std::size_t>(target_of(link))], "one tree link to each node");
      child[static_cast<std::size_t>(target_of(link))] = true;
    }
    for (int slot = static_cast<int>(links.size()); slot < degree; ++slot)
      require(graph.row(node)[slot] == kNoLink, "no links behind the last one");
  }
  // A node with one parent each, and all reached from the root: a tree.
  std::vector<Node> queue(entries.begin(), entries.begin() + (nodes > 0 ? 1 : 0));
  if (nodes > 0) require(!child[static_cast<std::size_t>(entries[0])], "no tree link to the root");
  for (std::size_t i = 0; i < queue.size(); ++i) {
    for (const Link link : graph.links(queue[i]))
      if (in_tree(link)) queue.push_back(target_of(link));
  }
  require(std::ssize(queue) == nodes, "tree links that reach every node");
  return graph;
}

std::span<const Link> KeyGraph::links(Node node) const {
  const Link* const first = row(node);
  int used = 0;
  while (used < degree_ && first[used] != kNoLink) ++used;
  return {first, static_cast<std::size_t>(used)};
}

std::int64_t KeyGraph::bytes() const {
  return static_cast<std::int64_t>(links_.capacity() * sizeof(Link) + entries_.capacity() * sizeof(Node) +
                                   changes_.capacity() * sizeof(Change) +
                                   added_.capacity() * sizeof(std::int64_t));
}

void KeyGraph::set(Node node, int slot, Link link) {
  Link& place = row(node)[slot];
  if (!added_.empty()) changes_.push_back({node, slot, place});
  place = link;
}

bool KeyGraph::has_room(Node node) const {
  const std::span<const Link> used = links(node);
  return std::ssize(used) < degree_ || !std::all_of(used.begin(), used.end(), in_tree);
}

/// A free slot, or that of the farthest link outside the tree; else -1.
int KeyGraph::slot_of_farthest(Node node, const BeamKeys& keys) const {
  const std::span<const Link> used = links(node);
  if (std::ssize(used) < degree_) return static_cast<int>(used.size());
  std::vector<Node> targets;
  for (const Link link : used) targets.push_back(target_of(link));
  std::vector<float> distance(targets.size());
  distances_to(node, targets, keys, distance);
  float most = -kFar;
  int farthest = -1;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (in_tree(used[i]) || !(distance[i] > most)) continue;
    most = distance[i];
    farthest = static_cast<int>(i);
  }
  return farthest;
}

/// The slot for a link to `target`: a free one, or that of the link outside the tree which is given up for
/// it; -1 where the new link itself is given up.
///
/// Occluded links go first, since a nearer neighbour leads to their targets too: if the farthest went,
/// every row would come to lead to its own surroundings alone. Of the occluded ones the least wanted goes.
/// Most keys are wanted by no query, and if distance decided they would crowd out those that walks look
/// for.
int KeyGraph::slot_for(Node node, Node target, const BeamKeys& keys, const Worth& worth) const {
  const std::span<const Link> used = links(node);
  if (std::ssize(used) < degree_) return static_cast<int>(used.size());
  std::vector<Node> order = {target};
  for (const Link link : used) order.push_back(target_of(link));
  sort_by_distance(node, order, keys);
  std::vector<bool> fixed;
  std::vector<int> slots;  // of the same links
  for (const Node at : order) {
    const auto known = std::ranges::find(used, at, target_of);
    slots.push_back(known == used.end() ? -1 : static_cast<int>(known - used.begin()));
    fixed.push_back(known != used.end() && in_tree(*known));
  }
  const std::vector<bool> occluded = find_occluded(node, order, fixed, keys);
  int slot = -1, farthest = -1;
  float least = kFar;
  for (std::size_t i = order.size(); i-- > 0;) {
    if (fixed[i]) continue;
    if (farthest < 0) farthest = static_cast<int>(i);
    if (!occluded[i]) continue;
    if (const float own = worth(order[i]); own < least || slot < 0) {
      least = own;
      slot = static_cast<int>(i);
    }
  }
  if (slot < 0) slot = farthest;
  return slot < 0 ? -1 : slots[static_cast<std::size_t>(slot)];
}

/// Links a node to another, if it has room for that.
void KeyGraph::link(Node from, Node to, const BeamKeys& keys, const Worth& worth) {
  const std::span<const Link> used = links(from);
  if (std::ranges::find(used, to, target_of) != used.end()) return;
  if (const int slot = slot_for(from, to, keys, worth); slot >= 0) set(from, slot, static_cast<Link>(to));
}

/// The first of `wanted` that can take another child, else a node below it in the tree that can. A node
/// without room has tree links only, and a leaf has none: the way down ends. Which way is drawn, so that the
/// tree stays shallow.
Node KeyGraph::parent_near(Node child, std::span<const Node> wanted) const {
  for (const Node node : wanted)
    if (has_room(node)) return node;
  Rng rng(hash_seed(0, child));
  Node node = wanted.empty() ? entries_[0] : wanted[0];
  while (!has_room(node)) node = target_of(row(node)[rng.below(static_cast<std::uint64_t>(degree_))]);
  return node;
}

/// Makes `node` the child of a node near it.
void KeyGraph::hang(Node node, std::span<const Node> near, const BeamKeys& keys) {
  const Node parent = parent_near(node, near);
  int slot = slot_of_farthest(parent, keys);
  if (slot < 0) {  // distances that are not numbers: any link outside the tree
    const std::span<const Link> used = links(parent);
    slot = static_cast<int>(std::find_if_not(used.begin(), used.end(), in_tree) - used.begin());
  }
  set(parent, slot, static_cast<Link>(node) | kTreeLink);
}

void KeyGraph::add(std::span<const Node> neighbours, std::span<const Node> finders, const BeamKeys& keys,
                   const Worth& worth) {
  const auto node = static_cast<Node>(nodes());
  added_.push_back(std::ssize(changes_));
  resize_tightly(links_, links_.size() + static_cast<std::size_t>(degree_), kNoLink);
  if (node == 0) {
    entries_ = {0};
    return;
  }
  const std::span<const Node> own =
      neighbours.first(std::min(neighbours.size(), static_cast<std::size_t>(degree_)));
  std::copy(own.begin(), own.end(), row(node));
  hang(node, own, keys);
  for (const Node from : own) link(from, node, keys, worth);
  for (const Node from : finders) link(from, node, keys, worth);
}

void KeyGraph::undo_last() {
  for (auto i = std::ssize(changes_); i-- > added_.back();) {
    const Change& change = changes_[static_cast<std::size_t>(i)];
    row(change.node)[change.slot] = change.before;
  }
  changes_.resize(static_cast<std::size_t>(added_.back()));
  added_.pop_back();
  links_.resize(links_.size() - static_cast<std::size_t>(degree_));
  if (links_.empty()) entries_.clear();
}

void KeyGraph::undo(std::int64_t nodes) {
  while (this->nodes() > nodes && !added_.empty()) undo_last();
}

void KeyGraph::cut(std::int64_t nodes, const BeamKeys& keys, ThreadPool& pool) {
  undo(nodes);
  if (this->nodes() <= nodes) return;
  drop_from(nodes);
  connect(keys, pool);
}

void KeyGraph::drop_from(std::int64_t nodes) {
  links_.resize(static_cast<std::size_t>(nodes * degree_));
  for (Node node = 0; node < nodes; ++node) {
    Link* const first = row(node);
    Link* const end = first + count(node);
    std::fill(std::remove_if(first, end, [&](Link link) { return target_of(link) >= nodes; }), end, kNoLink);
  }
  std::erase_if(entries_, [&](Node entry) { return entry >= nodes; });
  if (entries_.empty() && nodes > 0) entries_ = {0};
}

/// Makes tree links of those by which a breadth-first search from `from` reaches what was not reached.
std::int64_t KeyGraph::spread(Node from, std::vector<bool>& reached) {
  std::vector<Node> queue = {from};
  reached[static_cast<std::size_t>(from)] = true;
  for (std::size_t i = 0; i < queue.size(); ++i) {
    for (Link& link : std::span(row(queue[i]), static_cast<std::size_t>(count(queue[i])))) {
      const auto target = static_cast<std::size_t>(target_of(link));
      if (reached[target]) continue;
      reached[target] = true;
      link |= kTreeLink;
      queue.push_back(target_of(link));
    }
  }
  return std::ssize(queue);
}

/// Lays the tree: breadth-first from the root, then every node that was not reached is hung below one that
/// was and lies near, together with all that it leads to.
void KeyGraph::connect(const BeamKeys& keys, ThreadPool& pool) {
  if (nodes() == 0) return;
  LODE_ASSERT(added_.empty());
  for (Link& link : links_) link &= ~kTreeLink;
  std::vector<bool> reached(static_cast<std::size_t>(nodes()), false);
  if (spread(entries_[0], reached) == nodes()) return;
  std::vector<Node> lost;
  for (Node node = 0; node < nodes(); ++node)
    if (!reached[static_cast<std::size_t>(node)]) lost.push_back(node);
  std::vector<std::vector<Node>> near(lost.size());
  std::vector<BeamSearch> walks(static_cast<std::size_t>(pool.size()));
  pool.for_each(std::ssize(lost), [&](std::int64_t item, int worker) {
    check_cancel();
    const auto at = static_cast<std::size_t>(item);
    std::vector<float> key(static_cast<std::size_t>(keys.d));
    decode_key(lost[at], keys, key);
    BeamSearch& walk = walks[static_cast<std::size_t>(worker)];
    walk.begin(*this, keys, key.data(), kNearBeam);
    walk.visit(std::span(entries_).first(1));
    walk.run(kNearBeam);
    for (std::int64_t rank = 0; rank < walk.found(); ++rank) near[at].push_back(walk.node(rank));
    sort_by_distance(lost[at], near[at], keys);
  });
  for (std::size_t i = 0; i < lost.size(); ++i) {
    if (reached[static_cast<std::size_t>(lost[i])]) continue;
    hang(lost[i], near[i], keys);
    spread(lost[i], reached);
  }
}

}  // namespace lode
