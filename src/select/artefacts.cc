// SPDX-License-Identifier: Apache-2.0
#include "select/artefacts.h"

#include <map>
#include <string>

#include "base/file.h"
#include "io/safetensors.h"

namespace lode {

namespace fs = std::filesystem;

namespace {

bool is_file(const fs::path& model) {
  std::error_code failed;
  return fs::is_regular_file(model, failed);
}
fs::path folder_of(const fs::path& model) {
  return is_file(model) ? model.parent_path() : model;
}

/// Whether the artefact says that it was made for the model.
bool is_for(const fs::path& artefact, std::string_view fingerprint) {
  std::map<std::string, std::string> metadata;
  parse_safetensors(MappedFile(artefact), &metadata);
  const auto model = metadata.find("model_fingerprint");
  return model != metadata.end() && model->second == fingerprint;
}

}  // namespace

fs::path artefact_folder(const fs::path& model) {
  return model.empty() ? fs::path() : folder_of(fs::absolute(model));
}

std::optional<fs::path> artefact_of(std::string_view method, const fs::path& model,
                                    std::string_view fingerprint) {
  const fs::path path = folder_of(model) / (std::string(method) + ".safetensors");
  std::error_code failed;
  if (!fs::exists(path, failed) || (is_file(model) && !is_for(path, fingerprint))) return std::nullopt;
  return path;
}

Spec with_artefact(Spec spec, const fs::path& model, std::string_view fingerprint) {
  if (!find_method(spec.name).trained || spec.text("weights")) return spec;
  if (const auto path = artefact_of(spec.name, model, fingerprint))
    spec.given.emplace("weights", path->string());
  return spec;
}

}  // namespace lode
