// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_export.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/threads.h"
#include "io/gguf_writer.h"
#include "kernels/blocks/quantise.h"
#include "kernels/dequantise.h"
#include "kernels/rope.h"
#include "kernels/tiled_weight.h"
#include "lodestone/error.h"
#include "model/family.h"
#include "model/source.h"
#include "model/weight_shapes.h"
#include "text/gguf_tokenizer.h"

namespace lode {

namespace {

constexpr std::size_t kMaxTokenizer = std::size_t{256} << 20;
constexpr std::string_view kEmbedding = "token_embd.weight", kOutput = "output.weight";

/// llama.cpp's number for a file that is mostly of one type.
std::uint32_t file_type(WeightType type) {
  switch (type) {
    case WeightType::f32:
      return 0;
    case WeightType::f16:
      return 1;
    case WeightType::q4_0:
      return 2;
    case WeightType::q4_1:
      return 3;
    case WeightType::q8_0:
      return 7;
    case WeightType::q4_k:
      return 14;
    case WeightType::q5_k:
      return 16;
    case WeightType::q6_k:
      return 18;
    case WeightType::bf16:
      return 32;
    default:
      return 1024;  // "guessed"
  }
}

/// Vectors stay float32, and so do routers and convolutions, which are small and decide much.
WeightType type_for(std::string_view name, const std::vector<std::int64_t>& shape, WeightType wanted,
                    bool tied) {
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (shape.size() < 2 || has("ffn_gate_inp") || has("ssm_conv1d") || name.ends_with(".bias"))
    return WeightType::f32;
  const bool output = name == kOutput || (tied && name == kEmbedding);
  if (output && wanted == WeightType::q4_k) wanted = WeightType::q6_k;
  if (shape.back() % layout_of(wanted).block == 0) return wanted;
  return shape.back() % layout_of(WeightType::q8_0).block == 0 ? WeightType::q8_0 : WeightType::f16;
}

/// A tensor on its way into a file.
struct Source {
  std::string name;  ///< in GGUF
  WeightType type;
  std::vector<std::int64_t> shape;
  const std::byte* data;
  int paired_head = 0;  ///< d of q and k whose rows go in pairs (i, i + d / 2) in GGUF; 0: rows stay in order
};

/// The row of the source that stands at row `row` of the file.
std::int64_t source_row(const Source& s, std::int64_t row) {
  if (s.paired_head == 0) return row;
  const std::int64_t d = s.paired_head, in_head = row % d;
  return row - in_head + in_head % 2 * (d / 2) + in_head / 2;
}

void convert(const Source& s, WeightType type, std::span<std::byte> to, ThreadPool& pool) {
  const std::int64_t cols = s.paired_head > 0 && s.shape.size() == 1 ? 1 : s.shape.back();
  std::int64_t rows = 1;
  for (const std::int64_t n : s.shape) rows *= n;
  rows /= cols;
  const std::int64_t from_bytes = bytes_of(s.type, cols), to_bytes = bytes_of(type, cols);
  pool.for_each(rows, [&](std::int64_t row, int) {
    std::vector<float> numbers(static_cast<std::size_t>(cols));
    dequantise(s.type, s.data + source_row(s, row) * from_bytes, cols, numbers.data());
    if (!quantise(type, numbers.data(), cols, to.data() + row * to_bytes))
      throw InputError(
          fmt::format("tensor '{}', row {}: expected finite numbers that {} can hold, found others", s.name,
                      row, name_of(type)));
  });
}

void write_all(GgufWriter& writer, const std::vector<Source>& sources, const GgufExport& options,
               const std::filesystem::path& to, ThreadPool& pool) {
  const bool tied =
      std::none_of(sources.begin(), sources.end(), [](const Source& s) { return s.name == kOutput; });
  std::vector<WeightType> types;
  for (const Source& s : sources) {
    types.push_back(type_for(s.name, s.shape, options.type, tied));
    writer.add_tensor(s.name, types.back(), s.shape);
  }
  writer.write(to, [&](std::int64_t i, std::span<std::byte> bytes) {
    convert(sources[static_cast<std::size_t>(i)], types[static_cast<std::size_t>(i)], bytes, pool);
    if (options.tensors_done) options.tensors_done(i + 1, std::ssize(sources));
  });
}

// ---- From a GGUF file: everything is there already. -------------------------------------------------------------

void copy_value(const std::string& key, const GgufValue& value, GgufWriter& to) {
  if (value.type == GgufType::string) {
    const auto* text = reinterpret_cast<const char*>(value.bytes.data());
    return to.add(key, std::string_view(text, value.bytes.size()));
  }
  if (value.type != GgufType::array)
    return to.add_raw(key, static_cast<std::uint32_t>(value.type), value.bytes);
  if (value.element == GgufType::string)
    return to.add_texts(key, std::vector<std::string>(value.strings.begin(), value.strings.end()));
  if (value.element == GgufType::array)
    throw InputError(
        fmt::format("metadata '{}': expected numbers or texts, found arrays in an array", excerpt(key)));
  std::vector<std::byte> bytes(12);
  const auto element = static_cast<std::uint32_t>(value.element);
  std::memcpy(bytes.data(), &element, 4);
  std::memcpy(bytes.data() + 4, &value.count, 8);
  bytes.insert(bytes.end(), value.bytes.begin(), value.bytes.end());
  to.add_raw(key, static_cast<std::uint32_t>(GgufType::array), bytes);
}

void requantise(const std::filesystem::path& from, const std::filesystem::path& to, const GgufExport& options,
                ThreadPool& pool) {
  const GgufModel model = GgufModel::open(from);
  GgufWriter writer;
  for (const auto& [key, value] : model.metadata().values()) {
    if (key == "general.file_type" || key.starts_with("split.")) continue;
    copy_value(key, value, writer);
  }
  writer.add_u32("general.file_type", file_type(options.type));
  std::vector<Source> sources;
  for (const auto& [name, tensor] : model.tensors)
    sources.push_back({name, tensor.type, tensor.shape, tensor.bytes.data()});
  write_all(writer, sources, options, to, pool);
}

// ---- From a folder. ---------------------------------------------------------------------------------------------

/// What this writer knows how to say; the reader knows more.
void expect_expressible(const ModelConfig& c, const std::string& where) {
  const std::string_view name = family_of(c).name;
  const bool known =
      name == "Llama" || name == "Mistral" || name == "Qwen2" || name == "Qwen3" || name == "Granite";
  const auto windowed = [](const LayerPlan& layer) { return layer.window > 0; };
  if (!known || std::any_of(c.plan.layers.begin(), c.plan.layers.end(), windowed))
    throw InputError(
        fmt::format("{}: expected a Llama, Mistral, Qwen2, Qwen3 or Granite without sliding windows, "
                    "found {}: not written as GGUF yet",
                    where, name));
  using enum RopeScaling::Kind;
  const RopeScaling::Kind kind = c.rope_scaling.kind;
  if (kind != none && kind != linear && kind != yarn && kind != llama3)
    throw InputError(fmt::format("{}: expected RoPE scaling of none, linear, yarn or llama3, found {}", where,
                                 name_of(kind)));
}

void add_rope(const ModelConfig& c, const std::string& at, GgufWriter& to) {
  const RopeScaling& s = c.rope_scaling;
  to.add_f32(at + "rope.freq_base", static_cast<float>(c.rope_theta));
  to.add_u32(at + "rope.dimension_count",
             static_cast<std::uint32_t>(c.plan.rotary_dim > 0 ? c.plan.rotary_dim : c.head_dim));
  if (s.kind != RopeScaling::Kind::linear && s.kind != RopeScaling::Kind::yarn) return;
  to.add(at + "rope.scaling.type", std::string_view(s.kind == RopeScaling::Kind::yarn ? "yarn" : "linear"));
  to.add_f32(at + "rope.scaling.factor", static_cast<float>(s.factor));
  if (s.kind == RopeScaling::Kind::linear) return;
  to.add_u32(at + "rope.scaling.original_context_length",
             static_cast<std::uint32_t>(s.original_max_positions));
  to.add_f32(at + "rope.scaling.yarn_beta_fast", static_cast<float>(s.beta_fast));
  to.add_f32(at + "rope.scaling.yarn_beta_slow", static_cast<float>(s.beta_slow));
}

void add_config(const ModelConfig& c, const std::string& name, WeightType type, GgufWriter& to) {
  const std::string architecture(family_of(c).gguf), at = architecture + ".";
  const auto whole = [&](const char* key, std::int64_t value) {
    to.add_u32(at + key, static_cast<std::uint32_t>(value));
  };
  to.add("general.architecture", architecture);
  to.add("general.type", std::string_view("model"));
  to.add("general.name", name);
  to.add_u32("general.file_type", file_type(type));
  to.add_u32("general.quantization_version", 2);
  whole("block_count", c.layers);
  whole("context_length", c.max_positions);
  whole("embedding_length", c.hidden);
  whole("feed_forward_length", c.intermediate);
  whole("attention.head_count", c.query_heads);
  whole("attention.head_count_kv", c.kv_heads);
  whole("attention.key_length", c.head_dim);
  whole("attention.value_length", c.head_dim);
  whole("vocab_size", c.vocab);
  to.add_f32(at + "attention.layer_norm_rms_epsilon", static_cast<float>(c.norm_eps));
  add_rope(c, at, to);
  const ModelPlan& p = c.plan;
  if (p.experts.count > 0) {
    whole("expert_count", p.experts.count);
    whole("expert_used_count", p.experts.used);
    whole("expert_feed_forward_length", p.experts.width);
  }
  if (family_of(c).name != "Granite") return;
  to.add_f32(at + "embedding_scale", static_cast<float>(p.embedding_multiplier));
  to.add_f32(at + "residual_scale", static_cast<float>(p.residual_multiplier));
  to.add_f32(at + "attention.scale", static_cast<float>(p.score_scale));
  to.add_f32(at + "logit_scale", static_cast<float>(p.logit_divisor));
}

/// Tokenizer, its tokens that begin and end texts, and the chat template.
void add_texts(const std::filesystem::path& folder, const ModelConfig& c, GgufWriter& to) {
  const auto file = folder / "tokenizer.json";
  const Json tokenizer = parse_json(read_file(file, kMaxTokenizer), file.string());
  add_tokenizer(tokenizer, file.string(), c.vocab, to);
  const ModelSource source = ModelSource::open(folder);
  const std::vector<TokenId>& ends = source.config().eos;
  const char* const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                              "tokenizer.ggml.eom_token_id"};
  for (std::size_t i = 0; i < std::min(ends.size(), std::size(keys)); ++i)
    to.add_u32(keys[i], static_cast<std::uint32_t>(ends[i]));
  if (const std::string chat = source.chat_template(); !chat.empty()) to.add("tokenizer.chat_template", chat);
}

/// llama3's scaling as divisors of the frequencies.
std::vector<float> rope_divisors(const ModelConfig& c) {
  if (c.rope_scaling.kind != RopeScaling::Kind::llama3) return {};
  RopeShape plain = c;
  plain.scaling = {};
  const Rope scaled(c, c.max_positions), usual(plain, c.max_positions);
  std::vector<float> divisors;
  for (std::size_t i = 0; i < usual.turning_pairs(); ++i)
    divisors.push_back(usual.frequencies()[i] / scaled.frequencies()[i]);
  return divisors;
}

/// Every tensor of a folder under its name in GGUF.
std::vector<Source> sources_of(const WeightFiles& files, const ModelConfig& c) {
  const Family& family = family_of(c);
  std::map<std::string, std::pair<std::string, Place>> names;  // by name in the folder
  for (const TensorName& name : tensor_names(family))
    for (int layer = 0; layer < c.layers; ++layer)
      names[fmt::format(fmt::runtime(name.folder), layer)] = {fmt::format(fmt::runtime(name.gguf), layer),
                                                              name.place};
  std::vector<Source> sources;
  for (const auto& [folder_name, tensor] : files.tensors) {
    const auto known = names.find(folder_name);
    if (known == names.end() || !tensor.type) continue;  // ModelWeights::read has refused what matters
    const auto& [name, place] = known->second;
    if (place == Place::output && c.tied_embeddings) continue;
    const bool turns =
        place == Place::q || place == Place::k || place == Place::q_bias || place == Place::k_bias;
    sources.push_back(
        {name, *tensor.type, tensor.shape, tensor.bytes.data(), family.gguf_pairs && turns ? c.head_dim : 0});
  }
  return sources;
}

// ---- Random weights. --------------------------------------------------------------------------------------------

/// The minimum that centres a type's codes, in scales.
float centre_of(WeightType type) {
  const TileFormat format = tile_format(type);
  if (format.minimum == TileFormat::Minimum::none) return 0;
  const float middle = 0.5f * static_cast<float>((1 << format.bits) - 1);
  return format.minimum == TileFormat::Minimum::added ? -middle : middle;
}

/// Sets a block's scales so that its numbers have about the wanted size.
void set_scales(WeightType type, float size, std::byte* block) {
  if (type == WeightType::mxfp4) {
    block[0] = static_cast<std::byte>(std::clamp(std::ilogb(size / 5) + 128, 1, 254));
    return;
  }
  const auto put = [&](float scale) {
    const auto places = scale_places(type);
    const std::uint16_t d = to_f16(scale).bits, m = to_f16(scale * centre_of(type)).bits;
    std::memcpy(block + places[0], &d, 2);
    if (places[1] >= 0) std::memcpy(block + places[1], &m, 2);
  };
  put(1.0f);
  std::vector<float> numbers(static_cast<std::size_t>(layout_of(type).block));
  dequantise(type, block, std::ssize(numbers), numbers.data());
  double square = 0;
  for (const float x : numbers) square += double{x} * double{x};
  put(size / static_cast<float>(std::sqrt(square / static_cast<double>(numbers.size())) + 1e-6));
}

void fill_random(WeightType type, std::int64_t rows, std::int64_t cols, std::uint64_t seed,
                 std::span<std::byte> to, ThreadPool& pool) {
  const WeightLayout& layout = layout_of(type);
  const std::int64_t row_bytes = bytes_of(type, cols);
  const float size = 1.0f / std::sqrt(static_cast<float>(cols));
  pool.for_each(rows, [&](std::int64_t row, int) {
    Rng rng(hash_seed(seed, row));
    std::byte* const at = to.data() + row * row_bytes;
    if (is_plain(type)) {
      std::vector<float> numbers(static_cast<std::size_t>(cols));
      for (float& x : numbers) x = size * static_cast<float>(rng.normal());
      quantise(type, numbers.data(), cols, at);
      return;
    }
    for (std::int64_t i = 0; i < row_bytes; i += 8) {
      const std::uint64_t bits = rng.next();
      std::memcpy(at + i, &bits, static_cast<std::size_t>(std::min<std::int64_t>(8, row_bytes - i)));
    }
    for (std::int64_t i = 0; i < row_bytes; i += layout.block_bytes) set_scales(type, size, at + i);
  });
}

/// Names and shapes of a model's tensors. Matrices that hold several are left to their parts.
std::vector<Source> random_sources(const ModelConfig& c) {
  std::vector<Source> all;
  const auto add = [&](const TensorName& name, int layer) {
    if (!has_weight(name.place, c, layer)) return;
    all.push_back({fmt::format(fmt::runtime(name.gguf), layer), WeightType::f32,
                   shape_of(name.place, c, layer), nullptr});
  };
  for (const TensorName& name : tensor_names(family_of(c))) {
    if (name.gguf.empty() || name.place == Place::expert_gate_up) continue;
    if (!in_layer(name.place)) {
      if (name.place != Place::output || !c.tied_embeddings) add(name, -1);
      continue;
    }
    for (int layer = 0; layer < c.layers; ++layer) add(name, layer);
  }
  return all;
}

}  // namespace

