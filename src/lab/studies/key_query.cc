// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/key_query.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "ann/kmeans.h"
#include "ann/symmetric_eigen.h"
#include "base/rng.h"
#include "kernels/kernels.h"
#include "lab/bench/common.h"
#include "lab/studies/cluster_map.h"
#include "lab/studies/head_vectors.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

constexpr std::int64_t kKeysOfCluster = 64;  // in the mean
constexpr int kBins = 40;
constexpr double kShares[] = {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0};  // of the keys, scanned

/// Shares of several lists of numbers in bins of equal width that hold them all, and their medians.
Json histograms(const std::vector<std::pair<const char*, std::vector<double>>>& lists) {
  double low = lists.front().second.front(), high = low;
  for (const auto& [name, list] : lists) {
    for (const double x : list) low = std::min(low, x), high = std::max(high, x);
  }
  const double width = std::max(high - low, 1e-12) / kBins;
  Json out = {{"middles", Json::array()}};
  for (int bin = 0; bin < kBins; ++bin) out["middles"].push_back(low + width * (bin + 0.5));
  for (const auto& [name, list] : lists) {
    std::vector<double> shares(kBins, 0.0);
    for (const double x : list)
      shares[static_cast<std::size_t>(std::min<double>(kBins - 1, (x - low) / width))] +=
          1.0 / static_cast<double>(list.size());
    out[name] = shares;
    out["medians"][name] = median(list);
  }
  return out;
}

/// One head's vectors, the last eighth of which asks.
class Study {
 public:
  Study(const HeadVectors& head, std::int64_t d, const KeyQueryOptions& options, ThreadPool& pool)
      : keys_(head.keys),
        queries_(head.queries),
        d_(d),
        n_(std::ssize(keys_) / d),
        base_(n_ - n_ / 8),
        options_(options),
        pool_(pool),
        rng_(hash_seed(options.seed, head.layer)) {}

  Json run() {
    const std::int64_t clusters = std::max<std::int64_t>(2, (base_ - 1) / kKeysOfCluster);
    const Matrix<const float> base(keys_.data() + d_, base_ - 1, d_);  // behind the sink
    centroids_ = spherical_kmeans(base, {.clusters = clusters, .seed = rng_.next()}, pool_);
    return {
        {"keys", n_},
        {"clusters", clusters},
        {"axes", axes()},
        {"scores", scores()},
        {"assigned", {{"keys", assigned(base)}, {"queries", assigned({queries_.data() + d_, n_ - 1, d_})}}},
        {"search", {{"keys", search(keys_)}, {"queries", search(queries_)}}},
        {"distance", distance()}};
  }

