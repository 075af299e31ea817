// SPDX-License-Identifier: Apache-2.0
#include "serve/handler_pool.h"

#include <chrono>
#include <utility>

namespace lode::serve {

namespace {

/// glibc before 2.41 now and then loses a signal to one of several waiters (bug 25847), and a request would wait for the
/// next one: nobody waits longer than this without a look.
constexpr auto kLongestWait = std::chrono::milliseconds(20);

}  // namespace

HandlerPool::HandlerPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

void HandlerPool::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void HandlerPool::run() {
  while (true) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      while (work_.empty() && !stopped_) wake_.wait_for(lock, kLongestWait);
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

void HandlerPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

}  // namespace lode::serve
