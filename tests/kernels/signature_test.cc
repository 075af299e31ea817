// SPDX-License-Identifier: Apache-2.0
// Signature kernels: every table gives the integers of a bit-by-bit count, at every length and offset.
#include "kernels/select/signature.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

std::vector<std::uint32_t> random_words(std::int64_t n, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::uint32_t> x(static_cast<std::size_t>(n));
  for (std::uint32_t& word : x) {
    word = static_cast<std::uint32_t>(rng.next());
    if (rng.below(8) == 0) word = rng.below(2) == 0 ? 0u : ~0u;
  }
  return x;
}

int bits_apart(const std::uint32_t* a, const std::uint32_t* b, int words) {
  int apart = 0;
  for (int bit = 0; bit < words * 32; ++bit)
    apart += ((a[bit / 32] >> (bit % 32)) & 1u) != ((b[bit / 32] >> (bit % 32)) & 1u) ? 1 : 0;
  return apart;
}

class EveryTable : public testing::TestWithParam<const SignatureKernels*> {};
INSTANTIATE_TEST_SUITE_P(Signatures, EveryTable, testing::ValuesIn(supported_signature_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(EveryTable, DistancesCountBitsOfAllQueries) {
  constexpr std::uint16_t kUntouched = 54321;
  for (const int words : {1, 2, 4}) {
    const std::vector<std::uint32_t> keys = random_words(200 * words, 1),
                                     queries = random_words(32 * words, 2);
    for (const int count : {0, 1, 2, 4, 7, 8, 9, 14, 31, 32}) {
      for (const int n : {0, 1, 7, 16, 17, 33, 63, 64, 65, 128, 199}) {
        for (const bool add : {false, true}) {
          std::vector<std::uint16_t> distance(static_cast<std::size_t>(n) + 1, kUntouched);
          if (add) std::iota(distance.begin(), distance.end() - 1, std::uint16_t{3});
          const std::uint32_t* const from = keys.data() + words;  // off the alignment of a vector
          GetParam()->distances(from, n, words, queries.data(), count, add, distance.data());
          for (int i = 0; i < n; ++i) {
            int expected = add ? i + 3 : 0;
            for (int q = 0; q < count; ++q)
              expected += bits_apart(from + i * words, queries.data() + q * words, words);
            ASSERT_EQ(distance[static_cast<std::size_t>(i)], expected)
                << words << " words, " << count << " queries, key " << i << " of " << n;
          }
          ASSERT_EQ(distance.back(), kUntouched);
        }
      }
    }
  }
}

// All queries agree in every bit: the largest sums that a byte or 16 bits must hold.
TEST_P(EveryTable, FarthestSignaturesReach4096) {
  const std::vector<std::uint32_t> keys(4 * 80, 0u), queries(4 * 32, ~0u);
  std::vector<std::uint16_t> distance(80);
  for (const int words : {1, 2, 4}) {
    for (const int count : {1, 7, 8, 14, 15, 16, 31, 32}) {
      GetParam()->distances(keys.data(), 80, words, queries.data(), count, false, distance.data());
      EXPECT_EQ(std::count(distance.begin(), distance.end(), 32 * words * count), 80) << count;
    }
  }
}

TEST_P(EveryTable, CountsCollectsAndFindsTheLeast) {
  Rng rng(3);
  for (const int n : {0, 1, 15, 16, 17, 31, 32, 33, 63, 65, 300}) {
    for (const int levels : {1, 3, 130, 65536}) {
      std::vector<std::uint16_t> x(static_cast<std::size_t>(n));
      for (std::uint16_t& value : x)
        value = static_cast<std::uint16_t>(65535 - rng.below(static_cast<std::uint64_t>(levels)));
      const std::uint16_t least = n == 0 ? std::uint16_t{65535} : *std::min_element(x.begin(), x.end());
      EXPECT_EQ(GetParam()->least(x.data(), n), least);
      for (const int limit : {0, 65535 - levels / 2, 65534, 65535, 65535 - levels + 1}) {
        std::vector<Position> expected;
        for (int i = 0; i < n; ++i) {
          if (x[static_cast<std::size_t>(i)] <= limit) expected.push_back(1000 + i);
        }
        EXPECT_EQ(GetParam()->count_up_to(x.data(), n, static_cast<std::uint16_t>(limit)),
                  std::ssize(expected));
        const std::size_t room = std::min<std::size_t>(expected.size() + 16, static_cast<std::size_t>(n));
        std::vector<Position> rows(room + 1, -7);
        const std::int64_t found =
            GetParam()->collect_up_to(x.data(), n, static_cast<std::uint16_t>(limit), 1000, rows.data());
        ASSERT_EQ(found, std::ssize(expected));
        EXPECT_EQ(rows.back(), -7);
        rows.resize(expected.size());
        EXPECT_EQ(rows, expected);
      }
    }
  }
}

TEST_P(EveryTable, SiluFollowsItsFormula) {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0.0f, -0.0f, 1e-30f,        -1e-30f, 1e38f, -1e38f,
                          inf,  -inf,  std::nanf(""), 88.0f,   -86.9f};
  for (float a = -90.0f; a < 90.0f; a += 0.37f) x.push_back(a);
  std::vector<float> y = x;
  GetParam()->silu(y.data(), std::ssize(y));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double a = x[i], expected = std::isinf(x[i]) ? (a > 0 ? a : 0.0) : a / (1.0 + std::exp(-a));
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(y[i]));
    } else if (a < -87.0) {
      EXPECT_NEAR(y[i], 0.0, 1e-35);
    } else if (std::isinf(expected)) {
      EXPECT_EQ(y[i], expected);
    } else {
      EXPECT_NEAR(y[i], expected, std::abs(expected) * 5e-7) << x[i];
    }
  }
}

}  // namespace
}  // namespace lode
