// SPDX-License-Identifier: Apache-2.0
#include "select/hash/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr int kMaxLayers = 8;
constexpr std::int64_t kMaxWidth = 8192;
constexpr std::string_view kFormat = "lodestone hash";
constexpr std::array<std::string_view, 3> kBits = {"32", "64", "128"};
constexpr std::array<std::string_view, 2> kRope = {"off", "on"};
constexpr std::array<std::string_view, 2> kKeys = {"kv-head", "query-head"};
constexpr std::array<std::string_view, 3> kValues = {"off", "norm", "vector"};
constexpr std::array<std::string_view, 2> kActivation = {"silu", "relu"};

using Metadata = std::map<std::string, std::string>;

/// A safetensors file and what its messages begin with.
struct Source {
  std::string where;
  std::map<std::string, Tensor> tensors;
  Metadata metadata;
};

Source open_source(const MappedFile& file) {
  Source source = {.where = file.path().string(), .tensors = {}, .metadata = {}};
  source.tensors = parse_safetensors(file, &source.metadata);
  return source;
}

[[noreturn]] void refuse(const Source& source, const std::string& expected, const std::string& found) {
  throw InputError(fmt::format("{}: expected {}, found {}", source.where, expected, found));
}

std::size_t choice(const Source& source, const char* key, std::span<const std::string_view> valid) {
  const auto found = source.metadata.find(key);
  const auto at =
      found == source.metadata.end() ? valid.end() : std::find(valid.begin(), valid.end(), found->second);
  if (at == valid.end()) {
    refuse(source, fmt::format("a HashAttention file whose {} is one of {}", key, fmt::join(valid, ", ")),
           found == source.metadata.end() ? "none given" : "'" + excerpt(found->second) + "'");
  }
  return static_cast<std::size_t>(at - valid.begin());
}

HashScheme scheme_of(const Source& source) {
  choice(source, "format", {&kFormat, 1});
  return {.bits = 32 << choice(source, "bits", kBits),
          .roped = choice(source, "rope", kRope) == 1,
          .per_query_head = choice(source, "keys", kKeys) == 1,
          .values = static_cast<HashScheme::Values>(choice(source, "values", kValues)),
          .activation = static_cast<HashNet::Activation>(choice(source, "activation", kActivation))};
}

Metadata metadata_of(const HashScheme& s) {
  return {{"format", std::string(kFormat)},
          {"bits", std::to_string(s.bits)},
          {"rope", std::string(kRope[s.roped])},
          {"keys", std::string(kKeys[s.per_query_head])},
          {"values", std::string(kValues[static_cast<std::size_t>(s.values)])},
          {"activation", std::string(kActivation[static_cast<std::size_t>(s.activation)])}};
}

/// The tensor's numbers; InputError unless all are finite.
std::vector<float> numbers(const Source& source, const std::string& name, const Tensor& tensor) {
  std::vector<float> x(static_cast<std::size_t>(tensor.elements()));
  kernels().widen(tensor.bytes.data(), float_type(tensor, name, source.where), tensor.elements(), x.data());
  if (!std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); }))
    refuse(source, fmt::format("finite numbers in tensor '{}'", name), "others");
  return x;
}

std::string shape_text(const Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
}

HashLayer read_layer(const Source& source, const std::string& prefix, int index, std::int64_t in) {
  const std::string name = fmt::format("{}.weight.{}", prefix, index);
  const auto found = source.tensors.find(name);
  if (found == source.tensors.end()) refuse(source, fmt::format("a tensor '{}'", name), "none");
  const Tensor& weight = found->second;
  if (weight.shape.size() != 2 || weight.shape[1] != in || weight.shape[0] < 1 ||
      weight.shape[0] > kMaxWidth) {
    refuse(source, fmt::format("the shape [1 to {}, {}] for tensor '{}'", kMaxWidth, in, name),
           shape_text(weight));
  }
  HashLayer layer = {.in = in,
                     .out = weight.shape[0],
                     .type = float_type(weight, name, source.where),
                     .weight = {weight.bytes.begin(), weight.bytes.end()},
                     .bias = {}};
  numbers(source, name, weight);
  const std::string bias_name = fmt::format("{}.bias.{}", prefix, index);
  if (const auto bias = source.tensors.find(bias_name); bias != source.tensors.end()) {
    if (bias->second.shape != std::vector<std::int64_t>{layer.out}) {
      refuse(source, fmt::format("the shape [{}] for tensor '{}'", layer.out, bias_name),
             shape_text(bias->second));
    }
    layer.bias = numbers(source, bias_name, bias->second);
  }
  return layer;
}

