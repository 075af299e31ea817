// SPDX-License-Identifier: Apache-2.0
// Steps of building a graph that a GPU can take over; several builds may run at once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ann/graph/query_walks.h"
#include "lodestone/types.h"

namespace lode {

/// The links of one graph before it is tuned (ann/graph/build.h). Both calls give rows [n, degree] with -1 behind a node's
/// last link.
class GraphLinker {
 public:
  virtual ~GraphLinker() = default;
  /// Links keys that stand in some query's list, and adds links in the other direction.
  virtual std::vector<Node> link_listed() = 0;
  /// Then links `nodes`, which had no links yet, to some of near [nodes, each] (whose rows may end in -1), and adds links
  /// in the other direction.
  virtual std::vector<Node> link_near(std::span<const Node> nodes, std::span<const Node> near,
                                      std::int64_t each) = 0;
};

class GraphDevice {
 public:
  virtual ~GraphDevice() = default;
  /// As nearest_keys (ann/nearest.h), but that products may be rounded.
  virtual std::vector<Node> nearest(Matrix<const float> queries, Matrix<const float> keys,
                                    std::int64_t k) = 0;
  /// What is given outlives the linker. Null where the device does not take such a graph.
  virtual std::unique_ptr<GraphLinker> linker(Matrix<const float> keys,
                                              std::span<const Node> nearest /*[q, each]*/, std::int64_t each,
                                              int degree) = 0;
  /// Walks over graphs of as many nodes and as high a degree as `like`; what is given outlives them. Null where the
  /// device does not take them.
  virtual std::unique_ptr<QueryWalks> walks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like) = 0;
};

}  // namespace lode
