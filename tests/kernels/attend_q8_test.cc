// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of q8, whose kernels multiply whole numbers, against the float64 oracle on the same rows:
// with numbers that fixed-point bits hold badly or not at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/ref/attention.h"
#include "random_kv.h"
#include "support/rounding.h"

namespace lode {
namespace {

using test::random_floats;
using test::RandomKv;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct State {
  std::vector<float> o, m, l;
  State(int queries, int d)
      : o(static_cast<std::size_t>(queries) * d), m(static_cast<std::size_t>(queries), -kInf), l(m.size()) {}
  SoftmaxState view() { return {o.data(), m.data(), l.data()}; }
  double output(int r, int c, int d) const { return double{o[static_cast<std::size_t>(r * d + c)]} / l[r]; }
};

class AttendQ8 : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
  /// Normal numbers that the kernel does not round.
  std::vector<float> queries_of(int queries, int d, std::uint64_t seed, float size) const {
    std::vector<float> q = random_floats(std::int64_t{queries} * d, seed, size);
    if (test::multiplies_words(table(), DType::q8))
      for (auto at = q.begin(); at != q.end(); at += d) test::round_to_words({at, at + d});
    return q;
  }
  State attend(const std::vector<float>& q, const KvRows& kv) const {
    const int queries = static_cast<int>(q.size()) / kv.d;
    State state(queries, kv.d);
    table().attend_run(q.data(), queries, kv, 0, kv.rows, state.view());
    return state;
  }
  /// Outputs and log-sum-exps within `tolerance` of the oracle's, outputs relative to the largest value.
  void expect_close(const std::vector<float>& q, const KvRows& kv, double tolerance) const {
    const State state = attend(q, kv);
    const double size = 127.0 * *std::max_element(kv.v_scale, kv.v_scale + kv.rows);
    for (int r = 0; r < std::ssize(state.m); ++r) {
      const ref::Result want = ref::attend(q.data() + r * kv.d, 1.0, kv, 0, kv.rows);
      for (int c = 0; c < kv.d; ++c)
        ASSERT_NEAR(state.output(r, c, kv.d), want.output[static_cast<std::size_t>(c)], tolerance * size)
            << "query " << r << " of " << state.m.size() << " column " << c << " d " << kv.d;
      ASSERT_NEAR(state.m[r] + std::log(double{state.l[r]}), want.lse,
                  tolerance * (1.0 + std::abs(want.lse)));
    }
  }
  /// Every query has the bits that it has alone.
  void expect_alone(const std::vector<float>& q, const KvRows& kv) const {
    const State together = attend(q, kv);
    for (int r = 0; r < std::ssize(together.m); ++r) {
      const State alone = attend({q.begin() + r * kv.d, q.begin() + (r + 1) * kv.d}, kv);
      ASSERT_EQ(std::memcmp(alone.o.data(), together.o.data() + r * kv.d, sizeof(float) * kv.d), 0) << r;
      ASSERT_EQ(std::memcmp(alone.m.data(), &together.m[r], sizeof(float)), 0) << r;
      ASSERT_EQ(std::memcmp(alone.l.data(), &together.l[r], sizeof(float)), 0) << r;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Tables, AttendQ8,
                         testing::ValuesIn(supported_kernels().begin(), supported_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

/// A row of the largest numbers there are, so that sums of whole numbers come as close to their end as they can.
TEST_P(AttendQ8, TheLargestNumbers) {
  for (const int d : {64, 128, 512, 576, kMaxHeadDim}) {
    const RandomKv kv(DType::q8, 70, d, [](int part, std::int64_t row, int c) {
      return part == 0 ? (row % 2 == 0 ? 127.0f : -127.0f) : c % 2 == 0 ? 127.0f : -127.0f;
    });
    std::vector<float> q(std::size_t{3} * d);
    for (int c = 0; c < d; ++c) {
      q[static_cast<std::size_t>(c)] = 1e-4f, q[static_cast<std::size_t>(d + c)] = -1e-4f;
      q[static_cast<std::size_t>(2 * d + c)] = c % 2 == 0 ? 1e-4f : -1e-4f;
    }
    expect_close(q, kv.view(), 5e-5);
  }
}

TEST_P(AttendQ8, EveryLengthAndOddDimensions) {
  for (const int d : {1, 3, 63, 65, 77, 100, 128, 191})
    for (const int n : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 35, 63, 64, 65, 97}) {
      const RandomKv kv(DType::q8, n, d, static_cast<std::uint64_t>(d * 100 + n));
      for (const int queries : {1, 2, 3, 4, 6, 8, 13})
        expect_close(queries_of(queries, d, 5, 1.0f / std::sqrt(static_cast<float>(d))), kv.view(), 1.5e-4);
      ASSERT_FALSE(HasFatalFailure()) << "d " << d << " rows " << n;
    }
}

/// One key has nearly all of the mass. The thousands of others matter together, each far below the largest weight's last
/// bit; their values point elsewhere.
TEST_P(AttendQ8, ThousandsOfTinyWeightsBesideALargeOne) {
  const int d = 64, n = 4000;
  for (const float gap : {8.0f, 12.0f, 20.0f, 60.0f}) {
    const RandomKv kv(DType::q8, n, d, [=](int part, std::int64_t row, int c) {
      if (part == 0) return c == 0 ? (row == 1234 ? gap : 0.0f) : 0.0f;
      return row == 1234 ? (c % 2 == 0 ? 1.0f : 0.0f) : (c % 2 == 0 ? 0.0f : 1.0f);
    });
    std::vector<float> q(5 * d);
    for (int r = 0; r < 5; ++r) q[static_cast<std::size_t>(r * d)] = 1.0f;
    expect_close(q, kv.view(), 1e-4);
    // What the others add up to is right by itself, too.
    const State state = attend(q, kv.view());
    const double others = (n - 1) * std::exp(-double{gap}), want = others / (1.0 + others);
    if (gap < 15.0f) {  // beyond that the block of the large one has none of it
      EXPECT_NEAR(state.output(0, 1, d) / want, 1.0, 0.01) << gap;
    }
  }
}

/// The same in texts of a period: values point one way in some of the rows and the other way in the rest.
TEST_P(AttendQ8, TinyWeightsOfAPeriod) {
  const int d = 64, n = 64;
  for (const int period : {2, 3, 4, 8})
    for (const float gap : {10.0f, 11.0f, 11.5f, 12.0f, 13.0f}) {
      const RandomKv kv(DType::q8, n, d, [=](int part, std::int64_t row, int c) {
        if (part == 0) return c == 0 && row == 0 ? gap : 0.0f;
        return row == 0 ? 0.0f : row % period == 1 ? 1.0f : -1.0f;
      });
      std::vector<float> q(2 * d);
      q[0] = q[d] = 1.0f;
      expect_close(q, kv.view(), 2e-4);
      ASSERT_FALSE(HasFatalFailure()) << "period " << period << " gap " << gap;
    }
}

/// Codes of -128, which no store writes, but files may hold.
TEST_P(AttendQ8, TheLeastCode) {
  for (const int d : {64, 128, kMaxHeadDim}) {
    const RandomKv kv(DType::q8, 70, d);
    const std::vector<std::byte> codes(std::size_t{70} * d, std::byte{0x80});
    KvRows rows = kv.view();
    rows.k = rows.v = codes.data();
    std::vector<float> q(std::size_t{2} * d, 1e-4f);
    std::fill(q.begin() + d, q.end(), -1e-4f);
    expect_close(q, rows, 5e-5);
  }
}

TEST_P(AttendQ8, RoundsQueriesToSixteenBits) {
  const int d = 64;
  const RandomKv kv(DType::q8, 500, d);
  expect_close(random_floats(4 * d, 8, 0.3f), kv.view(), 2e-4);
}

TEST_P(AttendQ8, HugeLogits) {
  const int d = 128;
  const RandomKv kv(DType::q8, 500, d, [](int part, std::int64_t row, int c) {
    if (part == 1) return static_cast<float>((row * 7 + c) % 23) - 11.0f;
    return c == 0 ? (row % 3 == 0 ? 300.0f : row % 3 == 1 ? -300.0f : 298.0f) : 0.0f;
  });
  std::vector<float> q(4 * d);
  for (int r = 0; r < 4; ++r) q[static_cast<std::size_t>(r * d)] = 1.0f + static_cast<float>(r);
  expect_close(q, kv.view(), 1e-4);
}

TEST_P(AttendQ8, EqualKeysGiveTheMean) {
  const int d = 64, n = 10'000;
  const RandomKv kv(DType::q8, n, d, [](int part, std::int64_t row, int) {
    return part == 0 ? 0.5f : static_cast<float>(row & 1);
  });
  const State state = attend(std::vector<float>(3 * d, 1.0f), kv.view());
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < d; ++c) EXPECT_NEAR(state.output(r, c, d), 0.5, 2e-6);
}

/// Scales of values that differ as widely as numbers do: weights times scales below what fixed-point bits hold.
TEST_P(AttendQ8, ValuesOfEverySize) {
  const int d = 80, n = 200;
  for (const float size : {1e-37f, 1e-36f, 1e-30f, 1e-20f, 1e-3f, 1e20f, 1e30f})
    for (const bool mixed : {false, true}) {
      const RandomKv kv(DType::q8, n, d, [=, rng = Rng(3)](int part, std::int64_t row, int) mutable {
        const auto x = static_cast<float>(rng.normal());
        return part == 0 ? x : mixed && row >= 64 && row < 150 ? x * 0x1p-60f * size : x * size;
      });
      if (mixed && size < 1e-3f) continue;  // would be denormal
      for (const int queries : {1, 3, 4, 8}) expect_close(queries_of(queries, d, 8, 0.2f), kv.view(), 1e-4);
      ASSERT_FALSE(HasFatalFailure()) << size << (mixed ? " mixed" : "");
    }
}

/// Rows of zeros have a scale of 0.
TEST_P(AttendQ8, RowsOfZeros) {
  const int d = 64;
  const RandomKv kv(DType::q8, 100, d, [rng = Rng(3)](int, std::int64_t row, int) mutable {
    const auto x = static_cast<float>(rng.normal());
    return row % 3 == 0 || (row >= 32 && row < 64) ? 0.0f : x;
  });
  expect_close(queries_of(5, d, 8, 0.2f), kv.view(), 1e-4);
  std::vector<float> scale(kv.view().v_scale, kv.view().v_scale + 100);
  scale[1] = -0.0f;
  KvRows rows = kv.view();
  rows.v_scale = scale.data();
  expect_close(queries_of(5, d, 8, 0.2f), rows, 1e-4);
  const RandomKv nothing(DType::q8, 40, d, [](int, std::int64_t, int) { return 0.0f; });
  const State state = attend(random_floats(5 * d, 8, 0.2f), nothing.view());
  for (int r = 0; r < 5; ++r) {
    EXPECT_EQ(state.l[r], 40.0f);
    EXPECT_EQ(state.output(r, 7, d), 0.0);
  }
}

TEST_P(AttendQ8, QueriesOfEverySize) {
  const int d = 72;
  RandomKv small(DType::q8, 90, d);
  for (const float size : {0.0f, 1e-38f, 1e-32f, 1e-20f, 1.0f, 30.0f}) {
    std::vector<float> q = queries_of(6, d, 4, size);
    for (int c = 0; c < d; ++c)
      q[static_cast<std::size_t>(2 * d + c)] *= 0x1p-10f;  // each has a step of its own
    expect_close(q, small.view(), 1e-4);
    expect_alone(q, small.view());
    ASSERT_FALSE(HasFatalFailure()) << size;
  }
}

TEST_P(AttendQ8, AQueryThatIsNoNumberIsAlone) {
  const int d = 128;
  const RandomKv kv(DType::q8, 150, d);
  for (const float bad : {kNan, kInf, -kInf})
    for (const int queries : {2, 3, 4, 7, 8, 16, 19}) {
      std::vector<float> q = random_floats(queries * d, 4, 0.1f);
      q[static_cast<std::size_t>(d + 5)] = bad;
      const State state = attend(q, kv.view());
      for (int r = 0; r < queries; ++r)
        EXPECT_EQ(std::isnan(state.output(r, 0, d)), r == 1) << r << " of " << queries << " with " << bad;
      expect_alone(q, kv.view());
    }
}

/// Scores of -inf have weight 0, also where an infinite query makes them.
TEST_P(AttendQ8, AnInfiniteQueryScoresAsItsSignsSay) {
  const int d = 64;
  const RandomKv kv(DType::q8, 50, d,
                    [](int part, std::int64_t, int c) { return part == 0 && c == 0 ? -1.0f : 0.5f; });
  std::vector<float> q(2 * d, 0.0f);
  q[0] = kInf, q[d] = -kInf;
  const State state = attend(q, kv.view());
  EXPECT_EQ(state.l[0], 0.0f);
  EXPECT_EQ(state.m[0], -kInf);
  EXPECT_TRUE(std::isnan(state.l[1]));
}

/// What one key's scale makes of one query's score does not reach the others that share registers with it.
TEST_P(AttendQ8, AScoreThatIsNoNumberIsAlone) {
  const int d = 64;
  for (const int queries : {2, 3, 4, 8, 12}) {
    const RandomKv kv(DType::q8, 100, d, [rng = Rng(3)](int part, std::int64_t row, int c) mutable {
      const auto x = static_cast<float>(rng.normal());
      return part == 0 && row == 70 ? (c == 0 ? 1.0f : 0.0f) : x;
    });
    std::vector<float> k_scale(kv.view().k_scale, kv.view().k_scale + 100);
    k_scale[70] = kInf;
    KvRows rows = kv.view();
    rows.k_scale = k_scale.data();
    std::vector<float> q = random_floats(queries * d, 4, 0.1f);
    for (int r = 0; r < queries; ++r)
      q[static_cast<std::size_t>(r * d)] = -1.0f;  // the score is -inf: weight 0
    q[0] = 1.0f;                                   // and here +inf
    const State state = attend(q, rows);
    EXPECT_TRUE(std::isnan(state.output(0, 3, d)));
    std::vector<std::int64_t> others;
    for (int i = 0; i < 100; ++i)
      if (i != 70) others.push_back(i);
    for (int r = 1; r < queries; ++r) {
      const ref::Result want = ref::attend(q.data() + r * d, 1.0, kv.view(), others);
      for (int c = 0; c < d; ++c) ASSERT_NEAR(state.output(r, c, d), want.output[c], 2e-4) << r;
    }
    expect_alone(q, rows);
  }
}

TEST_P(AttendQ8, ScalesThatAreNoNumbers) {
  const int d = 96;
  const RandomKv kv(DType::q8, 100, d);
  for (const float bad : {kNan, kInf})
    for (const int queries : {1, 4, 7}) {
      std::vector<float> scale(kv.view().v_scale, kv.view().v_scale + 100);
      scale[33] = bad;
      KvRows rows = kv.view();
      rows.v_scale = scale.data();
      const std::vector<float> q = random_floats(queries * d, 4, 0.1f);
      const State values = attend(q, rows);
      rows = kv.view();
      scale.assign(kv.view().k_scale, kv.view().k_scale + 100);
      scale[33] = kNan;
      rows.k_scale = scale.data();
      const State keys = attend(q, rows);
      for (int r = 0; r < queries; ++r)
        for (int c = 0; c < d; ++c) {
          EXPECT_FALSE(std::isfinite(values.output(r, c, d))) << bad;
          EXPECT_TRUE(std::isnan(keys.output(r, c, d)));
        }
    }
}

TEST_P(AttendQ8, AlignmentChangesNothing) {
  for (const int d : {64, 80, 128}) {
    const int n = 130;
    const auto bytes = static_cast<std::size_t>(n * d);
    const RandomKv kv(DType::q8, n, d);
    const std::vector<float> q = random_floats(5 * d, 2, 0.3f);
    const State want = attend(q, kv.view());
    for (const int shift : {1, 7, 33}) {
      std::vector<std::byte> k(bytes + static_cast<std::size_t>(shift)), v(k.size());
      std::memcpy(k.data() + shift, kv.view().k, bytes);
      std::memcpy(v.data() + shift, kv.view().v, bytes);
      KvRows moved = kv.view();
      moved.k = k.data() + shift, moved.v = v.data() + shift;
      const State state = attend(q, moved);
      EXPECT_EQ(state.o, want.o);
      EXPECT_EQ(state.l, want.l);
    }
  }
}

/// A state that goes on is that of all keys, also from a maximum that the later keys do not reach.
TEST_P(AttendQ8, AStateGoesOn) {
  const int d = 128, queries = 5;
  const RandomKv kv(DType::q8, 300, d, [rng = Rng(3)](int part, std::int64_t row, int) mutable {
    return static_cast<float>(rng.normal()) * (part == 0 && row == 40 ? 5.0f : 1.0f);
  });
  const std::vector<float> q = queries_of(queries, d, 2, 0.3f);
  State state(queries, d);
  for (const auto& [begin, end] : {std::pair{0, 7}, std::pair{7, 7}, std::pair{7, 201}, std::pair{201, 300}})
    table().attend_run(q.data(), queries, kv.view(), begin, end, state.view());
  for (int r = 0; r < queries; ++r) {
    const ref::Result want = ref::attend(q.data() + r * d, 1.0, kv.view(), 0, 300);
    for (int c = 0; c < d; ++c) ASSERT_NEAR(state.output(r, c, d), want.output[c], 1.5e-4);
  }
}

}  // namespace
}  // namespace lode
