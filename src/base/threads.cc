// SPDX-License-Identifier: Apache-2.0
#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace lode {

namespace {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// How often an idle worker looks for work before it sleeps: some microseconds, as long as a gap between two
/// loops of a decode step, so that a step of hundreds of loops does not pay a wake-up for each.
constexpr int kSpins = 4000;

thread_local const void* running_pool = nullptr;  // the pool whose item this thread is running

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct ThreadPool::State {
  std::vector<std::jthread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;

  std::atomic<std::uint64_t> round{0};  // rises when a loop begins
  const std::function<void(std::int64_t, int)>* body = nullptr;
  std::int64_t items = 0;
  std::atomic<std::int64_t> next{0};  // the first item not handed out
  std::atomic<int> busy{0};           // workers that may still touch this loop
  std::exception_ptr failure;         // of the first body that threw; guarded by mutex

  void run_items(int worker, const void* pool) {
    const void* outer = std::exchange(running_pool, pool);
    for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      try {
        (*body)(item, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next.store(items, std::memory_order_relaxed);  // nobody starts another item
      }
    }
    running_pool = outer;
  }

  void work(int worker, const void* pool) {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && round.load(std::memory_order_acquire) == seen; ++spin) relax();
      if (round.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || round.load(std::memory_order_acquire) != seen; });
      }
      if (stop) return;
      seen = round.load(std::memory_order_acquire);
      run_items(worker, pool);
      busy.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  const int size = threads > 0 ? threads : usable_cores();
  for (int worker = 1; worker < size; ++worker) {
    state_->workers.emplace_back([this, worker] { state_->work(worker, this); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->round.fetch_add(1, std::memory_order_release);
  }
  state_->wake.notify_all();
}

int ThreadPool::size() const {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::for_each(std::int64_t items, const std::function<void(std::int64_t, int)>& body) {
  State& s = *state_;
  if (running_pool == this || s.workers.empty() || items == 1) {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  if (items <= 0) return;
  s.body = &body;
  s.items = items;
  s.failure = nullptr;
  s.next.store(0, std::memory_order_relaxed);
  s.busy.store(static_cast<int>(s.workers.size()), std::memory_order_relaxed);
  {
    const std::lock_guard lock(s.mutex);  // a worker is either before its test or asleep: no lost wake-up
    s.round.fetch_add(1, std::memory_order_release);
  }
  s.wake.notify_all();
  s.run_items(0, this);
  for (int spin = 0; s.busy.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (s.failure) std::rethrow_exception(std::exchange(s.failure, nullptr));
}

}  // namespace lode
