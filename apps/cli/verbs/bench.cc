// SPDX-License-Identifier: Apache-2.0
// lodestone bench attention | decode | prefill | growth | model: speed, always beside full attention and a measured
// limit, and what choosing costs as contexts grow.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "base/text.h"
#include "base/threads.h"
#include "bench_serve.h"
#include "cli.h"
#include "kernels/kernels.h"
#include "lab/bench/attention.h"
#include "lab/bench/decode.h"
#include "lab/bench/growth.h"
#include "lab/bench/prefill.h"
#include "lab/eval/audit_result.h"
#include "lodestone/error.h"
#include "saap_flags.h"

namespace lode::cli {

void add_bench_model(CLI::App& bench);  // bench_model.cc
void add_bench_batch(CLI::App& bench);  // bench_batch.cc

namespace {

struct BenchFlags {
  CommonFlags common;
  std::vector<std::string> specs;
  std::string shape = "llama-3.1-8b", model, kv_type = "f16", kind = "normal", gpu_memory, kv_tier = "auto";
  std::string active_memory, order = "cluster", all_reduce = "auto";
  SharingGpus gpus;
  std::int64_t context = 8192, batch = 1, queries = 1, tokens = 512, recall = 0, question = 0;
  double skew = 1.0, seconds = 2.0;
  std::optional<double> keep;
  double largest = 0;
  int steps = 32, built_layers = 0, repeats = 3;
  bool share = false;
  double audit = 0;

