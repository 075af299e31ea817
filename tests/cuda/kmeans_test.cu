// SPDX-License-Identifier: Apache-2.0
// k-means, kernel by kernel, against float64: nearest centroids by direction and by distance, sums by label, new
// centroids, and how sharp a softmax is. Heads and tails of tiles, equal rows, rows of very different size, rows
// that are no numbers.
#include <limits>
#include <numeric>

#include "harness.h"
#include "kernels/cuda/kmeans/kmeans.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Floats = std::vector<float>;
using Labels = std::vector<std::int32_t>;

constexpr int kHeads = 2;

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

double dot(const float* a, const float* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

/// Rows of device memory with room for their halves.
struct Rows {
  OnDevice<float> rows, factors;
  OnDevice<std::uint16_t> halves;
  HalfRows get;

  Rows(const Floats& values, int width)
      : rows(values),
        factors(test::poison(values.size() / size(width))),
        halves(std::vector<std::uint16_t>(values.size() / size(width) * size(half_width(width)), 0x7e00)),
        get{.heads = kHeads,
            .width = width,
            .count = std::ssize(values) / width / kHeads,
            .halves = halves.get(),
            .factors = factors.get()} {}
};

/// Clusters that start as the first points of each head.
struct Started {
  Rows centroids;
  OnDevice<float> biases;
  Clusters get;

  Started(const Rows& points, std::int64_t count, bool by_distance, const Stream& stream)
      : centroids(test::poison(size(kHeads * count * points.get.width)), points.get.width),
        biases(test::poison(size(kHeads * count))),
        get{.centroids = centroids.get,
            .rows = centroids.rows.get(),
            .biases = biases.get(),
            .by_distance = by_distance} {
    Labels start(size(kHeads * count));
    for (std::size_t i = 0; i < start.size(); ++i) start[i] = static_cast<std::int32_t>(i % size(count));
    const OnDevice<std::int32_t> picks(start);
    start_clusters(points.rows.get(), points.get.count, picks.get(), get, stream.get());
    stream.synchronize();
  }
};

/// Each label's score is the highest, but for what halves round.
void expect_nearest(const Rows& points, const Started& clusters, const Labels& labels, const Stream& stream) {
  const Floats x = points.rows.read(stream), c = clusters.centroids.rows.read(stream),
               bias = clusters.biases.read(stream);
  const std::int64_t d = points.get.width, n = points.get.count, count = clusters.get.centroids.count;
  for (std::int64_t i = 0; i < kHeads * n; ++i) {
    const std::int64_t first = i / n * count;
    const auto score = [&](std::int64_t which) {
      return dot(x.data() + i * d, c.data() + (first + which) * d, d) + bias[size(first + which)];
    };
    LODE_CHECK(labels[size(i)] >= 0 && labels[size(i)] < count);
    double most = -std::numeric_limits<double>::infinity(), largest = 0;
    for (std::int64_t which = 0; which < count; ++which) {
      most = std::max(most, score(which));
      largest = std::max(largest, dot(c.data() + (first + which) * d, c.data() + (first + which) * d, d));
    }
    const double unit = std::sqrt(dot(x.data() + i * d, x.data() + i * d, d) * largest);
    LODE_CHECK_CLOSE(score(labels[size(i)]), most, 1e-3 * unit);
  }
}

LODE_TEST(kmeans_nearest) {
  Stream stream;
  const std::int64_t shapes[][3] = {{1, 1, 64},       {300, 7, 64},    {515, 64, 80},   {257, 65, 96},
                                    {1000, 300, 128}, {130, 130, 200}, {700, 129, 256}, {40, 3, 10}};
  for (const auto& [n, clusters, d] : shapes) {
    Floats x = test::normal(size(kHeads * n * d), 5);
    for (std::int64_t i = 0; i < kHeads * n; ++i)  // sizes from 1e-12 to 1e12
      for (std::int64_t j = 0; j < d; ++j)
        x[size(i * d + j)] *= std::pow(10.0f, static_cast<float>(i % 25 - 12));
    if (n > 200) {
      std::fill_n(x.begin(), d, 0.0f);
      x[size(5 * d + 3)] = std::numeric_limits<float>::quiet_NaN();
      x[size(6 * d)] = std::numeric_limits<float>::infinity();
    }
    for (const bool by_distance : {false, true}) {
      const Rows points(x, static_cast<int>(d));
      halve(points.rows.get(), points.get, stream.get());
      const Started some(points, clusters, by_distance, stream);
      Labels found[2];
      for (Labels& labels : found) {
        const OnDevice<std::int32_t> out(Labels(size(kHeads * n), -1));
        nearest(points.get, some.get, out.get(), stream.get());
        labels = out.read(stream);
      }
      LODE_CHECK(found[0] == found[1]);
      expect_nearest(points, some, found[0], stream);
    }
  }
}

LODE_TEST(kmeans_lowest_of_equal_centroids) {
  Stream stream;
  constexpr std::int64_t kPoints = 200, kWidth = 64;
  Floats x(size(kHeads * kPoints * kWidth), 0.5f);
  const Rows points(x, kWidth);
  halve(points.rows.get(), points.get, stream.get());
  const Started some(points, 100, false, stream);
  const OnDevice<std::int32_t> out(Labels(size(kHeads * kPoints), -1));
  nearest(points.get, some.get, out.get(), stream.get());
  for (const std::int32_t label : out.read(stream)) LODE_CHECK(label == 0);
}

struct Sums {
  OnDevice<std::int64_t> sums;
  OnDevice<std::int32_t> counts;
  OnDevice<float> largest;
  LabelSums get;
  Sums(std::int64_t labels, std::int64_t count, int width)
      : sums(std::vector<std::int64_t>(size(kHeads * labels * width), 77)),
        counts(Labels(size(kHeads * labels), 77)),
        largest(test::poison(kHeads)),
        get{.heads = kHeads,
            .width = width,
            .labels = labels,
            .count = count,
            .sums = sums.get(),
            .counts = counts.get(),
            .largest = largest.get()} {}
};

LODE_TEST(kmeans_sums_by_label) {
  Stream stream;
  for (const float scale : {1.0f, 1e-30f, 1e30f}) {
    constexpr std::int64_t kPoints = 1000, kLabels = 37;
    constexpr int kWidth = 80;
    const Floats x = test::normal(size(kHeads * kPoints * kWidth), 3, scale);
    Labels labels(size(kHeads * kPoints));
    for (std::size_t i = 0; i < labels.size(); ++i)
      labels[i] = static_cast<std::int32_t>(i * i % 36);  // 36: none
    std::vector<double> mean(size(kHeads * kLabels * kWidth)), square(mean.size());
    std::vector<double> counts(size(kHeads * kLabels));
    for (std::int64_t i = 0; i < kHeads * kPoints; ++i) {
      const std::int64_t own = i / kPoints * kLabels + labels[size(i)];
      counts[size(own)] += 1;
      for (std::int64_t j = 0; j < kWidth; ++j) mean[size(own * kWidth + j)] += x[size(i * kWidth + j)];
    }
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] /= std::max(1.0, counts[i / kWidth]);
    for (std::int64_t i = 0; i < kHeads * kPoints; ++i) {
      const std::int64_t own = i / kPoints * kLabels + labels[size(i)];
      for (std::int64_t j = 0; j < kWidth; ++j)
        square[size(own * kWidth + j)] +=
            std::pow(x[size(i * kWidth + j)] - mean[size(own * kWidth + j)], 2) / counts[size(own)];
    }
    const OnDevice<float> rows(x), means(test::poison(mean.size())), squares(test::poison(mean.size()));
    const OnDevice<std::int32_t> of(labels);
    const Sums sums(kLabels, kPoints, kWidth);
    sum_by_label(rows.get(), of.get(), sums.get, stream.get());
    means_by_label(sums.get, nullptr, means.get(), stream.get());
    LODE_CHECK_CLOSE(test::relative_error(means.read(stream), mean), 0.0, 1e-7);
    if (scale < 1e20f) {  // squares of the largest are no floats
      sum_squares_by_label(rows.get(), of.get(), means.get(), sums.get, stream.get());
      squares_by_label(sums.get, squares.get(), stream.get());
      if (scale == 1.0f) LODE_CHECK_CLOSE(test::relative_error(squares.read(stream), square), 0.0, 1e-6);
    }
    const Labels read = sums.counts.read(stream);
    for (std::size_t i = 0; i < read.size(); ++i) LODE_CHECK(read[i] == static_cast<std::int32_t>(counts[i]));
  }
}

