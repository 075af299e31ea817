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
// as the paper does. Clusters follow the text: the paper's 1,024 hold 128 keys each at 128k tokens, and a bucket's
// centroid then says little about the one key that a query is about. We keep 16 keys a cluster up to 1,024 clusters,
// 32 beyond, up to the 8,192 clusters among which a GPU chooses, and probe as large a share of them as 32 of 1,024.
// At 128k only `rope=on` finds the right buckets, for keys before RoPE know nothing of distance (docs/results/quality.md).
//
// Centroids stay as build() trained them; keys that come later join their bucket. An index that was never
// built has one bucket, so that everything is attended.
#include "select/baselines/kmeans.h"

#include <algorithm>
#include <array>

#include "ann/kmeans.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/bucket_choice.h"
#include "select/shared/centroids.h"
#include "select/shared/partition.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr std::int64_t kPaperClusters = 1024, kPaperProbes = 32;  // SAAP, section 3
constexpr std::int64_t kFewestKeys = 16, kMostKeys = 32;          // of a cluster, on average
constexpr std::array<std::string_view, 2> kRope = {"off", "on"};

struct Options {
  std::optional<Amount> clusters;
  std::optional<std::int64_t> probes;
  bool roped = false;
  std::optional<std::string> weights;

  static Options of(const Spec& spec) {
    Options options;
    if (spec.text("clusters")) options.clusters = spec.amount("clusters", {});
    if (spec.text("probes")) options.probes = spec.integer("probes", 0, 1, 1 << 20);
    options.roped = spec.choice("rope", kRope[0], kRope) == "on";
    options.weights = spec.file("weights");
    expect_not_both(spec, "clusters", "weights");
    return options;
  }
  std::int64_t clusters_for(std::int64_t keys) const {
    const std::int64_t wanted =
        clusters
            ? clusters->of(keys)
            : std::clamp(keys / kMostKeys, std::min(kPaperClusters, keys / kFewestKeys), kMostBucketsOfGpu);
    return std::max<std::int64_t>(1, wanted);
  }
  std::int64_t probes_for(std::int64_t buckets) const {
    return probes.value_or(std::max(kPaperProbes, buckets * kPaperProbes / kPaperClusters));
  }
  bool indexes_like(const Options& other) const {
    return same_amount(clusters, other.clusters) && roped == other.roped && weights == other.weights;
  }
};

class KMeans final : public PartitionSelector, public BucketChooser, public SharesIndex {
 public:
  KMeans(const LayerGeometry& geometry, const Options& options, std::string_view fingerprint)
      : PartitionSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {
    LODE_ASSERT(geometry.pool != nullptr);
    if (options.weights) trained_ = read_centroids(*options.weights, geometry, options.roped, fingerprint);
  }

