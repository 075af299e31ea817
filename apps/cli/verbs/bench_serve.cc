// SPDX-License-Identifier: Apache-2.0
// lodestone bench serve: load on a running server, and how long its clients wait.
#include "bench_serve.h"

#include <fmt/format.h>

#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "lodestone/error.h"
#include "serve/guard.h"
#include "serve/load.h"

namespace lode::cli {

namespace {

struct ServeBenchFlags {
  CommonFlags common;
  serve::LoadOptions load;
  std::string questions, context, key_file;
};

std::vector<serve::LoadQuestion> read_questions(const ServeBenchFlags& flags) {
  std::vector<serve::LoadQuestion> questions;
  const std::string text = read_text(flags.questions);
  std::size_t line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string where = fmt::format("{}: line {}", flags.questions, ++line);
    const std::string_view one(text.data() + at, end - at);
    at = end + 1;
    if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = parse_json(one, where);
    questions.push_back({json_string(json, "question", where),
                         json_has(json, "context") ? json_string(json, "context", where) : flags.context});
  }
  if (questions.empty())
    throw InputError(flags.questions + ": expected a question, one JSON object a line, found none");
  return questions;
}

Json shares(const std::vector<double>& seconds) {
  return {{"p50", serve::percentile(seconds, 0.5)},
          {"p90", serve::percentile(seconds, 0.9)},
          {"p99", serve::percentile(seconds, 0.99)},
          {"max", serve::percentile(seconds, 1)}};
}

void run(ServeBenchFlags flags) {
  const std::vector<serve::LoadQuestion> questions = read_questions(flags);
  if (flags.load.requests == 0) flags.load.requests = std::ssize(questions);
  if (!flags.key_file.empty())
    flags.load.key = serve::parse_keys(read_file(flags.key_file, 1 << 20), flags.key_file).front();
  const serve::LoadResult r = serve::put_load(flags.load, questions);
  if (r.answered == 0)
    throw RunError(fmt::format("none of {} was answered: {}", counted(r.failed, "question"), r.failure));
  const double rate = static_cast<double>(r.tokens) / r.seconds;
  if (flags.common.json) {
    return print_json({{"url", flags.load.url},
                       {"clients", flags.load.clients},
                       {"answered", r.answered},
                       {"failed", r.failed},
                       {"first_failure", r.failure},
                       {"seconds", r.seconds},
                       {"tokens", r.tokens},
                       {"tokens_per_second", rate},
                       {"first_token_seconds", shares(r.first_token)},
                       {"answer_seconds", shares(r.whole)}});
  }
  std::string text = fmt::format("{}: {} in {:.1f} s, {:.1f} tokens/s", counted(flags.load.clients, "client"),
                                 counted(r.answered, "answer"), r.seconds, rate);
  if (r.failed > 0) text += fmt::format("; {} failed, the first: {}", r.failed, r.failure);
  for (const auto& [name, seconds] :
       {std::pair("first token", &r.first_token), std::pair("answer", &r.whole)})
    text += fmt::format("\n{:12} p50 {:.3f} s, p90 {:.3f} s, p99 {:.3f} s", name,
                        serve::percentile(*seconds, 0.5), serve::percentile(*seconds, 0.9),
                        serve::percentile(*seconds, 0.99));
  print_text(text + "\n");
}

}  // namespace

void add_bench_serve(CLI::App& bench) {
  auto flags = std::make_shared<ServeBenchFlags>();
  CLI::App& verb =
      *bench.add_subcommand("serve", "Answers a second of a running server, and how long its clients wait");
  add_common_flags(verb, flags->common);
  verb.add_option("url", flags->load.url, "of the server, such as http://127.0.0.1:8080")->required();
  verb.add_option("--questions", flags->questions,
                  "file of questions, one JSON object a line: {\"question\", \"context\"?}")
      ->required();
  verb.add_option("--clients", flags->load.clients, "clients at once; each asks one question after the other")
      ->check(whole_number(1, 4096));
  verb.add_option("--requests", flags->load.requests,
                  "questions in all, the file over and over; 0 = each once")
      ->check(whole_number(0, 1 << 24));
  verb.add_option("--context", flags->context, "stored context of questions that name none");
  verb.add_option("-m,--model", flags->load.model, "model to ask, by the id that the server gives it");
  verb.add_option("-a,--attention", flags->load.attention,
                  "attention spec of all questions; default: the context's own");
  verb.add_flag("!--no-sources", flags->load.sources, "ask for answers without their sources");
  verb.add_option("-n,--predict", flags->load.max_new_tokens, "most tokens of an answer")
      ->check(whole_number(1, 1 << 20));
  verb.add_option("--api-key-file", flags->key_file, "file whose first key is used");
  verb.callback([flags] { run(*flags); });
}

}  // namespace lode::cli
