// SPDX-License-Identifier: Apache-2.0
// lodestone train kmeans: centroids for every layer and KV head of a frozen model.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "base/text.h"
#include "cli.h"
#include "engine/context.h"
#include "lodestone/error.h"
#include "select/shared/centroids.h"

namespace lode::cli {

namespace {

struct TrainFlags {
  CommonFlags common;
  ModelFlags model;
  std::string output;
  std::vector<std::string> texts;
  std::int64_t clusters = 1024;
  std::string rope = "off";
  std::uint64_t seed = 0;
  bool force = false;
};

/// Prefills one text, cut to what the context holds, and gives its keys to the trainer.
std::int64_t add_text(const TrainFlags& flags, const std::shared_ptr<const Model>& model,
                      const std::string& path, CentroidTrainer& trainer) {
  std::vector<TokenId> tokens = model->tokenizer().encode(read_text(path), Tokenizer::Bos::as_template);
  ContextOptions options = context_options(flags.common, flags.model);
  const std::int64_t limit = flags.model.context > 0 ? flags.model.context : model->config().max_positions;
  if (limit < std::ssize(tokens)) {
    if (!flags.common.quiet)
      print_remark(fmt::format("{}: cut from {} tokens to the {} that the context holds (-c)", path,
                               tokens.size(), limit));
    tokens.resize(static_cast<std::size_t>(limit));
  }
  options.max_tokens = std::ssize(tokens);
  Context context(model, options);
  Progress progress(std::filesystem::path(path).filename().string(), std::ssize(tokens), "tokens",
                    flags.common.progress());
  context.prefill(tokens, [&](std::int64_t done) { progress.at(done); });
  const std::int64_t texts = std::ssize(flags.texts);
  const std::int64_t share = (flags.clusters * kTrainingKeysPerCentroid + texts - 1) / texts;
  trainer.add(context.impl().host_kv(), context.impl().rope, LocalWindow{}.sink, share, model->pool());
  return std::ssize(tokens);
}

void check_output(const TrainFlags& flags) {
  expect_no_context(flags.output);
  expect_apart(flags.output, flags.texts);
  expect_apart(flags.output, {flags.model.model});
  expect_new(flags.output, flags.force);
}

void run(const TrainFlags& flags) {
  check_output(flags);
  const auto model = load_model(flags.common, flags.model);
  const ModelConfig& config = model->config();
  expect_like_layers(config, "train kmeans");
  const bool roped = flags.rope == "on";
  CentroidTrainer trainer(config.layers, config.kv_heads, config.head_dim, roped, flags.seed);
  std::int64_t tokens = 0;
  for (const std::string& path : flags.texts) tokens += add_text(flags, model, path, trainer);
  {
    Progress progress("k-means", std::int64_t{config.layers} * config.kv_heads, "heads",
                      flags.common.progress());
    const auto centroids =
        trainer.train(flags.clusters, model->pool(), [&](std::int64_t done) { progress.at(done); });
    check_output(flags);
    write_centroids(flags.output, centroids, config.head_dim, roped, model->fingerprint());
  }
  const Json result = {{"file", flags.output},
                       {"method", "kmeans"},
                       {"clusters", flags.clusters},
                       {"rope", flags.rope},
                       {"texts", flags.texts.size()},
                       {"tokens", tokens},
                       {"keys_per_head", trainer.keys()},
                       {"file_bytes", std::filesystem::file_size(flags.output)}};
  if (flags.common.json) return print_json(result);
  print_text(fmt::format("{}: {} for each of {}, from {}, {}\nuse: -a kmeans:{}weights={}\n", flags.output,
                         counted(flags.clusters, "centroid"),
                         counted(config.layers * config.kv_heads, "head"), counted(tokens, "token"),
                         human_bytes(result["file_bytes"]), roped ? "rope=on," : "", flags.output));
}

}  // namespace

void add_train_kmeans(CLI::App& train) {
  auto flags = std::make_shared<TrainFlags>();
  CLI::App* verb =
      train.add_subcommand("kmeans", "Centroids of keys of other texts, for -a kmeans:weights=FILE");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, true);
  verb->add_option("-f,--file", flags->texts, "a text to train on (UTF-8); repeatable")->required();
  verb->add_option("-o,--output", flags->output, "the safetensors file to write")
      ->required()
      ->check(output_file());
  add_force_flag(*verb, flags->force);
  verb->add_option("--clusters", flags->clusters, "centroids per layer and KV head")
      ->check(whole_number(1, 1 << 20));
  verb->add_option("--rope", flags->rope, "train on keys after RoPE (on) or before it (off)")
      ->check(CLI::IsMember({"off", "on"}));
  verb->add_option("--seed", flags->seed, "of the sample and of the start")
      ->check(whole_number(0, INT64_MAX));
  verb->callback([flags] {
    say_unaudited(flags->common, flags->model, "training attends fully");
    run(*flags);
  });
}

}  // namespace lode::cli
