// SPDX-License-Identifier: Apache-2.0
// Decode kernels of every table against the float64 oracle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

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

class AttendTest : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
  bool pairs(DType type) const { return test::multiplies_pairs(table(), type); }
  void expect_infinities(DType type, int queries, int d) const;
  double tolerance(DType type) const {
    if (test::multiplies_words(table(), type)) return 5e-5;  // weights of 15 bits
    return pairs(type) ? 1.2e-3 : type == DType::q4 ? 2e-5 : 3e-6;
  }
  /// Normal numbers that a kernel for this type does not round.
  std::vector<float> queries_for(DType type, int queries, int d, std::uint64_t seed, float size) const {
    std::vector<float> q = random_floats(std::int64_t{queries} * d, seed, size);
    for (float& x : q) x = pairs(type) ? to_float(to_bf16(x)) : x;
    if (test::multiplies_words(table(), type))
      for (auto at = q.begin(); at != q.end(); at += d) test::round_to_words({at, at + d});
    return q;
  }
};
INSTANTIATE_TEST_SUITE_P(Tables, AttendTest,
                         testing::ValuesIn(supported_kernels().begin(), supported_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

/// A softmax state with a sentinel behind each part.
struct State {
  std::vector<float> o, m, l;
  State(int queries, int d)
      : o(static_cast<std::size_t>(queries) * d + 1),
        m(static_cast<std::size_t>(queries) + 1, -kInf),
        l(m.size()) {
    o.back() = m.back() = l.back() = 12345.0f;
  }
  SoftmaxState view() { return {o.data(), m.data(), l.data()}; }
  bool intact() const { return o.back() == 12345.0f && m.back() == 12345.0f && l.back() == 12345.0f; }
  double output(int r, int c, int d) const { return double{o[static_cast<std::size_t>(r * d + c)]} / l[r]; }
  double lse(int r) const { return l[r] == 0.0f ? -kInf : m[r] + std::log(double{l[r]}); }
};

/// Error of query r: largest |difference| relative to the largest value in play.
void expect_close(State& state, int r, const ref::Result& want, double tolerance) {
  const int d = static_cast<int>(want.output.size());
  double size = 0.0;
  for (const double x : want.output) size = std::max(size, std::abs(x));
  for (int c = 0; c < d; ++c)
    ASSERT_NEAR(state.output(r, c, d), want.output[static_cast<std::size_t>(c)], tolerance * (1.0 + size))
        << "query " << r << " column " << c;
  ASSERT_NEAR(state.lse(r), want.lse, tolerance * (1.0 + std::abs(want.lse)));
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4};

TEST_P(AttendTest, EveryGroupAndDimensionAndType) {
  for (const DType type : kTypes)
    for (const int d : {2, 8, 16, 22, 32, 64, 80, 96, 128, 256, 576, kMaxHeadDim}) {
      const RandomKv kv(type, 150, d);
      for (const int queries : {1, 2, 3, 4, 5, 7, 8, 16, 19, 75}) {
        const std::vector<float> q =
            queries_for(type, queries, d, 7, 1.0f / std::sqrt(static_cast<float>(d)));
        State state(queries, d);
        table().attend_run(q.data(), queries, kv.view(), 3, 150, state.view());
        ASSERT_TRUE(state.intact());
        for (int r = 0; r < queries; ++r)
          expect_close(state, r, ref::attend(q.data() + r * d, 1.0, kv.view(), 3, 150), tolerance(type));
        if (HasFatalFailure()) FAIL() << name_of(type) << " d " << d << " queries " << queries;
      }
    }
}

TEST_P(AttendTest, EveryLengthUpToThreeBlocks) {
  const int d = 80;
  for (const auto& [type, queries] :
       {std::pair{DType::f16, 8}, std::pair{DType::bf16, 8}, std::pair{DType::bf16, 19}}) {
    const RandomKv kv(type, 200, d);
    const std::vector<float> q = queries_for(type, queries, d, 3, 0.2f);
    for (int n = 0; n <= 200; ++n) {
      State state(queries, d);
      table().attend_run(q.data(), queries, kv.view(), 200 - n, 200, state.view());
      for (int r = 0; r < queries; ++r) {
        if (n == 0) {
          ASSERT_EQ(state.l[r], 0.0f);
          continue;
        }
        expect_close(state, r, ref::attend(q.data() + r * d, 1.0, kv.view(), 200 - n, 200), tolerance(type));
      }
      ASSERT_FALSE(HasFatalFailure()) << name_of(type) << " " << n;
    }
  }
}

TEST_P(AttendTest, PairsRoundQueriesAndWeightsOnly) {
  const int d = 64, queries = 4;
  if (!pairs(DType::bf16)) GTEST_SKIP() << "no products of pairs";
  const RandomKv kv(DType::bf16, 500, d);
  const std::vector<float> q = random_floats(queries * d, 8, 0.3f);
  State state(queries, d);
  table().attend_run(q.data(), queries, kv.view(), 0, 500, state.view());
  for (int r = 0; r < queries; ++r)
    expect_close(state, r, ref::attend(q.data() + r * d, 1.0, kv.view(), 0, 500), 8e-3);
}

TEST_P(AttendTest, RowsWithLogWeights) {
  const int d = 64, queries = 31;
  for (const DType type : kTypes) {
    const RandomKv kv(type, 1000, d);
    const std::vector<float> q = queries_for(type, queries, d, 5, 0.2f);
    std::vector<Position> rows;
    std::vector<float> weights;
    for (Position i = 0; i < 1000; i += 1 + i % 7)
      rows.push_back(i), weights.push_back(static_cast<float>(i % 13) - 6.0f);
    rows.push_back(999), weights.push_back(-kInf);  // weight 0
    State state(queries, d), plain(queries, d);
    const auto n = static_cast<std::int64_t>(rows.size());
    table().attend_rows(q.data(), queries, kv.view(), rows.data(), weights.data(), n, state.view());
    table().attend_rows(q.data(), queries, kv.view(), rows.data(), nullptr, n, plain.view());
    const std::vector<std::int64_t> wide(rows.begin(), rows.end());
    for (int r = 0; r < queries; ++r) {
      expect_close(state, r, ref::attend(q.data() + r * d, 1.0, kv.view(), wide, weights), tolerance(type));
      expect_close(plain, r, ref::attend(q.data() + r * d, 1.0, kv.view(), wide), tolerance(type));
    }
  }
}

TEST_P(AttendTest, LogWeightsThatAreNoNumber) {
  const int d = 64, count = 40;
  std::vector<Position> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  for (const DType type : {DType::f32, DType::bf16})
    for (const int queries : {1, 4, 8, 19})
      for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fff8000u, 0x7fffffffu, 0xffffffffu}) {
        const RandomKv kv(type, count, d);
        const std::vector<float> q = queries_for(type, queries, d, 5, 0.2f);
        std::vector<float> weights(count, 0.5f);
        weights[13] = std::bit_cast<float>(bits);
        State state(queries, d);
        table().attend_rows(q.data(), queries, kv.view(), rows.data(), weights.data(), count, state.view());
        for (int r = 0; r < queries; ++r) EXPECT_TRUE(std::isnan(state.output(r, 3, d))) << std::hex << bits;
      }
}

