// SPDX-License-Identifier: Apache-2.0
#include "model/source.h"

#include <fmt/format.h>

#include "base/json.h"
#include "lodestone/error.h"
#include "model/gguf_config.h"
#include "model/text_part.h"
#include "text/gguf_tokenizer.h"

namespace lode {

namespace {

constexpr std::size_t kMaxTemplate = 4 << 20, kMaxConfig = 256 << 20;
constexpr const char* kTemplateKey = "tokenizer.chat_template";

/// "chat_template" of tokenizer_config.json: a text, or a list of named ones.
std::string template_of(const Json& config, const std::string& where) {
  const Json& found = json_member(config, "chat_template");
  if (found.is_null()) return {};
  if (found.is_string()) return found.get<std::string>();
  if (!found.is_array())
    throw InputError(fmt::format("{}: 'chat_template': expected a text or a list of them, found {}", where,
                                 found.type_name()));
  for (const Json& one : found)
    if (json_string(one, "name", where) == "default") return json_string(one, "template", where);
  return {};
}

}  // namespace

ModelSource ModelSource::open(const std::filesystem::path& path) {
  ModelSource source;
  source.path_ = path;
  if (GgufModel::is_file(path)) {
    source.gguf_ = GgufModel::open(path);
    source.config_ = config_of_gguf(*source.gguf_);
  } else {
    source.config_ = read_config(path);
  }
  return source;
}

Tokenizer ModelSource::tokenizer() const {
  if (gguf_) return Tokenizer::parse(tokenizer_json(gguf_->metadata()), path_.string());
  return Tokenizer::read(path_);
}

std::string ModelSource::chat_template() const {
  if (gguf_) {
    const GgufMetadata& m = gguf_->metadata();
    return m.has(kTemplateKey) ? std::string(m.text(kTemplateKey)) : std::string();
  }
  std::error_code failed;
  if (const auto file = path_ / "chat_template.jinja"; std::filesystem::exists(file, failed))
    return read_file(file, kMaxTemplate);
  const auto config = path_ / "tokenizer_config.json";
  if (!std::filesystem::exists(config, failed)) return {};
  return template_of(parse_json(read_file(config, kMaxConfig), config.string()), config.string());
}

WeightFiles ModelSource::take_weights() {
  if (gguf_) return weight_files_of(std::move(*gguf_), path_.string());
  WeightFiles files = open_weight_files(path_);
  if (config_.text_part) keep_text_part(files);
  return files;
}

std::vector<std::filesystem::path> ModelSource::files_of(const std::filesystem::path& path) {
  if (GgufModel::is_file(path)) return GgufModel::parts_of(path);
  std::vector<std::filesystem::path> files;
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                           "chat_template.jinja", "special_tokens_map.json", "model.safetensors",
                           "model.safetensors.index.json"})
    files.push_back(path / name);
  for (const std::string& shard : weight_shards(path)) files.push_back(path / shard);
  return files;
}

}  // namespace lode
