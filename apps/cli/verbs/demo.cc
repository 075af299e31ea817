// SPDX-License-Identifier: Apache-2.0
// lodestone demo: the shipped model reads a shipped document once and answers questions under several
// attention methods.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "lab/eval/audit_result.h"
#include "lodestone/error.h"
#include "select/artefacts.h"

namespace lode::cli {

namespace {

struct DemoFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> specs;
};

/// What is shown when nothing is asked for: methods that need an artefact only if the model has one.
std::vector<std::string> usual_specs(const std::filesystem::path& model) {
  std::vector<std::string> specs = {"full", "topk:k=64,window=512", "kmeans:rope=on,probes=48,window=512"};
  const std::filesystem::path folder = artefact_folder(model);
  if (std::filesystem::exists(folder / "saap.safetensors")) specs.emplace_back("saap:probes=16,window=511");
  if (std::filesystem::exists(folder / "hash.safetensors")) specs.emplace_back("hash:budget=1/32,window=512");
  specs.insert(specs.end(), {"random:fraction=5%,window=512", "streaming:window=512"});
  return specs;
}

struct Question {
  std::string text, answer;
};

struct Row {
  std::string attention;
  std::int64_t right = 0, agreeing = 0, decoded = 0;
  double decode_seconds = 0;
  WorkReport work;
  std::vector<std::string> answers;
  std::vector<std::vector<TokenId>> tokens;
};

std::vector<Question> read_questions(const std::filesystem::path& path) {
  std::vector<Question> questions;
  const std::string text = read_file(path);
  std::size_t line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string where = fmt::format("{} line {}", path.string(), ++line);
    if (end > at) {
      const Json json = parse_json(std::string_view(text).substr(at, end - at), where);
      questions.push_back({json_string(json, "question", where), json_string(json, "answer", where)});
    }
    at = end + 1;
  }
  return questions;
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \n") - begin + 1);
}

Row ask_all(Context& context, const Spec& spec, MethodId method, const std::vector<Question>& questions,
            const Row* full) {
  Row row = {.attention = spec.str(), .answers = {}, .tokens = {}};
  for (std::size_t i = 0; i < questions.size(); ++i) {
    const auto prompt = context.model().tokenizer().encode(
        fill_template(kQuestionTemplate, questions[i].text, "--template"), Tokenizer::Bos::none);
    const Generation g = context.generate(prompt, method, {.max_new_tokens = 32, .stop = {"\n"}});
    context.roll_back(context.indexed_tokens());
    row.answers.push_back(trimmed(g.text));
    row.tokens.push_back(g.tokens);
    row.right += row.answers.back() == questions[i].answer;
    row.agreeing += full == nullptr || full->tokens[i] == g.tokens;
    row.decoded += static_cast<std::int64_t>(g.tokens.size());
    row.decode_seconds += g.decode_seconds;
    row.work += g.work;
  }
  return row;
}

Json row_json(const Row& row, std::size_t questions) {
  Json json = {{"attention", row.attention},
               {"right", row.right},
               {"questions", questions},
               {"agreement", static_cast<double>(row.agreeing) / static_cast<double>(questions)},
               {"density", row.work.density()},
               {"ms_per_token",
                1e3 * row.decode_seconds / static_cast<double>(std::max<std::int64_t>(1, row.decoded))},
               {"answers", row.answers}};
  put_audit(json, row.work);
  return json;
}

void print_table(const std::vector<Question>& questions, const std::vector<Row>& rows) {
  for (std::size_t i = 0; i < questions.size(); ++i) {
    print_text(fmt::format("\n{}\n", questions[i].text));
    for (const Row& row : rows) {
      const bool same = row.tokens[i] == rows.front().tokens[i];
      print_text(fmt::format("  {:36} {:20} {}\n", row.attention, row.answers[i],
                             same ? "as full attention" : "differs"));
    }
  }
  std::vector<std::vector<std::string>> lines = {
      {"attention", "right", "as full", "KV bytes read", "ms/token"}};
  for (const Row& row : rows) {
    lines.push_back({row.attention, fmt::format("{}/{}", row.right, questions.size()),
                     fmt::format("{}/{}", row.agreeing, questions.size()),
                     fmt::format("{:.2f} %", 100 * row.work.density()),
                     fmt::format("{:.2f}", 1e3 * row.decode_seconds /
                                               static_cast<double>(std::max<std::int64_t>(1, row.decoded)))});
  }
  print_text("\n" + text_table(lines));
}

void run(DemoFlags& flags) {
  const auto data = data_dir();
  if (flags.model.model.empty()) flags.model.model = (data / "models" / "pocket").string();
  std::vector<Spec> specs = parse_specs(flags.specs.empty() ? usual_specs(flags.model.model) : flags.specs);
  if (specs.empty() || specs.front().name != "full") specs.insert(specs.begin(), parse_spec("full"));
  const std::string text = read_text((data / "demo" / "document.txt").string());
  const std::vector<Question> questions = read_questions(data / "demo" / "questions.jsonl");
  const auto model = load_model(flags.common, flags.model);
  const auto tokens = model->tokenizer().encode(text, Tokenizer::Bos::as_template);

  Context context(model, context_options(flags.common, flags.model));
  std::vector<MethodId> methods;
  for (const Spec& spec : specs) methods.push_back(context.attach(spec));
  {
    Progress progress("reading demo/document.txt once", static_cast<std::int64_t>(tokens.size()), "tokens",
                      flags.common.progress(), Progress::Cost::growing);
    context.prefill(tokens, [&](std::int64_t done) { progress.at(done); });
  }
  context.build_indexes();
  std::vector<Row> rows;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!flags.common.quiet)
      std::cerr << "asking " << questions.size() << " questions under " << specs[i].str() << "\n";
    rows.push_back(ask_all(context, specs[i], methods[i], questions, rows.empty() ? nullptr : &rows.front()));
  }
  for (const Row& row : rows) {
    const std::string remark = row.work.notice + audit_remark(row.work);
    if (!remark.empty() && !flags.common.quiet)
      print_remark(row.attention + (row.work.notice.empty() ? "" : ": ") + remark);
  }
  if (!flags.common.json) return print_table(questions, rows);
  Json results = Json::array();
  for (const Row& row : rows) results.push_back(row_json(row, questions.size()));
  print_json({{"model", flags.model.model}, {"tokens", tokens.size()}, {"results", results}});
}

}  // namespace

void add_demo(CLI::App& app) {
  auto flags = std::make_shared<DemoFlags>();
  CLI::App* verb = app.add_subcommand("demo", "The shipped model answers questions about a shipped document");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, false);
  add_attention_flag(*verb, flags->specs, false);
  verb->callback([flags] { run(*flags); });
}

}  // namespace lode::cli
