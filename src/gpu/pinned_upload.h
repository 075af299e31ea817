// SPDX-License-Identifier: Apache-2.0
// Host memory that is not pinned, such as files' mappings, on its way to the GPU: threads bring pieces of it into
// pinned memory, from which the GPU fetches them meanwhile. The driver's own copy of such memory is one thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/event.h"

namespace lode {

class ThreadPool;

class PinnedUpload {
 public:
  static constexpr std::int64_t kPieceBytes = std::int64_t{2} << 20;

  /// A thread's own way to the GPU: what it enqueues runs in order, beside what the others enqueue.
  class Lane {
   public:
    cuda::StreamHandle stream() const { return stream_.get(); }
    /// Device memory for what the stream does next with a piece.
    void* scratch() const { return scratch_.as<void>(); }

   private:
    friend class PinnedUpload;
    struct Slot {
      cuda::PinnedBuffer memory;
      cuda::Event sent;
    };
    Slot slots_[2];
    std::size_t next_ = 0;
    cuda::Buffer scratch_;
    cuda::Stream stream_;  // last: it waits for what uses the others
  };

  /// Of the pool's threads, or of the caller alone where there is none: threads of a pool know one GPU. Each lane has
  /// `scratch` bytes.
  explicit PinnedUpload(ThreadPool* pool, std::int64_t scratch = 0);

  /// Pieces [0, count), on all threads: fill(piece, to) writes at most kPieceBytes to pinned memory, and
  /// send(piece, from, lane) enqueues on the lane's stream what takes them from there. All has been done on the GPU when
  /// this returns. Polls check_cancel; throws what the first piece that fails has thrown.
  void run(std::int64_t count, const std::function<void(std::int64_t piece, std::byte* to)>& fill,
           const std::function<void(std::int64_t piece, const std::byte* from, Lane& lane)>& send);

 private:
  void run_one(std::int64_t piece, Lane& lane, const std::function<void(std::int64_t, std::byte*)>& fill,
               const std::function<void(std::int64_t, const std::byte*, Lane&)>& send) const;

  ThreadPool* pool_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // [threads]
};

}  // namespace lode
