// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/squeezed/clusters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/cancel.h"
#include "kernels/cuda/saap/probe.h"
#include "kernels/cuda/squeezed/cluster_block.h"
#include "kernels/cuda/squeezed/drop_rows.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

static_assert(kMostDeviceLevels == cuda::kMostClusterLevels);

namespace {

cuda::CentroidKind kind_of(const ClusterTree& tree) {
  if (tree.type != DType::q8) return cuda::CentroidKind::f16;
  return tree.levels[0].spreads.empty() ? cuda::CentroidKind::q8 : cuda::CentroidKind::q8_spreads;
}

[[noreturn]] void refuse(const Spec& spec, std::int64_t nodes) {
  throw InputError(
      fmt::format("attention spec '{}': expected fewer clusters on a GPU, found {}; "
                  "the CPU takes any",
                  spec.str(), nodes));
}

/// Halves of a level's centroids, divided by `scale`.
std::vector<std::uint16_t> halves_of(const ClusterLevel& level, DType type, float scale) {
  const std::vector<std::byte>& bytes = level.centroids;
  std::vector<std::uint16_t> halves(bytes.size() / static_cast<std::size_t>(bytes_of(type)));
  if (type == DType::f16 && scale == 1.0f) {
    std::memcpy(halves.data(), bytes.data(), bytes.size());
    return halves;
  }
  std::vector<float> wide(halves.size());
  kernels().widen(bytes.data(), type, std::ssize(wide), wide.data());
  for (float& x : wide) x /= scale;
  kernels().narrow(wide.data(), std::ssize(wide), DType::f16, reinterpret_cast<std::byte*>(halves.data()));
  return halves;
}

cuda::ByteCentroids bytes_of_level(const ClusterLevel& level) {
  return {.centroids = level.centroids,
          .scales = level.scales,
          .spreads = level.spreads,
          .spread_scales = level.spread_scales};
}

/// The power of two by which centroids must be divided to be halves.
float scale_of(const ClusterChoice& choice, int head) {
  float most = 0.0f;
  for (const ClusterSegment& segment : choice.segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    if (tree.type != DType::f32) continue;
    for (const ClusterLevel& level : tree.levels) {
      std::vector<float> wide(level.centroids.size() / static_cast<std::size_t>(bytes_of(tree.type)));
      kernels().widen(level.centroids.data(), tree.type, std::ssize(wide), wide.data());
      for (const float x : wide) most = std::max(most, std::abs(x));
    }
  }
  constexpr float kFits = 32768.0f;
  return most > kFits ? std::exp2(std::ceil(std::log2(most / kFits))) : 1.0f;
}

/// Pageable memory: the call returns once the bytes have left.
template <class T>
void put(const cuda::Buffer& to, std::int64_t place, std::int64_t stride, const std::vector<T>& from,
         cuda::StreamHandle stream) {
  cuda::copy(to.as<std::byte>() + place * stride, from.data(), std::ssize(from) * std::int64_t{sizeof(T)},
             stream);
}

/// -1 where there is nothing.
std::vector<std::int64_t> versions_of(std::span<const std::optional<ClusterChoice>> all) {
  std::vector<std::int64_t> versions;
  for (const std::optional<ClusterChoice>& choice : all) versions.push_back(choice ? choice->version : -1);
  return versions;
}

/// How many nodes of one level are below the coarsest nodes i, i + ranks, ..., at most.
std::int64_t most_entries(const ClusterChoice& choice, int head, int ranks) {
  std::vector<std::vector<std::int64_t>> sums;  // [levels][ranks]
  std::int64_t before = 0;                      // coarsest nodes
  for (const ClusterSegment& segment : choice.segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    sums.resize(tree.levels.size(), std::vector<std::int64_t>(static_cast<std::size_t>(ranks)));
    std::vector<std::int32_t> bounds(static_cast<std::size_t>(tree.levels[0].nodes()) + 1);
    for (std::size_t i = 0; i < bounds.size(); ++i) bounds[i] = static_cast<std::int32_t>(i);
    for (std::size_t l = 0; l < tree.levels.size(); ++l) {
      for (std::size_t i = 0; i + 1 < bounds.size(); ++i)
        sums[l][(static_cast<std::size_t>(before) + i) % static_cast<std::size_t>(ranks)] +=
            bounds[i + 1] - bounds[i];
      for (std::int32_t& bound : bounds) bound = tree.levels[l].first[static_cast<std::size_t>(bound)];
    }
    before += tree.levels[0].nodes();
  }
  std::int64_t most = 0;
  for (const auto& level : sums) most = std::max(most, *std::max_element(level.begin(), level.end()));
  return most;
}

/// Of a KV head.
std::int64_t most_leaves(std::span<const std::optional<ClusterChoice>> all, int first, int kv_heads) {
  std::int64_t most = 0;
  for (const std::optional<ClusterChoice>& choice : all)
    for (int head = first; choice && head < first + kv_heads; ++head)
      most = std::max(most, most_entries(*choice, head, /*ranks=*/1));
  return most;
}

}  // namespace

