// SPDX-License-Identifier: Apache-2.0
// Where a model comes from: a folder in Hugging Face's layout, or a GGUF file. Both give a config, tensors, a
// tokenizer and a chat template.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "io/gguf.h"
#include "lodestone/tokenizer.h"
#include "model/config.h"
#include "model/weight_files.h"

namespace lode {

class ModelSource {
 public:
  /// `path`: a folder with config.json, or a GGUF file (any part of a split one). InputError when it is
  /// neither, or its config is wrong.
  static ModelSource open(const std::filesystem::path& path);

  const ModelConfig& config() const { return config_; }
  Tokenizer tokenizer() const;
  /// The text of the chat template, from chat_template.jinja, tokenizer_config.json ("default" where there
  /// are several) or tokenizer.chat_template; empty when the model has none.
  std::string chat_template() const;
  /// The tensors, once: they leave this object.
  WeightFiles take_weights();
  /// All files that it is read from, as far as names tell: what must not be written over.
  static std::vector<std::filesystem::path> files_of(const std::filesystem::path& path);

 private:
  std::filesystem::path path_;
  ModelConfig config_;
  std::optional<GgufModel> gguf_;  // none: a folder
};

}  // namespace lode
