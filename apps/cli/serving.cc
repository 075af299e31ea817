// SPDX-License-Identifier: Apache-2.0
#include "serving.h"

#include <fmt/format.h>

#include "engine/batch.h"
#include "engine/memory.h"
#include "gpu/backend.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "serve/engine/models.h"

namespace lode::cli {

namespace {

/// Of the device that holds the documents: on a GPU the models are there already.
std::int64_t cache_memory(const ServingFlags& flags, bool on_gpu) {
  if (!flags.cache_memory.empty()) return parse_bytes(flags.cache_memory, "--cache-memory");
  const std::int64_t available = on_gpu ? gpu_info().free_bytes : available_memory();
  return available > 0 ? available / 2 : std::int64_t{1} << 40;
}

/// Those whose questions the GPU answers; the others are named, or refused where the GPU was asked for.
std::map<std::string, std::shared_ptr<const GpuModel>> models_on_gpu(
    const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models, DType kv_type,
    const CommonFlags& common) {
  std::map<std::string, std::shared_ptr<const GpuModel>> on_gpu;
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
          "memory for keys, values and indexes of open documents, e.g. 8GiB; the least recently used are "
          "closed first, their files stay")
      ->check(byte_size())
      ->default_str("half of what is free");
}

std::unique_ptr<serve::EngineBackend> make_backend(const ServingFlags& flags, const CommonFlags& common) {
  fill_template(flags.question_template, "", "--template");  // refused before anything is loaded
  serve::EngineOptions options;
  options.library.folder = flags.contexts;
  std::vector<std::string> named = flags.specs;
  std::erase_if(named, [](const std::string& spec) { return parse_auto(spec).has_value(); });
  options.library.specs = parse_specs(named);
  options.library.automatic = named.empty() || named.size() < flags.specs.size();
  options.library.kv_type = parse_dtype(flags.kv_type);
  options.scheduler.max_sequences = flags.parallel;
  options.scheduler.max_queued = flags.queue;
  options.question_template = flags.question_template;
  const auto models = serve::load_models(flags.models, flags.contexts, common.threads);
  if (device_of(common, options.library.kv_type) == Device::cuda)
    options.on_gpu = models_on_gpu(models, options.library.kv_type, common);
  options.library.memory = cache_memory(flags, !options.on_gpu.empty());
  return std::make_unique<serve::EngineBackend>(models, std::move(options));
}

}  // namespace lode::cli
