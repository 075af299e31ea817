// SPDX-License-Identifier: Apache-2.0
// What the benches share: medians, keys and values of our own making, and the time of plain reads of the same
// buffers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "kv/store.h"
#include "lab/bench/ood_vectors.h"
#include "lodestone/engine.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"
#include "model/config.h"

namespace lode {

class Model;
class ThreadPool;

/// Microseconds that body() takes.
template <class Body>
double microseconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}
double median(std::vector<double> values);  ///< of two in the middle their mean; 0 of none

/// Options for so many tokens, with RoPE scaled where the model has fewer positions, which a note says.
ContextOptions with_room(const Model& model, ContextOptions options, std::int64_t tokens,
                         const std::function<void(std::string_view)>& note);

/// Bytes of the largest cache of this machine; 32 MiB where the system does not say.
std::int64_t last_level_cache_bytes();

/// Of the layer that a method is benched as: the first that its spec does not keep dense. `rope` and `pool`
/// are kept.
LayerGeometry bench_geometry(const ModelConfig& shape, const Spec& spec, const Rope& rope, ThreadPool& pool,
                             std::uint64_t seed);

/// How made-up keys lie. normal: independent. clustered: around centres of their head, cluster sizes by
/// Zipf's law with exponent `skew`, queries near a centre. ood: queries apart from the keys (ood_vectors.h).
enum class KvKind { normal, clustered, ood };

/// Made-up vectors of one layer and sequence, before and after RoPE. The same seed gives the same.
class VectorMaker {
 public:
  struct Shape {
    int query_heads = 0, kv_heads = 0, head_dim = 0;
  };
  VectorMaker(const Shape& shape, KvKind kind, double skew, const Rope& rope, std::uint64_t seed);

  /// Starts another stream of vectors around the same centres.
  void reseed(std::uint64_t seed) { rng_ = Rng(seed); }
  /// Next `tokens` tokens from position `begin` on, into the vectors below.
  void make(Position begin, std::int64_t tokens);
  /// Only k and v. Queries are most of the work where many heads share keys.
  void make_keys(Position begin, std::int64_t tokens);

  std::vector<float> q_unrotated, q;  // [T, Hq, d]
  std::vector<float> k_unrotated, k;  // [T, Hkv, d]
  std::vector<float> v;               // [T, Hkv, d]

 private:
  void fill(std::vector<float>& out, std::int64_t tokens, int heads, bool clustered, float noise);
  void make_ood(std::int64_t tokens, bool queries);
  void turn(std::vector<float>& x, int heads, Position begin, bool back) const;

  Shape shape_;
  KvKind kind_;
  const Rope& rope_;
  Rng rng_;
  std::vector<float> centres_;      // [Hkv, kCentres, d]
  std::vector<double> cumulative_;  // [kCentres] of cluster sizes
  std::optional<OodVectors> ood_;
};

/// What is measured next comes from memory.
class CacheEmptier {
 public:
  explicit CacheEmptier(ThreadPool& pool) : pool_(pool) {}
  /// Reads twice what the last-level cache holds.
  void empty();

 private:
  ThreadPool& pool_;
  std::vector<std::byte> other_;
  std::atomic<std::uint64_t> read_{0};  // keeps the reads alive
};

/// The time of reads, by the number of bytes: measured at a ladder of sizes, interpolated between.
class ReadFloor {
 public:
  /// `buffers` are read in turn, each call going on where the last one ended, over all of them in a circle.
  ReadFloor(std::vector<std::span<const std::byte>> buffers, std::int64_t most_bytes, ThreadPool& pool);
  /// One more measurement of every size.
  void measure();
  double microseconds_for(std::int64_t bytes) const;

 private:
  void read(std::int64_t bytes);
  std::vector<std::span<const std::byte>> buffers_;
  ThreadPool& pool_;
  std::vector<std::int64_t> sizes_;         // rising
  std::vector<std::vector<double>> times_;  // per size
  std::size_t buffer_ = 0, offset_ = 0;     // where the next read begins
};

}  // namespace lode
