// SPDX-License-Identifier: Apache-2.0
// Scores of clusters for many queries while thresholds are searched for: every score is written, in float32, as the
// host's lookup has them (select/shared/threshold_selector.h). Lookups of answers, which write none, are clusters.h.
// All calls are of one KV head, and give the same bits each time.
#pragma once

#include "kernels/cuda/device/device.h"
#include "lodestone/types.h"

namespace lode::cuda {

/// to = from times the row's scale; `scales` null: 1.
void widen_rows(const void* from /*[rows, width] of type: q8, f16 or f32*/, DType type,
                const float* scales /*[rows]*/, std::int64_t rows, std::int64_t width, float* to,
                StreamHandle stream);
/// q_j^2 + q_{j + planes}^2 of each plane j of a row, planes = ceil(d / 2); an odd one is without its partner.
void plane_squares(const float* q /*[rows, d]*/, std::int64_t rows, std::int64_t d,
                   float* squares /*[rows, planes]*/, StreamHandle stream);

struct NodeWeights {
  float* z = nullptr;                   // [rows, nodes] products of queries and centroids
  const float* variances = nullptr;     // [rows, nodes] of a node's products, which scores add; null: none
  const std::int32_t* first = nullptr;  // [nodes + 1] of each node's keys
  std::int64_t rows = 0, nodes = 0;
};
/// z becomes K exp(z) / sum_j N_j exp(z_j) over the nodes of a row, N_j keys in node j, K in all. With variances s^2
/// z is first z + b (s - b / 2), b = min(s, sqrt(2 ln N)). A row that holds no number becomes 0.
void weigh_nodes(const NodeWeights& task, StreamHandle stream);

/// scores[u, i]: the mean over rows [u each, (u + 1) each) of their weights of node i, or of these squared.
void average_weights(const float* weights /*[rows, nodes]*/, std::int64_t rows, std::int64_t nodes,
                     std::int64_t each, bool squares, float* scores /*[units, nodes]*/, StreamHandle stream);

/// How scores are binned: of score x > 0 (of `squares` its root) in bin (log x - lowest) per_unit, cut to [0, bins).
struct ScoreBinning {
  double lowest = 0, per_unit = 1;
  int bins = 0;
  bool squares = false;
};
/// bins[b] += N_i for every score of node i in the bin.
void bin_scores(const float* scores /*[units, nodes]*/, const std::int32_t* first, std::int64_t units,
                std::int64_t nodes, const ScoreBinning& rule, unsigned long long* bins, StreamHandle stream);

/// places[u, i]: where the keys of node i begin in the unit's list, -1 where its score is not above the bar; counts[u]
/// of keys. `bar` null: every node.
void place_kept(const float* scores /*[units, nodes]*/, const std::int32_t* first, std::int64_t units,
                std::int64_t nodes, const double* bar, std::int32_t* places /*[units, nodes]*/,
                std::int32_t* counts /*[units]*/, StreamHandle stream);

/// Lists of one KV head for tokens that attend together; device memory.
struct KeptLists {
  const std::int32_t* places = nullptr;  // as place_kept has left them
  const std::int32_t* counts = nullptr;
  const std::int32_t* first = nullptr;  // [nodes + 1]
  const std::int32_t* rows = nullptr;   // [keys] by node
  std::int64_t nodes = 0;
  std::int64_t token = 0, tokens = 0;  ///< tokens [token, token + tokens)
  std::int64_t together = 1;           ///< tokens of a unit
  std::int32_t* to = nullptr;          // [tokens, heads, capacity], of this head
  std::int32_t* to_counts = nullptr;   // [tokens, heads], of this head
  std::int64_t heads = 0, capacity = 0;
};
void list_kept(const KeptLists& task, StreamHandle stream);

}  // namespace lode::cuda
