// SPDX-License-Identifier: Apache-2.0
// Scores of clusters while thresholds are searched for, kernel by kernel, against float64: weights with and without
// spreads, averages, bins and lists; rows that are no numbers, nodes of one key, one unit and many.
#include <limits>
#include <numeric>

#include "harness.h"
#include "kernels/cuda/squeezed/score_clusters.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

/// Where the keys of nodes begin that have 1, 2, ... 37 keys in turn.
Ints firsts(std::int64_t nodes) {
  Ints first = {0};
  for (std::int64_t i = 0; i < nodes; ++i)
    first.push_back(first.back() + static_cast<std::int32_t>(i % 37) + 1);
  return first;
}

LODE_TEST(score_clusters_widen) {
  Stream stream;
  constexpr std::int64_t kRows = 50, kWidth = 13;
  const Floats scales = test::normal(size(kRows), 3);
  std::vector<signed char> whole(size(kRows * kWidth));
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<signed char>(i * 7 % 255 - 127);
  const OnDevice<signed char> from(whole);
  const OnDevice<float> by(scales), to(test::poison(whole.size()));
  widen_rows(from.get(), DType::q8, by.get(), kRows, kWidth, to.get(), stream.get());
  const Floats found = to.read(stream);
  for (std::size_t i = 0; i < found.size(); ++i)
    LODE_CHECK(found[i] == static_cast<float>(whole[i]) * scales[i / size(kWidth)]);
  const Floats numbers = test::normal(size(kRows * kWidth), 4);
  for (const DType type : {DType::f16, DType::f32}) {
    const OnDevice<char> bytes(test::encode(numbers, type));
    widen_rows(bytes.get(), type, nullptr, kRows, kWidth, to.get(), stream.get());
    const Floats same = to.read(stream);
    for (std::size_t i = 0; i < same.size(); ++i) LODE_CHECK(same[i] == test::rounded(numbers[i], type));
  }
}

LODE_TEST(score_clusters_plane_squares) {
  Stream stream;
  for (const std::int64_t d : {1, 2, 64, 127, 128}) {
    constexpr std::int64_t kRows = 9;
    const std::int64_t planes = (d + 1) / 2;
    const Floats q = test::normal(size(kRows * d), 5);
    const OnDevice<float> from(q), to(test::poison(size(kRows * planes)));
    plane_squares(from.get(), kRows, d, to.get(), stream.get());
    std::vector<double> expected;
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t j = 0; j < planes; ++j) {
        const double one = q[size(row * d + j)],
                     other = j + planes < d ? q[size(row * d + j + planes)] : 0.0f;
        expected.push_back(one * one + other * other);
      }
    LODE_CHECK_CLOSE(test::relative_error(to.read(stream), expected), 0.0, 1e-6);
  }
}

/// K exp(z) / sum N exp(z) of one row.
std::vector<double> weights_of(const float* z, const float* variances, const Ints& first) {
  const std::size_t nodes = first.size() - 1;
  std::vector<double> w(nodes);
  double peak = -std::numeric_limits<double>::infinity(), sum = 0;
  for (std::size_t i = 0; i < nodes; ++i) {
    w[i] = z[i];
    if (variances != nullptr) {
      const double s = std::isfinite(variances[i])
                           ? std::min(std::sqrt(static_cast<double>(variances[i])), 1e15)
                           : 1e15,
                   b = std::min(s, std::sqrt(2 * std::log(static_cast<double>(first[i + 1] - first[i]))));
      w[i] += b * (s - b / 2);
    }
    if (std::isnan(w[i])) return std::vector<double>(nodes, 0.0);
    w[i] = std::clamp(w[i], -1e30, 1e30);
    peak = std::max(peak, w[i]);
  }
  for (std::size_t i = 0; i < nodes; ++i) {
    w[i] = std::exp(w[i] - peak);
    sum += w[i] * (first[i + 1] - first[i]);
  }
  for (double& x : w) x *= first.back() / sum;
  return w;
}

LODE_TEST(score_clusters_weights) {
  Stream stream;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  for (const std::int64_t nodes : {1, 5, 256, 257, 3000}) {
    constexpr std::int64_t kRows = 7;
    const Ints first = firsts(nodes);
    const OnDevice<std::int32_t> of_nodes(first);
    Floats z = test::normal(size(kRows * nodes), 6, 4.0f),
           variances = test::normal(size(kRows * nodes), 7, 3.0f);
    for (float& v : variances) v *= v;
    z[size(2 * nodes)] = kNan;
    z[size(3 * nodes)] = kInf;
    if (nodes > 4) z[size(4 * nodes + 3)] = -kInf, variances[size(5 * nodes + 2)] = kInf;
    for (const bool spreads : {false, true}) {
      const OnDevice<float> own(z), more(variances);
      weigh_nodes({.z = own.get(),
                   .variances = spreads ? more.get() : nullptr,
                   .first = of_nodes.get(),
                   .rows = kRows,
                   .nodes = nodes},
                  stream.get());
      const Floats found = own.read(stream);
      for (std::int64_t row = 0; row < kRows; ++row) {
        const Floats got(found.begin() + row * nodes, found.begin() + (row + 1) * nodes);
        LODE_CHECK_CLOSE(
            test::relative_error(got, weights_of(z.data() + row * nodes,
                                                 spreads ? variances.data() + row * nodes : nullptr, first)),
            0.0, 1e-5);
      }
    }
  }
}

