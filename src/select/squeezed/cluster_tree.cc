// SPDX-License-Identifier: Apache-2.0
// Built from the finest level up, then put in order from the coarsest level down.
#include "select/squeezed/cluster_tree.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ann/graph/neighbour_order.h"
#include "ann/partition.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/device_keys.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr std::int64_t kPiece = 256, kRowsAtOnce = 8;

using Rows = std::vector<float>;  // [n, d]

/// A level on the way: nodes in the order in which clustering found them.
struct Draft {
  std::vector<std::int32_t> parent;  // [nodes] in the next coarser level
  std::vector<std::int32_t> keys;    // [nodes]
  Rows centroids, values;            // [nodes, d] means over the keys below
  Rows spreads;                      // [nodes, d] variances of these keys; none: they are keys
};

Rows read_rows(const KvRows& kv, Position begin, std::int64_t count, bool values, ThreadPool& pool) {
  KvRows source = kv;
  if (values) {
    source.k = kv.v;
    source.k_scale = kv.v_scale;
  }
  Rows out(static_cast<std::size_t>(count * kv.d));
  pool.for_each((count + kPiece - 1) / kPiece, [&](std::int64_t piece, int) {
    for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
      read_stored_keys(
          {&source, 1}, begin + static_cast<Position>(i), nullptr,
          std::span(out).subspan(static_cast<std::size_t>(i * kv.d), static_cast<std::size_t>(kv.d)));
    }
  });
  return out;
}

/// Rows of norm 1 or 0.
Rows directions(Rows rows, std::int64_t d) {
  for (std::int64_t i = 0; i < std::ssize(rows) / d; ++i) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < d; ++j)
      sum += static_cast<double>(rows[static_cast<std::size_t>(i * d + j)]) *
             rows[static_cast<std::size_t>(i * d + j)];
    const double inverse = sum > 0.0 ? 1.0 / std::sqrt(sum) : 0.0;
    for (std::int64_t j = 0; j < d; ++j) {
      float& x = rows[static_cast<std::size_t>(i * d + j)];
      x = static_cast<float>(x * inverse);
    }
  }
  return rows;
}

/// (row - mean row) L, lifted by a 1: distances do not see the mean, and squares of what is left are small.
Rows lifted(const Rows& rows, std::int64_t d, std::span<const float> metric, ThreadPool& pool) {
  const std::int64_t n = std::ssize(rows) / d;
  std::vector<double> mean(static_cast<std::size_t>(d));
  for (std::size_t i = 0; i < rows.size(); ++i) mean[i % mean.size()] += rows[i];
  for (double& x : mean) x /= static_cast<double>(n);
  Rows columns(static_cast<std::size_t>(d * d));  // [d, d] L transposed
  for (std::int64_t i = 0; i < d * d; ++i)
    columns[static_cast<std::size_t>(i % d * d + i / d)] = metric[static_cast<std::size_t>(i)];
  Rows out(static_cast<std::size_t>(n * (d + 1)), 1.0f);
  pool.for_each((n + kRowsAtOnce - 1) / kRowsAtOnce, [&](std::int64_t item, int) {
    const std::int64_t begin = item * kRowsAtOnce, count = std::min(kRowsAtOnce, n - begin);
    Rows own(rows.begin() + begin * d, rows.begin() + (begin + count) * d);
    for (std::size_t i = 0; i < own.size(); ++i) own[i] -= static_cast<float>(mean[i % mean.size()]);
    kernels().gemv(own.data(), static_cast<int>(count), columns.data(), DType::f32, d, 0, d,
                   out.data() + begin * (d + 1), d + 1);
  });
  return out;
}

Partition partition(const Rows& rows, std::int64_t d, std::int64_t clusters, std::span<const float> metric,
                    std::uint64_t seed, ThreadPool& pool) {
  const std::int64_t n = std::ssize(rows) / d, wanted = std::clamp<std::int64_t>(clusters, 1, n);
  if (metric.empty() || d >= kMaxHeadDim)
    return partition_points({directions(rows, d).data(), n, d}, wanted, Nearness::cosine, seed, pool);
  return partition_points({lifted(rows, d, metric, pool).data(), n, d + 1}, wanted, Nearness::distance, seed,
                          pool);
}

