// SPDX-License-Identifier: Apache-2.0
// Thresholds that a device searches for are the host's: here the device is plain loops in float64, of what
// select/device_keys.h says of it.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "kernels/kernels.h"
#include "select/shared/threshold_selector.h"
#include "support/idle_device.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

using Doubles = std::vector<double>;

class PlainDevice final : public IdleDevice {
 public:
  PlainDevice(const World& world, const LayerGeometry& geometry) : world_(world), g_(geometry) {}

  int counted = 0, attended = 0;
  bool holds() const { return !held_.empty(); }

  bool hold_clusters(int layer, const ScoredClusters& clusters, std::int64_t most_tokens) override {
    EXPECT_LE(most_tokens, Calibration::kMost);
    held_[layer] = clusters;
    return true;
  }
  void forget_clusters() override { held_.clear(); }

  void count_scores(const ScoringQueries& queries, const ScoreBins& bins) override {
    ++counted;
    for_units(queries, [&](int head, std::int64_t, std::int64_t, const Doubles& scores) {
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const double at = scores[i] > 0 ? (std::log(scores[i]) - bins.lowest) * bins.per_unit : 0.0;
        bins.keys[static_cast<std::size_t>(std::clamp(at, 0.0, static_cast<double>(bins.keys.size() - 1)))] +=
            static_cast<std::uint64_t>(keys_of(queries.layer, head, i));
      }
    });
  }
  void attend_chosen(const ScoringQueries& queries, const ChosenAttention& chosen) override {
    ++attended;
    std::size_t next = 0;
    for_units(queries, [&](int head, std::int64_t begin, std::int64_t end, const Doubles& scores) {
      const auto& own = held_.at(queries.layer).heads[static_cast<std::size_t>(head)];
      std::vector<Position> rows;
      for (std::size_t i = 0; i < scores.size(); ++i)
        if (chosen.threshold == 0 || scores[i] > chosen.threshold)
          rows.insert(rows.end(), own.rows.begin() + own.first[i], own.rows.begin() + own.first[i + 1]);
      chosen.kept[next++] = static_cast<std::int32_t>(rows.size());
      const auto all = static_cast<Position>(world_.tokens());
      for (Position p = 0; p < chosen.sink; ++p) rows.push_back(p);
      for (auto p = static_cast<Position>(all - chosen.window); p < all; ++p) rows.push_back(p);
      for (std::int64_t t = begin; t < end; ++t)
        for (int g = 0; g < g_.group(); ++g)
          attend(queries, t * g_.query_heads + head * g_.group() + g, head, rows, chosen);
    });
  }

 private:
  std::int64_t keys_of(int layer, int head, std::size_t node) const {
    const auto& first = held_.at(layer).heads[static_cast<std::size_t>(head)].first;
    return first[node + 1] - first[node];
  }
  /// body(head, first token, end, average scores), unit after unit, head after head.
  void for_units(const ScoringQueries& queries, const auto& body) const {
    const std::int64_t tokens = std::ssize(queries.q) / (std::int64_t{g_.query_heads} * g_.head_dim);
    for (std::int64_t begin = 0; begin < tokens; begin += queries.together) {
      const std::int64_t end = std::min(tokens, begin + queries.together);
      for (int head = 0; head < g_.kv_heads; ++head) {
        Doubles scores;
        for (std::int64_t t = begin; t < end; ++t)
          for (int g = 0; g < g_.group(); ++g) {
            const Doubles own = weights(queries, t * g_.query_heads + head * g_.group() + g, head);
            scores.resize(own.size());
            for (std::size_t i = 0; i < own.size(); ++i)
              scores[i] += (queries.squares ? own[i] * own[i] : own[i]) /
                           static_cast<double>((end - begin) * g_.group());
          }
        if (queries.squares)
          for (double& x : scores) x = std::sqrt(x);
        body(head, begin, end, scores);
      }
    }
  }
  Doubles weights(const ScoringQueries& queries, std::int64_t row, int head) const {
    const ScoredClusters& layer = held_.at(queries.layer);
    const auto& own = layer.heads[static_cast<std::size_t>(head)];
    const std::int64_t d = g_.head_dim, planes = (d + 1) / 2;
    std::vector<float> wide(static_cast<std::size_t>(d)), spread(static_cast<std::size_t>(planes));
    Doubles z;
    double peak = -INFINITY, sum = 0;
    for (std::int64_t i = 0; i < own.count(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      kernels().widen(own.centroids.data() + i * d * bytes_of(layer.type), layer.type, d, wide.data());
      double mean = 0, variance = 0;
      const auto q = [&](std::int64_t j) {
        return j < d ? static_cast<double>(queries.q[static_cast<std::size_t>(row * d + j)]) * queries.scale
                     : 0;
      };
      for (std::int64_t j = 0; j < d; ++j) mean += q(j) * wide[static_cast<std::size_t>(j)];
      if (!own.scales.empty()) mean *= own.scales[at];
      if (queries.spreads) {
        kernels().widen(own.spreads.data() + i * planes, DType::q8, planes, spread.data());
        for (std::int64_t j = 0; j < planes; ++j)
          variance += (q(j) * q(j) + q(j + planes) * q(j + planes)) * spread[static_cast<std::size_t>(j)];
        const double s = std::sqrt(variance * own.spread_scales[at]),
                     b = std::min(
                         s, std::sqrt(2 * std::log(static_cast<double>(keys_of(queries.layer, head, at)))));
        mean += b * (s - b / 2);
      }
      z.push_back(mean);
      peak = std::max(peak, mean);
    }
    for (std::size_t i = 0; i < z.size(); ++i) {
      z[i] = std::exp(z[i] - peak);
      sum += z[i] * static_cast<double>(keys_of(queries.layer, head, i));
    }
    for (double& x : z) x *= static_cast<double>(own.rows.size()) / sum;
    return z;
  }
  void attend(const ScoringQueries& queries, std::int64_t row, int head, const std::vector<Position>& rows,
              const ChosenAttention& chosen) const {
    const auto d = static_cast<std::size_t>(g_.head_dim), from = static_cast<std::size_t>(row) * d;
    Doubles z, out(d);
    double peak = -INFINITY, sum = 0;
    for (const Position p : rows) {
      const auto key = world_.key(p, head);
      double dot = 0;
      for (std::size_t j = 0; j < d; ++j) dot += static_cast<double>(queries.q[from + j]) * key[j];
      z.push_back(dot * queries.scale);
      peak = std::max(peak, z.back());
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double weight = std::exp(z[i] - peak);
      const auto value = world_.value(rows[i], head);
      sum += weight;
      for (std::size_t j = 0; j < d; ++j) out[j] += weight * value[j];
    }
    for (std::size_t j = 0; j < d; ++j) chosen.outputs[from + j] = static_cast<float>(out[j] / sum);
    chosen.lse[static_cast<std::size_t>(row)] = static_cast<float>(peak + std::log(sum));
  }

  const World& world_;
  const LayerGeometry g_;
  std::map<int, ScoredClusters> held_;
};

