// SPDX-License-Identifier: Apache-2.0
// Which files of a model folder hold the weights: one, or the shards that an index names.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"
#include "io/safetensors.h"

namespace lode {

struct NamedTensor {
  Tensor tensor;
  std::string where;  ///< the file
};
using NamedTensors = std::map<std::string, NamedTensor>;

/// Maps DIR/model.safetensors or the shards of DIR/model.safetensors.index.json; their tensors point into
/// `files`. InputError: no such file, a missing shard, a tensor in two shards, a name that leads out of the
/// folder.
void open_weight_files(const std::filesystem::path& dir, std::vector<MappedFile>& files, NamedTensors& all);

/// The shards that DIR/model.safetensors.index.json names; none where there is no such file or it is damaged.
std::set<std::string> weight_shards(const std::filesystem::path& dir);

}  // namespace lode