/// An order of nodes in which those that queries score alike stand close together: what a query keeps is then
/// fewer and longer runs of rows, where these lie leaf by leaf (orders_rows.h).
std::vector<std::int32_t> similar_together(const Rows& rows, std::int64_t d,
                                           const ClusterTreeOptions& options, ThreadPool& pool) {
  const std::int64_t n = std::ssize(rows) / d;
  if (options.clusters != nullptr && options.nodes.size() == 1) {  // the rows are those clusters
    const std::vector<std::int32_t>& cells =
        options.clusters->cells;  // of all that were wanted, empty ones too
    return neighbour_order({options.clusters->places.data(), n, d},
                           compacted(cells, *std::max_element(cells.begin(), cells.end()) + 1));
  }
  const std::uint64_t seed = hash_seed(options.seed, options.nodes.size());
  if (options.metric.empty() || d >= kMaxHeadDim)
    return neighbour_order({directions(rows, d).data(), n, d}, Nearness::cosine, seed, pool);
  return neighbour_order({lifted(rows, d, options.metric, pool).data(), n, d + 1}, Nearness::distance, seed,
                         pool);
}

/// Means of rows by label, each row counted `weights` times; sums in double.
Rows means(const Rows& rows, std::int64_t d, std::span<const std::int32_t> labels,
           std::span<const std::int32_t> weights, const std::vector<std::int32_t>& totals) {
  std::vector<double> sums(totals.size() * static_cast<std::size_t>(d));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    double* const sum = sums.data() + labels[i] * d;
    const float* const row = rows.data() + static_cast<std::int64_t>(i) * d;
    for (std::int64_t j = 0; j < d; ++j) sum[j] += static_cast<double>(weights[i]) * row[j];
  }
  Rows out(sums.size());
  for (std::size_t c = 0; c < totals.size(); ++c) {
    for (std::int64_t j = 0; j < d; ++j) {
      const std::size_t at = c * static_cast<std::size_t>(d) + static_cast<std::size_t>(j);
      out[at] = static_cast<float>(sums[at] / totals[c]);
    }
  }
  return out;
}

/// Variances over the keys below parents: within their children, and of the children's means.
Rows variances(const Draft& fine, const Draft& coarse, std::span<const std::int32_t> labels, std::int64_t d) {
  std::vector<double> sums(coarse.centroids.size());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const std::int64_t from = static_cast<std::int64_t>(i) * d, to = labels[i] * d;
    for (std::int64_t j = 0; j < d; ++j) {
      const auto at = static_cast<std::size_t>(from + j), own = static_cast<std::size_t>(to + j);
      const double off = static_cast<double>(fine.centroids[at]) - coarse.centroids[own];
      sums[own] += fine.keys[i] * (off * off + (fine.spreads.empty() ? 0.0 : fine.spreads[at]));
    }
  }
  Rows out(sums.size());
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<float>(sums[i] / coarse.keys[i / static_cast<std::size_t>(d)]);
  return out;
}

/// The next coarser level; gives `fine` its parents.
Draft coarsen(Draft& fine, std::int64_t d, std::int64_t clusters, bool spreads, std::span<const float> metric,
              std::uint64_t seed, ThreadPool& pool) {
  Partition p = partition(fine.centroids, d, clusters, metric, seed, pool);
  Draft coarse;
  coarse.keys.resize(static_cast<std::size_t>(p.clusters));
  for (std::size_t i = 0; i < p.labels.size(); ++i)
    coarse.keys[static_cast<std::size_t>(p.labels[i])] += fine.keys[i];
  coarse.centroids = means(fine.centroids, d, p.labels, fine.keys, coarse.keys);
  if (!fine.values.empty()) coarse.values = means(fine.values, d, p.labels, fine.keys, coarse.keys);
  if (spreads) coarse.spreads = variances(fine, coarse, p.labels, d);
  fine.parent = std::move(p.labels);
  return coarse;
}

