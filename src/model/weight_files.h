// SPDX-License-Identifier: Apache-2.0
// The files that hold a model's weights: one, or the shards or parts of one.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "io/gguf.h"

namespace lode {

/// A tensor in place, in whatever kind of file.
struct NamedTensor {
  std::optional<WeightType> type;   ///< none: not one that weights have, such as I64
  std::string type_name;            ///< as the file has it
  std::vector<std::int64_t> shape;  ///< outermost first
  std::span<const std::byte> bytes;
  std::string where;  ///< the file
};
using NamedTensors = std::map<std::string, NamedTensor>;

/// A model's mapped files; the tensors point into them.
struct WeightFiles {
  std::string where;  ///< what the user named
  bool gguf = false;  ///< by whose names the tensors go
  std::vector<MappedFile> files;
  NamedTensors tensors;
};

/// Those of a folder: DIR/model.safetensors or the shards of DIR/model.safetensors.index.json. InputError: no
/// such file, a missing shard, a tensor in two shards, a name that leads out of the folder.
WeightFiles open_weight_files(const std::filesystem::path& dir);
WeightFiles weight_files_of(GgufModel&& model, std::string where);

/// The shards that DIR/model.safetensors.index.json names; none where there is no such file or it is damaged.
std::set<std::string> weight_shards(const std::filesystem::path& dir);

}  // namespace lode
