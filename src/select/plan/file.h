// SPDX-License-Identifier: Apache-2.0
// Plan files: which method each KV head of each layer uses. `lodestone tune` writes them, `plan:FILE` reads
// them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/selector.h"

namespace lode {

struct Plan {
  std::string model_fingerprint;
  std::string note;       ///< for people: what the plan was measured to do
  std::string chosen_on;  ///< JSON that TrainedOn reads: the texts' lengths, RoPE, type of keys
  LocalWindow dense;      ///< of all heads alike
  std::vector<std::vector<std::string>> heads;  ///< [L][Hkv] specs
};

/// InputError when the file is no plan, is of another version, names an unknown method or a plan, or has
/// layers of different width.
Plan read_plan(const std::filesystem::path& path);
/// Whether the file is meant for a plan: JSON that names the plan's version. InputError when it cannot be
/// read.
bool is_plan(const std::filesystem::path& path);
/// What a plan's file holds.
std::string plan_text(const Plan& plan);
/// Atomically.
void write_plan(const std::filesystem::path& path, const Plan& plan);

}  // namespace lode
