// SPDX-License-Identifier: Apache-2.0
#include "gpu/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "base/timed_parts.h"
#include "gpu/layers/layer_rows.h"
#include "gpu/pinned_upload.h"
#include "gpu/sharded.h"
#include "kernels/cuda/delta/delta.h"
#include "kernels/cuda/device/pages.h"
#include "kernels/cuda/device/random.h"
#include "kernels/dequantise.h"
#include "lodestone/error.h"
#include "model/linear.h"

namespace lode {

namespace {

constexpr std::int64_t kAlign = 256;  // bytes; vector loads and cuBLASLt like it

constexpr std::int64_t kStagedBytes = std::int64_t{64} << 20;  // of a file's blocks at a time

/// The form that the GPU's kernels have for a type; none for types that are widened to 16 bits.
cuda::TileFormat format_of(WeightType type) {
  using enum cuda::TileFormat;
  switch (type) {
    case WeightType::q4_0:
      return q4_0;
    case WeightType::q4_1:
      return q4_1;
    case WeightType::q5_0:
      return q5_0;
    case WeightType::q5_1:
      return q5_1;
    case WeightType::q8_0:
      return q8_0;
    case WeightType::q4_k:
      return q4_k;
    case WeightType::q5_k:
      return q5_k;
    case WeightType::q6_k:
      return q6_k;
    case WeightType::mxfp4:
      return mxfp4;
    default:
      return none;
  }
}

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
/// Gains of 1 + weight take 32 bits.
std::int64_t padded_gain(const Weight& w, bool plus_one) {
  return aligned(bytes_of(plus_one ? WeightType::f32 : w.type, w.rows * w.cols));
}
std::int64_t bytes_there(const Weight& w, cuda::TileFormat format) {
  return is_plain(w.type)                   ? bytes_of(w.type, w.rows * w.cols)
         : format != cuda::TileFormat::none ? cuda::tiled_bytes(format, w.rows, w.cols)
                                            : w.rows * w.cols * bytes_of(DType::bf16);
}
std::int64_t padded(const Weight& w) {
  return aligned(bytes_there(w, format_of(w.type)));
}
/// Experts' matrices lie behind one another: in tiles where each fills its own.
cuda::TileFormat expert_format(const Weight& one) {
  return one.rows % cuda::kTileRows == 0 ? format_of(one.type) : cuda::TileFormat::none;
}
std::int64_t padded_experts(const Weight& one, std::size_t count) {
  return aligned(bytes_there(one, expert_format(one)) * static_cast<std::int64_t>(count));
}

/// Each head's matrix lies behind the one before; those of blocks take 16 bits.
std::int64_t bytes_of_head(const Weight& head) {
  return is_plain(head.type) ? bytes_of(head) : head.rows * head.cols * bytes_of(DType::bf16);
}
std::int64_t bytes_of_latent(const LatentWeights& w) {
  std::int64_t bytes = 0;
  for (const std::vector<Weight>* heads : {&w.k_b, &w.v_b})
    if (!heads->empty()) bytes += aligned(bytes_of_head(heads->front()) * std::ssize(*heads));
  return bytes;
}

/// Blocks of random codes under scales that give numbers of a usual spread, 1 / sqrt(cols) or so.
std::vector<std::uint8_t> random_blocks(WeightType type, std::int64_t count, std::int64_t cols,
                                        std::uint64_t seed) {
  const std::int64_t bytes = layout_of(type).block_bytes;
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(count * bytes));
  Rng rng(seed);
  for (std::uint8_t& b : blocks) b = static_cast<std::uint8_t>(rng.next());
  const bool k = type == WeightType::q4_k || type == WeightType::q5_k;
  const double codes = type == WeightType::q8_0   ? 74
                       : type == WeightType::q6_k ? 18.5
                       : type == WeightType::q5_0 || type == WeightType::q5_1 || type == WeightType::q5_k
                           ? 9.2
                           : 4.6;  // MXFP4's numbers have 2.9, and an exponent alone
  const double scale = 1 / std::sqrt(static_cast<double>(cols)) / codes,
               middle = type == WeightType::q5_1 || type == WeightType::q5_k ? 15.5 : 7.5;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* const at = blocks.data() + i * bytes;
    const auto put = [&](std::int64_t where, double x) {
      const std::uint16_t bits = to_f16(static_cast<float>(x)).bits;
      at[where] = static_cast<std::uint8_t>(bits), at[where + 1] = static_cast<std::uint8_t>(bits >> 8);
    };
    if (type == WeightType::mxfp4) {
      at[0] = static_cast<std::uint8_t>(127 + std::lround(std::log2(scale * codes / 2.9)));
      continue;
    }
    put(type == WeightType::q6_k ? 208 : 0, type == WeightType::q6_k ? scale / 64 : k ? scale / 32 : scale);
    if (k) put(2, scale / 32 * middle);
    if (type == WeightType::q4_1 || type == WeightType::q5_1) put(2, -scale * middle);
  }
  return blocks;
}

