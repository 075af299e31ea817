// SPDX-License-Identifier: Apache-2.0
// What ranks choose of their keys beside what one machine chooses of all.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "support/world.h"

namespace lode::test {

/// Far keys of each (token, query head) of a block, by a selector that has indexed its keys.
inline std::vector<FarSet> choice_of(Selector& selector, const QueryBlock& block,
                                     const LayerGeometry& geometry) {
  Selection out;
  selector.select({&block, 1}, out);
  std::vector<std::string> problems;
  std::vector<FarSet> found = far_sets(out, block, geometry, &problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
  return found;
}

/// Expects that each rank names keys of its own alone, and all together what one machine chooses.
inline void expect_union(std::span<const std::vector<FarSet>> found /*[ranks][queries]*/,
                         std::span<const FarSet> wanted /*[queries]*/, std::int64_t document) {
  const int size = static_cast<int>(found.size());
  for (std::size_t query = 0; query < wanted.size(); ++query) {
    FarSet all;
    std::size_t named = 0;
    for (int r = 0; r < size; ++r) {
      const FarSet& part = found[static_cast<std::size_t>(r)][query];
      const Share own = token_share(document, r, size);
      if (!part.empty()) {
        EXPECT_GE(part.begin()->first, own.begin);
        EXPECT_LT(part.rbegin()->first, own.end);
      }
      named += part.size();
      all.insert(part.begin(), part.end());
    }
    EXPECT_EQ(named, all.size());
    EXPECT_TRUE(all == wanted[query]) << "query " << query << " over " << size << ": " << all.size()
                                      << " keys, " << wanted[query].size() << " wanted";
  }
}

}  // namespace lode::test
