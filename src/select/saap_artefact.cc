// SPDX-License-Identifier: Apache-2.0
#include "select/saap_artefact.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "io/safetensors.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr const char* kVersion = "1";

std::string prefix_of(int layer, int head) {
  return fmt::format("layer.{}.head.{}", layer, head);
}

void expect_metadata(const std::map<std::string, std::string>& metadata, const char* key,
                     std::string_view expected, const std::string& where) {
  const auto found = metadata.find(key);
  if (found != metadata.end() && found->second == expected) return;
  throw InputError(fmt::format("{}: expected an artefact of saap with {} '{}', found {}", where, key,
                               expected, found == metadata.end() ? "none given" : "'" + found->second + "'"));
}

SaapHead read_head(const std::map<std::string, Tensor>& tensors, const std::string& prefix, std::int64_t d,
                   const std::string& where) {
  SaapHead head = {.keys = BucketNet::read(tensors, prefix + ".key", d, where),
                   .queries = BucketNet::read(tensors, prefix + ".query", d, where),
                   .load = {},
                   .selectivity = {}};
  const std::int64_t buckets = head.keys.buckets;
  if (head.queries.buckets != buckets) {
    throw InputError(fmt::format("{}: '{}': expected as many buckets for queries as for keys, {}, found {}",
                                 where, prefix, buckets, head.queries.buckets));
  }
  head.load = read_floats(tensors, prefix + ".load", {buckets}, where);
  head.imbalance = read_floats(tensors, prefix + ".imbalance", {1}, where)[0];
  head.selectivity = read_floats(tensors, prefix + ".selectivity", {-1}, where);
  return head;
}

/// Drops the heads that the selector does not cover.
void keep_covered(SaapLayer& layer, const LayerGeometry& geometry, const std::string& where) {
  std::vector<SaapHead> kept;
  for (const int head : geometry.covered) {
    if (head >= std::ssize(layer.heads)) {
      throw InputError(fmt::format("{}: layer {}: expected a head {}, found {} heads", where, geometry.layer,
                                   head, layer.heads.size()));
    }
    kept.push_back(layer.heads[static_cast<std::size_t>(head)]);
  }
  layer.heads = std::move(kept);
}

std::string fingerprint_of(const std::vector<SaapHead>& heads) {
  Hasher hasher;
  const auto add = [&](const std::vector<float>& x) { hasher.add(std::as_bytes(std::span(x))); };
  for (const SaapHead& head : heads) {
    for (const BucketNet* net : {&head.keys, &head.queries}) {
      for (const std::vector<std::byte>* part :
           {&net->hidden_weight, &net->output_weight, &net->linear_weight})
        hasher.add(*part);
      add(net->hidden_bias);
      add(net->bias);
    }
    add(head.load);
    add({head.imbalance});
    add(head.selectivity);
  }
  return hasher.hex();
}

/// From what `train saap` says of itself; 0 where a file says something else.
std::int64_t reach_of(const std::map<std::string, std::string>& metadata) {
  const auto found = metadata.find("training");
  const Json made = found == metadata.end() ? Json() : Json::parse(found->second, nullptr, false);
  const auto number = [&](const char* key) {
    const bool there = made.is_object() && made.contains(key) && made[key].is_number_unsigned();
    return there ? std::min(made[key].get<std::uint64_t>(), std::uint64_t{1} << 40) : 0;
  };
  const std::uint64_t prompts = number("prompts");
  return prompts == 0 ? 0 : static_cast<std::int64_t>(number("tokens") / prompts + number("shift"));
}

std::string fingerprint_key(int layer) {
  return fmt::format("layer.{}.fingerprint", layer);
}

}  // namespace

double SaapHead::expected_selectivity(std::int64_t probes) const {
  const double at = std::log2(static_cast<double>(std::max<std::int64_t>(1, probes)));
  const auto last = static_cast<double>(selectivity.size() - 1);
  if (at >= last) return selectivity.back();
  const auto below = static_cast<std::size_t>(at);
  const double part = at - static_cast<double>(below);
  return (1.0 - part) * selectivity[below] + part * selectivity[below + 1];
}

SaapLayer read_saap(const std::filesystem::path& path, const LayerGeometry& geometry,
                    std::string_view model_fingerprint) {
  const MappedFile file(path);
  const std::string where = path.string();
  std::map<std::string, std::string> metadata;
  const auto tensors = parse_safetensors(file.bytes(), where, &metadata);
  expect_metadata(metadata, "method", "saap", where);
  expect_metadata(metadata, "version", kVersion, where);
  expect_metadata(metadata, "model_fingerprint", model_fingerprint, where);
  SaapLayer layer;
  // The fingerprint is that of the whole layer, so all heads are read, whichever are covered.
  int heads = geometry.kv_heads;
  while (!geometry.covered.empty() && tensors.contains(prefix_of(geometry.layer, heads) + ".load")) ++heads;
  for (int head = 0; head < heads; ++head) {
    const std::string prefix = prefix_of(geometry.layer, head);
    layer.heads.push_back(read_head(tensors, prefix, geometry.head_dim, where));
    const SaapHead& last = layer.heads.back();
    if (last.keys.buckets != layer.buckets()) {
      throw InputError(fmt::format("{}: '{}': expected {} buckets as in head 0, found {}", where, prefix,
                                   layer.buckets(), last.keys.buckets));
    }
  }
  layer.fingerprint = fingerprint_of(layer.heads);
  expect_metadata(metadata, fingerprint_key(geometry.layer).c_str(), layer.fingerprint, where);
  layer.reach = reach_of(metadata);
  if (!geometry.covered.empty()) keep_covered(layer, geometry, where);
  return layer;
}

void write_saap(const std::filesystem::path& path, const std::map<int, std::vector<SaapHead>>& layers,
                std::string_view model_fingerprint, const std::string& training) {
  std::vector<TensorToWrite> tensors;
  std::map<std::string, std::string> metadata = {{"method", "saap"},
                                                 {"version", kVersion},
                                                 {"model_fingerprint", std::string(model_fingerprint)},
                                                 {"training", training}};
  for (const auto& [layer, heads] : layers) {
    metadata[fingerprint_key(layer)] = fingerprint_of(heads);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::string prefix = prefix_of(layer, static_cast<int>(h));
      const SaapHead& head = heads[h];
      head.keys.write(prefix + ".key", tensors);
      head.queries.write(prefix + ".query", tensors);
      const auto add = [&](const char* name, std::span<const float> x) {
        tensors.push_back({prefix + name, DType::f32, {std::ssize(x)}, std::as_bytes(x)});
      };
      add(".load", head.load);
      add(".imbalance", {&head.imbalance, 1});
      add(".selectivity", head.selectivity);
    }
  }
  write_safetensors(path, tensors, metadata);
}

double imbalance_of(std::span<const std::int64_t> counts) {
  double keys = 0, pairs = 0;
  for (const std::int64_t n : counts) {
    keys += static_cast<double>(n);
    pairs += static_cast<double>(n) * static_cast<double>(n - 1);
  }
  return keys < 2 ? 1.0 : static_cast<double>(counts.size()) * pairs / (keys * (keys - 1));
}

}  // namespace lode