GpuClusters::GpuClusters(const Spec& spec, const GpuGeometry& geometry, std::vector<bool> layers,
                         Source source, bool host_index)
    : spec_(spec),
      geometry_(geometry),
      layers_(std::move(layers)),
      source_(std::move(source)),
      any_levels_(spec.text("levels").value_or("1") != "1"),
      several_(any_levels_),
      host_index_(host_index),
      stretch_of_questions_(spec.integer("block", 0, 1, 1 << 20)),
      versions_(layers_.size(), -1) {
  const std::int64_t lists = lists_per_layer();
  rows_ = cuda::Buffer(lists * geometry.max_tokens * 4, "the rows of chosen clusters");
  counts_ = cuda::Buffer(geometry.layers * counts_per_layer() * 4, "the counts of chosen clusters");
  cuda::fill(counts_.as<void>(), 0, counts_.bytes(), geometry.stream);
  step_ = cuda::Buffer(cuda::kMostClusterLevels * sizeof(cuda::ClusterStep), "the threshold of a step");
  staged_ = cuda::PinnedBuffer(cuda::kMostClusterLevels * sizeof(cuda::ClusterStep));
}

GpuClusters::Choices GpuClusters::choices() const {
  Choices all(layers_.size());
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!layers_[layer]) continue;
    all[layer] = source_(static_cast<int>(layer));
    if (!all[layer]) return {};
  }
  return all;
}

bool GpuClusters::has_several(const Choices& all) const {
  const auto& segments = all[static_cast<std::size_t>(first_layer())]->segments;
  return !segments.empty() && segments[0].heads[0].levels.size() > 1;
}

bool GpuClusters::fits(const Choices& all) const {
  std::vector<std::int64_t> versions = versions_of(all);
  if (any_levels_ && versions != looked_at_) {
    int entries = 0;
    fits_ = has_several(all)
                ? ranks_for(all, entries) > 0
                : cuda::fits_cluster_choice(most_leaves(all, geometry_.first_head, geometry_.kv_heads),
                                            geometry_.head_dim, geometry_.kv_heads);
    looked_at_ = std::move(versions);
  }
  return fits_;
}

bool GpuClusters::chooses() const {
  if (!any_levels_) return source_(first_layer()).has_value();
  const Choices all = choices();
  return !all.empty() && fits(all);
}

bool GpuClusters::prepare(const GpuKeys&, cuda::StreamHandle stream) {
  const Choices all = choices();
  if (all.empty() || !fits(all)) return false;
  std::vector<std::int64_t> versions = versions_of(all);
  if (versions == versions_) return false;
  std::fill(versions_.begin(), versions_.end(), -1);  // a failure must not leave half of it in use
  allocate(all);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!all[layer]) continue;
    check_cancel();
    take(static_cast<int>(layer), *all[layer], stream);
    squares_ = all[layer]->squares;
  }
  versions_ = std::move(versions);
  return true;
}

