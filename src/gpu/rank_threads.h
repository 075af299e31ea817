// SPDX-License-Identifier: Apache-2.0
// One thread for each GPU that takes part in a step, and the place where they meet.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace lode {

class RankThreads {
 public:
  /// Thread r works on devices[r].
  explicit RankThreads(std::span<const int> devices);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;
  int size() const { return static_cast<int>(threads_.size()); }

  /// body(rank) on all threads; returns when all are done, and throws what the first rank that failed by itself threw.
  /// Calls from several threads take turns.
  void run(const std::function<void(int)>& body);
  /// Inside of a body: waits for the other ranks. Throws when one of them has failed.
  void meet();

 private:
  void work(int rank, int device);
  void note_failure(int rank);
  std::exception_ptr outcome() const;

  std::vector<std::thread> threads_;
  std::mutex turn_;  ///< of callers
  std::mutex mutex_;
  std::condition_variable begin_, done_, met_;
  const std::function<void(int)>* body_ = nullptr;
  std::vector<std::exception_ptr> errors_;  // [ranks] of the running call
  std::uint64_t call_ = 0;
  int running_ = 0, meeting_ = 0;
  std::uint64_t meetings_ = 0;
  bool gave_up_ = false, ends_ = false;
};

}  // namespace lode