TEST_P(AttendTest, AListGivesTheBitsOfItsRowsStoredSideBySide) {
  for (const DType type : kTypes)
    for (const int d : {16, 64, 80, 96, 128, 256, 576}) {
      const RandomKv kv(type, 400, d, [rng = Rng(9), type](int part, std::int64_t row, int) mutable {
        const auto x = static_cast<float>(rng.normal());
        return part == 1 && row == 390 && type != DType::q8 ? kNan : x;
      });
      const auto row_bytes = static_cast<std::size_t>(kv.view().row_bytes());
      for (const int n : {0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100, 200}) {
        std::vector<Position> rows;  // here and there sixteen that are neighbours, also across two tiles
        Rng rng(static_cast<std::uint64_t>(n));
        while (static_cast<int>(rows.size()) < n) {
          auto at = static_cast<Position>(rng.below(350));
          const int neighbours = rng.below(4) == 0 ? 24 : 1;
          for (int i = 0; i < neighbours && static_cast<int>(rows.size()) < n; ++i) rows.push_back(at++);
        }
        if (n == 100) rows[57] = 390;
        std::vector<std::byte> k(row_bytes * rows.size()), v(k.size());
        std::vector<float> k_scale, v_scale;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          std::memcpy(&k[i * row_bytes], kv.view().k + rows[i] * kv.view().row_bytes(), row_bytes);
          std::memcpy(&v[i * row_bytes], kv.view().v + rows[i] * kv.view().row_bytes(), row_bytes);
          k_scale.push_back(kv.view().k_scale[rows[i]]), v_scale.push_back(kv.view().v_scale[rows[i]]);
        }
        KvRows gathered = kv.view();
        gathered.k = k.data(), gathered.v = v.data();
        gathered.k_scale = k_scale.data(), gathered.v_scale = v_scale.data();
        for (const int queries : {1, 2, 4, 7, 8, 16, 19}) {
          const std::vector<float> q = random_floats(queries * d, 21, 0.2f);
          State run(queries, d), list(queries, d);
          table().attend_run(q.data(), queries, gathered, 0, n, run.view());
          table().attend_rows(q.data(), queries, kv.view(), rows.data(), nullptr, n, list.view());
          ASSERT_TRUE(list.intact());
          for (int i = 0; i < queries * d; ++i)
            ASSERT_TRUE(run.o[i] == list.o[i] || (std::isnan(run.o[i]) && std::isnan(list.o[i])))
                << name_of(type) << " d " << d << " rows " << n << " queries " << queries;
          for (int r = 0; r < queries; ++r)
            ASSERT_TRUE(run.l[r] == list.l[r] && run.m[r] == list.m[r]) << name_of(type) << " rows " << n;
        }
      }
    }
}

