// SPDX-License-Identifier: Apache-2.0
#include "select/artefacts.h"

#include <map>
#include <string>

#include "base/file.h"
#include "io/safetensors.h"

namespace lode {

namespace fs = std::filesystem;

namespace {

/// Whether the artefact says that it was made for the model.
bool is_for(const fs::path& artefact, std::string_view fingerprint) {
  std::map<std::string, std::string> metadata;
  parse_safetensors(MappedFile(artefact), &metadata);
  const auto model = metadata.find("model_fingerprint");
  return model != metadata.end() && model->second == fingerprint;
}

}  // namespace

fs::path artefact_folder(const fs::path& model) {
  std::error_code failed;
  return fs::is_regular_file(model, failed) ? model.parent_path() : model;
}

std::optional<fs::path> artefact_of(std::string_view method, const fs::path& model,
                                    std::string_view fingerprint) {
  const fs::path folder = artefact_folder(model), path = folder / (std::string(method) + ".safetensors");
  std::error_code failed;
  if (!fs::exists(path, failed) || (folder != model && !is_for(path, fingerprint))) return std::nullopt;
  return path;
}

}  // namespace lode
