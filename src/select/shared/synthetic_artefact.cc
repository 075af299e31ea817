// SPDX-License-Identifier: Apache-2.0
#include "select/shared/synthetic_artefact.h"

#include <algorithm>
#include <cmath>

#include "ann/kmeans.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

HashNet made_up_net(const std::vector<std::int64_t>& widths, Rng& rng) {
  std::vector<HashLayer> layers;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    HashLayer layer = {.in = widths[i], .out = widths[i + 1], .type = DType::f16, .weight = {}, .bias = {}};
    const double width = 1.0 / std::sqrt(static_cast<double>(layer.in));
    std::vector<float> x(static_cast<std::size_t>(layer.in * layer.out));
    for (float& value : x) value = static_cast<float>(rng.normal() * width);
    layer.weight.resize(2 * x.size());
    kernels().narrow(x.data(), std::ssize(x), layer.type, layer.weight.data());
    layer.bias.assign(static_cast<std::size_t>(layer.out), 0.0f);
    layers.push_back(std::move(layer));
  }
  return {std::move(layers), HashNet::Activation::silu};
}

}  // namespace

BucketNet made_up_classifier(std::int64_t d, std::int64_t buckets, DType type, Rng& rng) {
  constexpr std::int64_t kHidden = 1024;
  std::vector<float> hidden(static_cast<std::size_t>(kHidden * d)),
      output(static_cast<std::size_t>(buckets * kHidden)), zero(static_cast<std::size_t>(kHidden), 0.0f);
  for (float& x : hidden) x = static_cast<float>(rng.uniform() - 0.5);
  // Scores of usual queries lie within a few units: no bucket's share of the softmax is too small for a
  // float.
  for (float& x : output) x = static_cast<float>(rng.uniform() - 0.5) / 32.0f;
  return {d, buckets,
          BucketNet::Weights{.hidden_weight = hidden,
                             .hidden_bias = zero,
                             .output_weight = output,
                             .linear_weight = {},
                             .bias = {}},
          type};
}

BucketNet centroid_net(Matrix<const float> keys, std::int64_t clusters, std::uint64_t seed,
                       ThreadPool& pool) {
  const std::vector<float> centroids = spherical_kmeans(keys, {.clusters = clusters, .seed = seed}, pool);
  return {keys.cols, clusters,
          BucketNet::Weights{.hidden_weight = {},
                             .hidden_bias = {},
                             .output_weight = {},
                             .linear_weight = centroids,
                             .bias = {}},
          DType::f32};
}

void enlarge_first_bucket(BucketNet& keys, BucketNet& queries, Matrix<const float> sample, double share) {
  LODE_ASSERT(keys.type == DType::f32 && keys.hidden == 0 && keys.bias.empty() && keys.buckets > 1);
  constexpr float kMoreThanAnyScore = 50.0f;  // and little enough that the others' shares differ
  queries.bias.resize(static_cast<std::size_t>(queries.buckets), 0.0f);
  queries.bias[0] = kMoreThanAnyScore;
  // Keys whose product with the first centroid, times the factor, is above those with all others.
  std::vector<float> scratch, scores(static_cast<std::size_t>(keys.buckets)), factors;
  for (std::int64_t i = 0; i < sample.rows; ++i) {
    keys.scores(sample[i].data(), 1, scratch, scores.data());
    const float others = *std::max_element(scores.begin() + 1, scores.end());
    if (scores[0] > 0.0f) factors.push_back(std::max(0.0f, others / scores[0]));
  }
  const auto place = static_cast<std::size_t>(share * static_cast<double>(sample.rows));
  if (factors.empty()) return;
  const auto at = factors.begin() + static_cast<std::ptrdiff_t>(std::min(place, factors.size() - 1));
  std::nth_element(factors.begin(), at, factors.end());
  auto* const centroid = reinterpret_cast<float*>(keys.linear_weight.data());
  for (std::int64_t i = 0; i < keys.inputs; ++i) centroid[i] *= *at;
}

HashWeights made_up_hash(int query_heads, int kv_heads, std::int64_t d, int bits, int hidden, Rng& rng) {
  std::vector<std::int64_t> widths(static_cast<std::size_t>(hidden + 1), d);
  widths.push_back(bits);
  HashWeights weights = {.scheme = {.bits = bits}, .query = {}, .key = {}};
  for (int head = 0; head < kv_heads; ++head) weights.key.push_back(made_up_net(widths, rng));
  for (int head = 0; head < query_heads; ++head) weights.query.push_back(made_up_net(widths, rng));
  return weights;
}

}  // namespace lode
