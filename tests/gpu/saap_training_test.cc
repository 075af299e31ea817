// SPDX-License-Identifier: Apache-2.0
// Training of SAAP on a GPU against the CPU's: centroids, labels, targets, steps of every kind of classifier,
// the same bits twice and after an interruption, and a whole run whose held-out loss is the CPU's. Skipped
// where there is no GPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "ann/kmeans.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "eval/tiny_model.h"
#include "gpu/train/saap.h"
#include "lab/train/saap/device.h"
#include "lab/train/saap/trainer.h"
#include "lodestone/error.h"
#include "support/gpu.h"
#include "support/saap.h"
#include "support/world.h"

namespace lode::test {
namespace {

TEST(GpuSaap, CentroidsAndLabelsEqualTheCpusWhereArithmeticIsExact) {
  NEEDS_GPU();
  const std::int64_t n = 700, d = 24, clusters = 20;
  std::vector<float> x(static_cast<std::size_t>(n * d), 0.0f);
  Rng rng(1);
  for (std::int64_t i = 0; i < n; ++i)  // one number a row: every product and sum is exact
    x[static_cast<std::size_t>(i * d) + rng.below(24)] = static_cast<float>(1 + rng.below(4)) - 2.0f;
  ThreadPool pool(2);
  const Matrix<const float> points(x.data(), n, d);
  const auto gpu = make_gpu_saap_training();
  const KMeansOptions options = {.clusters = clusters, .seed = 3};
  const std::vector<float> centroids = spherical_kmeans(points, options, pool);
  EXPECT_EQ(gpu->cluster(points, options), centroids);
  std::vector<std::int32_t> expected(static_cast<std::size_t>(n)), found(expected.size());
  assign_points(points, centroids, expected, pool);
  gpu->label(points, centroids, {}, found);
  EXPECT_EQ(found, expected);
  std::vector<float> offsets(static_cast<std::size_t>(clusters), -4.0f);
  offsets[7] = 9.0f;
  gpu->label(points, centroids, offsets, found);
  EXPECT_EQ(std::count(found.begin(), found.end(), 7), n);
}

TEST(GpuSaap, KMeansIsAsGoodAsTheCpusOnPlainVectors) {
  NEEDS_GPU();
  const std::int64_t n = 3000, d = 64, clusters = 50;
  const std::vector<float> x = random_floats(n * d, 5, 1.0);
  ThreadPool pool(2);
  const Matrix<const float> points(x.data(), n, d);
  const auto sum_of_best = [&](const std::vector<float>& centroids) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      double best = -1e30;
      for (std::int64_t c = 0; c < clusters; ++c) {
        double dot = 0;
        for (std::int64_t j = 0; j < d; ++j)
          dot += static_cast<double>(points[i][static_cast<std::size_t>(j)]) *
                 centroids[static_cast<std::size_t>(c * d + j)];
        best = std::max(best, dot);
      }
      sum += best;
    }
    return sum;
  };
  const KMeansOptions options = {.clusters = clusters, .seed = 3};
  const auto gpu = make_gpu_saap_training();
  const std::vector<float> found = gpu->cluster(points, options);
  const double cpu = sum_of_best(spherical_kmeans(points, options, pool));
  EXPECT_NEAR(sum_of_best(found), cpu, 5e-3 * cpu);
  EXPECT_EQ(gpu->cluster(points, options), found);
}

TEST(GpuSaap, TargetsEqualTheCpus) {
  NEEDS_GPU();
  World world({.kv_heads = 1, .group = 1, .d = 64, .dense = {1, 16}});
  world.write(700);
  const SaapHead head = random_saap_head({.kv_heads = 1, .clusters = 9}, 1);
  const SaapKeys keys = read_saap_keys(world.store().layer(0).heads[0], world.rope(), head.keys, 1);
  const QueryBlock block = world.block(0, 700);
  SaapCandidates candidates;
  for (Position p = 0; p < 700; p += 3) {
    const auto q = block.q_unrotated.subspan(static_cast<std::size_t>(p) * 64, 64);
    candidates.q.insert(candidates.q.end(), q.begin(), q.end());
    candidates.positions.push_back(p);
    candidates.further.push_back(p % 2 == 0 ? 5000 : 0);
  }
  ThreadPool pool(1);
  for (const bool exact : {true, false}) {
    const auto gpu = make_saap_device(Device::cuda, pool, exact);
    for (const bool causal : {false, true}) {
      for (const bool queries : {false, true}) {
        if (queries && !exact) continue;  // rounded scores may change which key is the best
        for (const std::int64_t wanted : {1000, 40}) {
          const SaapFilter filter = {
              .sink = 1, .window = 30, .distance = 60, .pairs = causal, .queries = queries, .causal = causal};
          SaapExamples expected(64, 9), found(64, 9);
          add_saap_examples(candidates, keys, world.rope(), 0.125f, filter, wanted, expected);
          gpu->add_examples(candidates, keys, world.rope(), 0.125f, filter, wanted, found);
          ASSERT_EQ(found.count(), expected.count());
          ASSERT_GT(found.count(), 30);
          std::vector<float> q(64), p(64), a(9), b(9);
          for (std::int64_t i = 0; i < found.count(); ++i) {
            expected.read(i, q, a);
            found.read(i, p, b);
            ASSERT_EQ(p, q);
            for (std::size_t c = 0; c < 9; ++c) EXPECT_NEAR(b[c], a[c], exact ? 5e-4 : 4e-3);
          }
        }
      }
    }
  }
}

