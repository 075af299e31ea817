// SPDX-License-Identifier: Apache-2.0
// The keys whose binary codes differ least from those of some queries (HashAttention, appendix A.1,
// num-based). A thin sample tells which level is far enough; one pass keeps the few keys within it, and
// select_near chooses among these: no other distance is ever written to memory.
#pragma once

#include <cstdint>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// What is searched, and for what. The distance of a key is the sum of its mismatches with all queries.
struct CodeQuery {
  const std::uint32_t* keys = nullptr;  ///< [n, words]
  std::int64_t n = 0;
  int words = 1;                           ///< 1, 2 or 4
  const std::uint32_t* queries = nullptr;  ///< [count, words]
  int count = 1;                           ///< 1 to kMaxSignatureQueries
  std::int64_t budget = 0;
  bool all_ties = false;  ///< every key as near as the last one taken, although that exceeds the budget
};

/// Buffers of searches, one after the other.
class CodeSearch {
 public:
  /// rows := offset + i of the budget's nearest keys, rising; of the last level the newest, those with the
  /// largest i. Exactly min(budget, n) without all_ties.
  void nearest(const CodeQuery& query, Position offset, std::vector<Position>& rows);

 private:
  void sample(const CodeQuery& query);
  std::int64_t level_for(std::int64_t sampled) const;
  void scan(const CodeQuery& query, std::int64_t limit, Position offset);

  std::vector<std::uint32_t> sampled_;   // [sample, words]
  std::vector<std::uint16_t> distance_;  // of the sample, or of a block
  std::vector<std::int64_t> levels_;     // [levels]: keys of each distance
  std::vector<Position> near_;           // [room]: keys within the limit, rising
  std::vector<std::uint16_t> level_;     // [room]: their distances
  std::int64_t found_ = 0;               // of those
};

}  // namespace lode
