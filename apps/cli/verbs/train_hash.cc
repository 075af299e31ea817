// SPDX-License-Identifier: Apache-2.0
// lodestone train hash: HashAttention's functions for every layer and KV head of a frozen model.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "base/text.h"
#include "cli.h"
#include "lab/studies/recall.h"
#include "lab/train/hash/trainer.h"
#include "lab/train/trained_on.h"
#include "lessons.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode::cli {

namespace {

struct TrainHashFlags {
  CommonFlags common;
  ModelFlags model;
  std::string output, checkpoint, from;
  std::vector<std::string> texts, held_out;
  std::string tokens = "16k", shift = "model", widths, keys = "kv-head", rope = "on", values = "off",
              activation = "silu", loss = "bce", draw = "prompt", target = "value", start = "linear",
              type = "f16";
  int bits = 32;
  LessonFlags lessons;
  std::int64_t prompts = 0, chunk = 512;
  bool force = false;
  HashSettings settings = recipe();

  /// The recipe that found most on held-out documents (docs/results/hash.md).
  static HashSettings recipe() {
    HashSettings s;
    s.late = 0.5;
    s.late_tokens = 0;  // an eighth of a prompt
    return s;
  }
};

HashSettings settings_of(const TrainHashFlags& flags, const ModelConfig& config, std::int64_t tokens) {
  const int head_dim = config.head_dim;
  HashSettings s = flags.settings;
  if (s.late_tokens == 0) s.late_tokens = std::max<std::int64_t>(1, tokens / 8);
  constexpr std::int64_t kUsualShift = 131072;
  s.shift = flags.shift == "model" ? std::clamp<std::int64_t>(config.max_positions - tokens, 0, kUsualShift)
                                   : parse_count(flags.shift, "--shift", 0, 1 << 24);
  s.scheme = {
      .bits = flags.bits,
      .roped = flags.rope == "on",
      .per_query_head = flags.keys == "query-head",
      .values = flags.values == "off"    ? HashScheme::Values::off
                : flags.values == "norm" ? HashScheme::Values::norm
                                         : HashScheme::Values::vector,
      .activation = flags.activation == "silu" ? HashNet::Activation::silu : HashNet::Activation::relu};
  s.loss = flags.loss == "bce" ? PivotalLoss::bce : PivotalLoss::softmax;
  s.draw = flags.draw == "prompt" ? HashSettings::Draw::prompt : HashSettings::Draw::chunk;
  s.by_value = flags.target == "value";
  s.type = parse_dtype(flags.type);
  s.from = flags.from;
  if (s.further > s.shift)
    throw InputError(
        fmt::format("--further: expected at most the {} positions of --shift, found {}", s.shift, s.further));
  if (flags.widths.empty()) {
    s.widths = {head_dim, head_dim};
  } else if (flags.widths != "none") {
    s.widths = parse_counts(flags.widths, "--widths", 1, 8192);
  }
  // A hidden layer carries a direction and its opposite for each bit, or it cannot start so.
  s.linear_start = flags.start == "linear" &&
                   std::all_of(s.widths.begin(), s.widths.end(), [&](auto w) { return w >= 2 * flags.bits; });
  if (s.widths.size() > 7) throw InputError("--widths: expected at most 7 hidden layers, found more");
  return s;
}

/// Of the held-out texts, at the length of training.
RecallOptions recall_options(const TrainHashFlags& flags) {
  RecallOptions options;
  options.context = context_options(flags.common, flags.model);
  options.lengths = {parse_count(flags.tokens, "--tokens", 16, std::int64_t{1} << 30)};
  options.dense = flags.settings.dense;
  options.top = flags.settings.top;
  options.progress = flags.common.progress();
  return options;
}

/// The artefact to come, beside what needs none.
std::vector<NamedSpec> recall_specs(const TrainHashFlags& flags) {
  std::vector<NamedSpec> specs;
  for (const char* budget : {"1/16", "1/32"}) {
    for (const std::string& text : {fmt::format("hash:budget={},weights={}", budget, flags.output),
                                    fmt::format("hyperplanes:budget={},bits={}", budget, flags.bits)})
      specs.push_back({text, parse_spec(text)});
  }
  return specs;
}

/// Whether they are long enough, and a spec can name the artefact, is seen before the training, not after it.
std::vector<std::string> read_held_out(const TrainHashFlags& flags, const Model& model) {
  std::vector<std::string> texts;
  if (!flags.held_out.empty()) recall_specs(flags);
  for (const std::string& path : flags.held_out) {
    texts.push_back(read_text(path));
    const auto tokens = model.tokenizer().encode(texts.back(), Tokenizer::Bos::as_template);
    expect_lengths(recall_options(flags), std::ssize(tokens), path);
  }
  return texts;
}

/// Prompts of all texts in turn, one of each at a time, so that a short training has seen them all.
std::vector<Prompt> read_prompts(const TrainHashFlags& flags, const Model& model,
                                 const std::vector<std::string>& held_out, std::int64_t tokens) {
  std::vector<std::vector<Prompt>> by_text;
  std::size_t most = 0;
  for (const std::string& path : flags.texts) {
    const std::string text = read_text(path);
    if (std::find(held_out.begin(), held_out.end(), text) != held_out.end())
      throw InputError("--held-out: expected other texts than those of -f, found that of '" + path + "'");
    if (flags.lessons.on()) continue;
    by_text.push_back(cut_into_prompts(model, std::filesystem::path(path).filename().string(), text, tokens));
    most = std::max(most, by_text.back().size());
  }
  if (flags.lessons.on()) {
    const std::int64_t count = flags.prompts > 0 ? flags.prompts : kUsualLessons;
    return read_lessons(model, flags.texts, {.tokens = tokens, .count = count, .seed = flags.settings.seed},
                        flags.common.quiet);
  }
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < most; ++i) {
    for (auto& own : by_text) {
      if (i < own.size() && (flags.prompts == 0 || std::ssize(prompts) < flags.prompts))
        prompts.push_back(std::move(own[i]));
    }
  }
  return prompts;
}

