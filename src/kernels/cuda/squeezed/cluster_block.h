// SPDX-License-Identifier: Apache-2.0
// The choice of clusters for many query tokens together (Squeezed Attention, section 4.1), as products on
// Hopper's matrix unit: what choose_clusters does for a few.
#pragma once

#include <optional>

#include "kernels/cuda/squeezed/clusters.h"

namespace lode::cuda {

/// Whether this GPU and program choose for blocks: heads of 64 and 128, centroids of any kind.
bool can_choose_for_block(int head_dim);

/// Where one call keeps what its kernels hand on, in memory of `bytes`: at most a sixty-fourth of the GPU's
/// for exponentials, and no more for fewer tokens or nodes.
struct BlockScratch {
  BlockScratch(int tokens, int query_heads, int kv_heads, int head_dim, std::int64_t most_nodes,
               CentroidKind kind);
  std::int64_t rows = 0, nodes = 0;  ///< of a KV head, whole tiles
  /// Offsets.
  std::int64_t queries = 0, log_keys = 0, unscale = 0, factors = 0, weights = 0, kept = 0, halves = 0,
               stored = 0, bytes = 0;
};

/// As choose_clusters with all queries as one stretch and a list for its first token alone. Queries are
/// rounded to halves, by a power of two each, and so are centroids in 8 bits times their scales; squares and
/// the variances that they are multiplied with to bf16, gains with the number of keys to 11 bits: what a
/// spread adds to a logit is off by up to 0.2 % and 0.001 times the logarithm of the cluster's keys (a weight
/// by 0.3 % for 20 keys, 0.7 % for 2,000). `spreads`: as the step says. Deterministic; `scratch` is device
/// memory of as many bytes as BlockScratch says for these queries. `heads_a_turn`: KV heads whose
/// exponentials are stored at a time, which must fit there; 0: none, they are made twice; without it what is
/// fastest.
void choose_clusters_for_block(const ClusterChoiceTask& task, const Queries& queries, bool spreads,
                               void* scratch, StreamHandle stream, std::optional<int> heads_a_turn = {});

}  // namespace lode::cuda
