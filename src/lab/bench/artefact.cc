// SPDX-License-Identifier: Apache-2.0
// The artefact goes through a file, as a trained one does: what is measured is the method's own code.
#include "lab/bench/artefact.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "select/saap/artefact.h"
#include "select/shared/synthetic_artefact.h"

namespace lode {

namespace {

constexpr std::int64_t kClusters = 1024, kKeysPerCluster = 16, kPieceTokens = 512;

/// Keys before RoPE, [Hkv][tokens, d].
std::vector<std::vector<float>> sample_keys(const LayerGeometry& geometry, VectorMaker& keys,
                                            std::int64_t tokens) {
  const std::int64_t heads = geometry.kv_heads, d = geometry.head_dim;
  std::vector<std::vector<float>> sample(static_cast<std::size_t>(heads));
  for (std::int64_t t = 0; t < tokens; t += kPieceTokens) {
    const std::int64_t count = std::min(kPieceTokens, tokens - t);
    keys.make(static_cast<Position>(t), count);
    for (std::int64_t row = 0; row < count * heads; ++row) {
      const float* const x = keys.k_unrotated.data() + row * d;
      sample[static_cast<std::size_t>(row % heads)].insert(
          sample[static_cast<std::size_t>(row % heads)].end(), x, x + d);
    }
  }
  return sample;
}

void write_saap(const std::filesystem::path& path, const Spec& spec, const LayerGeometry& geometry,
                std::string_view fingerprint, VectorMaker& keys, double largest, int first_layer) {
  const std::int64_t d = geometry.head_dim, clusters = spec.integer("clusters", kClusters, 1, 1 << 16);
  const auto sample = sample_keys(geometry, keys, clusters * kKeysPerCluster);
  // Centroids lie closer to the keys that they were made of than to others.
  const auto others = largest > 0.0 ? sample_keys(geometry, keys, clusters * kKeysPerCluster)
                                    : std::vector<std::vector<float>>(sample.size());
  std::vector<SaapHead> heads;
  for (std::size_t h = 0; h < sample.size(); ++h) {
    Rng rng(hash_seed(geometry.seed, geometry.layer, h));
    heads.push_back(
        {.keys = centroid_net({sample[h].data(), std::ssize(sample[h]) / d, d}, clusters,
                              hash_seed(geometry.seed, h), *geometry.pool),
         .networks = {{.queries = made_up_classifier(d, clusters, DType::f16, rng), .selectivity = {1.0f}}},
         .load =
             std::vector<float>(static_cast<std::size_t>(clusters), 1.0f / static_cast<float>(clusters))});
    if (largest > 0.0) {
      enlarge_first_bucket(heads.back().keys, heads.back().networks.front().queries,
                           {others[h].data(), std::ssize(others[h]) / d, d}, largest);
    }
  }
  std::map<int, std::vector<SaapHead>> layers;
  for (int layer = first_layer; layer <= geometry.layer; ++layer) layers.emplace(layer, heads);
  lode::write_saap(path, layers, fingerprint, {{.from = 0, .training = "{}"}});
}

/// The same functions in every layer.
void write_hash(const std::filesystem::path& path, const Spec& spec, const LayerGeometry& geometry,
                int layers, std::string_view fingerprint) {
  Rng rng(geometry.seed);
  const HashWeights weights =
      made_up_hash(geometry.query_heads, geometry.kv_heads, geometry.head_dim,
                   static_cast<int>(spec.integer("bits", 32, 32, 128)), /*hidden=*/2, rng);
  write_hash_weights(path, std::vector(static_cast<std::size_t>(layers), weights), fingerprint, {});
}

}  // namespace

TemporaryFile::TemporaryFile()
    : path_(std::filesystem::temp_directory_path() /
            ("lodestone-bench-" + std::to_string(getpid()) + ".safetensors")) {}

TemporaryFile::~TemporaryFile() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

static Spec with_weights(const Spec& spec, const TemporaryFile& file) {
  Spec with_file = spec;
  with_file.given["weights"] = file.path().string();
  return with_file;
}

Spec with_made_up_hash(const Spec& spec, const ModelConfig& config, std::string_view fingerprint,
                       const TemporaryFile& file) {
  if (spec.name != "hash" || spec.text("weights")) return spec;
  write_hash(file.path(), spec,
             {.query_heads = config.query_heads, .kv_heads = config.kv_heads, .head_dim = config.head_dim},
             config.layers, fingerprint);
  return with_weights(spec, file);
}

Spec with_made_up_saap(const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint,
                       VectorMaker& keys, const TemporaryFile& file) {
  if (spec.name != "saap" || spec.text("weights")) return spec;
  write_saap(file.path(), spec, geometry, fingerprint, keys, /*largest=*/0.0, /*first_layer=*/0);
  return with_weights(spec, file);
}

std::unique_ptr<Selector> make_bench_selector(const Spec& spec, const LayerGeometry& geometry,
                                              std::string_view fingerprint, VectorMaker& keys,
                                              double largest) {
  const auto& make = find_method(spec.name).make;
  const bool saap = spec.name == "saap";
  if (!make) return nullptr;
  if ((!saap && spec.name != "hash") || spec.text("weights")) return make(spec, geometry, fingerprint);
  const TemporaryFile file;
  if (saap) {
    write_saap(file.path(), spec, geometry, fingerprint, keys, largest, geometry.layer);
  } else {
    write_hash(file.path(), spec, geometry, geometry.layer + 1, fingerprint);
  }
  return make(with_weights(spec, file), geometry, fingerprint);
}

}  // namespace lode
