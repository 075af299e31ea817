// SPDX-License-Identifier: Apache-2.0
// squeezed on the GPU: the clusters and thresholds that the host has found of the context, copied whenever
// they change; one launch a layer scores all centroids, compares and lists the keys
// (kernels/cuda/clusters.h). One level without a tail, over a context whose window does not slide: there
// nothing joins the index inside of steps. Everything else is chosen on the host.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "base/cancel.h"
#include "base/rng.h"
#include "gpu/selectors.h"
#include "kernels/cuda/classifier.h"
#include "kernels/cuda/cluster_block.h"
#include "kernels/cuda/clusters.h"
#include "kernels/cuda/device.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/cluster_choice.h"

namespace lode {

namespace {

class GpuClusters : public GpuSelector {
 public:
  /// Clusters of a layer; nothing while the host chooses.
  using Source = std::function<std::optional<ClusterChoice>(int layer)>;

  GpuClusters(const Spec& spec, const GpuGeometry& geometry, std::vector<bool> layers, Source source,
              bool host_index)
      : spec_(spec),
        geometry_(geometry),
        layers_(std::move(layers)),
        source_(std::move(source)),
        host_index_(host_index),
        stretch_of_questions_(spec.integer("block", 0, 1, 1 << 20)),
        versions_(layers_.size(), -1) {
    const std::int64_t lists = counts_per_layer();
    rows_ = cuda::Buffer(lists * geometry.max_tokens * 4, "the rows of chosen clusters");
    counts_ = cuda::Buffer(geometry.layers * lists * 4, "the counts of chosen clusters");
    cuda::fill(counts_.as<void>(), 0, counts_.bytes(), geometry.stream);
    step_ = cuda::Buffer(sizeof(cuda::ClusterStep), "the threshold of a step");
    staged_ = cuda::PinnedBuffer(sizeof(cuda::ClusterStep));
  }

  bool needs_host_index() const override { return host_index_; }
  bool chooses() const override { return source_(first_layer()).has_value(); }
  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override;
  std::int64_t most_tokens(std::int64_t, Phase phase) const override {
    if (phase != Phase::question) return geometry_.most_queries;
    if (stretch_of_questions_ == 0) return geometry_.most_tokens;
    // Whole stretches; a longer one is a step of its own.
    return std::max(stretch_of_questions_,
                    geometry_.most_queries / stretch_of_questions_ * stretch_of_questions_);
  }
  bool chooses_together() const override { return true; }
  std::int64_t most_together() const override { return geometry_.most_tokens; }
  void begin(const GpuStep& step) override;
  cuda::RowLists select_together(int layer, const cuda::Queries& all, cuda::StreamHandle stream) override;
  int counted_token(int t) const override { return stretch_ > geometry_.most_queries ? 0 : t; }
  void upload(cuda::StreamHandle stream) override {
    cuda::copy(step_.as<void>(), staged_.as<void>(), step_.bytes(), stream);
  }
  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override;
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  std::int64_t counts_per_layer() const override {
    return std::int64_t{geometry_.most_queries} * geometry_.kv_heads;
  }
  int lists_per_head() const override { return 1; }
  /// Centroids with their numbers of keys, and the rows that are copied.
  std::int64_t select_bytes(std::int64_t, std::int64_t chosen) const override {
    const std::int64_t d = geometry_.head_dim, coded = d + 4,
                       node = kind_ == cuda::CentroidKind::f16  ? 2 * d
                              : kind_ == cuda::CentroidKind::q8 ? coded
                                                                : coded + spread_dims(d) + 4;
    return nodes_of_layer_ * (node + 4) + chosen * 4;
  }
  std::int64_t bytes() const override {
    return centroids_.bytes() + scales_.bytes() + first_.bytes() + cluster_rows_.bytes() + nodes_.bytes() +
           rows_.bytes() + counts_.bytes() + block_.bytes();
  }

 protected:
  int first_layer() const {
    return static_cast<int>(std::find(layers_.begin(), layers_.end(), true) - layers_.begin());
  }

  Spec spec_;
  GpuGeometry geometry_;
  std::vector<bool> layers_;
  Source source_;
  cuda::Buffer step_;                                  // ClusterStep
  cuda::CentroidKind kind_ = cuda::CentroidKind::f16;  ///< of all layers
  cuda::Buffer block_;  ///< cuda::BlockScratch of most_tokens; none where the GPU does not choose for blocks

