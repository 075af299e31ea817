// SPDX-License-Identifier: Apache-2.0
// One made-up attention layer for tests of stores, selectors and attention: queries, keys and values that
// depend on the seed and the position alone, so that the same text looks the same however it is cut into
// chunks.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "attend/attend.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kv_row.h"
#include "kv/store.h"
#include "lodestone/selector.h"
#include "model/config.h"

namespace lode::test {

struct WorldShape {
  int kv_heads = 2, group = 2, d = 64;
  DType type = DType::f32;
  LocalWindow dense = {.sink = 1, .window = 16};
  std::int64_t max_tokens = 4096;
};

/// What one query token and head attends of its far keys.
using FarSet = std::set<std::pair<Position, float>>;

class World {
 public:
  explicit World(const WorldShape& shape, std::uint64_t seed = 1, std::int32_t sequence = 0)
      : shape_(shape),
        seed_(seed),
        sequence_(sequence),
        rope_(config_of(shape), shape.max_tokens),
        store_({.layers = 1,
                .kv_heads = shape.kv_heads,
                .head_dim = shape.d,
                .type = shape.type,
                .max_tokens = shape.max_tokens}) {}

  const WorldShape& shape() const { return shape_; }
  KvStore& store() { return store_; }
  const Rope& rope() const { return rope_; }
  std::int64_t tokens() const { return store_.tokens(); }
  int query_heads() const { return shape_.kv_heads * shape_.group; }

  /// Numbers that replace the random ones, by (position, head, element); NaN-safe tests plant what hurts.
  std::function<float(Position, int head, int i, float normal)> shape_key = [](Position, int, int, float x) {
    return x;
  };

  LayerGeometry geometry(ThreadPool& pool) const {
    return {.layer = 3,
            .query_heads = query_heads(),
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.d,
            .scale = 1.0f / std::sqrt(static_cast<float>(shape_.d)),
            .dense = shape_.dense,
            .rope = &rope_,
            .pool = &pool,
            .seed = 7};
  }

  void write(std::int64_t count) {
    std::vector<float> k, v;
    for (std::int64_t t = 0; t < count; ++t) {
      const auto p = static_cast<Position>(tokens() + t);
      for (int h = 0; h < shape_.kv_heads; ++h) {
        std::vector<float> key = normals(1, p, h);
        for (int i = 0; i < shape_.d; ++i)
          key[static_cast<std::size_t>(i)] = shape_key(p, h, i, key[static_cast<std::size_t>(i)]);
        rope_.rotate(key, p);
        k.insert(k.end(), key.begin(), key.end());
        const std::vector<float> value = normals(2, p, h);
        v.insert(v.end(), value.begin(), value.end());
      }
    }
    store_.write(0, count, k, v);
    store_.commit(count);
  }

  /// Query tokens [begin, begin + count), which must have been written. Holds until the next call.
  QueryBlock block(Position begin, std::int64_t count) {
    q_.clear();
    q_unrotated_.clear();
    for (std::int64_t t = 0; t < count; ++t) {
      const auto p = static_cast<Position>(begin + t);
      for (int h = 0; h < query_heads(); ++h) {
        std::vector<float> q = normals(3, p, h);
        for (float& x : q) x *= 3.0f;  // scores that differ enough to make attention uneven
        q_unrotated_.insert(q_unrotated_.end(), q.begin(), q.end());
        rope_.rotate(q, p);
        q_.insert(q_.end(), q.begin(), q.end());
      }
    }
    return {.sequence = sequence_,
            .phase = Phase::generation,
            .begin = begin,
            .tokens = count,
            .q = q_,
            .q_unrotated = q_unrotated_,
            .kv = store_.layer(0),
            .far_begin = static_cast<Position>(shape_.dense.sink)};
  }

  std::vector<float> key(Position row, int head) const { return widened(row, head, true); }
  std::vector<float> value(Position row, int head) const { return widened(row, head, false); }

 private:
  static ModelConfig config_of(const WorldShape& shape) {
    ModelConfig config;
    config.head_dim = shape.d;
    config.rope_theta = 10000.0;
    config.max_positions = shape.max_tokens;
    return config;
  }
  std::vector<float> normals(int kind, Position p, int head) const {
    Rng rng(hash_seed(seed_, kind, p, head));
    std::vector<float> x(static_cast<std::size_t>(shape_.d));
    for (float& value : x) value = static_cast<float>(rng.normal());
    return x;
  }
  std::vector<float> widened(Position row, int head, bool is_key) const {
    const KvRows rows = store_.layer(0).heads[static_cast<std::size_t>(head)];
    std::vector<float> x(static_cast<std::size_t>(shape_.d));
    (is_key ? read_key_row : read_value_row)(rows, row, x.data());
    return x;
  }

