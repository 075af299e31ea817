// SPDX-License-Identifier: Apache-2.0
// Training steps of HashAttention's functions on a GPU against the CPU's: gradients, losses, the same bits
// twice and however many heads fit at once, and runs that are interrupted and go on. Skipped where there is no
// GPU; where the host plays one, it is that one's arithmetic.
#include "support/hash_training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <thread>

#include "base/cancel.h"
#include "base/threads.h"
#include "eval/tiny_model.h"
#include "gpu/train/hash.h"
#include "kernels/rope.h"
#include "kv/store.h"
#include "lab/train/hash/device.h"
#include "lab/train/hash/trainer.h"
#include "lodestone/error.h"
#include "support/gpu.h"
#include "support/normals.h"

namespace lode::test {
namespace {

using testing::HasSubstr;

/// Two layers of one KV head each, whose keys, values and queries are random numbers until somebody changes them.
struct Scene {
  int group = 4, d = 64, layers = 2;
  std::int64_t keys = 700, steps = 3;
  std::vector<Position> tokens = {300, 410, 411, 555, 600, 699};  ///< of each step
  double key_scale = 1.0;
  bool equal_keys = false;
  float planted = 0;  ///< the first number of a step's first query, unless 0
  HashSettings settings = [] {
    HashSettings s;
    s.widths = {64, 64};
    s.dense = {.sink = 3, .window = 40};
    s.top = 9;
    s.others = 200;
    s.rate = 3e-3;
    s.type = DType::f32;
    return s;
  }();

  ModelConfig config() const {
    ModelConfig c;
    c.layers = layers, c.query_heads = group, c.kv_heads = 1, c.head_dim = d, c.max_positions = 4096;
    return c;
  }
};

struct Outcome {
  std::vector<double> losses;                 // [steps, heads]
  std::vector<float> values;                  // of all functions
  std::vector<std::vector<float>> gradients;  // of each array, as the first step had them
  std::string why_host;
  std::vector<std::string> fingerprints;
};

class Stage {
 public:
  explicit Stage(const Scene& scene)
      : scene_(scene),
        config_(scene.config()),
        rope_(config_, 4096),
        kv_({.layers = scene.layers,
             .kv_heads = 1,
             .head_dim = scene.d,
             .type = DType::f32,
             .max_tokens = scene.keys}) {
    for (int layer = 0; layer < scene.layers; ++layer) {
      std::vector<float> k = normals(scene.keys * scene.d, hash_seed(1, layer), scene.key_scale);
      if (scene.equal_keys) {
        for (std::size_t i = static_cast<std::size_t>(scene.d); i < k.size(); ++i)
          k[i] = k[i - static_cast<std::size_t>(scene.d)];
      }
      std::vector<float> v = normals(scene.keys * scene.d, hash_seed(2, layer));
      if (scene.equal_keys) std::fill(v.begin(), v.end(), 1.0f);
      kv_.write(layer, scene.keys, k, v);
    }
    kv_.commit(scene.keys);
    for (std::int64_t step = 0; step < scene.steps; ++step) {
      std::vector<StepQueries>& layers = queries_.emplace_back();
      for (int layer = 0; layer < scene.layers; ++layer) {
        const std::int64_t count = std::ssize(scene.tokens) * scene.group * scene.d;
        layers.push_back(
            {.positions = scene.tokens,
             .roped = normals(count, hash_seed(3, layer, step)),
             .as_trained = normals(count, hash_seed(scene.settings.scheme.roped ? 3 : 4, layer, step))});
        if (scene.planted != 0) layers.back().roped[0] = layers.back().as_trained[0] = scene.planted;
      }
    }
  }

