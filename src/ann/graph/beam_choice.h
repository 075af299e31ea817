// SPDX-License-Identifier: Apache-2.0
// How wide walks over a graph must be to find what is wanted of them.
#pragma once

#include "ann/graph/tune.h"

namespace lode {

/// The narrowest beam, of beams an eighth apart, with which walks find the share `recall` of the keys that
/// these queries want: on average over them, less the error that an average of so few has. The graph must
/// know nothing of the queries; `wanted.nearest` are exact, and of what a walk finds twice as many count,
/// best first (exact scores will rank them). `most` if it takes that or more. The same for any number of
/// threads; polls check_cancel.
std::int64_t choose_beam(const KeyGraph& graph, const Wanted& wanted, double recall, std::int64_t most,
                         const BeamKeys& keys, ThreadPool& pool);

}  // namespace lode
