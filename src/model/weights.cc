// SPDX-License-Identifier: Apache-2.0
#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "base/hash.h"
#include "base/rng.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "kernels/dequantise.h"
#include "lodestone/error.h"
#include "model/weight_files.h"

namespace lode {

namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Takes tensors out one by one, checking each; what is left at the end nobody asked for.
class Taker {
 public:
  explicit Taker(NamedTensors& all, std::string dir) : all_(all), dir_(std::move(dir)) {}

  Weight matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return take(name, {rows, cols}, rows, cols);
  }
  Weight vector(const std::string& name, std::int64_t n) { return take(name, {n}, 1, n); }
  Weight vector_if(bool wanted, const std::string& name, std::int64_t n) {
    return wanted ? vector(name, n) : Weight{};
  }

  void finish(bool tied) {
    for (const auto& [name, tensor] : all_) {
      const bool harmless = name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
      if (!harmless)
        throw InputError(
            fmt::format("{}: tensor '{}' has no place in this architecture", tensor.where, excerpt(name)));
    }
  }

 private:
  Weight take(const std::string& name, const std::vector<std::int64_t>& shape, std::int64_t rows,
              std::int64_t cols) {
    const auto node = all_.extract(name);
    if (node.empty())
      throw InputError(
          fmt::format("{}: expected a tensor '{}' of shape {}, found none", dir_, name, shape_text(shape)));
    const NamedTensor& found = node.mapped();
    if (found.tensor.shape != shape) {
      throw InputError(fmt::format("{}: tensor '{}': expected shape {}, found {}", found.where, name,
                                   shape_text(shape), shape_text(found.tensor.shape)));
    }
    return {found.tensor.bytes.data(), weight_type_of(float_type(found.tensor, name, found.where)), rows,
            cols};
  }

  NamedTensors& all_;
  std::string dir_;
};

LayerWeights take_layer(Taker& take, const ModelConfig& c, int layer) {
  const std::string at = fmt::format("model.layers.{}.", layer);
  const std::int64_t q = std::int64_t{c.query_heads} * c.head_dim, kv = std::int64_t{c.kv_heads} * c.head_dim;
  LayerWeights w;
  w.attention_norm = take.vector(at + "input_layernorm.weight", c.hidden);
  w.q = take.matrix(at + "self_attn.q_proj.weight", q, c.hidden);
  w.k = take.matrix(at + "self_attn.k_proj.weight", kv, c.hidden);
  w.v = take.matrix(at + "self_attn.v_proj.weight", kv, c.hidden);
  w.o = take.matrix(at + "self_attn.o_proj.weight", c.hidden, q);
  w.q_bias = take.vector_if(c.attention_bias, at + "self_attn.q_proj.bias", q);
  w.k_bias = take.vector_if(c.attention_bias, at + "self_attn.k_proj.bias", kv);
  w.v_bias = take.vector_if(c.attention_bias, at + "self_attn.v_proj.bias", kv);
  w.o_bias = take.vector_if(c.attention_bias, at + "self_attn.o_proj.bias", c.hidden);
  w.mlp_norm = take.vector(at + "post_attention_layernorm.weight", c.hidden);
  w.gate = take.matrix(at + "mlp.gate_proj.weight", c.intermediate, c.hidden);
  w.up = take.matrix(at + "mlp.up_proj.weight", c.intermediate, c.hidden);
  w.down = take.matrix(at + "mlp.down_proj.weight", c.hidden, c.intermediate);
  w.gate_bias = take.vector_if(c.mlp_bias, at + "mlp.gate_proj.bias", c.intermediate);
  w.up_bias = take.vector_if(c.mlp_bias, at + "mlp.up_proj.bias", c.intermediate);
  w.down_bias = take.vector_if(c.mlp_bias, at + "mlp.down_proj.bias", c.hidden);
  return w;
}

/// Every weight in the order of the data flow.
template <class Model, class Body>
void for_each_weight(Model& m, const Body& body) {
  body("embedding", m.embedding);
  for (std::size_t i = 0; i < m.layers.size(); ++i) {
    auto& w = m.layers[i];
    for (const auto& [name, weight] : {std::pair{"attention_norm", &w.attention_norm},
                                       {"q", &w.q},
                                       {"k", &w.k},
                                       {"v", &w.v},
                                       {"q_bias", &w.q_bias},
                                       {"k_bias", &w.k_bias},
                                       {"v_bias", &w.v_bias},
                                       {"o", &w.o},
                                       {"o_bias", &w.o_bias},
                                       {"mlp_norm", &w.mlp_norm},
                                       {"gate", &w.gate},
                                       {"up", &w.up},
                                       {"down", &w.down},
                                       {"gate_bias", &w.gate_bias},
                                       {"up_bias", &w.up_bias},
                                       {"down_bias", &w.down_bias}}) {
      body(fmt::format("layer {} {}", i, name), *weight);
    }
  }
  body("final_norm", m.final_norm);
  const bool shared = m.output.data != nullptr && m.output.data == m.embedding.data;
  if (!shared) body("output", m.output);
}

