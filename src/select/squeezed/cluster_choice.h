// SPDX-License-Identifier: Apache-2.0
// How a selector that keeps clusters above a threshold names them, for a device that chooses in its place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lodestone/spec.h"
#include "select/shared/calibration.h"
#include "select/squeezed/cluster_tree.h"

namespace lode {

/// A device takes trees of so many levels.
inline constexpr int kMostDeviceLevels = 8;

/// The index of one layer: a cluster is kept when the mean over the queries (or the root of the mean square)
/// of K exp(q.C) / sum_j N_j exp(q.C_j) is above its level's threshold for their kind, K keys in the clusters
/// that count. Below the coarsest level clusters are compared, and j runs over them, where their parent is
/// kept.
struct ClusterChoice {
  std::int64_t version = 0;                  ///< another one: other clusters
  std::span<const ClusterSegment> segments;  ///< one after the other, from the sink on
  Thresholds thresholds;
  bool squares = false;  ///< the root of the mean square
  Spreads spreads = Spreads::none;
};

/// What a spec of squeezed asks of a context of so many keys, coarsest level first.
struct ClusterPlan {
  std::vector<std::int64_t> nodes;
  std::vector<double> kept;  ///< share of the keys below what a level keeps
};
ClusterPlan cluster_plan(const Spec& spec, std::int64_t keys);
Spreads wanted_spreads(const Spec& spec);

/// A selector that chooses so.
class ClusterChooser {
 public:
  virtual ~ClusterChooser() = default;
  /// Why a device cannot take its place, as a clause; empty: it can.
  virtual std::string why_not_on_device() const = 0;
  /// Of the sequence 0; nothing while the selector has no threshold of its own.
  virtual std::optional<ClusterChoice> cluster_choice() const = 0;
};

}  // namespace lode