/// Bytes of a layer's experts.
std::int64_t bytes_of_experts(const LayerWeights& w) {
  if (w.experts.empty()) return 0;
  std::int64_t bytes = 0;
  const ExpertWeights& e = w.experts.front();
  for (const Weight* one : {&e.gate, &e.up, &e.down}) bytes += padded_experts(*one, w.experts.size());
  for (const Weight* one : {&e.gate_bias, &e.up_bias, &e.down_bias})
    bytes +=
        aligned(one->cols * std::ssize(w.experts) * std::int64_t{sizeof(float)});  // none have no columns
  return bytes;
}

/// How a weight's numbers lie on the GPU.
enum class Form {
  matrix,  ///< as in the file
  gain,    ///< of a norm: the same, or 1 + weight in 32 bits
  numbers  ///< in 32 bits
};

/// Every weight but the experts' and those of single heads once: body(weight, form).
void for_each(const ModelWeights& m, bool tied, const auto& body) {
  body(m.embedding, Form::matrix);
  for (const LayerWeights& w : m.layers) {
    for (const Weight* weight :
         {&w.q,           &w.k,          &w.v,          &w.q_bias,     &w.k_bias,
          &w.v_bias,      &w.o,          &w.o_bias,     &w.gate,       &w.up,
          &w.down,        &w.gate_bias,  &w.up_bias,    &w.down_bias,  &w.attention_gate,
          &w.delta.qkv,   &w.delta.z,    &w.delta.b,    &w.delta.a,    &w.delta.out,
          &w.inputs.gate, &w.inputs.out, &w.latent.q_a, &w.latent.q_b, &w.latent.kv_a})
      body(*weight, Form::matrix);
    for (const Weight* gain : {&w.attention_norm, &w.q_norm, &w.k_norm, &w.attention_post_norm, &w.mlp_norm,
                               &w.mlp_post_norm, &w.inputs.norm, &w.apart.dense_post_norm, &w.apart.norm,
                               &w.apart.post_norm, &w.latent.q_a_norm, &w.latent.kv_a_norm})
      body(*gain, Form::gain);
    for (const Weight* numbers :
         {&w.delta.conv, &w.delta.dt_bias, &w.delta.decay, &w.delta.norm, &w.sinks, &w.router, &w.router_bias,
          &w.choice_bias, &w.shared_gate, &w.apart.router_norm, &w.apart.factors})
      body(*numbers, Form::numbers);
  }
  for (const Weight* weight : {&m.input_embedding, &m.input_projection}) body(*weight, Form::matrix);
  body(m.input_projection_norm, Form::gain);
  body(m.final_norm, Form::gain);
  if (!tied) body(m.output, Form::matrix);
}

std::int64_t bytes_there(const Weight& w, Form form, bool plus_one) {
  return form == Form::matrix ? padded(w) : padded_gain(w, plus_one || form == Form::numbers);
}

cuda::RouterPlan router_plan(const ExpertPlan& e) {
  return {.count = e.count,
          .used = e.used,
          .sigmoid = e.score == ExpertPlan::Score::sigmoid,
          .score_chosen = e.score_chosen,
          .normalise = e.normalise,
          .scale = static_cast<float>(e.scale),
          .groups = e.groups,
          .groups_used = e.groups_used,
          .group_best = e.group_best};
}

