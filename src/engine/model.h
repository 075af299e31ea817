// SPDX-License-Identifier: Apache-2.0
// What a Model holds.
#pragma once

#include <memory>
#include <optional>

#include "base/threads.h"
#include "lodestone/engine.h"
#include "model/config.h"
#include "model/weights.h"

namespace lode {

struct Model::Impl {
  std::filesystem::path path;
  ModelConfig config;
  std::optional<Tokenizer> tokenizer;
  ModelWeights weights;
  std::unique_ptr<ThreadPool> pool;
  std::string fingerprint;
};

}  // namespace lode