void GpuClusters::allocate(const Choices& all) {
  const int first = geometry_.first_head;
  most_nodes_ = most_keys_ = 1;
  nodes_of_layer_ = 0;
  std::int64_t sum = 0, layers = 0;
  for (const std::optional<ClusterChoice>& choice : all) {
    if (!choice) continue;
    ++layers;
    if (!choice->segments.empty()) kind_ = kind_of(choice->segments[0].heads[0]);
    for (int head = first; head < first + geometry_.kv_heads; ++head) {
      std::int64_t nodes = 0, keys = 0;
      for (const ClusterSegment& segment : choice->segments) {
        for (const ClusterLevel& level : segment.heads[static_cast<std::size_t>(head)].levels)
          nodes += level.nodes();
        keys += segment.end - segment.begin;
      }
      sum += nodes;
      most_nodes_ = std::max(most_nodes_, nodes);
      most_keys_ = std::max(most_keys_, keys);
    }
  }
  nodes_of_layer_ = sum / std::max<std::int64_t>(1, layers);
  several_ = has_several(all);
  levels_.clear();
  if (several_) {
    allocate_levels(all);
  } else if (!cuda::fits_cluster_choice(most_nodes_, geometry_.head_dim, geometry_.kv_heads)) {
    refuse(spec_, most_nodes_);
  }
  const std::int64_t heads = std::int64_t{geometry_.layers} * geometry_.kv_heads,
                     parts = std::ssize(all[static_cast<std::size_t>(first_layer())]->segments);
  const auto fresh = [&](cuda::Buffer& buffer, std::int64_t bytes) {
    buffer = {};
    buffer = cuda::Buffer(bytes, "an index of clusters");
  };
  if (!several_) {
    fresh(centroids_, heads * centroid_bytes());
    fresh(first_, heads * (most_nodes_ + 1) * 4);
  }
  fresh(scales_, heads * 4);
  fresh(cluster_rows_, heads * most_keys_ * 4);
  fresh(nodes_, heads * (parts + 1) * 4);
  if (looks_up_blocks())
    fresh(block_, cuda::BlockScratch(geometry_.most_tokens, geometry_.query_heads, geometry_.kv_heads,
                                     geometry_.head_dim, most_nodes_, kind_)
                      .bytes);
}

void GpuClusters::take(int layer, const ClusterChoice& choice, cuda::StreamHandle stream) {
  ends_.clear();
  for (const ClusterSegment& segment : choice.segments) ends_.push_back(segment.end);
  for (int head = 0; head < geometry_.kv_heads; ++head)
    take_head(std::int64_t{layer} * geometry_.kv_heads + head, geometry_.first_head + head, choice, stream);
}

void GpuClusters::take_head(std::int64_t place, int head, const ClusterChoice& choice,
                            cuda::StreamHandle stream) {
  std::vector<std::byte> packed(several_ ? 0 : static_cast<std::size_t>(centroid_bytes()));
  std::vector<std::int32_t> first = {0}, rows, nodes = {0};
  const float scale = scale_of(choice, head);
  for (const ClusterSegment& segment : choice.segments) {
    const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
    const ClusterLevel& top = tree.levels[0];
    if (!several_) {
      if (tree.type == DType::q8)
        cuda::pack_centroids(bytes_of_level(top), geometry_.head_dim, nodes.back(), packed.data());
      else
        cuda::pack_centroids(halves_of(top, tree.type, scale), geometry_.head_dim, nodes.back(),
                             packed.data());
      const auto before = static_cast<std::int32_t>(rows.size());
      for (std::size_t i = 1; i < top.first.size(); ++i) first.push_back(before + top.first[i]);
    }
    rows.insert(rows.end(), tree.rows.begin(), tree.rows.end());
    nodes.push_back(nodes.back() + top.nodes());
  }
  put(scales_, place, 4, std::vector<float>{scale}, stream);
  put(cluster_rows_, place, most_keys_ * 4, rows, stream);
  put(nodes_, place, std::ssize(nodes) * 4, nodes, stream);
  if (several_) return take_levels(place, head, choice, scale, stream);
  put(centroids_, place, centroid_bytes(), packed, stream);
  put(first_, place, (most_nodes_ + 1) * 4, first, stream);
}

void GpuClusters::take_levels(std::int64_t place, int head, const ClusterChoice& choice, float scale,
                              cuda::StreamHandle stream) {
  const std::int64_t row = cuda::cluster_row_bytes(geometry_.head_dim, kind_);
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    std::vector<std::byte> rows(static_cast<std::size_t>(levels_[l].most_nodes * row));
    std::vector<cuda::ClusterNode> nodes;
    std::int32_t before = 0;  // children in the parts before
    for (const ClusterSegment& segment : choice.segments) {
      const ClusterTree& tree = segment.heads[static_cast<std::size_t>(head)];
      const ClusterLevel& level = tree.levels[l];
      std::byte* const to = rows.data() + std::ssize(nodes) * row;
      if (tree.type == DType::q8)
        cuda::pack_cluster_rows(bytes_of_level(level), geometry_.head_dim, to);
      else
        cuda::pack_cluster_rows(halves_of(level, tree.type, scale), geometry_.head_dim, to);
      for (std::size_t i = 0; i < level.keys.size(); ++i)
        nodes.push_back({.scale = level.scales.empty() ? 1.0f : level.scales[i],
                         .root = level.spread_scales.empty() ? 0.0f : std::sqrt(level.spread_scales[i]),
                         .keys = level.keys[i],
                         .first = before + level.first[i]});
      before += level.first.back();
    }
    nodes.push_back({.first = before});
    put(levels_[l].rows, place, std::ssize(rows), rows, stream);
    put(levels_[l].nodes, place, (levels_[l].most_nodes + 1) * std::int64_t{sizeof(cuda::ClusterNode)}, nodes,
        stream);
  }
}

