// SPDX-License-Identifier: Apache-2.0
#include "select/shared/centroids.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/cancel.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/threads.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "kv/store.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxClusters = std::int64_t{1} << 20;

std::string tensor_name(int layer, int head) {
  return fmt::format("layer.{}.head.{}.centroids", layer, head);
}

void expect_metadata(const std::map<std::string, std::string>& metadata, const char* key,
                     std::string_view expected, const std::string& where) {
  const auto found = metadata.find(key);
  if (found != metadata.end() && found->second == expected) return;
  throw InputError(fmt::format("{}: expected centroids with {} '{}', found {}", where, key, expected,
                               found == metadata.end() ? "none given" : "'" + excerpt(found->second) + "'"));
}

std::vector<float> unit_rows(const Tensor& tensor, const std::string& name, const std::string& where) {
  const auto d = static_cast<std::size_t>(tensor.shape[1]);
  std::vector<float> rows(static_cast<std::size_t>(tensor.elements()));
  kernels().widen(tensor.bytes.data(), float_type(tensor, name, where), tensor.elements(), rows.data());
  for (std::size_t at = 0; at < rows.size(); at += d) {
    double sum = 0.0;
    for (std::size_t i = 0; i < d; ++i) sum += static_cast<double>(rows[at + i]) * rows[at + i];
    if (!std::isfinite(sum))
      throw InputError(fmt::format("{}: tensor '{}': expected finite numbers, found others", where, name));
    const double inverse = sum > 0.0 ? 1.0 / std::sqrt(sum) : 0.0;
    for (std::size_t i = 0; i < d; ++i) rows[at + i] = static_cast<float>(rows[at + i] * inverse);
  }
  return rows;
}

}  // namespace

std::vector<std::vector<float>> read_centroids(const std::filesystem::path& path,
                                               const LayerGeometry& geometry, bool roped,
                                               std::string_view model_fingerprint) {
  const std::string where = path.string();
  if (!std::filesystem::exists(path))
    throw InputError(
        fmt::format("{}: expected centroids, which `lodestone train kmeans -m MODEL -f TEXT{} -o {}` "
                    "makes, found no such file",
                    where, roped ? " --rope on" : "", where));
  const MappedFile file(path);
  std::map<std::string, std::string> metadata;
  const auto tensors = parse_safetensors(file, &metadata);
  expect_metadata(metadata, "rope", roped ? "on" : "off", where);
  expect_metadata(metadata, "model_fingerprint", model_fingerprint, where);
  std::vector<std::vector<float>> heads;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    const std::string name = tensor_name(geometry.layer, geometry.kv_head_in_layer(head));
    const auto found = tensors.find(name);
    if (found == tensors.end())
      throw InputError(fmt::format("{}: expected a tensor '{}', found none", where, name));
    const std::vector<std::int64_t>& shape = found->second.shape;
    if (shape.size() != 2 || shape[0] < 1 || shape[0] > kMaxClusters || shape[1] != geometry.head_dim) {
      throw InputError(fmt::format("{}: tensor '{}': expected the shape [1 to {}, {}], found another", where,
                                   name, kMaxClusters, geometry.head_dim));
    }
    heads.push_back(unit_rows(found->second, name, where));
    if (heads.back().size() != heads.front().size()) {
      throw InputError(fmt::format("{}: tensor '{}': expected {} centroids as in head 0, found {}", where,
                                   name, std::ssize(heads.front()) / geometry.head_dim, shape[0]));
    }
  }
  return heads;
}

void write_centroids(const std::filesystem::path& path,
                     const std::vector<std::vector<std::vector<float>>>& layers, int head_dim, bool roped,
                     std::string_view model_fingerprint) {
  std::vector<TensorToWrite> tensors;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    for (std::size_t head = 0; head < layers[layer].size(); ++head) {
      const std::vector<float>& rows = layers[layer][head];
      tensors.push_back({.name = tensor_name(static_cast<int>(layer), static_cast<int>(head)),
                         .type = DType::f32,
                         .shape = {std::ssize(rows) / head_dim, head_dim},
                         .bytes = std::as_bytes(std::span(rows))});
    }
  }
  write_safetensors(path, tensors,
                    {{"format", "lodestone centroids"},
                     {"rope", roped ? "on" : "off"},
                     {"model_fingerprint", std::string(model_fingerprint)}});
}

CentroidTrainer::CentroidTrainer(int layers, int kv_heads, int head_dim, bool roped, std::uint64_t seed)
    : kv_heads_(kv_heads), head_dim_(head_dim), roped_(roped), seed_(seed) {
  keys_.assign(static_cast<std::size_t>(layers),
               std::vector<std::vector<float>>(static_cast<std::size_t>(kv_heads)));
}

std::int64_t CentroidTrainer::keys() const {
  return std::ssize(keys_[0][0]) / head_dim_;
}

Matrix<const float> CentroidTrainer::sample(int layer, int head) const {
  const std::vector<float>& own = keys_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
  return {own.data(), std::ssize(own) / head_dim_, head_dim_};
}

void CentroidTrainer::add(const KvStore& kv, const Rope& rope, std::int64_t sink, std::int64_t count,
                          ThreadPool& pool) {
  std::vector<Position> positions;
  for (std::int64_t p = sink; p < kv.tokens(); ++p) positions.push_back(static_cast<Position>(p));
  Rng rng(hash_seed(seed_, texts_++));
  count = std::min(count, std::ssize(positions));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto pick =
        i + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(std::ssize(positions) - i)));
    std::swap(positions[static_cast<std::size_t>(i)], positions[static_cast<std::size_t>(pick)]);
  }
  positions.resize(static_cast<std::size_t>(count));
  pool.for_each(std::ssize(keys_), [&](std::int64_t layer, int) {
    const KvLayer view = kv.layer(static_cast<int>(layer));
    std::vector<float> row(static_cast<std::size_t>(kv_heads_ * head_dim_));  // [Hkv, d]
    for (const Position position : positions) {
      check_cancel();
      read_stored_keys(view.heads, position, roped_ ? nullptr : &rope, row);
      for (int head = 0; head < kv_heads_; ++head) {
        std::vector<float>& to = keys_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
        to.insert(to.end(), row.begin() + head * head_dim_, row.begin() + (head + 1) * head_dim_);
      }
    }
  });
}

std::vector<std::vector<std::vector<float>>> CentroidTrainer::train(
    std::int64_t clusters, ThreadPool& pool, const std::function<void(std::int64_t)>& progress) const {
  const Cluster cluster = [&](Matrix<const float> keys, const KMeansOptions& options) {
    return spherical_kmeans(keys, options, pool);
  };
  return train(clusters, cluster, progress);
}

std::vector<std::vector<std::vector<float>>> CentroidTrainer::train(
    std::int64_t clusters, const Cluster& cluster, const std::function<void(std::int64_t)>& progress) const {
  if (keys() < clusters) {
    throw InputError(fmt::format(
        "expected texts of at least {} tokens, as many as there are centroids, found {}", clusters, keys()));
  }
  std::vector<std::vector<std::vector<float>>> centroids(keys_.size());
  std::int64_t done = 0;
  for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
    for (std::size_t head = 0; head < keys_[layer].size(); ++head) {
      centroids[layer].push_back(cluster({keys_[layer][head].data(), keys(), head_dim_},
                                         {.clusters = clusters, .seed = hash_seed(seed_, layer, head)}));
      if (progress) progress(++done);
    }
  }
  return centroids;
}

}  // namespace lode
