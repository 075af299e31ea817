// SPDX-License-Identifier: Apache-2.0
// Attention over a document whose rows are shared out over ranks by token range.
//
// Every rank runs the same step: all products with weights and the rows of new tokens. Of a text in shards it selects
// from its own keys, and the ranks find together which of them are among the best of all (select/rank_choice.h);
// of a text in one file, and by methods that cannot choose so, each runs the whole selection. It attends to those of
// the chosen keys that lie in its range; sink and window are cut at the ranges like all others. New tokens follow the
// last range: the last rank attends to them. The states merge in the order of the ranks.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "base/communicator.h"
#include "lodestone/document.h"
#include "model/config.h"
#include "model/distributed_attention.h"

namespace lode {

class ShardAttention final : public DistributedAttention {
 public:
  /// Of a document of that many tokens; `ranks` outlives this.
  ShardAttention(Communicator& ranks, std::int64_t tokens, const ModelConfig& config);
  void attend(const DistributedCall& call) override;
  /// What this rank has told others to choose keys; all else is states.
  const Traffic& selection_sent() const { return selection_sent_; }

 private:
  /// The call's blocks as this rank sees them: positions count from its first row.
  struct Local;
  /// What the ranks did of a step's work, by sequence: summed when its last layer is done.
  struct Shared {
    bool any = false;
    std::vector<ForwardWork> work;
  };
  struct Choice {
    Selection keys;
    SelectWork work;
  };
  std::vector<Choice> choose(const DistributedCall& call);
  void count(const DistributedCall& call, std::span<const Choice> choices);
  void add_up(const DistributedCall& call);
  void attend_part(const DistributedCall& call, std::span<const Choice> choices,
                   std::span<const AttentionState> states) const;

  Communicator& ranks_;
  const Share range_;
  const bool has_tail_;
  int first_layer_ = 0, last_layer_ = 0;  // of those that attend
  std::map<const Step*, Shared> steps_;
  Traffic selection_sent_;
};

/// Why a method that wants_mass() is refused, behind its name.
inline constexpr const char* kNeedsMass =
    "expected a method that chooses by queries and keys alone, which several ranks can share, found one that "
    "needs the "
    "attention mass of each key: index the text and ask it on one machine, without mpirun";

/// From now on whoever asks of this document asks all ranks, which must all do the same. InputError when the
/// document has fewer tokens than there are ranks.
void share_out(const Document& document, Communicator& ranks);
/// What this rank has told others to choose keys of a document that is shared out.
Traffic selection_sent(const Document& document);

}  // namespace lode
