// SPDX-License-Identifier: Apache-2.0
#include "select/saap/artefact.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "lodestone/error.h"
#include "select/trained_on.h"

namespace lode {

namespace {

constexpr Position kMostFrom = std::numeric_limits<Position>::max();

std::string prefix_of(int layer, int head) {
  return fmt::format("layer.{}.head.{}", layer, head);
}

/// Of a network's tensors and of what metadata says of it: "" for the first, ".2" for the second, ...
std::string suffix_of(std::size_t network) {
  return network == 0 ? "" : fmt::format(".{}", network + 1);
}
std::string selectivity_name(std::size_t network) {
  return network == 0 ? ".selectivity" : ".query" + suffix_of(network) + ".selectivity";
}
std::string training_key(std::size_t network) {
  return network == 0 ? "training" : "network" + suffix_of(network) + ".training";
}

void expect_metadata(const std::map<std::string, std::string>& metadata, const char* key,
                     std::string_view expected, const std::string& where) {
  const auto found = metadata.find(key);
  if (found != metadata.end() && found->second == expected) return;
  throw InputError(fmt::format("{}: expected an artefact of saap with {} '{}', found {}", where, key,
                               expected, found == metadata.end() ? "none given" : "'" + found->second + "'"));
}

SaapHead read_head(const std::map<std::string, Tensor>& tensors, const std::string& prefix,
                   std::size_t networks, std::int64_t d, const std::string& where) {
  SaapHead head = {.keys = BucketNet::read(tensors, prefix + ".key", d, where), .networks = {}, .load = {}};
  const std::int64_t buckets = head.keys.buckets;
  for (std::size_t k = 0; k < networks; ++k) {
    head.networks.push_back({.queries = BucketNet::read(tensors, prefix + ".query" + suffix_of(k), d, where),
                             .selectivity = read_floats(tensors, prefix + selectivity_name(k), {-1}, where)});
    const std::int64_t found = head.networks.back().queries.buckets;
    if (found == buckets) continue;
    throw InputError(
        fmt::format("{}: '{}.query{}': expected as many buckets for queries as for keys, {}, "
                    "found {}",
                    where, prefix, suffix_of(k), buckets, found));
  }
  head.load = read_floats(tensors, prefix + ".load", {buckets}, where);
  head.imbalance = read_floats(tensors, prefix + ".imbalance", {1}, where)[0];
  return head;
}

/// A whole number in the metadata, in [least, most].
std::int64_t read_number(const std::map<std::string, std::string>& metadata, const std::string& key,
                         std::int64_t least, std::int64_t most, const std::string& where) {
  const auto found = metadata.find(key);
  const std::string text = found == metadata.end() ? "" : found->second;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most)
    return value;
  throw InputError(fmt::format("{}: '{}': expected a whole number from {} to {}, found '{}'", where, key,
                               least, most, excerpt(text)));
}

/// Of how many networks the file is, and which positions are whose.
std::vector<SaapStretch> read_stretches(const std::map<std::string, std::string>& metadata,
                                        const std::string& where) {
  expect_metadata(metadata, "method", "saap", where);
  const auto version = metadata.find("version");
  if (version == metadata.end() || (version->second != "1" && version->second != "2")) {
    throw InputError(
        fmt::format("{}: expected an artefact of saap with version '1' or '2', found {}", where,
                    version == metadata.end() ? "none given" : "'" + excerpt(version->second) + "'"));
  }
  const bool several = metadata.contains("networks");
  const std::int64_t networks = several ? read_number(metadata, "networks", 1, kMostSaapNetworks, where) : 1;
  std::vector<SaapStretch> stretches(static_cast<std::size_t>(networks));
  for (std::size_t k = 0; k < stretches.size(); ++k) {
    if (k > 0) {
      stretches[k].from =
          static_cast<Position>(read_number(metadata, "network" + suffix_of(k) + ".from",
                                            std::int64_t{stretches[k - 1].from} + 1, kMostFrom, where));
    }
    const auto found = metadata.find(training_key(k));
    if (found != metadata.end()) stretches[k].training = found->second;
  }
  return stretches;
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

std::string fingerprint_of(const std::vector<SaapHead>& heads, const std::vector<SaapStretch>& stretches) {
  Hasher hasher;
  const auto add = [&](const std::vector<float>& x) { hasher.add(std::as_bytes(std::span(x))); };
  const auto add_net = [&](const BucketNet& net) {
    for (const std::vector<std::byte>* part : {&net.hidden_weight, &net.output_weight, &net.linear_weight})
      hasher.add(*part);
    add(net.hidden_bias);
    add(net.bias);
  };
  for (const SaapHead& head : heads) {
    if (head.near_only) hasher.add(std::as_bytes(std::span(std::string_view("near only"))));
    add_net(head.keys);
    add_net(head.networks.front().queries);
    add(head.load);
    add({head.imbalance});
    add(head.networks.front().selectivity);
    for (std::size_t k = 1; k < head.networks.size(); ++k) {
      add_net(head.networks[k].queries);
      add(head.networks[k].selectivity);
      hasher.add(std::as_bytes(std::span(&stretches[k].from, 1)));
    }
  }
  return hasher.hex();
}

std::string fingerprint_key(int layer) {
  return fmt::format("layer.{}.fingerprint", layer);
}

}  // namespace

/// From what `train saap` says of itself; 0 where a file says something else.
std::int64_t SaapStretch::reach() const {
  return TrainedOn::parse(training).reach;
}

Position switch_between(std::int64_t shorter, std::int64_t longer) {
  const double middle = std::sqrt(static_cast<double>(shorter) * static_cast<double>(longer));
  return static_cast<Position>(std::clamp(middle, 1.0, static_cast<double>(kMostFrom)));
}

std::size_t SaapLayer::network_for(Position query) const {
  std::size_t network = 0;
  while (network + 1 < stretches.size() && stretches[network + 1].from <= query) ++network;
  return network;
}

double SaapNetwork::expected_selectivity(std::int64_t probes) const {
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
  const auto tensors = parse_safetensors(file, &metadata);
  SaapLayer layer = {.heads = {}, .fingerprint = {}, .stretches = read_stretches(metadata, where)};
  expect_metadata(metadata, "model_fingerprint", model_fingerprint, where);
  // The fingerprint is that of the whole layer, so all heads are read, whichever are covered.
  int heads = geometry.kv_heads;
  while (!geometry.covered.empty() && tensors.contains(prefix_of(geometry.layer, heads) + ".load")) ++heads;
  for (int head = 0; head < heads; ++head) {
    const std::string prefix = prefix_of(geometry.layer, head);
    layer.heads.push_back(read_head(tensors, prefix, layer.stretches.size(), geometry.head_dim, where));
    layer.heads.back().near_only = metadata.contains(prefix + ".near_only");
    const SaapHead& last = layer.heads.back();
    if (last.keys.buckets != layer.buckets()) {
      throw InputError(fmt::format("{}: '{}': expected {} buckets as in head 0, found {}", where, prefix,
                                   layer.buckets(), last.keys.buckets));
    }
  }
  layer.fingerprint = fingerprint_of(layer.heads, layer.stretches);
  expect_metadata(metadata, fingerprint_key(geometry.layer).c_str(), layer.fingerprint, where);
  if (!geometry.covered.empty()) keep_covered(layer, geometry, where);
  return layer;
}

std::vector<SaapStretch> read_saap_stretches(const std::filesystem::path& path) {
  const MappedFile file(path);
  std::map<std::string, std::string> metadata;
  parse_safetensors(file, &metadata);
  return read_stretches(metadata, path.string());
}

std::map<int, std::string> read_saap_fingerprints(const std::filesystem::path& path) {
  const MappedFile file(path);
  std::map<std::string, std::string> metadata;
  parse_safetensors(file, &metadata);
  std::map<int, std::string> found;
  for (const auto& [key, value] : metadata) {
    int layer = 0, end = 0;
    if (std::sscanf(key.c_str(), "layer.%d.fingerprint%n", &layer, &end) == 1 && end == std::ssize(key))
      found[layer] = value;
  }
  return found;
}

void write_saap(const std::filesystem::path& path, const std::map<int, std::vector<SaapHead>>& layers,
                std::string_view model_fingerprint, const std::vector<SaapStretch>& stretches) {
  std::vector<TensorToWrite> tensors;
  std::deque<std::vector<std::byte>> bytes;  // made for the file
  bool plain = stretches.size() == 1;
  std::map<std::string, std::string> metadata = {{"method", "saap"},
                                                 {"model_fingerprint", std::string(model_fingerprint)}};
  if (!plain) metadata["networks"] = std::to_string(stretches.size());
  for (std::size_t k = 0; k < stretches.size(); ++k) {
    metadata[training_key(k)] = stretches[k].training;
    if (k > 0) metadata["network" + suffix_of(k) + ".from"] = std::to_string(stretches[k].from);
  }
  for (const auto& [layer, heads] : layers) {
    metadata[fingerprint_key(layer)] = fingerprint_of(heads, stretches);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::string prefix = prefix_of(layer, static_cast<int>(h));
      const SaapHead& head = heads[h];
      LODE_ASSERT(head.networks.size() == stretches.size());
      if (head.near_only) metadata[prefix + ".near_only"] = "1";
      head.keys.write(prefix + ".key", tensors, bytes);
      const auto add = [&](const std::string& name, std::span<const float> x) {
        tensors.push_back({prefix + name, DType::f32, {std::ssize(x)}, std::as_bytes(x)});
      };
      add(".load", head.load);
      add(".imbalance", {&head.imbalance, 1});
      for (std::size_t k = 0; k < head.networks.size(); ++k) {
        const SaapNetwork& network = head.networks[k];
        network.queries.write(prefix + ".query" + suffix_of(k), tensors, bytes);
        add(selectivity_name(k), network.selectivity);
        plain = plain && !network.queries.in_8_bits;
      }
      plain = plain && !head.keys.in_8_bits;
    }
  }
  metadata["version"] = plain ? "1" : "2";
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
