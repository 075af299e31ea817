// SPDX-License-Identifier: Apache-2.0
// Models that also see: of their folders the part that reads text is taken, and the rest is left alone.
#pragma once

#include <string_view>

#include "base/json.h"
#include "model/weight_files.h"

namespace lode {

/// Whether a config.json wraps one of a text model.
bool has_text_part(const Json& config);
/// The config.json of the text model that it wraps. InputError names a model_type that is not known.
Json text_part(const Json& config, std::string_view where);
/// Gives the text model's tensors the names that they have in a folder of its own, and drops the others.
void keep_text_part(WeightFiles& files);

}  // namespace lode
