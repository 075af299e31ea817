// SPDX-License-Identifier: Apache-2.0
// lodestone tune: writes the plan of fewest bytes that stays within a bound of full attention.
#include "lab/studies/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "base/file.h"
#include "base/hash.h"
#include "base/hidden_name.h"
#include "cli.h"
#include "lab/eval/settings.h"
#include "lessons.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct TuneFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> texts, specs;
  std::string check, out, target, cost = "both", time_at, lengths, tokens = "16k";
  LessonFlags lessons = {.lessons = ""};
  std::int64_t documents = 6, last = 0;
  TuneOptions options;
  bool force = false;

  /// With --check the texts are used unchanged, unless --lessons is on.
  bool makes_documents() const { return lessons.lessons.empty() ? check.empty() : lessons.on(); }
  /// Half as many as are chosen on.
  std::int64_t checked_on() const { return (documents + 1) / 2; }
};

/// The texts of -f; InputError when one is that of --check, or there twice where their end is held out.
std::vector<std::string> read_texts(const std::vector<std::string>& paths, std::string_view check) {
  std::vector<std::string> texts;
  for (const std::string& path : paths) {
    texts.push_back(read_text(path));
    if (!check.empty() && texts.back() == check)
      throw InputError("--check: expected another text than those of -f, found the same, '" + path + "'");
    if (check.empty() && std::find(texts.begin(), texts.end() - 1, texts.back()) != texts.end() - 1)
      throw InputError("-f: expected different texts, for the last ones are checked on, found '" + path +
                       "' twice");
  }
  return texts;
}

/// What the plan is chosen on, and what it is checked on.
struct Texts {
  std::vector<std::string> chosen_on, checked_on;
};

/// Seeds of facts and questions, other ones than the trainers': what an artefact has learned is not what it is checked on.
constexpr std::uint64_t kSeed = 0x74756e65, kCheckSeed = 0x63686563;

/// Documents of each length, those to check on from the end of the texts, or from --check. Few passages come back, and short
/// ones, because they are not questions and do not count.
Texts make_documents(const TuneFlags& flags, const Model& model, std::span<const std::int64_t> lengths) {
  const std::string check = flags.check.empty() ? "" : read_text(flags.check);
  const std::vector<std::string> own = read_texts(flags.texts, check);
  const std::int64_t held_out = flags.check.empty() ? flags.checked_on() : 0;
  Texts made;
  for (const std::int64_t tokens : lengths) {
    LessonOptions options = {.tokens = tokens,
                             .count = flags.documents + held_out,
                             .held_out = held_out,
                             .seed = kSeed,
                             .copies_of_ten = 1,
                             .copied_words = 8};
    const std::vector<std::string> documents =
        texts_of(model.tokenizer(), make_lessons(model.tokenizer(), own, options));
    const auto end = documents.begin() + flags.documents;
    made.chosen_on.insert(made.chosen_on.end(), documents.begin(), end);
    made.checked_on.insert(made.checked_on.end(), end, documents.end());
    if (flags.check.empty()) continue;
    options.count = flags.checked_on();
    options.seed = kCheckSeed;
    options.given_by = "--check";
    const std::vector<std::string> other =
        texts_of(model.tokenizer(), make_lessons(model.tokenizer(), {check}, options));
    made.checked_on.insert(made.checked_on.end(), other.begin(), other.end());
  }
  return made;
}

/// The texts as they are.
Texts read_as_they_are(const TuneFlags& flags) {
  if (flags.check.empty())
    throw InputError("tune: expected --check, another text to check the plan on, where --lessons is off");
  Texts texts = {.chosen_on = {}, .checked_on = {read_text(flags.check)}};
  texts.chosen_on = read_texts(flags.texts, texts.checked_on.front());
  const auto count = token_count(flags.model.model);
  for (std::size_t i = 0; i < flags.texts.size(); ++i)
    expect_tokens(count(texts.chosen_on[i]), flags.options.probe, flags.texts[i]);
  expect_tokens(count(texts.checked_on.front()), flags.options.probe, flags.check);
  return texts;
}