LODE_TEST(score_clusters_averages) {
  Stream stream;
  constexpr std::int64_t kRows = 22, kNodes = 300;
  const Floats w = test::normal(size(kRows * kNodes), 8);
  const OnDevice<float> from(w);
  for (const std::int64_t each : {1, 4, 8, 22}) {  // 22 rows in units of 8: the last has six
    for (const bool squares : {false, true}) {
      const std::int64_t units = (kRows + each - 1) / each;
      const OnDevice<float> to(test::poison(size(units * kNodes)));
      average_weights(from.get(), kRows, kNodes, each, squares, to.get(), stream.get());
      std::vector<double> expected(size(units * kNodes), 0.0);
      for (std::int64_t row = 0; row < kRows; ++row) {
        const std::int64_t unit = row / each, of = std::min(kRows, (unit + 1) * each) - unit * each;
        for (std::int64_t i = 0; i < kNodes; ++i) {
          const double x = w[size(row * kNodes + i)];
          expected[size(unit * kNodes + i)] += (squares ? x * x : x) / static_cast<double>(of);
        }
      }
      LODE_CHECK_CLOSE(test::relative_error(to.read(stream), expected), 0.0, 1e-6);
    }
  }
}

LODE_TEST(score_clusters_bins) {
  Stream stream;
  constexpr std::int64_t kUnits = 3, kNodes = 700;
  constexpr int kBins = 512;
  const Ints first = firsts(kNodes);
  Floats scores = test::normal(size(kUnits * kNodes), 9, 6.0f);
  for (float& x : scores) x = std::exp(x);
  scores[0] = 0.0f, scores[1] = std::numeric_limits<float>::infinity(), scores[2] = 1e-30f;
  scores[3] = std::numeric_limits<float>::quiet_NaN();
  const OnDevice<float> from(scores);
  const OnDevice<std::int32_t> of_nodes(first);
  for (const bool squares : {false, true}) {
    const ScoreBinning rule = {.lowest = -20.0, .per_unit = 16.0, .bins = kBins, .squares = squares};
    const OnDevice<unsigned long long> bins(std::vector<unsigned long long>(kBins, 5));
    bin_scores(from.get(), of_nodes.get(), kUnits, kNodes, rule, bins.get(), stream.get());
    std::vector<unsigned long long> expected(kBins, 5);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double score = squares ? std::sqrt(static_cast<double>(scores[i])) : scores[i];
      const double at = score > 0.0 ? (std::log(score) + 20.0) * 16.0 : 0.0;
      const std::size_t node = i % size(kNodes);
      expected[size(static_cast<std::int64_t>(std::clamp(at, 0.0, kBins - 1.0)))] +=
          static_cast<unsigned long long>(first[node + 1] - first[node]);
    }
    const auto found = bins.read(stream);
    LODE_CHECK(std::accumulate(found.begin(), found.end(), 0ull) ==
               std::accumulate(expected.begin(), expected.end(), 0ull));
    unsigned long long off = 0;  // scores at an edge may fall to either side
    for (std::size_t b = 0; b < found.size(); ++b)
      off += found[b] > expected[b] ? found[b] - expected[b] : expected[b] - found[b];
    LODE_CHECK(off < 100);
  }
}

/// The keys of kept nodes, node by node, for each token of a unit.
LODE_TEST(score_clusters_lists) {
  Stream stream;
  constexpr std::int64_t kTokens = 7, kTogether = 3, kUnits = 3, kHeads = 2;
  for (const std::int64_t nodes : {1, 256, 900}) {
    const Ints first = firsts(nodes);
    Ints rows(size(first.back()));
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int32_t>(rows.size() - i);
    const Floats scores = test::normal(size(kUnits * nodes), 10);
    const OnDevice<float> from(scores);
    const OnDevice<std::int32_t> of_nodes(first), of_rows(rows);
    for (const double bar : {-1e9, 0.5, 1e9}) {
      const OnDevice<std::int32_t> places(Ints(size(kUnits * nodes), 77)), counts(Ints(size(kUnits), 77));
      const bool all = bar < 0;
      place_kept(from.get(), of_nodes.get(), kUnits, nodes, all ? nullptr : &bar, places.get(), counts.get(),
                 stream.get());
      const auto capacity = static_cast<std::int64_t>(rows.size());
      const OnDevice<std::int32_t> lists(Ints(size(kTokens * kHeads * capacity), -5)),
          of_lists(Ints(size(kTokens * kHeads), -5));
      for (const auto& [token, some] : {std::pair<std::int64_t, std::int64_t>{0, 4}, {4, 3}})
        list_kept({.places = places.get(),
                   .counts = counts.get(),
                   .first = of_nodes.get(),
                   .rows = of_rows.get(),
                   .nodes = nodes,
                   .token = token,
                   .tokens = some,
                   .together = kTogether,
                   .to = lists.get() + (token * kHeads + 1) * capacity,  // the second head's
                   .to_counts = of_lists.get() + token * kHeads + 1,
                   .heads = kHeads,
                   .capacity = capacity},
                  stream.get());
      const Ints found = lists.read(stream), found_counts = of_lists.read(stream);
      for (std::int64_t token = 0; token < kTokens; ++token) {
        Ints expected;
        for (std::int64_t i = 0; i < nodes; ++i)
          if (all || scores[size(token / kTogether * nodes + i)] > bar)
            expected.insert(expected.end(), rows.begin() + first[size(i)], rows.begin() + first[size(i) + 1]);
        const std::int64_t list = token * kHeads + 1;
        LODE_CHECK(found_counts[size(list)] == std::ssize(expected));
        LODE_CHECK(found_counts[size(list - 1)] == -5);
        LODE_CHECK(std::equal(expected.begin(), expected.end(), found.begin() + list * capacity));
      }
    }
  }
}

}  // namespace
}  // namespace lode::cuda