/// Recall on texts that training did not see.
Json held_out_recall(const TrainHashFlags& flags, const std::shared_ptr<const Model>& model,
                     const std::vector<std::string>& texts) {
  Json all = Json::array();
  if (texts.empty()) return all;
  const RecallOptions options = recall_options(flags);
  const std::vector<NamedSpec> specs = recall_specs(flags);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const RecallReport report = recall_by_length(model, texts[i], specs, options);
    if (!flags.common.json) print_text(flags.held_out[i] + ": " + report.table() + "\n");
    Json one = report.json();
    one["text"] = flags.held_out[i];
    all.push_back(std::move(one));
  }
  return all;
}

void check_output(const TrainHashFlags& flags, const std::string& checkpoint) {
  expect_no_context(flags.output);
  expect_apart(flags.output, flags.texts);
  expect_apart(flags.output, {flags.model.model});
  expect_apart(flags.output, {checkpoint});
  expect_apart(flags.output, flags.held_out);
  expect_new(flags.output, flags.force);
}

void run(const TrainHashFlags& flags) {
  const std::string checkpoint = flags.checkpoint.empty() ? flags.output + ".checkpoint" : flags.checkpoint;
  check_output(flags, checkpoint);
  const auto model = load_model(flags.common, flags.model);
  const std::int64_t tokens = parse_count(flags.tokens, "--tokens", 16, std::int64_t{1} << 30);
  const HashSettings settings = settings_of(flags, model->config(), tokens);
  if (flags.start == "linear" && flags.from.empty() && !settings.linear_start && !flags.common.quiet)
    std::cerr << fmt::format(
        "train hash: a linear start takes hidden layers of {} units or more: starts at random\n",
        2 * flags.bits);
  const std::vector<std::string> held_out_texts = read_held_out(flags, *model);
  const std::vector<Prompt> prompts = read_prompts(flags, *model, held_out_texts, tokens);
  ContextOptions options = context_options(flags.common, flags.model);
  options.chunk = flags.chunk;
  for (const Prompt& prompt : prompts)
    options.max_tokens = std::max(options.max_tokens, std::ssize(prompt.tokens));
  const auto say = [&](const std::string& sentence) {
    if (!flags.common.quiet) std::cerr << "train hash: " << sentence << "\n";
  };
  HashResult result;
  resumable(
      checkpoint, [&] { return std::filesystem::exists(checkpoint); },
      [&] {
        result = train_hash(model, options, settings, prompts, checkpoint, flags.common.progress(), say);
      });
  Json made = settings.json(), heads = Json::array();
  made["from"] = settings.from.filename().string();  // folders are this machine's
  made["texts"] = flags.texts.size();
  made["lessons"] = flags.lessons.lessons;
  made.update(trained_on(model, options, prompts));
  made["tokens"] = result.tokens;
  made["head_steps"] = result.steps;
  made["steps_on"] = result.steps_on_gpu ? "cuda" : "cpu";
  check_output(flags, checkpoint);
  write_hash_weights(flags.output, result.layers, model->fingerprint(), {{"training", made.dump()}});
  std::filesystem::remove(checkpoint);
  for (const HashHeadLoss& head : result.heads)
    heads.push_back({{"layer", head.layer}, {"kv_head", head.kv_head}, {"loss", head.loss}});
  const Json held_out = held_out_recall(flags, model, held_out_texts);
  const Json report = {{"file", flags.output}, {"method", "hash"},
                       {"training", made},     {"file_bytes", std::filesystem::file_size(flags.output)},
                       {"heads", heads},       {"held_out", held_out}};
  if (flags.common.json) return print_json(report);
  for (const HashHeadLoss& head : result.heads)
    print_text(fmt::format("layer {} KV head {}: loss {:.4f}\n", head.layer, head.kv_head, head.loss));
  print_text(
      fmt::format("{}: signatures of {}, from {} of {}, {} of each head, {}\nuse: "
                  "-a hash:weights={}\n",
                  flags.output, counted(flags.bits, "bit"), counted(std::ssize(prompts), "prompt"),
                  counted(result.tokens, "token"), counted(result.steps, "step"),
                  human_bytes(report["file_bytes"]), flags.output));
}