/// Means or their directions; an empty cluster gets a point of one that has several.
LODE_TEST(kmeans_next_centroids) {
  Stream stream;
  constexpr std::int64_t kPoints = 500, kClusters = 20;
  for (const int width : {64, 200}) {
    const Floats x = test::normal(size(kHeads * kPoints * width), 9);
    const Rows points(x, width);
    halve(points.rows.get(), points.get, stream.get());
    Labels labels(size(kHeads * kPoints));
    for (std::size_t i = 0; i < labels.size(); ++i)
      labels[i] = static_cast<std::int32_t>(i % (kClusters - 1));
    const OnDevice<std::int32_t> of(labels);
    const OnDevice<std::uint64_t> seeds(std::vector<std::uint64_t>{1, 2});
    for (const bool by_distance : {false, true}) {
      const Started some(points, kClusters, by_distance, stream);
      const Sums sums(kClusters, kPoints, width);
      sum_by_label(points.rows.get(), of.get(), sums.get, stream.get());
      move_clusters(points.rows.get(), of.get(), sums.get, seeds.get(), some.get, stream.get());
      const Floats c = some.centroids.rows.read(stream), bias = some.biases.read(stream);
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t k = 0; k < kClusters; ++k) {
          const std::int64_t at = h * kClusters + k;
          std::vector<double> sum(size(width), 0.0);
          double count = 0, square = 0;
          for (std::int64_t i = 0; i < kPoints; ++i) {
            if (labels[size(h * kPoints + i)] != k) continue;
            count += 1;
            for (std::int64_t j = 0; j < width; ++j) sum[size(j)] += x[size((h * kPoints + i) * width + j)];
          }
          for (double& s : sum) s /= std::max(count, 1.0), square += s * s;
          const Floats own(c.begin() + at * width, c.begin() + (at + 1) * width);
          if (k + 1 == kClusters) {  // empty
            square = dot(own.data(), own.data(), width);
            LODE_CHECK(square > 0.5);
          } else {
            if (!by_distance)
              for (double& s : sum) s /= std::sqrt(square);
            LODE_CHECK_CLOSE(test::relative_error(own, sum), 0.0, 1e-6);
          }
          LODE_CHECK_CLOSE(bias[size(at)], by_distance ? -square / 2 : 0.0, 1e-5 * square);
        }
      }
    }
  }
}

