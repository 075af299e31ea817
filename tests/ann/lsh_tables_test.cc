// SPDX-License-Identifier: Apache-2.0
// Hash tables find what a plain count over all codes finds, whatever came, went and came again.
#include "ann/hashing/lsh_tables.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace lode::test {
namespace {

/// Tables beside the plain list of codes that they should stand for.
struct Pair {
  LshTables tables;
  int count, bits;
  std::vector<std::uint16_t> codes = {};  // [n, count]

  Pair(int count_, int bits_) : tables(count_, bits_), count(count_), bits(bits_) {}
  std::int64_t size() const { return std::ssize(codes) / count; }
  void append(std::int64_t n, Rng& rng) {
    std::vector<std::uint16_t> fresh;
    for (std::int64_t i = 0; i < n * count; ++i)
      fresh.push_back(static_cast<std::uint16_t>(rng.below(std::uint64_t{1} << bits)));
    tables.append(fresh, n);
    codes.insert(codes.end(), fresh.begin(), fresh.end());
  }
  void cut(std::int64_t n) {
    tables.cut(n);
    codes.resize(static_cast<std::size_t>(std::min(n, size()) * count));
  }
  void expect_alike(Rng& rng, LshTables::Scratch& scratch) const {
    ASSERT_EQ(tables.size(), size());
    std::vector<std::uint16_t> query;
    for (int t = 0; t < count; ++t)
      query.push_back(static_cast<std::uint16_t>(rng.below(std::uint64_t{1} << bits)));
    const auto end = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(size()) + 1));
    std::vector<std::int32_t> expected, found;
    for (std::int64_t i = 0; i < end; ++i) {
      int times = 0;
      for (int t = 0; t < count; ++t)
        times += codes[static_cast<std::size_t>(i * count + t)] == query[static_cast<std::size_t>(t)];
      if (times >= 2) expected.push_back(static_cast<std::int32_t>(i));
    }
    EXPECT_GE(tables.meet_twice(query, end, scratch, found), 0);
    EXPECT_EQ(found, expected) << size() << " up to " << end;
  }
};

TEST(LshTables, FindWhatACountOfAllCodesFinds) {
  LshTables::Scratch scratch;  // shared: nothing of one search reaches another
  for (const auto& [count, bits] : {std::pair{2, 1}, {9, 3}, {40, 6}, {300, 1}, {3, 16}}) {
    Pair pair(count, bits);
    Rng rng(static_cast<std::uint64_t>(count));
    pair.expect_alike(rng, scratch);
    for (int step = 0; step < 60; ++step) {
      // Small steps leave vectors behind the lists, large ones lay the lists anew, cuts leave stale entries.
      pair.append(static_cast<std::int64_t>(rng.below(step % 10 == 3 ? 900 : 30)), rng);
      if (rng.below(4) == 0)
        pair.cut(pair.size() - static_cast<std::int64_t>(rng.below(
                                   static_cast<std::uint64_t>(pair.size()) / (step == 40 ? 1 : 9) + 1)));
      pair.expect_alike(rng, scratch);
    }
  }
}

TEST(LshTables, OneBucketHoldsAll) {
  LshTables tables(5, 4);
  tables.append(std::vector<std::uint16_t>(5 * 2000, 15), 2000);
  LshTables::Scratch scratch;
  std::vector<std::int32_t> found;
  tables.meet_twice(std::vector<std::uint16_t>(5, 15), 2000, scratch, found);
  EXPECT_EQ(std::ssize(found), 2000);
  EXPECT_EQ(found.back(), 1999);
  tables.meet_twice(std::vector<std::uint16_t>{15, 0, 0, 0, 0}, 2000, scratch, found);
  EXPECT_TRUE(found.empty());
}

}  // namespace
}  // namespace lode::test
