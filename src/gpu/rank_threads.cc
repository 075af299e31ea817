// SPDX-License-Identifier: Apache-2.0
#include "gpu/rank_threads.h"

#include "kernels/cuda/reduce/group_exchange.h"

namespace lode {

namespace {

/// What a rank that did nothing wrong ends with.
struct AnotherFailed {};

bool is_another(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const AnotherFailed&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

RankThreads::RankThreads(std::span<const int> devices) : errors_(devices.size()) {
  for (std::size_t rank = 0; rank < devices.size(); ++rank)
    threads_.emplace_back([this, rank, device = devices[rank]] { work(static_cast<int>(rank), device); });
}

RankThreads::~RankThreads() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::run(const std::function<void(int)>& body) {
  const std::lock_guard turn(turn_);
  std::unique_lock lock(mutex_);
  errors_.assign(threads_.size(), nullptr);
  body_ = &body;
  running_ = size();
  meeting_ = 0;
  gave_up_ = false;
  ++call_;
  begin_.notify_all();
  done_.wait(lock, [&] { return running_ == 0; });
  if (const std::exception_ptr error = outcome(); error != nullptr) std::rethrow_exception(error);
}

std::exception_ptr RankThreads::outcome() const {
  std::exception_ptr any = nullptr;
  for (const std::exception_ptr& error : errors_) {
    if (error == nullptr) continue;
    if (!is_another(error)) return error;
    any = error;
  }
  return any;
}

void RankThreads::work(int rank, int device) {
  std::exception_ptr no_device = nullptr;
  try {
    cuda::use_device(device);
  } catch (...) {
    no_device = std::current_exception();
  }
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    begin_.wait(lock, [&] { return ends_ || call_ > seen; });
    if (ends_) return;
    seen = call_;
    lock.unlock();
    try {
      if (no_device != nullptr) std::rethrow_exception(no_device);
      (*body_)(rank);
    } catch (...) {
      note_failure(rank);
    }
    lock.lock();
    if (--running_ == 0) done_.notify_all();
  }
}

/// In a catch block. Others that wait for this rank wait no longer.
void RankThreads::note_failure(int rank) {
  const std::lock_guard lock(mutex_);
  errors_[static_cast<std::size_t>(rank)] = std::current_exception();
  gave_up_ = true;
  met_.notify_all();
}

void RankThreads::meet() {
  std::unique_lock lock(mutex_);
  if (gave_up_) throw AnotherFailed();
  const std::uint64_t mine = meetings_;
  if (++meeting_ == size()) {
    meeting_ = 0;
    ++meetings_;
    met_.notify_all();
    return;
  }
  met_.wait(lock, [&] { return gave_up_ || meetings_ > mine; });
  if (meetings_ == mine) throw AnotherFailed();
}

}  // namespace lode
