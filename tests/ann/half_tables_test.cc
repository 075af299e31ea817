// SPDX-License-Identifier: Apache-2.0
// Multi-index hashing against a look at every key, for every split of the limit over the halves.
#include "ann/hashing/half_tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "base/rng.h"

namespace lode {
namespace {

using Found = std::vector<std::pair<Position, int>>;

int distance_of(std::uint32_t key, const std::vector<std::uint32_t>& queries) {
  int sum = 0;
  for (const std::uint32_t query : queries) sum += std::popcount(key ^ query);
  return sum;
}

TEST(HalfTables, FindEveryKeyWithinTheLimitOnce) {
  Rng rng(1);
  for (const int count : {1, 2, 3, 4, 32}) {
    std::vector<std::uint32_t> queries(static_cast<std::size_t>(count)), codes(3000);
    const auto start = static_cast<std::uint32_t>(rng.next());
    for (std::uint32_t& query : queries)  // queries of a group are alike
      query = start ^ static_cast<std::uint32_t>(rng.next() & rng.next() & rng.next());
    for (std::uint32_t& code : codes) code = static_cast<std::uint32_t>(rng.next());
    std::fill(codes.begin() + 100, codes.begin() + 200, start);  // a cell of many
    codes[0] = 0, codes[1] = ~0u;
    HalfTables tables;
    tables.build(codes);
    const ByteCosts costs(queries.data(), count);
    for (const std::uint32_t code : codes)
      ASSERT_EQ(costs.avoided_by_none + costs.low(code) + costs.high(code), distance_of(code, queries));
    for (const int limit : {0, 5 * count, 12 * count, 16 * count, 32 * count}) {
      for (const std::int64_t end : {std::int64_t{0}, std::int64_t{150}, std::int64_t{3000}}) {
        Found expected;
        for (Position i = 0; i < end; ++i) {
          const int distance = distance_of(codes[static_cast<std::size_t>(i)], queries);
          if (distance <= limit) expected.emplace_back(i, distance);
        }
        for (const int low : {-1, 0, 1, 3 * count, 16 * count, 40 * count}) {
          HammingHits near;
          tables.collect(costs, limit, low, end, near);
          Found found;
          for (std::int64_t i = 0; i < near.size; ++i)
            found.emplace_back(near.keys[static_cast<std::size_t>(i)],
                               near.distance[static_cast<std::size_t>(i)]);
          std::sort(found.begin(), found.end());
          ASSERT_EQ(found, expected) << count << " queries, limit " << limit << ", low " << low;
        }
      }
    }
  }
}

TEST(HalfTables, EmptyOnesFindNothingAndSizesAreTold) {
  HalfTables tables;
  const std::uint32_t query = 5;
  HammingHits near;
  EXPECT_EQ(tables.collect(ByteCosts(&query, 1), 32, 16, 0, near).keys, 0);
  EXPECT_EQ(near.size, 0);
  EXPECT_EQ(tables.bytes(), 0);
  const std::vector<std::uint32_t> codes(7, 3);
  tables.build(codes);
  EXPECT_EQ(tables.size(), 7);
  EXPECT_EQ(tables.bytes(), HalfTables::bytes_of(7));
  const ByteCosts costs(&query, 1);
  EXPECT_EQ(cells_within(costs, 0, 0), 1);
  EXPECT_EQ(cells_within(costs, 1, 1), 17);
  EXPECT_EQ(cells_within(costs, 0, 16), 65536);
  EXPECT_EQ(cells_within(costs, 0, -1), 0);
}

}  // namespace
}  // namespace lode