LODE_TEST(kmeans_softmax_sharpness) {
  Stream stream;
  const std::int64_t shapes[][3] = {{3, 1, 64}, {33, 70, 96}, {300, 5000, 128}, {129, 999, 256}};
  for (const auto& [queries, keys, d] : shapes) {
    for (const float width : {0.1f, 3.0f}) {
      Floats q = test::normal(size(kHeads * queries * d), 1, width);
      if (queries > 32) std::fill_n(q.begin() + 32 * d, d, 0.0f);  // all weights alike
      const Rows of_queries(q, static_cast<int>(d)),
          of_keys(test::normal(size(kHeads * keys * d), 2, width), static_cast<int>(d));
      halve(of_queries.rows.get(), of_queries.get, stream.get());
      halve(of_keys.rows.get(), of_keys.get, stream.get());
      const float scale = 1.0f / std::sqrt(static_cast<float>(d));
      const OnDevice<float> partial(test::poison(size(sharpness_floats(kHeads, queries)))),
          out(test::poison(size(kHeads * queries)));
      softmax_sharpness(of_queries.get, of_keys.get, scale, partial.get(), out.get(), stream.get());
      const Floats found = out.read(stream), k = of_keys.rows.read(stream);
      std::vector<double> expected;
      for (std::int64_t i = 0; i < kHeads * queries; ++i) {
        std::vector<double> z;
        for (std::int64_t key = 0; key < keys; ++key)
          z.push_back(scale * dot(q.data() + i * d, k.data() + (i / queries * keys + key) * d, d));
        const double most = *std::max_element(z.begin(), z.end());
        double sum = 0, squares = 0;
        for (const double s : z) sum += std::exp(s - most), squares += std::exp(2 * (s - most));
        expected.push_back(std::sqrt(squares) / sum);
      }
      LODE_CHECK_CLOSE(test::relative_error(found, expected), 0.0, 1e-2);
    }
  }
}

/// What nearest_keys needs, and what it finds.
struct Nearest {
  OnDevice<float> partial, least;
  OnDevice<std::int32_t> counts, keys;
  OnDevice<std::uint64_t> above;

  Nearest(const HalfRows& queries, int k)
      : partial(test::poison(size(nearest_keys_floats(queries, k)))),
        least(test::poison(size(kHeads * queries.count))),
        counts(Labels(size(kHeads * queries.count), 77)),
        keys(Labels(size(kHeads * queries.count * k), -7)),
        above(std::vector<std::uint64_t>(size(kHeads * queries.count * KeysAbove::kRoom), 77)) {}
  Labels find(const HalfRows& queries, const HalfRows& of_keys, int k, const Stream& stream) {
    nearest_keys(queries, of_keys, k, {.least = least.get(), .counts = counts.get(), .found = above.get()},
                 partial.get(), keys.get(), stream.get());
    return keys.read(stream);
  }
};

