// SPDX-License-Identifier: Apache-2.0
// lodestone bench model: prompt and generation of a whole model, in the shape of llama.cpp's llama-bench.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "base/text.h"
#include "base/threads.h"
#include "cli.h"
#include "kernels/kernels.h"
#include "lab/bench/model.h"
#include "lodestone/error.h"
#include "saap_flags.h"

namespace lode::cli {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;

struct BenchModelFlags {
  CommonFlags common;
  std::vector<std::string> specs;
  std::string model, shape, kv_type = "f16", gpu_memory, prompts = "512", generated = "32", order = "auto";
  std::vector<std::string> contexts = {"0"};
  int repetitions = 3;
};

/// "0" is none.
std::vector<std::int64_t> prompts_of(const BenchModelFlags& flags) {
  std::vector<std::int64_t> prompts = parse_counts(flags.prompts, "--prompt", 0, kMostTokens);
  std::erase(prompts, 0);
  return prompts;
}

Json row_json(const ModelBenchRow& row) {
  Json samples = Json::array();
  for (std::size_t i = 0; i < row.seconds.size(); ++i) samples.push_back(row.tokens_per_second(i));
  return {{"test", row.test()},
          {"attention", row.attention},
          {"n_prompt", row.prompt},
          {"n_gen", row.generated},
          {"n_depth", row.depth},
          {"avg_ts", row.average()},
          {"stddev_ts", row.deviation()},
          {"samples_ts", samples},
          {"order", row.by_cluster ? "cluster" : "token"}};
}

void run(const BenchModelFlags& flags, bool random) {
  if (random != flags.model.empty())
    throw InputError("bench model: expected either -m MODEL or --random SHAPE");
  const Device device = device_of(flags.common, parse_dtype(flags.kv_type));
  expect_gpu(device, flags.gpu_memory, "auto", "");
  ModelBenchOptions options;
  options.depths.clear();
  for (const std::string& list : flags.contexts)
    for (const std::int64_t depth : parse_counts(list, "--context", 0, kMostTokens))
      options.depths.push_back(depth);
  options.prompts = prompts_of(flags);
  options.generated = parse_count(flags.generated, "--n-gen", 0, kMostTokens);
  options.repetitions = flags.repetitions;
  options.order = flags.order;
  options.context.kv_type = parse_dtype(flags.kv_type);
  options.context.device = device;
  if (!flags.gpu_memory.empty()) options.context.gpu_memory = parse_bytes(flags.gpu_memory, "--gpu-memory");
  if (options.prompts.empty() && options.generated == 0)
    throw InputError("bench model: expected a --prompt or an --n-gen above 0, found neither");
  const auto model = random ? Model::random(flags.shape, flags.common.threads, 1, device)
                            : Model::load(flags.model, flags.common.threads);
  const auto note = [quiet = flags.common.quiet](std::string_view text) {
    if (!quiet) std::cerr << text << "\n";
  };
  const auto rows = bench_model(model, options, parse_specs(flags.specs), note);
  const std::string name = random ? flags.shape : std::filesystem::path(flags.model).filename().string();
  const std::string backend = device == Device::cuda ? "CUDA" : "CPU";
  const int threads = model->pool().size();
  std::vector<std::vector<std::string>> lines = {
      {"model", "size", "backend", "threads", "kv", "attention", "test", "t/s"}};
  Json results = Json::array();
  for (const ModelBenchRow& row : rows) {
    results.push_back(row_json(row));
    lines.push_back({name, human_bytes(model->weight_bytes()), backend, std::to_string(threads),
                     flags.kv_type, row.attention, row.test(),
                     fmt::format("{:.2f} ± {:.2f}", row.average(), row.deviation())});
  }
  if (!flags.common.json) return print_text(text_table(lines));
  print_json({{"model", random ? flags.shape : flags.model},
              {"model_size", model->weight_bytes()},
              {"device", std::string(name_of(device))},
              {"isa", std::string(kernels().name)},
              {"n_threads", threads},
              {"kv_type", flags.kv_type},
              {"results", std::move(results)}});
}

}  // namespace

void add_bench_model(CLI::App& bench) {
  auto flags = std::make_shared<BenchModelFlags>();
  CLI::App& verb = *bench.add_subcommand(
      "model",
      "Prompt and generation of a whole model, tokens per second behind so many tokens, as llama-bench");
  add_common_flags(verb, flags->common);
  verb.add_option("-m,--model", flags->model, "model folder or .gguf file");
  auto* random =
      verb.add_option("--random", flags->shape, "random weights of a named shape, e.g. llama-3.2-1b");
  verb.add_option("-c,--context,-d,--n-depth", flags->contexts,
                  "depths: tokens behind which prompts and generated tokens come, e.g. 0 4k 8k")
      ->expected(1, 64);
  verb.add_option("-p,--prompt", flags->prompts, "tokens of a prompt, several with commas; 0 = none");
  verb.add_option("-n,--n-gen", flags->generated, "tokens generated; 0 = none");
  verb.add_option("-r,--repetitions", flags->repetitions, "of each test")->check(whole_number(1, 10'000));
  verb.add_option("--kv-type", flags->kv_type, "type of keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
  verb.add_option("--order", flags->order,
                  "order of keys and values in memory on the CPU: token, cluster (of a single saap, kmeans, "
                  "ivf or squeezed), or "
                  "auto: cluster where a single one is named, as ask has it for several questions")
      ->check(CLI::IsMember({"auto", "token", "cluster"}));
  verb.add_option("--gpu-memory", flags->gpu_memory, "limit of GPU memory, e.g. 24GiB")->check(byte_size());
  add_attention_flag(verb, flags->specs, false);
  verb.callback([flags, random] { run(*flags, random->count() > 0); });
}

}  // namespace lode::cli
