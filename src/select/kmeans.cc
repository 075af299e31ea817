// SPDX-License-Identifier: Apache-2.0
// kmeans: keys are partitioned into buckets by spherical k-means; a query attends every key of the buckets
// whose centroids it likes best. The baseline of SAAP ("K-means" in its section 6.1 and tables 2 and 4;
// sections 3 and 4 and appendix A for the procedure: C = 1024, 10 iterations, random start, 32 probes, whole
// buckets without a top-k inside).
//
//   bucket(k) = argmax_c k . c          probes(q) = top-l of sum over the group's heads of q . c = (sum q) .
//   c
//
// Keys and queries enter before RoPE (`rope=off`) or after it (`rope=on`). Stored keys are un-rotated, so the
// index is a function of the store alone. Differs from the paper: by default the centroids are trained on the
// context itself, with at most kSamplePerCluster keys a centroid; `weights` takes centroids trained offline,
// as the paper does. The paper does not say how many clusters short contexts have: we keep at least
// kKeysPerCluster keys a cluster.
//
// Centroids stay as build() trained them; keys that come later join their bucket. An index that was never
// built has one bucket, so that everything is attended.
#include "ann/kmeans.h"

#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "base/rng.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/rope.h"
#include "select/centroids.h"
#include "select/methods.h"
#include "select/per_token.h"
#include "select/rows.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxClusters = 1024;  // SAAP, section 3
constexpr std::int64_t kKeysPerCluster = 16;
constexpr std::int64_t kSamplePerCluster = 256;  // as Faiss trains
constexpr std::int64_t kBlock = 4096;            // keys of all heads un-rotated and assigned at a time
constexpr std::int64_t kPiece = 64;              // of one thread's item
constexpr std::array<std::string_view, 2> kRope = {"off", "on"};

struct Options {
  std::optional<Amount> clusters;
  std::int64_t probes = 32;
  bool roped = false;
  std::optional<std::string> weights;

  static Options of(const Spec& spec) {
    Options options;
    if (spec.text("clusters")) options.clusters = spec.amount("clusters", {});
    options.probes = spec.integer("probes", options.probes, 1, 1 << 20);
    options.roped = spec.choice("rope", kRope[0], kRope) == "on";
    options.weights = spec.text("weights");
    if (options.weights && options.clusters) {
      throw InputError("attention spec '" + spec.str() +
                       "': expected one of the keys clusters and weights, found both");
    }
    return options;
  }
  std::int64_t clusters_for(std::int64_t keys) const {
    const std::int64_t wanted =
        clusters ? clusters->of(keys) : std::min(kMaxClusters, keys / kKeysPerCluster);
    return std::max<std::int64_t>(1, wanted);
  }
};

/// The partition of one KV head's keys.
struct Buckets {
  std::vector<float> centroids;             // [C, d]
  std::vector<std::vector<Position>> rows;  // [C], rising
};

/// All heads of one sequence: keys [begin, end) are in exactly one bucket of each.
struct Index {
  Position begin = 0, end = 0;
  std::vector<Buckets> heads;  // [Hkv]
};

class KMeans final : public PerTokenSelector {
 public:
  KMeans(const LayerGeometry& geometry, const Options& options, std::string_view fingerprint)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {
    LODE_ASSERT(geometry.pool != nullptr);
    if (options.weights) trained_ = read_centroids(*options.weights, geometry, options.roped, fingerprint);
  }

