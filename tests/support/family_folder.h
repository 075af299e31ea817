// SPDX-License-Identifier: Apache-2.0
// A tiny model of a family as a folder that Model::load takes: with a tokenizer of 64 letters.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "base/json.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "support/family_golden.h"

namespace lode {

/// A tokenizer of 64 single characters, as many tokens as the tiny models know.
inline Json letters_tokenizer() {
  Json json = Json::parse(R"({"normalizer": null, "pre_tokenizer": null, "post_processor": null,
    "decoder": {"type": "Fuse"}, "added_tokens": [],
    "model": {"type": "BPE", "unk_token": "?", "vocab": {}, "merges": []}})");
  const std::string letters = "?.ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  for (std::size_t i = 0; i < letters.size(); ++i) json["model"]["vocab"][std::string(1, letters[i])] = i;
  return json;
}

/// Removed when this goes; tests may write files into it.
class FamilyFolder {
 public:
  explicit FamilyFolder(const std::string& family) {
    std::string pattern = (std::filesystem::temp_directory_path() / "lode-families-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw RunError("no folder for a tiny model");
    path_ = pattern;
    for (const char* file : {"config.json", "model.safetensors"})
      std::filesystem::create_symlink(kFamilies / family / file, path_ / file);
    std::ofstream(path_ / "tokenizer.json") << letters_tokenizer().dump();
  }
  ~FamilyFolder() { std::filesystem::remove_all(path_); }
  FamilyFolder(const FamilyFolder&) = delete;
  FamilyFolder& operator=(const FamilyFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::shared_ptr<const Model> load(int threads = 2) const { return Model::load(path_, threads); }

 private:
  std::filesystem::path path_;
};

}  // namespace lode
