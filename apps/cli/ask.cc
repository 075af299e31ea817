// SPDX-License-Identifier: Apache-2.0
// lodestone ask: answer questions about an indexed text without reading it again.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <optional>

#include "base/cancel.h"
#include "base/text.h"
#include "cli.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "engine/memory.h"
#include "engine/row_order.h"
#include "lab/eval/audit_result.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "show_sources.h"

namespace lode::cli {

namespace {

struct AskFlags {
  CommonFlags common;
  ModelFlags model;
  std::string context;
  std::vector<std::string> question_words;
  std::vector<std::string> specs;
  std::string question_template = kQuestionTemplate;
  std::vector<std::string> stop = {"\n"};
  std::int64_t max_new_tokens = 128;
  Sampling sampling;
  std::string order = "auto";
  bool show_sources = false;
  bool kv_type_given = false;
};

constexpr const char* kBlanks = " \n\t\r";  // a line of a file from Windows ends with \r

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(kBlanks);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

/// A question as the model can be asked it; `where` names it in errors.
std::string checked_question(const std::string& text, const std::string& where) {
  if (const std::size_t bad = invalid_utf8(text); bad != std::string::npos)
    throw InputError(
        fmt::format("{}: expected UTF-8, found an invalid byte at offset {} of a question", where, bad));
  std::string question = trimmed(text);
  if (question.empty()) throw InputError(where + ": expected a question, found an empty one");
  return question;
}

std::vector<std::string> checked_questions(const AskFlags& flags) {
  std::vector<std::string> questions;
  for (const std::string& text : flags.question_words)
    questions.push_back(checked_question(text, fmt::format("ask: question {}", questions.size() + 1)));
  return questions;
}

std::shared_ptr<const Model> model_of(const AskFlags& flags, const ContextMeta& meta) {
  ModelFlags model = flags.model;
  if (model.model.empty()) {
    if (!is_model(meta.model_path)) {
      throw InputError(
          fmt::format("{}: its model is not at '{}' any more: name the model's folder or file with -m",
                      flags.context, meta.model_path));
    }
    model.model = meta.model_path;
  }
  return load_model(flags.common, model);
}

/// What ended an answer: a stop string or EOS, the limit of --predict, or the context's room.
std::string end_of(const Generation& g, std::int64_t most_tokens) {
  if (g.stopped) return "stop";
  return std::ssize(g.tokens) == most_tokens ? "predict" : "context";
}

Json answer(Context& context, const AskFlags& flags, const std::string& question, const Spec& spec,
            MethodId method, SourceFinder& finder) {
  const auto prompt = context.model().tokenizer().encode(fill_template(flags.question_template, question),
                                                         Tokenizer::Bos::none);
  GenerateOptions options;
  options.max_new_tokens = flags.max_new_tokens;
  options.stop = flags.stop;
  options.sampling = flags.sampling;
  const std::int64_t reused = context.indexed_tokens();
  SourceMass sources;
  const Generation g = context.generate(prompt, method, options, flags.show_sources ? &sources : nullptr);
  Json result = {{"question", question},
                 {"attention", spec.str()},
                 {"answer", trimmed(g.text)},
                 {"tokens_reused", reused},
                 {"tokens_prefilled", prompt.size()},
                 {"tokens_generated", g.tokens.size()},
                 {"stopped", g.stopped},
                 {"ended_by", end_of(g, options.max_new_tokens)},
                 {"density", g.work.density()},
                 {"selectivity", g.work.selectivity()},
                 {"prompt_seconds", g.prompt_seconds},
                 {"decode_seconds", g.decode_seconds}};
  if (const TierWork& t = g.work.tiers; t.host_keys + t.gpu_keys > 0) {
    result["tiers"] = {{"bytes_to_host", t.bytes_to_host}, {"bytes_to_gpu", t.bytes_to_gpu},
                       {"host_keys", t.host_keys},         {"gpu_keys", t.gpu_keys},
                       {"active_keys", t.active_keys},     {"active_hits", t.active_hits},
                       {"active_bytes", t.active_bytes}};
  }
  if (!g.work.dense_reason.empty()) result["dense_because"] = g.work.dense_reason;
  if (!g.work.notice.empty()) result["notice"] = g.work.notice;
  put_audit(result, g.work);
  if (!context.impl().on_host.empty()) result["on_host"] = context.impl().on_host;
  if (g.work.audited > 0) result["audit"]["full_layers"] = context.impl().audit.fallen_back();
  context.roll_back(reused);
  if (flags.show_sources) result["sources"] = sources_json(finder.find(sources, method, kShownSources));
  return result;
}

void print_answer(const Json& a, bool name_method) {
  std::string text = a["answer"].get<std::string>() + "\n";
  if (name_method) text = fmt::format("[{}] {}", a["attention"].get<std::string>(), text);
  if (a.contains("sources")) text += sources_text(a["sources"]);
  print_text(text);
}

void remark(const Json& a) {
  const double seconds = a["prompt_seconds"].get<double>() + a["decode_seconds"].get<double>();
  std::string line =
      fmt::format("{} tokens reused, {} read; looked at {:.2f} % of the KV bytes; {:.2f} s",
                  a["tokens_reused"].get<std::int64_t>(), a["tokens_prefilled"].get<std::int64_t>(),
                  100 * a["density"].get<double>(), seconds);
  if (a["ended_by"] != "stop")
    line += fmt::format("; cut off behind token {}, by {}", a["tokens_generated"].get<std::int64_t>(),
                        a["ended_by"] == "predict" ? "--predict" : "the context's end");
  if (a.contains("dense_because")) line += "; dense: " + a["dense_because"].get<std::string>();
  if (a.contains("notice")) line += "; note: " + a["notice"].get<std::string>();
  if (a.contains("audit")) {
    line += fmt::format("; output error {:.4f} on average, {:.4f} at most, over {} audited outputs",
                        a["audit"]["mean_error"].get<double>(), a["audit"]["max_error"].get<double>(),
                        a["audit"]["outputs"].get<std::int64_t>());
  }
  print_remark(line);
}

/// What a file has decided is not decided anew: asked for otherwise, it is refused, never ignored.
void check_against_file(const AskFlags& flags, const ContextMeta& meta) {
  if (flags.kv_type_given && parse_dtype(flags.model.kv_type) != meta.kv_type) {
    throw InputError(
        fmt::format("{}: expected --kv-type {}, as its keys and values are stored, or none, found {}",
                    flags.context, name_of(meta.kv_type), flags.model.kv_type));
  }
  if (flags.model.context > 0 && flags.model.context <= meta.tokens) {
    throw InputError(
        fmt::format("{}: expected a --ctx-size above the {} tokens that it holds, or none, found {}",
                    flags.context, meta.tokens, flags.model.context));
  }
}

/// Moving keys and values costs as much as a few tokens of full attention, and memory of this process's own
/// in place of the file's: by itself it is done for several questions and where that memory is there.
void order_rows(Context& context, const AskFlags& flags) {
  const bool worth = flags.question_words.size() != 1 && context.kv_bytes() < available_memory() / 2;
  if (flags.order == "cluster" || (flags.order == "auto" && worth)) lode::order_rows(context);
}

/// Asked for, an order is had or refused: rows follow the clusters of one method.
void expect_order(const Context& context, const std::vector<Spec>& specs) {
  const auto sparse =
      std::count_if(specs.begin(), specs.end(), [](const Spec& s) { return s.name != "full"; });
  if (sparse != 1)
    throw InputError(fmt::format("--order cluster: expected one method beside full, found {}", sparse));
  lode::expect_order(context);
}

void run(const AskFlags& flags) {
  const std::vector<Spec> asked = parse_specs(flags.specs);
  const std::vector<std::string> questions = checked_questions(flags);
  fill_template(flags.question_template, "");  // refused before anything is loaded
  const ContainerReader file(flags.context);
  const ContextMeta meta = read_context_meta(file, flags.context);
  check_against_file(flags, meta);
  const auto model = model_of(flags, meta);
  ContextOptions options = context_options(flags.common, flags.model);
  options.device = device_of(flags.common, meta.kv_type);
  expect_gpu(options.device, flags.model.gpu_memory, flags.model.kv_tier, flags.model.active_memory);
  // Whatever room `index` was given. Not where a limit of memory is set, which that room was chosen for, nor
  // where RoPE's frequencies are for that many positions.
  const bool bounded = !flags.model.gpu_memory.empty() || flags.model.kv_tier != "auto" ||
                       model->config().rope_scaling.kind == RopeScaling::Kind::dynamic;
  if (flags.model.context == 0 && !bounded)
    options.max_tokens =
        std::max(meta.rope_tokens, room_for_questions(*model, meta.tokens, meta.rope_factor));
  Context context = Context::load(flags.context, model, options);
  context.impl().audit.set_limit(audit_limit(flags.model));
  say_placement(context, flags.common);
  // Without -a: what the text was indexed for; without that, full attention.
  std::vector<Spec> specs = !asked.empty() ? asked : context.methods();
  if (specs.empty()) specs.push_back(parse_spec("full"));
  std::vector<MethodId> methods;
  for (const Spec& spec : specs) methods.push_back(context.attach(spec));
  if (flags.order == "cluster") expect_order(context, specs);
  context.build_indexes();
  order_rows(context, flags);

  SourceFinder finder(context,
                      model->tokenizer().encode(fill_template(flags.question_template, kNeutralQuestion),
                                                Tokenizer::Bos::none));
  Json answers = Json::array();
  const auto ask_all = [&](const std::string& question) {
    for (std::size_t i = 0; i < specs.size(); ++i) {
      Json a = answer(context, flags, question, specs[i], methods[i], finder);
      if (!flags.common.json) {
        print_answer(a, specs.size() > 1);
        if (!flags.common.quiet) remark(a);
      }
      answers.push_back(std::move(a));
    }
  };
  const auto show_all = [&] {
    if (flags.common.json)
      print_json({{"context", flags.context}, {"model", model->path().string()}, {"answers", answers}});
  };
  try {
    for (const std::string& question : questions) ask_all(question);
    if (questions.empty()) {
      if (isatty(STDIN_FILENO) != 0) std::cerr << "Questions, one a line (Ctrl-D ends):\n";
      for (std::string line; std::getline(std::cin, line);) {
        if (trimmed(line).empty()) continue;
        ask_all(checked_question(line, "standard input"));
      }
      check_cancel();  // Ctrl-C while waiting ends the reading like an end of input
    }
  } catch (...) {
    if (!answers.empty()) show_all();  // what is answered stays answered
    throw;
  }
  show_all();
}

}  // namespace

std::string fill_template(std::string text, const std::string& question) {
  const std::string slot = "{question}";
  const std::size_t at = text.find(slot);
  if (at == std::string::npos)
    throw InputError("--template: expected a text with {question} in it, found none");
  return text.replace(at, slot.size(), question);
}

void add_ask(CLI::App& app) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App* verb = app.add_subcommand("ask", "Answer questions about an indexed text");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, false);
  add_audit_limit_flag(*verb, flags->model);
  verb->add_option("context", flags->context, "the .lode file")->required();
  verb->add_option("question", flags->question_words,
                   "questions, each one argument; none: read them from standard input");
  add_attention_flag(*verb, flags->specs, false);
  verb->add_option(
          "--order", flags->order,
          "order of keys and values in memory: token, cluster (the CPU then attends faster by a single "
          "saap, kmeans, ivf or squeezed; takes memory of its own for them), or auto: cluster for "
          "several questions where it fits")
      ->check(CLI::IsMember({"auto", "token", "cluster"}));
  verb->add_flag("--show-sources", flags->show_sources,
                 "show the passages that the answer attended to, with their weight");
  verb->add_option("-n,--predict", flags->max_new_tokens, "most tokens of an answer")
      ->check(whole_number(1, 1 << 20));
  verb->add_option("--template", flags->question_template, "the prompt; {question} is replaced");
  verb->add_option("--stop", flags->stop, "strings that end an answer");
  verb->add_option("--temp", flags->sampling.temperature, "sampling temperature; 0 = greedy")
      ->check(number(0.0, 100.0));
  verb->add_option("--top-k", flags->sampling.top_k, "sample from the k likeliest tokens; 0 = all")
      ->check(whole_number(0, 1 << 20));
  verb->add_option("--top-p", flags->sampling.top_p,
                   "sample from the likeliest tokens of this total probability")
      ->check(number(0.0, 1.0));
  verb->add_option("--min-p", flags->sampling.min_p,
                   "drop tokens less likely than this share of the likeliest")
      ->check(number(0.0, 1.0));
  verb->add_option("-s,--seed", flags->sampling.seed, "seed of the sampling")
      ->check(whole_number(0, INT64_MAX));
  verb->callback([flags, verb] {
    for (const char* flag : {"--top-k", "--top-p", "--min-p"})
      if (flags->sampling.temperature == 0 && verb->count(flag) > 0 && !flags->common.quiet)
        std::cerr << flag << ": changes nothing without --temp above 0\n";
    flags->kv_type_given = verb->count("--kv-type") > 0;
    run(*flags);
  });
}

}  // namespace lode::cli
