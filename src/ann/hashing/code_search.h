// SPDX-License-Identifier: Apache-2.0
// The keys whose binary codes differ least from those of some queries (HashAttention, appendix A.1,
// num-based). A thin sample tells which level is far enough; one pass over all codes, or a search of tables,
// keeps the few keys within it, and the choice is made among these: no other distance is written to memory.
#pragma once

#include <cstdint>
#include <vector>

#include "ann/hashing/half_tables.h"

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

/// Tables of the first keys of a query, of one word each; the result is the same with and without them.
struct CodeTables {
  const HalfTables* tables = nullptr;
  bool always = false;  ///< also where a pass over all codes is expected to be faster
};

/// Buffers of searches, one after the other.
class CodeSearch {
 public:
  /// What a search has read of keys.
  struct Work {
    std::int64_t keys = 0, bytes = 0;
  };
  /// rows := offset + i of the budget's nearest keys, rising; of the last level the newest, those with the
  /// largest i. Exactly min(budget, n) without all_ties.
  Work nearest(const CodeQuery& query, const CodeTables& tables, Position offset,
               std::vector<Position>& rows);

 private:
  /// How the limit on the distance is split over the halves of a code, and what that is expected to read.
  struct Split {
    int low = -1;
    double effort = 0;  ///< in keys of a pass over all codes
  };

  void sample(const CodeQuery& query);
  int limit_for(double share) const;
  Split split_of(const CodeQuery& query, const ByteCosts& costs, int limit) const;
  Work scan(const CodeQuery& query, std::int64_t begin, int limit);
  Work search(const CodeQuery& query, const CodeTables& tables, int limit, bool& ordered);
  void choose(const CodeQuery& query, bool ordered, Position offset, std::vector<Position>& rows);
  void put_in_order(std::int64_t budget, std::int64_t keys);

  std::vector<std::uint32_t> sampled_;        // [sample, words]
  std::vector<std::uint16_t> distance_;       // of the sample, or of a block
  std::vector<std::int64_t> levels_;          // [levels]: keys of the sample at each distance
  std::vector<std::uint64_t> order_, spare_;  // of near_: key << 16 | distance
  HammingHits near_;
};

}  // namespace lode
