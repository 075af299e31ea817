// SPDX-License-Identifier: Apache-2.0
// Products, conversions, assignment and selection of every table against the float64 oracle.
#include "kernels/ref/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "random_kv.h"

namespace lode {
namespace {

using test::GuardedBytes;
using test::random_floats;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class LinearTest : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Tables, LinearTest,
                         testing::ValuesIn(supported_kernels().begin(), supported_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(LinearTest, GemvEveryCountTypeAndTail) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16})
    for (const std::int64_t k : {1, 15, 16, 100, 512}) {
      const std::int64_t n = 37;
      const GuardedBytes w(static_cast<std::size_t>(n * k * bytes_of(type)));
      const std::vector<float> w32 = random_floats(n * k, 1);
      table().narrow(w32.data(), n * k, type, w.data());
      const std::vector<float> x = random_floats(8 * k, 2);
      std::vector<float> alone(8 * n);
      for (int m = 0; m < 8; ++m)
        table().gemv(x.data() + m * k, 1, w.data(), type, k, 0, n, alone.data() + m * n, n);
      for (int m = 1; m <= 8; ++m) {
        std::vector<float> y(8 * n, -1.0f);
        table().gemv(x.data(), m, w.data(), type, k, 3, n, y.data(), n);
        for (int i = 0; i < 8; ++i)
          for (std::int64_t j = 0; j < n; ++j) {
            if (i >= m || j < 3) {
              ASSERT_EQ(y[i * n + j], -1.0f);
              continue;
            }
            ASSERT_NEAR(y[i * n + j], ref::dot(x.data() + i * k, w.data() + j * k * bytes_of(type), type, k),
                        1e-5 * k);
            ASSERT_EQ(y[i * n + j], alone[i * n + j]) << "a vector's product depends on its neighbours";
          }
      }
    }
}

TEST_P(LinearTest, Dot) {
  for (int n = 0; n <= 200; n += n < 70 ? 1 : 13) {
    const std::vector<float> x = random_floats(n, 3), y = random_floats(n, 4);
    double want = 0.0;
    for (int i = 0; i < n; ++i) want += double{x[i]} * y[i];
    ASSERT_NEAR(table().dot(x.data(), y.data(), n), want, 1e-4);
  }
}

TEST_P(LinearTest, EveryHalfWidensAndComesBack) {
  std::vector<std::uint16_t> bits(65536), back(65536);
  for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(65536);
  for (const DType type : {DType::f16, DType::bf16}) {
    table().widen(bits.data(), type, 65536, wide.data());
    table().narrow(wide.data(), 65536, type, back.data());
    for (int i = 0; i < 65536; ++i) {
      const float want = type == DType::f16 ? to_float(f16{bits[i]}) : to_float(bf16{bits[i]});
      ASSERT_EQ(std::isnan(wide[i]), std::isnan(want)) << i;
      if (std::isnan(want)) {
        const float again = type == DType::f16 ? to_float(f16{back[i]}) : to_float(bf16{back[i]});
        ASSERT_TRUE(std::isnan(again)) << i;
        continue;
      }
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(want)) << i;
      ASSERT_EQ(back[i], bits[i]);
    }
  }
}

TEST_P(LinearTest, NarrowRoundsToNearestEven) {
  std::vector<float> x = {
      0.0f,           -0.0f,          kInf,     -kInf,        65504.0f, 65519.9f,        65520.0f,
      1e30f,          0x1p-24f,       0x1p-25f, 0x1.8p-25f,   3e-8f,    1.0f + 0x1p-11f, 1.0f + 0x3p-11f,
      1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 0x1p-14f, 0x1.ffcp-15f, 3.4e38f};
  for (int i = 0; i < 5000; ++i)
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(Rng(i).next()) & 0xff7fffffu));
  std::vector<std::uint16_t> h(x.size());
  table().narrow(x.data(), static_cast<std::int64_t>(x.size()), DType::f16, h.data());
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(h[i], to_f16(x[i]).bits) << x[i];
  table().narrow(x.data(), static_cast<std::int64_t>(x.size()), DType::bf16, h.data());
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(h[i], to_bf16(x[i]).bits) << x[i];
  const std::vector<float> whole = {0.5f, 1.5f, -2.5f, 126.6f, 127.4f, 200.0f, -128.0f, -0.4f};
  std::vector<std::int8_t> q(whole.size());
  table().narrow(whole.data(), 8, DType::q8, q.data());
  EXPECT_EQ(q, (std::vector<std::int8_t>{0, 2, -2, 127, 127, 127, -127, 0}));
}

TEST_P(LinearTest, AssignFindsTheBestAndTheLowestOfEquals) {
  for (const int d : {1, 8, 64, 80, 128, 577, kMaxHeadDim})
    for (const std::int64_t n : {0, 1, 31, 33, 100})
      for (const std::int64_t c : {1, 5, 48, 130}) {
        const std::vector<float> x = random_floats(n * d, 5);
        std::vector<float> centroids = random_floats(c * d, 6);
        if (c > 4)
          std::copy_n(centroids.begin() + d, d, centroids.begin() + 4 * d);  // centroid 4 equals centroid 1
        std::vector<std::int32_t> label(static_cast<std::size_t>(n), -1);
        std::vector<float> best(static_cast<std::size_t>(n));
        table().assign(x.data(), n, centroids.data(), c, d, label.data(), best.data());
        for (std::int64_t i = 0; i < n; ++i) {
          const std::vector<double> all = ref::products(x.data() + i * d, centroids.data(), c, d);
          ASSERT_NE(label[i], c > 4 ? 4 : -1);
          ASSERT_NEAR(all[label[i]], *std::max_element(all.begin(), all.end()), 1e-5 * d);
          ASSERT_NEAR(best[i], all[label[i]], 1e-5 * d);
        }
      }
}

TEST(TopK, AgainstTheOracle) {
  Rng rng(8);
  for (int trial = 0; trial < 300; ++trial) {
    const auto n = static_cast<std::int64_t>(rng.below(trial < 200 ? 40 : trial < 280 ? 3000 : 12000));
    std::vector<float> scores(static_cast<std::size_t>(n));
    for (float& s : scores) {
      s = trial % 3 == 0 ? static_cast<float>(rng.below(4)) - 1.0f : static_cast<float>(rng.normal());
      if (rng.below(20) == 0) s = kNan;
      if (rng.below(20) == 0) s = rng.below(2) ? kInf : -kInf;
      if (rng.below(20) == 0) s = rng.below(2) ? 0.0f : -0.0f;
    }
    for (const std::int64_t k : {std::int64_t{0}, std::int64_t{1}, n / 100, n / 20, n / 3, n - 1, n, n + 5}) {
      std::vector<Position> got = {99};
      top_k(scores, k, 1000, got);
      ASSERT_EQ(got, ref::top_k(scores, k, 1000)) << "n " << n << " k " << k;
    }
  }
}

}  // namespace
}  // namespace lode