 private:
  std::int64_t centroid_bytes() const {  // of a head
    return cuda::centroid_bytes(most_nodes_, geometry_.head_dim, kind_);
  }
  void allocate(std::span<const std::optional<ClusterChoice>> all);
  void take(int layer, const ClusterChoice& choice, cuda::StreamHandle stream);
  void take_head(std::int64_t place, int head, const ClusterChoice& choice, cuda::StreamHandle stream);
  cuda::ClusterTables tables(int layer) const;
  cuda::ClusterChoiceTask task(int layer) const;
  cuda::RowLists lists(int layer) const;

  bool host_index_ = false;
  std::int64_t stretch_of_questions_ = 0;  ///< 0: the whole question
  std::vector<std::int64_t> versions_;     // [L] of what is on the device
  std::vector<Position> ends_;             // [parts]
  int stretch_ = 1;                        ///< of the running step
  bool squares_ = false;                   ///< how the clusters that are on the device are chosen
  std::int64_t most_nodes_ = 0, most_keys_ = 0, nodes_of_layer_ = 0;
  cuda::Buffer centroids_;     // [L, Hkv, centroid_bytes()]
  cuda::Buffer scales_;        // [L, Hkv]
  cuda::Buffer first_;         // [L, Hkv, most_nodes + 1]
  cuda::Buffer cluster_rows_;  // [L, Hkv, most_keys]
  cuda::Buffer nodes_;         // [L, Hkv, parts + 1]
  cuda::Buffer rows_;          // [most_queries, Hkv, max_tokens]
  cuda::Buffer counts_;        // [L, most_queries, Hkv]
  cuda::PinnedBuffer staged_;  // ClusterStep
};

bool GpuClusters::prepare(const GpuKeys&, cuda::StreamHandle stream) {
  std::vector<std::optional<ClusterChoice>> all(layers_.size());
  bool changed = false;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!layers_[layer]) continue;
    all[layer] = source_(static_cast<int>(layer));
    if (!all[layer]) return false;  // the host chooses
    changed = changed || all[layer]->version != versions_[layer];
  }
  if (!changed) return false;
  std::fill(versions_.begin(), versions_.end(), -1);  // a failure must not leave half of it in use
  allocate(all);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!all[layer]) continue;
    check_cancel();
    take(static_cast<int>(layer), *all[layer], stream);
  }
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!all[layer]) continue;
    versions_[layer] = all[layer]->version;
    squares_ = all[layer]->squares;
  }
  return true;
}

cuda::CentroidKind kind_of(const ClusterTree& tree) {
  if (tree.type != DType::q8) return cuda::CentroidKind::f16;
  return tree.levels[0].spreads.empty() ? cuda::CentroidKind::q8 : cuda::CentroidKind::q8_spreads;
}

void GpuClusters::allocate(std::span<const std::optional<ClusterChoice>> all) {
  most_nodes_ = most_keys_ = 1;
  nodes_of_layer_ = 0;
  std::int64_t sum = 0, layers = 0;
  for (const std::optional<ClusterChoice>& choice : all) {
    if (!choice) continue;
    ++layers;
    if (!choice->segments.empty()) kind_ = kind_of(choice->segments[0].heads[0]);
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      std::int64_t nodes = 0, keys = 0;
      for (const ClusterSegment& segment : choice->segments) {
        nodes += segment.heads[static_cast<std::size_t>(head)].levels[0].nodes();
        keys += segment.end - segment.begin;
      }
      sum += nodes;
      most_nodes_ = std::max(most_nodes_, nodes);
      most_keys_ = std::max(most_keys_, keys);
    }
  }
  nodes_of_layer_ = sum / std::max<std::int64_t>(1, layers);
  if (!cuda::fits_cluster_choice(most_nodes_, geometry_.head_dim, geometry_.kv_heads)) {
    throw InputError(
        fmt::format("attention spec '{}': expected fewer clusters with --device cuda, found {}; "
                    "--device cpu takes any",
                    spec_.str(), most_nodes_));
  }
  const std::int64_t heads = std::int64_t{geometry_.layers} * geometry_.kv_heads,
                     parts = std::ssize(all[static_cast<std::size_t>(first_layer())]->segments);
  const auto fresh = [&](cuda::Buffer& buffer, std::int64_t bytes) {
    buffer = {};
    buffer = cuda::Buffer(bytes, "an index of clusters");
  };
  fresh(centroids_, heads * centroid_bytes());
  fresh(scales_, heads * 4);
  fresh(first_, heads * (most_nodes_ + 1) * 4);
  fresh(cluster_rows_, heads * most_keys_ * 4);
  fresh(nodes_, heads * (parts + 1) * 4);
  const bool exact = geometry_.key_row_bytes == geometry_.head_dim * 4;  // a store of f32
  if (!exact && geometry_.most_tokens > geometry_.most_queries &&
      cuda::can_choose_for_block(geometry_.head_dim, kind_))
    fresh(block_, cuda::BlockScratch(geometry_.most_tokens, geometry_.query_heads, geometry_.kv_heads,
                                     geometry_.head_dim, most_nodes_, kind_)
                      .bytes);
}