/// As many of the last tokens as are questions in the shortest of the documents, up to 4,096.
std::int64_t usual_last(std::span<const std::int64_t> lengths) {
  constexpr std::int64_t kMost = 4096, kHeader = 64;  // tokens in front of the first question
  const LessonOptions shortest = {.tokens = *std::min_element(lengths.begin(), lengths.end())};
  return std::min(kMost, shortest.question_tokens() - kHeader);
}

/// Which documents can be made for the model, and measured.
void expect_lengths(const TuneFlags& flags, std::span<const std::int64_t> tokens, const ModelConfig& config) {
  for (const std::int64_t length : tokens) {
    expect_tokens(length, flags.options.probe, "--tokens");
    if (length > config.max_positions)
      throw InputError(fmt::format("--tokens: expected at most the model's {} positions, found {}",
                                   config.max_positions, length));
  }
}

/// The model and the texts; what is wrong with these is seen before anything takes long.
std::shared_ptr<const Model> read_all(TuneFlags& flags, Texts& texts) {
  const bool made = flags.makes_documents();
  flags.options.target = TuneTarget::parse(!flags.target.empty() ? flags.target
                                           : made                ? "kept=0.99"
                                                                 : "agreement=0.99");
  const std::vector<std::int64_t> tokens =
      parse_counts(flags.tokens, "--tokens", LessonOptions::kFewestTokens, std::int64_t{1} << 30);
  flags.options.probe.last = flags.last > 0 ? flags.last : made ? usual_last(tokens) : 512;
  if (!made) texts = read_as_they_are(flags);
  std::shared_ptr<const Model> model = load_model(flags.common, flags.model);
  if (!made) return model;
  expect_lengths(flags, tokens, model->config());
  texts = make_documents(flags, *model, tokens);
  flags.options.probe.marks = lesson_marks();
  return model;
}

/// All that a plan depends on, so that a plan of the same command, and no other, counts as one's own.
Json command_of(const TuneFlags& flags, const Model& model, const Texts& texts,
                const std::vector<NamedSpec>& candidates) {
  Json chosen_on = Json::array(), checked_on = Json::array(), specs = Json::array();
  for (const std::string& text : texts.chosen_on) chosen_on.push_back(hash_hex(text));
  for (const std::string& text : texts.checked_on) checked_on.push_back(hash_hex(text));
  for (const NamedSpec& c : candidates) specs.push_back({c.spec.str(), files_hash(c.spec, model.path())});
  const ProbeOptions& probe = flags.options.probe;
  return {{"plan", std::filesystem::absolute(flags.out).string()},
          {"run", run_settings(model, probe.context)},
          {"chosen on", std::move(chosen_on)},
          {"checked on", std::move(checked_on)},
          {"specs", std::move(specs)},
          {"target", {flags.options.target.name(), flags.options.target.bound}},
          {"cost", {flags.cost, flags.options.time_at}},
          {"probe", {probe.dense.sink, probe.dense.window, probe.last, probe.measured}}};
}

/// The plan at the output, as far as an earlier run of the same command has written it.
class OwnPlan {
 public:
  OwnPlan(StepLog& log, Json command) : log_(log), command_(std::move(command)) {}

  /// InputError when another file lies there that is not to be replaced.
  void expect_place(const TuneFlags& flags) const {
    const Json* const own = log_.find(command_);
    const bool there = own != nullptr && std::filesystem::is_regular_file(flags.out);
    if (!there || std::ranges::find(*own, Json(hash_hex(read_file(flags.out)))) == own->end())
      expect_new(flags.out, flags.force);
  }
  /// Said before it is done: a run that ends between both knows its plan again.
  void write(const std::string& path, const Plan& plan) {
    Json own = Json::array();
    if (const Json* const before = log_.find(command_)) own = *before;
    own.push_back(hash_hex(plan_text(plan)));
    log_.add(command_, std::move(own));
    write_plan(path, plan);
  }

 private:
  StepLog& log_;
  const Json command_;
};

