// SPDX-License-Identifier: Apache-2.0
// How a selector that keeps clusters above a threshold names them, for a device that chooses in its place.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "select/calibration.h"
#include "select/cluster_tree.h"

namespace lode {

/// The index of one layer, of one level: a cluster is kept when the mean over the queries (or the root of the
/// mean square) of K exp(q.C) / sum_j N_j exp(q.C_j) is above the threshold of their kind, K keys in the
/// clusters that count.
struct ClusterChoice {
  std::int64_t version = 0;                  ///< another one: other clusters
  std::span<const ClusterSegment> segments;  ///< one after the other, from the sink on
  std::array<double, 2> thresholds = {};     // [QueryKind]; 0 keeps everything
  bool squares = false;                      ///< the root of the mean square
};

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
