// SPDX-License-Identifier: Apache-2.0
// How much attention each attended key received.
#pragma once

#include <span>
#include <vector>

#include "attend/attend.h"
#include "attend/parts.h"

namespace lode {

/// The largest scores that a group's queries have among the keys of each stretch (AttendItem::peaks), where all of rows
/// [0, end) were attended.
struct KeyPeaks {
  Position end = 0;
  std::span<const float> peaks = {};  // [ceil(end / AttendItem::kPeakKeys), stride]; empty: not known
  std::int64_t stride = 0;            ///< queries of the item
  std::int64_t first = 0;             ///< the group's first query among them
};

/// What was attended, as attend.cc has it.
struct Attended {
  std::span<const SetGroup> groups;
  std::span<const QueryBlock> blocks;
  std::span<const TailRows> tails;          ///< as attend_branches takes it, or empty
  std::span<const std::vector<float>> lse;  ///< the final one of each query, per block [T, Hq]
  const std::vector<KeyPeaks>& peaks;       ///< [groups]
};

/// Gives the mass of every (token, KV head) of the groups to `sink`, in the order of the groups, tokens
/// inside.
///   mass[row] = sum over the heads that attended it of exp(scale q . k[row] + log weight - lse)
/// `lse` counts where a set has a tail or peaks are known, else the masses of a query add up to 1. With peaks, only
/// stretches that hold a key of at least `sink.least` are looked at. Where the heads of a KV head are in sets over
/// different tokens, each such group is reported on its own.
void report_mass(const Attended& attended, const LayerGeometry& geometry, const MassSink& sink);

}  // namespace lode
