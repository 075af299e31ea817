// SPDX-License-Identifier: Apache-2.0
// lodestone train saap: centroids and query classifiers for every layer and KV head of a frozen model.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <limits>

#include "base/text.h"
#include "engine/memory.h"
#include "lab/train/trained_on.h"
#include "lessons.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "saap_flags.h"

namespace lode::cli {

namespace {

constexpr std::int64_t kLeastSampleMemory = std::int64_t{2} << 30;

struct TrainSaapFlags {
  CommonFlags common;
  ModelFlags model;
  std::string output, checkpoint, from;
  std::vector<std::string> texts;
  std::string switch_at, tokens = "16k", filter = "pairs", variant = "residual", keys = "kmeans",
                         type = "f16", memory;
  LessonFlags lessons;
  std::int64_t prompts = 0;
  double held_out = 0.05;
  bool constant_rate = false, force = false;
  SaapSettings settings = recipe();

  /// The recipe that captured most on held-out documents (docs/results/saap.md).
  static SaapSettings recipe() {
    SaapSettings s;
    s.clusters = s.hidden = 0;  // by the heads' width
    s.filter.window = 511;
    s.filter.causal = true;
    s.samples = 1500;
    s.late = 0.5;
    s.late_tokens = 0;  // an eighth of a prompt
    s.steps = 2000;
    s.weight_decay = 0;
    return s;
  }
};

/// Prompts of all texts: one of each text in turn until there are enough, then in the order of the texts.
std::vector<Prompt> read_prompts(const TrainSaapFlags& flags, const Model& model, std::int64_t tokens) {
  std::vector<std::vector<Prompt>> by_text;
  for (const std::string& path : flags.texts) {
    const std::string name = std::filesystem::path(path).filename().string();
    by_text.push_back(cut_into_prompts(model, name, read_text(path), tokens));
  }
  std::vector<std::size_t> taken(by_text.size(), 0);
  std::int64_t total = 0;
  for (bool more = true; more && (flags.prompts == 0 || total < flags.prompts);) {
    more = false;
    for (std::size_t t = 0; t < by_text.size() && (flags.prompts == 0 || total < flags.prompts); ++t) {
      if (taken[t] == by_text[t].size()) continue;
      ++taken[t];
      ++total;
      more = true;
    }
  }
  std::vector<Prompt> prompts;
  for (std::size_t t = 0; t < by_text.size(); ++t) {
    for (std::size_t i = 0; i < taken[t]; ++i) prompts.push_back(std::move(by_text[t][i]));
  }
  return prompts;
}

/// Prompts of which the last ones are held out.
std::int64_t held_out_of(const TrainSaapFlags& flags, std::int64_t prompts) {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(flags.held_out * static_cast<double>(prompts)));
}

std::vector<Prompt> prompts_of(const TrainSaapFlags& flags, const Model& model, std::int64_t tokens) {
  if (!flags.lessons.on() || flags.settings.adapt) return read_prompts(flags, model, tokens);
  LessonOptions options = {.tokens = tokens, .seed = flags.settings.seed};
  options.count = flags.prompts > 0 ? flags.prompts : kUsualLessons;
  options.held_out = held_out_of(flags, options.count);
  return read_lessons(model, flags.texts, options, flags.common.quiet);
}

SaapSettings settings_of(const TrainSaapFlags& flags, const Model& model, std::int64_t tokens,
                         const std::vector<Prompt>& prompts) {
  SaapSettings settings = flags.settings;
  // Narrow heads, of small models: as measured on one. Wide ones: the paper's.
  const bool narrow = model.config().head_dim <= 64;
  if (settings.clusters == 0) settings.clusters = narrow ? 512 : 1024;
  if (settings.clusters == 1) throw InputError("--clusters: expected 0 or at least 2, found 1");
  if (settings.hidden == 0) settings.hidden = narrow ? 192 : 1024;
  if (settings.late_tokens == 0) settings.late_tokens = std::max<std::int64_t>(1, tokens / 8);
  settings.residual = flags.variant == "residual";
  settings.train_keys = flags.keys == "trained";
  settings.type = parse_dtype(flags.type);
  settings.filter.pairs = flags.filter == "both" || flags.filter == "pairs";
  settings.filter.queries = flags.filter == "both" || flags.filter == "queries";
  settings.decay = !flags.constant_rate;
  settings.from = flags.from;
  settings.memory = flags.memory.empty() ? std::max(kLeastSampleMemory, available_memory() / 4)
                                         : parse_bytes(flags.memory, "--sample-memory");
  if (settings.add_network && flags.from.empty())
    throw InputError("--add-network: expected the artefact to add a network to (--from), found none");
  if (settings.train_keys && (!flags.from.empty() || settings.balance > 0))
    throw InputError(
        "--keys trained: expected neither --from nor --balance beside it, whose buckets it would "
        "replace, found one");
  if (settings.adapt && (flags.from.empty() || settings.add_network))
    throw InputError(
        fmt::format("--adapt: expected the artefact to fine-tune (--from) and no --add-network, found {}",
                    flags.from.empty() ? "no --from" : "--add-network"));
  settings.held_out = held_out_of(flags, std::ssize(prompts));
  return settings;
}

/// Flags that others give their sense are refused without these, never ignored.
void check_flags(const CLI::App& verb, const TrainSaapFlags& flags) {
  const SaapSettings& s = flags.settings;
  expect_beside(verb, {"--key-hidden", "--key-steps", "--key-sample", "--key-queries"},
                flags.keys == "trained", "--keys trained");
  expect_beside(verb, {"--replace-network", "--switch-at"}, s.add_network, "--add-network");
  expect_beside(verb, {"--shifted", "--shift-to"}, s.shift > 0, "--shift");
  expect_beside(verb, {"--late-tokens"}, s.late > 0 || s.adapt, "--late or --adapt");
  expect_use(verb, {"--balance", "--key-prompts"}, flags.from.empty(),
             "expected no --from, whose buckets stay, found it");
  expect_use(verb, {"--held-out"}, !s.adapt,
             "expected no --adapt, which tests on the last queries of its prompt, found it");
}

/// What the file will say of its networks; the trained one is for the longest contexts.
std::vector<SaapStretch> stretches_of(const TrainSaapFlags& flags, const std::string& training) {
  SaapStretch trained = {.from = 0, .training = training};
  if (!flags.settings.add_network) return {trained};
  std::vector<SaapStretch> stretches = read_saap_stretches(flags.from);
  if (flags.settings.replace_network && stretches.size() > 1) stretches.pop_back();
  const SaapStretch& before = stretches.back();
  const std::int64_t shorter = before.reach(), longer = trained.reach(), least = before.from + 1;
  constexpr std::int64_t kMost = std::numeric_limits<Position>::max();
  if (!flags.switch_at.empty()) {
    trained.from = static_cast<Position>(parse_count(flags.switch_at, "--switch-at", least, kMost));
  } else if (longer > shorter && shorter > 0 && switch_between(shorter, longer) >= least) {
    trained.from = switch_between(shorter, longer);
  } else {
    throw InputError(
        fmt::format("--add-network: expected a network for longer contexts than the {} tokens of {}, or "
                    "--switch-at, found one for {}: raise --shift or --tokens",
                    shorter, flags.from, longer));
  }
  stretches.push_back(trained);
  return stretches;
}

std::string shares_of(const SaapCaptured& captured) {
  return fmt::format("{:.3f} {:.3f} {:.3f}", captured[0], captured[1], captured[2]);
}

std::string table_of(const std::vector<SaapHeadReport>& heads, std::int64_t probes) {
  std::string text = fmt::format(
      "on held-out prompts; mass: of the attention on far keys, the share in {} buckets; keys: the share of "
      "the far "
      "keys in them\n\n{:>5} {:>4} {:>9} {:>8} {:>8} {:>8} {:>13} {:>13} {:>10}\n",
      probes, "layer", "head", "held out", "loss", "mass", "keys", "k-means: mass", "keys", "best mass");
  for (const SaapHeadReport& h : heads) {
    text += fmt::format("{:>5} {:>4} {:>9} {:>8.4f} {:>8.4f} {:>8.4f} {:>13.4f} {:>13.4f} {:>10.4f}\n",
                        h.layer, h.head, h.held_out, h.loss, h.mass, h.selectivity, h.kmeans_mass,
                        h.kmeans_selectivity, h.best_mass);
  }
  text += fmt::format(
      "\nshare of that attention in the best 2, 5 and 10 % of the far keys, by probability / sqrt(keys), by "
      "q . centroid, and at most\n\n{:>5} {:>4} {:>8} {:>20} {:>20} {:>20}\n",
      "layer", "head", "gain", "f_q", "k-means", "at most");
  for (const SaapHeadReport& h : heads) {
    text += fmt::format("{:>5} {:>4} {:>8.4f} {:>20} {:>20} {:>20}\n", h.layer, h.head, h.gain,
                        shares_of(h.captured), shares_of(h.kmeans_captured), shares_of(h.best_captured));
  }
  return text;
}

void check_output(const TrainSaapFlags& flags, const std::string& checkpoint) {
  std::error_code failed;
  expect_no_context(flags.output);
  expect_apart(flags.output, flags.texts);
  expect_apart(flags.output, {flags.model.model});
  expect_apart(flags.output, {checkpoint});
  if (!std::filesystem::equivalent(flags.from, flags.output, failed)) expect_new(flags.output, flags.force);
}

void run(const TrainSaapFlags& flags) {
  const std::string checkpoint = flags.checkpoint.empty() ? flags.output + ".checkpoint" : flags.checkpoint;
  check_output(flags, checkpoint);
  const auto model = load_model(flags.common, flags.model);
  const std::int64_t tokens = parse_count(flags.tokens, "--tokens", 16, std::int64_t{1} << 30);
  const std::vector<Prompt> prompts = prompts_of(flags, *model, tokens);
  const SaapSettings settings = settings_of(flags, *model, tokens, prompts);
  const auto say = [&](const SaapHeadReport& h) {
    if (flags.common.quiet) return;
    if (h.near_only) {
      std::cerr << fmt::format(
          "layer {} head {}: none of its queries attends far keys: it attends to sink and window alone\n",
          h.layer, h.head);
      return;
    }
    std::cerr << fmt::format(
        "layer {} head {}: held-out loss {:.4f}, mass {:.4f} at {:.2f} % of the keys (k-means {:.4f} at "
        "{:.2f} %), {:.0f} s\n",
        h.layer, h.head, h.loss, h.mass, 100 * h.selectivity, h.kmeans_mass, 100 * h.kmeans_selectivity,
        h.seconds);
  };
  Json made = settings.json(), heads = Json::array();
  made["from"] = settings.from.filename().string();  // folders are this machine's
  std::int64_t total = 0;
  for (const Prompt& prompt : prompts) total += std::ssize(prompt.tokens);
  const ContextOptions context = context_options(flags.common, flags.model);
  made["texts"] = flags.texts.size();
  made["lessons"] = flags.lessons.lessons;
  made.update(trained_on(model, context, prompts));
  const std::vector<SaapStretch> stretches = stretches_of(flags, made.dump());
  if (context.device == Device::cuda && context.gpu_memory > 0 && !flags.common.quiet)
    std::cerr
        << "--gpu-memory bounds weights, keys and values while texts are read; what is trained from them "
           "takes GPU memory of its own\n";
  SaapResult result;
  resumable(
      checkpoint, [&] { return std::filesystem::exists(checkpoint); },
      [&] {
        result = train_saap(model, context, settings, prompts, checkpoint, flags.common.progress(), say);
      });
  check_output(flags, checkpoint);
  write_saap(flags.output, result.layers, model->fingerprint(), stretches);
  std::filesystem::remove(checkpoint);
  for (const SaapHeadReport& head : result.heads) heads.push_back(head.json());
  Json report = {{"file", flags.output},
                 {"method", "saap"},
                 {"training", made},
                 {"from_position", stretches.back().from},
                 {"file_bytes", std::filesystem::file_size(flags.output)},
                 {"heads", heads}};
  if (flags.common.json) return print_json(report);
  print_text(table_of(result.heads, settings.probes));
  print_text(fmt::format("\n{}: {}, from {} of {}, {}\nuse: -a saap:weights={}\n", flags.output,
                         counted(std::ssize(result.heads), "head"), counted(std::ssize(prompts), "prompt"),
                         counted(total, "token"), human_bytes(report["file_bytes"]), flags.output));
}

void add_network_flags(CLI::App& verb, TrainSaapFlags& flags) {
  SaapSettings& s = flags.settings;
  verb.add_option("--variant", flags.variant, "mlp: two layers; residual: a linear path beside them")
      ->check(CLI::IsMember({"mlp", "residual"}));
  verb.add_option("--keys", flags.keys,
                  "what assigns keys to buckets: kmeans, the nearest centroid; trained, a classifier that is "
                  "learned jointly with one of queries")
      ->check(CLI::IsMember({"kmeans", "trained"}));
  verb.add_option("--key-hidden", s.key_hidden, "width of the key classifier's hidden layer; 0 = --hidden")
      ->check(whole_number(0, 1 << 16));
  verb.add_option("--key-steps", s.key_steps, "of its optimiser")->check(whole_number(1, 1 << 30));
  verb.add_option("--key-sample", s.key_sample, "keys of each prompt that it learns from, about")
      ->check(whole_number(2, 1 << 24));
  verb.add_option("--key-queries", s.key_queries, "queries of each prompt and KV head beside them")
      ->check(whole_number(2, 1 << 20));
  verb.add_option("--balance", s.balance, "evenness of the buckets: 0 plain k-means, 1 as even as can be")
      ->check(number(0.0, 1.0));
  verb.add_option("--dense-layers", s.dense_layers, "first layers that are not trained")
      ->check(whole_number(0, 1 << 16));
  verb.add_option("--type", flags.type, "of the weights in the artefact")
      ->check(CLI::IsMember({"f16", "bf16", "f32", "q8"}));
  verb.add_option("--from", flags.from,
                  "an artefact to train further on these texts, which --output may replace; its buckets "
                  "stay, and the shape of its network");
  verb.add_flag("--add-network", s.add_network,
                "leave the networks of --from as they are (but for --type q8) and train another one over its "
                "buckets, for longer contexts (see --shift)");
  verb.add_flag("--replace-network", s.replace_network,
                "with --add-network: in place of the last one of --from");
  verb.add_option("--switch-at", flags.switch_at,
                  "first query position that the added network chooses for; default: the geometric middle of "
                  "the lengths that it and the one before it were trained for");
}

void add_data_flags(CLI::App& verb, TrainSaapFlags& flags) {
  SaapSettings& s = flags.settings;
  add_lesson_flag(verb, flags.lessons);
  verb.add_option("--tokens", flags.tokens, "length of the documents that are made, or of prompts");
  verb.add_option(
          "--prompts", flags.prompts,
          "documents to make, 0 = 24; with --lessons off prompts to use, spread over the texts, 0 = all")
      ->check(whole_number(0, 1 << 30));
  verb.add_option("--held-out", flags.held_out,
                  "share of the prompts, the last ones, to test on (at least one)")
      ->check(number(0.0, 0.9));
  verb.add_option(
          "--sample-memory", flags.memory,
          "for the sampled queries of heads that are trained side by side; where it holds fewer layers "
          "than there are, prompts are read anew for each group of them")
      ->default_str("a quarter of what is free, at least 2GiB")
      ->check(byte_size());
  verb.add_option("--late", s.late, "share of a prompt's queries that are among its last ones")
      ->check(number(0.0, 1.0));
  verb.add_option("--late-tokens", s.late_tokens,
                  "how many tokens at a prompt's end --late means; 0 = an eighth of --tokens")
      ->check(whole_number(0, 1 << 20));
  verb.add_option(
          "--shift", s.shift,
          "score queries as if they stood up to so many positions further from the keys, for contexts "
          "longer than prompts")
      ->check(whole_number(0, 1 << 24));
  verb.add_option("--shifted", s.shifted, "share of the queries that --shift is for")
      ->check(number(0.0, 1.0));
  verb.add_option(
          "--shift-to", s.shift_to,
          "last position that queries are scored from under --shift, whatever the prompt's length; 0 = none")
      ->check(whole_number(0, 1 << 24));
  verb.add_option("--key-prompts", s.key_prompts,
                  "prompts whose keys are clustered, spread over all; 0 = all")
      ->check(whole_number(0, 1 << 30));
  verb.add_option("--filter", flags.filter,
                  "pairs: no pairs nearer than --window; queries: none whose best key is within --distance")
      ->check(CLI::IsMember({"both", "pairs", "queries", "none"}));
  verb.add_option("--window", s.filter.window, "tokens back from a query that are not far")
      ->check(whole_number(1, 1 << 30));
  verb.add_option("--distance", s.filter.distance, "how far the best key of a query must be")
      ->check(whole_number(0, 1 << 30));
  verb.add_flag("--adapt", s.adapt,
                "fine-tune --from to the current prompt, the only one: train on its queries before the last "
                "--late-tokens, test on those");
  verb.add_flag("--test-as-asked", s.test_as_asked,
                "held-out queries see the far keys before them, whatever --filter and --causal say, so that "
                "variants are tested alike");
  verb.add_flag(
      "--causal,!--no-causal", s.filter.causal,
      "queries see the keys before them only (the default), or with --no-causal all of their prompt");
}

}  // namespace

