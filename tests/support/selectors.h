// SPDX-License-Identifier: Apache-2.0
// Selectors from their specs, and what they choose for a block of queries of the made-up layer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "lodestone/spec.h"
#include "select/device_keys.h"
#include "support/world.h"

namespace lode::test {

inline std::unique_ptr<Selector> make(const std::string& text, const LayerGeometry& geometry,
                                      const char* fingerprint = "model") {
  const Spec spec = parse_spec(text);
  return find_method(spec.name).make(spec, geometry, fingerprint);
}

/// Tells a selector of a block's queries.
inline void tell(Selector& selector, const QueryBlock& block, Phase phase = Phase::context) {
  selector.on_write({.sequence = 0,
                     .phase = phase,
                     .begin = block.begin,
                     .tokens = block.tokens,
                     .q_unrotated = block.q_unrotated,
                     .k_unrotated = {},
                     .q = block.q,
                     .k = {},
                     .v = {}});
}

/// Tells a selector of the queries at positions [0, tokens), in chunks, as a prefill does.
inline void tell(Selector& selector, World& world, std::int64_t tokens, std::int64_t chunk = 100) {
  if (!selector.wants_writes()) return;
  for (std::int64_t at = 0; at < tokens; at += chunk)
    tell(selector, world.block(static_cast<Position>(at), std::min(chunk, tokens - at)));
}

/// Tells a selector of those of a block's queries alone that it wants, as a GPU does; returns of how many tokens.
inline std::int64_t tell_wanted(Selector& selector, const QueryBlock& block) {
  auto& listener = dynamic_cast<HearsQueries&>(selector);
  const std::vector<Position> positions = listener.wanted_queries(0, block.begin, block.tokens);
  const std::span<const float> all = listener.hears_rotated() ? block.q : block.q_unrotated;
  const std::size_t width = all.size() / static_cast<std::size_t>(block.tokens);
  std::vector<float> q;
  for (const Position position : positions) {
    const auto own = all.subspan(static_cast<std::size_t>(position - block.begin) * width, width);
    q.insert(q.end(), own.begin(), own.end());
  }
  listener.on_queries({.begin = block.begin, .tokens = block.tokens, .positions = positions, .q = q});
  return std::ssize(positions);
}

/// Indexes the world's text, and does what the method of that name does over all layers then.
inline void build_whole(const std::string& method, Selector& selector, World& world) {
  const auto keys = [&](int) { return world.store().layer(0); };
  selector.build(0, keys(0));
  Selector* const layers[] = {nullptr, nullptr, nullptr, &selector};  // World's geometry says layer 3
  if (const MethodInfo& info = find_method(method); info.finish) info.finish(layers, 0, keys);
}

/// What a selector gives for the block, after it was told of the keys that left the window by then.
inline Selection selection_of(Selector& selector, const QueryBlock& block, const LayerGeometry& geometry) {
  Selection out;
  selector.append(block.sequence, block.kv, block.far_end(block.tokens - 1, geometry.dense));
  selector.select({&block, 1}, out);
  return out;
}

/// The same as sets of far keys, one for each (token, query head); fails on keys that are named twice or not
/// far.
inline std::vector<FarSet> select(Selector& selector, const QueryBlock& block, const LayerGeometry& geometry,
                                  SelectWork* work = nullptr) {
  const Selection out = selection_of(selector, block, geometry);
  if (work != nullptr) *work = selector.take_work();
  std::vector<std::string> problems;
  std::vector<FarSet> found = far_sets(out, block, geometry, &problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
  return found;
}

/// One number of a topic's key in a KV head.
inline float topic(int which, int kv_head, int i) {
  return static_cast<float>(Rng(hash_seed(99, which, kv_head, i)).normal());
}

/// Keys of a few topics that come back in turn: those of one topic lie close together.
inline void plant_topics(World& world, int topics, float noise) {
  world.shape_key = [=](Position p, int head, int i, float x) {
    return noise * x + topic(static_cast<int>(p) % topics, head, i);
  };
}

/// The query of one token about a planted topic. `block` holds while this does.
struct TopicQuery {
  TopicQuery(World& world, Position position, int which) : block(world.block(position, 1)) {
    for (int h = 0; h < world.query_heads(); ++h) {
      std::vector<float> head(static_cast<std::size_t>(world.shape().d));
      for (std::size_t i = 0; i < head.size(); ++i)
        head[i] = topic(which, h / world.shape().group, static_cast<int>(i));
      q_unrotated.insert(q_unrotated.end(), head.begin(), head.end());
      world.rope().rotate(head, position);
      q.insert(q.end(), head.begin(), head.end());
    }
    block.q = q;
    block.q_unrotated = q_unrotated;
  }
  TopicQuery(const TopicQuery&) = delete;
  TopicQuery& operator=(const TopicQuery&) = delete;

  std::vector<float> q, q_unrotated;  // [Hq, d]
  QueryBlock block;
};

}  // namespace lode::test
