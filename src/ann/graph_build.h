// SPDX-License-Identifier: Apache-2.0
// A graph over keys made for the queries that will be asked of it.
#pragma once

#include "ann/coded_keys.h"
#include "ann/key_graph.h"

namespace lode {

/// Links keys that the same queries want: the bipartite graph of queries and their exact nearest keys,
/// projected onto the keys. Queries and keys must be finite; without queries a sample of the keys stands in
/// for them, which suits queries that lie like keys. The same for any number of threads. Polls check_cancel.
KeyGraph build_graph(Matrix<const float> keys /*[n, d], dense*/,
                     Matrix<const float> queries /*[q, d], dense*/, const WalkKeys& coded, int degree,
                     ThreadPool& pool);

/// Keeps of candidates, nearest first, those that no kept one lies nearer to than the node does ("occlusion",
/// as in RoarGraph and its forebears), at most `most`; then, where `fill`, the nearest of the others.
/// rows [c, d]: the candidates' keys in order of distance; distance [c]: to the node. Returns their numbers.
std::vector<std::int32_t> prune(Matrix<const float> rows, std::span<const float> distance, std::int64_t most,
                                bool fill);

}  // namespace lode
