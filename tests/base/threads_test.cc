// SPDX-License-Identifier: Apache-2.0
// Every item runs once whatever the timing; exceptions arrive; nothing hangs. Run under the thread sanitizer
// too.
#include "base/threads.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lode {
namespace {

class Threads : public testing::TestWithParam<int> {};

TEST_P(Threads, EveryItemRunsOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.size(), GetParam());
  for (const std::int64_t items : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(items));
    std::atomic<int> wrong_worker = 0;
    pool.for_each(items, [&](std::int64_t item, int worker) {
      ++runs[static_cast<std::size_t>(item)];
      if (worker < 0 || worker >= pool.size()) ++wrong_worker;
    });
    for (const auto& r : runs) EXPECT_EQ(r.load(), 1);
    EXPECT_EQ(wrong_worker.load(), 0);
  }
}

TEST_P(Threads, ManyShortLoops) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> sums(
      16);  // plain memory: the loop's end is a barrier, which the sanitizer checks
  for (int round = 0; round < 3000; ++round) {
    pool.for_each(16, [&](std::int64_t item, int) { sums[static_cast<std::size_t>(item)] += item; });
  }
  for (std::int64_t i = 0; i < 16; ++i) EXPECT_EQ(sums[static_cast<std::size_t>(i)], 3000 * i);
}

/// Loops in the background give way to urgent ones, beside a caller that does neither.
TEST_P(Threads, SeveralCallers) {
  ThreadPool pool(GetParam());
  std::atomic<int> wrong = 0;
  const auto run = [&](int rounds, std::int64_t items) {
    for (int round = 0; round < rounds; ++round) {
      std::vector<std::int64_t> runs(static_cast<std::size_t>(items));
      pool.for_each(items, [&](std::int64_t item, int) {
        pool.for_each(2, [&](std::int64_t, int) { ++runs[static_cast<std::size_t>(item)]; });
      });
      for (const std::int64_t n : runs) wrong += n != 2;
    }
  };
  {
    std::vector<std::jthread> callers;
    for (const bool background : {true, true, false}) {
      callers.emplace_back([&, background] {
        std::optional<ThreadPool::Background> scope;
        if (background) scope.emplace(pool);
        run(100, 50);
      });
    }
    for (int step = 0; step < 50; ++step) {
      const ThreadPool::Urgent urgent(pool);
      run(3, 20);
    }
  }
  EXPECT_EQ(wrong.load(), 0);
}

/// While an Urgent lives no item of a loop in the background begins; the loop then goes on where it was.
TEST_P(Threads, UrgentLoopsAreAlone) {
  ThreadPool pool(GetParam());
  std::atomic<int> done = 0;
  std::jthread background([&] {
    const ThreadPool::Background scope(pool);
    pool.for_each(300, [&](std::int64_t, int) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      ++done;
    });
  });
  while (done < 3) std::this_thread::yield();
  {
    const ThreadPool::Urgent urgent(pool);
    const int before = done;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_LE(done, before + pool.size());  // those that had begun
  }
  background.join();
  EXPECT_EQ(done, 300);
}

/// A slow step is followed by the next one after twice what steps usually take, not after twice what it took itself.
TEST_P(Threads, ASlowUrgentDoesNotDelayTheNextOne) {
  using std::chrono::milliseconds;
  ThreadPool pool(GetParam());
  const ThreadPool::Background scope(pool);
  for (int step = 0; step < 20; ++step) {
    const ThreadPool::Urgent urgent(pool);
    std::this_thread::sleep_for(milliseconds(2));
  }
  {
    const ThreadPool::Urgent slow(pool);
    std::this_thread::sleep_for(milliseconds(200));
  }
  const auto ended = std::chrono::steady_clock::now();
  const ThreadPool::Urgent next(pool);
  EXPECT_LT(std::chrono::steady_clock::now() - ended, milliseconds(200));
}