/// Queries around a few directions, whose targets are softmaxes of a linear map: prompts of 90, 2, 1 and 60.
SaapExamples some_examples(std::int64_t d, std::int64_t c) {
  SaapExamples examples(d, c);
  const std::vector<float> map = random_floats(d * c, 8, 1.0);
  std::uint64_t seed = 20;
  for (const int count : {90, 2, 1, 60}) {
    for (int i = 0; i < count; ++i) {
      const std::vector<float> q = random_floats(d, ++seed, 1.0);
      std::vector<float> target(static_cast<std::size_t>(c));
      double sum = 0;
      for (std::int64_t b = 0; b < c; ++b) {
        double dot = 0;
        for (std::int64_t j = 0; j < d; ++j)
          dot += q[static_cast<std::size_t>(j)] * map[static_cast<std::size_t>(b * d + j)];
        sum += target[static_cast<std::size_t>(b)] = static_cast<float>(std::exp(dot / 3));
      }
      for (float& t : target) t = static_cast<float>(t / sum);
      examples.add(q, target);
    }
    examples.end_prompt();
  }
  return examples;
}

struct Trained {
  std::vector<double> losses;
  std::vector<float> weights;  // all of them
};

/// 60 steps, in series of at most `most`.
Trained train(SaapDevice& device, const SaapExamples& examples, SaapClassifier classifier,
              std::int64_t most) {
  SaapSettings settings;
  settings.steps = 60, settings.batch = 50;
  Adam adam(classifier.module(), {.rate = 2e-3});
  const auto fit = device.fit(examples, classifier, adam, settings.batch);
  Trained trained;
  while (adam.steps() < settings.steps) {
    fit->begin(draw_steps(examples, 4, settings, 5, adam.steps(), std::min(most, fit->series())));
    const auto some = fit->finish();
    trained.losses.insert(trained.losses.end(), some.begin(), some.end());
  }
  fit->store();
  classifier.module().visit("", [&](const std::string&, Parameter& p) {
    trained.weights.insert(trained.weights.end(), p.value.begin(), p.value.end());
  });
  return trained;
}

TEST(GpuSaap, StepsEqualTheCpus) {
  NEEDS_GPU();
  const std::int64_t d = 24, hidden = 40, c = 13;
  const SaapExamples examples = some_examples(d, c);
  ThreadPool pool(1);
  const auto cpu = make_saap_device(Device::cpu, pool), exact = make_saap_device(Device::cuda, pool, true),
             fast = make_saap_device(Device::cuda, pool);
  for (const char* kind : {"mlp", "residual", "further"}) {
    const auto start = [&] {
      SaapClassifier made(d, hidden, c, std::string(kind) == "residual", 3);
      return std::string(kind) == "further" ? SaapClassifier(made.exported(DType::f32)) : std::move(made);
    };
    const Trained expected = train(*cpu, examples, start(), 1), found = train(*exact, examples, start(), 256),
                  rounded = train(*fast, examples, start(), 256);
    ASSERT_EQ(found.losses.size(), 60u);
    EXPECT_LT(expected.losses[59], 0.9 * expected.losses[0]);
    double mean = 0, rounded_mean = 0;
    for (std::size_t i = 0; i < 60; ++i) {
      EXPECT_NEAR(found.losses[i], expected.losses[i], 2e-3 * expected.losses[i]) << kind << " step " << i;
      // TF32 rounds to ten bits. A batch norm over two rows divides by their difference, and 60 steps add up,
      // so a single batch may be further off than the run.
      EXPECT_NEAR(rounded.losses[i], expected.losses[i], 2e-2 * expected.losses[i] + 2e-2)
          << kind << " step " << i;
      mean += expected.losses[i] / 60, rounded_mean += rounded.losses[i] / 60;
    }
    EXPECT_NEAR(rounded_mean, mean, 2.5e-2 * mean) << kind;
    // The same bits again, and in other series.
    EXPECT_EQ(train(*fast, examples, start(), 256).weights, rounded.weights) << kind;
    EXPECT_EQ(train(*fast, examples, start(), 7).weights, rounded.weights) << kind;
  }
}

