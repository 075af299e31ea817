// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "engine/context_file.h"
#include "io/container.h"
#include "lodestone/error.h"

namespace lode::serve {

namespace {

namespace fs = std::filesystem;

std::vector<std::string> paths_of_contexts(const fs::path& contexts) {
  std::set<std::string> paths;
  std::error_code failed;
  for (const auto& file : fs::directory_iterator(contexts, failed)) {
    if (file.path().extension() != ".lode") continue;
    try {
      const std::string path = read_context_meta(ContainerReader(file.path()), file.path()).model_path;
      if (fs::exists(path, failed)) paths.insert(path);
    } catch (const InputError&) {  // listed as damaged later on
      continue;
    }
  }
  return {paths.begin(), paths.end()};
}

std::string id_of(const fs::path& path) {
  std::error_code failed;
  const fs::path whole = fs::canonical(path, failed);
  const fs::path named = failed ? path : whole;
  return named.extension() == ".gguf" ? named.stem().string() : named.filename().string();
}

}  // namespace

std::vector<std::string> paths_of_models(const std::vector<std::string>& named, const fs::path& contexts) {
  std::vector<std::string> wanted = named.empty() ? paths_of_contexts(contexts) : named;
  if (wanted.empty())
    throw InputError(
        fmt::format("expected a model (-m), or contexts in '{}' whose model is still there, found none",
                    excerpt(contexts.string())));
  return wanted;
}

std::vector<std::pair<std::string, std::shared_ptr<const Model>>> load_models(
    const std::vector<std::string>& paths, int threads) {
  std::vector<std::pair<std::string, std::shared_ptr<const Model>>> models;
  for (const std::string& path : paths) {
    const std::string id = id_of(path);
    expect_utf8(id, "--model: the name");
    std::string free = id;
    const auto taken = [&](const auto& model) { return model.first == free; };
    for (int n = 2; std::any_of(models.begin(), models.end(), taken); ++n) free = fmt::format("{}-{}", id, n);
    models.emplace_back(free, Model::load(path, threads));
  }
  return models;
}

}  // namespace lode::serve
