// SPDX-License-Identifier: Apache-2.0
// lodestone probe: how close a method comes to full attention, head by head and in the loss of a text's end.
#include "lab/eval/probe.h"

#include "cli.h"
#include "lab/studies/recall.h"

namespace lode::cli {

namespace {

struct ProbeFlags {
  CommonFlags common;
  ModelFlags model;
  std::string text;
  std::vector<std::string> specs;
  ProbeOptions options;
  bool heads = false;
  std::string lengths;
};

RecallReport recall_of(const ProbeFlags& flags, const std::shared_ptr<const Model>& model,
                       const std::string& text, const std::vector<NamedSpec>& specs) {
  const RecallOptions options = {
      .context = flags.options.context,
      .lengths = parse_counts(flags.lengths, "--lengths", 1, std::int64_t{1} << 30),
      .dense = flags.options.dense,
      .top = flags.options.top,
      .queries = flags.options.measured,
      .progress = flags.options.progress};
  expect_lengths(options, token_count(flags.model.model)(text), "--lengths");
  return recall_by_length(model, text, specs, options);
}

void run(ProbeFlags& flags) {
  flags.options.context = context_options(flags.common, flags.model);
  flags.options.progress = flags.common.progress();
  std::vector<NamedSpec> specs;
  for (const std::string& text : flags.specs) specs.push_back({text, parse_spec(text)});
  const std::string text = read_text(flags.text);
  const auto model = load_model(flags.common, flags.model);
  if (!flags.lengths.empty()) {
    const RecallReport recall = recall_of(flags, model, text, specs);
    return flags.common.json ? print_json(recall.json()) : print_text(recall.table());
  }
  expect_tokens(token_count(flags.model.model)(text), flags.options, flags.text);
  const ProbeReport report = probe(model, text, specs, flags.options);
  say_dense(parse_specs(flags.specs), flags.options.dense, flags.common);
  flags.common.json ? print_json(report.json()) : print_text(report.table(flags.heads));
}

}  // namespace

void add_probe(CLI::App& app) {
  auto flags = std::make_shared<ProbeFlags>();
  CLI::App& verb = *app.add_subcommand(
      "probe", "Compare methods with full attention on a text, head by head and in the loss of its end");
  add_common_flags(verb, flags->common);
  add_model_flags(verb, flags->model, true);
  add_attention_flag(verb, flags->specs, true);
  verb.add_option("-f,--file", flags->text,
                  "text; best one that needs its far past, as `tasks echo` writes it; - is stdin")
      ->required();
  verb.add_option("--last", flags->options.last,
                  "tokens at the end that attend sparsely and whose loss counts")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--sink", flags->options.dense.sink, "first tokens that every method attends")
      ->check(whole_number(0, 1'000'000));
  verb.add_option("--window", flags->options.dense.window, "last tokens that every method attends")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--top", flags->options.top, "recall is that of so many far keys of highest score")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--measured", flags->options.measured,
                  "how many of the last tokens are looked at head by head")
      ->check(whole_number(1, 1'000'000));
  verb.add_option(
      "--lengths", flags->lengths,
      "recall alone, at these lengths of the text, such as 4k,16k,64k (figure 5 of HashAttention)");
  verb.add_flag("--heads", flags->heads, "print every head (--json always has them)");
  verb.callback([flags] {
    say_unaudited(flags->common, flags->model,
                  "every token and head that is measured is measured against full attention");
    run(*flags);
  });
}

}  // namespace lode::cli
