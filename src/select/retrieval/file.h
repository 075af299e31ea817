// SPDX-License-Identifier: Apache-2.0
// The index of `retrieval` in a context file.
#pragma once

#include <vector>

#include "lodestone/kv_view.h"
#include "select/retrieval/index.h"
#include "select/retrieval/rest.h"

namespace lode {

class SectionWriter;
class SectionReader;

/// The indexes of all KV heads of a layer.
void save_retrieval(const RetrievalIndex::Shape& shape, const std::vector<RetrievalIndex>& heads,
                    SectionWriter& out);
/// What save_retrieval wrote, over the same keys; InputError unless it has this shape and lies within `kv`.
/// Keys are coded again rather than stored.
std::vector<RetrievalIndex> load_retrieval(const RetrievalIndex::Shape& shape, KvLayer kv,
                                           const SectionReader& in, ThreadPool& pool);

inline constexpr std::size_t kRememberedNodes = 32;  ///< of a token with which the next one's walk begins

/// What walks for the last token that was searched found.
struct RememberedWalks {
  Position searched = -1;                ///< -1 = none was
  std::vector<std::vector<Node>> nodes;  // [Hq][at most kRememberedNodes]
};
void save_remembered(const RememberedWalks& walks, int query_heads, SectionWriter& out);
/// InputError unless it fits a text of so many tokens.
RememberedWalks load_remembered(std::int64_t tokens, int query_heads, const SectionReader& in);

/// Calibrated thresholds, of each query head or none.
void save_shares(const std::vector<HeadShare>& shares, SectionWriter& out);
std::vector<HeadShare> load_shares(int query_heads, const SectionReader& in);

}  // namespace lode