/// The k keys of a list are k different ones, in the order of their scores, and no other key has a higher score; all
/// but for what halves round. Returns how many lists are not known.
std::int64_t expect_nearest_keys(const Floats& q, const Floats& k, std::int64_t queries, std::int64_t keys,
                                 std::int64_t d, int most, const Labels& found) {
  std::int64_t unknown = 0;
  for (std::int64_t i = 0; i < kHeads * queries; ++i) {
    const std::int32_t* const list = found.data() + i * most;
    if (list[0] == -1 && ++unknown > 0) continue;
    std::vector<double> scores;
    double largest = 0;
    for (std::int64_t key = 0; key < keys; ++key) {
      const float* const row = k.data() + (i / queries * keys + key) * d;
      scores.push_back(dot(q.data() + i * d, row, d));
      largest = std::max(largest, dot(row, row, d));
    }
    const double unit = 1e-3 * std::sqrt(dot(q.data() + i * d, q.data() + i * d, d) * largest);
    std::vector<double> best = scores;
    std::sort(best.rbegin(), best.rend());
    std::vector<bool> seen(size(keys), false);
    for (int rank = 0; rank < most; ++rank) {
      LODE_CHECK(list[rank] >= 0 && list[rank] < keys && !seen[size(list[rank])]);
      seen[size(list[rank])] = true;
      LODE_CHECK_CLOSE(scores[size(list[rank])], best[size(rank)], unit);
    }
  }
  return unknown;
}

LODE_TEST(kmeans_nearest_keys) {
  Stream stream;
  const std::int64_t shapes[][4] = {{1, 4096, 64, 1},    {33, 4097, 10, 64},    {130, 9000, 128, 64},
                                    {40, 6001, 96, 108}, {257, 20000, 128, 64}, {17, 5000, 256, 128}};
  for (const auto& [queries, keys, d, most] : shapes) {
    // Keys of a passage are alike, as in a text: the best ones stand together.
    Floats x = test::normal(size(kHeads * keys * d), 3), topic;
    for (std::int64_t i = 0; i < kHeads * keys; ++i) {
      if (i % 100 == 0) topic = test::normal(size(d), static_cast<unsigned>(i));
      for (std::int64_t j = 0; j < d; ++j) x[size(i * d + j)] += topic[size(j)];
    }
    x[size(7 * d)] = std::numeric_limits<float>::quiet_NaN();
    const Floats q = test::normal(size(kHeads * queries * d), 4);
    const Rows of_queries(q, static_cast<int>(d)), of_keys(x, static_cast<int>(d));
    halve(of_queries.rows.get(), of_queries.get, stream.get());
    halve(of_keys.rows.get(), of_keys.get, stream.get());
    const int k = static_cast<int>(most);
    const Labels found = Nearest(of_queries.get, k).find(of_queries.get, of_keys.get, k, stream);
    LODE_CHECK(found == Nearest(of_queries.get, k).find(of_queries.get, of_keys.get, k, stream));
    LODE_CHECK(expect_nearest_keys(q, of_keys.rows.read(stream), queries, keys, d, k, found) <= queries / 50);
  }
}

LODE_TEST(kmeans_nearest_keys_that_are_alike_are_not_known) {
  Stream stream;
  constexpr std::int64_t kKeys = 5000, kWidth = 64, kQueries = 20;
  Floats x = test::normal(size(kHeads * kKeys * kWidth), 3),
         q = test::normal(size(kHeads * kQueries * kWidth), 4);
  std::fill_n(x.begin(), kKeys * kWidth, 0.5f);              // of the first head
  std::fill_n(q.begin() + kQueries * kWidth, kWidth, 0.0f);  // of the second: all keys are alike to it
  const Rows queries(q, kWidth), keys(x, kWidth);
  halve(queries.rows.get(), queries.get, stream.get());
  halve(keys.rows.get(), keys.get, stream.get());
  const Labels found = Nearest(queries.get, 64).find(queries.get, keys.get, 64, stream);
  for (std::int64_t i = 0; i < kHeads * kQueries; ++i)
    LODE_CHECK((found[size(i * 64)] == -1) == (i <= kQueries));
}

}  // namespace
}  // namespace lode::cuda
