// SPDX-License-Identifier: Apache-2.0
// Clusters of keys that a GPU makes against the host's: as tight, the same each time, whatever the keys are; and
// the indexes of a document that are built of them.
#include "gpu/index/lloyd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "ann/kmeans.h"
#include "ann/partition.h"
#include "base/rng.h"
#include "base/threads.h"
#include "engine/context.h"
#include "gpu/index/context_keys.h"
#include "gpu/index/device_keys.h"
#include "kernels/cuda/device/random.h"
#include "lodestone/error.h"
#include "select/shared/threshold_selector.h"
#include "select/squeezed/cluster_choice.h"
#include "support/gpu.h"

namespace lode {
namespace {

using Floats = std::vector<float>;
using Labels = std::vector<std::int32_t>;

/// Points around `topics` centres, columns of falling size, as keys have them.
Floats points(std::int64_t n, std::int64_t d, std::int64_t topics, std::uint64_t seed) {
  Floats x(static_cast<std::size_t>(n * d));
  for (std::int64_t i = 0; i < n; ++i) {
    Rng topic(hash_seed(seed, hash_seed(3, i / 3) % static_cast<std::uint64_t>(topics))),
        own(hash_seed(seed, i, 1));
    for (std::int64_t j = 0; j < d; ++j)
      x[static_cast<std::size_t>(i * d + j)] = static_cast<float>(
          (topic.normal() + 0.6 * own.normal()) / std::sqrt(1.0 + 0.2 * static_cast<double>(j)));
  }
  return x;
}

struct Clustered {
  Floats centroids;
  Labels labels;
};

Clustered on_gpu(const Floats& x, std::int64_t d, std::int64_t clusters, bool by_distance, std::uint64_t seed,
                 int rounds, int heads = 1) {
  const cuda::Stream stream;
  const std::int64_t n = std::ssize(x) / d / heads;
  cuda::Buffer rows(std::ssize(x) * 4, "points of a test");
  cuda::copy(rows.as<void>(), x.data(), rows.bytes(), stream.get());
  const std::vector<std::uint64_t> seeds(static_cast<std::size_t>(heads), seed);
  Lloyd lloyd;
  lloyd.run(rows.as<float>(),
            {.heads = heads,
             .width = static_cast<int>(d),
             .count = n,
             .clusters = clusters,
             .by_distance = by_distance,
             .rounds = rounds,
             .seeds = seeds},
            stream.get());
  lloyd.label(stream.get());
  Clustered out = {Floats(static_cast<std::size_t>(heads * clusters * d)),
                   Labels(static_cast<std::size_t>(heads * n))};
  cuda::copy(out.centroids.data(), lloyd.centroids(), std::ssize(out.centroids) * 4, stream.get());
  cuda::copy(out.labels.data(), lloyd.labels(), std::ssize(out.labels) * 4, stream.get());
  stream.synchronize();
  return out;
}

/// Mean inner product of points with their clusters' directions over that with their own.
double cosine(const Floats& x, std::int64_t d, const Labels& labels, std::int64_t clusters) {
  std::vector<double> sums(static_cast<std::size_t>(clusters * d));
  double own = 0, total = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    double square = 0;
    for (std::int64_t j = 0; j < d; ++j) {
      const double v = x[i * static_cast<std::size_t>(d) + static_cast<std::size_t>(j)];
      sums[static_cast<std::size_t>(labels[i] * d + j)] += v, square += v * v;
    }
    own += std::sqrt(square);
  }
  for (std::int64_t c = 0; c < clusters; ++c) {
    double square = 0;
    for (std::int64_t j = 0; j < d; ++j) square += std::pow(sums[static_cast<std::size_t>(c * d + j)], 2);
    total += std::sqrt(square);
  }
  return total / own;
}

/// Squared distances to the clusters' means over those to 0.
double distortion(const Floats& x, std::int64_t d, const Labels& labels, std::int64_t clusters) {
  std::vector<double> sums(static_cast<std::size_t>(clusters * d)),
      counts(static_cast<std::size_t>(clusters));
  double all = 0, means = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    counts[static_cast<std::size_t>(labels[i])] += 1;
    for (std::int64_t j = 0; j < d; ++j) {
      const double v = x[i * static_cast<std::size_t>(d) + static_cast<std::size_t>(j)];
      sums[static_cast<std::size_t>(labels[i] * d + j)] += v, all += v * v;
    }
  }
  for (std::int64_t c = 0; c < clusters; ++c)
    for (std::int64_t j = 0; j < d; ++j)
      means += std::pow(sums[static_cast<std::size_t>(c * d + j)], 2) /
               std::max(1.0, counts[static_cast<std::size_t>(c)]);
  return (all - means) / all;
}

