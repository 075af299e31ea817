// SPDX-License-Identifier: Apache-2.0
// lodestone estimate: what a document will take before it is read.
#include "lab/bench/estimate.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct EstimateFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> specs;
  std::string text, tokens, question = "64";
};

/// What is compared when no method is named.
const std::vector<std::string> kUsual = {"kmeans", "squeezed"};

std::int64_t document_tokens(const EstimateFlags& flags, const Model& model) {
  if (flags.text.empty() == flags.tokens.empty())
    throw InputError("estimate: expected either -f TEXT or --tokens N");
  if (!flags.tokens.empty()) return parse_count(flags.tokens, "--tokens", 1, std::int64_t{1} << 31);
  return std::ssize(model.tokenizer().encode(read_text(flags.text), Tokenizer::Bos::as_template));
}

Json as_json(const Estimate& e) {
  Json methods = Json::array();
  for (const MethodEstimate& m : e.methods)
    methods.push_back({{"attention", m.attention},
                       {"index_seconds", m.index_seconds},
                       {"first_token_seconds", m.first_token_seconds},
                       {"ms_token", m.ms_token}});
  return {{"fits", e.fits},
          {"recommended", e.recommended},
          {"why", e.why},
          {"host_bytes", e.host_bytes},
          {"gpu_bytes", e.gpu_bytes},
          {"file_bytes", e.file_bytes},
          {"prefill_seconds", e.prefill_seconds},
          {"methods", std::move(methods)}};
}

std::string as_text(const Estimate& e, std::int64_t tokens) {
  const auto gib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  std::string text = fmt::format(
      "{} tokens: {}; {:.2f} GiB of memory, {:.2f} GiB on disk{}\nprefill: {:.1f} s\n", tokens,
      e.fits ? "fits" : "does not fit", gib(e.host_bytes), gib(e.file_bytes),
      e.gpu_bytes > 0 ? fmt::format(", {:.2f} GiB on the GPU", gib(e.gpu_bytes)) : "", e.prefill_seconds);
  if (!e.methods.empty())
    text +=
        fmt::format("{:<34} {:>10} {:>14} {:>10}\n", "method", "index, s", "first token, s", "ms a token");
  for (const MethodEstimate& m : e.methods)
    text += fmt::format("{:<34} {:>10.2f} {:>14.3f} {:>10.2f}\n", m.attention, m.index_seconds,
                        m.first_token_seconds, m.ms_token);
  return text + fmt::format("recommended: {} ({})\n", e.recommended, e.why);
}

void estimate(const EstimateFlags& flags) {
  const auto model = load_model(flags.common, flags.model);
  const std::int64_t tokens = document_tokens(flags, *model);
  const DType kv_type = parse_dtype(flags.model.kv_type);
  const EstimateOptions options = {
      .tokens = tokens,
      .question = parse_count(flags.question, "--question", 1, 4096),
      .kv_type = kv_type,
      .device = device_of(flags.common, kv_type),
      .gpu_memory = flags.model.gpu_memory.empty() ? 0 : parse_bytes(flags.model.gpu_memory, "--gpu-memory"),
      .free_disk = static_cast<std::int64_t>(std::filesystem::space(".").available)};
  const auto note = [&](std::string_view what) {
    if (!flags.common.quiet) fmt::print(stderr, "measuring {}\n", what);
  };
  const Estimate found =
      estimate_document(model, options, parse_specs(flags.specs.empty() ? kUsual : flags.specs), note);
  flags.common.json ? print_json(as_json(found)) : print_text(as_text(found, tokens));
}

}  // namespace

void add_estimate(CLI::App& app) {
  auto flags = std::make_shared<EstimateFlags>();
  CLI::App* verb = app.add_subcommand(
      "estimate",
      "What a document will take before it is read: whether it fits, how long prefill, indexes, the "
      "first answer and a token take under each method, and which method pays");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, true);
  verb->add_option("-f,--file", flags->text, "the document, whose tokens are counted");
  verb->add_option("--tokens", flags->tokens, "or its length in tokens (16k)");
  verb->add_option("--question", flags->question, "tokens of a question")->capture_default_str();
  add_attention_flag(*verb, flags->specs, false);
  verb->callback([flags, verb] {
    say_unaudited(flags->common, flags->model, "nothing is answered");
    expect_use(*verb, {"--rope-factor", "--ctx-size"}, false,
               "expected the model's own context, found another");
    estimate(*flags);
  });
}

}  // namespace lode::cli
