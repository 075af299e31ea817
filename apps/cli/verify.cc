// SPDX-License-Identifier: Apache-2.0
// lodestone verify: is this file or model folder intact?
#include <fmt/format.h>

#include <filesystem>

#include "cli.h"
#include "engine/context_file.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct VerifyFlags {
  CommonFlags common;
  std::string path;
};

/// Throws InputError when anything is wrong; otherwise what was checked.
std::string verify(const VerifyFlags& flags) {
  if (std::filesystem::is_directory(flags.path)) {
    const auto model = Model::load(flags.path, flags.common.threads, /*check_finite=*/true);
    return fmt::format("{} bytes of weights, all finite, shapes as in config.json; tokenizer of {} tokens",
                       model->weight_bytes(), model->tokenizer().vocab());
  }
  const ContainerReader file(flags.path);
  const ContextMeta meta = read_context_meta(file, flags.path);
  if (const std::string damaged = file.verify_all(); !damaged.empty()) {
    throw InputError(
        fmt::format("{}: section '{}' is damaged: its checksum does not match", flags.path, damaged));
  }
  return fmt::format("{} sections of {} tokens, every checksum matches", file.sections().size(), meta.tokens);
}

}  // namespace

void add_verify(CLI::App& app) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* verb = app.add_subcommand("verify", "Check a context file or a model folder for damage");
  add_common_flags(*verb, flags->common);
  verb->add_option("file", flags->path, "a .lode file or a model folder")->required();
  verb->callback([flags] {
    const std::string checked = verify(*flags);
    if (flags->common.json)
      return print_json({{"file", flags->path}, {"intact", true}, {"checked", checked}});
    print_text(flags->path + ": intact (" + checked + ")\n");
  });
}

}  // namespace lode::cli
