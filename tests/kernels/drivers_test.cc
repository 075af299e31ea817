// SPDX-License-Identifier: Apache-2.0
// Drivers over the chosen table: attention of items and of a prefill chunk, products; splits, threads, empty
// input.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/ref/attention.h"
#include "kernels/ref/linear.h"
#include "kernels/sgemm.h"
#include "lodestone/attention.h"
#include "lodestone/error.h"
#include "random_kv.h"
#include "support/rounding.h"

namespace lode {
namespace {

using test::random_floats;
using test::RandomKv;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Output {
  std::vector<float> o, lse;
  Output(std::int64_t rows, int d)
      : o(static_cast<std::size_t>(rows * d), 7.0f), lse(static_cast<std::size_t>(rows), 7.0f) {}
  bool operator==(const Output&) const = default;
};

Output attend(const RandomKv& kv, const std::vector<float>& q, int queries, std::span<const lode::Run> runs,
              std::span<const Position> rows, std::span<const float> weights, int threads) {
  ThreadPool pool(threads);
  Output out(queries, kv.view().d);
  const AttendItem item{q.data(), queries, kv.view(), runs, rows, weights, out.o.data(), out.lse.data()};
  attend_items(std::span(&item, 1), 0.125f, pool);
  return out;
}

TEST(AttendItems, RunsAndRowsTogether) {
  const int d = 64, queries = 4;
  const RandomKv kv(DType::f16, 5000, d);
  const std::vector<float> q = random_floats(queries * d, 1);
  const lode::Run runs[] = {{0, 1}, {7, 7}, {100, 1300}, {4000, 5000}};
  const std::vector<Position> rows = {2, 3, 50, 1400, 1401, 3999};
  const std::vector<float> weights = {0.5f, -1.0f, 2.0f, 0.0f, -kInf, 3.0f};
  std::vector<std::int64_t> all;
  std::vector<float> all_weights;
  for (const lode::Run run : runs)
    for (Position i = run.begin; i < run.end; ++i) all.push_back(i), all_weights.push_back(0.0f);
  for (std::size_t i = 0; i < rows.size(); ++i) all.push_back(rows[i]), all_weights.push_back(weights[i]);
  const Output got = attend(kv, q, queries, runs, rows, weights, 2);
  for (int r = 0; r < queries; ++r) {
    const ref::Result want = ref::attend(q.data() + r * d, 0.125, kv.view(), all, all_weights);
    for (int c = 0; c < d; ++c) ASSERT_NEAR(got.o[r * d + c], want.output[c], 1e-5);
    ASSERT_NEAR(got.lse[r], want.lse, 1e-5);
  }
}

TEST(AttendItems, ThreadsChangeNoBit) {
  const RandomKv kv(DType::bf16, 9000, 80);
  const std::vector<float> q = random_floats(5 * 80, 2);
  const lode::Run runs[] = {{1, 8999}};
  const std::vector<Position> rows = {0, 8999};
  const Output one = attend(kv, q, 5, runs, rows, {}, 1);
  for (const int threads : {2, 3, 7}) EXPECT_TRUE(attend(kv, q, 5, runs, rows, {}, threads) == one);
}

TEST(AttendItems, ARangeInPartsHasTheBitsOfTheRange) {
  const RandomKv kv(DType::f16, 6000, 64);
  const std::vector<float> q = random_floats(8 * 64, 3);
  const lode::Run whole[] = {{0, 6000}};
  const lode::Run parts[] = {{0, 1}, {1, 3953}, {3953, 5000}, {5000, 6000}};
  EXPECT_TRUE(attend(kv, q, 8, whole, {}, {}, 2) == attend(kv, q, 8, parts, {}, {}, 2));
}

TEST(AttendItems, NeighboursAndNothing) {
  const RandomKv kv(DType::f32, 3000, 64), other(DType::f32, 100, 16);
  const std::vector<float> q = random_floats(3 * 64, 4), q16 = random_floats(16, 5);
  const lode::Run whole[] = {{0, 3000}}, few[] = {{0, 100}};
  const Output alone = attend(kv, q, 3, whole, {}, {}, 2);
  ThreadPool pool(2);
  Output a(3, 64), b(1, 16), none(3, 64);
  const AttendItem items[] = {{q16.data(), 1, other.view(), few, {}, {}, b.o.data(), b.lse.data()},
                              {q.data(), 3, kv.view(), {}, {}, {}, none.o.data(), none.lse.data()},
                              {q.data(), 3, kv.view(), whole, {}, {}, a.o.data(), a.lse.data()}};
  attend_items(items, 0.125f, pool);
  EXPECT_TRUE(a == alone);
  for (const float x : none.o) EXPECT_EQ(x, 0.0f);
  for (const float x : none.lse) EXPECT_EQ(x, -kInf);
  attend_items({}, 0.125f, pool);
}

/// All query rows of a prefill against the oracle.
void expect_prefill(std::int64_t tokens, std::int64_t keys, int group, int kv_heads, int d, DType type,
                    double tolerance) {
  std::vector<std::unique_ptr<RandomKv>> stores;
  std::vector<KvRows> kv;
  for (int h = 0; h < kv_heads; ++h) {
    stores.push_back(std::make_unique<RandomKv>(type, keys, d, 100 + h));
    kv.push_back(stores.back()->view());
  }
  const int heads = group * kv_heads;
  const std::vector<float> q = random_floats(tokens * heads * d, 6);
  ThreadPool pool(2);
  Output got(tokens * heads, d);
  attend_prefill(q, tokens, heads, kv, 0.1f, got.o.data(), got.lse.data(), pool);
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int h = 0; h < heads; ++h) {
      const std::int64_t row = t * heads + h;
      const ref::Result want = ref::attend(q.data() + row * d, 0.1f, kv[h / group], 0, keys - tokens + t + 1);
      for (int c = 0; c < d; ++c) ASSERT_NEAR(got.o[row * d + c], want.output[c], tolerance) << t << " " << h;
      ASSERT_NEAR(got.lse[row], want.lse, tolerance * 10);
    }
}

/// Tolerance of tables whose matrix unit multiplies bf16.
double prefill_tolerance(DType type) {
  return test::multiplies_tiles(kernels(), type) ? 2e-2 : 5e-6;
}

TEST(AttendPrefill, ShapesAgainstTheOracle) {
  struct Case {
    std::int64_t tokens, keys;
    int group, kv_heads, d;
  };
  for (const Case c : {Case{1, 1, 1, 1, 64},
                       {1, 200, 4, 2, 64},
                       {2, 2, 3, 1, 8},
                       {37, 37, 5, 1, 80},
                       {100, 333, 7, 1, 96},
                       {64, 97, 8, 1, 128},
                       {30, 200, 16, 1, 256},
                       {130, 130, 1, 2, 64},
                       {5, 6000, 2, 1, 32},
                       {33, 161, 2, 1, 2},
                       {5, 180, 16, 1, 576},
                       {2, 60, 16, 2, kMaxHeadDim}})
    for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4}) {
      if (type == DType::q4 && c.d > 256)
        continue;  // the oracle reads a row anew for each of its numbers: minutes
      expect_prefill(c.tokens, c.keys, c.group, c.kv_heads, c.d, type,
                     prefill_tolerance(type) * (c.d > 256 ? 2 : 1));  // sums of more numbers
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << c.tokens << " tokens, " << c.keys << " keys, group "
                                                     << c.group << ", d " << c.d << " " << name_of(type);
    }
}

