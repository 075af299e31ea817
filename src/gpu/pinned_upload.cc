// SPDX-License-Identifier: Apache-2.0
#include "gpu/pinned_upload.h"

#include <algorithm>
#include <atomic>

#include "base/cancel.h"
#include "base/threads.h"

namespace lode {

PinnedUpload::PinnedUpload(ThreadPool* pool, std::int64_t scratch) : pool_(pool) {
  constexpr int kMostLanes = 16;  // more fill no link faster, and each pins memory
  for (int i = 0; i < (pool != nullptr ? std::min(kMostLanes, pool->size()) : 1); ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    if (scratch > 0) lanes_.back()->scratch_ = cuda::Buffer(scratch, "pieces on their way");
  }
}

void PinnedUpload::run(std::int64_t count, const std::function<void(std::int64_t, std::byte*)>& fill,
                       const std::function<void(std::int64_t, const std::byte*, Lane&)>& send) {
  std::atomic<std::int64_t> next = 0;
  const auto run_lane = [&](Lane& lane) {
    for (std::int64_t piece = next++; piece < count; piece = next++) {
      try {
        run_one(piece, lane, fill, send);
      } catch (...) {
        next = count;  // for the other lanes
        throw;
      }
    }
  };
  if (pool_ != nullptr)
    pool_->for_each(std::ssize(lanes_),
                    [&](std::int64_t lane, int) { run_lane(*lanes_[static_cast<std::size_t>(lane)]); });
  else
    run_lane(*lanes_.front());
  for (const auto& lane : lanes_) lane->stream_.synchronize();
}

void PinnedUpload::run_one(std::int64_t piece, Lane& lane,
                           const std::function<void(std::int64_t, std::byte*)>& fill,
                           const std::function<void(std::int64_t, const std::byte*, Lane&)>& send) const {
  check_cancel();
  Lane::Slot& slot = lane.slots_[lane.next_];
  lane.next_ = 1 - lane.next_;
  slot.sent.wait();
  // By the thread that needs it: pinning takes as long as copying some pieces.
  if (slot.memory.bytes() == 0) slot.memory = cuda::PinnedBuffer(kPieceBytes);
  fill(piece, slot.memory.as<std::byte>());
  send(piece, slot.memory.as<std::byte>(), lane);
  slot.sent.record(lane.stream());
}

}  // namespace lode
