// SPDX-License-Identifier: Apache-2.0
#include "gpu/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/random.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kAlign = 256;  // bytes; vector loads and cuBLASLt like it

std::int64_t padded(const Weight& w) {
  return (bytes_of(w.type, w.rows * w.cols) + kAlign - 1) / kAlign * kAlign;
}

/// Every weight once, in the order of the forward pass.
void for_each(const ModelWeights& m, bool tied, const auto& body) {
  body(m.embedding);
  for (const LayerWeights& w : m.layers) {
    for (const Weight* weight :
         {&w.attention_norm, &w.q, &w.k, &w.v, &w.q_bias, &w.k_bias, &w.v_bias, &w.o, &w.o_bias, &w.mlp_norm,
          &w.gate, &w.up, &w.down, &w.gate_bias, &w.up_bias, &w.down_bias})
      body(*weight);
  }
  body(m.final_norm);
  if (!tied) body(m.output);
}

/// The parts of a plan that the forward pass on the GPU does not walk yet, by name.
void refuse_what_only_the_cpu_has(const ModelConfig& c) {
  const ModelPlan& p = c.plan;
  const auto any = [&](auto has) { return std::any_of(p.layers.begin(), p.layers.end(), has); };
  const char* const part =
      p.qk_norm                                                       ? "norms of q and k"
      : any([](const LayerPlan& l) { return l.window > 0; })          ? "sliding windows"
      : any([](const LayerPlan& l) { return l.turn != Turn::usual; }) ? "layers of several RoPEs"
      : p.post_norms                                                  ? "norms behind a layer"
      : p.norm_plus_one                                               ? "gains of 1 + weight"
      : p.activation != ActivationKind::silu                          ? "an activation but SiLU"
      : p.score_scale != 0                                            ? "a scale of scores of its own"
      : p.query_growth != 0 ? "queries that grow with their position"
      : p.rotary_dim != 0 && p.rotary_dim != c.head_dim && c.rope_scaling.kind != RopeScaling::Kind::none
          ? "scaled RoPE of a part of each head"
      : p.embedding_multiplier != 1 || p.residual_multiplier != 1 ? "multipliers of the stream"
      : p.logit_divisor != 1 || p.logit_cap != 0                  ? "scaled logits"
                                                                  : nullptr;
  if (part == nullptr) return;
  throw InputError(
      fmt::format("--device cuda: expected a model without {}, found them in {}: use --device cpu", part,
                  c.architecture));
}

}  // namespace

GpuInfo gpu_info() {
  const cuda::Availability found = cuda::availability();
  return {found.ok, found.why, found.name, found.total_bytes, found.free_bytes};
}

CudaModel::CudaModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit) {
  std::int64_t bytes = 0;
  for_each(weights, config.tied_embeddings, [&](const Weight& w) { bytes += padded(w); });
  if (limit > 0 && bytes > limit) {
    throw InputError(
        fmt::format("--gpu-memory: expected at least {} MiB for the model's weights, found a limit of {} MiB",
                    (bytes >> 20) + 1, limit >> 20));
  }
  memory_ = cuda::Buffer(bytes, "the model's weights");
  embedding = take(weights.embedding, false);
  for (const LayerWeights& w : weights.layers) {
    layers.push_back({.attention_norm = take(w.attention_norm, true),
                      .q = take(w.q, false),
                      .k = take(w.k, false),
                      .v = take(w.v, false),
                      .q_bias = take(w.q_bias, false),
                      .k_bias = take(w.k_bias, false),
                      .v_bias = take(w.v_bias, false),
                      .o = take(w.o, false),
                      .o_bias = take(w.o_bias, false),
                      .mlp_norm = take(w.mlp_norm, true),
                      .gate = take(w.gate, false),
                      .up = take(w.up, false),
                      .down = take(w.down, false),
                      .gate_bias = take(w.gate_bias, false),
                      .up_bias = take(w.up_bias, false),
                      .down_bias = take(w.down_bias, false)});
  }
  final_norm = take(weights.final_norm, true);
  output = config.tied_embeddings ? embedding : take(weights.output, false);
}

/// Puts a weight behind the ones before it; one of a shape alone becomes random numbers of a usual spread.
cuda::DeviceWeight CudaModel::take(const Weight& weight, bool norm) {
  if (weight.rows == 0) return {};
  if (!is_plain(weight.type)) {
    throw InputError(fmt::format(
        "expected weights of F32, F16 or BF16 for a GPU, found {}: take --device cpu", name_of(weight.type)));
  }
  std::byte* const at = memory_.as<std::byte>() + used_;
  used_ += padded(weight);
  if (weight.data != nullptr) {
    cuda::copy(at, weight.data, bytes_of(weight), nullptr);
  } else {
    const float width = norm ? 0.0f : std::sqrt(3.0f / static_cast<float>(weight.cols));
    cuda::fill_uniform(at, plain_dtype(weight.type), weight.rows * weight.cols, norm ? 1.0f : 0.0f, width,
                       ++drawn_, nullptr);
  }
  return {at, plain_dtype(weight.type), weight.rows, weight.cols};
}

std::shared_ptr<const GpuModel> make_gpu_model(const ModelConfig& config, const ModelWeights& weights,
                                               std::int64_t limit) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) throw RunError("no GPU to use: " + gpu.why);
  refuse_what_only_the_cpu_has(config);
  return std::make_shared<CudaModel>(config, weights, limit);
}

}  // namespace lode