/// An exponent of all ones is infinity or NaN. The flag is as wide as the word and never leaves the loop, so
/// that the loop becomes vector instructions and runs at the speed of memory.
template <class Word>
bool all_finite(const std::byte* data, std::int64_t n, Word exponent) {
  Word bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<std::int64_t>(sizeof(Word)), sizeof word);
    bad = static_cast<Word>(bad | ((word & exponent) == exponent ? ~Word{0} : Word{0}));
  }
  return bad == 0;
}

bool finite(const Weight& w) {
  const std::int64_t n = w.rows * w.cols;
  if (w.type == WeightType::f32) return all_finite<std::uint32_t>(w.data, n, 0x7f800000u);
  if (w.type == WeightType::f16) return all_finite<std::uint16_t>(w.data, n, 0x7c00);
  if (w.type == WeightType::bf16) return all_finite<std::uint16_t>(w.data, n, 0x7f80);
  return blocks_finite(w.type, w.data, n);
}

/// A header of odd length leaves the data at odd addresses, which is legal in a file; kernels read whole
/// numbers, but blocks byte by byte.
bool misaligned(const Weight& w) {
  const auto size = static_cast<std::uintptr_t>(layout_of(w.type).block_bytes);
  return is_plain(w.type) && reinterpret_cast<std::uintptr_t>(w.data) % size != 0;
}

/// As fingerprints have it: plain types had these names before there were others.
std::string_view fingerprint_name(WeightType type) {
  return is_plain(type) ? name_of(plain_dtype(type)) : name_of(type);
}

/// Copies weights at odd addresses to `copies` and points to them there.
void align(ModelWeights& m, std::unique_ptr<std::byte[]>& copies) {
  constexpr std::int64_t kAlignment = 16;  // what the allocator gives
  std::int64_t bytes = 0;
  for_each_weight(m, [&](const std::string&, const Weight& w) {
    if (misaligned(w)) bytes += (bytes_of(w) + kAlignment - 1) / kAlignment * kAlignment;
  });
  if (bytes == 0) return;
  copies = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
  std::byte* at = copies.get();
  for_each_weight(m, [&](const std::string&, Weight& w) {
    if (!misaligned(w)) return;
    std::memcpy(at, w.data, static_cast<std::size_t>(bytes_of(w)));
    w.data = at;
    at += (bytes_of(w) + kAlignment - 1) / kAlignment * kAlignment;
  });
}

/// Names, shapes, types, and some bytes of every weight: enough to tell models apart without reading all of a
/// large one.
std::string fingerprint_of(const ModelWeights& m) {
  constexpr std::int64_t kSample = 4096;
  Hasher hasher;
  for_each_weight(m, [&](const std::string& name, const Weight& w) {
    const std::string line = fmt::format("{} {} {} {}\n", name, w.rows, w.cols, fingerprint_name(w.type));
    hasher.add(std::as_bytes(std::span(line)));
    const std::int64_t size = bytes_of(w), sample = std::min(size, kSample);
    for (const std::int64_t at : {std::int64_t{0}, (size - sample) / 2, size - sample}) {
      hasher.add({w.data + at, static_cast<std::size_t>(sample)});
    }
  });
  return hasher.hex();
}

/// What random() fills: no biases, and no output when it is tied.
void set_shapes(ModelWeights& m, const ModelConfig& c, DType type) {
  const std::int64_t q = std::int64_t{c.query_heads} * c.head_dim, kv = std::int64_t{c.kv_heads} * c.head_dim;
  const auto sized = [&](std::int64_t rows, std::int64_t cols) {
    return Weight{nullptr, weight_type_of(type), rows, cols};
  };
  m.embedding = sized(c.vocab, c.hidden);
  m.final_norm = sized(1, c.hidden);
  if (!c.tied_embeddings) m.output = sized(c.vocab, c.hidden);
  m.layers.resize(static_cast<std::size_t>(c.layers));
  for (LayerWeights& w : m.layers) {
    w.attention_norm = w.mlp_norm = sized(1, c.hidden);
    w.q = sized(q, c.hidden);
    w.k = w.v = sized(kv, c.hidden);
    w.o = sized(c.hidden, q);
    w.gate = w.up = sized(c.intermediate, c.hidden);
    w.down = sized(c.hidden, c.intermediate);
  }
}

