// SPDX-License-Identifier: Apache-2.0
// What a model's keys and values take.
#pragma once

#include "kv/store.h"
#include "model/config.h"

namespace lode {

KvShape kv_shape(const ModelConfig& config, DType type, std::int64_t max_tokens);

}  // namespace lode
