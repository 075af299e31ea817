// SPDX-License-Identifier: Apache-2.0
// lodestone tune: writes the plan of fewest bytes that stays within a bound of full attention.
#include "lab/studies/tune.h"

#include <fmt/format.h>

#include "cli.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct TuneFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> texts, specs;
  std::string check, out, target = "agreement=0.99", cost = "both", time_at, lengths;
  TuneOptions options;
  bool force = false;
};

void run(TuneFlags& flags) {
  expect_no_context(flags.out);
  expect_apart(flags.out, flags.texts);
  expect_apart(flags.out, {flags.check});
  const std::vector<Spec> asked = parse_specs(flags.specs);
  expect_apart(flags.out, files_of(asked, flags.model.model));
  expect_new(flags.out, flags.force);
  for (const Spec& spec : asked) {
    if (spec.name == "plan")
      throw InputError(fmt::format("tune: expected methods to choose from, found the plan '{}'", spec.str()));
  }
  flags.options.target = TuneTarget::parse(flags.target);
  flags.options.cost = parse_tune_cost(flags.cost);
  if (!flags.time_at.empty())
    flags.options.time_at = parse_count(flags.time_at, "--time-at", 256, std::int64_t{1} << 30);
  flags.options.probe.context = context_options(flags.common, flags.model);
  flags.options.probe.progress = flags.common.progress();
  if (flags.lengths == "none")
    flags.options.lengths.emplace();
  else if (!flags.lengths.empty())
    flags.options.lengths = parse_counts(flags.lengths, "--lengths", 256, std::int64_t{1} << 30);
  std::vector<std::string> texts;
  const std::string check = read_text(flags.check);
  for (const std::string& path : flags.texts) {
    texts.push_back(read_text(path));
    if (texts.back() == check)
      throw InputError("--check: expected another text than those of -f, found the same, '" + path + "'");
  }
  const auto model = load_model(flags.common, flags.model);
  const auto count = token_count(flags.model.model);
  for (std::size_t i = 0; i < texts.size(); ++i)
    expect_tokens(count(texts[i]), flags.options.probe, flags.texts[i]);
  expect_tokens(count(check), flags.options.probe, flags.check);
  std::vector<NamedSpec> candidates;
  for (const std::string& text : flags.specs.empty() ? usual_candidates(*model) : flags.specs)
    candidates.push_back({text, parse_spec(text)});
  // What hours have chosen is kept when its check or its timing ends early.
  bool written = false;
  const auto keep = [&](const Plan& plan) {
    if (!written) expect_new(flags.out, flags.force);  // another may have written it meanwhile
    write_plan(flags.out, plan);
    written = true;
  };
  flags.options.on_plan = keep;
  const TuneReport report = tune(model, texts, check, candidates, flags.options);
  keep(report.plan);
  say_dense(asked, flags.options.probe.dense, flags.common);
  flags.common.json ? print_json(report.json()) : print_text(report.table());
}

}  // namespace

void add_tune(CLI::App& app) {
  auto flags = std::make_shared<TuneFlags>();
  flags->options.probe.dense = {.sink = 1, .window = 511};
  CLI::App& verb = *app.add_subcommand(
      "tune", "Choose for each KV head the method that reads least within a bound, and write the plan");
  add_common_flags(verb, flags->common);
  add_model_flags(verb, flags->model, true);
  verb.add_option("-f,--file", flags->texts, "texts to choose on, like those of use; may be repeated")
      ->required();
  verb.add_option("--check", flags->check, "another text, on which the plan is checked")->required();
  verb.add_option("-o,--output", flags->out, "the plan file, for -a plan:FILE")
      ->required()
      ->check(output_file());
  add_force_flag(verb, flags->force);
  verb.add_option("--target", flags->target,
                  "error=E (relative output error), loss=NATS (a token), agreement=SHARE (of next tokens) or "
                  "recovered=SHARE (of what full attention predicts better than sink and window alone)");
  verb.add_option("--cost", flags->cost,
                  "what the plan is to have little of: bytes, time (of a step on this device) or both");
  verb.add_option(
      "--time-at", flags->time_at,
      "tokens of context at which methods are timed, e.g. 32k: as long as those of use, where choosing "
      "keys pays; without it: as many as the first text has");
  add_attention_flag(verb, flags->specs, false);
  verb.add_option("--last", flags->options.probe.last, "tokens at the end of each text that are measured")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--sink", flags->options.probe.dense.sink, "first tokens that every head attends")
      ->check(whole_number(0, 1'000'000));
  verb.add_option("--window", flags->options.probe.dense.window, "last tokens that every head attends")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--lengths", flags->lengths,
                  "contexts at which a step is timed beside full attention, or none")
      ->default_str("4k,16k,64k");
  verb.callback([flags] {
    say_unaudited(flags->common, flags->model, "every head is measured against full attention");
    run(*flags);
  });
}

}  // namespace lode::cli
