// SPDX-License-Identifier: Apache-2.0
// lodestone tasks: writes samples of synthetic tasks, or text (prose, echo), of a wanted length in tokens.
#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "base/cancel.h"
#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "lab/tasks/families.h"
#include "lab/tasks/prose.h"
#include "lab/tasks/samples.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct TasksFlags {
  CommonFlags common;
  std::vector<std::string> names;
  std::vector<std::int64_t> tokens;
  std::int64_t count = 1, questions = 0, facts = 0, distance = 0;
  std::uint64_t seed = 0;
  std::string model, haystack, output;
  bool force = false, held_out_books = false, held_out_wordings = false;
};

constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;

/// A file that appears whole or not at all, or stdout, or a place in the one object of --json.
class Output {
 public:
  Output(const std::string& path, bool json) : keep_(json && path.empty()) {
    if (!path.empty()) file_.emplace(path);
  }
  void write(std::string_view text) {
    bytes_ += static_cast<std::int64_t>(text.size());
    if (keep_)
      kept_ += text;
    else
      file_ ? file_->write(std::as_bytes(std::span(text))) : print_bytes(text);
  }
  /// Adds to --json's object what no file has.
  void put_into(Json& result, bool samples) const {
    if (!keep_) return;
    if (!samples) {
      result["text"] = kept_;
      return;
    }
    result["results"] = Json::array();
    for_each_line(kept_, "samples", [&](std::string_view line, const std::string& where) {
      result["results"].push_back(parse_json(line, where));
    });
  }
  void finish() {
    if (file_) file_->commit();
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::optional<AtomicFile> file_;
  bool keep_;
  std::string kept_;
  std::int64_t bytes_ = 0;
};

/// Names of the tasks that --facts is for.
std::vector<std::string> tasks_of_any_facts(const Language& language) {
  std::vector<std::string> names = language.task_names();
  std::erase_if(names, [&](const std::string& name) { return !facts_vary(language, name); });
  return names;
}

bool is_text(const std::string& name) {
  return name == "prose" || name == "echo";
}

/// The same samples twice would have the same ids, which no reader takes.
template <class Value>
void expect_once(std::vector<Value> values, std::string_view where) {
  std::sort(values.begin(), values.end());
  const auto twice = std::adjacent_find(values.begin(), values.end());
  if (twice != values.end())
    throw InputError(fmt::format("{}: expected each once, found '{}' twice", where, *twice));
}

std::vector<std::string> wanted_tasks(const TasksFlags& flags, const Language& language) {
  std::vector<std::string> names = language.task_names();
  expect_once(flags.names, "tasks");
  expect_once(flags.tokens, "--tokens");
  if (flags.names == std::vector<std::string>{"all"}) return names;
  if (std::find(flags.names.begin(), flags.names.end(), "all") != flags.names.end())
    throw InputError("tasks: expected 'all' alone, found other names beside it");
  names.insert(names.end(), {std::string(kMixed), "echo", "prose"});
  for (const std::string& name : flags.names) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const std::string nearest = nearest_name(name, names);
    throw InputError(fmt::format("tasks: expected 'all' or names out of {}; found '{}'{}", join(names), name,
                                 nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
  }
  const bool texts = std::any_of(flags.names.begin(), flags.names.end(), is_text);
  if (texts && (flags.names.size() > 1 || flags.tokens.size() > 1)) {
    throw InputError(
        "tasks: echo and prose are texts, not samples: expected one name and one --tokens with them");
  }
  return flags.names;
}

Haystack make_haystack(const TasksFlags& flags, const Language& language, TokenMeter meter) {
  if (flags.haystack.empty()) {
    std::int64_t longest = 0;
    for (const std::int64_t tokens : flags.tokens) longest = std::max(longest, tokens);
    return Haystack::prose_for(flags.seed, longest, std::move(meter));
  }
  const auto keep = [&language](std::string_view name) { return language.book_is_held_out(name); };
  return Haystack::read(flags.haystack, std::move(meter),
                        flags.held_out_books ? keep : std::function<bool(std::string_view)>());
}

std::string make_text(const TasksFlags& flags, const Language& language, const TokenMeter& meter) {
  const std::int64_t tokens = flags.tokens.front();
  if (flags.names.front() == "echo") {
    const std::int64_t distance = flags.distance > 0 ? flags.distance : echo_distance(tokens);
    std::string text =
        make_echo_text(tokens, flags.seed, language, make_haystack(flags, language, meter), distance);
    if (!flags.common.quiet)
      std::fprintf(stderr, "echo: what the last %lld tokens say stood more than %lld tokens before\n",
                   static_cast<long long>(kEchoTail), static_cast<long long>(distance));
    return text;
  }
  if (!flags.haystack.empty())
    throw InputError("tasks prose: --haystack has no use here, for the prose is built in");
  const Haystack prose = Haystack::prose(flags.seed, static_cast<std::size_t>(8 * tokens), meter);
  std::string text;
  for (const auto& piece : prose.cut_from(0, tokens - meter.prefix).pieces) text += piece.text;
  return text;
}

std::int64_t write_samples(const TasksFlags& flags, const std::vector<std::string>& names,
                           const Language& language, const Haystack& haystack, Output& output) {
  const auto groups = static_cast<std::int64_t>(names.size() * flags.tokens.size());
  Progress progress("samples", groups * flags.count, "samples", flags.common.progress());
  std::int64_t written = 0;
  for (const std::int64_t tokens : flags.tokens) {
    for (const std::string& name : names) {
      const TaskOptions options = {
          .task = name,
          .tokens = tokens,
          .count = flags.count,
          .seed = flags.seed,
          .questions = flags.questions,
          .facts = flags.facts,
          .wording = flags.held_out_wordings ? Language::Wording::held_out : Language::Wording::trained};
      make_samples(options, language, haystack, [&](const Sample& sample, bool first) {
        check_cancel();
        output.write(sample_line(sample, first) + "\n");
        progress.at(++written);
      });
    }
  }
  return written;
}

void run(const TasksFlags& flags) {
  expect_no_context(flags.output);
  expect_apart(flags.output, {flags.haystack});
  expect_new(flags.output, flags.force);
  const Language& language = Language::built_in();
  const std::vector<std::string> names = wanted_tasks(flags, language);
  if (flags.facts > 0)
    for (const std::string& name : names) expect_facts(language, name, flags.facts);
  const std::filesystem::path model =
      flags.model.empty() ? data_dir() / "models" / "pocket" : std::filesystem::path(flags.model);
  const Tokenizer tokenizer = Tokenizer::read(model);
  const TokenMeter meter = make_meter(tokenizer);
  Output output(flags.output, flags.common.json);
  std::int64_t samples = 0;
  if (is_text(names.front())) {
    output.write(make_text(flags, language, meter));
  } else {
    samples = write_samples(flags, names, language, make_haystack(flags, language, meter), output);
  }
  expect_new(flags.output, flags.force);  // another may have written it meanwhile
  output.finish();
  if (flags.common.json) {
    Json result = {{"tasks", names},          {"tokens", flags.tokens}, {"samples", samples},
                   {"bytes", output.bytes()}, {"seed", flags.seed},     {"output", flags.output}};
    output.put_into(result, !is_text(names.front()));
    // Samples are data, to the last digit, as a file would hold them.
    print_bytes(result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (!flags.output.empty() && !flags.common.quiet) {
    print_remark(flags.output + ": " + human_bytes(output.bytes()));
  }
}

}  // namespace

void add_tasks(CLI::App& app) {
  auto flags = std::make_shared<TasksFlags>();
  CLI::App& verb = *app.add_subcommand("tasks", "Write samples of synthetic long-context tasks");
  add_common_flags(verb, flags->common);
  verb.add_option("NAME", flags->names,
                  join(Language::built_in().task_names()) +
                      "; 'all' of these, or mixed: all in one text; or a text: echo (needs its far past, for "
                      "probe), prose")
      ->required();
  verb.add_option_function<std::vector<std::string>>(
          "--tokens",
          [flags](const std::vector<std::string>& texts) {
            for (const std::string& text : texts)
              flags->tokens.push_back(parse_count(text, "--tokens", kFewestTokens, kMostTokens));
          },
          "tokens of context, question and longest answer together, e.g. 32k; several lengths as 4k,16k")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->required();
  verb.add_option("--count", flags->count, "samples of each task and length")
      ->check(whole_number(1, 1'000'000));
  verb.add_option("--questions", flags->questions,
                  "questions about each context, where the task allows several; 0 = 1 up to 4k tokens, 4 up "
                  "to 16k, else 8")
      ->check(whole_number(0, 1000));
  verb.add_option("--facts", flags->facts,
                  "facts in each text, asked about or not, where their number may vary (" +
                      join(tasks_of_any_facts(Language::built_in())) +
                      "); 3 with multivalue: no other keys, as in RULER; 0 = more in longer texts")
      ->check(whole_number(0, 4096));
  verb.add_option(
          "--distance", flags->distance,
          "of echo: tokens after which passages come back; 0 = 8192, in texts too short for that a third")
      ->check(whole_number(0, kMostTokens));
  verb.add_option("--seed", flags->seed, "the same seed gives the same samples")
      ->check(whole_number(0, INT64_MAX));
  verb.add_option("--haystack", flags->haystack,
                  "folder of text files (*.txt, *.md), or one file; without it: built-in prose");
  verb.add_flag("--held-out-books", flags->held_out_books,
                "of the haystack, only files that the pocket model was never trained on, by the rule of "
                "assets/tasks.json");
  verb.add_flag("--held-out-wordings", flags->held_out_wordings,
                "facts and questions in wordings that were never trained on");
  verb.add_option("-m,--model", flags->model,
                  "folder whose tokenizer.json counts the tokens; without it: the shipped model");
  verb.add_option("-o,--output", flags->output, "file to write; without it: stdout")->check(output_file());
  add_force_flag(verb, flags->force);
  verb.callback([flags, &verb] {
    const auto among = [&](auto is) { return std::any_of(flags->names.begin(), flags->names.end(), is); };
    const bool texts = among(is_text), echo = among([](const std::string&name) { return name == "echo"; });
    expect_beside(verb, {"--held-out-books"}, !flags->haystack.empty(), "--haystack");
    expect_use(verb, {"--distance"}, echo,
               "expected the text echo, found tasks without passages that come back");
    expect_use(verb, {"--questions", "--held-out-wordings"}, !texts,
               "expected tasks with samples, found a text");
    expect_use(verb, {"--count"}, !texts || flags->count == 1,
               "expected tasks with samples, found a text, of which there is one");
    const auto any_facts = tasks_of_any_facts(Language::built_in());
    const bool vary = std::all_of(flags->names.begin(), flags->names.end(), [&](const std::string& name) {
      return std::find(any_facts.begin(), any_facts.end(), name) != any_facts.end();
    });
    expect_use(verb, {"--facts"}, vary, "expected tasks out of " + join(any_facts) + " alone");
    run(*flags);
  });
}

}  // namespace lode::cli