TEST(GpuLloyd, IsAsTightAsTheHostByDirection) {
  NEEDS_GPU();
  ThreadPool pool;
  for (const std::int64_t d : {64, 128, 256}) {
    const std::int64_t n = 8192, clusters = 512;
    const Floats x = points(n, d, 900, 5);
    double host = 0, gpu = 0;
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      Labels labels(static_cast<std::size_t>(n));
      const Floats centroids = spherical_kmeans({x.data(), n, d}, {.clusters = clusters, .seed = seed}, pool);
      assign_points({x.data(), n, d}, centroids, labels, pool);
      host += cosine(x, d, labels, clusters) / 3;
      gpu += cosine(x, d, on_gpu(x, d, clusters, false, seed, 10).labels, clusters) / 3;
    }
    EXPECT_NEAR(gpu, host, 0.003) << d;  // seeds differ by as much
  }
}

TEST(GpuLloyd, IsAsTightAsTheHostsTwoStepsByDistance) {
  NEEDS_GPU();
  ThreadPool pool;
  for (const std::int64_t d : {64, 128}) {
    const std::int64_t n = 16384, clusters = 800;
    const Floats x = points(n, d, 2000, 6);
    Floats lifted;
    for (std::int64_t i = 0; i < n; ++i) {
      lifted.insert(lifted.end(), x.begin() + i * d, x.begin() + (i + 1) * d);
      lifted.push_back(1.0f);
    }
    const Partition host = partition_points({lifted.data(), n, d + 1}, clusters, Nearness::distance, 1, pool);
    const Labels gpu = on_gpu(x, d, clusters, true, 1, 12).labels;
    EXPECT_LT(distortion(x, d, gpu, clusters), 1.005 * distortion(x, d, host.labels, host.clusters)) << d;
  }
}

TEST(GpuLloyd, GivesTheSameBitsEachTimeAlone) {
  NEEDS_GPU();
  const std::int64_t n = 6000, d = 80, clusters = 333;
  Floats x = points(n, d, 50, 7), two = x;
  two.insert(two.end(), x.begin(), x.end());
  const Clustered first = on_gpu(x, d, clusters, true, 9, 8), again = on_gpu(x, d, clusters, true, 9, 8),
                  beside = on_gpu(two, d, clusters, true, 9, 8, 2);
  EXPECT_EQ(first.labels, again.labels);
  EXPECT_EQ(first.centroids, again.centroids);
  EXPECT_TRUE(std::equal(first.labels.begin(), first.labels.end(), beside.labels.begin()));
  EXPECT_TRUE(std::equal(first.labels.begin(), first.labels.end(), beside.labels.begin() + n));
}

TEST(GpuLloyd, TakesWhateverKeysAre) {
  NEEDS_GPU();
  constexpr float kInf = std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max();
  for (const std::int64_t d : {2, 64, 128, 256}) {
    for (const bool by_distance : {false, true}) {
      const auto expect_labels = [&](const Floats& x, std::int64_t clusters) {
        const Clustered found = on_gpu(x, d, clusters, by_distance, 1, 6);
        for (const std::int32_t label : found.labels) ASSERT_TRUE(label >= 0 && label < clusters);
        for (const float c : found.centroids) ASSERT_TRUE(std::isfinite(c));
      };
      const Floats some = points(600, d, 20, 8);
      expect_labels(Floats(some.begin(), some.begin() + d), 1);  // one key
      expect_labels(some, 600);                                  // a cluster each
      expect_labels(Floats(some.size(), 0.25f), 100);            // all alike
      expect_labels(Floats(some.size(), 0.0f), 100);
      for (const float bad : {kInf, -kInf, std::nanf(""), kMost, -kMost, 1e-42f}) {
        Floats hurt = some;
        for (std::size_t i = 0; i < hurt.size(); i += 997) hurt[i] = bad;
        expect_labels(hurt, 64);
      }
    }
  }
}

// ---- Indexes of a document -------------------------------------------------------------------------------

constexpr std::int64_t kTokens = 6000;

/// The shipped document over and over, and indexed; `prepare` is called with the context when a method is attached.
Context indexed(Device device, const char* spec, const std::function<void(Context&)>& prepare = {}) {
  Context context(pocket(), {.kv_type = DType::f32, .device = device, .max_tokens = kTokens + 512});
  context.attach(parse_spec(spec));
  if (prepare) prepare(context);
  std::vector<TokenId> tokens = pocket()->tokenizer().encode(
      read_file(source_dir().string() + "/demo/document.txt"), Tokenizer::Bos::as_template);
  while (std::ssize(tokens) < kTokens) tokens.insert(tokens.end(), tokens.begin(), tokens.end());
  tokens.resize(static_cast<std::size_t>(kTokens));
  context.prefill(tokens);
  context.build_indexes();
  return context;
}