template <class T>
T rounded_to(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
  if constexpr (std::is_same_v<T, f16>) return to_f16(x);
}

/// Uniform with the variance of a usual initialisation, four values of 16 bits from each draw: normals for
/// billions of weights would take minutes.
template <class T>
void fill_uniform(T* out, std::int64_t n, float width, Rng rng) {
  constexpr int kPerDraw = 4;
  const float step = width / 32768.0f;
  for (std::int64_t i = 0; i < n; i += kPerDraw) {
    std::uint64_t bits = rng.next();
    for (std::int64_t j = i; j < std::min(n, i + kPerDraw); ++j, bits >>= 16) {
      out[j] = rounded_to<T>(step * (static_cast<float>(static_cast<std::int16_t>(bits & 0xffff)) + 0.5f));
    }
  }
}

template <class T>
void fill_as(T* out, const Weight& w, bool norm, Rng rng) {
  if (norm) return void(std::fill_n(out, w.cols, rounded_to<T>(1.0f)));
  fill_uniform(out, w.rows * w.cols, std::sqrt(3.0f / static_cast<float>(w.cols)), rng);
}

void fill(const Weight& w, std::byte* out, bool norm, Rng rng) {
  if (w.type == WeightType::f32) return fill_as(reinterpret_cast<float*>(out), w, norm, rng);
  if (w.type == WeightType::f16) return fill_as(reinterpret_cast<f16*>(out), w, norm, rng);
  fill_as(reinterpret_cast<bf16*>(out), w, norm, rng);
}

}  // namespace

ModelWeights ModelWeights::read(const std::filesystem::path& dir, const ModelConfig& c, bool check_finite) {
  ModelWeights m;
  NamedTensors all;
  open_weight_files(dir, m.files_, all);
  Taker take(all, dir.string());
  m.embedding = take.matrix("model.embed_tokens.weight", c.vocab, c.hidden);
  for (int layer = 0; layer < c.layers; ++layer) m.layers.push_back(take_layer(take, c, layer));
  m.final_norm = take.vector("model.norm.weight", c.hidden);
  if (!c.tied_embeddings) m.output = take.matrix("lm_head.weight", c.vocab, c.hidden);
  take.finish(c.tied_embeddings);
  align(m, m.owned_);
  for_each_weight(m, [](const std::string&, Weight& w) {
    if (!is_plain(w.type)) w.tiles = std::make_shared<LazyTiles>();
  });
  if (c.tied_embeddings) m.output = m.embedding;
  for_each_weight(m, [&](const std::string& name, const Weight& w) {
    m.bytes += bytes_of(w);
    if (check_finite && w.data != nullptr && !finite(w)) {
      throw InputError(
          fmt::format("{}: weight '{}' holds a NaN or an infinity: the file is damaged", dir.string(), name));
    }
  });
  m.fingerprint = fingerprint_of(m);
  return m;
}

ModelWeights ModelWeights::shapes(const ModelConfig& c, DType type) {
  ModelWeights m;
  set_shapes(m, c, type);
  for_each_weight(m,
                  [&](const std::string&, const Weight& w) { m.bytes += w.rows * w.cols * bytes_of(type); });
  if (c.tied_embeddings) m.output = m.embedding;
  m.fingerprint = "shapes";
  return m;
}

ModelWeights ModelWeights::random(const ModelConfig& c, DType type, std::uint64_t seed) {
  ModelWeights m;
  set_shapes(m, c, type);
  for_each_weight(m,
                  [&](const std::string&, const Weight& w) { m.bytes += w.rows * w.cols * bytes_of(type); });
  m.owned_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(m.bytes));
  std::byte* at = m.owned_.get();
  std::uint64_t stream = 0;
  for_each_weight(m, [&](const std::string& name, Weight& w) {
    if (w.rows == 0) return;
    w.data = at;
    fill(w, at, name.ends_with("norm"), Rng(hash_seed(seed, stream++)));
    at += bytes_of(w);
  });
  if (c.tied_embeddings) m.output = m.embedding;
  m.fingerprint = fingerprint_of(m);
  return m;
}

}  // namespace lode