void add_saap_training_flags(CLI::App& verb, SaapSettings& s) {
  verb.add_option("--clusters", s.clusters,
                  "buckets per layer and KV head; 0 = 1024, for heads up to 64 wide 512")
      ->check(whole_number(s.clusters == 0 ? 0 : 2, 1 << 16));
  verb.add_option("--hidden", s.hidden,
                  "width of the classifier's hidden layer; 0 = 1024, for heads up to 64 wide 192")
      ->check(whole_number(s.hidden == 0 ? 0 : 1, 1 << 16));
  verb.add_option("--samples", s.samples, "queries of each prompt and KV head")
      ->check(whole_number(2, 1 << 30));
  verb.add_option("--steps", s.steps, "of the optimiser, per head")->check(whole_number(1, 1 << 30));
  verb.add_option("--batch", s.batch, "queries of a step, all of one prompt")
      ->check(whole_number(2, 1 << 20));
  verb.add_option("--rate", s.rate, "learning rate of Adam")->check(number(0.0, 10.0));
  verb.add_option("--weight-decay", s.weight_decay, "of Adam: weights shrink by rate x this in a step")
      ->check(number(0.0, 1000.0));
  verb.add_option("--probes", s.probes, "buckets for which captured mass is reported")
      ->check(whole_number(1, 1 << 16));
  verb.add_option("--seed", s.seed, "of samples, start and batches")->check(whole_number(0, INT64_MAX));
}

void add_train_saap(CLI::App& train) {
  auto flags = std::make_shared<TrainSaapFlags>();
  CLI::App* verb = train.add_subcommand("saap", "Centroids and query classifiers, for -a saap");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, true);
  verb->add_option("-f,--file", flags->texts, "a text to train on (UTF-8); repeatable")->required();
  verb->add_option("-o,--output", flags->output, "the safetensors file to write")
      ->required()
      ->check(output_file());
  add_force_flag(*verb, flags->force);
  verb->add_option("--checkpoint", flags->checkpoint,
                   "where an interrupted run leaves off and goes on; default: the output with .checkpoint")
      ->check(output_file());
  add_data_flags(*verb, *flags);
  add_network_flags(*verb, *flags);
  add_saap_training_flags(*verb, flags->settings);
  verb->add_flag("--constant-rate", flags->constant_rate, "no decay of the rate");
  verb->callback([flags, verb] {
    expect_use(*verb, {"--ctx-size"}, false, "expected --tokens, the length of prompts, in its place");
    say_unaudited(flags->common, flags->model, "training attends fully");
    check_flags(*verb, *flags);
    run(*flags);
  });
}

}  // namespace lode::cli
