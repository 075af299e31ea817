// SPDX-License-Identifier: Apache-2.0
// Threads that run requests, in the order in which they came.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lode::serve {

class HandlerPool {
 public:
  explicit HandlerPool(int threads);
  ~HandlerPool() { stop(); }
  HandlerPool(const HandlerPool&) = delete;
  HandlerPool& operator=(const HandlerPool&) = delete;
  void post(std::function<void()> work);
  void stop();  ///< once everything that was posted has run

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lode::serve
