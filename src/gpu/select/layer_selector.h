// SPDX-License-Identifier: Apache-2.0
// One layer of another engine's on a GPU: its keys and values in plain arrays, a method that chooses among them there,
// and attention, by the selectors and kernels of the step (gpu/context.cc), in the caller's stream.
//
// Selectors and kernels read keys in blocks (KvLayout), so rows are copied into blocks of this layer's own, on the
// device, once each; the caller's arrays are never read again for them, and may go.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gpu/select/selectors.h"
#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/device/arrivals.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/kv_range.h"
#include "kernels/cuda/device/launch_chain.h"
#include "select/device_keys.h"

namespace lode {

/// A layer's keys and values so far, device memory of `type`: all, or those that no call has brought yet.
struct CallerRows {
  cuda::StridedKv kv;
  DType type = DType::bf16;
  std::int64_t first = 0;  ///< token whose rows come first
};

/// Query tokens [begin, begin + tokens), whose own rows are in the caller's keys and values.
struct CallerQueries {
  const void* q = nullptr;  // [tokens, Hq, d] after RoPE, device memory
  std::int64_t begin = 0, tokens = 0;
  DType type = DType::f32;
};

/// Where attention of a call goes. Device memory.
struct CallerOutput {
  void* o = nullptr;     // [tokens, Hq, d]
  float* lse = nullptr;  // [tokens, Hq]; null: not wanted
  DType type = DType::f32;
};

/// What tokens [token_begin, token_end) of a KV head attend to besides sink and the last token's window. Device memory, there until the
/// function that is told of it returns: work that reads it is enqueued in the call's stream.
struct CallerSet {
  int kv_head = 0, first_query_head = 0, query_heads = 0;
  std::int64_t token_begin = 0, token_end = 0;
  const std::int32_t* rows = nullptr;  // [count] unique
  const float* log_weights = nullptr;  // [count], or null
  std::int64_t count = 0;
  /// And these rows, which lie in the window of the first token.
  std::int64_t run_begin = 0, run_end = 0;
};

/// Calls take turns, whichever streams they are for: the caller sees to that.
class LayerSelector {
 public:
  /// `host` is the method's selector for this layer, which brings functions and builds what the host builds of an
  /// index; it outlives this. The device is current. InputError when no GPU chooses with this method.
  LayerSelector(const Spec& spec, const LayerGeometry& geometry, Selector& host, int device);
  ~LayerSelector();
  LayerSelector(const LayerSelector&) = delete;
  LayerSelector& operator=(const LayerSelector&) = delete;

  int device() const { return device_; }
  std::int64_t bytes() const;  ///< of GPU memory: the index and the layer's own blocks

  /// All rows are the context: indexes them, in place of what was there. Waits for the stream where the host takes part.
  void build(const CallerRows& rows, const cuda::CallerStream& stream);
  void roll_back(std::int64_t tokens);
  std::int64_t tokens() const { return taken_; }  ///< whose rows are here
  DType type() const { return layout_.type; }     ///< of their numbers
  /// Copies the rows of all tokens to the host, k and v [Hkv, tokens(), d]. Waits for them.
  void download(char* k, char* v, const cuda::CallerStream& stream);

  /// Attention over sink, window and what the method chooses. Rows that a call has seen are not read again unless queries
  /// stand on them.
  void attend(const CallerQueries& queries, const CallerRows& rows, const CallerOutput& output,
              const cuda::CallerStream& stream);
  /// Tells `take` of every set. Waits for the stream: how many rows were chosen is known there alone.
  void select(const CallerQueries& queries, const CallerRows& rows, const cuda::CallerStream& stream,
              const std::function<void(const CallerSet&)>& take);
  /// Of a chunk's queries in float32, those that the host's selector listens to: to it, before RoPE or after as it hears them. Waits for the stream.
  void observe(const CallerQueries& queries, const cuda::CallerStream& stream);

  /// MethodInfo::finish of layers that lie on one GPU; `run` calls it with the host's selectors and what it is given,
  /// by the layers' numbers. Waits for the stream.
  using Finish = std::function<void(const std::function<KvLayer(int layer)>&)>;
  static void finish(std::span<LayerSelector* const> layers, const cuda::CallerStream& stream,
                     const Finish& run);

 private:
  /// For how much a GPU's selector was made.
  struct Room {
    std::int64_t tokens = 0;  ///< of the sequence
    int queries = 1;          ///< that choose at once, each for itself
    int step = 1;             ///< that may choose together
  };
  struct Piece;
  struct Numbers;
  class HostRows;
  class Call;
  class Staged;

  void record_last();
  void wait(const cuda::CallerStream& stream);
  cuda::TakenRows take(const CallerRows& rows, std::int64_t begin, std::int64_t end,
                       const cuda::CallerStream& stream);
  Numbers numbers(const CallerQueries& queries, DType output, const cuda::CallerStream& stream);
  Numbers take_call(const CallerQueries& queries, const CallerRows& rows, DType output,
                    const cuda::CallerStream& stream);
  void make_room(std::int64_t tokens, std::int64_t queries, const cuda::CallerStream& stream);
  std::unique_ptr<GpuSelector> made(const Room& room, const cuda::CallerStream& stream) const;
  void build_on_host(const cuda::CallerStream& stream);
  static void with_host(std::span<LayerSelector* const> layers, const cuda::CallerStream& stream,
                        const Finish& run, bool holds);
  GpuKeys keys(std::int64_t tokens) const;
  std::int64_t most_at_once(std::int64_t position, Phase phase) const;
  void for_pieces(const CallerQueries& queries, const Numbers& numbers, const cuda::CallerStream& stream,
                  const std::function<void(const Piece&)>& body);
  void wait_for_staged();
  void attend_piece(const Piece& piece, const cuda::CallerStream& stream);
  void narrow(const Piece& piece, const cuda::CallerStream& stream) const;
  cuda::Precision precision() const {
    return layout_.type == DType::f32 ? cuda::Precision::exact : cuda::Precision::fast;
  }

  Spec spec_;
  LayerGeometry geometry_;
  Selector& host_;
  int device_ = 0;
  cuda::KvLayout layout_;  ///< of one layer; any layer's number names it
  std::unique_ptr<cuda::KvRange> range_;
  std::int64_t taken_ = 0, built_ = 0;  ///< rows that are here; those of the context
  Room room_;
  std::unique_ptr<GpuSelector> chooser_;  ///< for room_; null before it is needed
  std::unique_ptr<DeviceKeys> device_keys_;
  cuda::Buffer frequencies_;  // [d/2]
  cuda::Buffer bases_;        // [1] const char*
  cuda::Buffer places_;       // [step] QueryToken
  cuda::Buffer numbers_;      ///< of a call of one token; made when first needed
  cuda::Buffer parts_;        ///< of tokens that choose together; made when first needed
  std::unique_ptr<cuda::LaunchGraphs> graphs_ =
      std::make_unique<cuda::LaunchGraphs>();  ///< of calls of one token
  cuda::Event used_;                           ///< the last call's work, once that is recorded
  bool is_recorded_ = true;                    ///< whether it is; later for the default stream alone
  cuda::Event staged_;                         ///< copies out of pinned memory that the next piece writes
  bool is_staged_ = false;                     ///< whether there were any
  cuda::StreamHandle last_ = nullptr;          ///< the last call's stream
};

}  // namespace lode
