// SPDX-License-Identifier: Apache-2.0
// Any text as model.safetensors.index.json, beside one shard: refused, or the tensors of that shard.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "fuzz/target.h"
#include "io/safetensors.h"
#include "model/weight_files.h"

namespace {

/// A folder with the shard "a.safetensors", which holds the tensor "t".
std::filesystem::path make_folder() {
  const auto folder =
      std::filesystem::temp_directory_path() / ("lodestone-shards-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const float zeros[2] = {};
  lode::write_safetensors(
      folder / "a.safetensors",
      std::vector<lode::TensorToWrite>{
          {.name = "t", .type = lode::DType::f32, .shape = {2}, .bytes = std::as_bytes(std::span(zeros))}},
      {});
  return folder;
}

struct Folder {
  std::filesystem::path path = make_folder();
  ~Folder() { std::filesystem::remove_all(path); }
};

}  // namespace

LODE_FUZZ_TARGET(shards) {
  static const Folder folder;
  std::ofstream(folder.path / "model.safetensors.index.json", std::ios::binary) << input;
  const lode::WeightFiles found = lode::open_weight_files(folder.path);
  LODE_ASSERT(found.files.size() <= 1 && found.tensors.size() == found.files.size());
}