/// What of a model the forward pass on the GPU does not walk, by name.
void refuse_what_only_the_cpu_has(const ModelConfig& c) {
  constexpr int kMostHeadDim = 512, kMostStanding = 1024;
  const ModelPlan& p = c.plan;
  const auto any = [&](auto has) { return std::any_of(p.layers.begin(), p.layers.end(), has); };
  const char* const part =
      p.latent.kv_rank == 0 && c.most_head_dim() > kMostHeadDim ? "heads of more than 512 numbers"
      : p.latent.nope > kMostStanding ? "latent heads of which more than 1024 numbers stand still"
      : std::max(p.delta.key_dim, p.delta.value_dim) > cuda::kMostDeltaDim
          ? "recurrent heads of more than 256 numbers"
      // Methods choose in layers without a window, whose heads are the model's.
      : any([](const LayerPlan& l) { return l.window == 0 && (l.kv_heads > 0 || l.head_dim > 0); })
          ? "layers without a window whose heads differ"
      : !LayerKinds::fits(c) ? "layers with a window whose heads differ"
                             : nullptr;
  if (part == nullptr) return;
  throw InputError(fmt::format("on a GPU: expected a model without {}, found them in {}: use the CPU", part,
                               c.architecture));
}

/// What several GPUs do not share.
void refuse_what_one_gpu_has(const ModelConfig& c) {
  const char* const part = c.plan.latent.kv_rank > 0            ? "latent rows"
                           : c.plan.experts.count > 0           ? "mixtures of experts"
                           : c.plan.sinks                       ? "attention sinks"
                           : c.plan.attention_gate              ? "gated attention"
                           : !c.plan.recurrent_floats().empty() ? "recurrent layers"
                           : c.plan.inputs.width > 0            ? "numbers for each layer"
                           : c.plan.layer_factor                ? "factors of layers"
                           : c.plan.v_norm                      ? "norms of values"
                           : !layer_rows(c).empty()             ? "layers whose heads differ"
                                                                : nullptr;
  if (part == nullptr) return;
  throw InputError(
      fmt::format("--tensor-parallel and --context-parallel: expected a model without {}, found them in {}: "
                  "use one GPU",
                  part, c.architecture));
}

/// Rows of a matrix that is on the GPU.
cuda::DeviceWeight rows_of(const cuda::DeviceWeight& whole, const OutputRows& rows) {
  cuda::DeviceWeight part = whole;
  const std::int64_t before = whole.tiled() ? cuda::tiled_bytes(whole.format, rows.first, whole.cols)
                                            : rows.first * whole.cols * bytes_of(whole.type);
  if (rows.first > 0) part.data = static_cast<const std::byte*>(whole.data) + before;
  part.rows = rows.end - rows.first;
  return part;
}

/// Matrices of the same input, those that lie one behind the other as one. Outputs of a row are then side by side.
std::vector<cuda::DeviceWeight> joined(std::span<const cuda::DeviceWeight* const> parts) {
  std::vector<cuda::DeviceWeight> all;
  for (const cuda::DeviceWeight* const part : parts) {
    const bool whole = all.empty() || !all.back().tiled() || all.back().rows % cuda::kTileRows == 0;
    if (!all.empty() && whole && cuda::continues(all.back(), *part))
      all.back().rows += part->rows;
    else
      all.push_back(*part);
  }
  return all;
}

}  // namespace

namespace {

GpuInfo info_of(const cuda::Availability& found) {
  return {found.ok, found.why, found.name, found.total_bytes, found.free_bytes};
}

}  // namespace

GpuInfo gpu_info() {
  const TimedPart timed("GPU driver");
  return info_of(cuda::availability());
}

GpuInfo gpu_present() {
  const TimedPart timed("GPU driver");
  return info_of(cuda::availability(/*memory=*/false));
}

void start_gpu() noexcept {
  try {
    static_cast<void>(gpu_info());
  } catch (...) {  // whoever needs the GPU will say so
  }
}

