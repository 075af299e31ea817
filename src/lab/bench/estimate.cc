// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "engine/memory.h"
#include "gpu/backend.h"
#include "kv/store.h"
#include "lab/bench/decode.h"
#include "lab/bench/machines.h"
#include "lab/bench/prefill.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Keys behind which attention of a chunk is measured; beyond, its time grows in proportion.
constexpr std::int64_t kMeasuredKeys = 8192;
/// Operations that the measured chunk may take: a few seconds of a small machine.
constexpr double kMostOperations = 4e11;
/// A method is taken instead of full attention when it answers so much sooner.
constexpr double kWorthIt = 0.95;
/// Share of the far keys by which the rounds of a choice over machines are counted.
constexpr double kUsualBudget = 1.0 / 32;
/// Tokens of the answer by which methods are compared.
constexpr double kAnswerTokens = 128;

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Multiplications and additions of a token with the layers' weights.
double token_operations(const ModelConfig& c) {
  const double q = static_cast<double>(c.query_heads) * c.head_dim,
               kv = static_cast<double>(c.kv_heads) * c.head_dim, d = static_cast<double>(c.hidden);
  return 2.0 * c.layers * (d * (2 * q + 2 * kv) + 3.0 * d * static_cast<double>(c.intermediate));
}

/// Seconds of a token in a prefill chunk, what it attends to apart from its own chunk left out.
double seconds_per_token(const std::shared_ptr<const Model>& model, const EstimateOptions& options) {
  const ModelConfig& config = model->config();
  const auto most = static_cast<std::int64_t>(kMostOperations / token_operations(config));
  const std::int64_t chunk =
      std::min({options.tokens, std::int64_t{512}, std::max<std::int64_t>(most / 64 * 64, 64)});
  Context context(model, {.kv_type = options.kv_type,
                          .device = options.device,
                          .gpu_memory = options.gpu_memory,
                          .max_tokens = std::min(config.max_positions, 4 * chunk),
                          .chunk = chunk});
  std::vector<TokenId> ids(static_cast<std::size_t>(chunk));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<TokenId>(i * 37 % static_cast<std::size_t>(config.vocab));
  context.prefill(ids);  // pages and caches warm up
  double best = 1e30;
  for (int i = 0; i < 2; ++i) {
    context.roll_back(0);
    best = std::min(best, seconds_of([&] { context.prefill(ids); }));
  }
  return best / static_cast<double>(chunk);
}

/// Seconds of one layer's attention for one query token and one key before it, all heads; on the CPU.
double seconds_per_pair(const Model& model, const EstimateOptions& options) {
  const std::int64_t keys = std::min(options.tokens, kMeasuredKeys),
                     queries = std::min<std::int64_t>(keys, 512);
  PrefillBenchOptions bench = {
      .shape = model.config(), .context = keys, .tokens = queries, .kv_type = options.kv_type, .repeats = 3};
  const auto rows = bench_prefill(bench, model.pool());
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [](const PrefillBenchRow& row) { return row.what == "attention"; });
  LODE_ASSERT(found != rows.end());
  const double pairs =
      static_cast<double>(queries) * (static_cast<double>(keys) - static_cast<double>(queries) / 2);
  return found->median_ms / 1e3 / pairs;
}

/// Tokens that one of the machines has.
std::int64_t share_of_one(const EstimateOptions& options) {
  return (options.tokens + options.machines - 1) / options.machines;
}

MachinesModel machines_model(const Model& model, const EstimateOptions& options, double token_seconds,
                             double pair_seconds) {
  const ModelConfig& c = model.config();
  const KvShape shape = {.layers = c.layers,
                         .kv_heads = c.kv_heads,
                         .head_dim = c.head_dim,
                         .type = options.kv_type,
                         .max_tokens = options.tokens,
                         .recurrent = c.plan.recurrent_floats(),
                         .shared_rows = c.plan.latent.kv_rank > 0};
  return {{.layers = c.layers,
           .query_heads = c.query_heads,
           .head_dim = c.head_dim,
           .token_seconds = token_seconds,
           .pair_seconds = pair_seconds,
           .token_bytes = shape.token_bytes()},
          options.machines,
          options.link};
}

double prefill_seconds(const std::shared_ptr<const Model>& model, const EstimateOptions& options,
                       double& efficiency) {
  const auto n = static_cast<double>(options.tokens);
  if (options.device == Device::cuda) {
    const std::int64_t measured = std::min<std::int64_t>(options.tokens, 16384);
    const auto rows = bench_model_prefill(
        model, {.kv_type = options.kv_type, .device = options.device, .gpu_memory = options.gpu_memory},
        measured, 1, [](std::string_view) {});
    // Attention's share grows with the length; products do not.
    const double rate = n / rows.front().tokens_per_second;
    const ModelConfig& c = model->config();
    const double products = token_operations(c), pairs = 4.0 * c.layers * c.query_heads * c.head_dim / 2,
                 at = products + pairs * static_cast<double>(measured), all = products + pairs * n;
    return rate * all / at;
  }
  const MachinesModel::Prefill prefill =
      machines_model(*model, options, seconds_per_token(model, options), seconds_per_pair(*model, options))
          .prefill(options.tokens);
  efficiency = prefill.efficiency();
  return prefill.seconds;
}

/// Longest context that the memory holds for measuring steps; beyond, times grow in proportion.
std::int64_t measured_context(const Model& model, const EstimateOptions& options) {
  const std::int64_t room = model.config().max_positions - options.question - 64;
  return std::min(share_of_one(options), room);
}