  /// All steps in series of `at_once`, and the gradients of the first one: Adam's first moments then are a
  /// tenth of them.
  Outcome run(Device device, std::int64_t memory = 0, std::int64_t at_once = 0) {
    Outcome outcome;
    std::deque<HashHead> heads;
    for (int layer = 0; layer < scene_.layers; ++layer)
      heads.emplace_back(HashHead::Shape{.group = scene_.group,
                                         .head_dim = scene_.d,
                                         .scheme = scene_.settings.scheme,
                                         .widths = scene_.settings.widths,
                                         .loss = scene_.settings.loss,
                                         .adam = {.rate = scene_.settings.rate},
                                         .seed = hash_seed(9, layer)});
    const auto steps = make_hash_device(device,
                                        {.config = config_,
                                         .settings = scene_.settings,
                                         .kv = kv_,
                                         .rope = rope_,
                                         .pool = pool_,
                                         .heads = heads,
                                         .most_tokens = scene_.keys},
                                        outcome.why_host, memory);
    const auto each_array = [&](const auto& body) {
      for (HashHead& head : heads) {
        for (auto* functions : {&head.queries(), &head.keys()})
          for (HashFunction& function : *functions)
            for (Adam::Moments& m : function.adam().moments()) body(m);
      }
    };
    std::int64_t done = 0;
    const auto take = [&](std::int64_t some) {
      const std::vector<std::vector<StepQueries>> queries(queries_.begin() + done,
                                                          queries_.begin() + done + some);
      const std::vector<double> losses = steps->take(
          {.keys_end = static_cast<Position>(scene_.keys),
           .class1_weight = 20,
           .rate_scale = [&](std::int64_t step) { return 1.0 / static_cast<double>(1 + done + step); },
           .queries = &queries,
           .rng = [&](std::int64_t step,
                      std::int64_t head) { return Rng(hash_seed(7, done + step, head)); }});
      outcome.losses.insert(outcome.losses.end(), losses.begin(), losses.end());
      done += some;
    };
    steps->begin_prompt();
    take(1);
    steps->store();
    each_array([&](const Adam::Moments& m) {
      std::vector<float>& gradient = outcome.gradients.emplace_back();
      for (const float first : m.first) gradient.push_back(10 * first);
    });
    while (done < scene_.steps)
      take(at_once > 0 ? std::min(at_once, scene_.steps - done) : scene_.steps - done);
    steps->store();
    each_array([&](const Adam::Moments& m) {
      outcome.values.insert(outcome.values.end(), m.parameter->value.begin(), m.parameter->value.end());
    });
    return outcome;
  }