struct Calibrated {
  Calibration calibration;
  int counted = 0, attended = 0;
};

Calibrated calibrated(const std::string& spec, bool by_device, ThreadPool& pool) {
  const LocalWindow dense = parse_spec(spec).dense;
  World world({.kv_heads = 2, .group = 2, .d = 64, .dense = dense});
  plant_topics(world, 40, 0.7f);
  const LayerGeometry geometry = world.geometry(pool);
  const auto selector = make(spec, geometry);
  PlainDevice device(world, geometry);
  auto& built = dynamic_cast<BuiltByDevice&>(*selector);
  built.build_by(by_device ? &device : nullptr);
  world.write(700);
  tell(*selector, world, 700);
  build_whole("squeezed", *selector, world);
  EXPECT_FALSE(device.holds()) << "what was held is given back";
  built.build_by(nullptr);
  return {*dynamic_cast<const ThresholdSelector&>(*selector).calibration(0), device.counted, device.attended};
}

TEST(DeviceScores, ThresholdsAreTheHosts) {
  ThreadPool pool(2);
  constexpr double kBin = 1.0 / ScoreHistogram::kBinsPerUnit;  // a score at an edge may fall to either side
  for (const char* const options :
       {"", ",spread=off", ",spread=question", ",spread=decode", ",centroids=f16", ",average=plain",
        ",block=16", ",block=1", ",block=50", ",sink=5", ",metric=cosine", ",mass=0.9"}) {
    SCOPED_TRACE(options);
    const std::string spec = std::string("squeezed:clusters=10%") + options;
    const Calibrated host = calibrated(spec, false, pool), device = calibrated(spec, true, pool);
    EXPECT_GE(device.counted + device.attended, 4);
    EXPECT_GE(device.attended, 2);
    ASSERT_EQ(device.calibration.queries, host.calibration.queries);
    EXPECT_EQ(host.calibration.queries, Calibration::kMost);
    for (const QueryKind kind : kQueryKinds) {
      for (const std::int64_t tokens : {1, 16, 40, 128, 500}) {
        const double expected = host.calibration.thresholds.of(kind, tokens, 0);
        EXPECT_NEAR(device.calibration.thresholds.of(kind, tokens, 0) / expected, 1.0, 1.5 * kBin);
      }
      const Achieved &found = device.calibration.held_out[static_cast<std::size_t>(kind)],
                     &expected = host.calibration.held_out[static_cast<std::size_t>(kind)];
      EXPECT_NEAR(found.sparsity, expected.sparsity, 2e-3);
      EXPECT_NEAR(found.mass, expected.mass, 2e-3);
      EXPECT_NEAR(found.error, expected.error, 2e-3);
    }
  }
}

TEST(DeviceScores, SeveralLevelsAndTailsAreLeftToTheHost) {
  ThreadPool pool(2);
  for (const char* const spec :
       {"squeezed:levels=2,clusters=10%,clusters1=5%", "squeezed:clusters=10%,tail=on"}) {
    const Calibrated device = calibrated(spec, true, pool);
    EXPECT_EQ(device.counted + device.attended, 0) << spec;
    EXPECT_EQ(device.calibration.queries, Calibration::kMost) << spec;
  }
}

}  // namespace
}  // namespace lode::test
