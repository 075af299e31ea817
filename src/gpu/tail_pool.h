// SPDX-License-Identifier: Apache-2.0
// Where sequences keep the rows behind their documents: ranges of whole blocks that hold all layers, from one
// pool. A document's last, partly filled block is copied to the front of a branch's range (the seam lies at a
// whole block), so that a branch costs one block and its own tokens.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "gpu/batch_backend.h"
#include "gpu/layers/gpu_states.h"
#include "kernels/cuda/device/kv_range.h"

namespace lode {

class TailPool {
 public:
  /// `rows`: as KvRange's.
  TailPool(const cuda::KvLayout& layout, int layers, std::int64_t tokens, std::vector<cuda::LayerRows> rows);

  /// So many blocks beside one another; says the first. None when others leave no such room now; OutOfDeviceMemory
  /// when the GPU has less than the pool was promised.
  std::optional<std::int64_t> take(std::int64_t blocks);
  std::int64_t blocks() const { return blocks_; }
  void give(std::int64_t first);
  const cuda::KvRange& range() const { return range_; }
  /// A block of layers that lie as this one, where the first of all layers begins.
  char* block(std::int64_t number, int layer) const {
    return range_.base() + number * range_.layout(layer).block_stride();
  }
  std::int64_t bytes() const { return range_.backed_bytes(); }

 private:
  cuda::KvRange range_;
  std::int64_t blocks_ = 0;
  std::map<std::int64_t, std::int64_t> taken_;  ///< first block -> blocks
};

/// A sequence's range in the pool, for as long as this lives, and the states behind its own tokens.
class CudaTail final : public GpuTail {
 public:
  /// Of blocks that were taken from the pool.
  CudaTail(std::shared_ptr<TailPool> pool, std::int64_t first_, std::int64_t state_floats)
      : first(first_), states(state_floats), pool_(std::move(pool)) {}
  ~CudaTail() override { pool_->give(first); }
  CudaTail(const CudaTail&) = delete;
  CudaTail& operator=(const CudaTail&) = delete;
  const std::int64_t first;  ///< block
  GpuStates states;          ///< of its own tokens; before the first they are the document's

 private:
  std::shared_ptr<TailPool> pool_;
};

}  // namespace lode
