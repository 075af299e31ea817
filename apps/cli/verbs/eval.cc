// SPDX-License-Identifier: Apache-2.0
// lodestone eval: scores a sample file under each attention spec, beside full attention.
#include "lab/eval/eval.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <optional>
#include <set>
#include <string>

#include "cli.h"
#include "lab/eval/audit_result.h"
#include "lab/eval/records.h"
#include "lodestone/error.h"
#include "rank_reader.h"
#include "ranks.h"

namespace lode::cli {

namespace {

struct EvalFlags {
  CommonFlags common;
  ModelFlags model;
  DatasetFlags dataset;
  std::string samples, protocol = "context-dense", order = "token", chat = "off", output;
  std::vector<std::string> specs;
  std::int64_t limit = 0;
};

std::vector<NamedSpec> named_specs(const std::vector<std::string>& texts) {
  std::vector<NamedSpec> specs;
  std::set<std::string> seen;
  for (const std::string& text : texts) {
    Spec spec = parse_spec(text);
    if (seen.insert(spec.str()).second) specs.push_back({text, std::move(spec)});
  }
  return specs;
}

/// Behind the first line, which says of which run they are.
bool holds_answers(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) && std::getline(file, line);
}

/// What chat templates take for today: of a run that goes on, the day that it began on. Ranks read the same prompts,
/// also where their clocks are on two sides of midnight.
std::time_t time_of_all(const std::string& output) {
  const std::time_t now = begun_at(output).value_or(std::time(nullptr));
  return ranks() == nullptr ? now : std::stoll(ranks()->broadcast(std::to_string(now)));
}

void run(const EvalFlags& flags) {
  EvalOptions options;
  options.protocol = Protocol::parse(flags.protocol);
  options.context = context_options(flags.common, flags.model);
  options.records = flags.output;
  options.audit_limit = audit_limit(flags.model);
  options.order_rows = flags.order == "cluster";
  options.progress = flags.common.progress();
  const std::vector<NamedSpec> specs = named_specs(flags.specs);
  LeftOut left_out;
  std::vector<Sample> samples = dataset_samples(flags.samples, flags.dataset, flags.limit, flags.model.model,
                                                flags.common.quiet, left_out);
  const auto model = load_model(flags.common, flags.model);
  options.chat = chat_of(flags.chat, *model, time_of_all(flags.output));
  samples = fitting(*model, std::move(samples), flags.dataset, options.context, options.chat.get(),
                    flags.common.quiet, left_out);
  std::optional<RankReader> reader;
  if (ranks() != nullptr) options.reader = &reader.emplace(model);
  EvalReport report;
  resumable(
      flags.output, [&] { return holds_answers(flags.output); },
      [&] { report = evaluate(model, samples, specs, options); });
  std::set<std::string> noted;
  for (const EvalRow& row : report.rows) {
    std::string reason = row.dense_reason.empty() ? row.notice : "dense: " + row.dense_reason;
    if (const std::string audit = audit_remark(row.work); !audit.empty())
      reason += reason.empty() ? audit.substr(2) : audit;
    if (reason.empty() || flags.common.quiet || !noted.insert(row.attention + reason).second) continue;
    print_remark("lodestone: " + row.attention + " on " + row.task + ": " + reason);
  }
  if (!flags.common.json) {
    const std::string summary = left_out.summary(samples.size());
    return print_text(report.table() + (summary.empty() ? "" : "\n") + summary);
  }
  Json result = report.json();
  result["left_out"] = left_out.samples;
  if (options.chat != nullptr) result["chat"] = true;
  print_json(result);
}

}  // namespace

void add_eval(CLI::App& app) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App& verb =
      *app.add_subcommand("eval", "Score a sample file under each attention spec, beside full attention");
  add_common_flags(verb, flags->common);
  add_model_flags(verb, flags->model, true);
  add_sharing_flags(verb, flags->model.gpus);
  add_audit_limit_flag(verb, flags->model);
  add_attention_flag(verb, flags->specs, true);
  verb.add_option("--samples", flags->samples, "samples as `tasks` writes them, or a published data set")
      ->required();
  add_dataset_flags(verb, flags->dataset);
  verb.add_option("--protocol", flags->protocol,
                  "what is sparse: context-dense (question and answer), decode-sparse (answer), last:N (the "
                  "prompt's last N tokens and the answer)");
  add_chat_flag(verb, flags->chat);
  verb.add_option("--order", flags->order,
                  "order of keys and values in memory while questions are answered: token, or on the CPU "
                  "cluster (of the one saap, kmeans, ivf or squeezed that is scored, as bench times it)")
      ->check(CLI::IsMember({"token", "cluster"}));
  verb.add_option("--limit", flags->limit, "samples of each task and length at most; 0 = all")
      ->check(whole_number(0, 1'000'000'000));
  verb.add_option("-o,--output", flags->output,
                  "file for every answer as a JSON line; when it exists, what it holds is not done again")
      ->check(output_file());
  verb.callback([flags, &verb] {
    expect_use(verb, {"--output", "--audit", "--order"}, ranks() == nullptr,
               "expected none over several ranks, found one");
    run(*flags);
  });
}

}  // namespace lode::cli