void GpuClusters::take(int layer, const ClusterChoice& choice, cuda::StreamHandle stream) {
  ends_.clear();
  for (const ClusterSegment& segment : choice.segments) ends_.push_back(segment.end);
  for (int head = 0; head < geometry_.kv_heads; ++head)
    take_head(std::int64_t{layer} * geometry_.kv_heads + head, head, choice, stream);
}

/// Halves of a tree's centroids, divided by `scale`.
std::vector<std::uint16_t> halves_of(const ClusterTree& tree, float scale) {
  const std::vector<std::byte>& bytes = tree.levels[0].centroids;
  std::vector<std::uint16_t> halves(bytes.size() / static_cast<std::size_t>(bytes_of(tree.type)));
  if (tree.type == DType::f16 && scale == 1.0f) {
    std::memcpy(halves.data(), bytes.data(), bytes.size());
    return halves;
  }
  std::vector<float> wide(halves.size());
  kernels().widen(bytes.data(), tree.type, std::ssize(wide), wide.data());
  for (float& x : wide) x /= scale;
  kernels().narrow(wide.data(), std::ssize(wide), DType::f16, reinterpret_cast<std::byte*>(halves.data()));
  return halves;
}

void pack(const ClusterTree& tree, float scale, int head_dim, std::int64_t first_node, std::byte* to) {
  const ClusterLevel& level = tree.levels[0];
  if (tree.type != DType::q8) return cuda::pack_centroids(halves_of(tree, scale), head_dim, first_node, to);
  cuda::pack_centroids({.centroids = level.centroids,
                        .scales = level.scales,
                        .spreads = level.spreads,
                        .spread_scales = level.spread_scales},
                       head_dim, first_node, to);
}

/// The power of two by which centroids must be divided to be halves.
float scale_of(const ClusterChoice& choice, int head) {
  float most = 0.0f;
  for (const ClusterSegment& segment : choice.segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    if (tree.type != DType::f32) continue;
    std::vector<float> wide(tree.levels[0].centroids.size() / static_cast<std::size_t>(bytes_of(tree.type)));
    kernels().widen(tree.levels[0].centroids.data(), tree.type, std::ssize(wide), wide.data());
    for (const float x : wide) most = std::max(most, std::abs(x));
  }
  constexpr float kFits = 32768.0f;
  return most > kFits ? std::exp2(std::ceil(std::log2(most / kFits))) : 1.0f;
}

void GpuClusters::take_head(std::int64_t place, int head, const ClusterChoice& choice,
                            cuda::StreamHandle stream) {
  std::vector<std::byte> packed(static_cast<std::size_t>(centroid_bytes()));
  std::vector<std::int32_t> first = {0}, rows, nodes = {0};
  const float scale = scale_of(choice, head);
  for (const ClusterSegment& segment : choice.segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    pack(tree, scale, geometry_.head_dim, nodes.back(), packed.data());
    const auto before = static_cast<std::int32_t>(rows.size());
    for (std::size_t i = 1; i < tree.levels[0].first.size(); ++i)
      first.push_back(before + tree.levels[0].first[i]);
    rows.insert(rows.end(), tree.rows.begin(), tree.rows.end());
    nodes.push_back(nodes.back() + tree.levels[0].nodes());
  }
  // Pageable memory: the calls return once the bytes have left.
  const auto put = [&](const cuda::Buffer& to, std::int64_t stride, const auto& from) {
    cuda::copy(to.as<std::byte>() + place * stride, from.data(),
               std::ssize(from) * std::int64_t{sizeof(from[0])}, stream);
  };
  put(centroids_, centroid_bytes(), packed);
  put(scales_, 4, std::vector<float>{scale});
  put(first_, (most_nodes_ + 1) * 4, first);
  put(cluster_rows_, most_keys_ * 4, rows);
  put(nodes_, std::ssize(nodes) * 4, nodes);
}

