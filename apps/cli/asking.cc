// SPDX-License-Identifier: Apache-2.0
#include "asking.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <utility>

#include "base/printable.h"
#include "base/text.h"
#include "cluster/rank_prefill.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "engine/join/join_texts.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "model/config.h"
#include "ranks.h"
#include "select/spec_list.h"
#include "shell_word.h"

namespace lode::cli {

namespace {

std::shared_ptr<const Model> model_of(const AskedFlags& flags, const ContextMeta& meta) {
  ModelFlags model = flags.model;
  if (model.model.empty()) {
    if (!is_model(meta.model_path))
      throw InputError(fmt::format(
          "{}: expected its model at '{}', where it was indexed, found none there: -m MODEL names the place "
          "that it was moved to",
          flags.context, meta.model_path));
    model.model = meta.model_path;
  }
  return load_model(flags.common, model);
}

/// What a file has decided is not decided anew: asked for otherwise, it is refused, never ignored.
void check_against_file(const AskedFlags& flags, const ContextMeta& meta) {
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

}  // namespace

void add_asked_flags(CLI::App& verb, AskedFlags& flags) {
  add_common_flags(verb, flags.common);
  add_model_flags(verb, flags.model, false);
  add_sharing_flags(verb, flags.model.gpus);
  add_audit_limit_flag(verb, flags.model);
  verb.add_option("context", flags.context, "the .lode file")->required();
  add_prompt_flags(verb, flags.prompts);
}

void add_asked_attention_flag(CLI::App& verb, std::vector<std::string>& specs) {
  add_attention_flag(verb, specs, false);
  verb.get_option("--attention")
      ->description(
          "attention spec, name[:key=value,...], see `lodestone methods`, or auto[:error=E]: the cheapest "
          "method that "
          "was measured to suit the text, which is the default where `index` measured; may be repeated");
}

void note_asked_flags(const CLI::App& verb, AskedFlags& flags) {
  flags.kv_type_given = verb.count("--kv-type") > 0;
  note_prompt_flags(verb, flags.prompts);
}

void add_sampling_flags(CLI::App& verb, Sampling& sampling) {
  verb.add_option("--temp", sampling.temperature, "sampling temperature; 0 = greedy")
      ->check(number(0.0, 100.0));
  verb.add_option("--top-k", sampling.top_k, "sample from the k likeliest tokens; 0 = all")
      ->check(whole_number(0, 1 << 20));
  verb.add_option("--top-p", sampling.top_p, "sample from the likeliest tokens of this total probability")
      ->check(number(0.0, 1.0));
  verb.add_option("--min-p", sampling.min_p, "drop tokens less likely than this share of the likeliest")
      ->check(number(0.0, 1.0));
  verb.add_option("-s,--seed", sampling.seed, "seed of the sampling")->check(whole_number(0, INT64_MAX));
}

void note_sampling_flags(const CLI::App& verb, const Sampling& sampling, const CommonFlags& common) {
  for (const char* flag : {"--top-k", "--top-p", "--min-p"})
    if (sampling.temperature == 0 && verb.count(flag) > 0 && !common.quiet)
      print_remark(std::string(flag) + ": changes nothing without --temp above 0");
}

namespace {

/// Drift up to which texts are joined (docs/guides/documents.md has what it was on each model).
constexpr double kMostDrift = 0.5;

/// Refused where rows are too far from those of one reading; else said.
void check_drift(const AskedFlags& flags, const std::vector<double>& drift) {
  for (std::size_t i = 0; i < drift.size(); ++i) {
    if (drift[i] > kMostDrift)
      throw InputError(
          fmt::format("--union: {}: expected keys and values within {:.0f} % of those of one reading behind "
                      "the other texts, found {:.0f} %: "
                      "ask each text by itself, or index them together (index -f A -f B)",
                      flags.joined[i], 100 * kMostDrift, 100 * drift[i]));
    if (!flags.common.quiet)
      print_remark(
          fmt::format("{}: joined without being read again; its keys and values are {:.1f} % from those of "
                      "one reading",
                      flags.joined[i], 100 * drift[i]));
  }
}

AskedText open_joined(const AskedFlags& flags, std::shared_ptr<const Model> model) {
  std::vector<std::filesystem::path> paths = {flags.context};
  paths.insert(paths.end(), flags.joined.begin(), flags.joined.end());
  ContextOptions options = context_options(flags.common, flags.model);
  if (options.device == Device::cuda && flags.common.device == "auto" && !flags.common.quiet)
    print_remark("--union: answered on the CPU, where texts are joined");
  options.device = Device::cpu;
  JoinedTexts texts = join_texts(paths, model, options);
  check_drift(flags, texts.drift);
  texts.context.impl().audit.set_limit(audit_limit(flags.model));
  return {.model = std::move(model),
          .context = std::move(texts.context),
          .attachments = std::move(texts.attachments)};
}

}  // namespace

AskedText open_asked(const AskedFlags& flags, LoadIndexes indexes) {
  const ContainerReader file(flags.context);
  const ContextMeta meta = read_context_meta(file, flags.context);
  check_against_file(flags, meta);
  const auto starting = start_gpu(flags.common);
  auto model = model_of(flags, meta);
  if (!flags.joined.empty()) return open_joined(flags, std::move(model));
  ContextOptions options = context_options(flags.common, flags.model);
  options.device = device_of(flags.common, meta.kv_type);
  expect_gpu(options.device, flags.model.gpu_memory, flags.model.kv_tier, flags.model.active_memory,
             flags.model.gpus);
  // Whatever room `index` was given. Not where a limit of memory is set, which that room was chosen for, nor
  // where RoPE's frequencies are for that many positions.
  const bool bounded = !flags.model.gpu_memory.empty() || flags.model.kv_tier != "auto" ||
                       model->config().rope_scaling.kind == RopeScaling::Kind::dynamic;
  if (flags.model.context == 0 && !bounded)
    options.max_tokens =
        std::max(meta.rope_tokens, room_for_questions(*model, meta.tokens, meta.rope_factor));
  Context context = load_context(flags.context, model, options, indexes, ranks());
  say_placement(context, flags.common);
  return {.model = std::move(model),
          .context = std::move(context),
          .attachments = read_attachments(file, flags.context)};
}

Prompts prompts_of(const AskedFlags& flags, const AskedText& text) {
  Prompts prompts(prompt_options(flags.prompts), *text.model, text.attachments, source_of(text.context).text,
                  flags.context);
  if (!prompts.remark().empty() && !flags.common.quiet) print_remark(prompts.remark());
  return prompts;
}

void check_specs(const std::vector<std::string>& specs, const std::string& context) {
  for (const std::string& one : specs) {
    if (parse_auto(one)) continue;
    try {
      parse_specs({one});
    } catch (const InputError&) {  // a file of the indexed text's own may be elsewhere
      if (!std::filesystem::exists(context)) throw;
      parse_specs({one}, read_context_meta(ContainerReader(context), context).folders);
    }
  }
}

namespace {

/// Whether the text names that method, with files where it has them.
bool names(const std::string& text, const Spec& method) {
  try {
    return parse_spec(text, method.folders).str() == method.str();
  } catch (const InputError&) {
    return false;
  }
}

}  // namespace

Spec asked_spec(const std::string& text, const std::vector<Spec>& stored) {
  const auto own = std::ranges::find_if(stored, [&](const Spec& method) { return names(text, method); });
  return own != stored.end() ? *own : parse_specs({text}).front();
}

std::vector<AskedMethod> asked_methods(const std::vector<std::string>& specs, AskedText& text) {
  const std::vector<Spec> stored = text.context.methods();
  const AutoPlace place = auto_place(text.context);
  std::vector<AskedMethod> methods;
  const auto add = [&](const AutoChoice& choice) {
    methods.push_back({.spec = choice.spec, .why = choice.why});
  };
  for (const std::string& one : specs) {
    if (const auto automatic = parse_auto(one))
      add(choose_attention(*automatic, text.attachments, stored, place));
    else
      methods.push_back({.spec = asked_spec(one, stored), .why = {}});
  }
  if (specs.empty()) std::ranges::for_each(usual_attention(text.attachments, stored, place), add);
  for (AskedMethod& method : methods) {
    if (ranks() != nullptr) expect_asked_over_ranks(text.model, method.spec);
    method.id = text.context.attach(method.spec);
  }
  return methods;
}

void say_why(const AskedMethod& method, const CommonFlags& common, bool exact) {
  if (method.why.empty() || common.quiet) return;
  const char* const does =
      exact && method.spec.name != "full" ? "drafts, for full attention to verify," : "attends";
  print_remark(fmt::format("{} by {}: {}", does, method.spec.str(), method.why));
}

void build_missing(const AskedFlags& flags, Context& context, const std::vector<Spec>& stored) {
  constexpr double kWorthSaying = 0.5;  // seconds
  std::vector<std::string> fresh;
  for (const Spec& spec : context.methods())
    if (spec.name != "full" && !holds(stored, spec)) fresh.push_back(spec.str());
  if (fresh.empty()) return context.build_indexes();
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t steps = std::ssize(fresh) * context.model().config().layers;
  {
    Progress progress("indexes", steps, "layers", flags.common.progress());
    context.build_indexes([&](std::int64_t done) { progress.at(std::min(done, steps)); });
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (seconds > kWorthSaying && !flags.common.quiet && flags.joined.empty())
    std::cerr << fmt::format(
        "{:.1f} s for the index of {}, which {} does not hold; `lodestone index -a` keeps it there\n",
        seconds, join(fresh), as_word(flags.context));
}

std::string trimmed(const std::string& text) {
  return std::string(without_blanks(text));
}

std::string checked_question(const std::string& text, const std::string& where) {
  if (const std::size_t bad = invalid_utf8(text); bad != std::string::npos)
    throw InputError(
        fmt::format("{}: expected UTF-8, found an invalid byte at offset {} of a question", where, bad));
  std::string question = trimmed(text);
  if (question.empty()) throw InputError(where + ": expected a question, found an empty one");
  return question;
}

std::string end_of(const Generation& answer, std::int64_t most_tokens) {
  if (answer.stopped) return "stop";
  return std::ssize(answer.tokens) == most_tokens ? "predict" : "context";
}

std::string cut_off(const std::string& ended_by, std::int64_t tokens) {
  if (ended_by == "stop") return "";
  return fmt::format("; cut off behind token {}, by {}", tokens,
                     ended_by == "predict" ? "--predict" : "the context's end");
}

void add_thoughts_flag(CLI::App& verb, bool& show) {
  verb.add_flag(
      "--show-thoughts", show,
      "print what a model thinks before it answers in front of the answer; else a terminal shows it "
      "dimmed while it comes");
}

AnswerStream::AnswerStream(const CommonFlags& common, bool show_thoughts)
    : thoughts_(show_thoughts                                 ? Thoughts::printed
                : !common.quiet && isatty(STDERR_FILENO) != 0 ? Thoughts::dim
                                                              : Thoughts::hidden) {}

void AnswerStream::push_thought(std::string_view text) {
  if (thoughts_ == Thoughts::hidden) return;
  thinking_ = true;
  if (thoughts_ == Thoughts::printed) return print_text(text);
  std::fprintf(stderr, "\033[2m%s\033[0m", printable(text).c_str());
}

void AnswerStream::end_thoughts() {
  if (!std::exchange(thinking_, false)) return;
  if (thoughts_ == Thoughts::printed) return print_text("\n\n");
  std::fputs("\n", stderr);
}

void AnswerStream::push(std::string_view text) {
  const std::string ready = trimmer_.push(text);
  if (ready.empty()) return;
  end_thoughts();
  print_text(ready);
}

}  // namespace lode::cli