TEST(AttendPrefill, ThreadsChangeNoBit) {
  const RandomKv kv(DType::f16, 5000, 64);
  const KvRows rows = kv.view();
  const std::vector<float> q = random_floats(40 * 4 * 64, 7);
  const auto run = [&](int threads) {
    ThreadPool pool(threads);
    Output out(40 * 4, 64);
    attend_prefill(q, 40, 4, std::span(&rows, 1), 0.125f, out.o.data(), out.lse.data(), pool);
    return out;
  };
  const Output one = run(1);
  for (const int threads : {2, 5}) EXPECT_TRUE(run(threads) == one);
}

TEST(AttendPrefill, ALaterTokensNanStaysLater) {
  constexpr int kBad = 150;
  for (const DType type : {DType::f32, DType::bf16}) {
    const RandomKv kv(type, 200, 64, [rng = Rng(5)](int, std::int64_t row, int) mutable {
      const auto x = static_cast<float>(rng.normal());
      return row == kBad ? std::numeric_limits<float>::quiet_NaN() : x;
    });
    const KvRows rows = kv.view();
    const std::vector<float> q = random_floats(100 * 2 * 64, 8);
    ThreadPool pool(2);
    Output out(200, 64);
    attend_prefill(q, 100, 2, std::span(&rows, 1), 0.125f, out.o.data(), nullptr, pool);
    for (int t = 0; t < 100; ++t)
      for (int i = 0; i < 128; ++i) ASSERT_EQ(std::isnan(out.o[t * 128 + i]), 100 + t >= kBad) << t;
  }
}

TEST(AttendPrefill, CtrlCStopsIt) {
  const RandomKv kv(DType::f16, 300, 64);
  const KvRows rows = kv.view();
  const std::vector<float> q = random_floats(300 * 64, 8);
  ThreadPool pool(2);
  Output out(300, 64);
  set_cancel(true);
  EXPECT_THROW(attend_prefill(q, 300, 1, std::span(&rows, 1), 0.125f, out.o.data(), nullptr, pool),
               Interrupted);
  set_cancel(false);
}