void GpuClusters::begin(const GpuStep& step) {
  const std::optional<ClusterChoice> choice = source_(first_layer());
  LODE_ASSERT(choice.has_value());
  const std::int64_t count = std::ssize(step.queries);
  const bool alone = step.phase != Phase::question || stretch_of_questions_ == 1;
  stretch_ = static_cast<int>(alone                        ? 1
                              : stretch_of_questions_ == 0 ? count
                                                           : std::min(stretch_of_questions_, count));
  const auto sink = static_cast<Position>(spec_.dense.sink);
  const std::int64_t far_end = std::min<std::int64_t>(
      std::int64_t{step.queries.front().position} + 1 - spec_.dense.window, step.far_limit);
  cuda::ClusterStep& to = *staged_.as<cuda::ClusterStep>();
  to = {.threshold =
            choice->thresholds[static_cast<std::size_t>(alone ? QueryKind::alone : QueryKind::together)],
        .parts = 0,
        .begin = sink,
        .end = sink};
  while (to.parts < std::ssize(ends_) && ends_[static_cast<std::size_t>(to.parts)] <= far_end)
    to.end = ends_[static_cast<std::size_t>(to.parts++)];
}

cuda::ClusterTables GpuClusters::tables(int layer) const {
  const std::int64_t place = std::int64_t{layer} * geometry_.kv_heads, parts = std::ssize(ends_);
  return {.kind = kind_,
          .centroids = centroids_.as<std::byte>() + place * centroid_bytes(),
          .scales = scales_.as<float>() + place,
          .first = first_.as<std::int32_t>() + place * (most_nodes_ + 1),
          .rows = cluster_rows_.as<std::int32_t>() + place * most_keys_,
          .nodes = nodes_.as<std::int32_t>() + place * (parts + 1),
          .most_keys = most_keys_,
          .most_nodes = static_cast<int>(most_nodes_),
          .most_parts = static_cast<int>(parts)};
}

cuda::ClusterChoiceTask GpuClusters::task(int layer) const {
  return {.tables = tables(layer),
          .step = step_.as<cuda::ClusterStep>(),
          .stretch = stretch_,
          .squares = squares_,
          .listed = geometry_.most_queries,
          .window = spec_.dense.window,
          .rows = rows_.as<std::int32_t>(),
          .counts = counts_.as<std::int32_t>() + layer * counts_per_layer(),
          .capacity = geometry_.max_tokens};
}

cuda::RowLists GpuClusters::lists(int layer) const {
  return {.rows = rows_.as<std::int32_t>(),
          .counts = counts_.as<std::int32_t>() + layer * counts_per_layer(),
          .capacity = geometry_.max_tokens,
          .lists_per_head = 1,
          .sink = spec_.dense.sink,
          .window = spec_.dense.window};
}

cuda::RowLists GpuClusters::select_together(int layer, const cuda::Queries& all, cuda::StreamHandle stream) {
  LODE_ASSERT(stretch_ == all.count);
  cuda::ClusterChoiceTask shared = task(layer);
  shared.listed = 1;
  if (block_.bytes() > 0) {
    choose_clusters_for_block(shared, all, block_.as<void>(), stream);
  } else {
    choose_clusters(shared, all, stream);
  }
  return lists(layer);
}

cuda::RowLists GpuClusters::select(int layer, const cuda::Queries& queries, const float*,
                                   cuda::StreamHandle stream) {
  choose_clusters(task(layer), queries, stream);
  return lists(layer);
}

