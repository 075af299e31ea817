// SPDX-License-Identifier: Apache-2.0
#include "engine/memory.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>

#include "base/threads.h"
#include "engine/context.h"
#include "engine/document.h"
#include "engine/model.h"
#include "gpu/document_bytes.h"
#include "kernels/tiled_weight.h"
#include "model/kv_shape.h"
#include "model/llama.h"
#include "select/retrieval/memory.h"

namespace lode {

namespace {

/// Program, libraries, tokenizer tables, stacks: measured on x86-64 (docs/results/cpu.md).
constexpr std::int64_t kProgramBytes = 24 << 20;

LayerGeometry geometry_of(const ModelConfig& config, const LocalWindow& dense, int layer) {
  return {.layer = layer,
          .query_heads = config.query_heads,
          .kv_heads = config.kv_heads_of(layer),
          .head_dim = config.head_dim_of(layer),
          .dense = dense};
}

/// What the CPU keeps of a block-quantised matrix beside the mapped file.
std::int64_t tile_bytes(const Weight& w) {
  if (w.tiles == nullptr) return 0;
  const std::int64_t tiles = (w.rows + kTileRows16 - 1) / kTileRows16;
  return tiles * TileLayout{tile_format(w.type)}.tile_bytes(w.cols);
}
std::int64_t tile_bytes(const ModelWeights& weights) {
  std::int64_t bytes = tile_bytes(weights.output) + tile_bytes(weights.input_projection);
  for (const LayerWeights& w : weights.layers) {
    for (const Weight* matrix :
         {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down, &w.router, &w.attention_gate, &w.latent.q_a,
          &w.latent.q_b, &w.latent.kv_a, &w.delta.qkv, &w.delta.z, &w.delta.b, &w.delta.a, &w.delta.out,
          &w.inputs.gate, &w.inputs.out})
      bytes += tile_bytes(*matrix);
    for (const ExpertWeights& e : w.experts)
      for (const Weight* matrix : {&e.gate, &e.up, &e.down}) bytes += tile_bytes(*matrix);
  }
  return bytes;
}

/// Calls body(spec, geometry) for each layer that a method chooses keys of.
void for_layers(const ModelConfig& config, std::span<const Spec> specs,
                const std::function<void(const Spec&, const LayerGeometry&)>& body) {
  for (const Spec& spec : specs)
    for (int layer = spec.dense_layers; layer < config.layers; ++layer)
      if (config.plan.layer(layer).chooses()) body(spec, geometry_of(config, spec.dense, layer));
}

std::int64_t index_bytes(const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
  const MethodInfo& info = find_method(spec.name);
  return info.index_bytes ? info.index_bytes(spec, geometry, tokens) : 0;
}

}  // namespace

MemoryPlan plan_memory(const Model& model, DType kv_type, std::int64_t tokens, std::span<const Spec> specs) {
  const ModelConfig& config = model.config();
  const KvShape shape = kv_shape(config, kv_type, tokens);
  MemoryPlan plan;
  plan.weights = model.weight_bytes() + tile_bytes(model.impl().weights);
  plan.kv = tokens * shape.token_bytes();
  for (const std::int64_t floats : shape.recurrent)  // one that counts, one in the making, and those kept
    plan.kv += (std::int64_t{RecurrentStates::kMost} + 2) * floats * std::int64_t{sizeof(float)};
  std::int64_t while_read = 0;
  for_layers(config, specs, [&](const Spec& spec, const LayerGeometry& geometry) {
    plan.index += index_bytes(spec, geometry, tokens);
    while_read += retrieval_prefill_bytes(spec, geometry, tokens);
  });
  plan.index = std::max(plan.index, while_read);  // layer by layer one takes the other's place
  const std::int64_t chunk = std::min(tokens, prefill_chunk({.kv_type = kv_type}));
  plan.scratch = kProgramBytes + Llama(config, model.impl().weights, model.pool()).scratch_bytes(chunk);
  return plan;
}

std::int64_t document_bytes(const Model& model, const GpuModel* gpu, DType kv_type, std::int64_t tokens,
                            std::int64_t max_tokens, std::span<const Spec> specs) {
  const ModelConfig& config = model.config();
  std::int64_t bytes = gpu != nullptr ? gpu_document_bytes(config, *gpu, kv_type, max_tokens, kGpuChunk)
                                      : tokens * kv_shape(config, kv_type, tokens).token_bytes();
  for_layers(config, specs, [&](const Spec& spec, const LayerGeometry& geometry) {
    bytes += index_bytes(spec, geometry, tokens);
  });
  return bytes;
}

std::int64_t held_bytes(const Document& document) {
  const Context::Impl& context = document.impl().parts();
  return context.gpu != nullptr ? context.gpu->bytes() : document.kv_bytes() + document.index_bytes();
}

/// The system's own estimate, or what the process's control group is below its limit, if that is less.
std::int64_t available_memory() {
  constexpr std::int64_t kKilo = 1024;
  std::int64_t bytes = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    if (word == "MemAvailable:" && meminfo >> bytes) break;
  }
  std::ifstream limit_file("/sys/fs/cgroup/memory.max"), used_file("/sys/fs/cgroup/memory.current");
  std::int64_t limit = 0, used = 0;
  if (limit_file >> limit && used_file >> used)
    return std::min(bytes * kKilo, std::max<std::int64_t>(0, limit - used));
  return bytes * kKilo;
}

}  // namespace lode
