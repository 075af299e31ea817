// SPDX-License-Identifier: Apache-2.0
// lodestone bench train-saap: seconds that training takes of one head, step by step.
#include <fmt/format.h>

#include "base/text.h"
#include "base/threads.h"
#include "lab/bench/saap.h"
#include "model/config.h"
#include "saap_flags.h"

namespace lode::cli {

namespace {

struct BenchTrainSaapFlags {
  CommonFlags common;
  std::string shape = "llama-3.1-8b", kind = "clustered", context = "128k";
  bool constant_rate = false;
  SaapBenchOptions options;
};

std::vector<std::pair<const char*, double>> phases_of(const SaapBenchResult& r) {
  return {{"k-means", r.kmeans}, {"labels", r.labels},   {"targets", r.targets},
          {"steps", r.steps},    {"measure", r.measure}, {"a_head", r.seconds()}};
}

Json json_of(const BenchTrainSaapFlags& flags, const SaapBenchResult& r) {
  const SaapMeasures& m = r.measures;
  Json seconds = Json::object();
  for (const auto& [what, spent] : phases_of(r)) seconds[what] = spent;
  return {{"device", flags.options.device == Device::cuda ? "cuda" : "cpu"},
          {"device_name", r.device},
          {"shape", flags.shape},
          {"results",
           {{{"context", flags.options.context},
             {"prompts", flags.options.prompts},
             {"settings", flags.options.settings.json()},
             {"examples", r.examples},
             {"queries_scored", r.looked_at},
             {"seconds", seconds},
             {"first_loss", r.first_loss},
             {"train_loss", r.train_loss},
             {"loss", m.loss},
             {"mass", m.chosen.mass},
             {"selectivity", m.chosen.selectivity},
             {"kmeans_mass", m.kmeans.mass},
             {"kmeans_selectivity", m.kmeans.selectivity},
             {"best_mass", m.best.mass}}}}};
}

std::string text_of(const BenchTrainSaapFlags& flags, const SaapBenchResult& r) {
  const SaapBenchOptions& o = flags.options;
  const SaapMeasures& m = r.measures;
  std::string text = fmt::format("{} · {} of {}, {} to test on · {}, hidden {} · {}\n", flags.shape,
                                 counted(o.prompts, "prompt"), counted(o.context, "key"), o.settings.held_out,
                                 counted(o.settings.clusters, "bucket"), o.settings.hidden, r.device);
  for (const auto& [what, spent] : phases_of(r)) text += fmt::format("{:10} {:>10.3f} s\n", what, spent);
  text += fmt::format("(making the vectors took {:.1f} s and is not counted)\n", r.made);
  text += fmt::format("{} of {} scored; {} of {}, {:.1f} us a step\n", counted(r.examples, "example"),
                      counted(r.looked_at, "query", "queries"), counted(o.settings.steps, "step"),
                      counted(o.settings.batch, "query", "queries"),
                      1e6 * r.steps / static_cast<double>(o.settings.steps));
  text += fmt::format("loss in nats: first batch {:.4f}, last batches {:.4f}, held out {:.4f}\n",
                      r.first_loss, r.train_loss, m.loss);
  return text +
         fmt::format(
             "{} {:.4f} of the attention in {:.2f} % of the keys (k-means {:.4f} in {:.2f} %, "
             "best {:.4f})\n",
             o.settings.probes == 1 ? "1 bucket holds" : fmt::format("{} buckets hold", o.settings.probes),
             m.chosen.mass, 100 * m.chosen.selectivity, m.kmeans.mass, 100 * m.kmeans.selectivity,
             m.best.mass);
}

void run(BenchTrainSaapFlags& flags) {
  SaapBenchOptions& o = flags.options;
  o.shape = named_shape(flags.shape);
  o.context = parse_count(flags.context, "--context", 16, std::int64_t{1} << 24);
  o.kind = flags.kind == "clustered" ? KvKind::clustered : flags.kind == "ood" ? KvKind::ood : KvKind::normal;
  o.device = device_of(flags.common, DType::f16);
  o.settings.decay = !flags.constant_rate;
  ThreadPool pool(flags.common.threads);
  const SaapBenchResult result = bench_saap_training(o, pool, [&](std::string_view what) {
    if (!flags.common.quiet) print_remark(what);
  });
  if (flags.common.json) return print_json(json_of(flags, result));
  print_text(text_of(flags, result));
}

}  // namespace

void add_bench_train_saap(CLI::App& bench) {
  auto flags = std::make_shared<BenchTrainSaapFlags>();
  SaapBenchOptions& o = flags->options;
  CLI::App& verb = *bench.add_subcommand(
      "train-saap", "What `train saap` takes of one KV head on made-up prompts, step by step");
  add_common_flags(verb, flags->common);
  verb.add_option("--shape", flags->shape,
                  "llama-3.1-8b, llama-2-7b, llama-3.2-1b, pocket, saap, or e.g. L32q32kv8d128");
  verb.add_option("-c,--context", flags->context, "tokens of each prompt, e.g. 32k");
  verb.add_option("--prompts", o.prompts, "prompts to train on; one more is tested on")
      ->check(whole_number(1, 1 << 20));
  verb.add_option("--kv", flags->kind,
                  "made-up keys: normal (independent), clustered, or ood (queries apart from the keys)")
      ->check(CLI::IsMember({"normal", "clustered", "ood"}));
  verb.add_option("--skew", o.skew, "exponent of the cluster sizes (Zipf); 0 = all alike")
      ->check(number(0.0, 10.0));
  verb.add_option("--window", o.settings.filter.window, "pairs nearer than this are not far")
      ->check(whole_number(1, 1 << 30));
  verb.add_option("--distance", o.settings.filter.distance, "how far the best key of a query must be")
      ->check(whole_number(0, 1 << 30));
  add_saap_training_flags(verb, o.settings);
  verb.add_flag("--constant-rate", flags->constant_rate, "no decay of the rate");
  verb.callback([flags] { run(*flags); });
}

}  // namespace lode::cli
