// SPDX-License-Identifier: Apache-2.0
// The attention of all ranks: each has attended the same queries over its own keys.
#pragma once

#include "cluster/communicator.h"
#include "lodestone/attention.h"

namespace lode {

/// state := the states of all ranks merged, in the order of the ranks: the same bits on all of them, whatever
/// comes first. Each rank merges a share of the rows, then all get all outputs. A rank sends at most
/// (rows x (d + 1) + rows x d) x 4 bytes, in 2 x (size - 1) messages. `lse` is left undefined.
void merge_states(Communicator& ranks, AttentionState state);

}  // namespace lode