void export_gguf(const std::filesystem::path& model, const std::filesystem::path& to,
                 const GgufExport& options, ThreadPool& pool) {
  if (!can_quantise(options.type))
    throw InputError(fmt::format("expected a type of F32, F16, BF16, Q8_0, Q4_K or Q6_K, found {}",
                                 name_of(options.type)));
  if (GgufModel::is_file(model)) return requantise(model, to, options, pool);
  ModelSource source = ModelSource::open(model);
  const ModelConfig& c = source.config();
  expect_expressible(c, model.string());
  GgufWriter writer;
  add_config(c, model.filename().string(), options.type, writer);
  add_texts(model, c, writer);
  const WeightFiles files = source.take_weights();
  std::vector<Source> sources = sources_of(files, c);
  const std::vector<float> divisors = rope_divisors(c);
  if (!divisors.empty())
    sources.push_back({"rope_freqs.weight",
                       WeightType::f32,
                       {std::ssize(divisors)},
                       reinterpret_cast<const std::byte*>(divisors.data())});
  write_all(writer, sources, options, to, pool);
}

void export_random_gguf(std::string_view shape, const std::filesystem::path& tokenizer,
                        const std::filesystem::path& to, const GgufExport& options, ThreadPool& pool) {
  const ModelConfig c = named_shape(shape);
  GgufWriter writer;
  add_config(c, "random " + std::string(shape), options.type, writer);
  add_texts(tokenizer, c, writer);
  const std::vector<Source> all = random_sources(c);
  std::vector<WeightType> types;
  for (const Source& s : all) {
    types.push_back(type_for(s.name, s.shape, options.type, c.tied_embeddings));
    writer.add_tensor(s.name, types.back(), s.shape);
  }
  writer.write(to, [&](std::int64_t i, std::span<std::byte> bytes) {
    const Source& s = all[static_cast<std::size_t>(i)];
    if (s.shape.size() == 1) {
      const std::vector<float> ones(static_cast<std::size_t>(s.shape[0]), 1.0f);
      std::memcpy(bytes.data(), ones.data(), bytes.size());
    } else {
      const std::int64_t rows =
          std::accumulate(s.shape.begin(), s.shape.end() - 1, std::int64_t{1}, std::multiplies<>());
      fill_random(types[static_cast<std::size_t>(i)], rows, s.shape.back(), hash_seed(1, i), bytes, pool);
    }
    if (options.tensors_done) options.tensors_done(i + 1, std::ssize(all));
  });
}

}  // namespace lode
