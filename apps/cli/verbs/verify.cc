// SPDX-License-Identifier: Apache-2.0
// lodestone verify: is this file or model folder intact?
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/file.h"
#include "cli.h"
#include "engine/context_file.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/plan/file.h"

namespace lode::cli {

namespace {

struct VerifyFlags {
  CommonFlags common;
  std::string path;
};

/// An artefact of `train`, or weights: structure, and numbers that are numbers.
std::string verify_tensors(const std::string& path) {
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
  return fmt::format("{} tensors of floating-point numbers, all finite, no holes and no overlaps", checked);
}

/// Throws InputError when anything is wrong; otherwise what was checked.
std::string verify(const VerifyFlags& flags) {
  if (is_model(flags.path)) {
    const auto model = Model::load(flags.path, flags.common.threads, /*check_finite=*/true);
    return fmt::format(
        "{} bytes of weights, all finite, shapes as the config has them; tokenizer of {} tokens",
        model->weight_bytes(), model->tokenizer().vocab());
  }
  if (is_artefact(flags.path)) return verify_tensors(flags.path);
  if (is_plan(flags.path)) {
    const Plan plan = read_plan(flags.path);
    return fmt::format("a plan of {} layers of {} KV heads, every spec is known", plan.heads.size(),
                       plan.heads.front().size());
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
  return fmt::format("{} sections of {} tokens{}, every checksum matches, zeros between them", sections,
                     meta.tokens, files);
}

/// A script that reads the object learns what is wrong from it, too; people have the sentence on stderr.
std::string verify_and_report(const VerifyFlags& flags) {
  try {
    return verify(flags);
  } catch (const InputError& error) {
    if (flags.common.json && std::filesystem::exists(flags.path))
      print_json({{"file", flags.path}, {"intact", false}, {"wrong", error.what()}});
    throw;
  }
}

}  // namespace

void add_verify(CLI::App& app) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* verb =
      app.add_subcommand("verify", "Check a context file, a model, an artefact or a plan for damage");
  add_common_flags(*verb, flags->common);
  verb->add_option("file", flags->path,
                   "a .lode file, a model folder or .gguf file, a .safetensors file or a plan")
      ->required();
  verb->callback([flags] {
    const std::string checked = verify_and_report(*flags);
    if (flags->common.json)
      return print_json({{"file", flags->path}, {"intact", true}, {"checked", checked}});
    print_text(flags->path + ": intact (" + checked + ")\n");
  });
}

}  // namespace lode::cli