/// The finest level from clusters of the keys that a GPU has made; gives `keys` their parents.
Draft coarsen(Draft& keys, std::int64_t d, const KeyClusters& clusters, bool spreads) {
  Draft coarse;
  coarse.keys = clusters.keys;
  coarse.centroids = clusters.means;
  if (spreads) coarse.spreads = clusters.spreads;
  if (!keys.values.empty()) coarse.values = means(keys.values, d, clusters.labels, keys.keys, coarse.keys);
  keys.parent = clusters.labels;
  return coarse;
}

std::vector<std::byte> packed(const Rows& rows, std::span<const std::int32_t> order, std::int64_t d,
                              DType type) {
  const std::int64_t row_bytes = d * bytes_of(type);
  std::vector<std::byte> out(order.size() * static_cast<std::size_t>(row_bytes));
  for (std::size_t i = 0; i < order.size(); ++i)
    kernels().narrow(rows.data() + order[i] * d, d, type,
                     out.data() + static_cast<std::int64_t>(i) * row_bytes);
  return out;
}

constexpr float kMost = std::numeric_limits<float>::max();

/// Finite numbers as whole ones of 8 bits times the scale that this returns.
float row_to_q8(std::span<float> row, std::byte* to) {
  constexpr float kSteps = 127.0f;
  float most = 0.0f;
  for (const float x : row) most = std::max(most, std::abs(x));
  const float scale = most / kSteps;
  for (float& x : row) x = scale > 0.0f ? std::clamp(x / scale, -kSteps, kSteps) : 0.0f;
  kernels().narrow(row.data(), std::ssize(row), DType::q8, to);
  return scale;
}

/// Variances of planes in 8 bits, nodes in `order`. One that is not a finite float counts as the largest that
/// is.
void pack_spreads(const Rows& spreads, std::span<const std::int32_t> order, std::int64_t d,
                  ClusterLevel& level) {
  const std::int64_t planes = spread_dims(d);
  level.spreads.resize(order.size() * static_cast<std::size_t>(planes));
  Rows own(static_cast<std::size_t>(planes));
  for (std::size_t i = 0; i < order.size(); ++i) {
    const float* const of = spreads.data() + order[i] * d;
    for (std::int64_t j = 0; j < planes; ++j) {
      const float mean = j + planes < d ? 0.5f * of[j] + 0.5f * of[j + planes] : of[j];
      own[static_cast<std::size_t>(j)] = mean < kMost ? mean : kMost;  // NaN as well
    }
    level.spread_scales.push_back(row_to_q8(own, level.spreads.data() + i * own.size()));
  }
}

