// SPDX-License-Identifier: Apache-2.0
// Where attention leaves the process: the keys and values of a document lie on several ranks, each of which runs
// the same step.
#pragma once

#include <span>
#include <vector>

#include "model/llama.h"

namespace lode {

/// One layer of a step whose sequences have a document.
struct DistributedCall {
  const Step& step;
  Selector* selector = nullptr;  ///< null: full attention, or a window
  std::int64_t window = 0;       ///< of a layer with a sliding window; 0 = none
  const LayerGeometry& geometry;
  std::vector<TailRows> tails;      ///< one a block
  std::span<QueryBlock> blocks;     ///< their `kv` is the document's; positions count from its first token
  std::span<float* const> outputs;  ///< one a block: [T, Hq, d]
  std::span<float* const> lse;      ///< one a block: [T, Hq], of models with sinks; else none
};

class DistributedAttention {
 public:
  virtual ~DistributedAttention() = default;
  /// Attention over the keys of all ranks: the same bits on each of them. Adds to step.work.
  virtual void attend(const DistributedCall& call) = 0;
};

}  // namespace lode
