// SPDX-License-Identifier: Apache-2.0
// How much attention each attended key received.
#pragma once

#include <span>
#include <vector>

#include "attend/attend.h"
#include "attend/parts.h"

namespace lode {

/// Gives the mass of every (token, KV head) of the groups to `sink`, in the order of the groups, tokens
/// inside.
///   mass[row] = sum over the heads that attended it of exp(scale q . k[row] + log weight - lse)
/// `lse` is the final one of each query, per block [T, Hq]; it counts where a set has a tail, else the masses
/// of a query add up to 1. Where the heads of a KV head are in sets over different tokens, each such group is
/// reported on its own. `tails` is as attend_branches takes it, or empty.
void report_mass(std::span<const SetGroup> groups, std::span<const QueryBlock> blocks,
                 std::span<const TailRows> tails, const LayerGeometry& geometry,
                 std::span<const std::vector<float>> lse, const MassSink& sink);

}  // namespace lode
