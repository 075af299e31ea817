// SPDX-License-Identifier: Apache-2.0
// lodestone bench batch: many sequences over one or more documents at once, through the scheduler.
#include <fmt/format.h>

#include <iostream>

#include "base/text.h"
#include "base/threads.h"
#include "cli.h"
#include "kernels/kernels.h"
#include "lab/bench/batch.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

struct BatchFlags {
  CommonFlags common;
  BatchBenchOptions options;
  std::vector<std::string> specs;
  std::string model, shape, kv_type = "bf16", kind = "normal", context = "8192", prefill = "0", gpu_memory;
};

void run(BatchFlags flags) {
  if (flags.model.empty() == flags.shape.empty())
    throw InputError("bench batch: expected either -m MODEL or --random SHAPE");
  BatchBenchOptions& options = flags.options;
  options.device = flags.common.device == "cuda" ? Device::cuda : Device::cpu;
  if (options.device == Device::cuda && flags.kind != "normal")
    throw InputError("--kv: expected normal with --device cuda, found " + flags.kind);
  expect_gpu(options.device, flags.gpu_memory, "auto", "");
  if (!flags.gpu_memory.empty()) options.gpu_memory = parse_bytes(flags.gpu_memory, "--gpu-memory");
  options.context = parse_count(flags.context, "--context", 1, std::int64_t{1} << 24);
  options.prefill = parse_count(flags.prefill, "--prefill", 0, std::int64_t{1} << 24);
  options.kv_type = parse_dtype(flags.kv_type);
  options.kind = flags.kind == "clustered" ? KvKind::clustered
                 : flags.kind == "ood"     ? KvKind::ood
                                           : KvKind::normal;
  if (options.documents > options.sequences)
    throw InputError(fmt::format("--documents: expected at most one for each of the {} sequences, found {}",
                                 options.sequences, options.documents));
  const auto model = flags.model.empty() ? Model::random(flags.shape, flags.common.threads, 1, options.device)
                                         : Model::load(flags.model, flags.common.threads);
  if (flags.specs.empty()) flags.specs.push_back("full");
  const auto rows = bench_batch(model, options, parse_specs(flags.specs), [&](std::string_view text) {
    if (!flags.common.quiet) std::cerr << text << "\n";
  });
  Json results = Json::array();
  std::vector<std::vector<std::string>> lines = {
      {"attention", "ms/step", "tokens/s", "bytes", "limit ms", "read together by"}};
  for (const BatchBenchRow& row : rows) {
    results.push_back({{"attention", row.attention},
                       {"context", options.context},
                       {"documents", options.documents},
                       {"sequences", options.sequences},
                       {"tokens_per_second", row.tokens_per_second},
                       {"ms_step", row.ms_step},
                       {"bytes", row.bytes},
                       {"limit_ms", row.limit_ms},
                       {"shared", row.shared}});
    if (options.prefill > 0)
      results.back()["prefill"] = {{"tokens", options.prefill},
                                   {"seconds", row.beside.seconds},
                                   {"alone_seconds", row.beside.alone_seconds},
                                   {"ms_step", row.beside.ms_step},
                                   {"longest_ms_step", row.beside.longest_ms_step}};
    lines.push_back({row.attention, fmt::format("{:.2f}", row.ms_step),
                     fmt::format("{:.1f}", row.tokens_per_second), human_bytes(row.bytes),
                     fmt::format("{:.2f}", row.limit_ms), std::to_string(row.shared)});
  }
  for (const BatchBenchRow& row : rows)
    if (options.prefill > 0)
      lines.push_back(
          {fmt::format("{}: a document of {} tokens read beside in {:.1f} s, alone in {:.1f} s; steps "
                       "meanwhile {:.2f} ms, the longest {:.2f} ms",
                       row.attention, options.prefill, row.beside.seconds, row.beside.alone_seconds,
                       row.beside.ms_step, row.beside.longest_ms_step)});
  if (!flags.common.json) return print_text(text_table(lines));
  print_json({{"device", name_of(options.device)},
              {"isa", kernels().name},
              {"threads", model->pool().size()},
              {"kv_type", flags.kv_type},
              {"model", flags.model.empty() ? flags.shape : flags.model},
              {"results", std::move(results)}});
}

}  // namespace

void add_bench_batch(CLI::App& bench) {
  auto flags = std::make_shared<BatchFlags>();
  CLI::App& verb = *bench.add_subcommand("batch", "Many sequences at once, over one document or more");
  add_common_flags(verb, flags->common);
  verb.add_option("-m,--model", flags->model, "folder with config.json, tokenizer.json and *.safetensors");
  verb.add_option("--random", flags->shape, "random weights of a named shape, e.g. llama-3.2-1b");
  verb.add_option("-c,--context", flags->context, "tokens of each document, e.g. 32k");
  verb.add_option("--documents", flags->options.documents, "documents that the sequences take in turn")
      ->check(whole_number(1, 1024));
  verb.add_option("--sequences", flags->options.sequences, "sequences that generate at once")
      ->check(whole_number(1, 1024));
  verb.add_option("--tail", flags->options.tail, "tokens of each sequence's own; they differ")
      ->check(whole_number(1, 1 << 16));
  verb.add_flag("--mixed", flags->options.mixed, "one run in which the specs alternate among the sequences");
  verb.add_option("--prefill", flags->prefill,
                  "tokens of a document that is read beside the sequences and once more alone, e.g. 32k");
  verb.add_option("-n,--steps", flags->options.steps, "steps measured per spec")
      ->check(whole_number(1, 100'000));
  verb.add_option("--kv-type", flags->kv_type, "type of keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
  verb.add_option("--gpu-memory", flags->gpu_memory, "limit of GPU memory, e.g. 24GiB")->check(byte_size());
  verb.add_option("--kv", flags->kind, "made-up keys: normal (independent), clustered, or ood")
      ->check(CLI::IsMember({"normal", "clustered", "ood"}));
  add_attention_flag(verb, flags->specs, false);
  verb.callback([flags] { run(*flags); });
}

}  // namespace lode::cli
