// SPDX-License-Identifier: Apache-2.0
// lodestone quantize: a model as a GGUF file of another type of weights.
#include <fmt/format.h>

#include "base/text.h"
#include "base/threads.h"
#include "cli.h"
#include "kernels/weight_type.h"
#include "lodestone/error.h"
#include "model/gguf_export.h"

namespace lode::cli {

namespace {

struct QuantizeFlags {
  CommonFlags common;
  std::string model, shape, tokenizer, output, type = "Q4_K";
  bool force = false;
};

WeightType parse_type(const std::string& text) {
  if (const auto type = find_weight_type(text)) return *type;
  std::string names;
  for (const WeightLayout& layout : weight_layouts())
    names += (names.empty() ? "" : ", ") + std::string(layout.name);
  throw InputError(fmt::format("--type: expected one of {}, found '{}'", names, excerpt(text)));
}

/// Without it a file of small rows is larger than its type's name says, and nobody knows why.
void say_others(WeightType type, const MatrixTypes& matrices, const CommonFlags& common) {
  const std::string wanted(name_of(type));
  std::int64_t all = 0, others = 0;
  for (const auto& [name, count] : matrices) {
    all += count;
    if (name != wanted && (name == "Q8_0" || name == "F16")) others += count;
  }
  if (others > 0 && !common.quiet && !common.json)
    print_remark(
        fmt::format("{} of {} matrices have rows that blocks of {} do not divide, so that they are not {}",
                    others, all, layout_of(type).block, wanted));
}

void run(const QuantizeFlags& flags) {
  if (flags.model.empty() == flags.shape.empty())
    throw InputError("quantize: expected either -m MODEL or --random SHAPE");
  if (flags.shape.empty() != flags.tokenizer.empty())
    throw InputError("quantize: expected --tokenizer MODEL with --random, and only there");
  if (std::error_code none; !flags.tokenizer.empty() && !std::filesystem::is_directory(flags.tokenizer, none))
    throw InputError(fmt::format("--tokenizer: expected a model folder with tokenizer.json, found {}'{}'",
                                 std::filesystem::exists(flags.tokenizer, none) ? "the file " : "nothing at ",
                                 excerpt(flags.tokenizer)));
  expect_new(flags.output, flags.force);
  expect_apart(flags.output, {flags.model.empty() ? flags.tokenizer : flags.model});
  ThreadPool pool(flags.common.threads);
  std::optional<Progress> progress;
  const GgufExport options = {.type = parse_type(flags.type),
                              .tensors_done =
                                  [&](std::int64_t done, std::int64_t all) {
                                    if (!progress)
                                      progress.emplace("writing", all, "tensors", flags.common.progress());
                                    progress->at(done);
                                  },
                              .remark =
                                  [&](const std::string& said) {
                                    if (!flags.common.quiet) print_remark(said);
                                  }};
  const MatrixTypes matrices =
      flags.model.empty() ? export_random_gguf(flags.shape, flags.tokenizer, flags.output, options, pool)
                          : export_gguf(flags.model, flags.output, options, pool);
  progress.reset();
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(flags.output));
  if (flags.common.json)
    return print_json({{"output", flags.output},
                       {"type", std::string(name_of(options.type))},
                       {"matrices", matrices},
                       {"bytes", bytes}});
  std::vector<std::string> counts;
  for (const auto& [name, count] : matrices) counts.push_back(fmt::format("{} {}", count, name));
  print_text(fmt::format("{}: {}, matrices: {}\n", flags.output, human_bytes(bytes), join(counts)));
  say_others(options.type, matrices, flags.common);
}

}  // namespace

void add_quantize(CLI::App& app) {
  auto flags = std::make_shared<QuantizeFlags>();
  CLI::App& verb = *app.add_subcommand("quantize", "Write a model as a GGUF file of another type of weights");
  add_common_flags(verb, flags->common);
  verb.add_option("-m,--model", flags->model, "model folder or .gguf file");
  verb.add_option("--random", flags->shape,
                  "random weights of a named shape instead, e.g. llama-3.1-8b, of any type");
  verb.add_option("--tokenizer", flags->tokenizer, "model folder whose tokenizer a random model gets");
  verb.add_option("-o,--output", flags->output, "the .gguf file to write")->required()->check(output_file());
  verb.add_option("--type", flags->type, "type of the matrices: Q4_K, Q6_K, Q8_0, F16, BF16 or F32")
      ->capture_default_str();
  add_force_flag(verb, flags->force);
  verb.callback([flags] { run(*flags); });
}

}  // namespace lode::cli
