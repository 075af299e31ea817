// SPDX-License-Identifier: Apache-2.0
// What documents take of a GPU's memory, said before it is taken.
#pragma once

#include "gpu/backend.h"

namespace lode {

/// Bytes of a document's keys, values and working memory there, without indexes: at most, with so many tokens and
/// chunks.
std::int64_t gpu_document_bytes(const ModelConfig& config, const GpuModel& model, DType kv_type,
                                std::int64_t max_tokens, std::int64_t chunk);

}  // namespace lode