CudaModel::CudaModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit,
                     const ModelShare& share, ThreadPool* pool) {
  const bool plus_one = config.plan.norm_plus_one;
  std::int64_t bytes = 0;
  for_each(weights, config.tied_embeddings,
           [&](const Weight& w, Form form) { bytes += bytes_there(w, form, plus_one); });
  for (const LayerWeights& w : weights.layers) bytes += bytes_of_experts(w) + bytes_of_latent(w.latent);
  if (limit > 0 && bytes > limit) {
    throw InputError(
        fmt::format("--gpu-memory: expected at least {} MiB for the model's weights, found a limit of {} MiB",
                    (bytes >> 20) + 1, limit >> 20));
  }
  memory_ = cuda::Buffer(bytes, "the model's weights");
  const cuda::Stream loading;
  stream_ = loading.get();
  const auto gain = [&](const Weight& w) { return take_gain(w, plus_one); };
  const auto columns = [&](const Weight& w) { return take(w, bytes_of(w.type, w.cols * share.ranks)); };
  embedding = take(weights.embedding);
  for (const LayerWeights& w : weights.layers) {
    layers.push_back(
        {.attention_norm = gain(w.attention_norm),
         .q = take(w.q),
         .k = take(w.k),
         .v = take(w.v),
         .q_bias = take(w.q_bias),
         .k_bias = take(w.k_bias),
         .v_bias = take(w.v_bias),
         .q_norm = gain(w.q_norm),
         .k_norm = gain(w.k_norm),
         .o = columns(w.o),
         .o_bias = take(w.o_bias),
         .attention_post_norm = gain(w.attention_post_norm),
         .mlp_norm = gain(w.mlp_norm),
         .gate = take(w.gate),
         .up = take(w.up),
         .down = columns(w.down),
         .gate_bias = take(w.gate_bias),
         .up_bias = take(w.up_bias),
         .down_bias = take(w.down_bias),
         .mlp_post_norm = gain(w.mlp_post_norm),
         .attention_gate = take(w.attention_gate),
         .delta = take_delta(w.delta, config.plan.delta.decay_log),
         .latent = take_latent(w.latent),
         .sinks = take_f32(w.sinks),
         .router = take_f32(w.router),
         .router_bias = take_f32(w.router_bias),
         .choice_bias = take_f32(w.choice_bias),
         .shared_gate = take_f32(w.shared_gate),
         .expert_gate = take_experts(w.experts, &ExpertWeights::gate, &ExpertWeights::gate_bias),
         .expert_up = take_experts(w.experts, &ExpertWeights::up, &ExpertWeights::up_bias),
         .expert_down = take_experts(w.experts, &ExpertWeights::down, &ExpertWeights::down_bias),
         .apart = take_apart(w.apart, config),
         .inputs = {.gate = take(w.inputs.gate), .out = take(w.inputs.out), .norm = gain(w.inputs.norm)},
         .factor = w.factor.data == nullptr ? 1.0f : numbers_of(w.factor).front()});
  }
  input_embedding = take(weights.input_embedding);
  input_projection = take(weights.input_projection);
  input_projection_norm = gain(weights.input_projection_norm);
  final_norm = gain(weights.final_norm);
  output =
      config.tied_embeddings ? rows_of(embedding, output_rows(config.vocab, share)) : take(weights.output);
  loading.synchronize();
  bring_pieces(pool);
  stream_ = nullptr;
  staged_ = {};
}

void CudaModel::bring_pieces(ThreadPool* pool) {
  const bool packs =
      std::ranges::any_of(pieces_, [](const Piece& piece) { return piece.format != cuda::TileFormat::none; });
  PinnedUpload upload(pool, packs ? PinnedUpload::kPieceBytes : 0);
  upload.run(
      std::ssize(pieces_),
      [&](std::int64_t i, std::byte* to) {
        const Piece& piece = pieces_[static_cast<std::size_t>(i)];
        std::memcpy(to, piece.from, static_cast<std::size_t>(piece.bytes));
      },
      [&](std::int64_t i, const std::byte* from, PinnedUpload::Lane& lane) {
        const Piece& piece = pieces_[static_cast<std::size_t>(i)];
        if (piece.format == cuda::TileFormat::none)
          return cuda::copy(piece.to, from, piece.bytes, lane.stream());
        cuda::copy(lane.scratch(), from, piece.bytes, lane.stream());
        cuda::pack_tiles(lane.scratch(), piece.format, piece.rows, piece.cols, piece.to, lane.stream());
      });
  pieces_ = {};
}

/// Puts a weight behind the ones before it; one of a shape alone becomes random numbers of a usual spread.
cuda::DeviceWeight CudaModel::take(const Weight& weight, std::int64_t stride) {
  if (weight.rows == 0) return {};
  std::byte* const at = memory_.as<std::byte>() + used_;
  used_ += padded(weight);
  return place(weight, format_of(weight.type), stride, at);
}