int GpuClusters::ranks_for(const Choices& all, int& entries) const {
  const auto& segments = all[static_cast<std::size_t>(first_layer())]->segments;
  if (!segments.empty() && std::ssize(segments[0].heads[0].levels) > cuda::kMostClusterLevels) return 0;
  const int first = geometry_.first_head;
  for (const int ranks : cuda::cluster_level_ranks(geometry_.kv_heads)) {
    std::int64_t most = 0;
    for (const std::optional<ClusterChoice>& choice : all)
      for (int head = first; choice && head < first + geometry_.kv_heads; ++head)
        most = std::max(most, most_entries(*choice, head, ranks));
    entries = static_cast<int>(most);
    if (cuda::fits_cluster_levels(most, geometry_.head_dim)) return ranks;
  }
  return 0;
}

void GpuClusters::allocate_levels(const Choices& all) {
  ranks_ = ranks_for(all, most_entries_);
  LODE_ASSERT(ranks_ > 0);  // chooses() says so
  const auto& segments = all[static_cast<std::size_t>(first_layer())]->segments;
  levels_.resize(segments[0].heads[0].levels.size());
  LODE_ASSERT(std::ssize(levels_) <= cuda::kMostClusterLevels);
  const std::int64_t heads = std::int64_t{geometry_.layers} * geometry_.kv_heads;
  const int first = geometry_.first_head;
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    for (const std::optional<ClusterChoice>& choice : all) {
      for (int head = first; choice && head < first + geometry_.kv_heads; ++head) {
        std::int64_t nodes = 0;
        for (const ClusterSegment& segment : choice->segments)
          nodes += segment.heads[static_cast<std::size_t>(head)].levels[l].nodes();
        levels_[l].most_nodes = std::max(levels_[l].most_nodes, nodes);
      }
    }
    const std::int64_t nodes = levels_[l].most_nodes,
                       row = cuda::cluster_row_bytes(geometry_.head_dim, kind_);
    levels_[l].rows = cuda::Buffer(heads * nodes * row, "an index of clusters");
    levels_[l].nodes =
        cuda::Buffer(heads * (nodes + 1) * std::int64_t{sizeof(cuda::ClusterNode)}, "an index of clusters");
  }
}

