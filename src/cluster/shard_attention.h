// SPDX-License-Identifier: Apache-2.0
// Attention over a document whose rows are shared out over ranks by token range.
//
// Every rank runs the same step: all products with weights, the rows of new tokens, and the selection. It attends
// to those of the chosen keys that lie in its range; sink and window are cut at the ranges like all others. New
// tokens follow the last range: the last rank attends to them. The states merge in the order of the ranks.
#pragma once

#include "cluster/communicator.h"
#include "lodestone/document.h"
#include "model/distributed_attention.h"

namespace lode {

class ShardAttention final : public DistributedAttention {
 public:
  /// Of a document of that many tokens; `ranks` outlives this.
  ShardAttention(Communicator& ranks, std::int64_t tokens);
  void attend(const DistributedCall& call) override;

 private:
  /// The call's blocks as this rank sees them: positions count from its first row.
  struct Local;
  std::vector<Selection> choose(const DistributedCall& call) const;
  void attend_part(const DistributedCall& call, std::span<const Selection> choices,
                   std::span<const AttentionState> states) const;

  Communicator& ranks_;
  const Share range_;
  const bool has_tail_;
};

/// From now on whoever asks of this document asks all ranks, which must all do the same. InputError when the
/// document has fewer tokens than there are ranks.
void share_out(const Document& document, Communicator& ranks);

}  // namespace lode