/// At a place of its own, in tiles of the format where it has one.
cuda::DeviceWeight CudaModel::place(const Weight& weight, cuda::TileFormat format, std::int64_t stride,
                                    std::byte* at) {
  if (!is_plain(weight.type)) {
    if (format == cuda::TileFormat::none) {
      take_widened(weight, stride, at);
      return {at, DType::bf16, weight.rows, weight.cols};
    }
    take_tiles(weight, format, stride, at);
    return {at, DType::bf16, weight.rows, weight.cols, format};
  }
  const std::int64_t row_bytes = bytes_of(weight.type, weight.cols);
  if (weight.data != nullptr && stride > row_bytes) {
    cuda::copy_apart(at, row_bytes, weight.data, stride, row_bytes, weight.rows, stream_);
  } else if (weight.data != nullptr) {
    const std::int64_t bytes = bytes_of(weight);
    for (std::int64_t first = 0; first < bytes; first += PinnedUpload::kPieceBytes)
      pieces_.push_back({.to = at + first,
                         .from = weight.data + first,
                         .bytes = std::min(PinnedUpload::kPieceBytes, bytes - first)});
  } else {
    const float width = std::sqrt(3.0f / static_cast<float>(weight.cols));
    cuda::fill_uniform(at, plain_dtype(weight.type), weight.rows * weight.cols, 0.0f, width, ++drawn_,
                       stream_);
  }
  return {at, plain_dtype(weight.type), weight.rows, weight.cols};
}

/// A small weight in 32 bits whatever its type; random ones are drawn.
cuda::DeviceWeight CudaModel::take_f32(const Weight& weight) {
  if (weight.rows == 0 || weight.data != nullptr)
    return take_numbers(weight, 0.0f, [](float x) { return x; });
  std::byte* const at = memory_.as<std::byte>() + used_;
  used_ += padded_gain(weight, true);
  return place({.data = nullptr, .type = WeightType::f32, .rows = weight.rows, .cols = weight.cols},
               cuda::TileFormat::none, 0, at);
}

/// One matrix of every expert of a layer, behind one another, and its biases.
cuda::ExpertMatrices CudaModel::take_experts(const std::vector<ExpertWeights>& experts,
                                             Weight ExpertWeights::*which, Weight ExpertWeights::*bias) {
  if (experts.empty()) return {};
  const Weight& one = experts.front().*which;
  const cuda::TileFormat format = expert_format(one);
  const std::int64_t each = bytes_there(one, format), count = std::ssize(experts);
  std::byte* const begin = memory_.as<std::byte>() + used_;
  used_ += padded_experts(one, experts.size());
  cuda::ExpertMatrices all;
  for (std::int64_t e = 0; e < count; ++e) {
    const Weight& own = experts[static_cast<std::size_t>(e)].*which;
    if (own.type != one.type)
      throw InputError(fmt::format("on a GPU: expected the experts of a layer in one type, found {} and {}",
                                   name_of(one.type), name_of(own.type)));
    all.all = place(own, format, 0, begin + e * each);
  }
  all.all.data = begin;
  all.all.rows = count * one.rows;
  all.count = static_cast<int>(count);
  if (format != cuda::TileFormat::none && one.rows * one.cols > expert_rows_ * expert_cols_)
    expert_rows_ = one.rows, expert_cols_ = one.cols;
  const std::int64_t numbers = (experts.front().*bias).cols;
  if ((experts.front().*bias).rows == 0) return all;
  float* const biases = reinterpret_cast<float*>(memory_.as<std::byte>() + used_);
  std::vector<float> there(static_cast<std::size_t>(count * numbers));
  for (std::int64_t e = 0; e < count; ++e) {
    const Weight& own = experts[static_cast<std::size_t>(e)].*bias;
    if (own.data != nullptr) dequantise(own.type, own.data, numbers, there.data() + e * numbers);
  }
  cuda::copy(biases, there.data(), count * numbers * std::int64_t{sizeof(float)}, stream_);
  used_ += aligned(count * numbers * std::int64_t{sizeof(float)});
  all.bias = biases;
  return all;
}

cuda::ExpertSizes CudaModel::expert_sizes(const ModelConfig& config) const {
  if (config.plan.experts.count == 0) return {};
  return {.hidden = config.hidden,
          .width = config.plan.experts.width,
          .plan = router_plan(config.plan.experts),
          .panel_rows = expert_rows_,
          .panel_cols = expert_cols_};
}

/// A norm's gain; random ones are 1.
cuda::DeviceWeight CudaModel::take_gain(const Weight& weight, bool plus_one) {
  if (weight.rows == 0) return {};
  std::byte* const at = memory_.as<std::byte>() + used_;
  used_ += padded_gain(weight, plus_one);
  const std::int64_t count = weight.rows * weight.cols;
  const DType type = plus_one ? DType::f32 : plain_dtype(weight.type);
  if (weight.data == nullptr) {
    cuda::fill_uniform(at, type, count, 1.0f, 0.0f, ++drawn_, stream_);
  } else if (plus_one) {
    std::vector<float> gain(static_cast<std::size_t>(count));
    dequantise(weight.type, weight.data, count, gain.data());
    for (float& g : gain) g += 1.0f;
    cuda::copy(at, gain.data(), count * std::int64_t{sizeof(float)}, stream_);
  } else {
    cuda::copy(at, weight.data, bytes_of(weight), stream_);
  }
  return {at, type, weight.rows, weight.cols};
}

