// SPDX-License-Identifier: Apache-2.0
// lodestone estimate: what a document will take before it is read.
#include "lab/bench/estimate.h"

#include <fmt/format.h>

#include <filesystem>
#include <span>

#include "base/file.h"
#include "base/link_speed.h"
#include "base/text.h"
#include "cli.h"
#include "cluster/rank_prefill.h"
#include "io/container.h"
#include "lodestone/chat.h"
#include "lodestone/documents.h"
#include "lodestone/error.h"
#include "ranks.h"
#include "shell_word.h"

namespace lode::cli {

namespace {

struct EstimateFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> specs;
  std::string text, tokens, question = "64";
  int machines = 0;  ///< 0: as many as there are ranks
  double latency = 50, bandwidth = 1;
};

/// What is compared when no method is named; of several machines, what they can index together.
const std::vector<std::string> kUsual = {"kmeans:rope=on", "squeezed"},
                               kUsualOfMachines = {"kmeans:rope=on", "topk"};

int machines_of(const EstimateFlags& flags) {
  if (flags.machines > 0) return flags.machines;
  return ranks() != nullptr ? ranks()->size() : 1;
}

std::vector<Spec> compared_methods(const EstimateFlags& flags, const std::shared_ptr<const Model>& model) {
  const bool several = machines_of(flags) > 1;
  const std::vector<Spec> specs = parse_specs(!flags.specs.empty() ? flags.specs
                                              : several            ? kUsualOfMachines
                                                                   : kUsual);
  if (several)
    for (const Spec& spec : specs) expect_shared_method(model, spec);
  return specs;
}

/// An indexed text has what it needs; an estimate is of one that is not.
void expect_unread(const std::string& path, const std::string& flag, const std::string& wanted) {
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none) || !is_container(MappedFile(path).bytes())) return;
  throw InputError(
      fmt::format("{}: expected {}, found the indexed text '{}': `lodestone inspect {}` says what it takes; "
                  "before a text is "
                  "indexed, `lodestone estimate -m MODEL -f TEXT` says what it will take",
                  flag, wanted, excerpt(path), as_word(path)));
}

std::int64_t document_tokens(const EstimateFlags& flags, const Model& model) {
  if (flags.text.empty() == flags.tokens.empty())
    throw InputError("estimate: expected either -f TEXT or --tokens N");
  if (!flags.tokens.empty()) return parse_count(flags.tokens, "--tokens", 1, std::int64_t{1} << 31);
  SourceText source;  // as `index` reads it and puts it in front of the model
  append_documents(source, std::span(&flags.text, 1), {});
  return std::ssize(indexed_text(model, {}, source.text).tokens);
}

/// Measured where ranks estimate together, else what the user says.
LinkSpeed link_of(const EstimateFlags& flags) {
  if (ranks() != nullptr) return measure_link(*ranks());
  return {.latency = flags.latency * 1e-6,
          .message = flags.latency * 1e-7,
          .bytes_per_second = flags.bandwidth * 1e9};
}

Json machines_json(const Estimate& e, const EstimateOptions& options) {
  return {{"count", options.machines},
          {"prefill_efficiency", e.prefill_efficiency},
          {"latency_us", options.link.latency * 1e6},
          {"message_us", options.link.message * 1e6},
          {"gigabytes_per_second", options.link.bytes_per_second / 1e9}};
}

Json as_json(const Estimate& e, const EstimateOptions& options) {
  Json methods = Json::array();
  for (const MethodEstimate& m : e.methods)
    methods.push_back({{"attention", m.attention},
                       {"index_seconds", m.index_seconds},
                       {"first_token_seconds", m.first_token_seconds},
                       {"ms_token", m.ms_token}});
  if (options.machines > 1)
    for (std::size_t i = 0; i < e.methods.size(); ++i)
      methods[i]["ms_communication"] = e.methods[i].ms_communication;
  Json result = {{"fits", e.fits},
                 {"recommended", e.recommended},
                 {"why", e.why},
                 {"host_bytes", e.host_bytes},
                 {"gpu_bytes", e.gpu_bytes},
                 {"file_bytes", e.file_bytes},
                 {"prefill_seconds", e.prefill_seconds},
                 {"methods", std::move(methods)}};
  if (options.machines > 1) result["machines"] = machines_json(e, options);
  return result;
}