TEST_P(AttendTest, AQueryDoesNotDependOnItsNeighbours) {
  const int d = 96, many = 75;  // more than one pass over memory has
  for (const DType type : kTypes) {
    const RandomKv kv(type, 333, d);
    const std::vector<float> q = random_floats(many * d, 11, 0.3f);
    State alone(many, d);
    for (int r = 0; r < many; ++r)
      table().attend_run(q.data() + r * d, 1, kv.view(), 0, 333,
                         {&alone.o[static_cast<std::size_t>(r * d)], &alone.m[r], &alone.l[r]});
    for (const int queries : {2, 3, 4, 5, 7, 8, 9, 16, 19, 32, 33, 48, 64, many}) {
      State together(queries, d);
      table().attend_run(q.data(), queries, kv.view(), 0, 333, together.view());
      for (int i = 0; i < queries * d; ++i) ASSERT_EQ(alone.o[i], together.o[i]);
      for (int r = 0; r < queries; ++r) ASSERT_EQ(alone.l[r], together.l[r]);
    }
    // Rows that happen to be consecutive are the run.
    std::vector<Position> rows(333);
    for (Position i = 0; i < 333; ++i) rows[i] = i;
    State listed(many, d);
    table().attend_rows(q.data(), many, kv.view(), rows.data(), nullptr, 333, listed.view());
    for (int i = 0; i < many * d; ++i) ASSERT_EQ(alone.o[i], listed.o[i]);
  }
}

