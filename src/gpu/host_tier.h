// SPDX-License-Identifier: Apache-2.0
// Keys and values that live in host memory (RetrievalAttention, section 3.3 and algorithm 1): what of them
// the GPU has at a time. While a text is read densely that is one layer's, moved there layer by layer; while
// tokens choose their keys it is the sink and the window, which the GPU attends while the host attends what
// was chosen of the rest.
#pragma once

#include <array>
#include <limits>

#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/kv_range.h"
#include "kv/store.h"

namespace lode {

class ThreadPool;

/// Rows [begin, end) of one layer, head and part of the store, in the type that the GPU has them in.
void copy_rows(const KvStore& store, int layer, int head, bool values, std::int64_t begin, std::int64_t end,
               DType type, std::byte* to);

class HostTier {
 public:
  /// Tokens behind the sink that may be held: window, question and answer. More are held when a method's
  /// window is longer; of what left the window at least this many less a window's stay.
  static constexpr std::int64_t kHeldTokens = 4096;
  static constexpr std::int64_t kBounceBytes = std::int64_t{16} << 20;  ///< of each of two pinned buffers

  /// `shape` as it is on the GPU; a store of 8 bits is brought in the GPU's type. The stream must be waited
  /// for before the first step.
  HostTier(const KvShape& shape, ThreadPool& pool, cuda::StreamHandle stream);

  /// One layer's place on the GPU for a dense step.
  const cuda::KvRange& stage() const { return stage_; }
  /// Where kernels find the stage's first byte: device memory, [1].
  const char* const* stage_bases() const { return bases_.as<const char*>(); }
  /// Brings a layer's rows of the store there, with room for `more` tokens behind.
  void bring(const KvStore& store, int layer, std::int64_t more, cuda::StreamHandle stream);

  /// Makes rows [0, sink) and [tail, tokens) of every layer in `held` those of the store, with room for
  /// `more` tokens behind, and lets go of what lies far before the tail.
  void hold(cuda::KvRange& held, const KvStore& store, std::int64_t sink, std::int64_t tail,
            std::int64_t more, cuda::StreamHandle stream);
  /// A step has written `more` rows behind the store's to the held range.
  void held_more(std::int64_t more) { held_end_ += more; }
  void roll_back(std::int64_t tokens);

  std::int64_t bytes() const { return stage_.backed_bytes(); }
  std::int64_t take_moved() {
    return std::exchange(moved_, 0);
  }  ///< bytes copied to the GPU since last asked

 private:
  void move(cuda::KvRange& to, int to_layer, const KvStore& store, int layer, std::int64_t begin,
            std::int64_t end, cuda::StreamHandle stream);

  KvShape shape_;
  ThreadPool& pool_;
  cuda::KvRange stage_;
  cuda::Buffer bases_;
  struct Bounce {
    cuda::PinnedBuffer memory;
    cuda::Event sent;
  };
  std::array<Bounce, 2> bounce_;
  std::size_t next_bounce_ = 0;
  std::int64_t moved_ = 0;
  // Rows [0, held_sink_) and [held_begin_, held_end_) are there.
  std::int64_t held_sink_ = 0, held_begin_ = 0, held_end_ = 0;
};

}  // namespace lode
