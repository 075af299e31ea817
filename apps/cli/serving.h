// SPDX-License-Identifier: Apache-2.0
// What `serve` and `mcp` share: the models, the folder of documents, and how they are asked.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli.h"
#include "serve/engine/engine_backend.h"

namespace lode::cli {

struct ServingFlags {
  std::vector<std::string> models, specs;
  std::string contexts, kv_type = "f16", cache_memory, gpu_memory;
  std::string question_template = kQuestionTemplate;
  int parallel = 16, queue = 256;
};
void add_serving_flags(CLI::App& verb, ServingFlags& flags);
/// Loads the models and looks through the folder. InputError where flags contradict each other. Over ranks, of rank 0.
std::unique_ptr<serve::EngineBackend> make_backend(const ServingFlags& flags, const CommonFlags& common);
/// The same of the other ranks, which work along until it is over.
void follow_backend(const ServingFlags& flags, const CommonFlags& common);

}  // namespace lode::cli
