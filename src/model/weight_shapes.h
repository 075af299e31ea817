// SPDX-License-Identifier: Apache-2.0
// Which tensors the layers of a plan have, and of what shape.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/family.h"

namespace lode {

/// Whether a place belongs to a layer; false: to the model.
bool in_layer(Place place);
/// Whether the plan has a weight in this place of that layer; `layer` is -1 for the model's own.
bool has_weight(Place place, const ModelConfig& c, int layer);
/// Outermost first; one number: a vector.
std::vector<std::int64_t> shape_of(Place place, const ModelConfig& c, int layer);
/// Of the feed-forward that every token goes through; 0 = none.
std::int64_t feed_forward_width(const ModelConfig& c, int layer);
/// Which row of a head in the file becomes each of its rows here, so that RoPE turns dimensions i and i + d/2;
/// empty when they are in that order already. `pairs`: the file's reader turns neighbours.
std::vector<std::int64_t> head_row_order(const ModelConfig& c, bool pairs);

}  // namespace lode
