// SPDX-License-Identifier: Apache-2.0
// What an artefact's "training" says of the contexts that it was trained on.
#pragma once

#include <memory>
#include <vector>

#include "base/json.h"
#include "lab/train/capture.h"
#include "lodestone/engine.h"

namespace lode {

/// "prompts", "tokens", "longest", "kv_type" and, where it does not depend on a context's length,
/// "rope_fingerprint".
Json trained_on(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                const std::vector<Prompt>& prompts);

}  // namespace lode
