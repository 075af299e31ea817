// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/cluster_scorer.h"

#include <algorithm>
#include <span>

#include "gpu/index/lloyd.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/squeezed/score_clusters.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float), kInt = sizeof(std::int32_t);

std::int64_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlign = 256;
  return static_cast<std::int64_t>((bytes + kAlign - 1) / kAlign * kAlign);
}

/// Calls body(vector) for all that a head has.
void for_parts(auto& head, const auto& body) {
  body(head.centroids), body(head.scales), body(head.spreads), body(head.spread_scales), body(head.first);
  body(head.rows);
}

std::int64_t most_nodes(const ScoredClusters& clusters) {
  std::int64_t most = 0;
  for (const ScoredClusters::Head& head : clusters.heads) most = std::max(most, head.count());
  return most;
}

}  // namespace

std::int64_t ClusterScorer::bytes_of(const ScoredClusters& clusters) {
  std::int64_t bytes = 0;
  for (const ScoredClusters::Head& head : clusters.heads)
    for_parts(head, [&](const auto& part) { bytes += aligned(std::as_bytes(std::span(part)).size()); });
  return bytes;
}

std::int64_t ClusterScorer::scratch_bytes(const ScoredClusters& clusters, int head_dim, std::int64_t tokens,
                                          int group) {
  const std::int64_t nodes = most_nodes(clusters), heads = std::ssize(clusters.heads);
  return kFloat * (2 * tokens * group * (head_dim + nodes) + nodes * (head_dim + tokens * (1 + heads))) +
         kInt * kMostListed * heads * std::ssize(clusters.heads[0].rows);
}

void ClusterScorer::hold(int layer, const ScoredClusters& clusters, int head_dim, cuda::StreamHandle stream) {
  head_dim_ = head_dim;
  Layer to = {
      .type = clusters.type, .memory = cuda::Buffer(bytes_of(clusters), "clusters of keys"), .heads = {}};
  std::vector<std::byte> all(static_cast<std::size_t>(to.memory.bytes()));
  std::int64_t at = 0;
  for (const ScoredClusters::Head& from : clusters.heads) {
    std::vector<const void*> places;
    for_parts(from, [&](const auto& part) {
      const auto bytes = std::as_bytes(std::span(part));
      std::ranges::copy(bytes, all.begin() + at);
      places.push_back(bytes.empty() ? nullptr : to.memory.as<std::byte>() + at);
      at += aligned(bytes.size());
    });
    to.heads.push_back({.centroids = places[0],
                        .spreads = places[2],
                        .scales = static_cast<const float*>(places[1]),
                        .spread_scales = static_cast<const float*>(places[3]),
                        .first = static_cast<const std::int32_t*>(places[4]),
                        .rows = static_cast<const std::int32_t*>(places[5]),
                        .nodes = from.count(),
                        .keys = std::ssize(from.rows)});
  }
  cuda::copy(to.memory.as<void>(), all.data(), to.memory.bytes(), stream);
  layers_.insert_or_assign(layer, std::move(to));
}

std::int64_t ClusterScorer::units(const ScoringQueries& queries, int query_heads) const {
  const std::int64_t tokens = std::ssize(queries.q) / (std::int64_t{query_heads} * head_dim_);
  return (tokens + queries.together - 1) / queries.together;
}

void ClusterScorer::score(const Layer& layer, std::size_t head, const ScoringQueries& queries,
                          int query_heads, cuda::StreamHandle stream) {
  const Head& own = layer.heads[head];
  const std::int64_t d = head_dim_, group = query_heads / std::ssize(layer.heads), planes = (d + 1) / 2,
                     tokens = std::ssize(queries.q) / (query_heads * d), rows = tokens * group;
  by_head_.resize(static_cast<std::size_t>(rows * d));
  for (std::int64_t t = 0; t < tokens; ++t)
    std::transform(queries.q.begin() + (t * query_heads + static_cast<std::int64_t>(head) * group) * d,
                   queries.q.begin() + (t * query_heads + static_cast<std::int64_t>(head + 1) * group) * d,
                   by_head_.begin() + t * group * d, [&](float x) { return x * queries.scale; });
  reserve(queries_, rows * d * kFloat);
  cuda::copy(queries_.as<void>(), by_head_.data(), rows * d * kFloat, stream);
  const auto multiply = [&](const cuda::Buffer& q, const void* nodes, DType type, const float* scales,
                            std::int64_t width, cuda::Buffer& to) {
    reserve(nodes_, own.nodes * width * kFloat);
    reserve(to, rows * own.nodes * kFloat);
    cuda::widen_rows(nodes, type, scales, own.nodes, width, nodes_.as<float>(), stream);
    cuda::multiply_f32({.a = q.as<float>(),
                        .b = nodes_.as<float>(),
                        .c = to.as<float>(),
                        .m = rows,
                        .n = own.nodes,
                        .k = width,
                        .b_transposed = true},
                       stream);
  };
  multiply(queries_, own.centroids, layer.type, own.scales, d, weights_);
  const bool spreads = queries.spreads && own.spreads != nullptr;
  if (spreads) {
    reserve(squares_, rows * planes * kFloat);
    cuda::plane_squares(queries_.as<float>(), rows, d, squares_.as<float>(), stream);
    multiply(squares_, own.spreads, DType::q8, own.spread_scales, planes, more_);
  }
  cuda::weigh_nodes({.z = weights_.as<float>(),
                     .variances = spreads ? more_.as<float>() : nullptr,
                     .first = own.first,
                     .rows = rows,
                     .nodes = own.nodes},
                    stream);
  reserve(scores_, units(queries, query_heads) * own.nodes * kFloat);
  cuda::average_weights(weights_.as<float>(), rows, own.nodes, queries.together * group, queries.squares,
                        scores_.as<float>(), stream);
}

