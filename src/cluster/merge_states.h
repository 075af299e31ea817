// SPDX-License-Identifier: Apache-2.0
// The attention of all ranks: each has attended the same queries over its own keys.
#pragma once

#include "base/communicator.h"
#include "lodestone/attention.h"

namespace lode {

/// What of a merged state everybody wants.
enum class MergedParts { output, output_and_lse };

/// state := the states of all ranks merged, in the order of the ranks: the same bits on all of them, whatever
/// comes first. Each rank merges a share of the rows, then all get all outputs, and log-sum-exps if they are wanted:
/// else those are left undefined. A rank sends at most (2 x rows x (d + 1)) x 4 bytes, in 2 x (size - 1) messages.
void merge_states(Communicator& ranks, AttentionState state, MergedParts wanted = MergedParts::output);

/// The same where rank r wants rows[r] alone: those of this rank's are merged, others are left as they are. Ranks send
/// each other what they want, in size - 1 messages.
void merge_own_rows(Communicator& ranks, AttentionState state, std::span<const Share> rows);

}  // namespace lode