TEST(Matmul, AgainstTheOracle) {
  ThreadPool pool(2);
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t m : {0, 1, 2, 3, 5, 8, 9, 17, 70})
      for (const auto& [n, k] :
           {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 33}, {130, 256}, {600, 512}}) {
        const std::vector<float> w32 = random_floats(n * k, 9);
        std::vector<std::byte> w(static_cast<std::size_t>(n * k * bytes_of(type)));
        kernels().narrow(w32.data(), n * k, type, w.data());
        const std::vector<float> x = random_floats(m * (k + 3), 10);
        std::vector<float> y(static_cast<std::size_t>(m * (n + 2)), 5.0f);
        matmul({x.data(), m, k, k + 3}, w.data(), type, n, {y.data(), m, n, n + 2}, pool);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            const double want = ref::dot(x.data() + i * (k + 3), w.data() + j * k * bytes_of(type), type, k);
            // Beyond 8 rows a machine with bf16 matrix instructions rounds x to bf16.
            const double tolerance = m > 8 && type != DType::f32 ? 2e-2 : 1e-5;
            ASSERT_NEAR(y[i * (n + 2) + j], want, tolerance * std::sqrt(static_cast<double>(k)));
          }
          ASSERT_EQ(y[i * (n + 2) + n], 5.0f);
        }
      }
}

std::atomic<int> alarms = 0;

/// Ctrl-C, a profiler, a child that ends: a signal may come at any instruction.
TEST(Sgemm, SignalsLeaveTheHeapAlone) {
  constexpr std::int64_t m = 512, n = 128, k = 384;
  const std::vector<float> a = random_floats(m * k, 1), b = random_floats(n * k, 2);
  const auto product = [&] {
    std::vector<float> c(m * n);
    sgemm(m, n, k, {a.data(), k}, {b.data(), k, true}, 0.0f, c.data(), n);
    return c;
  };
  const std::vector<float> expected = product();
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { ++alarms; };
  sigaction(SIGALRM, &action, &before);
  const itimerval often = {.it_interval = {0, 50}, .it_value = {0, 50}}, never = {};
  setitimer(ITIMER_REAL, &often, nullptr);
  ThreadPool pool(2);
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 100; ++i)
    pool.for_each(4, [&](std::int64_t, int) { wrong += product() == expected ? 0 : 1; });
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(alarms, 0);
}

TEST(Merge, EmptySetsAndOrder) {
  const int d = 3;
  const auto state = [&](std::vector<float>& o, std::vector<float>& lse) {
    return AttentionState{o.data(), lse.data(), 1, d};
  };
  std::vector<float> ao = {1, 2, 3}, al = {0.5f}, eo(3), el(1);
  state(eo, el).clear();
  EXPECT_EQ(el[0], -kInf);
  merge(state(ao, al), state(eo, el));  // empty on the right: unchanged
  EXPECT_EQ(ao, (std::vector<float>{1, 2, 3}));
  merge(state(eo, el), state(ao, al));  // empty on the left: a copy
  EXPECT_EQ(eo, ao);
  EXPECT_EQ(el, al);
  std::vector<float> no = {0, 0, 0}, nl = {-kInf}, mo = no, ml = nl;
  merge(state(no, nl), state(mo, ml));  // both empty: still empty, no NaN
  EXPECT_EQ(nl[0], -kInf);
  EXPECT_EQ(no, (std::vector<float>{0, 0, 0}));
}

TEST(Merge, WeightsAddUpToOneHoweverLargeTheLogSumExp) {
  Rng rng(5);
  for (const double size : {1.0, 60.0, 70.0, 1e3, -1e4, 1e4, 1e6}) {
    const std::vector<float> value = {1, -2, 3};
    std::vector<float> o = value, lse = {static_cast<float>(size)};
    for (int part = 0; part < 32; ++part) {
      std::vector<float> other = o, other_lse = {static_cast<float>(size + rng.normal())};
      merge({o.data(), lse.data(), 1, 3}, {other.data(), other_lse.data(), 1, 3});
    }
    for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(o[c] / value[c], 1, 6e-5) << size;
  }
}

TEST(Merge, AssociativeToRoundingAndExactAtExtremes) {
  Rng rng(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> o[3], l[3];
    for (int i = 0; i < 3; ++i) {
      o[i] = random_floats(4, rng.next());
      l[i] = {static_cast<float>(rng.normal() * (trial % 2 ? 100.0 : 1.0))};
    }
    const auto at = [](std::vector<float>& out, std::vector<float>& lse) {
      return AttentionState{out.data(), lse.data(), 1, 4};
    };
    auto ao = o[0], al = l[0], bo = o[1], bl = l[1];
    merge(at(ao, al), at(o[1], l[1]));
    merge(at(ao, al), at(o[2], l[2]));
    merge(at(bo, bl), at(o[2], l[2]));
    merge(at(bo, bl), at(o[0], l[0]));
    EXPECT_NEAR(al[0], bl[0], 1e-5 * (1.0 + std::abs(al[0])));
    for (int c = 0; c < 4; ++c) EXPECT_NEAR(ao[c], bo[c], 1e-5);
  }
}

}  // namespace
}  // namespace lode