  WorldShape shape_;
  std::uint64_t seed_;
  std::int32_t sequence_;
  Rope rope_;
  KvStore store_;
  std::vector<float> q_, q_unrotated_;  // [T, Hq, d]
};

/// Far keys of each (token, query head) of a block as one selection gives them; fails on keys named twice or
/// not far.
inline std::vector<FarSet> far_sets(const Selection& selection, const QueryBlock& block,
                                    const LayerGeometry& geometry,
                                    std::vector<std::string>* problems = nullptr) {
  std::vector<FarSet> found(static_cast<std::size_t>(block.tokens * geometry.query_heads));
  std::vector<int> covered(found.size(), 0);
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const Selection::Set set = selection.set(i);
    if (set.queries.sequence != block.sequence) continue;
    for (std::int64_t t = set.queries.token_begin; t < set.queries.token_end; ++t) {
      for (int g = 0; g < geometry.group(); ++g) {
        if ((set.queries.heads >> g & 1u) == 0) continue;
        const auto query =
            static_cast<std::size_t>(t * geometry.query_heads + set.queries.kv_head * geometry.group() + g);
        ++covered[query];
        const auto take = [&](Position row, float weight) {
          const bool far = row >= block.far_begin && row < block.far_end(t, geometry.dense);
          const bool in_reach =
              row >= block.far_begin && row < block.far_end(set.queries.token_end - 1, geometry.dense);
          if (!in_reach && problems != nullptr)
            problems->push_back("row " + std::to_string(row) + " is not far");
          if (far && !found[query].emplace(row, weight).second && problems != nullptr) {
            problems->push_back("row " + std::to_string(row) + " twice");
          }
        };
        for (const Run& run : set.runs) {
          for (Position row = run.begin; row < run.end; ++row) take(row, 0.0f);
        }
        for (std::size_t r = 0; r < set.rows.size(); ++r) {
          take(set.rows[r], set.log_weights.empty() ? 0.0f : set.log_weights[r]);
        }
      }
    }
  }
  for (const int times : covered) {
    if (times != 1 && problems != nullptr)
      problems->push_back("a query is in " + std::to_string(times) + " sets");
  }
  return found;
}

/// Attention of one query over sink, window and some far keys, in double. `lse` may be null.
inline std::vector<double> attend_exactly(const World& world, const QueryBlock& block,
                                          const LayerGeometry& geometry, std::int64_t t, int query_head,
                                          const FarSet& far, double* lse = nullptr) {
  const int d = geometry.head_dim, kv_head = query_head / geometry.group();
  const Position position = block.begin + static_cast<Position>(t);
  FarSet keys = far;
  for (Position p = 0; p < std::min<Position>(block.far_begin, position + 1); ++p) keys.emplace(p, 0.0f);
  for (Position p = block.far_end(t, geometry.dense); p <= position; ++p) keys.emplace(p, 0.0f);
  std::vector<double> scores;
  double peak = -std::numeric_limits<double>::infinity();
  const float* q = block.q.data() + (t * geometry.query_heads + query_head) * d;
  for (const auto& [row, weight] : keys) {
    const std::vector<float> k = world.key(row, kv_head);
    double s = 0;
    for (int i = 0; i < d; ++i) s += static_cast<double>(q[i]) * k[static_cast<std::size_t>(i)];
    scores.push_back(s * geometry.scale + weight);
    peak = std::max(peak, scores.back());
  }
  std::vector<double> output(static_cast<std::size_t>(d), 0.0);
  double sum = 0;
  auto score = scores.begin();
  for (const auto& [row, weight] : keys) {
    const double w = std::exp(*score++ - peak);
    const std::vector<float> v = world.value(row, kv_head);
    for (int i = 0; i < d; ++i) output[static_cast<std::size_t>(i)] += w * v[static_cast<std::size_t>(i)];
    sum += w;
  }
  for (double& x : output) x /= sum;
  if (lse != nullptr) *lse = peak + std::log(sum);
  return output;
}

}  // namespace lode::test