void measure_methods(const std::shared_ptr<const Model>& model, const EstimateOptions& options,
                     std::span<const Spec> specs, const std::function<void(std::string_view)>& note,
                     Estimate& estimate) {
  const ModelConfig& config = model->config();
  const DecodeBenchOptions bench = {.context = measured_context(*model, options),
                                    .kv_type = options.kv_type,
                                    .device = options.device,
                                    .gpu_memory = options.gpu_memory,
                                    .kind = KvKind::clustered,
                                    .built_layers = std::min(config.layers, 2),
                                    .order_rows = false,
                                    .steps = 8,
                                    .question = options.question};
  const MachinesModel machines = machines_model(*model, options, 0, 0);
  for (const DecodeBenchRow& row : bench_decode(model, bench, specs, note)) {
    const double layers = static_cast<double>(config.layers) / bench.built_layers;
    const auto told = [&](std::int64_t tokens) {
      return machines.step_communication({.tokens = tokens,
                                          .chooses = row.attention != "full",
                                          .budget = kUsualBudget * static_cast<double>(options.tokens)});
    };
    estimate.methods.push_back({.attention = row.attention,
                                .index_seconds = row.build_seconds * layers,
                                .first_token_seconds = row.question_ms / 1e3 + told(options.question),
                                .ms_token = row.median_ms + 1e3 * told(1),
                                .ms_communication = 1e3 * told(1)});
  }
}

void recommend(Estimate& estimate) {
  const auto seconds = [](const MethodEstimate& m) {
    return m.first_token_seconds + kAnswerTokens * m.ms_token / 1e3;
  };
  const MethodEstimate& full = estimate.methods.front();
  const auto best = std::min_element(estimate.methods.begin(), estimate.methods.end(),
                                     [&](const auto& a, const auto& b) { return seconds(a) < seconds(b); });
  if (seconds(*best) >= kWorthIt * seconds(full)) {
    estimate.recommended = "full";
    estimate.why += "no method answers more than a twentieth sooner than full attention at this length";
    return;
  }
  estimate.recommended = best->attention;
  estimate.why += fmt::format(
      "an answer of {:.0f} tokens takes {:.2f} s under {}, {:.2f} s under full; how close its answers come "
      "is "
      "what `probe` and `eval` measure",
      kAnswerTokens, seconds(*best), best->attention, seconds(full));
}

/// Whether it fits, and what does not.
void judge_room(const Model& model, const EstimateOptions& options, Estimate& estimate) {
  std::vector<std::string> lacking;
  const auto gib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  const std::int64_t host = available_memory();
  if (host > 0 && estimate.host_bytes > host)
    lacking.push_back(fmt::format("{:.1f} GiB of memory are needed and {:.1f} are free",
                                  gib(estimate.host_bytes), gib(host)));
  if (options.device == Device::cuda) {
    const GpuInfo gpu = gpu_info();
    const std::int64_t room =
        options.gpu_memory > 0 ? std::min(options.gpu_memory, gpu.free_bytes) : gpu.free_bytes;
    if (model.weight_bytes() > room)
      lacking.push_back(fmt::format("the weights take {:.1f} GiB of GPU memory and {:.1f} are free",
                                    gib(model.weight_bytes()), gib(room)));
  }
  if (options.free_disk > 0 && estimate.file_bytes > options.free_disk)
    lacking.push_back(fmt::format("the file takes {:.1f} GiB and {:.1f} are free on the disk",
                                  gib(estimate.file_bytes), gib(options.free_disk)));
  estimate.fits = lacking.empty();
  for (const std::string& sentence : lacking) estimate.why += sentence + "; ";
}

}  // namespace

Estimate estimate_document(const std::shared_ptr<const Model>& model, const EstimateOptions& options,
                           std::span<const Spec> specs, const std::function<void(std::string_view)>& note) {
  const ModelConfig& config = model->config();
  if (options.tokens < 1 || options.question < 1)
    throw InputError(fmt::format(
        "estimate: expected a document and a question of at least one token each, found {} and {}",
        options.tokens, options.question));
  constexpr std::int64_t kMost = std::int64_t{1} << 31;  // tokens, over several machines
  const std::int64_t most = options.machines == 1 ? config.max_positions : kMost;
  if (options.tokens >= most || options.question >= most - options.tokens)
    throw InputError(
        fmt::format("expected a document and question of fewer than {} tokens{}, found {} and {}", most,
                    options.machines == 1 ? ", the model's context" : "", options.tokens, options.question));
  const bool too_long = options.tokens + options.question >= config.max_positions;
  Estimate estimate;
  if (options.machines > 1 && options.device == Device::cuda)
    throw InputError("over several machines: expected device cpu, found cuda");
  const MemoryPlan plan =
      plan_memory(*model, options.kv_type, share_of_one(options) + options.question, specs);
  estimate.host_bytes = plan.total();
  estimate.gpu_bytes = options.device == Device::cuda ? plan.weights + plan.kv : 0;
  estimate.file_bytes = plan.kv + plan.index;
  judge_room(*model, options, estimate);
  note("measuring prefill");
  estimate.prefill_seconds = prefill_seconds(model, options, estimate.prefill_efficiency);
  if (!estimate.fits) {
    estimate.recommended = "full";
    estimate.why.resize(estimate.why.size() - 2);
    return estimate;
  }
  measure_methods(model, options, specs, note, estimate);
  recommend(estimate);
  if (estimate.recommended != "full" && automatic_methods(*model, options.tokens).empty())
    estimate.why += "; `index` without -a leaves so short a text to full attention";
  if (too_long) {  // what machines would bring to a model that can read so much
    estimate.fits = false;
    estimate.why = fmt::format("the model reads {} tokens at most; {}", config.max_positions, estimate.why);
  }
  return estimate;
}

}  // namespace lode
