// SPDX-License-Identifier: Apache-2.0
// Keys and values on their way from the GPU to the host's store, layer by layer, while layers that are there are
// indexed.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "gpu/index/context_keys.h"

namespace lode {

class ArrivingRows {
 public:
  /// Begins. Until commit nobody else touches the context or changes the store.
  ArrivingRows(GpuContext& context, KvStore& store)
      : store_(store),
        rows_(context.tokens() - store.tokens()),
        thread_([&context, this] { bring(context); }) {}
  ~ArrivingRows() {
    if (thread_.joinable()) thread_.join();
  }
  ArrivingRows(const ArrivingRows&) = delete;
  ArrivingRows& operator=(const ArrivingRows&) = delete;

  /// Rows of layers up to this one are written, not committed (KvStore::layer). Throws what stopped them.
  void wait_for(int layer) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return there_ > layer || error_ != nullptr; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  std::int64_t rows() const { return rows_; }
  void commit() {
    thread_.join();
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (rows_ > 0) store_.commit(rows_);
  }

 private:
  void bring(GpuContext& context) {
    std::exception_ptr error;
    try {
      download_by_layer(context, store_, [&](int layer) { note(layer + 1, nullptr); });
    } catch (...) {
      error = std::current_exception();
    }
    note(there_, error);
  }
  void note(int there, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    there_ = there;
    error_ = std::move(error);
    changed_.notify_all();
  }

  KvStore& store_;
  std::int64_t rows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int there_ = 0;  ///< layers
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses all others
};

}  // namespace lode
