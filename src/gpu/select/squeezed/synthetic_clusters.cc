// SPDX-License-Identifier: Apache-2.0
// squeezed for the bench of one layer, where no host selectors are.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "gpu/select/squeezed/clusters.h"
#include "kernels/cuda/saap/probe.h"
#include "kernels/cuda/squeezed/cluster_block.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

bool has_whole_centroids(const Spec& spec) {
  return spec.text("centroids").value_or("q8") == "q8";
}
bool has_spreads(const Spec& spec) {
  return wanted_spreads(spec) != Spreads::none;
}
bool fits(const ClusterPlan& plan, const GpuGeometry& geometry) {
  if (plan.nodes.size() == 1)
    return cuda::fits_cluster_choice(plan.nodes.back(), geometry.head_dim, geometry.kv_heads);
  return cuda::fits_cluster_levels(
      plan.nodes.back() / cuda::cluster_level_ranks(geometry.kv_heads).back() + 64, geometry.head_dim);
}

/// Clusters of random keys with random centroids, the same in all heads and layers, and the
/// threshold that keeps the wanted share for the first queries that come.
class MadeUpClusters final : public GpuClusters {
 public:
  MadeUpClusters(const Spec& spec, const GpuGeometry& geometry, std::uint64_t seed)
      : GpuClusters(
            spec, geometry, std::vector<bool>(static_cast<std::size_t>(geometry.layers), true),
            [this](int) {
              return std::optional(ClusterChoice{.version = 0,
                                                 .segments = {&segment_, 1},
                                                 .squares = true,
                                                 .spreads = wanted_spreads(spec_)});
            },
            false) {
    make(seed);
  }
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override {
    if (!calibrated_) calibrate(queries, stream);
    return GpuClusters::select(layer, queries, q_unrotated, stream);
  }
  cuda::RowLists select_together(int layer, const cuda::Queries& all, cuda::StreamHandle stream) override {
    const cuda::RowLists lists = GpuClusters::select_together(layer, all, stream);
    if (calibrated_) return lists;
    if (looks_up_blocks()) {
      calibrate_together(all, stream);
    } else {
      calibrate(all, stream);
    }
    return GpuClusters::select_together(layer, all, stream);
  }