cuda::DeviceWeight CudaModel::take_numbers(const Weight& weight, float otherwise,
                                           const std::function<float(float)>& change) {
  if (weight.rows == 0) return {};
  std::byte* const at = memory_.as<std::byte>() + used_;
  used_ += padded_gain(weight, true);
  std::vector<float> numbers(static_cast<std::size_t>(weight.rows * weight.cols), otherwise);
  if (weight.data != nullptr) {
    dequantise(weight.type, weight.data, std::ssize(numbers), numbers.data());
    std::ranges::transform(numbers, numbers.begin(), change);
  }
  cuda::copy(at, numbers.data(), static_cast<std::int64_t>(numbers.size() * sizeof(float)), stream_);
  return {at, DType::f32, weight.rows, weight.cols};
}

/// The matrices of all heads behind one another.
cuda::DeviceWeight CudaModel::take_heads(const std::vector<Weight>& heads) {
  if (heads.empty()) return {};
  const std::int64_t each = bytes_of_head(heads.front()), count = std::ssize(heads);
  std::byte* const begin = memory_.as<std::byte>() + used_;
  used_ += aligned(each * count);
  const std::string remark = remark_;
  cuda::DeviceWeight all;
  for (std::int64_t h = 0; h < count; ++h)
    all = place(heads[static_cast<std::size_t>(h)], cuda::TileFormat::none, 0, begin + h * each);
  all.data = begin;
  all.rows *= count;
  if (remark_ == remark) return all;
  // Other weights of the type may lie here as they are.
  const char* const of_heads = "each head's own matrices take 16 bits on the GPU";
  remark_ = remark;
  if (remark.find(of_heads) == std::string::npos)
    remark_ += (remark.empty() ? "" : "; ") + std::string(of_heads);
  return all;
}

CudaModel::Latent CudaModel::take_latent(const LatentWeights& w) {
  return {.q_a = take(w.q_a),
          .q_a_norm = take_gain(w.q_a_norm, false),
          .q_b = take(w.q_b),
          .kv_a = take(w.kv_a),
          .kv_a_norm = take_gain(w.kv_a_norm, false),
          .k_b = take_heads(w.k_b),
          .v_b = take_heads(w.v_b)};
}

/// The router's input is divided by the root of its width: its gain is, here.
CudaModel::Apart CudaModel::take_apart(const ApartWeights& w, const ModelConfig& config) {
  const bool plus_one = config.plan.norm_plus_one;
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config.hidden)));
  return {.dense_post_norm = take_gain(w.dense_post_norm, plus_one),
          .norm = take_gain(w.norm, plus_one),
          .post_norm = take_gain(w.post_norm, plus_one),
          .router_norm =
              take_numbers(w.router_norm, scale, [&](float x) { return (plus_one ? x + 1.0f : x) * scale; }),
          .factors = take_numbers(w.factors, 1.0f, [](float x) { return x; })};
}

CudaModel::Delta CudaModel::take_delta(const DeltaWeights& w, bool decay_log) {
  const auto as_is = +[](float x) { return x; };
  const auto of_log = +[](float x) { return -std::exp(x); };
  Delta d = {.qkv = take(w.qkv), .z = take(w.z), .b = take(w.b), .a = take(w.a), .out = take(w.out)};
  const cuda::DeviceWeight* const parts[] = {&d.qkv, &d.z, &d.b, &d.a};
  d.joined = joined(parts);
  d.conv = take_numbers(w.conv, 1.0f / static_cast<float>(std::max<std::int64_t>(w.conv.cols, 1)), as_is);
  d.dt_bias = take_numbers(w.dt_bias, 0.0f, as_is);
  d.rate = take_numbers(w.decay, -1.0f, decay_log ? of_log : as_is);
  d.norm = take_numbers(w.norm, 1.0f, as_is);
  return d;
}

