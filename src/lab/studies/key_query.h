// SPDX-License-Identifier: Apache-2.0
// How a head's queries lie to its keys: SAAP's figure 1 (principal axes, dot products, clusters) and
// RetrievalAttention's figures 2b and 2c (what an inverted file scans for its recall, and the Mahalanobis
// distance to the keys, of queries and of other keys).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "lodestone/engine.h"

namespace lode {

struct KeyQueryOptions {
  ContextOptions context;
  std::vector<int> layers;    ///< empty: the first, the middle and the last
  std::int64_t shown = 250;   ///< keys, and queries, on the two axes
  std::int64_t pairs = 4000;  ///< dot products of each kind
  std::int64_t recent = 64;   ///< the keys before a query that count as recent
  std::int64_t asked = 100;   ///< queries, and keys, that look for their `top` keys
  std::int64_t top = 100;
  std::uint64_t seed = 0;
};

/// Of the first KV head and the first query head of each layer, after RoPE:
/// {"layer", "keys": n, "clusters": C,
///  "axes": {"shown": share of the spread that two axes hold, "keys": [[x, y], ...], "queries": ...,
///           "first_key": [x, y], "first_query": [x, y]},
///  "scores": {"middles": [q . k / sqrt(d)], "far" | "recent" | "first": shares of pairs by these,
///             "medians": {"far" | "recent" | "first"}},
///  "assigned": {"keys" | "queries": [C] their share in each cluster of the keys},
///  "search": {"keys" | "queries": [[share of the keys scanned, recall of the top keys], ...]},
///  "distance": {"middles", "keys" | "queries": shares, "medians"}}.
/// The last eighth of the text asks what lies before it. InputError for a text too short for that.
std::vector<Json> key_query_studies(const std::shared_ptr<const Model>& model, std::string_view text,
                                    const KeyQueryOptions& options);

/// Distances of x [n, d] to the distribution of `base` [m, d]: the root of (x - mean)^T C^-1 (x - mean).
std::vector<double> mahalanobis(const std::vector<float>& base, const std::vector<float>& x, std::int64_t d);

}  // namespace lode