TEST(GpuSaap, SaysWhatDoesNotFit) {
  NEEDS_GPU();
  const SaapExamples examples = some_examples(8, 3);
  const auto gpu = make_gpu_saap_training();
  const GpuSaapNet net = {.inputs = 8, .hidden = 1 << 16, .buckets = 3};
  try {
    gpu->fit(net, {.q = examples.queries(), .targets = examples.targets()}, std::int64_t{1} << 24);
    FAIL() << "expected an error";
  } catch (const RunError& e) {
    EXPECT_NE(std::string(e.what()).find("out of GPU memory"), std::string::npos) << e.what();
  }
}

std::string words(std::size_t bytes) {
  static const std::vector<std::string> all = {"stone ", "river ", "lode ", "seven ",
                                               "of ",    "the ",   "and ",  "north "};
  std::string text;
  Rng rng(1);
  while (text.size() < bytes) text += all[rng.below(all.size())];
  return text;
}

SaapResult train_tiny(Device device, const std::string& name,
                      const std::function<void(const SaapHeadReport&)>& on_head = {}) {
  SaapSettings settings;
  settings.clusters = 12, settings.hidden = 24, settings.samples = 150, settings.steps = 300;
  settings.filter = {.sink = 1, .window = 32, .distance = 16};
  settings.batch = 64, settings.rate = 3e-3, settings.probes = 3, settings.dense_layers = 0;
  const std::vector<Prompt> prompts = cut_into_prompts(*tiny_model(), "words", words(2400), 401);
  if (on_head) settings.memory = saap_bytes_of_head(settings, std::ssize(prompts), 8);  // head after head
  const auto checkpoint = std::filesystem::path(testing::TempDir()) / (name + std::to_string(getpid()));
  struct Remove {
    const std::filesystem::path& path;
    bool keep = false;
    ~Remove() {
      if (!keep) std::filesystem::remove(path);
    }
  } remove{checkpoint};
  try {
    return train_saap(tiny_model(), {.kv_type = DType::f32, .device = device}, settings, prompts, checkpoint,
                      Progress::Mode::quiet, on_head);
  } catch (const Interrupted&) {
    remove.keep = true;
    throw;
  }
}

TEST(GpuSaap, AWholeRunIsAsGoodAsTheCpusAndTheSameEveryTime) {
  NEEDS_GPU();
  const SaapResult cpu = train_tiny(Device::cpu, "cpu"), gpu = train_tiny(Device::cuda, "gpu");
  ASSERT_EQ(gpu.heads.size(), cpu.heads.size());
  double of_cpu = 0, of_gpu = 0;
  for (std::size_t i = 0; i < cpu.heads.size(); ++i) {
    EXPECT_EQ(gpu.heads[i].examples, cpu.heads[i].examples);
    of_cpu += cpu.heads[i].loss, of_gpu += gpu.heads[i].loss;
    EXPECT_NEAR(gpu.heads[i].loss, cpu.heads[i].loss, 0.03 * cpu.heads[i].loss);
  }
  EXPECT_NEAR(of_gpu, of_cpu, 0.01 * of_cpu);
  const auto weights = [](const SaapResult& result) {
    std::vector<std::byte> all;
    for (const auto& [layer, heads] : result.layers)
      for (const SaapHead& head : heads)
        for (const auto* part : {&head.keys.linear_weight, &head.networks[0].queries.hidden_weight,
                                 &head.networks[0].queries.output_weight})
          all.insert(all.end(), part->begin(), part->end());
    return all;
  };
  EXPECT_EQ(weights(train_tiny(Device::cuda, "again")), weights(gpu));
  int heads = 0;
  EXPECT_THROW(train_tiny(Device::cuda, "stopped", [&](const SaapHeadReport&) { set_cancel(++heads == 2); }),
               Interrupted);
  set_cancel(false);
  EXPECT_EQ(weights(train_tiny(Device::cuda, "stopped")), weights(gpu));
}

}  // namespace
}  // namespace lode::test