const ClusterTree& tree_of(const Context& context, std::size_t layer, std::size_t head) {
  const auto& chooser = dynamic_cast<const ClusterChooser&>(*context.impl().methods[0].selectors[layer]);
  static ClusterChoice choice;
  choice = *chooser.cluster_choice();
  return choice.segments[0].heads[head];
}

TEST(GpuIndexBuild, ClustersHoldEveryKeyOnceAndAreTheSameEachTime) {
  NEEDS_GPU();
  const char* const spec = "squeezed:window=64";
  const Context one = indexed(Device::cuda, spec), other = indexed(Device::cuda, spec);
  if (device_keys_of(*one.impl().gpu) == nullptr) GTEST_SKIP() << "this GPU makes no clusters";
  for (std::size_t layer = 0; layer < one.impl().methods[0].selectors.size(); ++layer) {
    if (one.impl().methods[0].selectors[layer] == nullptr) continue;
    const ClusterTree first = tree_of(one, layer, 0), second = tree_of(other, layer, 0);
    EXPECT_EQ(first.rows, second.rows);
    EXPECT_EQ(first.levels[0].centroids, second.levels[0].centroids);
    EXPECT_EQ(first.levels[0].spreads, second.levels[0].spreads);
    const std::set<Position> rows(first.rows.begin(), first.rows.end());
    EXPECT_EQ(rows.size(), first.rows.size());
    EXPECT_EQ(std::ssize(rows), *rows.rbegin() + 1 - *rows.begin());
  }
}

/// The keys of a context on the GPU as it would be if it could not score clusters.
class WithoutScores final : public DeviceKeys {
 public:
  explicit WithoutScores(DeviceKeys& all) : all_(all) {}
  bool takes(const KeysOnDevice& keys, std::int64_t clusters) const override {
    return all_.takes(keys, clusters);
  }
  std::vector<std::vector<float>> centroids(const KeysOnDevice& keys,
                                            std::span<const std::vector<Position>> samples,
                                            std::int64_t clusters,
                                            std::span<const std::uint64_t> seeds) override {
    return all_.centroids(keys, samples, clusters, seeds);
  }
  std::vector<std::int32_t> labels(const KeysOnDevice& keys,
                                   std::span<const std::vector<float>> centroids) override {
    return all_.labels(keys, centroids);
  }
  std::vector<KeyClusters> clusters(const KeysOnDevice& keys, const ClusterTask& task) override {
    return all_.clusters(keys, task);
  }
  std::vector<double> sharpness(const KeysOnDevice& keys, std::span<const float> queries, int group,
                                float scale) override {
    return all_.sharpness(keys, queries, group, scale);
  }
  void attend(int layer, std::int64_t tokens, std::span<const float> queries, float scale,
              std::span<float> outputs, std::span<float> lse) override {
    all_.attend(layer, tokens, queries, scale, outputs, lse);
  }
  void release() override { all_.release(); }

 private:
  DeviceKeys& all_;
};

const Calibration& calibration_of(const Context& context) {
  for (const Selector* const selector : context.impl().methods[0].selectors)
    if (selector != nullptr) return *dynamic_cast<const ThresholdSelector&>(*selector).calibration(0);
  throw InputError("no layer chooses");
}

