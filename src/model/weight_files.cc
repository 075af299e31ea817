// SPDX-License-Identifier: Apache-2.0
#include "model/weight_files.h"

#include <fmt/format.h>

#include <set>
#include <system_error>

#include "base/json.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// A name that the system cannot even look up, such as one that is too long, names nothing.
bool is_there(const std::filesystem::path& path) {
  std::error_code failed;
  return std::filesystem::exists(path, failed);
}

void add_file(const std::filesystem::path& path, WeightFiles& all) {
  const std::string where = path.string();
  const MappedFile& file = all.files.emplace_back(path);
  for (auto& [name, tensor] : parse_safetensors(file.bytes(), where)) {
    std::optional<WeightType> type;
    if (tensor.type == "F32" || tensor.type == "F16" || tensor.type == "BF16")
      type = weight_type_of(float_type(tensor, name, where));
    if (!all.tensors.emplace(name, NamedTensor{type, tensor.type, tensor.shape, tensor.bytes, where})
             .second) {
      throw InputError(fmt::format("{}: tensor '{}' is in another shard too", path.string(), excerpt(name)));
    }
  }
}

/// File names of the shards; plain names only, so that an index cannot point outside its folder.
std::set<std::string> shard_names(const std::filesystem::path& index) {
  const std::string where = index.string();
  const Json json = parse_json(read_file(index), where);
  if (!json_has(json, "weight_map") || !json["weight_map"].is_object()) {
    throw InputError(where + ": expected an object 'weight_map', found none");
  }
  std::set<std::string> names;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name.find('/') != std::string::npos || name[0] == '.' ||
        !name.ends_with(".safetensors")) {
      throw InputError(
          fmt::format("{}: tensor '{}': expected a plain name of a .safetensors file, found '{}'", where,
                      excerpt(tensor), excerpt(name)));
    }
    names.insert(name);
  }
  return names;
}

}  // namespace

WeightFiles open_weight_files(const std::filesystem::path& dir) {
  WeightFiles all{.where = dir.string(), .files = {}, .tensors = {}};
  const auto single = dir / "model.safetensors", index = dir / "model.safetensors.index.json";
  if (is_there(single)) {
    add_file(single, all);
    return all;
  }
  if (!is_there(index)) {
    const bool pickle = is_there(dir / "pytorch_model.bin");
    throw InputError(fmt::format(
        "{}: expected model.safetensors or model.safetensors.index.json, found {}", dir.string(),
        pickle ? "pytorch_model.bin, a pickle file, which could run code when it is read" : "neither"));
  }
  for (const std::string& name : shard_names(index)) {
    if (!is_there(dir / name)) {
      throw InputError(
          fmt::format("{}: the shard '{}' that it names is missing", index.string(), excerpt(name)));
    }
    add_file(dir / name, all);
  }
  return all;
}

WeightFiles weight_files_of(GgufModel&& model, std::string where) {
  WeightFiles all{.where = std::move(where), .gguf = true, .files = std::move(model.files), .tensors = {}};
  for (auto& [name, tensor] : model.tensors)
    all.tensors.emplace(name, NamedTensor{tensor.type, std::string(name_of(tensor.type)), tensor.shape,
                                          tensor.bytes, tensor.where});
  return all;
}

std::set<std::string> weight_shards(const std::filesystem::path& dir) {
  const auto index = dir / "model.safetensors.index.json";
  try {
    return is_there(index) ? shard_names(index) : std::set<std::string>{};
  } catch (const InputError&) {
    return {};
  }
}

}  // namespace lode