  void build(std::int32_t sequence, KvLayer kv) override {
    Index index = empty_index();
    const std::int64_t keys = kv.tokens - index.begin;
    if (trained_.empty() && keys > 0) {
      for (std::size_t head = 0; head < index.heads.size(); ++head) {
        set_centroids(index.heads[head], train(kv.heads[head], static_cast<int>(head), index.begin, keys));
      }
    }
    extend(index, kv, static_cast<Position>(kv.tokens));
    indexes_[sequence] = std::move(index);
  }

  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    const auto [at, fresh] = indexes_.try_emplace(sequence);
    if (fresh) at->second = empty_index();
    extend(at->second, kv, far_end);
  }

  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    const auto found = indexes_.find(sequence);
    if (found == indexes_.end() || found->second.end <= tokens) return;
    Index& index = found->second;
    index.end = std::max(index.begin, static_cast<Position>(tokens));
    for (Buckets& head : index.heads) {
      for (std::vector<Position>& rows : head.rows)
        rows.erase(std::lower_bound(rows.begin(), rows.end(), index.end), rows.end());
    }
  }

  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;

  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, index] : indexes_) {
      for (const Buckets& head : index.heads) {
        bytes += std::ssize(head.centroids) * std::int64_t{sizeof(float)};
        for (const auto& rows : head.rows)
          bytes += static_cast<std::int64_t>(sizeof(rows) + rows.capacity() * sizeof(Position));
      }
    }
    return bytes;
  }

 private:
  struct Scratch {
    std::vector<float> q, scores;  // [d], [C]
    std::vector<Position> probes;
    RowSet rows;
  };

  static void set_centroids(Buckets& head, std::vector<float> centroids, std::size_t d) {
    head.rows.assign(centroids.size() / d, {});
    head.centroids = std::move(centroids);
  }
  void set_centroids(Buckets& head, std::vector<float> centroids) const {
    set_centroids(head, std::move(centroids), static_cast<std::size_t>(geometry_.head_dim));
  }

  /// No keys yet; the trained centroids, or a single bucket.
  Index empty_index() const {
    Index index;
    index.begin = index.end = static_cast<Position>(geometry_.dense.sink);
    index.heads.resize(static_cast<std::size_t>(geometry_.kv_heads));
    for (std::size_t head = 0; head < index.heads.size(); ++head) {
      const std::vector<float> zero(static_cast<std::size_t>(geometry_.head_dim), 0.0f);
      set_centroids(index.heads[head], trained_.empty() ? zero : trained_[head]);
    }
    return index;
  }

  /// Stored keys of one position, of some heads, as the partition sees them: [heads, d]. A key with a NaN or
  /// an infinity counts as 0: it must not reach a centroid.
  void read_keys(std::span<const KvRows> heads, Position row, std::span<float> keys) const {
    const auto d = static_cast<std::size_t>(geometry_.head_dim);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::span<float> key = keys.subspan(h * d, d);
      kernels().widen(heads[h].k + row * heads[h].row_bytes(), heads[h].type, heads[h].d, key.data());
      const float scale = heads[h].type == DType::q8 ? heads[h].k_scale[row] : 1.0f;
      for (float& x : key) x *= scale;
    }
    if (!options_.roped && geometry_.rope != nullptr) geometry_.rope->unrotate(keys, row);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::span<float> key = keys.subspan(h * d, d);
      if (!std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); }))
        std::fill(key.begin(), key.end(), 0.0f);
    }
  }

  std::vector<float> train(const KvRows& kv, int head, Position begin, std::int64_t keys) const;
  void extend(Index& index, KvLayer kv, Position end) const;
  void extend_block(Index& index, KvLayer kv, Position end) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  Options options_;
  std::vector<std::vector<float>> trained_;  // [Hkv][C, d], empty without `weights`
  std::map<std::int32_t, Index> indexes_;    // by sequence
  std::vector<Scratch> scratch_;             // [workers]
};

/// Centroids of a head's keys [begin, begin + keys), or of a sample of them.
std::vector<float> KMeans::train(const KvRows& kv, int head, Position begin, std::int64_t keys) const {
  const std::int64_t clusters = options_.clusters_for(keys), d = geometry_.head_dim;
  const std::uint64_t seed = hash_seed(geometry_.seed, geometry_.layer, head);
  std::vector<Position> sample(static_cast<std::size_t>(keys));
  std::iota(sample.begin(), sample.end(), begin);
  if (const std::int64_t limit = clusters * kSamplePerCluster; keys > limit) {
    Rng rng(seed);
    for (std::int64_t i = 0; i < limit; ++i) {
      const auto pick = i + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(keys - i)));
      std::swap(sample[static_cast<std::size_t>(i)], sample[static_cast<std::size_t>(pick)]);
    }
    sample.resize(static_cast<std::size_t>(limit));
    std::sort(sample.begin(), sample.end());
  }
  std::vector<float> x(sample.size() * static_cast<std::size_t>(d));  // [sample, d]
  for_each((std::ssize(sample) + kPiece - 1) / kPiece, [&](std::int64_t item, int) {
    for (std::int64_t i = item * kPiece; i < std::min(std::ssize(sample), (item + 1) * kPiece); ++i) {
      read_keys({&kv, 1}, sample[static_cast<std::size_t>(i)],
                std::span(x).subspan(static_cast<std::size_t>(i * d), static_cast<std::size_t>(d)));
    }
  });
  return spherical_kmeans({x.data(), std::ssize(sample), d}, {.clusters = clusters, .seed = seed},
                          *geometry_.pool);
}