HashNet read_net(const Source& source, const std::string& prefix, std::int64_t inputs,
                 const HashScheme& scheme) {
  std::vector<HashLayer> layers;
  do {
    const int index = static_cast<int>(layers.size());
    layers.push_back(read_layer(source, prefix, index, index == 0 ? inputs : layers.back().out));
  } while (layers.size() < kMaxLayers &&
           source.tensors.contains(fmt::format("{}.weight.{}", prefix, layers.size())));
  if (layers.back().out != scheme.bits) {
    refuse(source, fmt::format("{} outputs of '{}', as the file's bits say", scheme.bits, prefix),
           std::to_string(layers.back().out));
  }
  return {std::move(layers), scheme.activation};
}

std::string net_name(std::size_t layer, const char* side, std::size_t head) {
  return fmt::format("layer.{}.{}.{}", layer, side, head);
}

void add_net(const HashNet& net, const std::string& prefix, std::vector<TensorToWrite>& tensors) {
  for (std::size_t i = 0; i < net.layers().size(); ++i) {
    const HashLayer& layer = net.layers()[i];
    tensors.push_back({.name = fmt::format("{}.weight.{}", prefix, i),
                       .type = layer.type,
                       .shape = {layer.out, layer.in},
                       .bytes = layer.weight});
    if (layer.bias.empty()) continue;
    tensors.push_back({.name = fmt::format("{}.bias.{}", prefix, i),
                       .type = DType::f32,
                       .shape = {layer.out},
                       .bytes = std::as_bytes(std::span(layer.bias))});
  }
}

}  // namespace

void read_key_inputs(const HashScheme& scheme, std::span<const KvRows> heads, Position row, const Rope* rope,
                     float* out, std::int64_t stride) {
  const auto d = static_cast<std::size_t>(heads.front().d);
  std::vector<float> x(heads.size() * d);  // [heads, d]
  const auto place = [&](std::size_t head) { return out + static_cast<std::int64_t>(head) * stride; };
  read_stored_keys(heads, row, scheme.roped ? nullptr : rope, x);
  for (std::size_t h = 0; h < heads.size(); ++h) std::copy_n(x.data() + h * d, d, place(h));
  if (scheme.values == HashScheme::Values::off) return;
  read_stored_values(heads, row, x);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const float* const v = x.data() + h * d;
    if (scheme.values == HashScheme::Values::vector) {
      std::copy_n(v, d, place(h) + d);
    } else {
      place(h)[d] = std::sqrt(kernels().dot(v, v, static_cast<std::int64_t>(d)));
    }
  }
}

std::string HashWeights::fingerprint() const {
  Hasher hasher;
  for (const auto& [name, value] : metadata_of(scheme)) {
    const std::string line = name + "=" + value + "\n";
    hasher.add(std::as_bytes(std::span(line)));
  }
  for (const std::vector<HashNet>* nets : {&query, &key}) {
    for (const HashNet& net : *nets) {
      for (const HashLayer& layer : net.layers()) {
        hasher.add(layer.weight);
        hasher.add(std::as_bytes(std::span(layer.bias)));
      }
    }
  }
  return hasher.hex();
}

HashScheme read_hash_scheme(const std::filesystem::path& path) {
  const MappedFile file(path);
  return scheme_of(open_source(file));
}

HashWeights read_hash_weights(const std::filesystem::path& path, const LayerGeometry& geometry,
                              std::string_view model_fingerprint) {
  const MappedFile file(path);
  const Source source = open_source(file);
  HashWeights weights = {.scheme = scheme_of(source), .query = {}, .key = {}};
  if (const auto made = source.metadata.find("training"); made != source.metadata.end())
    weights.trained = TrainedOn::parse(made->second);
  choice(source, "model_fingerprint", {&model_fingerprint, 1});
  const auto layer = static_cast<std::size_t>(geometry.layer);
  for (int head = 0; head < geometry.query_heads; ++head) {
    weights.query.push_back(read_net(
        source, net_name(layer, "query", static_cast<std::size_t>(geometry.query_head_in_layer(head))),
        geometry.head_dim, weights.scheme));
  }
  for (int s = 0; s < weights.scheme.signatures(geometry); ++s) {
    const int head =
        weights.scheme.per_query_head ? geometry.query_head_in_layer(s) : geometry.kv_head_in_layer(s);
    weights.key.push_back(read_net(source, net_name(layer, "key", static_cast<std::size_t>(head)),
                                   weights.scheme.key_inputs(geometry.head_dim), weights.scheme));
  }
  return weights;
}

void write_hash_weights(const std::filesystem::path& path, const std::vector<HashWeights>& layers,
                        std::string_view model_fingerprint, const std::map<std::string, std::string>& notes) {
  std::vector<TensorToWrite> tensors;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t h = 0; h < layers[l].query.size(); ++h)
      add_net(layers[l].query[h], net_name(l, "query", h), tensors);
    for (std::size_t s = 0; s < layers[l].key.size(); ++s)
      add_net(layers[l].key[s], net_name(l, "key", s), tensors);
  }
  Metadata metadata = notes;
  metadata.merge(metadata_of(layers.front().scheme));
  metadata["model_fingerprint"] = std::string(model_fingerprint);
  write_safetensors(path, tensors, metadata);
}

}  // namespace lode