TEST_P(Threads, WorkersThatSleptWakeUp) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> runs = 0;
    pool.for_each(100, [&](std::int64_t, int) { ++runs; });
    EXPECT_EQ(runs.load(), 100);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST_P(Threads, ExceptionIsRethrownAndThePoolLivesOn) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> runs = 0;
    EXPECT_THROW(pool.for_each(1000,
                               [&](std::int64_t item, int) {
                                 ++runs;
                                 if (item % 3 == 1) throw std::runtime_error("item");
                               }),
                 std::runtime_error);
    EXPECT_GE(runs.load(), 2);
    EXPECT_LE(runs.load(), 1000);
    runs = 0;
    pool.for_each(10, [&](std::int64_t, int) { ++runs; });
    EXPECT_EQ(runs.load(), 10);
  }
}

TEST_P(Threads, TasksSideBySideTakeTurns) {
  ThreadPool pool(GetParam());
  for (const int at_once : {1, 2, 5}) {
    for (const std::int64_t tasks : {0, 1, 2, 9}) {
      std::vector<std::atomic<int>> sums(static_cast<std::size_t>(tasks));
      std::atomic<int> now = 0, most = 0;
      pool.side_by_side(tasks, at_once, [&](std::int64_t task) {
        const int others = ++now;
        for (int seen = most; seen < others && !most.compare_exchange_weak(seen, others);) {
        }
        for (int round = 0; round < 20; ++round)
          pool.for_each(8, [&](std::int64_t item, int) {
            sums[static_cast<std::size_t>(task)] += static_cast<int>(item);
          });
        // The second one comes while the first waits for it.
        const bool meets = pool.size() > 1 && at_once > 1 && tasks > 1 && task < 2;
        for (const auto begun = std::chrono::steady_clock::now();
             meets && most < 2 && std::chrono::steady_clock::now() - begun < std::chrono::seconds(20);)
          std::this_thread::yield();
        --now;
      });
      for (const auto& sum : sums) EXPECT_EQ(sum.load(), 20 * 28);
      EXPECT_LE(most.load(), at_once);
      const bool together = pool.size() > 1 && at_once > 1 && tasks > 1;
      EXPECT_GE(most.load(), together ? 2 : std::min<std::int64_t>(tasks, 1));
    }
  }
  std::atomic<int> begun = 0;
  EXPECT_THROW(pool.side_by_side(50, 3,
                                 [&](std::int64_t task) {
                                   ++begun;
                                   std::this_thread::sleep_for(std::chrono::milliseconds(2));
                                   if (task == 4) throw std::runtime_error("four");
                                 }),
               std::runtime_error);
  EXPECT_GE(begun.load(), 5);
  EXPECT_LT(begun.load(), 50);
  std::atomic<int> inside = 0;  // of a loop: one by one, on its thread
  pool.for_each(3, [&](std::int64_t, int) {
    pool.side_by_side(4, 4, [&](std::int64_t) { pool.for_each(2, [&](std::int64_t, int) { ++inside; }); });
  });
  EXPECT_EQ(inside.load(), 24);
}

/// Scratch memory by worker number must not be shared, nested loop or not.
TEST_P(Threads, NestedLoopKeepsItsWorker) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(pool.size()));
  std::atomic<std::int64_t> wrong = 0;
  pool.for_each(200, [&](std::int64_t, int outer) {
    pool.for_each(5, [&](std::int64_t item, int inner) {
      if (inner != outer) ++wrong;
      scratch[static_cast<std::size_t>(inner)] += item;
    });
  });
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(std::accumulate(scratch.begin(), scratch.end(), std::int64_t{0}), 200 * 10);
}

TEST_P(Threads, PoolsInsideOneAnother) {
  ThreadPool outer(GetParam()), inner(2);
  std::atomic<int> runs = 0;
  std::mutex one_caller;
  outer.for_each(20, [&](std::int64_t, int) {
    const std::lock_guard lock(one_caller);
    inner.for_each(10, [&](std::int64_t, int) { ++runs; });
  });
  EXPECT_EQ(runs.load(), 200);
}

TEST_P(Threads, ComesAndGoes) {
  for (int round = 0; round < 20; ++round) {
    ThreadPool pool(GetParam());
    if (round % 2 == 0) pool.for_each(4, [](std::int64_t, int) {});
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Threads, testing::Values(1, 2, 3, 8));

TEST(ThreadsAuto, CountsTheCoresOfThisProcess) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(ThreadPool().size(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &before)) continue;
    CPU_SET(cpu, &one);
    break;
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(ThreadPool().size(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace lode