 private:
  const float* key(std::int64_t at) const { return keys_.data() + at * d_; }
  const float* query(std::int64_t at) const { return queries_.data() + at * d_; }
  /// A token of the asking part.
  std::int64_t asking() {
    return base_ + static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(n_ - base_)));
  }

  /// The principal axes of as many keys as queries, the first of each shown apart.
  Json axes() {
    std::vector<float> rows(keys_.begin(), keys_.begin() + d_);
    rows.insert(rows.end(), queries_.begin(), queries_.begin() + d_);
    for (const std::vector<float>* from : {&keys_, &queries_}) {
      for (std::int64_t i = 0; i < options_.shown; ++i) {
        const std::int64_t at = 1 + i * (n_ - 1) / options_.shown;
        rows.insert(rows.end(), from->begin() + at * d_, from->begin() + (at + 1) * d_);
      }
    }
    const std::int64_t count = std::ssize(rows) / d_;
    for (std::int64_t i = 0; i < d_;
         ++i) {  // the two first vectors are outliers: they have no part in the mean
      double mean = 0;
      for (std::int64_t row = 2; row < count; ++row) mean += rows[static_cast<std::size_t>(row * d_ + i)];
      for (std::int64_t row = 0; row < count; ++row)
        rows[static_cast<std::size_t>(row * d_ + i)] -=
            static_cast<float>(mean / static_cast<double>(count - 2));
    }
    const double all = std::inner_product(rows.begin(), rows.end(), rows.begin(), 0.0);
    std::vector<float> x, y;
    const double held = take_main_axis(rows, d_, x) + take_main_axis(rows, d_, y);
    const auto point = [&](std::int64_t i) {
      return Json{x[static_cast<std::size_t>(i)], y[static_cast<std::size_t>(i)]};
    };
    Json keys = Json::array(), queries = Json::array();
    for (std::int64_t i = 0; i < options_.shown; ++i) {
      keys.push_back(point(2 + i));
      queries.push_back(point(2 + options_.shown + i));
    }
    return {{"shown", all > 0 ? held / all : 1.0},
            {"keys", keys},
            {"queries", queries},
            {"first_key", point(0)},
            {"first_query", point(1)}};
  }

  Json scores() {
    std::vector<double> far, recent, first;
    const double scale = 1.0 / std::sqrt(static_cast<double>(d_));
    const auto score = [&](std::int64_t q, std::int64_t k) {
      return scale * kernels().dot(query(q), key(k), d_);
    };
    for (std::int64_t i = 0; i < options_.pairs; ++i) {
      const std::int64_t q = asking(), near = static_cast<std::int64_t>(
                                           rng_.below(static_cast<std::uint64_t>(options_.recent)));
      far.push_back(score(
          q, 1 + static_cast<std::int64_t>(rng_.below(static_cast<std::uint64_t>(q - options_.recent - 1)))));
      recent.push_back(score(q, q - near));
      first.push_back(score(q, 0));
    }
    return histograms({{"far", far}, {"recent", recent}, {"first", first}});
  }

  std::vector<double> assigned(Matrix<const float> x) {
    std::vector<std::int32_t> labels(static_cast<std::size_t>(x.rows));
    assign_points(x, centroids_, labels, pool_);
    std::vector<double> shares(centroids_.size() / static_cast<std::size_t>(d_), 0.0);
    for (const std::int32_t label : labels)
      shares[static_cast<std::size_t>(label)] += 1.0 / static_cast<double>(x.rows);
    return shares;
  }

  /// What vectors of the asking part find of their top keys before it, by how many keys are scanned: whole
  /// clusters, those of the largest q . centroid first.
  Json search(const std::vector<float>& askers) {
    const std::int64_t clusters = std::ssize(centroids_) / d_, keys = base_ - 1;
    std::vector<std::int32_t> labels(static_cast<std::size_t>(keys));
    assign_points({key(1), keys, d_}, centroids_, labels, pool_);
    std::vector<std::vector<std::int64_t>> members(static_cast<std::size_t>(clusters));
    for (std::int64_t i = 0; i < keys; ++i)
      members[static_cast<std::size_t>(labels[static_cast<std::size_t>(i)])].push_back(i);
    std::vector<std::pair<double, double>> found(std::size(kShares));  // keys scanned, recall
    for (std::int64_t a = 0; a < options_.asked; ++a) {
      const float* const q = askers.data() + asking() * d_;
      std::vector<float> score(static_cast<std::size_t>(keys)), lead(static_cast<std::size_t>(clusters));
      for (std::int64_t i = 0; i < keys; ++i)
        score[static_cast<std::size_t>(i)] = kernels().dot(q, key(1 + i), d_);
      for (std::int64_t c = 0; c < clusters; ++c)
        lead[static_cast<std::size_t>(c)] = kernels().dot(q, centroids_.data() + c * d_, d_);
      const std::vector<std::int64_t> best = order_of(score, options_.top), visits = order_of(lead, clusters);
      const std::set<std::int64_t> wanted(best.begin(), best.end());
      std::int64_t scanned = 0, hits = 0;
      std::size_t share = 0;
      for (const std::int64_t c : visits) {
        for (const std::int64_t i : members[static_cast<std::size_t>(c)]) hits += wanted.contains(i) ? 1 : 0;
        scanned += std::ssize(members[static_cast<std::size_t>(c)]);
        for (; share < std::size(kShares) &&
               static_cast<double>(scanned) >= kShares[share] * static_cast<double>(keys);
             ++share) {
          found[share].first += static_cast<double>(scanned) / static_cast<double>(keys * options_.asked);
          found[share].second +=
              static_cast<double>(hits) / static_cast<double>(std::ssize(best) * options_.asked);
        }
      }
    }
    return found;
  }

  /// The places of the `most` largest numbers, falling.
  static std::vector<std::int64_t> order_of(const std::vector<float>& numbers, std::int64_t most) {
    std::vector<std::int64_t> order(numbers.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    const auto end = order.begin() + std::min(most, std::ssize(order));
    std::partial_sort(order.begin(), end, order.end(), [&](std::int64_t a, std::int64_t b) {
      const float of_a = numbers[static_cast<std::size_t>(a)], of_b = numbers[static_cast<std::size_t>(b)];
      return of_a != of_b ? of_a > of_b : a < b;
    });
    order.erase(end, order.end());
    return order;
  }

  Json distance() {
    const std::vector<float> base(keys_.begin() + d_, keys_.begin() + base_ * d_);
    const auto late = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + base_ * d_, all.end());
    };
    return histograms(
        {{"keys", mahalanobis(base, late(keys_), d_)}, {"queries", mahalanobis(base, late(queries_), d_)}});
  }

  const std::vector<float>&keys_, &queries_;  // [n, d]
  const std::int64_t d_, n_, base_;           // what lies from base on asks
  const KeyQueryOptions& options_;
  ThreadPool& pool_;
  Rng rng_;
  std::vector<float> centroids_;  // [C, d]
};

}  // namespace

