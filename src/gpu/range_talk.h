// SPDX-License-Identifier: Apache-2.0
// What GPUs that have ranges of one text tell each other within a step: counts of keys, by which they choose together,
// and states of attention, which they merge.
#pragma once

#include <functional>

#include "gpu/select/selectors.h"
#include "kernels/cuda/reduce/group_exchange.h"

namespace lode {

class RangeTalk final : public GpuRanges {
 public:
  /// `meet` is called around each exchange.
  RangeTalk(const cuda::GroupExchange& exchange, int rank, int size, std::int64_t room,
            cuda::StreamHandle stream, std::function<void()> meet);
  /// Numbers that a GPU tells of its keys at most: for each query and list how many are at each distance of
  /// signatures of 128 bits, or of all heads' together.
  static std::int64_t room_to_tell(int query_heads) {
    return std::int64_t{kMostSparseTokens} * query_heads * 129;
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int32_t* part(std::int64_t count) override;
  const std::int32_t* gather(std::int64_t count) override;

  /// A step begins: all GPUs have waited for their streams.
  void begin() { calls_ = 0; }
  /// Where the state of rows goes that is merged next: outputs [rows, d], then log-sum-exps [rows].
  float* state() const { return exchange_.part(rank_, slot()); }
  /// to[rows, d] = the merge of all GPUs' states.
  void merge(std::int64_t rows, int d, float* to);
  std::int64_t bytes() const { return exchange_.bytes() + gathered_.bytes(); }

 private:
  int slot() const { return calls_ % 2; }

  const cuda::GroupExchange& exchange_;
  const int rank_, size_;
  const std::int64_t room_;
  const cuda::StreamHandle stream_;
  const std::function<void()> meet_;
  int calls_ = 0;
  cuda::Buffer gathered_;  // [size, room]
};

/// Numbers that a part of such an exchange may have; of a GPU with these heads, in steps of so many tokens.
std::int64_t range_exchange_room(const ModelConfig& share, std::int64_t chunk);

}  // namespace lode