/// Blocks come to the GPU some rows at a time and are repacked there.
void CudaModel::take_tiles(const Weight& weight, cuda::TileFormat format, std::int64_t stride,
                           std::byte* to) {
  const std::int64_t row_bytes = bytes_of(weight.type, weight.cols), apart = std::max(stride, row_bytes),
                     most = std::max<std::int64_t>(kStagedBytes / row_bytes / cuda::kTileRows, 1) *
                            cuda::kTileRows;
  if (weight.rows * weight.cols > largest_rows_ * largest_cols_)
    largest_rows_ = weight.rows, largest_cols_ = weight.cols;
  const std::int64_t of_piece = PinnedUpload::kPieceBytes / row_bytes / cuda::kTileRows * cuda::kTileRows;
  if (weight.data != nullptr && apart == row_bytes && of_piece > 0) {
    for (std::int64_t first = 0; first < weight.rows; first += of_piece) {
      const std::int64_t some = std::min(of_piece, weight.rows - first);
      pieces_.push_back({.to = to + cuda::tiled_bytes(format, first, weight.cols),
                         .from = weight.data + first * row_bytes,
                         .bytes = some * row_bytes,
                         .rows = some,
                         .cols = weight.cols,
                         .format = format});
    }
    return;
  }
  if (staged_.bytes() < most * row_bytes) staged_ = cuda::Buffer(most * row_bytes, "blocks of weights");
  constexpr std::int64_t kDrawnRows = 512;  // of random weights; they come again
  std::vector<std::uint8_t> drawn;
  if (weight.data == nullptr)
    drawn = random_blocks(weight.type, kDrawnRows * weight.cols / layout_of(weight.type).block, weight.cols,
                          ++drawn_);
  for (std::int64_t first = 0; first < weight.rows;) {
    const std::int64_t some =
        std::min({most, weight.rows - first, weight.data == nullptr ? kDrawnRows : weight.rows});
    if (weight.data == nullptr)
      cuda::copy(staged_.as<void>(), drawn.data(), some * row_bytes, stream_);
    else if (apart == row_bytes)  // rows too long for a piece
      cuda::copy(staged_.as<void>(), weight.data + first * row_bytes, some * row_bytes, stream_);
    else
      cuda::copy_apart(staged_.as<void>(), row_bytes, weight.data + first * apart, apart, row_bytes, some,
                       stream_);
    cuda::pack_tiles(staged_.as<void>(), format, some, weight.cols,
                     to + cuda::tiled_bytes(format, first, weight.cols), stream_);
    first += some;
  }
}

/// A type without kernels of its own here takes 16 bits.
void CudaModel::take_widened(const Weight& weight, std::int64_t stride, std::byte* to) {
  if (weight.data == nullptr)
    throw InputError(
        fmt::format("expected random weights of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, "
                    "Q5_K, Q6_K or MXFP4, matrices of experts in multiples of 8 rows, found {}",
                    name_of(weight.type)));
  const std::string name(name_of(weight.type));
  if (remark_.find(name) == std::string::npos)
    remark_ += fmt::format("{}weights of {} take 16 bits on the GPU", remark_.empty() ? "" : "; ", name);
  const std::int64_t apart = std::max(stride, bytes_of(weight.type, weight.cols)),
                     bytes = weight.cols * bytes_of(DType::bf16),
                     most = std::clamp<std::int64_t>(PinnedUpload::kPieceBytes / bytes, 1, weight.rows);
  std::vector<float> row(static_cast<std::size_t>(weight.cols));
  std::vector<bf16> rounded(static_cast<std::size_t>(most * weight.cols));
  for (std::int64_t first = 0; first < weight.rows; first += most) {
    const std::int64_t rows = std::min(most, weight.rows - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      dequantise(weight.type, weight.data + (first + r) * apart, weight.cols, row.data());
      std::ranges::transform(row, rounded.begin() + r * weight.cols, [](float x) { return to_bf16(x); });
    }
    cuda::copy(to + first * bytes, rounded.data(), rows * bytes, stream_);
  }
}

std::int64_t CudaModel::panel_bytes(cuda::Precision precision) const {
  return largest_rows_ == 0 ? 0 : cuda::Linear::panel_bytes(largest_rows_, largest_cols_, precision);
}

std::shared_ptr<const GpuModel> make_gpu_model(const ModelConfig& config, const ModelWeights& weights,
                                               std::int64_t limit, const GpuGroup& group, ThreadPool* pool) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) throw RunError("no GPU to use: " + gpu.why);
  refuse_what_only_the_cpu_has(config);
  if (group.shares()) refuse_what_one_gpu_has(config);
  const TimedPart timed("weights to the GPU");
  if (group.shares()) return make_sharded_model(config, weights, limit, group);
  return std::make_shared<CudaModel>(config, weights, limit, ModelShare{}, pool);
}

