// SPDX-License-Identifier: Apache-2.0
// A graph over keys made for the queries that will be asked of it.
#pragma once

#include "ann/graph/key_graph.h"
#include "ann/graph/quantized_keys.h"

namespace lode {

class GraphDevice;

/// Links keys that the same queries want: the bipartite graph of queries and their exact nearest keys,
/// projected onto the keys. Keys and queries in a KeySpace, `coded` the same keys in int8. All must be
/// finite, and where there are keys there must be queries. `tune` only where the queries are like those that
/// will be asked: then links are suited to their walks (ann/graph/tune.h), unless the keys are few. The same
/// for any number of threads. `device` takes the steps that it can (ann/graph/graph_device.h); null: the host's cores
/// do all. Polls check_cancel.
KeyGraph build_graph(Matrix<const float> keys /*[n, m], dense*/,
                     Matrix<const float> queries /*[q, m], dense*/, const BeamKeys& coded, int degree,
                     ThreadPool& pool, bool tune = true, GraphDevice* device = nullptr);

/// Links of a node before those that lead back to it, and candidates for them.
constexpr int forward_links(int degree) {
  return degree * 3 / 4 > 2 ? degree * 3 / 4 : 2;
}
constexpr int candidates_for(int degree) {
  return 6 * forward_links(degree);
}

/// Where there are no queries: a sample of the keys, which suits queries that lie like keys; less the keys'
/// mean, which would make all of them ask for the same keys.
std::vector<float> stand_in_queries(Matrix<const float> keys /*[n, d]*/);  // [.., d]

/// Keeps of candidates, nearest first, those that no kept one lies nearer to than the node does ("occlusion",
/// as in RoarGraph and its forebears), at most `most`; then, where `fill`, the nearest of the others.
/// rows [c, d]: the candidates' keys in order of distance; distance [c]: to the node. Returns their numbers.
std::vector<std::int32_t> prune(Matrix<const float> rows, std::span<const float> distance, std::int64_t most,
                                bool fill);

}  // namespace lode