/// Puts keys [index.end, end) into their buckets, a block at a time.
void KMeans::extend(Index& index, KvLayer kv, Position end) const {
  while (index.end < end) {
    const Position stop = static_cast<Position>(std::min<std::int64_t>(end, index.end + kBlock));
    LODE_ASSERT(stop <= kv.tokens);
    extend_block(index, kv, stop);
  }
}

void KMeans::extend_block(Index& index, KvLayer kv, Position end) const {
  const std::int64_t count = end - index.end, d = geometry_.head_dim, heads = std::ssize(index.heads);
  const std::int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<float> x(static_cast<std::size_t>(heads * count * d));          // [Hkv, count, d]
  std::vector<std::int32_t> labels(static_cast<std::size_t>(heads * count));  // [Hkv, count]
  for_each(pieces, [&](std::int64_t piece, int) {
    std::vector<float> keys(static_cast<std::size_t>(heads * d));  // [Hkv, d]
    for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
      read_keys(kv.heads, index.end + static_cast<Position>(i), keys);
      for (std::int64_t h = 0; h < heads; ++h)
        std::copy_n(keys.data() + h * d, d, x.data() + (h * count + i) * d);
    }
  });
  for_each(heads * pieces, [&](std::int64_t item, int) {
    const std::int64_t head = item / pieces, first = item % pieces * kPiece,
                       some = std::min(kPiece, count - first);
    assign_points({x.data() + (head * count + first) * d, some, d},
                  index.heads[static_cast<std::size_t>(head)].centroids,
                  std::span(labels).subspan(static_cast<std::size_t>(head * count + first),
                                            static_cast<std::size_t>(some)),
                  *geometry_.pool);
  });
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto bucket = static_cast<std::size_t>(labels[static_cast<std::size_t>(h * count + i)]);
      index.heads[static_cast<std::size_t>(h)].rows[bucket].push_back(index.end + static_cast<Position>(i));
    }
  }
  index.end = end;
}

void KMeans::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const Index& index = indexes_.at(unit.block->sequence);
  LODE_ASSERT(index.begin == unit.far_begin && index.end >= unit.far_end);
  const Buckets& head = index.heads[static_cast<std::size_t>(unit.kv_head)];
  const std::int64_t clusters = std::ssize(head.rows), d = geometry_.head_dim;
  out.add_set(unit.set(all_heads(geometry_.group())));
  if (options_.probes >= clusters) return out.add_run(unit.far_begin, unit.far_end);

  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::span<const float> q =
      unit.group_of(options_.roped ? unit.block->q : unit.block->q_unrotated, geometry_);
  s.q.assign(static_cast<std::size_t>(d), 0.0f);
  for (std::size_t i = 0; i < q.size(); ++i) s.q[i % static_cast<std::size_t>(d)] += q[i];
  s.scores.resize(static_cast<std::size_t>(clusters));
  kernels().gemv(s.q.data(), 1, head.centroids.data(), DType::f32, d, 0, clusters, s.scores.data(), clusters);
  for (std::size_t c = 0; c < head.rows.size(); ++c) {
    const bool empty = head.rows[c].empty() || head.rows[c].front() >= unit.far_end;
    if (empty) s.scores[c] = -std::numeric_limits<float>::infinity();
  }
  s.probes.clear();
  top_k(s.scores, options_.probes, 0, s.probes);

  s.rows.reset(unit.far_end);
  std::int64_t visited = 0;
  for (const Position bucket : s.probes) {
    for (const Position row : head.rows[static_cast<std::size_t>(bucket)]) {
      if (row >= unit.far_end) break;
      s.rows.insert(row);
      ++visited;
    }
  }
  s.rows.drain([&](std::int64_t row) { out.add_row(static_cast<Position>(row)); });
  work.bytes += clusters * d * std::int64_t{sizeof(float)} + visited * std::int64_t{sizeof(Position)};
  work.keys_scored += clusters;
}