void ClusterScorer::count(const ScoringQueries& queries, int query_heads, const ScoreBins& bins,
                          const cuda::Stream& stream) {
  const Layer& layer = layers_.at(queries.layer);
  const auto bytes = static_cast<std::int64_t>(bins.keys.size_bytes());
  reserve(bins_, bytes);
  cuda::copy(bins_.as<void>(), bins.keys.data(), bytes, stream.get());
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    score(layer, head, queries, query_heads, stream.get());
    cuda::bin_scores(scores_.as<float>(), layer.heads[head].first, units(queries, query_heads),
                     layer.heads[head].nodes,
                     {.lowest = bins.lowest,
                      .per_unit = bins.per_unit,
                      .bins = static_cast<int>(bins.keys.size()),
                      .squares = queries.squares},
                     bins_.as<unsigned long long>(), stream.get());
  }
  cuda::copy(bins.keys.data(), bins_.as<void>(), bytes, stream.get());
  stream.synchronize();
}

void ClusterScorer::choose(const ScoringQueries& queries, int query_heads, double threshold,
                           cuda::StreamHandle stream) {
  const Layer& layer = layers_.at(queries.layer);
  const std::int64_t heads = std::ssize(layer.heads);
  const double bar = queries.squares ? threshold * threshold : threshold;
  chosen_ = &layer;
  together_ = queries.together;
  units_ = units(queries, query_heads);
  std::int64_t nodes = 0;
  for (const Head& head : layer.heads) nodes += head.nodes;
  reserve(places_, units_ * nodes * kInt);
  reserve(counts_, heads * units_ * kInt);
  auto* places = places_.as<std::int32_t>();
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    const Head& own = layer.heads[head];
    score(layer, head, queries, query_heads, stream);
    cuda::place_kept(scores_.as<float>(), own.first, units_, own.nodes, threshold == 0.0 ? nullptr : &bar,
                     places, counts_.as<std::int32_t>() + static_cast<std::int64_t>(head) * units_, stream);
    places += units_ * own.nodes;
  }
}

void ClusterScorer::kept(std::span<std::int32_t> to, const cuda::Stream& stream) const {
  const std::int64_t heads = std::ssize(chosen_->heads);
  LODE_ASSERT(std::ssize(to) == units_ * heads);
  std::vector<std::int32_t> by_head(to.size());
  cuda::copy(by_head.data(), counts_.as<void>(), units_ * heads * kInt, stream.get());
  stream.synchronize();
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::int64_t unit = 0; unit < units_; ++unit)
      to[static_cast<std::size_t>(unit * heads + head)] =
          by_head[static_cast<std::size_t>(head * units_ + unit)];
}

cuda::RowLists ClusterScorer::list(std::int64_t token, std::int64_t tokens, cuda::StreamHandle stream) {
  LODE_ASSERT(tokens <= kMostListed);
  const std::int64_t heads = std::ssize(chosen_->heads), capacity = chosen_->heads[0].keys;
  reserve(lists_, kMostListed * heads * capacity * kInt);
  reserve(list_counts_, kMostListed * heads * kInt);
  const auto* places = places_.as<std::int32_t>();
  for (std::int64_t head = 0; head < heads; ++head) {
    const Head& own = chosen_->heads[static_cast<std::size_t>(head)];
    cuda::list_kept({.places = places,
                     .counts = counts_.as<std::int32_t>() + head * units_,
                     .first = own.first,
                     .rows = own.rows,
                     .nodes = own.nodes,
                     .token = token,
                     .tokens = tokens,
                     .together = together_,
                     .to = lists_.as<std::int32_t>() + head * capacity,
                     .to_counts = list_counts_.as<std::int32_t>() + head,
                     .heads = heads,
                     .capacity = capacity},
                    stream);
    places += units_ * own.nodes;
  }
  return {.rows = lists_.as<std::int32_t>(), .counts = list_counts_.as<std::int32_t>(), .capacity = capacity};
}

void ClusterScorer::release() {
  *this = ClusterScorer();
}

std::int64_t ClusterScorer::bytes() const {
  std::int64_t bytes = 0;
  for (const auto* const buffer : {&queries_, &squares_, &nodes_, &weights_, &more_, &scores_, &bins_,
                                   &places_, &counts_, &lists_, &list_counts_})
    bytes += buffer->bytes();
  for (const auto& [number, layer] : layers_) bytes += layer.memory.bytes();
  return bytes;
}

}  // namespace lode