  KvKind kv_kind() const {
    return kind == "clustered" ? KvKind::clustered : kind == "ood" ? KvKind::ood : KvKind::normal;
  }
  std::int64_t gpu_bytes() const { return gpu_memory.empty() ? 0 : parse_bytes(gpu_memory, "--gpu-memory"); }
  std::int64_t active_bytes() const {
    return active_memory.empty() ? 0 : parse_bytes(active_memory, "--active-memory");
  }
  void expect_gpu_of(Device device) const {
    expect_gpu(device, gpu_memory, kv_tier, active_memory, gpus);
    if (all_reduce != "auto" && gpus.tensor_parallel == 1)
      throw InputError(
          "--all-reduce: expected --tensor-parallel of 2 and more, whose GPUs it tells how to sum, found "
          "none");
  }
  GpuSum gpu_sum() const {
    return all_reduce == "nccl" ? GpuSum::nccl : all_reduce == "peers" ? GpuSum::peers : GpuSum::automatic;
  }
  /// That --device names.
  Device device() const {
    const Device named = device_of(common, parse_dtype(kv_type));
    expect_gpu_of(named);
    return named;
  }
  /// The model of -m, else random weights of the shape.
  std::shared_ptr<const Model> load(Device device) const {
    return model.empty() ? Model::random(shape, common.threads, 1, device)
                         : Model::load(model, common.threads);
  }
  std::function<void(std::string_view)> note() const {
    return [quiet = common.quiet](std::string_view text) {
      if (!quiet) std::cerr << text << "\n";
    };
  }
};

constexpr std::int64_t kMostContext = std::int64_t{1} << 24;

void add_count(CLI::App& verb, const std::string& flag, std::int64_t& value, std::int64_t most,
               const std::string& help) {
  const std::string name = flag.substr(flag.find("--"));
  verb.add_option_function<std::string>(
          flag, [&value, name, most](const std::string& text) { value = parse_count(text, name, 1, most); },
          help)
      ->default_str(std::to_string(value));
}

void add_bench_flags(CLI::App& verb, BenchFlags& flags) {
  add_common_flags(verb, flags.common);
  add_count(verb, "-c,--context", flags.context, kMostContext, "keys of each sequence, e.g. 32k");
  verb.add_option("--kv-type", flags.kv_type, "type of keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
}

/// Where a whole model's keys and values lie.
void add_memory_flags(CLI::App& verb, BenchFlags& flags) {
  verb.add_option("--gpu-memory", flags.gpu_memory, "limit of GPU memory, e.g. 24GiB")->check(byte_size());
  verb.add_option("--kv-tier", flags.kv_tier,
                  "where a GPU's keys and values lie: auto (there, if they fit), gpu, or host (searched and "
                  "attended by the CPU beside the GPU's sink and window)")
      ->check(CLI::IsMember({"auto", "gpu", "host"}));
  add_active_memory_flag(verb, flags.active_memory);
  add_sharing_flags(verb, flags.gpus);
  verb.add_option("--all-reduce", flags.all_reduce,
                  "how GPUs of --tensor-parallel sum: auto (peers up to 64 KiB, NCCL above), peers (a kernel "
                  "that reads "
                  "the others' memory) or nccl")
      ->check(CLI::IsMember({"auto", "peers", "nccl"}));
}

void add_kv_flags(CLI::App& verb, BenchFlags& flags) {
  verb.add_option("--kv", flags.kind,
                  "made-up keys: normal (independent), clustered, or ood (queries apart from the keys, as "
                  "attention's are)")
      ->check(CLI::IsMember({"normal", "clustered", "ood"}));
  verb.add_option("--skew", flags.skew, "exponent of the cluster sizes (Zipf); 0 = all alike")
      ->check(number(0.0, 10.0));
}

Json header(const BenchFlags& flags, Device device, const ThreadPool& pool) {
  if (device == Device::cuda)
    return {{"device", "cuda"}, {"gpu", gpu_info().name}, {"kv_type", flags.kv_type}};
  return {{"device", "cpu"}, {"isa", kernels().name}, {"threads", pool.size()}, {"kv_type", flags.kv_type}};
}

void run_attention(const BenchFlags& flags) {
  if (flags.queries > flags.context)
    throw InputError(
        fmt::format("--queries: expected at most --context ({}), found {}", flags.context, flags.queries));
  ThreadPool pool(flags.common.threads);
  const DType kv_type = parse_dtype(flags.kv_type);
  const Device device = flags.device();
  if (device == Device::cuda && bytes_of(kv_type) <= 1)
    throw InputError("--kv-type: expected f32, f16 or bf16 with --device cuda, found " +
                     std::string(name_of(kv_type)));
  const AttentionBenchOptions options = {.shape = named_shape(flags.shape),
                                         .context = flags.context,
                                         .batch = flags.batch,
                                         .queries = flags.queries,
                                         .kv_type = kv_type,
                                         .kind = flags.kv_kind(),
                                         .skew = flags.skew,
                                         .largest = flags.largest,
                                         .keep = flags.keep,
                                         .recall = flags.recall,
                                         .seconds = flags.seconds,
                                         .order_rows = flags.order == "cluster",
                                         .progress = flags.common.progress()};
  if (device == Device::cuda && flags.recall > 0)
    throw InputError("--recall: expected the CPU's selectors, found --device cuda");
  const auto bench = device == Device::cuda ? bench_attention_gpu : bench_attention;
  const auto rows = bench(options, parse_specs(flags.specs), pool, flags.note());
  if (!flags.common.json) {
    const std::string where = device == Device::cuda
                                  ? gpu_info().name
                                  : fmt::format("{}, {}", counted(pool.size(), "thread"), kernels().name);
    print_text(fmt::format(
        "{} · {} · batch {} · queries {} · KV {} · {}\n"
        "apart: of a call that waits for the one before; limit: a plain read of as many\n"
        "bytes; index s: of 10,000 keys\n",
        flags.shape, counted(flags.context, "key"), flags.batch, flags.queries, flags.kv_type, where));
  }
  std::vector<std::vector<std::string>> lines = {{"attention", "far keys", "median us", "apart", "select",
                                                  "attend", "merge", "bytes", "of limit", "x full",
                                                  "index s"}};
  Json results = Json::array();
  for (const AttentionBenchRow& row : rows) {
    const double of_limit = row.limit_us / row.median_us, vs_full = rows.front().median_us / row.median_us;
    const double build = row.build_seconds * 1e4 / static_cast<double>(flags.context);
    results.push_back({{"attention", row.attention},
                       {"context", flags.context},
                       {"batch", flags.batch},
                       {"queries", flags.queries},
                       {"selectivity", row.selectivity},
                       {"median_us", row.median_us},
                       {"apart_us", row.apart_us},
                       {"select_us", row.select_us},
                       {"attend_us", row.attend_us},
                       {"merge_us", row.merge_us},
                       {"bytes", row.bytes},
                       {"limit_us", row.limit_us},
                       {"of_limit", of_limit},
                       {"vs_full", vs_full},
                       {"build_seconds_per_10k", build}});
    const bool held = flags.recall > 0 && &row != &rows.front();  // `full` chooses nothing
    if (held) {
      results.back()["recall"] = row.recall;
      results.back()["scanned"] = row.scanned;
    }
    lines.push_back(
        {row.attention, fmt::format("{:.2f} %", 100 * row.selectivity), fmt::format("{:.1f}", row.median_us),
         fmt::format("{:.1f}", row.apart_us), fmt::format("{:.1f}", row.select_us),
         fmt::format("{:.1f}", row.attend_us), fmt::format("{:.1f}", row.merge_us), human_bytes(row.bytes),
         fmt::format("{:.2f}", of_limit), fmt::format("{:.2f}", vs_full), fmt::format("{:.4f}", build)});
    if (held)
      lines.push_back({fmt::format("    recall {:.4f}, scanned {:.2f} %", row.recall, 100 * row.scanned)});
  }
  if (!flags.common.json) print_text(text_table(lines));
  Json result = header(flags, device, pool);
  result["shape"] = flags.shape;
  result["results"] = std::move(results);
  if (flags.common.json) print_json(result);
}

Json decode_json(const DecodeBenchRow& row, const BenchFlags& flags, double vs_full) {
  Json json = {{"attention", row.attention},
               {"context", flags.context},
               {"batch", 1},
               {"median_us", 1e3 * row.median_ms},
               {"tokens_per_second", row.tokens_per_second},
               {"density", row.density},
               {"selectivity", row.selectivity},
               {"vs_full", vs_full},
               {"build_seconds", row.build_seconds},
               {"index_bytes", row.index_bytes}};
  if (const TierWork& t = row.tiers; t.host_keys + t.gpu_keys > 0) {
    json["tiers"] = {{"bytes_to_host", t.bytes_to_host},
                     {"bytes_to_gpu", t.bytes_to_gpu},
                     {"host_keys", t.host_keys},
                     {"gpu_keys", t.gpu_keys},
                     {"active_keys", t.active_keys},
                     {"active_hits", t.active_hits},
                     {"active_bytes", t.active_bytes},
                     {"search_us", 1e6 * t.search_seconds},
                     {"attend_us", 1e6 * t.attend_seconds},
                     {"wait_us", 1e6 * t.wait_seconds}};
  }
  if (row.sum_us > 0) {
    json["gpus"] = flags.gpus.count();
    json["context_parallel"] = flags.gpus.context_parallel;
    json["sum_us"] = row.sum_us;
    json["sum_share"] = row.sum_us / (1e3 * row.median_ms);
  }
  if (row.recall.wanted > 0) {
    json["recall"] = row.recall.recall();
    json["scanned"] = row.recall.scanned();
  }
  if (row.question_ms > 0) {
    json["question"] = {{"ms", row.question_ms},
                        {"density", row.question_density},
                        {"selectivity", row.question_selectivity}};
  }
  put_audit(json, row.work);
  return json;
}

/// What the host and the GPU did of a token, what a search found, and how long a question took.
std::string decode_details(const DecodeBenchRow& row) {
  std::string text;
  if (const TierWork& t = row.tiers; t.host_keys + t.gpu_keys > 0) {
    const double rest = row.median_ms - 1e3 * (t.search_seconds + t.attend_seconds);
    text += fmt::format(
        "    ms: host searches {:.2f}, attends {:.2f}, rest {:.2f} (host waits for the GPU "
        "{:.2f});\n        {} bytes down, {} up\n",
        1e3 * t.search_seconds, 1e3 * t.attend_seconds, rest, 1e3 * t.wait_seconds, t.bytes_to_host,
        t.bytes_to_gpu);
    if (t.active_keys > 0)
      text += fmt::format("    active on the GPU: {} keys, {} of the found rows, {} bytes moved\n",
                          t.active_keys, t.active_hits, t.active_bytes);
  }
  if (row.sum_us > 0)
    text += fmt::format("    sums and merges over GPUs alone: {:.0f} us, {:.1f} % of the step\n", row.sum_us,
                        row.sum_us / (10 * row.median_ms));
  if (row.recall.wanted > 0)
    text +=
        fmt::format("    recall {:.4f}, scanned {:.2f} %\n", row.recall.recall(), 100 * row.recall.scanned());
  if (row.question_ms > 0)
    text += fmt::format("    question read in {:.1f} ms, density {:.2f} %, far keys {:.2f} %\n",
                        row.question_ms, 100 * row.question_density, 100 * row.question_selectivity);
  return text;
}

void run_decode(const BenchFlags& flags, bool random) {
  if (random != flags.model.empty())
    throw InputError("bench decode: expected either -m MODEL or --random SHAPE");
  if (flags.share && flags.built_layers == 0)
    throw InputError("--share: expected --built-layers N beside it, found none");
  const DType kv_type = parse_dtype(flags.kv_type);
  const Device device = flags.device();
  const auto model = flags.load(device);
  if (flags.built_layers > model->config().layers)
    throw InputError(fmt::format("--built-layers: expected at most the model's {} layers, found {}",
                                 model->config().layers, flags.built_layers));
  const DecodeBenchOptions options = {.context = flags.context,
                                      .kv_type = kv_type,
                                      .device = device,
                                      .gpu_memory = flags.gpu_bytes(),
                                      .gpus = flags.gpus.numbers(),
                                      .context_parallel = flags.gpus.context_parallel,
                                      .gpu_sum = flags.gpu_sum(),
                                      .kv_tier = parse_kv_tier(flags.kv_tier),
                                      .active_memory = flags.active_bytes(),
                                      .kind = flags.kv_kind(),
                                      .skew = flags.skew,
                                      .built_layers = flags.built_layers,
                                      .share = flags.share,
                                      .order_rows = flags.order == "cluster",
                                      .recall = flags.recall,
                                      .steps = flags.steps,
                                      .question = flags.question,
                                      .audit = flags.audit};
  const auto rows = bench_decode(model, options, parse_specs(flags.specs), flags.note());
  Json results = Json::array();
  if (!flags.common.json) {
    if (flags.built_layers > 0)
      print_text(fmt::format("keys and indexes of {}, which the others {}\n",
                             counted(flags.built_layers, "layer"), flags.share ? "use as well" : "copy"));
  }
  std::vector<std::vector<std::string>> lines = {
      {"attention", "ms/token", "tokens/s", "density", "far keys", "x full", "index s", "index"}};
  for (const DecodeBenchRow& row : rows) {
    const double vs_full = rows.front().median_ms / row.median_ms;
    results.push_back(decode_json(row, flags, vs_full));
    if (const std::string audit = audit_remark(row.work); !audit.empty() && !flags.common.quiet)
      std::cerr << row.attention << audit << "\n";
    lines.push_back({row.attention, fmt::format("{:.2f}", row.median_ms),
                     fmt::format("{:.1f}", row.tokens_per_second), fmt::format("{:.2f} %", 100 * row.density),
                     fmt::format("{:.2f} %", 100 * row.selectivity), fmt::format("{:.2f}", vs_full),
                     fmt::format("{:.2f}", row.build_seconds), human_bytes(row.index_bytes)});
    if (std::string details = decode_details(row); !details.empty()) {
      details.pop_back();  // the table ends lines itself
      lines.push_back({std::move(details)});
    }
  }
  if (!flags.common.json) print_text(text_table(lines));
  Json result = header(flags, options.device, model->pool());
  result["model"] = random ? flags.shape : flags.model;
  if (flags.built_layers > 0) {
    result["built_layers"] = flags.built_layers;
    result["shared"] = flags.share;
  }
  result["results"] = std::move(results);
  if (flags.common.json) print_json(result);
}

void print_prefill(const BenchFlags& flags, Json result, const std::vector<PrefillBenchRow>& rows,
                   std::int64_t tokens) {
  result["results"] = Json::array();
  for (const PrefillBenchRow& row : rows) {
    result["results"].push_back({{"what", row.what},
                                 {"context", flags.context},
                                 {"tokens", tokens},
                                 {"median_us", 1e3 * row.median_ms},
                                 {"gflops", row.gflops},
                                 {"of_gemm", row.of_gemm}});
    std::string rate;
    if (row.tokens_per_second > 0) {
      result["results"].back()["tokens_per_second"] = row.tokens_per_second;
      rate = fmt::format(" {:>10.0f} tokens/s", row.tokens_per_second);
    }
    if (!flags.common.json)
      print_text(fmt::format("{:20} {:>10.2f} ms {:>9.1f} GFLOP/s {:>6.2f} of the GEMM{}\n", row.what,
                             row.median_ms, row.gflops, row.of_gemm, rate));
  }
  if (flags.common.json) print_json(result);
}

void run_model_prefill(const BenchFlags& flags) {
  const DType kv_type = parse_dtype(flags.kv_type);
  const Device device = flags.device();
  const bool random = flags.model.empty();
  const auto model = flags.load(device);
  const ContextOptions options = {.kv_type = kv_type,
                                  .device = device,
                                  .gpu_memory = flags.gpu_bytes(),
                                  .kv_tier = parse_kv_tier(flags.kv_tier),
                                  .gpus = flags.gpus.numbers(),
                                  .context_parallel = flags.gpus.context_parallel,
                                  .gpu_sum = flags.gpu_sum(),
                                  .active_memory = flags.active_bytes()};
  Json result = header(flags, device, model->pool());
  result["model"] = random ? flags.shape : flags.model;
  print_prefill(flags, std::move(result),
                bench_model_prefill(model, options, flags.context, flags.repeats, flags.note()),
                flags.context);
}

void run_prefill(const BenchFlags& flags) {
  if (flags.tokens > flags.context)
    throw InputError(
        fmt::format("--tokens: expected at most --context ({}), found {}", flags.context, flags.tokens));
  flags.expect_gpu_of(Device::cpu);
  ThreadPool pool(flags.common.threads);
  const PrefillBenchOptions options = {.shape = named_shape(flags.shape),
                                       .context = flags.context,
                                       .tokens = flags.tokens,
                                       .kv_type = parse_dtype(flags.kv_type)};
  Json result = header(flags, Device::cpu, pool);
  result["shape"] = flags.shape;
  print_prefill(flags, std::move(result), bench_prefill(options, pool), flags.tokens);
}

void run_growth(const BenchFlags& flags, const std::string& contexts, std::int64_t kept) {
  if (flags.common.device == "cuda") throw InputError("bench growth: expected --device cpu, found cuda");
  flags.expect_gpu_of(Device::cpu);
  ThreadPool pool(flags.common.threads);
  const GrowthBenchOptions options = {.shape = named_shape(flags.shape),
                                      .contexts = parse_counts(contexts, "--contexts", 1, kMostContext),
                                      .kept = kept,
                                      .kv_type = parse_dtype(flags.kv_type),
                                      .kind = flags.kv_kind(),
                                      .skew = flags.skew,
                                      .seconds = flags.seconds};
  const auto rows = bench_growth(options, flags.specs, pool, flags.note());
  std::vector<std::vector<std::string>> lines = {
      {"attention", "context", "kept", "mass", "bytes", "x first", "compared", "median us", "index s"}};
  Json results = Json::array();
  for (const GrowthBenchRow& row : rows) {
    const auto first = std::find_if(rows.begin(), rows.end(), [&](const GrowthBenchRow& other) {
      return other.attention == row.attention;
    });
    const double growth = static_cast<double>(row.bytes) / static_cast<double>(first->bytes);
    results.push_back({{"attention", row.attention},
                       {"context", row.context},
                       {"kept", row.kept},
                       {"mass", row.mass},
                       {"bytes", row.bytes},
                       {"growth", growth},
                       {"compared", row.scored},
                       {"median_us", row.median_us},
                       {"build_seconds", row.build_seconds}});
    lines.push_back({row.attention, std::to_string(row.context), fmt::format("{:.1f}", row.kept),
                     fmt::format("{:.4f}", row.mass), human_bytes(row.bytes), fmt::format("{:.2f}", growth),
                     fmt::format("{}", row.scored), fmt::format("{:.1f}", row.median_us),
                     fmt::format("{:.1f}", row.build_seconds)});
  }
  if (!flags.common.json)
    print_text(fmt::format("{} · {}, {}\n{}", flags.shape, counted(pool.size(), "thread"), kernels().name,
                           text_table(lines)));
  Json result = header(flags, Device::cpu, pool);
  result["shape"] = flags.shape;
  result["results"] = std::move(results);
  if (flags.common.json) print_json(result);
}

void add_order_flag(CLI::App& verb, BenchFlags& flags) {
  verb.add_option("--order", flags.order,
                  "order of keys and values in memory, on the CPU and for a single method: cluster (the "
                  "method's, if it has one) or token")
      ->check(CLI::IsMember({"cluster", "token"}));
}

void add_attention(CLI::App& bench) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App& verb =
      *bench.add_subcommand("attention", "One layer's attention, beside full and beside plain reads");
  add_bench_flags(verb, *flags);
  add_kv_flags(verb, *flags);
  add_attention_flag(verb, flags->specs, false);
  add_order_flag(verb, *flags);
  verb.add_option("--shape", flags->shape,
                  "llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap, or e.g. L32q32kv8d128");
  add_count(verb, "--batch", flags->batch, 1024, "sequences per call");
  add_count(verb, "--queries", flags->queries, 4096, "query tokens per sequence");
  verb.add_option(
          "--largest", flags->largest,
          "one bucket of the made-up artefact of the first -a saap holds this share of the keys, and every "
          "query attends it; further ones stay even, to be held against it; 0 = all do")
      ->check(number(0.0, 0.9));
  verb.add_option("--keep", flags->keep, "share of the far keys that selections are cut or filled to, 0 to 1")
      ->check(number(0.0, 1.0));
  verb.add_option_function<std::string>(
          "--recall",
          [flags](const std::string& text) {
            flags->recall = parse_count(text, "--recall", 1, kMostContext);
          },
          "also the share of so many best far keys that are chosen, and of keys scanned for it")
      ->default_str("");
  verb.add_option("--seconds", flags->seconds, "measuring time per spec, roughly")
      ->check(number(0.01, 600.0));
  verb.callback([flags, &verb] {
    const auto is_saap = [](const std::string& spec) { return spec.starts_with("saap"); };
    expect_beside(verb, {"--largest"}, std::any_of(flags->specs.begin(), flags->specs.end(), is_saap),
                  "-a saap");
    run_attention(*flags);
  });
}

void add_decode(CLI::App& bench) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App& verb = *bench.add_subcommand("decode", "Whole decode steps of a model");
  add_bench_flags(verb, *flags);
  add_memory_flags(verb, *flags);
  add_kv_flags(verb, *flags);
  add_attention_flag(verb, flags->specs, false);
  add_order_flag(verb, *flags);
  verb.add_option("-m,--model", flags->model,
                  "folder with config.json, tokenizer.json and *.safetensors, or a .gguf file");
  auto* random =
      verb.add_option("--random", flags->shape, "random weights of a named shape, e.g. llama-3.2-1b")
          ->default_str("");
  verb.add_option("--built-layers", flags->built_layers,
                  "layers whose keys are made and indexed, the others copy theirs in turn; 0 = all")
      ->check(whole_number(0, 4096));
  verb.add_flag("--share", flags->share,
                "with --built-layers: the others use the same memory instead of copies, for contexts that "
                "memory would not hold");
  add_count(verb, "--recall", flags->recall, 1 << 20,
            "how many of so many best far keys are chosen, and keys compared with a query for it, with --kv "
            "ood where the host chooses; not timed");
  verb.add_option("-n,--steps", flags->steps, "decode steps measured per spec")
      ->check(whole_number(1, 100'000));
  add_count(verb, "--question", flags->question, 1 << 16,
            "also time how long a question of so many tokens takes to read");
  verb.add_option("--audit", flags->audit,
                  "share of the warm-up's sparse attention calls that are also computed exactly, 0 to 1")
      ->check(number(0.0, 1.0));
  verb.callback([flags, random, &verb] {
    expect_beside(verb, {"--recall"}, flags->kind == "ood", "--kv ood");
    run_decode(*flags, random->count() > 0);
  });
}

void add_prefill(CLI::App& bench) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App& verb = *bench.add_subcommand(
      "prefill", "Prefill attention and GEMM, or a whole model's prefill, beside a library's bf16 GEMM");
  add_bench_flags(verb, *flags);
  add_memory_flags(verb, *flags);
  verb.add_option("--shape", flags->shape,
                  "llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap, or e.g. L32q32kv8d128");
  add_count(verb, "--tokens", flags->tokens, 1 << 20, "query tokens of the chunk");
  auto* model =
      verb.add_option("-m,--model", flags->model,
                      "instead of parts on the CPU: the whole model in this folder, --context tokens");
  auto* random = verb.add_option("--random", flags->shape,
                                 "instead of parts on the CPU: random weights of a named shape")
                     ->default_str("")
                     ->excludes(model);
  verb.add_option("--repeats", flags->repeats, "how often a whole model reads the text")
      ->check(whole_number(1, 1000));
  verb.callback([flags, model, random, &verb] {
    const bool whole = model->count() + random->count() > 0;
    expect_use(verb, {"--shape", "--tokens"}, !whole, "expected parts of a prefill, found a whole model");
    expect_use(verb, {"--repeats"}, whole, "expected a whole model (-m, --random), found parts of a prefill");
    if (whole)
      run_model_prefill(*flags);
    else
      run_prefill(*flags);
  });
}

void add_growth(CLI::App& bench) {
  auto flags = std::make_shared<BenchFlags>();
  flags->shape = "L1q4kv1d64", flags->kind = "clustered";
  auto contexts = std::make_shared<std::string>("16k,64k,256k");
  auto kept = std::make_shared<std::int64_t>(1024);
  CLI::App& verb = *bench.add_subcommand(
      "growth", "Bytes and time of choosing as many keys from longer and longer contexts, on the CPU");
  add_common_flags(verb, flags->common);
  add_kv_flags(verb, *flags);
  add_attention_flag(verb, flags->specs, true);
  verb.add_option("--kv-type", flags->kv_type, "type of keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
  verb.add_option("--shape", flags->shape,
                  "llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap, or e.g. L32q32kv8d128");
  verb.add_option("--contexts", *contexts, "keys, e.g. 16k,64k,256k,1M,4M");
  add_count(verb, "--kept", *kept, 1 << 20, "keys that a query keeps, where specs have a sparsity");
  verb.add_option("--seconds", flags->seconds, "measuring time per spec and context, roughly")
      ->check(number(0.01, 600.0));
  verb.callback([flags, contexts, kept] { run_growth(*flags, *contexts, *kept); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App& bench = *app.add_subcommand("bench", "Speed of attention, decode, prefill and training");
  bench.require_subcommand(1);
  add_attention(bench);
  add_decode(bench);
  add_prefill(bench);
  add_growth(bench);
  add_bench_model(bench);
  add_bench_batch(bench);
  add_bench_train_saap(bench);
  add_bench_serve(bench);
}

}  // namespace lode::cli