void run(TuneFlags& flags) {
  expect_no_context(flags.out);
  expect_apart(flags.out, flags.texts);
  if (!flags.check.empty()) expect_apart(flags.out, {flags.check});
  const std::vector<Spec> asked = parse_specs(flags.specs);
  expect_apart(flags.out, files_of(asked, flags.model.model));
  StepLog log(hidden_beside(flags.out, "steps"));
  if (log.empty()) expect_new(flags.out, flags.force);  // else once it is known whose plan lies there
  for (const Spec& spec : asked) {
    if (spec.name == "plan")
      throw InputError(fmt::format("tune: expected methods to choose from, found the plan '{}'", spec.str()));
  }
  flags.options.cost = parse_tune_cost(flags.cost);
  if (!flags.time_at.empty())
    flags.options.time_at = parse_count(flags.time_at, "--time-at", 256, std::int64_t{1} << 30);
  flags.options.probe.context = context_options(flags.common, flags.model);
  flags.options.probe.progress = flags.common.progress();
  if (flags.lengths == "none")
    flags.options.lengths.emplace();
  else if (!flags.lengths.empty())
    flags.options.lengths = parse_counts(flags.lengths, "--lengths", 256, std::int64_t{1} << 30);
  Texts texts;
  const std::shared_ptr<const Model> model = read_all(flags, texts);
  std::vector<NamedSpec> candidates;
  for (const std::string& text : flags.specs.empty() ? usual_candidates(*model) : flags.specs)
    candidates.push_back({text, parse_spec(text)});
  OwnPlan own(log, command_of(flags, *model, texts, candidates));
  own.expect_place(flags);
  // What hours have chosen is kept when its check or its timing ends early.
  const auto keep = [&](const Plan& plan) {
    own.expect_place(flags);  // another may have written it meanwhile
    own.write(flags.out, plan);
  };
  flags.options.on_plan = [&](const Plan& plan) {
    keep(plan);
    if (!flags.common.quiet)
      std::cerr << fmt::format("tune: the plan is in {}; it is measured on other text now\n", flags.out);
  };
  flags.options.log = &log;
  TuneReport report;
  resumable(
      log.path(), [&] { return !log.empty(); },
      [&] {
        report = tune(model, texts.chosen_on, texts.checked_on, candidates, flags.options);
        keep(report.plan);
      });
  log.remove();
  say_dense(asked, flags.options.probe.dense, flags.common);
  flags.common.json ? print_json(report.json()) : print_text(report.table());
}

}  // namespace

void add_tune(CLI::App& app) {
  auto flags = std::make_shared<TuneFlags>();
  flags->options.probe.dense = {.sink = 1, .window = 511};
  flags->options.probe.measured = 32;
  CLI::App& verb = *app.add_subcommand(
      "tune", "Choose for each KV head the method that reads least within a bound, and write the plan");
  add_common_flags(verb, flags->common);
  add_model_flags(verb, flags->model, true);
  verb.add_option("-f,--file", flags->texts, "texts to choose on, like those of use; may be repeated")
      ->required();
  verb.add_option(
      "--check", flags->check,
      "another text, on which the plan is checked; without it documents are made of the texts, and "
      "those to check on of their end");
  add_lesson_flag(verb, flags->lessons)->default_str("on; off with --check");
  verb.add_option("--tokens", flags->tokens,
                  "lengths of the documents that are made: those of use, e.g. 16k,128k");
  verb.add_option("--documents", flags->documents,
                  "documents of each length to choose on; half as many are checked on")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("-o,--output", flags->out, "the plan file, for -a plan:FILE")
      ->required()
      ->check(output_file());
  add_force_flag(verb, flags->force);
  verb.add_option("--target", flags->target,
                  "error=E (relative output error), loss=NATS (a token), agreement=SHARE (of next tokens), "
                  "kept=SHARE (of the answers that full attention finds and sink and window alone do not) or "
                  "recovered=SHARE (of what full attention predicts better than sink and window alone)")
      ->default_str("kept=0.99; of texts as they are agreement=0.99");
  verb.add_option("--cost", flags->cost,
                  "what the plan is to have little of: bytes, time (of a step on this device) or both");
  verb.add_option(
      "--time-at", flags->time_at,
      "tokens of context at which methods are timed, e.g. 32k: as long as those of use, where choosing "
      "keys pays; without it: as many as the longest text has");
  add_attention_flag(verb, flags->specs, false);
  verb.add_option("--last", flags->last, "tokens at the end of each text that are measured")
      ->check(whole_number(1, 1'000'000))
      ->default_str("a document's questions, 4096 at most; 512 of texts as they are");
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