// Sections of a saved index: shape = {heads, C, d, begin, end} int64, centroids [Hkv, C, d] float32, offsets
// [Hkv, C + 1] int64 into the head's part of rows [Hkv, end - begin] int32: bucket by bucket, rising inside.
void KMeans::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = indexes_.find(sequence);
  const Index index = found == indexes_.end() ? empty_index() : found->second;
  const std::int64_t clusters = std::ssize(index.heads[0].rows);
  const std::array<std::int64_t, 5> shape = {std::ssize(index.heads), clusters, geometry_.head_dim,
                                             index.begin, index.end};
  std::vector<float> centroids;
  std::vector<std::int64_t> offsets;
  std::vector<Position> rows;
  for (const Buckets& head : index.heads) {
    LODE_ASSERT(std::ssize(head.rows) == clusters);
    centroids.insert(centroids.end(), head.centroids.begin(), head.centroids.end());
    offsets.push_back(0);
    for (const std::vector<Position>& bucket : head.rows) {
      rows.insert(rows.end(), bucket.begin(), bucket.end());
      offsets.push_back(offsets.back() + std::ssize(bucket));
    }
  }
  out.add<std::int64_t>("shape", shape);
  out.add<float>("centroids", centroids);
  out.add<std::int64_t>("offsets", offsets);
  out.add<Position>("rows", rows);
}

void KMeans::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("kmeans index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  const std::int64_t d = geometry_.head_dim, heads = geometry_.kv_heads;
  require(shape.size() == 5 && shape[0] == heads && shape[2] == d,
          "the model's KV heads and head dimension in section 'shape'");
  const std::int64_t clusters = shape[1], begin = shape[3], end = shape[4], keys = end - begin;
  require(begin == geometry_.dense.sink && end >= begin && end <= std::max(begin, kv.tokens),
          "keys behind the sink and within the context");
  const auto centroids = in.values<float>("centroids");
  const auto offsets = in.values<std::int64_t>("offsets");
  const auto rows = in.values<Position>("rows");
  require(clusters >= 1 && clusters <= std::ssize(offsets), "at least one cluster");
  require(std::ssize(centroids) == heads * clusters * d && std::ssize(offsets) == heads * (clusters + 1) &&
              std::ssize(rows) == heads * keys,
          "sections of the sizes that 'shape' gives");
  require(std::all_of(centroids.begin(), centroids.end(), [](float x) { return std::isfinite(x); }),
          "finite centroids");

  Index index;
  index.begin = static_cast<Position>(begin);
  index.end = static_cast<Position>(end);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto part = [](auto all, std::int64_t from, std::int64_t count) {
      return all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count));
    };
    const auto offset = part(offsets, h * (clusters + 1), clusters + 1);
    const auto row = part(rows, h * keys, keys);
    require(offset.front() == 0 && offset.back() == keys && std::is_sorted(offset.begin(), offset.end()),
            "rising offsets up to the number of keys");
    const auto centroid = part(centroids, h * clusters * d, clusters * d);
    Buckets& head = index.heads.emplace_back();
    set_centroids(head, {centroid.begin(), centroid.end()});
    std::vector<bool> seen(static_cast<std::size_t>(keys), false);
    for (std::int64_t c = 0; c < clusters; ++c) {
      const auto bucket = part(row, offset[static_cast<std::size_t>(c)],
                               offset[static_cast<std::size_t>(c + 1)] - offset[static_cast<std::size_t>(c)]);
      require(std::is_sorted(bucket.begin(), bucket.end()), "rising rows in each bucket");
      for (const Position r : bucket) {
        require(r >= begin && r < end && !seen[static_cast<std::size_t>(r - begin)],
                "each key in one bucket");
        seen[static_cast<std::size_t>(r - begin)] = true;
      }
      head.rows[static_cast<std::size_t>(c)].assign(bucket.begin(), bucket.end());
    }
  }
  indexes_[sequence] = std::move(index);
}

}  // namespace

MethodInfo kmeans_method() {
  return {.name = "kmeans",
          .aliases = {},
          .source = "k-means partition, whole buckets (SAAP's baseline)",
          .keys = {{"clusters", "buckets of the context's own keys, a count or a share of the keys",
                    "keys/16, at most 1024"},
                   {"probes", "buckets that a query attends, 1 to 1048576", "32"},
                   {"rope", "whether keys are clustered after RoPE: off or on", "off"},
                   {"weights", "file of centroids trained offline, instead of the context's own", ""}},
          .dense = {},
          .dense_layers = 0,
          .make =
              [](const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint) {
                return std::make_unique<KMeans>(geometry, Options::of(spec), fingerprint);
              },
          .validate = [](const Spec& spec) { Options::of(spec); }};
}

}  // namespace lode