TEST_P(AttendTest, SumsTooSmallForNormalNumbersDoNotDependOnNeighbours) {
  // The second half of the keys outweighs the first by so much that its sums nearly vanish.
  const int d = 32, n = 64, many = 64;
  const RandomKv kv(DType::bf16, n, d, [](int part, std::int64_t row, int column) {
    const bool behind = row >= n / 2;
    return part == 1 ? (behind ? 0.0f : 0.01f) : behind && column == 0 ? 92.0f : 0.0f;
  });
  std::vector<float> q(many * d);
  for (int g = 0; g < many; ++g) q[g * d] = 1.0f;
  State alone(1, d);
  table().attend_run(q.data(), 1, kv.view(), 0, n, alone.view());
  for (const int queries : {8, 9, 16, 64}) {
    State together(queries, d);
    table().attend_run(q.data(), queries, kv.view(), 0, n, together.view());
    for (int g = 0; g < queries; ++g)
      ASSERT_EQ(std::memcmp(together.o.data() + g * d, alone.o.data(), d * sizeof(float)), 0) << queries;
  }
}

TEST_P(AttendTest, AlignmentChangesNothing) {
  const int d = 80, n = 130;
  const RandomKv kv(DType::bf16, n, d);
  const std::vector<float> q = random_floats(4 * d, 2, 0.3f);
  State want(4, d);
  table().attend_run(q.data(), 4, kv.view(), 0, n, want.view());
  for (const int shift : {1, 2, 6, 33}) {  // bytes; keys and values may start anywhere in a mapped file
    std::vector<std::byte> k(static_cast<std::size_t>(n * d * 2 + shift)), v(k.size());
    std::memcpy(k.data() + shift, kv.view().k, static_cast<std::size_t>(n * d * 2));
    std::memcpy(v.data() + shift, kv.view().v, static_cast<std::size_t>(n * d * 2));
    KvRows moved = kv.view();
    moved.k = k.data() + shift, moved.v = v.data() + shift;
    State state(4, d);
    table().attend_run(q.data(), 4, moved, 0, n, state.view());
    EXPECT_EQ(state.o, want.o);
    EXPECT_EQ(state.l, want.l);
  }
}

TEST_P(AttendTest, LogitsOfPlusMinus300) {
  const int d = 64;
  for (const DType type : {DType::f32, DType::bf16}) {
    const RandomKv kv(type, 500, d, [](int part, std::int64_t row, int c) {
      return part == 1 ? static_cast<float>(row % 17)
             : c == 0  ? (row % 3 == 0   ? 300.0f
                          : row % 3 == 1 ? -300.0f
                                         : 298.0f)
                       : 0.0f;
    });
    std::vector<float> q(64, 0.0f);
    q[0] = 1.0f;
    State state(1, d);
    table().attend_run(q.data(), 1, kv.view(), 0, 500, state.view());
    expect_close(state, 0, ref::attend(q.data(), 1.0, kv.view(), 0, 500), tolerance(type));
  }
}

TEST_P(AttendTest, OneKeyTenThousandTimesLonger) {
  const int d = 128;
  for (const DType type : {DType::f32, DType::bf16}) {
    RandomKv kv(type, 400, d, [rng = Rng(4)](int part, std::int64_t row, int) mutable {
      return static_cast<float>(rng.normal()) * (part == 0 && row == 123 ? 1e4f : 1.0f);
    });
    const std::vector<float> q = queries_for(type, 3, d, 9, 0.1f);
    State state(3, d);
    table().attend_run(q.data(), 3, kv.view(), 0, 400, state.view());
    for (int r = 0; r < 3; ++r)
      expect_close(state, r, ref::attend(q.data() + r * d, 1.0, kv.view(), 0, 400),
                   std::max(1e-5, tolerance(type)));
  }
}