bool has_whole_centroids(const Spec& spec) {
  return spec.text("centroids").value_or("q8") == "q8";
}
bool has_spreads(const Spec& spec) {
  return spec.text("spread").value_or(has_whole_centroids(spec) ? "on" : "off") == "on";
}

/// For the bench: clusters of random keys with random centroids, the same in all heads and layers, and the
/// threshold that keeps the wanted share for the first queries that come.
class MadeUpClusters final : public GpuClusters {
 public:
  MadeUpClusters(const Spec& spec, const GpuGeometry& geometry, std::uint64_t seed)
      : GpuClusters(
            spec, geometry, std::vector<bool>(static_cast<std::size_t>(geometry.layers), true),
            [this](int) {
              return std::optional(ClusterChoice{.version = 0, .segments = {&segment_, 1}, .squares = true});
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
    if (block_.bytes() > 0) {
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
    const std::int64_t keys = std::max(1, end - sink), d = geometry_.head_dim,
                       nodes = std::max<std::int64_t>(1, spec_.amount("clusters", {0.05, true}).of(keys));
    Rng rng(seed);
    ClusterTree tree;
    ClusterLevel level;
    std::vector<std::int64_t> order(static_cast<std::size_t>(keys));
    for (std::int64_t i = 0; i < keys; ++i) {  // shuffled from the inside out
      const auto at = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(i + 1)));
      order[static_cast<std::size_t>(i)] = order[static_cast<std::size_t>(at)];
      order[static_cast<std::size_t>(at)] = i;
    }
    for (std::int64_t node = 0; node <= nodes; ++node)
      level.first.push_back(static_cast<std::int32_t>(node * keys / nodes));
    for (std::int64_t node = 0; node < nodes; ++node) {
      const auto from = static_cast<std::size_t>(level.first[static_cast<std::size_t>(node)]),
                 to = static_cast<std::size_t>(level.first[static_cast<std::size_t>(node) + 1]);
      level.keys.push_back(static_cast<std::int32_t>(to - from));
      std::sort(order.begin() + static_cast<std::ptrdiff_t>(from),
                order.begin() + static_cast<std::ptrdiff_t>(to));
    }
    for (const std::int64_t key : order) tree.rows.push_back(sink + static_cast<Position>(key));
    centroids_.resize(static_cast<std::size_t>(nodes * d));
    for (float& x : centroids_) x = static_cast<float>(rng.uniform() - 0.5);
    level.centroids.resize(centroids_.size() * 2);
    kernels().narrow(centroids_.data(), std::ssize(centroids_), DType::f16, level.centroids.data());
    if (has_spreads(spec_)) {
      level.spreads.resize(static_cast<std::size_t>(nodes * spread_dims(d)));
      for (std::byte& x : level.spreads) x = static_cast<std::byte>(rng.below(128));
      level.spread_scales.assign(static_cast<std::size_t>(nodes), 1e-12f);  // no score changes by it
    }
    tree.levels = {std::move(level)};
    if (has_whole_centroids(spec_)) centroids_to_q8(tree, d);
    segment_ = {.begin = sink, .end = sink + static_cast<Position>(keys), .heads = {}};
    segment_.heads.assign(static_cast<std::size_t>(geometry_.kv_heads), tree);
  }

