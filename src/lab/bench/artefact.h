// SPDX-License-Identifier: Apache-2.0
// Selectors of trained methods for the bench of one layer, where the spec names no artefact.
#pragma once

#include <memory>
#include <string_view>

#include "lab/bench/common.h"
#include "lodestone/spec.h"

namespace lode {

/// saap: centroids of keys that `keys` makes, a classifier of random weights in f16. hash: random weights.
/// Null for methods that need none, or when the spec names a file. `largest` above 0: one bucket of saap
/// holds this share of the keys, and every query attends it.
std::unique_ptr<Selector> make_with_made_up_artefact(const Spec& spec, const LayerGeometry& geometry,
                                                     std::string_view fingerprint, VectorMaker& keys,
                                                     double largest);

}  // namespace lode