cuda::KvLayout layout_of(const ModelConfig& config, DType type) {
  return {config.kv_heads, config.head_dim, type, 0, config.plan.latent.kv_rank > 0};
}

cuda::Linear::QkvArguments qkv_of(const CudaModel::Layer& layer, const ModelConfig& config) {
  const ModelPlan& plan = config.plan;
  return {.norm = layer.attention_norm,
          .q = layer.q,
          .k = layer.k,
          .v = layer.v,
          .q_bias = layer.q_bias,
          .k_bias = layer.k_bias,
          .v_bias = layer.v.data == nullptr ? layer.k_bias : layer.v_bias,  // values may be keys
          .eps = static_cast<float>(config.norm_eps),
          .q_norm = layer.q_norm,
          .k_norm = layer.k_norm,
          .v_norm = plan.v_norm,
          .growth = {static_cast<float>(plan.query_growth), plan.query_growth_start}};
}

namespace {

cuda::Activation activation_of(const ModelPlan& plan) {
  switch (plan.activation) {
    case ActivationKind::silu:
      break;
    case ActivationKind::gelu_tanh:
      return {.gelu = true};
    case ActivationKind::clamped_silu:
      return {.slope = 1.702f, .limit = static_cast<float>(plan.activation_limit), .offset = 1.0f};
  }
  return {};
}

/// A layer's factor comes with the last sum of the layer.
cuda::Addition feed_forward_addition(const CudaModel::Layer& layer, const ModelConfig& config) {
  return {layer.mlp_post_norm, static_cast<float>(config.norm_eps),
          static_cast<float>(config.plan.residual_multiplier),
          layer.inputs.gate.data == nullptr ? layer.factor : 1.0f};
}

}  // namespace

cuda::Linear::MlpArguments mlp_of(const CudaModel::Layer& layer, const ModelConfig& config) {
  const auto eps = static_cast<float>(config.norm_eps);
  return {.norm = layer.mlp_norm,
          .gate = layer.gate,
          .up = layer.up,
          .down = layer.down,
          .gate_bias = layer.gate_bias,
          .up_bias = layer.up_bias,
          .down_bias = layer.down_bias,
          .eps = eps,
          .activation = activation_of(config.plan),
          .addition = feed_forward_addition(layer, config)};
}

cuda::ExpertArguments experts_of(const CudaModel::Layer& layer, const ModelConfig& config) {
  const auto numbers = [](const cuda::DeviceWeight& w) { return static_cast<const float*>(w.data); };
  const CudaModel::Apart& apart = layer.apart;
  return {.norm = config.plan.experts.apart ? apart.norm : layer.mlp_norm,
          .router_norm = apart.router_norm,
          .eps = static_cast<float>(config.norm_eps),
          .plan = router_plan(config.plan.experts),
          .router = layer.router,
          .router_bias = numbers(layer.router_bias),
          .choice_bias = numbers(layer.choice_bias),
          .factors = numbers(apart.factors),
          .gate = layer.expert_gate,
          .up = layer.expert_up,
          .down = layer.expert_down,
          .activation = activation_of(config.plan),
          .shared = mlp_of(layer, config),
          .shared_gate = layer.shared_gate,
          .post_norm = apart.post_norm,
          .shared_post_norm = apart.dense_post_norm,
          .addition = feed_forward_addition(layer, config)};
}

std::int64_t widest_feed_forward(const ModelConfig& config) {
  std::int64_t width = config.intermediate;
  for (const LayerPlan& layer : config.plan.layers) width = std::max(width, layer.width);
  return width;
}

std::int64_t attention_workspace_bytes(const ModelConfig& c) {
  std::int64_t bytes = 0;
  for (int layer = 0; layer < c.layers; ++layer)
    bytes = std::max(bytes, cuda::decode_workspace_bytes(kMostSparseTokens, c.query_heads,
                                                         c.kv_heads_of(layer), c.head_dim_of(layer)));
  return bytes;
}

cuda::Addition attention_addition(const CudaModel::Layer& layer, const ModelConfig& config) {
  return {layer.attention_post_norm, static_cast<float>(config.norm_eps),
          static_cast<float>(config.plan.residual_multiplier)};
}

}  // namespace lode
