// SPDX-License-Identifier: Apache-2.0
// Links of a graph of keys (ann/graph/build.h), a block for each key: keys that the same queries want, links back, and
// links of keys that no query wants. The same bits each time.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Keys as distances compare them.
struct LinkedKeys {
  std::int64_t count = 0;
  int width = 0;                   ///< at most kMostLinkedWidth
  const float* rows = nullptr;     // [n, width]
  const float* squares = nullptr;  // [n]
};
inline constexpr int kMostLinkedWidth = 256, kMostCandidates = 128, kMostLinkDegree = 32;

/// squares[i] = |rows[i]|^2.
void square_rows(const float* rows, std::int64_t n, int width, float* squares, StreamHandle stream);
/// rows[nodes[i], degree] = links[nodes[i], width], -1 behind them; `nodes` null: all of `count`.
void put_links(const std::int32_t* links, const std::int32_t* nodes, std::int64_t count, int width,
               int degree, std::int32_t* rows, StreamHandle stream);

/// What stands at the same key, one list behind the other in no order: [first[key], first[key + 1]).
struct ByKey {
  const std::int32_t* first = nullptr;  // [n + 1]
  std::uint32_t* items = nullptr;
};
/// counts[key] += how often it stands in `keys`; -1 is none.
void count_keys(const std::int32_t* keys, std::int64_t count, std::int32_t* counts, StreamHandle stream);

/// Queries' nearest keys, best first.
struct NearestLists {
  std::int64_t queries = 0;            ///< at most kMostListQueries
  int each = 0;                        ///< at most kMostOfList
  const std::int32_t* keys = nullptr;  // [queries, each]
};
inline constexpr std::int64_t kMostListQueries = std::int64_t{1} << 26;
inline constexpr int kMostOfList = 64, kListsPerKey = 32;
/// Items: rank * kMostListQueries + query of each list that holds the key. `next` [n] is a copy of `first`.
void lists_by_key(const NearestLists& lists, const ByKey& to, std::int32_t* next, StreamHandle stream);
/// Items: which key links to this one by from [n, width].
void links_by_target(const std::int32_t* from, std::int64_t n, int width, const ByKey& to, std::int32_t* next,
                     StreamHandle stream);

/// links[key, width] = of the keys that stand most often beside it in the kListsPerKey lists in which it stands highest,
/// `candidates` of them, the pruned ones (ann/graph/build.h), -1 behind the last.
void link_listed(const LinkedKeys& keys, const NearestLists& lists, const ByKey& by_key, int candidates,
                 int width, std::int32_t* links, StreamHandle stream);
/// links[nodes[i], width] = the pruned ones of near[i, each], which may end in -1; the node itself is left out.
void link_near(const LinkedKeys& keys, const std::int32_t* nodes, std::int64_t count,
               const std::int32_t* near, int each, int width, std::int32_t* links, StreamHandle stream);
/// rows[key, degree] gets the keys that link to it, and is pruned and filled where there are more than `degree`: of the
/// kMostCandidates nearest ones, where they are still more.
void add_links_back(const LinkedKeys& keys, const ByKey& by_target, int degree, std::int32_t* rows,
                    StreamHandle stream);

}  // namespace lode::cuda