TEST(GpuIndexBuild, ThresholdsAreTheHostsOfTheSameClustersAndTheSameEachTime) {
  NEEDS_GPU();
  constexpr double kBin = 1.0 / ScoreHistogram::kBinsPerUnit;  // a score at an edge may fall to either side
  for (const char* const spec :
       {"squeezed:window=64", "squeezed:window=64,spread=off", "squeezed:window=64,centroids=f16",
        "squeezed:window=64,average=plain,block=16", "squeezed:window=64,sink=4,mass=0.9"}) {
    std::unique_ptr<WithoutScores> without;
    const Context gpu = indexed(Device::cuda, spec), again = indexed(Device::cuda, spec);
    if (device_keys_of(*gpu.impl().gpu) == nullptr) GTEST_SKIP() << "this GPU makes no clusters";
    const Context host = indexed(Device::cuda, spec, [&](Context& context) {
      without = std::make_unique<WithoutScores>(*device_keys_of(*context.impl().gpu));
      for (Selector* const selector : context.impl().methods[0].selectors)
        if (selector != nullptr) dynamic_cast<BuiltByDevice&>(*selector).build_by(without.get());
    });
    const Calibration &found = calibration_of(gpu), &same = calibration_of(again),
                      &expected = calibration_of(host);
    EXPECT_EQ(found.thresholds.at, same.thresholds.at) << spec;
    EXPECT_EQ(found.thresholds.power, same.thresholds.power) << spec;
    for (const QueryKind kind : kQueryKinds) {
      for (const std::int64_t tokens : {1, 16, 60, 128})
        EXPECT_NEAR(found.thresholds.of(kind, tokens, 0) / expected.thresholds.of(kind, tokens, 0), 1.0,
                    1.5 * kBin)
            << spec;
      const auto k = static_cast<std::size_t>(kind);
      EXPECT_EQ(found.held_out[k].mass, same.held_out[k].mass) << spec;
      EXPECT_NEAR(found.held_out[k].sparsity, expected.held_out[k].sparsity, 2e-3) << spec;
      EXPECT_NEAR(found.held_out[k].mass, expected.held_out[k].mass, 2e-3) << spec;
      EXPECT_NEAR(found.held_out[k].error, expected.held_out[k].error, 2e-3) << spec;
    }
  }
}

/// What was free when it was asked for is taken by others by the time it is used: heads then go one by one, to the same
/// clusters.
TEST(GpuIndexBuild, MemoryThatRunsOutIsGivenBackAndTheHeadsGoOneByOne) {
  NEEDS_GPU();
  constexpr int kHeads = 8, kWidth = 128;
  constexpr std::int64_t kKeys = 120'000, kClusters = 1024, kLeft = std::int64_t{600} << 20;
  const cuda::KvLayout layout = {kHeads, kWidth, DType::bf16, 0};
  const cuda::Stream stream;
  cuda::Buffer rows(layout.layer_bytes(kKeys), "keys of a test");
  cuda::fill_uniform(rows.as<char>(), DType::bf16, rows.bytes() / 2, 0.0f, 1.0f, 5, stream.get());
  stream.synchronize();
  const auto device =
      make_device_keys([&] { return GpuKeys{.base = rows.as<char>(), .layout = layout, .tokens = kKeys}; },
                       kHeads, [] { return std::int64_t{1} << 40; });
  const KeysOnDevice keys = {.heads = {0, 1, 2, 3, 4, 5, 6, 7}, .begin = 0, .end = kKeys};
  const std::vector<std::uint64_t> seeds(kHeads, 3);
  ASSERT_TRUE(device->takes(keys, kClusters));
  const std::vector<KeyClusters> expected = device->clusters(keys, {.clusters = kClusters, .seeds = seeds});
  device->release();
  const std::int64_t free = gpu_info().free_bytes;
  ASSERT_GT(free, 4 * kLeft);  // eight heads take twice what is left
  const cuda::Buffer others(free - kLeft, "what others have taken");
  const std::vector<KeyClusters> found = device->clusters(keys, {.clusters = kClusters, .seeds = seeds});
  device->release();
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t head = 0; head < found.size(); ++head) {
    EXPECT_EQ(found[head].labels, expected[head].labels);
    EXPECT_EQ(found[head].means, expected[head].means);
  }
  EXPECT_GT(gpu_info().free_bytes, kLeft - (std::int64_t{64} << 20));  // nothing is kept
}

/// Of question tokens' outputs under a method against those of full attention, relative.
double error_of(Context& context) {
  const std::vector<TokenId> question = story(24);
  const auto sparse = context.forward(question, 0);
  context.roll_back(kTokens);
  const auto full = context.forward(question, kDense);
  context.roll_back(kTokens);
  double off = 0, all = 0;
  for (std::size_t i = 0; i < full.size(); ++i)
    off += std::pow(static_cast<double>(sparse[i]) - full[i], 2),
        all += std::pow(static_cast<double>(full[i]), 2);
  return std::sqrt(off / all);
}

TEST(GpuIndexBuild, AnswersAreAsNearToFullAttentionAsWithTheHostsIndex) {
  NEEDS_GPU();
  for (const char* const spec : {"kmeans:window=64", "squeezed:window=64", "ivf:window=64",
                                 "squeezed:window=64,metric=cosine", "saap:window=64"}) {
    Context cpu = indexed(Device::cpu, spec), gpu = indexed(Device::cuda, spec);
    const double host = error_of(cpu), device = error_of(gpu);
    std::printf("%s: error %.4f with the host's index, %.4f with the GPU's\n", spec, host, device);
    EXPECT_LT(device, 1.25 * host + 0.01) << spec;
  }
}

}  // namespace
}  // namespace lode