/// Rows of latent attention at their published size are keys and values at once.
TEST_P(AttendTest, RowsThatAreKeysAndValues) {
  const int d = 576;
  for (const DType type : kTypes) {
    const RandomKv kv(type, 1100, d);
    KvRows rows = kv.view();
    rows.v = rows.k, rows.v_scale = rows.k_scale;
    std::vector<Position> some;
    for (Position i = 3; i < 1100; i += 1 + i % 5) some.push_back(i);
    const std::vector<std::int64_t> wide(some.begin(), some.end());
    for (const int queries : {1, 4, 16}) {
      const std::vector<float> q = queries_for(type, queries, d, 11, 0.05f);
      State run(queries, d), list(queries, d);
      table().attend_run(q.data(), queries, rows, 7, 1100, run.view());
      table().attend_rows(q.data(), queries, rows, some.data(), nullptr, std::ssize(some), list.view());
      ASSERT_TRUE(run.intact() && list.intact());
      for (int r = 0; r < queries; ++r) {
        expect_close(run, r, ref::attend(q.data() + r * d, 1.0, rows, 7, 1100), tolerance(type));
        expect_close(list, r, ref::attend(q.data() + r * d, 1.0, rows, wide), tolerance(type));
      }
      ASSERT_FALSE(HasFatalFailure()) << name_of(type) << " queries " << queries;
    }
  }
}

TEST_P(AttendTest, EqualKeysGiveTheMean) {
  const int d = 64;
  for (const DType type : {DType::f32, DType::bf16}) {
    const RandomKv kv(type, 100'000, d, [](int part, std::int64_t row, int) {
      return part == 0 ? 0.5f : static_cast<float>(row & 1);
    });
    const std::vector<float> q(64, 1.0f);
    State state(1, d);
    table().attend_run(q.data(), 1, kv.view(), 0, 100'000, state.view());
    for (int c = 0; c < d; ++c) EXPECT_NEAR(state.output(0, c, d), 0.5, 1e-6);
    EXPECT_NEAR(state.lse(0), 32.0 + std::log(1e5), 1e-4);
  }
}

void AttendTest::expect_infinities(DType type, int queries, int d) const {
  const auto kv_with = [&](float bad, int part) {
    return RandomKv(type, 100, d, [=, rng = Rng(3)](int p, std::int64_t row, int c) mutable {
      const auto x = static_cast<float>(rng.normal());
      return p == part && row == 70 && c == 0 ? bad : x;
    });
  };
  std::vector<float> q(queries * d, 0.0f);
  for (int r = 0; r < queries; r += 2) q[r * d] = 1.0f, q[(r + 1) * d] = 0.5f, q[(r + 1) * d + 1] = 1.0f;
  {  // score -inf: the key has weight 0
    const RandomKv kv = kv_with(-kInf, 0);
    State state(queries, d);
    table().attend_run(q.data(), queries, kv.view(), 0, 100, state.view());
    std::vector<std::int64_t> others;
    for (int i = 0; i < 100; ++i)
      if (i != 70) others.push_back(i);
    expect_close(state, 0, ref::attend(q.data(), 1.0, kv.view(), others), tolerance(type));
    State only(queries, d);
    table().attend_run(q.data(), queries, kv.view(), 70, 71, only.view());
    EXPECT_EQ(only.l[0], 0.0f);
    EXPECT_EQ(only.m[0], -kInf);
    EXPECT_EQ(only.o[0], 0.0f);
    table().attend_run(q.data(), queries, kv.view(), 0, 70,
                       only.view());  // and goes on as if nothing had been
    expect_close(only, 0, ref::attend(q.data(), 1.0, kv.view(), 0, 70), tolerance(type));
  }
  for (const float bad : {kInf, kNan}) {
    const RandomKv kv = kv_with(bad, 0);
    State state(queries, d);
    table().attend_run(q.data(), queries, kv.view(), 0, 100, state.view());
    EXPECT_TRUE(std::isnan(state.output(0, 3, d)));
  }
  {  // NaN in a value reaches that column of every query
    const RandomKv kv = kv_with(kNan, 1);
    State state(queries, d);
    table().attend_run(q.data(), queries, kv.view(), 0, 100, state.view());
    EXPECT_TRUE(std::isnan(state.output(0, 0, d)));
    EXPECT_TRUE(std::isnan(state.output(1, 0, d)));
    EXPECT_FALSE(std::isnan(state.output(0, 1, d)));
  }
  {  // NaN in one query stays in it
    const RandomKv kv(type, 100, d);
    std::vector<float> bad = q;
    bad[0] = kNan;
    State state(queries, d);
    table().attend_run(bad.data(), queries, kv.view(), 0, 100, state.view());
    EXPECT_TRUE(std::isnan(state.output(0, 0, d)));
    expect_close(state, 1, ref::attend(q.data() + d, 1.0, kv.view(), 0, 100), tolerance(type));
  }
}

