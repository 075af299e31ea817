// SPDX-License-Identifier: Apache-2.0
// Rows in four bits: turning keeps products and comes back, errors are those of 16 levels, and hostile rows are
// NaN or exact.
#include "kernels/q4_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/kv_row.h"
#include "random_kv.h"

namespace lode {
namespace {

using test::random_floats;
using Row = std::vector<float>;

constexpr int kWidths[] = {1, 2, 7, 16, 31, 32, 33, 64, 80, 96, 128, 256, 512, 640};

Row round_trip(const Row& x) {
  const int d = static_cast<int>(x.size());
  const test::GuardedBytes row(static_cast<std::size_t>(row_bytes_of(DType::q4, d)));
  narrow_q4(x.data(), d, row.data());
  Row back(x.size());
  widen_q4(row.data(), d, back.data());
  EXPECT_EQ(is_finite_q4(row.data(), d), std::isfinite(back[0]));
  return back;
}

double norm(const Row& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

double relative_error(const Row& x) {
  Row error = round_trip(x);
  for (std::size_t i = 0; i < x.size(); ++i) error[i] -= x[i];
  return norm(error) / norm(x);
}

TEST(Q4Rows, TurningKeepsProductsAndComesBack) {
  for (const int d : kWidths) {
    const Row x = random_floats(d, 1), y = random_floats(d, 2);
    Row a = x, b = y;
    turn_q4(a.data(), d);
    turn_q4(b.data(), d);
    const double product = std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    EXPECT_NEAR(std::inner_product(a.begin(), a.end(), b.begin(), 0.0), product, 1e-4 * std::sqrt(d));
    turn_back_q4(a.data(), d);
    for (int c = 0; c < d; ++c)
      EXPECT_NEAR(a[static_cast<std::size_t>(c)], x[static_cast<std::size_t>(c)], 1e-5);
  }
}

TEST(Q4Rows, ErrorsAreThoseOfSixteenLevels) {
  for (const int d : {32, 64, 96, 128}) {
    double sum = 0.0;
    for (int i = 0; i < 200; ++i)
      sum += relative_error(random_floats(d, static_cast<std::uint64_t>(i), 3.0f));
    EXPECT_LT(sum / 200, 0.095)
        << d;  // Lloyd's bound for normal numbers is 0.097, before the scale is fitted
  }
}

TEST(Q4Rows, NoDirectionErrsMuchMore) {
  Row spike = random_floats(128, 3, 0.1f);
  spike[37] = 20.0f;
  EXPECT_LT(relative_error(spike), 0.12);
  EXPECT_LT(relative_error(Row(128, 1.0f)), 0.12);  // all alike: signs keep it from one column
  Row turned(128, 0.0f);
  turned[5] = 3.0f;
  turn_back_q4(turned.data(), 128);  // the worst one: a single column once it is turned
  EXPECT_LT(relative_error(turned), 0.3);
  EXPECT_NEAR(relative_error(Row(1, -5.0f)), 0.0, 1e-3);
}

TEST(Q4Rows, HostileRows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const int d : kWidths) {
    for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 1e38f, 1e7f}) {
      Row x(static_cast<std::size_t>(d), 0.5f);
      x.back() = bad;
      const Row back = round_trip(x);
      for (const float value : back) EXPECT_TRUE(std::isnan(value) || std::isfinite(value));
      const bool too_large = !(std::fabs(bad) < 1e30f);
      EXPECT_TRUE(!too_large || std::isnan(back[0])) << d << " " << bad;
    }
    for (const float tiny : {0.0f, -0.0f, 1e-45f, 1e-30f})
      for (const float value : round_trip(Row(static_cast<std::size_t>(d), tiny)))
        EXPECT_NEAR(value, 0.0f, 1e-6f);
  }
}

TEST(Q4Rows, ReadAsKeysAndValues) {
  const test::RandomKv kv(DType::q4, 5, 80);
  Row key(80), value(80), want(80);
  for (int row = 0; row < 5; ++row) {
    read_key_row(kv.view(), row, key.data());
    read_value_row(kv.view(), row, value.data());
    widen_q4(kv.view().k + row * kv.view().row_bytes(), 80, want.data());
    EXPECT_EQ(key, want);
    EXPECT_NE(value, want);
  }
}

}  // namespace
}  // namespace lode
