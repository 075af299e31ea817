// SPDX-License-Identifier: Apache-2.0
// lodestone verify: is this file or model folder intact?
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/file.h"
#include "base/text.h"
#include "base/unreadable.h"
#include "cli.h"
#include "engine/context_file.h"
#include "io/container.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/source.h"
#include "select/plan/file.h"

namespace lode::cli {

namespace {

struct VerifyFlags {
  CommonFlags common;
  std::string path;
};

/// What was checked of a file in which nothing was wrong.
struct Checked {
  std::string what;
  bool compared = true;  ///< every byte, with a checksum
};

/// An artefact of `train`, or weights: structure, and numbers that are numbers.
Checked verify_tensors(const std::string& path) {
  const MappedFile file(path);
  std::size_t checked = 0;
  std::vector<float> values;
  for (const auto& [name, tensor] : parse_safetensors(file.bytes(), path)) {
    if (tensor.type != "F32" && tensor.type != "F16" && tensor.type != "BF16") continue;
    values.resize(static_cast<std::size_t>(tensor.elements()));
    kernels().widen(tensor.bytes.data(), float_type(tensor, name, path), tensor.elements(), values.data());
    if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }))
      throw InputError(fmt::format("{}: tensor '{}': expected finite numbers, found others", path, name));
    ++checked;
  }
  return {fmt::format("{} tensors of floating-point numbers, all finite, no holes and no overlaps", checked),
          has_checksum(file.bytes(), path)};
}

/// Whether all files of weights have checksums, as those that `train` writes: GGUF has none, nor safetensors of others.
bool has_checksums(const std::string& model) {
  const auto files = ModelSource::files_of(model);
  const auto weights = [](const std::filesystem::path& file) {
    return file.extension() != ".json" && file.extension() != ".jinja" && std::filesystem::exists(file);
  };
  return std::all_of(files.begin(), files.end(), [&](const std::filesystem::path& path) {
    if (!weights(path)) return true;
    const MappedFile file(path);
    return is_safetensors(file.bytes()) && has_checksum(file.bytes(), path.string());
  });
}

/// Throws InputError when anything is wrong.
Checked verify(const VerifyFlags& flags) {
  if (is_model(flags.path)) {
    const auto model = Model::load(flags.path, flags.common.threads, /*check_finite=*/true);
    return {
        fmt::format("{} bytes of weights, all finite, shapes as the config has them; tokenizer of {} tokens",
                    model->weight_bytes(), model->tokenizer().vocab()),
        has_checksums(flags.path)};
  }
  if (is_artefact(flags.path)) return verify_tensors(flags.path);
  if (is_plan(flags.path)) {
    const Plan plan = read_plan(flags.path);
    return {fmt::format("a plan of {} of {}, every spec is known", counted(std::ssize(plan.heads), "layer"),
                        counted(std::ssize(plan.heads.front()), "KV head"))};
  }
  expect_context(flags.path);
  const ContainerReader file(flags.path);
  const ContextMeta meta = read_context_meta(file, flags.path);
  if (const std::string damage = file.verify_all(); !damage.empty())
    throw InputError(fmt::format("{}: {}", flags.path, damage));
  std::size_t sections = file.sections().size();
  for (std::size_t i = 0; i < meta.shards.shards.size(); ++i) {
    const ContainerReader part = open_shard(flags.path, meta.shards, i);
    if (const std::string damage = part.verify_all(); !damage.empty())
      throw InputError(fmt::format("{}: {}", part.file().path().string(), damage));
    sections += part.sections().size();
  }
  const std::string files =
      meta.shards.empty() ? std::string() : fmt::format(" in {} files", meta.shards.shards.size() + 1);
  return {fmt::format("{} of {}{}, every checksum matches, zeros between them",
                      counted(static_cast<std::int64_t>(sections), "section"), counted(meta.tokens, "token"),
                      files)};
}

/// Whether there is something that `verify` takes, damaged or not: else the command was at fault. A name alone is none.
bool is_known(const std::string& path) {
  namespace fs = std::filesystem;
  try {
    if (fs::is_directory(path))
      return fs::symlink_status(fs::path(path) / "config.json").type() != fs::file_type::not_found;
    if (!fs::is_regular_file(path)) return false;
    for (const char* extension : {".lode", ".gguf", ".safetensors"})
      if (fs::path(path).extension() == extension) return true;
    return is_model(path) || is_artefact(path) || is_plan(path) || is_container(MappedFile(path).bytes());
  } catch (const std::exception&) {
    return false;
  }
}

/// Damage is no bad usage: it has another exit code. A script that reads the object learns what is wrong from it, too,
/// with null where nobody can say whether the file is intact; people have the sentence on stderr.
Checked verify_and_report(const VerifyFlags& flags) {
  const auto report = [&](const Json& intact, const InputError& error) {
    std::error_code none;
    if (flags.common.json && std::filesystem::exists(flags.path, none))
      print_json({{"file", flags.path}, {"intact", intact}, {"wrong", error.what()}});
  };
  try {
    return verify(flags);
  } catch (const UnreadableError& error) {
    report({}, error);
    throw;
  } catch (const InputError& error) {
    const bool known = is_known(flags.path);
    report(known ? Json(false) : Json(), error);
    if (known) throw RunError(error.what());
    throw;
  }
}

}  // namespace

void add_verify(CLI::App& app) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* verb = app.add_subcommand(
      "verify",
      "Check a context file, a model, an artefact or a plan for damage; exit code 1 where there is "
      "some, 2 where the file is none of these or cannot be read");
  add_common_flags(*verb, flags->common);
  verb->add_option("file", flags->path,
                   "a .lode file, a model folder or .gguf file, a .safetensors file or a plan")
      ->required();
  verb->callback([flags] {
    const Checked checked = verify_and_report(*flags);
    if (flags->common.json)  // null: nobody can say
      return print_json({{"file", flags->path},
                         {"intact", checked.compared ? Json(true) : Json()},
                         {"checked", checked.what},
                         {"checksums", checked.compared}});
    print_text(
        checked.compared
            ? fmt::format("{}: intact ({})\n", flags->path, checked.what)
            : fmt::format("{}: no damage found ({}); there is no checksum of its weights, so that one that "
                          "has changed into another number is not noticed: compare what its publisher "
                          "names\n",
                          flags->path, checked.what));
  });
}

}  // namespace lode::cli
