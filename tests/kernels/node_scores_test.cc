// SPDX-License-Identifier: Apache-2.0
// Scores of nodes, of every instruction set, against float64 and on numbers chosen to hurt.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kernels/kernels.h"
#include "kernels/select/centroid_scores.h"

namespace lode {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kTypes[] = {DType::q8, DType::f16, DType::f32};

/// Nodes, and the queries that ask for them.
struct Nodes {
  DType type;
  std::int64_t count, d, planes;
  std::vector<std::byte> centroids, spreads;
  std::vector<float> wide, scales, spread_scales, most, q;  // wide: the centroids as stored, [count, d]

  Nodes(DType t, std::int64_t n, std::int64_t dims, int queries)
      : type(t), count(n), d(dims), planes((d + 1) / 2) {
    Rng rng(static_cast<std::uint64_t>(n * 1000 + dims));
    const auto draw = [&](double low, double high) {
      return static_cast<float>(low + rng.uniform() * (high - low));
    };
    const bool coded = t == DType::q8;
    std::vector<float> numbers;
    for (std::int64_t i = 0; i < n * d; ++i) numbers.push_back(coded ? draw(-127, 127) : draw(-2, 2));
    centroids.resize(static_cast<std::size_t>(n * d * bytes_of(t)));
    wide.resize(numbers.size());
    kernels().narrow(numbers.data(), n * d, t, centroids.data());
    kernels().widen(centroids.data(), t, n * d, wide.data());
    for (std::int64_t i = 0; i < n; ++i) {
      scales.push_back(draw(0.001, 0.02));
      spread_scales.push_back(draw(0.0, 0.02));
      most.push_back(draw(0.0, 3.0));
    }
    for (std::int64_t i = 0; i < n * planes; ++i) spreads.push_back(static_cast<std::byte>(rng.below(128)));
    for (std::int64_t i = 0; i < queries * d; ++i) q.push_back(draw(-1, 1));
  }
  NodeRows rows(bool spread) const {
    return {.type = type,
            .centroids = centroids.data(),
            .scales = type == DType::q8 ? scales.data() : nullptr,
            .spreads = spread ? spreads.data() : nullptr,
            .spread_scales = spread_scales.data(),
            .most = most.data(),
            .count = count,
            .d = d};
  }
  /// In float64; `size` becomes the sum of what is added, without signs, and of what may be lost where
  /// queries come as whole numbers of 22 bits: half of the lowest, here as 1e-6 of something.
  double want(int query, std::int64_t node, bool spread, double& size) const {
    const float* const own = q.data() + query * d;
    const auto at = [](const auto& x, std::int64_t i) {
      return static_cast<double>(x[static_cast<std::size_t>(i)]);
    };
    double dot = 0, variance = 0, largest = 0;
    for (std::int64_t j = 0; j < d; ++j) largest = std::max<double>(largest, std::abs(own[j]));
    size = 0;
    for (std::int64_t j = 0; j < d; ++j) {
      dot += own[j] * at(wide, node * d + j);
      size += (std::abs(own[j]) + 0.12 * largest) * std::abs(at(wide, node * d + j));
    }
    const double scale = type == DType::q8 ? at(scales, node) : 1.0;
    size *= scale;
    if (!spread) return scale * dot;
    for (std::int64_t j = 0; j < d; ++j)
      variance += static_cast<double>(own[j]) * own[j] *
                  static_cast<double>(
                      std::to_integer<int>(spreads[static_cast<std::size_t>(node * planes + j % planes)]));
    const double s = std::sqrt(variance * at(spread_scales, node)), below = std::min(s, at(most, node));
    size += below * s;
    return scale * dot + below * (s - below / 2);
  }
};

TEST(CentroidScores, AreThoseOfFloat64) {
  for (const CentroidScoreKernels* table : supported_centroid_score_kernels())
    for (const DType type : kTypes)
      for (const std::int64_t d : {2, 7, 16, 63, 64, 80, 128, 256, 512, 576, kMaxHeadDim})
        for (const std::int64_t n : {1, 2, 5, 16, 31, 127, 128, 300}) {
          const int queries = static_cast<int>(1 + (n + d) % kMostNodeQueries);
          const Nodes nodes(type, n, d, queries);
          for (const bool spread : {false, true}) {
            const std::int64_t stride = n + 3;  // what lies between rows must stay
            std::vector<float> z(static_cast<std::size_t>(queries * stride), 7.0f);
            table->score(nodes.q.data(), queries, nodes.rows(spread), z.data(), stride);
            for (int m = 0; m < queries; ++m)
              for (std::int64_t i = 0; i < stride; ++i) {
                const float found = z[static_cast<std::size_t>(m * stride + i)];
                double size = 0;
                if (i >= n) {
                  ASSERT_EQ(found, 7.0f) << table->name;
                } else {
                  const double want = nodes.want(m, i, spread, size);
                  ASSERT_NEAR(found, want, 1e-6 * (size + 1e-6))
                      << table->name << " " << name_of(type) << " d " << d << " n " << n << " query " << m;
                }
              }
          }
        }
}

/// Whichever queries share the call, and wherever a node lies in it.
TEST(CentroidScores, OfOnePairDependOnNothingElse) {
  for (const CentroidScoreKernels* table : supported_centroid_score_kernels())
    for (const DType type : kTypes) {
      const Nodes nodes(type, 150, 80, kMostNodeQueries);
      std::vector<float> all(kMostNodeQueries * 150);
      table->score(nodes.q.data(), kMostNodeQueries, nodes.rows(true), all.data(), 150);
      for (int queries = 1; queries <= kMostNodeQueries; ++queries)
        for (const std::int64_t begin : {0, 1, 6, 149}) {
          NodeRows some = nodes.rows(true);
          some.centroids += begin * nodes.d * bytes_of(type);
          some.spreads += begin * nodes.planes;
          if (some.scales) some.scales += begin;
          some.spread_scales += begin, some.most += begin, some.count -= begin;
          std::vector<float> z(static_cast<std::size_t>(queries * some.count));
          const int first = kMostNodeQueries - queries;
          table->score(nodes.q.data() + first * nodes.d, queries, some, z.data(), some.count);
          for (int m = 0; m < queries; ++m)
            for (std::int64_t i = 0; i < some.count; ++i)
              ASSERT_EQ(z[static_cast<std::size_t>(m * some.count + i)],
                        all[static_cast<std::size_t>((first + m) * 150 + begin + i)])
                  << table->name << " " << queries << " from " << begin;
        }
    }
}

TEST(CentroidScores, SpreadsHaveTheirLimits) {
  for (const CentroidScoreKernels* table : supported_centroid_score_kernels()) {
    Nodes nodes(DType::q8, 20, 4, 1);
    std::fill(nodes.q.begin(), nodes.q.end(), 1.0f);
    std::fill(nodes.centroids.begin(), nodes.centroids.end(), std::byte{0});
    std::fill(nodes.spreads.begin(), nodes.spreads.end(), std::byte{1});  // s^2 = 4 spread_scale
    std::fill(nodes.most.begin(), nodes.most.end(), 2.0f);
    nodes.spread_scales[0] = 0.0f, nodes.spread_scales[1] = 0.25f, nodes.spread_scales[2] = 4.0f;
    nodes.spread_scales[3] = kInfinity, nodes.spread_scales[4] = std::numeric_limits<float>::max();
    nodes.spread_scales[5] = std::numeric_limits<float>::quiet_NaN();
    nodes.most[6] = 0.0f;  // a key alone
    nodes.spreads[14] = nodes.spreads[15] = std::byte{0};
    std::vector<float> z(20);
    table->score(nodes.q.data(), 1, nodes.rows(true), z.data(), 20);
    EXPECT_EQ(z[0], 0.0f) << table->name;
    EXPECT_FLOAT_EQ(z[1], 0.5f) << "s = 1: s^2 / 2";
    EXPECT_FLOAT_EQ(z[2], 6.0f) << "s = 4, beyond most = 2: 2 (4 - 1)";
    for (const std::size_t i : {3u, 4u, 5u})
      EXPECT_FLOAT_EQ(z[i], 2.0f * kLargestSpread) << table->name << " " << i;
    EXPECT_EQ(z[6], 0.0f) << table->name;
    EXPECT_EQ(z[7], 0.0f) << table->name << ": nothing varies";
  }
}

/// NaN and infinity of one query stay its own, and every table makes the same of them.
TEST(CentroidScores, BadQueriesHarmThemselvesAlone) {
  std::vector<float> plain;
  for (const CentroidScoreKernels* table : supported_centroid_score_kernels()) {
    const Nodes nodes(DType::q8, 37, 64, 4);
    std::vector<float> want(4 * 37), z(4 * 37), q = nodes.q;
    table->score(nodes.q.data(), 4, nodes.rows(true), want.data(), 37);
    q[64 + 5] = std::numeric_limits<float>::quiet_NaN(), q[2 * 64] = kInfinity;
    table->score(q.data(), 4, nodes.rows(true), z.data(), 37);
    if (plain.empty()) plain = z;
    for (std::size_t i = 0; i < 37; ++i) {
      EXPECT_EQ(z[i], want[i]);
      EXPECT_TRUE(std::isnan(z[37 + i]));
      const float infinite = z[2 * 37 + i], as = plain[2 * 37 + i];
      EXPECT_FALSE(std::isfinite(infinite));
      EXPECT_TRUE(infinite == as || (std::isnan(infinite) && std::isnan(as))) << table->name;
      EXPECT_EQ(z[3 * 37 + i], want[3 * 37 + i]);
    }
  }
}

}  // namespace
}  // namespace lode
