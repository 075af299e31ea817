// SPDX-License-Identifier: Apache-2.0
// The config of a GGUF file: its metadata as the config.json that says the same, so that every family reads
// one form.
#pragma once

#include "io/gguf.h"
#include "model/config.h"

namespace lode {

/// InputError names the file and the key; an unknown architecture is named with those that are known.
ModelConfig config_of_gguf(const GgufModel& model);

}  // namespace lode