  void build(std::int32_t sequence, KvLayer kv) override {
    BucketIndex index = empty_index();
    const auto [first, keys] = training_keys(kv);
    if (trained_.empty() && keys > 0) {
      index = BucketIndex(index.begin(), geometry_.head_dim,
                          train_centroids(kv, first, keys, options_.clusters_for(keys)));
    }
    extend_to_context(index, kv);
    set_index(sequence, std::move(index));
  }
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const KMeans*>(&other);
    return same != nullptr && options_.indexes_like(same->options_) && copy_index(sequence, *same);
  }
  std::optional<BucketChoice> bucket_choice() const override {
    const BucketIndex* const index = find_index(0);
    if (index == nullptr) return std::nullopt;
    BucketChoice choice = {.keys = {},
                           .queries = {},
                           .probes = options_.probes_for(index->buckets()),
                           .roped = options_.roped,
                           .softmax = false};
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      const BucketNet::Weights weights = {.hidden_weight = {},
                                          .hidden_bias = {},
                                          .output_weight = {},
                                          .linear_weight = index->centroids(head),
                                          .bias = {}};
      choice.keys.emplace_back(geometry_.head_dim, index->buckets(), weights, DType::f32);
    }
    choice.queries = choice.keys;
    return choice;
  }
  const BucketIndex* buckets() const override { return find_index(0); }

 private:
  struct Scratch {
    std::vector<float> q, scores;  // [d], [C]
  };

  bool divides() const override { return true; }

  /// No keys yet; the trained centroids, or a single bucket.
  BucketIndex empty_index() const override {
    const std::vector<float> zero(static_cast<std::size_t>(geometry_.head_dim), 0.0f);
    const std::vector<std::vector<float>> single(static_cast<std::size_t>(geometry_.kv_heads), zero);
    return {static_cast<Position>(geometry_.dense.sink), geometry_.head_dim,
            trained_.empty() ? single : trained_};
  }
  const Rope* unrotate_by() const override { return options_.roped ? nullptr : geometry_.rope; }
  void label(const BucketIndex& index, int head, Matrix<const float> keys,
             std::span<std::int32_t> labels) const override {
    assign_points(keys, index.centroids(head), labels, *geometry_.pool);
  }

  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  Options options_;
  std::vector<std::vector<float>> trained_;  // [Hkv][C, d], empty without `weights`
  std::vector<Scratch> scratch_;             // [workers]
};

void KMeans::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const BucketIndex& index = index_of(unit);
  const std::int64_t buckets = index.buckets(), d = geometry_.head_dim;
  out.add_set(unit.set(all_heads(geometry_.group())));
  const std::int64_t probes = options_.probes_for(buckets);
  if (probes >= buckets) return out.add_run(unit.far_begin, unit.far_end);

  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::span<const float> q =
      unit.group_of(options_.roped ? unit.block->q : unit.block->q_unrotated, geometry_);
  s.q.assign(static_cast<std::size_t>(d), 0.0f);
  for (std::size_t i = 0; i < q.size(); ++i) s.q[i % static_cast<std::size_t>(d)] += q[i];
  s.scores.resize(static_cast<std::size_t>(buckets));
  kernels().gemv(s.q.data(), 1, index.centroids(unit.kv_head).data(), DType::f32, d, 0, buckets,
                 s.scores.data(), buckets);
  add_best_buckets(unit, worker, s.scores, probes, out, work);
  work.bytes += buckets * d * std::int64_t{sizeof(float)};
  work.keys_scored += buckets;
}

}  // namespace

std::int64_t kmeans_buckets(const Spec& spec, std::int64_t keys) {
  return Options::of(spec).clusters_for(keys);
}
std::int64_t kmeans_probes(const Spec& spec, std::int64_t buckets) {
  return Options::of(spec).probes_for(buckets);
}

MethodInfo kmeans_method() {
  return {.name = "kmeans",
          .aliases = {},
          .source = "k-means partition, whole buckets (SAAP's baseline)",
          .keys = {{"clusters", "buckets of the context's own keys, a count or a share of the keys",
                    "keys/16 up to 1024, or keys/32 where that is more, up to 8192"},
                   {"probes", "buckets that a query attends, 1 to 1048576", "32, or 1/32 of more than 1024"},
                   {"rope", "whether keys are clustered after RoPE: off or on", "off"},
                   {"weights", "file of centroids trained offline, instead of the context's own", ""}},
          .dense = {},
          .dense_layers = 0,
          .make =
              [](const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint) {
                return std::make_unique<KMeans>(geometry, Options::of(spec), fingerprint);
              },
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                // Centroids, and one row id per key in lists that grow by doubling, so half as much again.
                const std::int64_t clusters = kmeans_buckets(spec, tokens);
                return geometry.kv_heads * (clusters * geometry.head_dim * std::int64_t{sizeof(float)} +
                                            tokens * std::int64_t{sizeof(Position)} * 3 / 2);
              },
          .validate = check_of<Options>};
}

}  // namespace lode