bool GpuClusters::looks_up_blocks() const {
  const bool exact = geometry_.key_row_bytes == geometry_.head_dim * 4;  // a store of f32
  return !exact && !several_ && geometry_.most_tokens > geometry_.most_queries &&
         cuda::can_choose_for_block(geometry_.head_dim);
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
  auto* const steps = staged_.as<cuda::ClusterStep>();
  const QueryKind kind = alone ? QueryKind::alone : QueryKind::together;
  spreads_ = adds(choice->spreads, kind);
  cuda::ClusterStep to = {
      .threshold = 0.0, .parts = 0, .begin = sink, .end = sink, .spreads = spreads_ ? 1 : 0};
  while (to.parts < std::ssize(ends_) && ends_[static_cast<std::size_t>(to.parts)] <= far_end)
    to.end = ends_[static_cast<std::size_t>(to.parts++)];
  std::fill_n(steps, cuda::kMostClusterLevels, to);
  // Of a question that is cut into stretches, also the last and shorter one has theirs, as on the host.
  listed_end_ = far_end > step.listed_end ? step.listed_end : 0;
  const std::int64_t together = stretch_of_questions_ == 0 ? count : stretch_of_questions_;
  for (int l = 0; l < choice->thresholds.levels(); ++l)
    steps[l].threshold = choice->thresholds.of(kind, together, l);
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

void GpuClusters::choose(int layer, const cuda::ClusterChoiceTask& task, const cuda::Queries& queries,
                         cuda::StreamHandle stream) const {
  if (!several_) return choose_clusters(task, queries, stream);
  cuda::ClusterLevelsTask all = {.choice = task,
                                 .levels = static_cast<int>(levels_.size()),
                                 .level = {},
                                 .compared = task.counts + lists_per_layer(),
                                 .ranks = ranks_,
                                 .most_entries = most_entries_};
  const std::int64_t place = std::int64_t{layer} * geometry_.kv_heads,
                     row = cuda::cluster_row_bytes(geometry_.head_dim, kind_);
  for (std::size_t l = 0; l < levels_.size(); ++l) {
    const Level& level = levels_[l];
    all.level[l] = {.rows = level.rows.as<std::byte>() + place * level.most_nodes * row,
                    .nodes = level.nodes.as<cuda::ClusterNode>() + place * (level.most_nodes + 1),
                    .most_nodes = static_cast<int>(level.most_nodes)};
  }
  choose_clusters_of_levels(all, queries, stream);
}

std::int64_t GpuClusters::node_bytes() const {
  const std::int64_t d = geometry_.head_dim, coded = d + 4;
  if (several_)
    return cuda::cluster_row_bytes(geometry_.head_dim, kind_) + std::int64_t{sizeof(cuda::ClusterNode)};
  const bool reads_spreads = spreads_ || stretch_ <= geometry_.most_queries || !looks_up_blocks();
  return 4 + (kind_ == cuda::CentroidKind::f16                    ? 2 * d
              : kind_ == cuda::CentroidKind::q8 || !reads_spreads ? coded
                                                                  : coded + spread_dims(d) + 4);
}

std::int64_t GpuClusters::level_bytes() const {
  std::int64_t bytes = 0;
  for (const Level& level : levels_) bytes += level.rows.bytes() + level.nodes.bytes();
  return bytes;
}

std::int64_t GpuClusters::select_bytes(const CountedToken& of, std::span<const int> heads,
                                       std::int64_t chosen) const {
  std::int64_t nodes = nodes_of_layer_ * std::ssize(heads) / geometry_.kv_heads;
  if (several_) {
    const std::int32_t* const compared = of.counts + of.layer * counts_per_layer() + lists_per_layer() +
                                         std::int64_t{of.token} * geometry_.kv_heads;
    nodes = 0;
    for (const int head : heads) nodes += compared[head];
  }
  return nodes * node_bytes() + chosen * 4;
}

cuda::RowLists GpuClusters::select_together(int layer, const cuda::Queries& all, cuda::StreamHandle stream) {
  LODE_ASSERT(stretch_ == all.count);
  cuda::ClusterChoiceTask shared = task(layer);
  shared.listed = 1;
  if (looks_up_blocks()) {
    choose_clusters_for_block(shared, all, spreads_, block_.as<void>(), stream);
  } else {
    choose(layer, shared, all, stream);
  }
  return lists(layer);
}

cuda::RowLists GpuClusters::select(int layer, const cuda::Queries& queries, const float*,
                                   cuda::StreamHandle stream) {
  const cuda::ClusterChoiceTask all = task(layer);
  choose(layer, all, queries, stream);
  if (listed_end_ > 0)
    cuda::drop_rows(all.rows, all.counts, all.capacity,
                    std::int64_t{std::min(queries.count, all.listed)} * geometry_.kv_heads, listed_end_,
                    stream);
  return lists(layer);
}

std::unique_ptr<GpuSelector> make_gpu_clusters(const Spec& spec, const GpuGeometry& geometry,
                                               std::span<Selector* const> selectors) {
  const std::int64_t stretch = spec.integer("block", 0, 1, 1 << 20);
  const std::int64_t nodes = spec.amount("clusters", {0.05, true}).of(geometry.max_tokens);
  const bool several = spec.text("levels").value_or("1") != "1";
  // Twice: a text that is indexed in parts has a last cluster in each. A plan's window slides.
  if (!spec.dense.from_context || !geometry.covered.empty() || stretch > geometry.most_tokens ||
      !cuda::can_choose_buckets() ||
      !(several ? cuda::fits_cluster_levels(2 * nodes / cuda::cluster_level_ranks(geometry.kv_heads).back(),
                                            geometry.head_dim)
                : cuda::fits_cluster_choice(2 * nodes, geometry.head_dim, geometry.kv_heads)))
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

}  // namespace lode