void add_function_flags(CLI::App& verb, TrainHashFlags& flags) {
  verb.add_option("--bits", flags.bits, "of a signature")->check(CLI::IsMember({32, 64, 128}));
  verb.add_option("--widths", flags.widths,
                  "of the hidden layers, such as 128,128; none = linear; without it two of the head's width");
  verb.add_option("--keys", flags.keys, "who has signatures of its own: kv-head or query-head (the paper)")
      ->check(CLI::IsMember({"kv-head", "query-head"}));
  verb.add_option("--rope", flags.rope, "functions see vectors after RoPE (on) or before it (off)")
      ->check(CLI::IsMember({"off", "on"}));
  verb.add_option("--values", flags.values, "what the key's function sees of the value: off, norm or vector")
      ->check(CLI::IsMember({"off", "norm", "vector"}));
  verb.add_option("--activation", flags.activation, "of the hidden layers")
      ->check(CLI::IsMember({"silu", "relu"}));
  verb.add_option("--type", flags.type, "of the weights in the file")
      ->check(CLI::IsMember({"f16", "bf16", "f32"}));
}

void add_training_flags(CLI::App& verb, TrainHashFlags& flags) {
  HashSettings& s = flags.settings;
  verb.add_option("--loss", flags.loss, "bce (the paper) or softmax")
      ->check(CLI::IsMember({"bce", "softmax"}));
  verb.add_option("--target", flags.target, "pivotal keys: value (largest a |v|) or logits")
      ->check(CLI::IsMember({"value", "logits"}));
  verb.add_option("--top", s.top, "pivotal keys of a query")->check(whole_number(1, 65536));
  verb.add_option("--sink", s.dense.sink, "first tokens, never pivotal")->check(whole_number(0, 1 << 20));
  verb.add_option("--window", s.dense.window, "last tokens, never pivotal")->check(whole_number(1, 1 << 20));
  verb.add_option("--alpha", s.alpha, "class weight of pivotal keys: alpha + beta context")
      ->check(number(0.0, 1e9));
  verb.add_option("--beta", s.beta, "class weight of pivotal keys: alpha + beta context")
      ->check(number(0.0, 1e9));
  verb.add_option(
          "--draw", flags.draw,
          "where a step's tokens stand: all over a prompt (prompt), or in the chunk just read (chunk, the "
          "authors' program)")
      ->check(CLI::IsMember({"prompt", "chunk"}));
  verb.add_option("--steps", s.steps, "of every head, after each prompt or chunk")
      ->check(whole_number(1, 1 << 20));
  verb.add_option("--queries", s.queries, "tokens in a step")->check(whole_number(1, 65536));
  verb.add_option("--late", s.late, "share of a step's tokens that are among a prompt's last ones")
      ->check(number(0.0, 1.0));
  verb.add_option("--late-tokens", s.late_tokens,
                  "how many tokens at a prompt's end --late means; 0 = an eighth of --tokens")
      ->check(whole_number(0, 1 << 20));
  verb.add_option("--shift", flags.shift,
                  "turn a step's queries and keys by up to so many positions, for contexts longer than "
                  "prompts; model: to "
                  "the model's last position, by 131072 at most");
  verb.add_option(
          "--further", s.further,
          "up to so many of those positions are the queries' alone: they look from further away, as in "
          "contexts longer than prompts")
      ->check(whole_number(0, 1 << 24));
  verb.add_option("--apart", s.apart, "share of the steps that --further is for")->check(number(0.0, 1.0));
  verb.add_option("--others", s.others, "keys of a step beside the pivotal ones; 0 = all")
      ->check(whole_number(0, 1 << 30));
  verb.add_option("--rate", s.rate, "of Adam at the start; falls along a cosine")->check(number(0.0, 1.0));
  verb.add_option("--from", flags.from,
                  "a file of such functions, to train further; --output may replace it");
  verb.add_option("--start", flags.start, "linear (from second moments) or random")
      ->check(CLI::IsMember({"linear", "random"}));
  verb.add_option("--gamma", s.gamma, "of the linear start: 0 keys as they are, 1/2 whitened")
      ->check(number(0.0, 1.0));
  verb.add_option("--chunk", flags.chunk, "tokens that the model reads at a time")
      ->check(whole_number(1, 1 << 20));
  verb.add_option("--seed", s.seed, "of starts and samples")->check(whole_number(0, INT64_MAX));
}

}  // namespace