 private:
  void make(std::uint64_t seed) {
    const auto sink = static_cast<Position>(spec_.dense.sink),
               end = static_cast<Position>(geometry_.max_tokens - spec_.dense.window -
                                           std::max(geometry_.most_queries, geometry_.most_tokens));
    const std::int64_t keys = std::max(1, end - sink);
    plan_ = cluster_plan(spec_, keys);
    several_ = plan_.nodes.size() > 1;
    Rng rng(seed);
    ClusterTree tree;
    for (std::size_t l = 0; l < plan_.nodes.size(); ++l)
      tree.levels.push_back(
          make_level(plan_.nodes[l], l + 1 < plan_.nodes.size() ? plan_.nodes[l + 1] : keys, rng));
    for (std::size_t l = plan_.nodes.size() - 1; l-- > 0;) {
      const std::vector<std::int32_t>& below = tree.levels[l + 1].keys;
      ClusterLevel& level = tree.levels[l];
      for (std::size_t i = 0; i < level.keys.size(); ++i)
        level.keys[i] =
            std::accumulate(below.begin() + level.first[i], below.begin() + level.first[i + 1], 0);
    }
    tree.rows = rows_of(tree.levels.back(), sink, keys, rng);
    if (has_whole_centroids(spec_)) centroids_to_q8(tree, geometry_.head_dim);
    segment_ = {.begin = sink, .end = sink + static_cast<Position>(keys), .heads = {}};
    segment_.heads.assign(static_cast<std::size_t>(geometry_.kv_heads), tree);
  }
  /// `below` are nodes of the next level, or keys; centroids are kept as they are before they are rounded.
  ClusterLevel make_level(std::int64_t nodes, std::int64_t below, Rng& rng) {
    const std::int64_t d = geometry_.head_dim;
    ClusterLevel level;
    for (std::int64_t node = 0; node <= nodes; ++node)
      level.first.push_back(static_cast<std::int32_t>(node * below / nodes));
    for (std::size_t node = 0; node < static_cast<std::size_t>(nodes); ++node)
      level.keys.push_back(level.first[node + 1] - level.first[node]);
    std::vector<float>& centroids = centroids_.emplace_back(static_cast<std::size_t>(nodes * d));
    for (float& x : centroids) x = static_cast<float>(rng.uniform() - 0.5);
    level.centroids.resize(centroids.size() * 2);
    kernels().narrow(centroids.data(), std::ssize(centroids), DType::f16, level.centroids.data());
    if (has_spreads(spec_)) {
      level.spreads.resize(static_cast<std::size_t>(nodes * spread_dims(d)));
      for (std::byte& x : level.spreads) x = static_cast<std::byte>(rng.below(128));
      for (const std::int32_t keys : level.keys)
        level.spread_scales.push_back(looks_up_blocks() ? spread_scale(keys, rng) : 1e-12f);
    }
    return level;
  }
  /// For queries of variance 1: as on the shipped model three of ten scores are behind the bend, the others
  /// down to a tenth of its variance before it. A block of queries takes longer for these, and is calibrated
  /// by its own weights; otherwise no score changes by spreads.
  static float spread_scale(std::int32_t keys, Rng& rng) {
    constexpr double kMeanOfBytes = 63.5;
    return static_cast<float>(std::exp2(rng.uniform() * 4.6 - 3.2) * 2.0 * std::log(keys) / kMeanOfBytes);
  }
  /// All keys in any order, rising in a leaf.
  static std::vector<Position> rows_of(const ClusterLevel& leaves, Position sink, std::int64_t keys,
                                       Rng& rng) {
    std::vector<Position> rows(static_cast<std::size_t>(keys));
    for (std::int64_t i = 0; i < keys; ++i) {  // shuffled from the inside out
      const auto at = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(i + 1)));
      rows[static_cast<std::size_t>(i)] = rows[static_cast<std::size_t>(at)];
      rows[static_cast<std::size_t>(at)] = sink + static_cast<Position>(i);
    }
    for (std::size_t node = 0; node < leaves.keys.size(); ++node)
      std::sort(rows.begin() + leaves.first[node], rows.begin() + leaves.first[node + 1]);
    return rows;
  }

  /// Level by level the quantile, over all heads, of the first query token's scores of the nodes that are
  /// compared.
  void calibrate(const cuda::Queries& queries, cuda::StreamHandle stream) {
    const std::int64_t d = geometry_.head_dim;
    std::vector<float> q(static_cast<std::size_t>(geometry_.query_heads * d));
    cuda::copy(q.data(), queries.q, std::ssize(q) * 4, stream);
    const auto heads = static_cast<std::size_t>(geometry_.kv_heads);
    const std::vector<ClusterLevel>& levels = segment_.heads[0].levels;
    std::vector<std::vector<std::int32_t>> compared(heads);  // nodes of each head
    for (auto& nodes : compared) {
      nodes.resize(levels[0].keys.size());
      std::iota(nodes.begin(), nodes.end(), 0);
    }
    for (std::size_t l = 0; l < levels.size(); ++l) {
      std::vector<std::vector<double>> scores(heads);
      std::vector<double> all;
      for (std::size_t head = 0; head < heads; ++head) {
        scores[head] = scores_of(l, q.data() + static_cast<std::int64_t>(head) * group() * d, queries.scale,
                                 compared[head]);
        all.insert(all.end(), scores[head].begin(), scores[head].end());
      }
      const auto wanted =
          static_cast<std::int64_t>(plan_.kept[l] * static_cast<double>(heads * levels[l].keys.size()));
      const double threshold = quantile(all, std::ssize(all) - 1 - std::min(wanted, std::ssize(all) - 1));
      // Scores are squares of shares of a node; all nodes of a level have as many keys, so K / N of a key is
      // their number.
      set_threshold(
          std::sqrt(threshold / static_cast<double>(group())) * static_cast<double>(levels[l].keys.size()), l,
          stream);
      for (std::size_t head = 0; l + 1 < levels.size() && head < heads; ++head) {
        std::vector<std::int32_t> next;
        for (std::size_t i = 0; i < compared[head].size(); ++i) {
          if (!(scores[head][i] > threshold)) continue;
          const auto node = static_cast<std::size_t>(compared[head][i]);
          for (std::int32_t child = levels[l].first[node]; child < levels[l].first[node + 1]; ++child)
            next.push_back(child);
        }
        compared[head] = std::move(next);
      }
    }
  }
  std::int64_t group() const { return geometry_.query_heads / geometry_.kv_heads; }
  /// Sums over a group of the squares of what each of `nodes` has of them all.
  std::vector<double> scores_of(std::size_t level, const float* q, float scale,
                                std::span<const std::int32_t> nodes) const {
    const std::int64_t d = geometry_.head_dim, count = std::ssize(centroids_[level]) / d;
    std::vector<float> z(static_cast<std::size_t>(count));
    std::vector<double> scores(nodes.size(), 0.0), e(nodes.size());
    for (std::int64_t g = 0; g < group(); ++g) {
      kernels().gemv(q + g * d, 1, centroids_[level].data(), DType::f32, d, 0, count, z.data(), count);
      const float most = *std::max_element(z.begin(), z.end());
      double total = 0.0;
      for (std::size_t i = 0; i < e.size(); ++i)
        total += e[i] = std::exp(static_cast<double>((z[static_cast<std::size_t>(nodes[i])] - most) * scale));
      for (std::size_t i = 0; i < e.size(); ++i) scores[i] += e[i] / total * (e[i] / total);
    }
    return scores;
  }
  /// The quantile of the scores that a block of query tokens has just made.
  void calibrate_together(const cuda::Queries& queries, cuda::StreamHandle stream) {
    const auto nodes = static_cast<std::size_t>(plan_.nodes[0]);
    const cuda::BlockScratch at(queries.count, geometry_.query_heads, geometry_.kv_heads, geometry_.head_dim,
                                std::ssize(segment_.heads[0].levels[0].keys), kind_);
    std::vector<float> weights(static_cast<std::size_t>(geometry_.kv_heads * at.nodes));
    cuda::copy(weights.data(), block_.as<char>() + at.weights, std::ssize(weights) * 4, stream);
    std::vector<double> all;
    for (auto head = weights.begin(); head != weights.end(); head += at.nodes)
      all.insert(all.end(), head, head + static_cast<std::ptrdiff_t>(nodes));
    const auto kept = static_cast<std::int64_t>(plan_.kept.back() * static_cast<double>(all.size()));
    set_threshold(quantile(all, std::ssize(all) - 1 - std::min(kept, std::ssize(all) - 1)), 0, stream);
  }
  static double quantile(std::vector<double> scores, std::int64_t at) {
    std::nth_element(scores.begin(), scores.begin() + at, scores.end());
    return scores[static_cast<std::size_t>(at)];
  }
  void set_threshold(double threshold, std::size_t level, cuda::StreamHandle stream) {
    cuda::copy(step_.as<cuda::ClusterStep>() + level, &threshold, sizeof threshold, stream);
    calibrated_ = true;
  }

  ClusterSegment segment_;
  ClusterPlan plan_;
  std::vector<std::vector<float>> centroids_;  // [levels][nodes, d]
  bool calibrated_ = false;
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_clusters_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                         std::uint64_t seed) {
  const ClusterPlan plan = cluster_plan(spec, geometry.max_tokens);
  if (std::ssize(plan.nodes) > kMostDeviceLevels || spec.text("tail").value_or("off") == "on" ||
      (has_spreads(spec) && !has_whole_centroids(spec)) ||
      spec.text("average").value_or("squares") == "plain" || !spec.dense.from_context ||
      !cuda::can_choose_buckets() || geometry.sequences > 1 || !fits(plan, geometry))
    return nullptr;
  return std::make_unique<MadeUpClusters>(spec, geometry, seed);
}

}  // namespace lode