TEST_P(AttendTest, InfiniteAndUndefinedScores) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int d : {8, 64, 80, 576})
      for (const int queries : {2, 8, 19}) expect_infinities(type, queries, d);
}

TEST_P(AttendTest, DenormalsAreNumbers) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    if (pairs(type)) continue;  // the instruction takes them for 0
    const float tiny = type == DType::f16 ? 0x1p-20f : 0x1p-130f;
    const RandomKv kv(type, 70, 16, [=](int part, std::int64_t row, int) {
      return part == 0 ? 1.0f : tiny * static_cast<float>(1 + row % 3);
    });
    const std::vector<float> q(16, 0.1f);
    State state(1, 16);
    table().attend_run(q.data(), 1, kv.view(), 0, 70, state.view());
    const ref::Result want = ref::attend(q.data(), 1.0, kv.view(), 0, 70);
    for (int c = 0; c < 16; ++c)
      EXPECT_NEAR(state.output(0, c, 16) / want.output[c], 1.0, 1e-5) << name_of(type);
  }
}

TEST_P(AttendTest, ScoresOfRunsAndRows) {
  const int queries = 7;
  for (const DType type : kTypes)
    for (const int d : {8, 64, 80, 128, 576, kMaxHeadDim}) {
      const RandomKv kv(type, 200, d);
      const std::vector<float> q = random_floats(queries * d, 13);
      std::vector<float> scores(queries * 101, -7.0f), listed(queries * 101);
      table().score_run(q.data(), queries, kv.view(), 99, 199, scores.data(), 101);
      std::vector<Position> rows(100);
      for (Position i = 0; i < 100; ++i) rows[i] = 99 + i;
      table().score_rows(q.data(), queries, kv.view(), rows.data(), 100, listed.data(), 101);
      for (int r = 0; r < queries; ++r) {
        for (int i = 0; i < 100; ++i) {
          ASSERT_NEAR(scores[r * 101 + i], ref::dot(q.data() + r * d, kv.view(), 99 + i), 1e-5 * d);
          ASSERT_EQ(scores[r * 101 + i], listed[r * 101 + i]);
        }
        ASSERT_EQ(scores[r * 101 + 100], -7.0f);  // not written past the count
      }
    }
}

TEST_P(AttendTest, ScoresOfWhatWasAttended) {
  const int n = 155, stride = n + 2;
  for (const DType type : kTypes)
    for (const int d : {8, 64, 80, 576})
      for (const int queries : {1, 2, 3, 7, 12, 21}) {
        const RandomKv kv(type, 200, d);
        const std::vector<float> q = random_floats(queries * d, 13, 0.3f);
        State state(queries, d);
        table().attend_run(q.data(), queries, kv.view(), 5, 5 + n, state.view());
        std::vector<float> scores(queries * stride, -7.0f);
        table().score_attended(q.data(), queries, kv.view(), 5, 5 + n, scores.data(), stride);
        const double most = test::multiplies_pairs(table(), type) ? 1.5e-3 * std::sqrt(d) : 1e-5 * d;
        for (int r = 0; r < queries; ++r) {
          double sum = 0;
          for (int i = 0; i < n; ++i) {
            ASSERT_NEAR(scores[r * stride + i], ref::dot(q.data() + r * d, kv.view(), 5 + i), 4 * most);
            sum += std::exp(double{scores[r * stride + i]} - state.m[r]);
          }
          EXPECT_NEAR(sum / state.l[r], 1.0, 4 * most + 1e-3) << table().name << name_of(type) << d;
          ASSERT_EQ(scores[r * stride + n], -7.0f);  // not written past the count
        }
      }
}

}  // namespace
}  // namespace lode