 private:
  const Scene& scene_;
  ModelConfig config_;
  Rope rope_;
  KvStore kv_;
  ThreadPool pool_{2};
  std::vector<std::vector<StepQueries>> queries_;
};

void expect_like_cpu(const Scene& scene, const std::string& what, double tolerance = 1e-4) {
  SCOPED_TRACE(what);
  Stage stage(scene);
  const Outcome cpu = stage.run(Device::cpu), gpu = stage.run(Device::cuda);
  EXPECT_EQ(gpu.why_host, "");
  ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
  for (std::size_t i = 0; i < cpu.losses.size(); ++i)
    EXPECT_NEAR(gpu.losses[i], cpu.losses[i], 10 * tolerance * std::abs(cpu.losses[i])) << "loss " << i;
  ASSERT_EQ(gpu.gradients.size(), cpu.gradients.size());
  for (std::size_t i = 0; i < cpu.gradients.size(); ++i) {
    ASSERT_EQ(gpu.gradients[i].size(), cpu.gradients[i].size());
    float most = 0, off = 0;
    for (std::size_t j = 0; j < cpu.gradients[i].size(); ++j) {
      most = std::max(most, std::abs(cpu.gradients[i][j]));
      off = std::max(off, std::abs(gpu.gradients[i][j] - cpu.gradients[i][j]));
    }
    EXPECT_LE(off, tolerance * most + 1e-9) << "array " << i;
  }
  EXPECT_EQ(gpu.values.size(), cpu.values.size());
}

TEST(GpuHash, StepsEqualTheCpusForEveryKindOfFunction) {
  NEEDS_GPU();
  for (const int d : {64, 80, 128}) {
    for (const int group : {1, 3, 8}) {
      Scene scene = {.group = group, .d = d};
      expect_like_cpu(scene, "d " + std::to_string(d) + " group " + std::to_string(group));
    }
  }
  for (const auto values : {HashScheme::Values::off, HashScheme::Values::norm, HashScheme::Values::vector}) {
    for (const bool roped : {false, true}) {
      Scene scene;
      scene.settings.scheme.values = values;
      scene.settings.scheme.roped = roped;
      scene.settings.scheme.per_query_head = roped;
      scene.settings.scheme.activation = roped ? HashNet::Activation::relu : HashNet::Activation::silu;
      scene.settings.shift = 3000;
      scene.settings.loss = roped ? PivotalLoss::softmax : PivotalLoss::bce;
      expect_like_cpu(scene, "values " + std::to_string(static_cast<int>(values)) + (roped ? " roped" : ""));
    }
  }
  for (const std::vector<std::int64_t>& widths : {std::vector<std::int64_t>{}, {20}, {130, 70, 40}}) {
    Scene scene;
    scene.settings.widths = widths;
    scene.settings.by_value = false;
    scene.settings.scheme.bits = widths.empty() ? 128 : 64;
    scene.settings.shift = scene.settings.further = 2000;
    scene.settings.loss = widths.size() > 1 ? PivotalLoss::softmax : PivotalLoss::bce;
    expect_like_cpu(scene, std::to_string(widths.size()) + " hidden layers");
  }
}

TEST(GpuHash, StepsEqualTheCpusWhereItHurts) {
  NEEDS_GPU();
  Scene one;  // query
  one.tokens = {500};
  one.group = 1;
  expect_like_cpu(one, "one query");
  one.settings.loss = PivotalLoss::softmax;
  expect_like_cpu(one, "one query, softmax");
  Scene few;  // keys: the first query has one far key, the next as many as are pivotal
  few.tokens = {43, 51, 52, 53};
  few.keys = 54;
  few.settings.others = 4;
  expect_like_cpu(few, "fewer far keys than pivotal ones");
  few.settings.loss = PivotalLoss::softmax;
  expect_like_cpu(few, "fewer far keys than pivotal ones, softmax");
  Scene equal;
  equal.equal_keys = true;
  expect_like_cpu(equal, "all keys are equal");
  for (const auto loss : {PivotalLoss::bce, PivotalLoss::softmax}) {
    Scene huge;
    huge.key_scale = 1e30;
    huge.settings.loss = loss;
    expect_like_cpu(huge, "huge logits");
    huge.planted = 1e30f;
    expect_like_cpu(huge, "infinite logits");
  }
  Scene all;  // keys, in several parts of a gradient's sum
  all.settings.others = 0;
  all.keys = 1300;
  all.tokens = {800, 900, 1299};
  all.steps = 2;
  expect_like_cpu(all, "all keys");
  Scene top;
  top.settings.top = 2000;
  expect_like_cpu(top, "all far keys are pivotal");
}

TEST(GpuHash, ANumberThatIsNoneIsSaid) {
  NEEDS_GPU();
  for (const auto loss : {PivotalLoss::bce, PivotalLoss::softmax}) {
    for (const auto activation : {HashNet::Activation::silu, HashNet::Activation::relu}) {
      Scene scene;
      scene.planted = std::nanf("");
      scene.settings.loss = loss;
      scene.settings.scheme.activation = activation;
      for (const Device device : {Device::cpu, Device::cuda}) {
        Stage stage(scene);
        try {
          stage.run(device);
          FAIL() << "expected an error";
        } catch (const RunError& e) {
          EXPECT_THAT(e.what(), HasSubstr("training left the range of numbers")) << e.what();
        }
      }
    }
  }
}

TEST(GpuHash, TheSameBitsTwiceAndHoweverManyHeadsFit) {
  NEEDS_GPU();
  Scene scene;
  scene.layers = 5;
  scene.steps = 4;
  Stage stage(scene);
  const Outcome whole = stage.run(Device::cuda);
  EXPECT_EQ(stage.run(Device::cuda).values, whole.values);
  // Room for two heads, for one, and series of one step.
  const GpuHashShape shape = {.heads = 5,
                              .group = scene.group,
                              .head_dim = scene.d,
                              .key_inputs = scene.d,
                              .widths = scene.settings.widths,
                              .top = scene.settings.top};
  const GpuHashBytes bytes =
      gpu_hash_bytes(shape, {.tokens = 24, .keys = scene.keys - 3, .others = scene.settings.others});
  for (const std::int64_t heads : {1, 2}) {
    const Outcome some = stage.run(Device::cuda, bytes.functions + heads * bytes.head, 1);
    EXPECT_EQ(some.why_host, "");
    EXPECT_EQ(some.values, whole.values);
    EXPECT_EQ(some.losses, whole.losses);
  }
  // Where not one head fits, the host says that it takes the steps.
  const Outcome host = stage.run(Device::cuda, bytes.functions + bytes.head - 1);
  EXPECT_THAT(host.why_host, HasSubstr("the host takes the steps"));
  EXPECT_EQ(host.values, stage.run(Device::cpu).values);
}

HashSettings small_settings() {
  HashSettings settings = small_hash_settings();
  settings.steps = 4;
  settings.shift = 500;
  settings.late = 0.5;
  settings.late_tokens = 20;
  return settings;
}

std::vector<std::string> fingerprints(const HashResult& result) {
  std::vector<std::string> all;
  for (const HashWeights& layer : result.layers) all.push_back(layer.fingerprint());
  return all;
}

HashResult train(Device device, const HashSettings& settings, const std::vector<Prompt>& prompts,
                 const std::filesystem::path& checkpoint = {}) {
  return train_hash(tiny_model(), {.kv_type = DType::f32, .device = device, .max_tokens = 200, .chunk = 64},
                    settings, prompts, checkpoint, Progress::Mode::quiet,
                    [](const std::string& why) { ADD_FAILURE() << why; });
}

TEST(GpuHash, AWholeRunIsAsGoodAsTheCpusAndTheSameEveryTime) {
  NEEDS_GPU();
  const std::vector<Prompt> prompts = letters_for(*tiny_model(), 900);
  for (const auto draw : {HashSettings::Draw::prompt, HashSettings::Draw::chunk}) {
    HashSettings settings = small_settings();
    settings.draw = draw;
    const HashResult cpu = train(Device::cpu, settings, prompts),
                     gpu = train(Device::cuda, settings, prompts);
    EXPECT_EQ(gpu.steps, cpu.steps);
    ASSERT_EQ(gpu.heads.size(), cpu.heads.size());
    for (std::size_t i = 0; i < cpu.heads.size(); ++i)
      EXPECT_NEAR(gpu.heads[i].loss, cpu.heads[i].loss, 0.03 * cpu.heads[i].loss);
    EXPECT_EQ(fingerprints(train(Device::cuda, settings, prompts)), fingerprints(gpu));
  }
}

TEST(GpuHash, AnInterruptedRunGoesOnToTheSameBitsAndOnTheSameDevice) {
  NEEDS_GPU();
  const std::vector<Prompt> prompts = letters_for(*tiny_model(), 6000);
  const HashSettings settings = small_settings();
  const HashResult whole = train(Device::cuda, settings, prompts);
  const auto path = std::filesystem::path(testing::TempDir()) / ("hash-gpu-" + std::to_string(getpid()));
  std::filesystem::remove(path);
  std::atomic<bool> ended = false;
  std::thread interrupts([&] {
    while (!ended && !std::filesystem::exists(path)) std::this_thread::yield();
    set_cancel(true);
  });
  EXPECT_THROW(train(Device::cuda, settings, prompts, path), Interrupted);
  ended = true;
  interrupts.join();
  set_cancel(false);
  ASSERT_TRUE(std::filesystem::exists(path));
  EXPECT_THROW(train(Device::cpu, settings, prompts, path), InputError);
  const HashResult resumed = train(Device::cuda, settings, prompts, path);
  EXPECT_EQ(fingerprints(resumed), fingerprints(whole));
  ASSERT_EQ(resumed.heads.size(), whole.heads.size());
  for (std::size_t i = 0; i < whole.heads.size(); ++i)
    EXPECT_NEAR(resumed.heads[i].loss, whole.heads[i].loss, 1e-6);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace lode::test
