// SPDX-License-Identifier: Apache-2.0
// Search over codes against counting select over all distances: the same keys, whatever the sample said.
#include "ann/hashing/code_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "ann/hashing/counting_select.h"
#include "base/rng.h"
#include "kernels/select/signature.h"

namespace lode {
namespace {

using Codes = std::vector<std::uint32_t>;

Codes random_codes(std::int64_t n, Rng& rng) {
  Codes codes(static_cast<std::size_t>(n));
  for (std::uint32_t& word : codes) word = static_cast<std::uint32_t>(rng.next());
  return codes;
}

void expect_as_counted(CodeSearch& search, const CodeQuery& query, const char* what) {
  std::vector<std::uint16_t> distance(static_cast<std::size_t>(query.n));
  signature_kernels().distances(query.keys, query.n, query.words, query.queries, query.count, false,
                                distance.data());
  std::vector<Position> expected, rows = {7};
  select_near(distance, {.budget = query.budget, .all_ties = query.all_ties}, 100, expected);
  const CodeSearch::Work pass = search.nearest(query, {}, 100, rows);
  ASSERT_EQ(rows, expected) << what << ", " << query.n << " keys, budget " << query.budget;
  EXPECT_EQ(pass.keys >= query.n, query.budget > 0 || query.n == 0);
  if (query.words > 1 || query.count != 4 || query.budget > query.n / 32) return;
  // Tables of no key, of some, of all, and of more keys than are asked for.
  for (const std::int64_t size : {std::int64_t{0}, query.n / 2, query.n}) {
    for (const std::int64_t n : {query.n, query.n - query.n / 10}) {
      HalfTables tables;
      tables.build({query.keys, static_cast<std::size_t>(size)});
      CodeQuery some = query;
      some.n = n;
      some.budget = std::min(query.budget, n);
      distance.resize(static_cast<std::size_t>(n));
      select_near(distance, {.budget = some.budget, .all_ties = some.all_ties}, 100, expected);
      for (const bool always : {false, true}) {
        search.nearest(some, {&tables, always}, 100, rows);
        ASSERT_EQ(rows, expected) << what << ", " << n << " keys, " << size << " in tables, always " << always
                                  << ", budget " << some.budget;
      }
    }
    distance.assign(static_cast<std::size_t>(query.n), 0);
    signature_kernels().distances(query.keys, query.n, 1, query.queries, query.count, false, distance.data());
  }
}

// Codes that mislead a sample: all alike, near ones only where no run of the sample looks, near ones only
// where it does, two kinds far apart.
TEST(CodeSearch, EqualsCountingAllDistances) {
  Rng rng(1);
  CodeSearch search;
  for (const std::int64_t n : {0, 1, 63, 1000, 32768, 32769, 40000, 100003}) {
    for (const int words : {1, 2, 4}) {
      const Codes queries = random_codes(4 * words, rng);
      const Codes noise = random_codes(n * words, rng);
      const auto planted = [&](const std::function<bool(std::int64_t)>& near) {
        Codes codes = noise;
        for (std::int64_t i = 0; i < n; ++i) {
          if (near(i)) std::copy_n(queries.data(), words, codes.data() + i * words);
        }
        return codes;
      };
      const std::pair<const char*, Codes> cases[] = {
          {"noise", noise},
          {"all alike", planted([](std::int64_t) { return true; })},
          {"two kinds", planted([](std::int64_t i) { return i % 3 == 0; })},
          {"near where sampled", planted([](std::int64_t i) { return i % 49 < 16; })},
          {"near at the end", planted([&](std::int64_t i) { return i > n - 40; })}};
      for (const auto& [what, codes] : cases) {
        for (const std::int64_t budget :
             {std::int64_t{0}, std::int64_t{1}, n / 512, n / 32, n / 2, n, n + 1}) {
          for (const int count : {1, 3, 4}) {
            expect_as_counted(search,
                              {.keys = codes.data(),
                               .n = n,
                               .words = words,
                               .queries = queries.data(),
                               .count = count,
                               .budget = budget,
                               .all_ties = budget % 2 == 1},
                              what);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lode