void add_train_hash(CLI::App& train) {
  auto flags = std::make_shared<TrainHashFlags>();
  CLI::App* verb =
      train.add_subcommand("hash", "HashAttention's learned signatures, for -a hash:weights=FILE");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, true);
  verb->add_option("-f,--file", flags->texts, "a text to train on (UTF-8); repeatable")->required();
  verb->add_option("-o,--output", flags->output, "the safetensors file to write")
      ->required()
      ->check(output_file());
  verb->add_option("--held-out", flags->held_out,
                   "a text that recall is reported on afterwards, as long as the prompts; repeatable");
  add_force_flag(*verb, flags->force);
  verb->add_option("--checkpoint", flags->checkpoint,
                   "where the run's state is kept, and found again after an interruption; without it beside "
                   "the output")
      ->check(output_file());
  add_lesson_flag(*verb, flags->lessons);
  verb->add_option("--tokens", flags->tokens, "length of the documents that are made, or of prompts");
  verb->add_option("--prompts", flags->prompts,
                   "documents to make, 0 = 24; with --lessons off prompts to use, one of each text in turn, "
                   "0 = all")
      ->check(whole_number(0, 1 << 30));
  add_function_flags(*verb, *flags);
  add_training_flags(*verb, *flags);
  verb->callback([flags, verb] {
    expect_use(*verb, {"--ctx-size"}, false, "expected --tokens, the length of prompts, in its place");
    say_unaudited(flags->common, flags->model, "training attends fully");
    expect_beside(*verb, {"--late-tokens"}, flags->settings.late > 0, "--late");
    expect_beside(*verb, {"--apart"}, flags->settings.further > 0, "--further");
    expect_beside(*verb, {"--gamma"}, flags->start == "linear", "--start linear");
    expect_use(*verb, {"--start", "--gamma"}, flags->from.empty(),
               "expected no --from, which is the start, found it");
    run(*flags);
  });
}

}  // namespace lode::cli
