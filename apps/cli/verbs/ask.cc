// SPDX-License-Identifier: Apache-2.0
// lodestone ask: answer questions about an indexed text without reading it again.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>

#include "asker.h"
#include "base/cancel.h"
#include "base/file.h"
#include "base/text.h"
#include "base/timed_parts.h"
#include "cli.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "engine/memory.h"
#include "engine/row_order.h"
#include "io/container.h"
#include "lab/eval/audit_result.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "model/config.h"
#include "prompts.h"
#include "ranks.h"
#include "shell_word.h"
#include "show_sources.h"
#include "source_check.h"

namespace lode::cli {

namespace {

struct AskFlags {
  AskedFlags asked;
  std::vector<std::string> question_words;
  std::vector<std::string> specs;
  std::int64_t max_new_tokens = 128;
  Sampling sampling;
  std::string order = "auto";
  bool show_sources = false, show_thoughts = false, exact = false, together = false, check_sources = false;
  std::function<void(const Json&)> show_json = print_json;
};

std::vector<std::string> checked_questions(const AskFlags& flags) {
  std::vector<std::string> questions;
  for (const std::string& text : flags.question_words)
    questions.push_back(checked_question(text, fmt::format("ask: question {}", questions.size() + 1)));
  return questions;
}

/// How long the parts of the program's start took, some of them beside each other.
Json start_json() {
  Json parts = Json::object();
  for (auto [name, seconds] : timed_parts()) {
    std::replace(name.begin(), name.end(), ' ', '_');  // as all keys
    parts[name] = seconds;
  }
  return parts;
}

/// What drafting has brought.
Json exact_json(const Answer& a) {
  return {{"drafted", a.exact.drafted},
          {"accepted", a.exact.accepted},
          {"accepted_share", a.exact.accepted_share()},
          {"dense_steps", a.exact.dense_steps},
          {"draft_density", a.exact.drafts.density()}};
}

Json answer(Asker& asker, const AskFlags& flags, const Prompts& prompts, const std::string& question,
            const AskedMethod& method, SourceCheck* check) {
  Asker::Question asked = {.prompt = prompts.of({&question, 1}),
                           .method = method.id,
                           .options = {.max_new_tokens = flags.max_new_tokens, .sampling = flags.sampling},
                           .exact = flags.exact,
                           .want_sources = flags.show_sources};
  prompts.set_ends(asked.options);
  AnswerStream stream(flags.asked.common, flags.show_thoughts);
  if (!flags.asked.common.json) {
    asked.options.on_text = [&](std::string_view text) { stream.push(text); };
    asked.options.on_thought = [&](std::string_view text) { stream.push_thought(text); };
  }
  const Answer a = asker.ask(asked);
  stream.end_thoughts();
  const Generation& g = a.generation;
  const double first_token_at = seconds_since_start() - g.decode_seconds;
  Json result = {{"question", question},
                 {"attention", method.spec.str()},
                 {"answer", trimmed(g.text)},
                 {"tokens_reused", asker.context().indexed_tokens()},
                 {"tokens_prefilled", asked.prompt.size()},
                 {"tokens_generated", g.tokens.size()},
                 {"stopped", g.stopped},
                 {"ended_by", end_of(g, flags.max_new_tokens)},
                 {"density", g.work.density()},
                 {"selectivity", g.work.selectivity()},
                 {"prompt_seconds", g.prompt_seconds},
                 {"decode_seconds", g.decode_seconds},
                 {"first_token_at_seconds", first_token_at}};
  if (!g.thoughts.empty()) result["thoughts"] = g.thoughts;
  if (g.thought_tokens > 0) result["tokens_thought"] = g.thought_tokens;
  if (const TierWork& t = g.work.tiers; t.host_keys + t.gpu_keys > 0) {
    result["tiers"] = {{"bytes_to_host", t.bytes_to_host}, {"bytes_to_gpu", t.bytes_to_gpu},
                       {"host_keys", t.host_keys},         {"gpu_keys", t.gpu_keys},
                       {"active_keys", t.active_keys},     {"active_hits", t.active_hits},
                       {"active_bytes", t.active_bytes}};
  }
  if (const std::string why = why_empty(prompts, asker.context().model(), g, flags.max_new_tokens);
      !why.empty())
    result["empty_because"] = why;
  if (!g.work.dense_reason.empty()) result["dense_because"] = g.work.dense_reason;
  if (!g.work.notice.empty()) result["notice"] = g.work.notice;
  put_audit(result, g.work);
  if (ranks() != nullptr)
    result["ranks"] = {{"count", ranks()->size()},
                       {"messages", asker.told().all.messages},
                       {"bytes", asker.told().all.bytes},
                       {"selection_messages", asker.told().selection.messages},
                       {"selection_bytes", asker.told().selection.bytes}};
  if (!asker.on_host().empty()) result["on_host"] = asker.on_host();
  if (g.work.audited > 0) result["audit"]["full_layers"] = a.full_layers;
  if (!method.why.empty()) result["auto"] = method.why;
  if (flags.exact) result["exact"] = exact_json(a);
  if (!flags.show_sources) return result;
  const std::vector<Citation> sources = asker.sources(a, method.id, kShownSources);
  result["sources"] = sources_json(sources);
  if (check != nullptr) result["checked"] = check->check(asker, asked, trimmed(g.text), sources);
  return result;
}

/// What follows an answer that was printed as it came.
void print_rest(const Json& a) {
  print_text(a.contains("sources") ? "\n" + sources_text(a["sources"]) : "\n");
  if (a.contains("checked")) print_text(source_check_text(a["checked"]));
  if (a.contains("empty_because")) print_remark("(no answer: " + a["empty_because"].get<std::string>() + ")");
}

/// What a question looks like that was not quoted, or that should have been a method.
void hint_at_questions(const AskFlags& flags) {
  const auto& words = flags.question_words;
  const auto one_word = [](const std::string& text) {
    return trimmed(text).find_first_of(" \n\t\r") == std::string::npos;
  };
  if (words.size() > 2 && std::all_of(words.begin(), words.end(), one_word))
    print_remark(fmt::format("{} questions of one word each: one question of several words is quoted: \"{}\"",
                             words.size(), excerpt(join(words, " "), 200)));
  for (const std::string& text : words) {
    const std::string name = text.substr(0, text.find(':'));
    if (one_word(text) &&
        std::any_of(methods().begin(), methods().end(), [&](const auto& m) { return m.name == name; }))
      std::cerr << fmt::format("'{}' is taken for a question; -a takes one method: -a {}\n", excerpt(text),
                               excerpt(text));
  }
}

void remark(const Json& a) {
  const double seconds = a["prompt_seconds"].get<double>() + a["decode_seconds"].get<double>();
  std::string line =
      fmt::format("{} reused, {} read; looked at {:.2f} % of the KV bytes; {:.2f} s",
                  counted(a["tokens_reused"].get<std::int64_t>(), "token"),
                  a["tokens_prefilled"].get<std::int64_t>(), 100 * a["density"].get<double>(), seconds);
  line += cut_off(a["ended_by"].get<std::string>(), a["tokens_generated"].get<std::int64_t>());
  if (a.contains("exact") && a["exact"]["drafted"].get<std::int64_t>() > 0)
    line += fmt::format("; exact: full attention accepted {} of {} drafted tokens in {}",
                        a["exact"]["accepted"].get<std::int64_t>(), a["exact"]["drafted"].get<std::int64_t>(),
                        counted(a["exact"]["dense_steps"].get<std::int64_t>(), "step"));
  if (a.contains("dense_because")) line += "; dense: " + a["dense_because"].get<std::string>();
  if (a.contains("notice")) line += "; note: " + a["notice"].get<std::string>();
  if (a.contains("audit")) {
    line += fmt::format("; output error {:.4f} on average, {:.4f} at most, over {} audited outputs",
                        a["audit"]["mean_error"].get<double>(), a["audit"]["max_error"].get<double>(),
                        a["audit"]["outputs"].get<std::int64_t>());
  }
  print_remark(line);
}

/// Moving keys and values costs as much as a few tokens of full attention, and memory of this process's own
/// in place of the file's: by itself it is done for several questions and where that memory is there.
void order_rows(Context& context, const AskFlags& flags) {
  const bool worth = flags.question_words.size() != 1 && context.kv_bytes() < available_memory() / 2;
  if (flags.order == "cluster" || (flags.order == "auto" && worth)) lode::order_rows(context);
}

/// Asked for, an order is had or refused: rows follow the clusters of one method.
void expect_order(const Context& context, const std::vector<AskedMethod>& methods) {
  const auto sparse = std::count_if(methods.begin(), methods.end(),
                                    [](const AskedMethod& method) { return method.spec.name != "full"; });
  if (sparse != 1)
    throw InputError(fmt::format("--order cluster: expected one method beside full, found {}", sparse));
  lode::expect_order(context);
}

/// Answers without passages are full attention's, on the CPU: so must be those that they are compared with.
void expect_full(const std::vector<AskedMethod>& methods, Device device) {
  for (const AskedMethod& method : methods)
    if (method.spec.name != "full")
      throw InputError(fmt::format("--check-sources: expected -a full, found {}", method.spec.str()));
  if (device != Device::cpu) throw InputError("--check-sources: expected --device cpu, found cuda");
}

/// With the texts that were attended to beside the first.
Json with_joined(const AskFlags& flags, Json result) {
  if (!flags.asked.joined.empty()) result["joined"] = flags.asked.joined;
  return result;
}

/// Full attention alone needs none, not even that their files are still there.
LoadIndexes indexes_for(const AskFlags& flags) {
  const bool full = !flags.specs.empty() &&
                    std::ranges::all_of(flags.specs, [](const std::string& spec) { return spec == "full"; });
  return full ? LoadIndexes::none : LoadIndexes::all;
}

void run(const AskFlags& flags) {
  check_specs(flags.specs, flags.asked.context);
  const std::vector<std::string> questions = checked_questions(flags);
  fill_template(flags.asked.prompts.question_template, "",
                "--template");  // refused before anything is loaded
  if (!flags.asked.common.quiet) hint_at_questions(flags);
  AskedText text = open_asked(flags.asked, indexes_for(flags));
  Context& context = text.context;
  const std::vector<Spec> stored = context.methods();
  const std::vector<AskedMethod> methods = asked_methods(flags.specs, text);
  if (flags.order == "cluster") expect_order(context, methods);
  build_missing(flags.asked, context, stored);
  if (ranks() == nullptr) order_rows(context, flags);
  const Prompts prompts = prompts_of(flags.asked, text);
  for (const AskedMethod& method : methods) say_why(method, flags.asked.common, flags.exact);
  settle_output();
  const std::string neutral = kNeutralQuestion;
  std::optional<SourceCheck> check;
  if (flags.check_sources) {
    expect_full(methods, context.options().device);
    check.emplace(context);
  }
  Asker asker(std::move(text), audit_limit(flags.asked.model));
  asker.set_neutral(prompts.of({&neutral, 1}));
  Json answers = Json::array();
  const bool repeat = !flags.asked.common.json && (questions.size() != 1 || methods.size() > 1);
  const auto ask_all = [&](const std::string& question) {
    if (repeat) print_text(fmt::format("> {}\n", excerpt(question, 1000)));
    for (const AskedMethod& method : methods) {
      if (!flags.asked.common.json && methods.size() > 1) print_text(fmt::format("[{}] ", method.spec.str()));
      Json a = answer(asker, flags, prompts, question, method, check ? &*check : nullptr);
      if (!flags.asked.common.json) {
        print_rest(a);
        settle_output();
        if (!flags.asked.common.quiet) remark(a);
        settle_output();
      }
      answers.push_back(std::move(a));
    }
  };
  const auto show_all = [&] {
    if (flags.asked.common.json)
      flags.show_json(with_joined(flags, {{"context", flags.asked.context},
                                          {"model", asker.context().model().path().string()},
                                          {"start_seconds", start_json()},
                                          {"answers", answers}}));
  };
  try {
    for (const std::string& question : questions) ask_all(question);
    if (questions.empty()) {
      if (isatty(STDIN_FILENO) != 0) std::cerr << "Questions, one a line (Ctrl-D ends):\n";
      for (std::string line; next_line(line);) {
        if (trimmed(line).empty()) continue;
        ask_all(checked_question(line, "standard input"));
      }
      check_cancel();  // Ctrl-C while waiting ends the reading like an end of input
      if (answers.empty() && isatty(STDIN_FILENO) == 0)
        throw InputError("ask: expected a question behind the file or on standard input, found none");
    }
  } catch (...) {
    if (!answers.empty()) show_all();  // what is answered stays answered
    throw;
  }
  show_all();
}

bool is_context(const std::string& word) {
  std::error_code none;
  return std::filesystem::is_regular_file(word, none) && is_container(MappedFile(word).bytes());
}

/// Words in front of the questions that are indexed texts, too; they are taken off.
std::vector<std::string> more_contexts(std::vector<std::string>& words) {
  const auto end = std::find_if_not(words.begin(), words.end(), is_context);
  std::vector<std::string> contexts(words.begin(), end);
  words.erase(words.begin(), end);
  return contexts;
}

/// The name of a file where a question belongs is a slip, and is not asked about.
void expect_questions(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (!word.ends_with(".lode") || word.find_first_of(" \t\n") != std::string::npos) continue;
    std::error_code none;
    throw InputError(fmt::format("ask: expected .lode files in front of the questions, found '{}', {}",
                                 excerpt(word),
                                 !std::filesystem::exists(word, none) ? "which is not there"
                                 : is_context(word)                   ? "behind a question"
                                                                      : "which is another kind of file"));
  }
}

/// A question in front of its file. A first word that means a file is opened, and refused as what it is.
void expect_context_first(const std::string& first, const std::vector<std::string>& words) {
  std::error_code none;
  const auto file = std::find_if(words.begin(), words.end(), is_context);
  const bool means_a_file =
      first.ends_with(".lode") || std::count_if(words.begin(), words.end(), is_context) > 1;
  if (file == words.end() || std::filesystem::exists(first, none)) return;
  if (means_a_file) MappedFile{first};  // says why it cannot be opened
  throw InputError(fmt::format(
      "ask: expected the .lode file in front of the question, found '{}' in front of '{}': lodestone "
      "ask {} {}",
      excerpt(first), excerpt(*file), as_word(*file), as_word(first)));
}

/// Answers from one text, from each of several in turn, with its name in front, or from all of them at once.
void run_each(AskFlags flags) {
  expect_context_first(flags.asked.context, flags.question_words);
  std::vector<std::string> contexts = more_contexts(flags.question_words);
  if (flags.question_words == std::vector<std::string>{"-"}) flags.question_words.clear();  // as index -f
  expect_questions(flags.question_words);
  if (flags.together) {
    if (contexts.empty())
      throw InputError("--union: expected several .lode files in front of the questions, found one");
    flags.asked.joined = std::move(contexts);
    return run(flags);
  }
  if (contexts.empty()) return run(flags);
  if (flags.question_words.empty())
    throw InputError("ask: expected questions beside several indexed texts, found none");
  contexts.insert(contexts.begin(), flags.asked.context);
  Json all = Json::array();
  flags.show_json = [&](const Json& answers) { all.push_back(answers); };
  for (const std::string& context : contexts) {
    flags.asked.context = context;
    if (!flags.asked.common.json) print_text(context + ":\n");
    run(flags);
  }
  if (flags.asked.common.json) print_json({{"contexts", all}});
}

}  // namespace