std::string as_text(const Estimate& e, const EstimateOptions& options) {
  const auto gib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  std::string text = fmt::format(
      "{} tokens{}: {}; {:.2f} GiB of memory, {:.2f} GiB on disk{}\nprefill: {:.1f} s\n", options.tokens,
      options.machines > 1 ? fmt::format(" over {} machines, each", options.machines) : "",
      e.fits ? "fits" : "does not fit", gib(e.host_bytes), gib(e.file_bytes),
      e.gpu_bytes > 0 ? fmt::format(", {:.2f} GiB on the GPU", gib(e.gpu_bytes)) : "", e.prefill_seconds);
  if (!e.methods.empty())
    text +=
        fmt::format("{:<34} {:>10} {:>14} {:>10}\n", "method", "index, s", "first token, s", "ms a token");
  for (const MethodEstimate& m : e.methods)
    text += fmt::format("{:<34} {:>10.2f} {:>14.3f} {:>10.2f}\n", m.attention, m.index_seconds,
                        m.first_token_seconds, m.ms_token);
  text += fmt::format("recommended: {} ({})\n", e.recommended, e.why);
  if (options.machines > 1)
    text += fmt::format(
        "link between machines: {:.0f} us a message, {:.1f} GB/s\n"
        "next: mpirun -n {} lodestone index ... -a {} (docs/guides/cluster.md)\n",
        options.link.latency * 1e6, options.link.bytes_per_second / 1e9, options.machines, e.recommended);
  return text;
}

void estimate(const EstimateFlags& flags) {
  expect_unread(flags.model.model, "--model", "a model");
  expect_unread(flags.text, "--file", "a text");
  if (flags.model.model.empty()) throw InputError("estimate: expected a model (-m), found none");
  const auto model = load_model(flags.common, flags.model);
  const std::int64_t tokens = document_tokens(flags, *model);
  const DType kv_type = parse_dtype(flags.model.kv_type);
  const EstimateOptions options = {
      .tokens = tokens,
      .question = parse_count(flags.question, "--question", 1, 4096),
      .kv_type = kv_type,
      .device = device_of(flags.common, kv_type),
      .gpu_memory = flags.model.gpu_memory.empty() ? 0 : parse_bytes(flags.model.gpu_memory, "--gpu-memory"),
      .free_disk = static_cast<std::int64_t>(std::filesystem::space(".").available),
      .machines = machines_of(flags),
      .link = machines_of(flags) > 1 ? link_of(flags) : LinkSpeed{}};
  const std::vector<Spec> specs = compared_methods(flags, model);
  const auto note = [&](std::string_view what) {
    if (!flags.common.quiet) fmt::print(stderr, "{}\n", what);
  };
  // Ranks have measured the link; what one of them does by itself, rank 0 measures while the others wait.
  if (ranks() == nullptr || ranks()->rank() == 0) {
    const Estimate found = estimate_document(model, options, specs, note);
    flags.common.json ? print_json(as_json(found, options)) : print_text(as_text(found, options));
  }
  if (ranks() != nullptr) ranks()->barrier();
}

}  // namespace

void add_estimate(CLI::App& app) {
  auto flags = std::make_shared<EstimateFlags>();
  CLI::App* verb = app.add_subcommand(
      "estimate",
      "What a document will take before it is read: whether it fits, how long prefill, indexes, the "
      "first answer and a token take under each method, and which method pays");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, false);
  verb->add_option("-f,--file,document", flags->text,
                   "the document, whose tokens are counted: a file or a folder, as `index` reads it");
  verb->add_option("--tokens", flags->tokens, "or its length in tokens (16k)");
  verb->add_option("--question", flags->question, "tokens of a question")->capture_default_str();
  verb->add_option("--machines", flags->machines,
                   "machines like this one that share the document (mpirun); sizes and times of an index are "
                   "then those of one of them")
      ->check(whole_number(1, 65536))
      ->default_str("1; under mpirun, the number of ranks");
  verb->add_option(
          "--latency", flags->latency,
          "microseconds that a message between machines takes; under mpirun both are measured instead")
      ->check(number(0.1, 1e6))
      ->capture_default_str();
  verb->add_option("--bandwidth", flags->bandwidth, "gigabytes a second that a machine sends")
      ->check(number(1e-3, 1e4))
      ->capture_default_str();
  add_attention_flag(*verb, flags->specs, false);
  verb->callback([flags, verb] {
    say_unaudited(flags->common, flags->model, "nothing is answered");
    expect_use(*verb, {"--rope-factor", "--ctx-size"}, false,
               "expected the model's own context, found another");
    expect_use(*verb, {"--latency", "--bandwidth"}, machines_of(*flags) > 1 && ranks() == nullptr,
               "expected it beside --machines of 2 and more, and not under mpirun, which measures it");
    estimate(*flags);
  });
}

}  // namespace lode::cli
