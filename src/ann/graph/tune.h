// SPDX-License-Identifier: Apache-2.0
// A graph over keys suited to how walks for known queries go through it.
#pragma once

#include "ann/graph/query_walks.h"

namespace lode {

class GraphDevice;

/// Takes away links by which walks for the `known` queries hardly ever found a key that they wanted, and adds
/// links to wanted keys that they miss, as far as walks for `others`, of which the graph must know nothing,
/// still find as much: they score fewer keys then. Of more queries than a quarter of the keys some are used,
/// at even steps. `device` walks, if there is one that takes the graph. The same for any number of threads; polls
/// check_cancel.
KeyGraph tune_graph(const KeyGraph& graph, const Wanted& known, const Wanted& others, const BeamKeys& keys,
                    ThreadPool& pool, GraphDevice* device = nullptr);

}  // namespace lode