std::vector<double> mahalanobis(const std::vector<float>& base, const std::vector<float>& x, std::int64_t d) {
  const std::int64_t m = std::ssize(base) / d;
  std::vector<double> mean(static_cast<std::size_t>(d), 0.0),
      covariance(static_cast<std::size_t>(d * d), 0.0);
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t i = 0; i < d; ++i)
      mean[static_cast<std::size_t>(i)] +=
          base[static_cast<std::size_t>(row * d + i)] / static_cast<double>(m);
  std::vector<double> centred(static_cast<std::size_t>(d));
  const auto centre = [&](const std::vector<float>& from, std::int64_t row) {
    for (std::int64_t i = 0; i < d; ++i)
      centred[static_cast<std::size_t>(i)] =
          from[static_cast<std::size_t>(row * d + i)] - mean[static_cast<std::size_t>(i)];
  };
  for (std::int64_t row = 0; row < m; ++row) {
    centre(base, row);
    for (std::int64_t i = 0; i < d; ++i)
      for (std::int64_t j = 0; j < d; ++j)
        covariance[static_cast<std::size_t>(i * d + j)] += centred[static_cast<std::size_t>(i)] *
                                                           centred[static_cast<std::size_t>(j)] /
                                                           static_cast<double>(m);
  }
  const Eigen eigen = symmetric_eigen(covariance, d);
  const double least = 1e-9 * std::max(eigen.values.front(), 1e-300);  // directions in which nothing varies
  std::vector<double> distances;
  for (std::int64_t row = 0; row < std::ssize(x) / d; ++row) {
    centre(x, row);
    double square = 0;
    for (std::int64_t v = 0; v < d; ++v) {
      const double along =
          std::inner_product(centred.begin(), centred.end(), eigen.vectors.begin() + v * d, 0.0);
      square += along * along / std::max(eigen.values[static_cast<std::size_t>(v)], least);
    }
    distances.push_back(std::sqrt(square));
  }
  return distances;
}

std::vector<Json> key_query_studies(const std::shared_ptr<const Model>& model, std::string_view text,
                                    const KeyQueryOptions& options) {
  ContextOptions context = options.context;
  context.device = Device::cpu;  // where the vectors are looked at
  const std::int64_t least = 8 * std::max({options.shown, options.recent, options.top}) / 4;
  const std::int64_t tokens = std::ssize(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  if (tokens < least)
    throw InputError(fmt::format("expected a text of at least {} tokens, found {}", least, tokens));
  context.max_tokens = tokens;
  Capture capture(model, context);
  std::vector<Json> studies;
  const std::vector<int> layers = options.layers.empty() ? usual_layers(*model) : options.layers;
  for (const HeadVectors& head : read_head_vectors(capture, *model, text, layers)) {
    Json study = Study(head, model->config().head_dim, options, model->pool()).run();
    study["layer"] = head.layer;
    studies.push_back(std::move(study));
  }
  return studies;
}

}  // namespace lode