  /// The quantile of the first query token's scores over all heads.
  void calibrate(const cuda::Queries& queries, cuda::StreamHandle stream) {
    const std::int64_t d = geometry_.head_dim, nodes = std::ssize(centroids_) / d,
                       group = geometry_.query_heads / geometry_.kv_heads;
    std::vector<float> q(static_cast<std::size_t>(geometry_.query_heads * d)),
        z(static_cast<std::size_t>(nodes));
    cuda::copy(q.data(), queries.q, std::ssize(q) * 4, stream);
    std::vector<double> all;
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      std::vector<double> scores(static_cast<std::size_t>(nodes), 0.0);
      for (std::int64_t g = 0; g < group; ++g) {
        kernels().gemv(q.data() + (head * group + g) * d, 1, centroids_.data(), DType::f32, d, 0, nodes,
                       z.data(), nodes);
        const double most = *std::max_element(z.begin(), z.end());
        double total = 0.0;
        for (const float x : z) total += std::exp((x - most) * static_cast<double>(queries.scale));
        for (std::size_t i = 0; i < z.size(); ++i) {
          const double share = std::exp((z[i] - most) * static_cast<double>(queries.scale)) / total;
          scores[i] += share * share;
        }
      }
      all.insert(all.end(), scores.begin(), scores.end());
    }
    // Scores are shares of a node here; all nodes have as many keys, so K / N of a key is the number of
    // nodes.
    const double score = quantile(all);
    set_threshold(std::sqrt(score / static_cast<double>(group)) * static_cast<double>(nodes), stream);
  }
  /// The quantile of the scores that a block of query tokens has just made.
  void calibrate_together(const cuda::Queries& queries, cuda::StreamHandle stream) {
    const auto nodes = static_cast<std::size_t>(std::ssize(centroids_) / geometry_.head_dim);
    const cuda::BlockScratch at(queries.count, geometry_.query_heads, geometry_.kv_heads, geometry_.head_dim,
                                std::ssize(segment_.heads[0].levels[0].keys), kind_);
    std::vector<float> weights(static_cast<std::size_t>(geometry_.kv_heads * at.nodes));
    cuda::copy(weights.data(), block_.as<char>() + at.weights, std::ssize(weights) * 4, stream);
    std::vector<double> all;
    for (auto head = weights.begin(); head != weights.end(); head += at.nodes)
      all.insert(all.end(), head, head + static_cast<std::ptrdiff_t>(nodes));
    set_threshold(quantile(all), stream);
  }
  double quantile(std::vector<double>& scores) const {
    const double kept = 1.0 - spec_.number("sparsity", 0.9, 0, 0.999999);
    const auto nth =
        scores.begin() + static_cast<std::ptrdiff_t>((1.0 - kept) * static_cast<double>(scores.size() - 1));
    std::nth_element(scores.begin(), nth, scores.end());
    return *nth;
  }
  void set_threshold(double threshold, cuda::StreamHandle stream) {
    cuda::copy(step_.as<double>(), &threshold, sizeof threshold, stream);
    calibrated_ = true;
  }

  ClusterSegment segment_;
  std::vector<float> centroids_;  // [nodes, d]
  bool calibrated_ = false;
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_clusters(const Spec& spec, const GpuGeometry& geometry,
                                               std::span<Selector* const> selectors) {
  const std::int64_t stretch = spec.integer("block", 0, 1, 1 << 20);
  const std::int64_t nodes = spec.amount("clusters", {0.05, true}).of(geometry.max_tokens);
  // Twice: a text that is indexed in parts has a last cluster in each.
  if (!spec.dense.from_context || stretch > geometry.most_tokens || !cuda::can_choose_buckets() ||
      !cuda::fits_cluster_choice(2 * nodes, geometry.head_dim, geometry.kv_heads))
    return nullptr;
  std::vector<ClusterChooser*> choosers;
  std::vector<bool> layers;
  for (Selector* const selector : selectors) {
    choosers.push_back(dynamic_cast<ClusterChooser*>(selector));
    layers.push_back(selector != nullptr);
    if (selector != nullptr && (choosers.back() == nullptr || !choosers.back()->why_not_on_device().empty()))
      return nullptr;
  }
  if (std::find(layers.begin(), layers.end(), true) == layers.end()) return nullptr;
  return std::make_unique<GpuClusters>(
      spec, geometry, std::move(layers),
      [choosers](int layer) { return choosers[static_cast<std::size_t>(layer)]->cluster_choice(); }, true);
}

std::unique_ptr<GpuSelector> make_gpu_clusters_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                         std::uint64_t seed) {
  const std::int64_t nodes = spec.amount("clusters", {0.05, true}).of(geometry.max_tokens);
  if (spec.text("levels").value_or("1") != "1" || spec.text("tail").value_or("off") == "on" ||
      (has_spreads(spec) && !has_whole_centroids(spec)) ||
      spec.text("average").value_or("squares") == "plain" || !spec.dense.from_context ||
      !cuda::can_choose_buckets() || geometry.sequences > 1 ||
      !cuda::fits_cluster_choice(nodes, geometry.head_dim, geometry.kv_heads))
    return nullptr;
  return std::make_unique<MadeUpClusters>(spec, geometry, seed);
}

}  // namespace lode
