// SPDX-License-Identifier: Apache-2.0
// What a Model holds.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "base/threads.h"
#include "gpu/backend.h"
#include "lodestone/engine.h"
#include "model/config.h"
#include "model/weights.h"

namespace lode {

struct Model::Impl {
  std::filesystem::path path;
  ModelConfig config;
  std::optional<Tokenizer> tokenizer;
  std::string chat_template;  ///< Jinja; empty: none
  ModelWeights weights;
  std::unique_ptr<ThreadPool> pool;
  std::string fingerprint;

  /// The weights on the GPU, copied when first asked for.
  std::shared_ptr<const GpuModel> gpu_model(std::int64_t limit, const GpuGroup& group = {}) const;

 private:
  mutable std::mutex gpu_mutex_;
  mutable std::weak_ptr<const GpuModel> gpu_;
};

}  // namespace lode
