// SPDX-License-Identifier: Apache-2.0
// Keys that a document's selectors choose on the host, for tokens of a batch on the GPU.
#pragma once

#include <span>
#include <vector>

#include "attend/parts.h"
#include "gpu/backend.h"
#include "gpu/lists.h"
#include "kernels/cuda/device/device.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"

namespace lode {

class HostChoice {
 public:
  /// Tokens of one sequence, side by side, that choose among the same keys.
  struct Part {
    QueryBlock block;   ///< without vectors, which choose() brings
    Position seam = 0;  ///< keys of the document from here on are in the tail, too
    ForwardWork* work = nullptr;
  };
  /// For the parts' tokens, in their order; `q` and `q_unrotated`, [N, Hq, d] on the GPU, are theirs. Waits for the
  /// stream. Each part chooses by itself, so that no choice depends on who else asks.
  void choose(std::vector<Part> parts, Selector& selector, const LayerGeometry& geometry, const float* q,
              const float* q_unrotated, const cuda::Stream& stream);
  /// What tokens [first, first + count) attend to of the document in front of the first whole block behind their far keys.
  /// The lists stay until the next call.
  cuda::RowLists lists(int first, int count, const cuda::Stream& stream);

 private:
  void bring(const float* q, const float* q_unrotated, const cuda::Stream& stream);

  LayerGeometry geometry_;
  std::vector<Part> parts_;
  cuda::PinnedBuffer q_, q_unrotated_;  // [N, Hq, d]
  std::vector<Selection> selections_;   // [parts]
  std::vector<SetGroup> groups_;        ///< of selections_
  HostLists lists_;
  cuda::Buffer memory_;
};

}  // namespace lode