/// Children of parents that stand in `order`: first[i] of the i-th, and the children in that order.
std::vector<std::int32_t> sort_children(std::span<const std::int32_t> parent,
                                        std::span<const std::int32_t> order,
                                        std::vector<std::int32_t>& first) {
  std::vector<std::int32_t> rank(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    rank[static_cast<std::size_t>(order[i])] = static_cast<std::int32_t>(i);
  first.assign(order.size() + 1, 0);
  for (const std::int32_t p : parent)
    ++first[static_cast<std::size_t>(rank[static_cast<std::size_t>(p)]) + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<std::int32_t> next(first.begin(), first.end() - 1), sorted(parent.size());
  for (std::size_t i = 0; i < parent.size(); ++i)
    sorted[static_cast<std::size_t>(
        next[static_cast<std::size_t>(rank[static_cast<std::size_t>(parent[i])])]++)] =
        static_cast<std::int32_t>(i);
  return sorted;
}

bool fits_half(const Rows& rows) {
  return std::all_of(rows.begin(), rows.end(), [](float x) { return std::abs(x) <= kLargestHalf; });
}

}  // namespace

/// From the numbers as they would be stored otherwise, so that an index of 16 bits that is read gives the
/// bits of one that is built.
void centroids_to_q8(ClusterTree& tree, std::int64_t d) {
  if (tree.type == DType::q8) return;
  const std::int64_t row_bytes = d * bytes_of(tree.type);
  Rows row(static_cast<std::size_t>(d));
  for (ClusterLevel& level : tree.levels) {
    std::vector<std::byte> whole(level.keys.size() * row.size());
    for (std::size_t i = 0; i < level.keys.size(); ++i) {
      kernels().widen(level.centroids.data() + static_cast<std::int64_t>(i) * row_bytes, tree.type, d,
                      row.data());
      for (float& x : row) x = std::isnan(x) ? 0.0f : std::clamp(x, -kMost, kMost);
      level.scales.push_back(row_to_q8(row, whole.data() + i * row.size()));
    }
    level.centroids = std::move(whole);
  }
  tree.type = DType::q8;
}

std::int64_t ClusterTree::bytes() const {
  std::size_t bytes = rows.size() * sizeof(Position);
  for (const ClusterLevel& level : levels)
    bytes += (level.first.size() + level.keys.size()) * sizeof(std::int32_t) + level.centroids.size() +
             level.values.size() + level.spreads.size() +
             (level.scales.size() + level.spread_scales.size()) * sizeof(float);
  return static_cast<std::int64_t>(bytes);
}

KeyClusters in_order(const KeyClusters& found, std::int64_t d) {
  KeyClusters out;
  out.labels.reserve(found.labels.size());
  std::vector<std::int32_t> number(found.keys.size(), -1), order;
  for (const std::int32_t label : found.labels) {
    std::int32_t& known = number[static_cast<std::size_t>(label)];
    if (known < 0) {
      known = static_cast<std::int32_t>(order.size());
      order.push_back(label);
    }
    out.labels.push_back(known);
  }
  const auto take = [&](const auto& from, auto& to, std::int64_t numbers) {
    to.reserve(order.size() * static_cast<std::size_t>(numbers));
    for (const std::int32_t label : order)
      to.insert(to.end(), from.begin() + label * numbers, from.begin() + (label + 1) * numbers);
  };
  take(found.keys, out.keys, 1);
  take(found.cells, out.cells, 1);
  take(found.means, out.means, d);
  take(found.spreads, out.spreads, d);
  take(found.places, out.places, d);
  return out;
}

ClusterTree build_cluster_tree(const KvRows& kv, Position begin, Position end,
                               const ClusterTreeOptions& options, ThreadPool& pool) {
  LODE_ASSERT(begin < end && !options.nodes.empty());
  const std::int64_t n = end - begin, d = kv.d;
  const std::size_t levels = options.nodes.size();
  Draft keys;
  keys.keys.assign(static_cast<std::size_t>(n), 1);
  if (options.clusters == nullptr) keys.centroids = read_rows(kv, begin, n, /*values=*/false, pool);
  if (options.values) keys.values = read_rows(kv, begin, n, /*values=*/true, pool);
  std::vector<Draft> drafts(levels);
  for (std::size_t l = levels; l-- > 0;) {
    Draft& fine = l + 1 < levels ? drafts[l + 1] : keys;
    if (&fine == &keys && options.clusters != nullptr) {
      drafts[l] = coarsen(keys, d, *options.clusters, options.spreads);
      continue;
    }
    drafts[l] = coarsen(fine, d, options.nodes[l], options.spreads, options.metric,
                        hash_seed(options.seed, levels - 1 - l), pool);  // the same leaves below any levels
  }
  ClusterTree tree;
  const bool half = std::all_of(drafts.begin(), drafts.end(), [](const Draft& draft) {
    return fits_half(draft.centroids) && fits_half(draft.values);
  });
  tree.type = tree.values_type = half ? DType::f16 : DType::f32;
  std::vector<std::int32_t> order = similar_together(drafts[0].centroids, d, options, pool);
  for (std::size_t l = 0; l < levels; ++l) {
    const Draft& draft = drafts[l];
    ClusterLevel level;
    for (const std::int32_t node : order) level.keys.push_back(draft.keys[static_cast<std::size_t>(node)]);
    level.centroids = packed(draft.centroids, order, d, tree.type);
    if (options.values) level.values = packed(draft.values, order, d, tree.type);
    if (options.spreads) pack_spreads(draft.spreads, order, d, level);
    order = sort_children(l + 1 < levels ? drafts[l + 1].parent : keys.parent, order, level.first);
    tree.levels.push_back(std::move(level));
  }
  tree.rows.resize(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) tree.rows[i] = begin + order[i];
  if (options.q8) centroids_to_q8(tree, d);
  return tree;
}

}  // namespace lode