void add_ask(CLI::App& app) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App* verb = app.add_subcommand("ask", "Answer questions about an indexed text");
  add_asked_flags(*verb, flags->asked);
  verb->add_option("question", flags->question_words,
                   "questions, each one argument; none, or -: read them from standard input. Further .lode "
                   "files in front of "
                   "them are asked, too, each by itself or, with --union, all at once");
  add_asked_attention_flag(*verb, flags->specs);
  verb->add_option(
          "--order", flags->order,
          "order of keys and values in memory: token, cluster (the CPU then attends faster by a single "
          "saap, kmeans, ivf or squeezed; takes memory of its own for them), or auto: cluster for "
          "several questions where it fits")
      ->check(CLI::IsMember({"auto", "token", "cluster"}));
  verb->add_flag(
      "--union", flags->together,
      "attend to the texts of several .lode files at once, as if they were one: their keys are moved "
      "to new positions, nothing is read again (on the CPU; refused where that is far from one reading)");
  verb->add_flag("--show-sources", flags->show_sources,
                 "show the passages that the answer attended to, with their weight");
  add_thoughts_flag(*verb, flags->show_thoughts);
  verb->add_flag_callback(
      "--check-sources", [flags] { flags->show_sources = flags->check_sources = true; },
      "show them, and answer again without them, and without as many others: whether the answer rests on "
      "them "
      "(with -a full)");
  verb->add_flag(
      "--exact", flags->exact,
      "full attention's own answer: the method only drafts tokens, which full attention verifies, several "
      "in one step");
  verb->add_option("-n,--predict", flags->max_new_tokens, "most tokens of an answer")
      ->check(whole_number(1, 1 << 20));
  add_sampling_flags(*verb, flags->sampling);
  verb->callback([flags, verb] {
    note_sampling_flags(*verb, flags->sampling, flags->asked.common);
    note_asked_flags(*verb, flags->asked);
    expect_use(*verb, {"--show-sources", "--check-sources", "--audit", "--order", "--union"},
               ranks() == nullptr,
               "expected none over several ranks, each of which sees its own part of the text, found one");
    expect_use(*verb, {"--union"}, flags->asked.common.device != "cuda",
               "expected --device cpu, where texts are joined, found cuda");
    if (flags->exact && flags->check_sources)
      throw InputError("--check-sources: expected -a full without --exact, found it with");
    if (flags->exact && verb->count("--audit") > 0)
      throw InputError("--audit: expected none beside --exact, whose every token full attention verifies");
    run_each(*flags);
  });
}

}  // namespace lode::cli
