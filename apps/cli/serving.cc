// SPDX-License-Identifier: Apache-2.0
#include "serving.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "cluster/rank_prefill.h"
#include "cluster/save_shards.h"
#include "engine/batch.h"
#include "engine/memory.h"
#include "gpu/backend.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "ranks.h"
#include "serve/engine/gpu_shares.h"
#include "serve/engine/models.h"

namespace lode::cli {

namespace {

/// Bytes that the flag says; 0: it was not given.
std::int64_t asked_memory(const ServingFlags& flags) {
  return flags.cache_memory.empty() ? 0 : parse_bytes(flags.cache_memory, "--cache-memory");
}

std::int64_t host_memory(const ServingFlags& flags) {
  if (const std::int64_t asked = asked_memory(flags); asked > 0) return asked;
  const std::int64_t available = available_memory();
  return available > 0 ? available / 2 : std::int64_t{1} << 40;
}

/// What documents and questions may take of a GPU that has the models. `before`: what was free without them.
void share_gpu(serve::EngineOptions& options, std::int64_t step_bytes, std::int64_t before,
               const ServingFlags& flags, const CommonFlags& common) {
  const std::int64_t asked = asked_memory(flags);
  std::int64_t free = gpu_info().free_bytes;
  if (!flags.gpu_memory.empty())
    free = std::clamp<std::int64_t>(parse_bytes(flags.gpu_memory, "--gpu-memory") - (before - free), 0, free);
  const serve::GpuShares shares = serve::share_gpu(free, step_bytes, std::ssize(options.on_gpu), asked);
  if (shares.documents <= 0 || shares.questions <= 0)
    throw InputError(fmt::format(
        "serve: expected GPU memory for documents and questions beside the weights, found {} of which a step "
        "takes {}: fewer models, {}or --device cpu",
        human_bytes(free), human_bytes(step_bytes),
        flags.gpu_memory.empty() ? "" : "a larger --gpu-memory, "));
  options.library.gpu_memory = shares.documents;
  options.gpu_question_memory = shares.questions;
  if (asked > shares.documents && !common.quiet)
    print_remark(
        fmt::format("--cache-memory: {} of GPU memory are for documents, not {}: weights, {} for "
                    "questions and answers and a reserve of {} leave no more",
                    human_bytes(shares.documents), human_bytes(asked),
                    human_bytes(shares.questions * std::ssize(options.on_gpu)), human_bytes(shares.reserve)));
}

/// Those whose questions the GPU answers; the others are named, or refused where the GPU was asked for.
std::map<std::string, ModelOnGpu> models_on_gpu(
    const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models, DType kv_type,
    const CommonFlags& common) {
  std::map<std::string, ModelOnGpu> on_gpu;
  for (const auto& [id, model] : models) {
    try {
      on_gpu.emplace(id, put_on_gpu(*model, kv_type));
    } catch (const std::exception& error) {
      if (common.device == "cuda") throw InputError(fmt::format("--device cuda: {}: {}", id, error.what()));
      if (!common.quiet) print_remark(fmt::format("{}: answered on the CPU: {}", id, error.what()));
    }
  }
  return on_gpu;
}

}  // namespace

void add_serving_flags(CLI::App& verb, ServingFlags& flags) {
  verb.add_option("-m,--model", flags.models,
                  "folder of a model; may be repeated; none: the models of the contexts that are there")
      ->allow_extra_args(false);
  verb.add_option("--contexts", flags.contexts,
                  "folder of the documents, one .lode file each; made when missing")
      ->required();
  add_attention_flag(verb, flags.specs, false);
  verb.add_option("--kv-type", flags.kv_type,
                  "type of new documents' keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
  verb.add_option("--template", flags.question_template,
                  "the prompt of a model without a chat template; {question} is replaced");
  verb.add_option("--parallel", flags.parallel, "questions that are answered at once; others wait")
      ->check(whole_number(1, 4096));
  verb.add_option("--queue", flags.queue, "questions that wait; more are refused")
      ->check(whole_number(1, 1 << 20));
  verb.add_option(
          "--cache-memory", flags.cache_memory,
          "memory for open documents, of the device that has them, e.g. 8GiB; the least recently used are "
          "closed first, their files stay; questions about others wait for room")
      ->check(byte_size())
      ->default_str("half of what is free; of a GPU what weights and questions leave");
  verb.add_option("--gpu-memory", flags.gpu_memory,
                  "limit of GPU memory for weights, documents and questions together, e.g. 24GiB")
      ->check(byte_size());
}

namespace {

/// All ranks serve what rank 0 has found.
serve::RankEngine::Models load_models(const ServingFlags& flags, const CommonFlags& common) {
  Ranks* const all = ranks();
  Json paths = Json::array();
  if (all == nullptr || all->rank() == 0) paths = serve::paths_of_models(flags.models, flags.contexts);
  if (all != nullptr) paths = Json::parse(all->broadcast(paths.dump()));
  return serve::load_models(paths, common.threads);
}

serve::EngineOptions options_of(const ServingFlags& flags, const CommonFlags& common) {
  fill_template(flags.question_template, "", "--template");  // refused before anything is loaded
  serve::EngineOptions options;
  options.library.folder = flags.contexts;
  std::vector<std::string> named = flags.specs;
  std::erase_if(named, [](const std::string& spec) { return parse_auto(spec).has_value(); });
  if (ranks() != nullptr && named.size() < flags.specs.size())
    throw InputError("-a auto: expected methods by name over several ranks, which measure none, found auto");
  options.library.specs = parse_specs(named);
  options.library.automatic = named.empty() || named.size() < flags.specs.size();
  options.library.kv_type = parse_dtype(flags.kv_type);
  expect_gpu(device_of(common, options.library.kv_type), flags.gpu_memory, "auto", "");
  options.scheduler.max_sequences = flags.parallel;
  options.scheduler.max_queued = flags.queue;
  options.question_template = flags.question_template;
  options.ranks = ranks();
  return options;
}

/// Refused before anybody uploads a text.
void expect_shared_methods(const serve::RankEngine::Models& models, const std::vector<Spec>& specs) {
  for (const auto& [id, model] : models)
    for (const Spec& spec : specs) expect_shared_method(model, spec);
}

}  // namespace

std::unique_ptr<serve::EngineBackend> make_backend(const ServingFlags& flags, const CommonFlags& common) {
  serve::EngineOptions options = options_of(flags, common);
  if (ranks() != nullptr && flags.specs.empty() && !common.quiet)
    print_remark(
        "several ranks measure no method: new documents are asked by full attention; -a names methods to "
        "index them for");
  const auto models = load_models(flags, common);
  if (ranks() != nullptr) expect_shared_methods(models, options.library.specs);
  if (const std::size_t removed = remove_dead_shards(flags.contexts); removed > 0 && !common.quiet)
    print_remark(
        fmt::format("{}: removed unfinished shards ({}): the server or index that wrote them was killed",
                    flags.contexts, counted(static_cast<std::int64_t>(removed), "file")));
  options.library.memory = host_memory(flags);
  if (device_of(common, options.library.kv_type) == Device::cuda) {
    if (ranks() != nullptr) throw InputError("over several ranks: expected --device cpu, found cuda");
    const std::int64_t before = gpu_info().free_bytes;
    std::int64_t step_bytes = 0;
    for (const auto& [id, there] : models_on_gpu(models, options.library.kv_type, common)) {
      options.on_gpu.emplace(id, there.model);
      step_bytes += there.step_bytes;
    }
    if (!options.on_gpu.empty())
      share_gpu(options, step_bytes, before, flags, common);
    else if (!flags.gpu_memory.empty() && !common.quiet)
      print_remark("--gpu-memory is left aside: no model is on a GPU");
  }
  return std::make_unique<serve::EngineBackend>(models, std::move(options));
}

void follow_backend(const ServingFlags& flags, const CommonFlags& common) {
  const serve::EngineOptions options = options_of(flags, common);
  const auto models = load_models(flags, common);
  serve::RankEngine(*ranks(), models, options.scheduler, options.question_template).follow();
}

}  // namespace lode::cli
