// SPDX-License-Identifier: Apache-2.0
// What a measurement depends on besides its samples and its spec, so that a run that goes on from an earlier
// one takes over only what was measured alike.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "base/json.h"
#include "lodestone/engine.h"

namespace lode {

/// The model with its tokenizer, all options of its contexts, and the machine with its threads.
Json run_settings(const Model& model, const ContextOptions& context);

/// Processor, threads, kernels, and the GPU where one is used.
std::string machine_name(const Model& model, Device device);

/// All files that a spec reads: the artefacts beside the model at the path `model`, centroids, a plan and what its heads
/// name. A file that is missing is left for attach() to name.
std::set<std::filesystem::path> files_of(const Spec& spec, const std::filesystem::path& model);

/// A hash over the contents of all files that a spec reads (files_of). Empty when it reads none.
std::string files_hash(const Spec& spec, const std::filesystem::path& model);

}  // namespace lode
