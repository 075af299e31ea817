// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/bucket_drift.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ann/kmeans.h"
#include "base/rng.h"
#include "lab/studies/head_vectors.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

/// Rows of one head, text after text, [texts, tokens, d] each.
struct Rows {
  std::vector<float> training, others, queries;
};

/// One layer, after RoPE or before it.
class Drift {
 public:
  Drift(const Rows& rows, std::int64_t d, std::int64_t texts, const BucketDriftOptions& options,
        std::uint64_t seed, ThreadPool& pool)
      : rows_(rows), d_(d), texts_(texts), options_(options), pool_(pool), rng_(seed) {
    const std::int64_t n = std::ssize(rows.training) / d;
    centroids_ =
        spherical_kmeans({rows.training.data(), n, d}, {.clusters = options.clusters, .seed = seed}, pool);
  }

  void add_to(Json& samples, bool rope) {
    const std::int64_t tokens = options_.tokens, all = texts_ * tokens;
    const std::int64_t trained = std::ssize(rows_.training) / d_;
    const auto add = [&](const char* of, const std::vector<float>& from, const auto& pick) {
      Json deviations = Json::array();
      for (int repeat = 0; repeat < options_.repeats; ++repeat)
        deviations.push_back(deviation(from, [&] { return pick(repeat); }));
      samples.push_back({{"of", of}, {"rope", rope}, {"deviations", deviations}});
    };
    add("training texts", rows_.training, [&](int) { return below(trained); });
    add("other texts", rows_.others, [&](int) { return below(all); });
    add("one text", rows_.others, [&](int repeat) { return repeat % texts_ * tokens + below(tokens); });
    // As many neighbouring positions of each text as there are keys to draw from all.
    const std::int64_t width = std::max<std::int64_t>(1, std::min(tokens, options_.keys / texts_));
    add("one stretch", rows_.others, [&](int repeat) {
      const std::int64_t first = repeat * (tokens - width) / std::max(1, options_.repeats - 1);
      return below(texts_) * tokens + first + below(width);
    });
    add("queries", rows_.queries, [&](int) { return below(all); });
  }

 private:
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(n)));
  }

  template <class Pick>
  double deviation(const std::vector<float>& from, const Pick& pick) {
    std::vector<float> drawn;
    for (std::int64_t i = 0; i < options_.keys; ++i) {
      const std::int64_t row = pick();
      drawn.insert(drawn.end(), from.begin() + row * d_, from.begin() + (row + 1) * d_);
    }
    std::vector<std::int32_t> labels(static_cast<std::size_t>(options_.keys));
    assign_points({drawn.data(), options_.keys, d_}, centroids_, labels, pool_);
    return size_deviation(labels, options_.clusters);
  }

  const Rows& rows_;
  const std::int64_t d_, texts_;
  const BucketDriftOptions& options_;
  ThreadPool& pool_;
  Rng rng_;
  std::vector<float> centroids_;  // [C, d]
};

}  // namespace

double size_deviation(const std::vector<std::int32_t>& labels, std::int64_t buckets) {
  std::vector<double> sizes(static_cast<std::size_t>(buckets), 0.0);
  for (const std::int32_t label : labels) sizes[static_cast<std::size_t>(label)] += 1;
  const double mean = static_cast<double>(labels.size()) / static_cast<double>(buckets);
  double square = 0;
  for (const double size : sizes) square += (size - mean) * (size - mean) / static_cast<double>(buckets);
  return std::sqrt(square) / mean;
}

std::vector<Json> bucket_drift(const std::shared_ptr<const Model>& model,
                               const std::vector<std::string>& training,
                               const std::vector<std::string>& others, const BucketDriftOptions& options) {
  if (training.size() < 2 || others.size() < 2)
    throw InputError(fmt::format("expected two texts or more to train on and to test on, found {} and {}",
                                 training.size(), others.size()));
  const std::vector<int> layers = options.layers.empty() ? usual_layers(*model) : options.layers;
  const std::int64_t d = model->config().head_dim;
  ContextOptions context = options.context;
  context.device = Device::cpu;  // where the vectors are looked at
  context.max_tokens = options.tokens;
  Capture capture(model, context);
  std::vector<Rows> rotated(layers.size()), plain(layers.size());
  std::int64_t done = 0;
  const auto read = [&](const std::string& text, bool trains) {
    const std::vector<HeadVectors> heads = read_head_vectors(capture, *model, text, layers, options.tokens);
    const std::int64_t found = std::ssize(heads.front().keys) / d;
    if (found < options.tokens)
      throw InputError(fmt::format("expected texts of at least {} tokens, found {}", options.tokens, found));
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const auto add = [](std::vector<float>& to, const std::vector<float>& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      add(trains ? rotated[i].training : rotated[i].others, heads[i].keys);
      add(trains ? plain[i].training : plain[i].others, heads[i].plain_keys);
      if (trains) continue;
      add(rotated[i].queries, heads[i].queries);
      add(plain[i].queries, heads[i].plain_queries);
    }
    if (options.progress) options.progress(done += options.tokens);
  };
  for (const std::string& text : training) read(text, true);
  for (const std::string& text : others) read(text, false);
  std::vector<Json> studies;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    Json samples = Json::array();
    for (const bool rope : {true, false}) {
      const std::uint64_t seed = hash_seed(options.seed, layers[i], rope ? 1 : 0);
      Drift(rope ? rotated[i] : plain[i], d, std::ssize(others), options, seed, model->pool())
          .add_to(samples, rope);
    }
    studies.push_back({{"layer", layers[i]}, {"samples", samples}});
  }
  return studies;
}

}  // namespace lode
