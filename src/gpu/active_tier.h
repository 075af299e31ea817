// SPDX-License-Identifier: Apache-2.0
// Active keys on the GPU (gpu/active_keys.h): their rows lie behind those of all tokens in the range of sink
// and window, so that the same kernels attend them in the same launch, as listed rows. Rotated keys need no
// position. Rows go up by one copy and one launch before the step that attends them, and nobody waits.
#pragma once

#include "gpu/active_keys.h"
#include "gpu/lists.h"
#include "kernels/cuda/device/kv_range.h"
#include "kv/store.h"

namespace lode {

class ActiveTier {
 public:
  /// Rows [first_row, first_row + slots) of every layer, in whole pages.
  struct Room {
    std::int64_t first_row = 0, slots = 0;
    std::int64_t bytes = 0;  ///< of GPU memory, with what rows go up through
    std::int64_t end() const { return first_row + slots; }
  };
  /// What `memory` bytes hold, behind shape.max_tokens rows of the type that the GPU has. InputError when it
  /// is less than a page a layer.
  static Room room_for(const KvShape& shape, std::int64_t memory);

  /// `range` has addresses up to room.end().
  ActiveTier(const KvShape& shape, const Room& room, ThreadPool& pool, cuda::KvRange& range);

  /// A step of `count` tokens by a method (any address that is its own) begins: another one than before
  /// starts anew. Where an update is due, moves keys of the store.
  void begin_step(const void* method, std::int64_t tokens, std::int64_t count, const KvStore& store,
                  cuda::StreamHandle stream);
  /// Tokens from this one on that may come in one step.
  static std::int64_t most_tokens(std::int64_t tokens) {
    return ActiveKeys::kTokensPerUpdate - tokens % ActiveKeys::kTokensPerUpdate;
  }
  void roll_back(std::int64_t tokens);

  ActiveKeys& keys() { return keys_; }
  /// Adds the active rows to the lists of sink and window, [count, Hkv] before they go up.
  void list(HostLists& near, std::int64_t count, cuda::StreamHandle stream);
  /// How many rows each of these lists has in a layer: device memory, [count, Hkv].
  const std::int32_t* counts(int layer) const;
  /// Active keys of a layer, all heads.
  std::int64_t active(int layer) const;

  std::int64_t bytes() const { return upload_.bytes() + counts_.bytes(); }  ///< without the rows'
  std::int64_t take_moved() { return std::exchange(moved_, 0); }            ///< bytes since last asked

 private:
  void send(const std::vector<ActiveKeys::Move>& moves, const KvStore& store, cuda::StreamHandle stream);

  KvShape shape_;
  Room room_;
  ThreadPool& pool_;
  cuda::KvRange& range_;
  ActiveKeys keys_;
  const void* method_ = nullptr;
  std::int64_t last_ = 0, noted_ = 0;  // where the last step began, and ended
  std::int64_t moved_ = 0;
  std::int64_t listed_ = 0;           // lists of the step
  cuda::PinnedBuffer staged_;         // [moves] places, then [moves, 2, row]
  cuda::Buffer upload_;               // the same
  cuda::PinnedBuffer staged_counts_;  // [L, lists]
  cuda::Buffer counts_;               // the same
};

}  // namespace lode
