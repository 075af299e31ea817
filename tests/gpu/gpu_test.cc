// SPDX-License-Identifier: Apache-2.0
// The engine on a GPU against the engine on the CPU: the same numbers, the same tokens, the same files.
// Skipped where there is no GPU.
#include "support/gpu.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "support/compare.h"
#include "support/golden_model.h"
#include "support/saap.h"
#include "support/source_dir.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

class GpuGolden : public testing::TestWithParam<std::string> {};

// All tokens at once go through the products of many rows, one at a time through those of one.
TEST_P(GpuGolden, LogitsEqualTransformers) {
  NEEDS_GPU();
  const GoldenModel golden(GetParam());
  const std::int64_t tokens = std::ssize(golden.ids);
  const float tolerance = golden.weights.layers[0].q.type == WeightType::f32 ? 1e-4f : 2e-2f;
  const auto model = make_gpu_model(golden.config, golden.weights, 0);
  const Rope rope(golden.config, tokens);
  for (const std::int64_t step : {tokens, std::int64_t{1}, std::int64_t{3}}) {
    KvStore kv({golden.config.layers, golden.config.kv_heads, golden.config.head_dim, DType::f32, tokens});
    const auto gpu = make_gpu_context(golden.config, model,
                                      {.kv_type = DType::f32, .max_tokens = tokens, .chunk = tokens});
    std::vector<float> all, some;
    for (std::int64_t at = 0; at < tokens; at += step) {
      const SequenceTokens part = {
          std::span(golden.ids)
              .subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(std::min(step, tokens - at))),
          &kv, 0};
      gpu->forward({.sequences = {&part, 1}}, rope, LogitRows::all, some);
      all.insert(all.end(), some.begin(), some.end());
    }
    EXPECT_LT(relative_difference(all, golden.logits), tolerance) << step << " tokens a step";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GpuGolden, testing::ValuesIn(kGoldenModels), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

Context context_on(Device device, DType type, std::int64_t max_tokens) {
  return Context(pocket(), {.kv_type = type, .device = device, .max_tokens = max_tokens});
}

TEST(Gpu, GreedyTokensEqualTheCpusOver256StepsInFloat32) {
  NEEDS_GPU();
  std::vector<TokenId> tokens[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device, DType::f32, 4096);
    context.prefill(story(1000));
    tokens[device == Device::cuda] =
        context.generate(story(1001), kDense, {.max_new_tokens = 256, .stop_at_eos = false}).tokens;
  }
  EXPECT_EQ(tokens[0].size(), 256u);
  EXPECT_EQ(tokens[0], tokens[1]);
}

TEST(Gpu, TeacherForcedLogitsOfSixteenBitTypesStayClose) {
  NEEDS_GPU();
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<float> logits[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      Context context = context_on(device, type, 4096);
      context.prefill(story(3000));
      logits[device == Device::cuda] = context.forward(story(40), kDense);
    }
    EXPECT_LT(relative_difference(logits[1], logits[0]), 3e-2f) << name_of(type);
  }
}

/// Every method gives what it gives on the CPU, whether the GPU chooses keys or the host.
class GpuMethod : public testing::TestWithParam<const char*> {};

/// True where the GPU chose. Beside float32 keys a CPU reads saap's network in 32 bits, a GPU in 16: then
/// without `same_bytes`.
bool expect_the_cpus_logits_and_work(const Spec& spec, bool same_bytes) {
  bool native = false;
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device, DType::f32, 2048);
    const MethodId method = context.attach(spec);
    context.prefill(story(1500));
    context.build_indexes();
    const int at = device == Device::cuda;
    if (at == 1) native = context.impl().methods[0].chosen_by != ChosenBy::host;
    logits[at] = context.forward(story(37), method, &work[at]);
    // One token at a time: the captured step.
    for (const TokenId token : story(5)) {
      WorkReport more;
      const auto row = context.forward({&token, 1}, method, &more);
      logits[at].insert(logits[at].end(), row.begin(), row.end());
      work[at] += more;
    }
    context.roll_back(1500);
    const auto again = context.forward(story(37), method);
    EXPECT_EQ(again, std::vector<float>(logits[at].begin(), logits[at].begin() + std::ssize(again)));
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
  EXPECT_EQ(work[0].far_total, work[1].far_total);
  EXPECT_EQ(work[0].sparse_tokens, work[1].sparse_tokens);
  // Ties and the last bits of scores may move single keys.
  EXPECT_NEAR(static_cast<double>(work[1].far_keys + 1) / static_cast<double>(work[0].far_keys + 1), 1.0,
              0.02);
  const auto kv_share = [](const WorkReport& w) {
    return static_cast<double>(w.kv_bytes) / static_cast<double>(w.full_bytes);
  };
  EXPECT_NEAR(kv_share(work[0]), kv_share(work[1]), 0.01);
  if (!same_bytes) return native;
  // A GPU reads a label for each key that has not joined its bucket's list yet: in a text this short, most.
  EXPECT_NEAR(work[0].density(), work[1].density(), 0.04);
  return native;
}

TEST_P(GpuMethod, LogitsAndWorkEqualTheCpus) {
  NEEDS_GPU();
  const Spec spec = parse_spec(GetParam());
  expect_the_cpus_logits_and_work(spec, spec.name != "saap");
}

// Methods whose networks, functions and buckets belong to some of a layer's heads (the others' are in
// index_test.cc), beside methods that need nothing of a head.
TEST(GpuPlan, MembersWithArtefactsServeTheirHeads) {
  NEEDS_GPU();
  const std::string hash = "hash:budget=5%", apart = "hash:budget=64,per=query-head",
                    buckets = "kmeans:clusters=32,probes=6", top = "topk:k=40,per=kv-head";
  const PlanFile plan({.sink = 1, .window = 128}, {{"full", "full"},
                                                   {"full", hash},
                                                   {hash, buckets},
                                                   {buckets, top},
                                                   {"topk:k=40", apart},
                                                   {hash, hash}});
  EXPECT_TRUE(expect_the_cpus_logits_and_work(plan.spec(), true));
  const PlanFile saap({.sink = 1, .window = 128}, {{"full", "full"},
                                                   {"full", "saap:probes=4"},
                                                   {"saap:probes=4", "full"},
                                                   {"hyperplanes:budget=10%,bits=128", "saap:probes=6"},
                                                   {"streaming", "hyperplanes:budget=10%,bits=128"},
                                                   {"saap:probes=4", "saap:probes=4"}});
  EXPECT_TRUE(expect_the_cpus_logits_and_work(saap.spec(), false));
}

TEST(Gpu, SaapReadsAsManyBytesAsOnTheCpuInSixteenBits) {
  NEEDS_GPU();
  WorkReport work[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device, DType::bf16, 2048);
    const MethodId method = context.attach(parse_spec("saap:probes=4,window=128"));
    context.prefill(story(1500));
    context.build_indexes();
    context.forward(story(37), method, &work[device == Device::cuda]);
  }
  EXPECT_NEAR(work[0].density(), work[1].density(), 0.04);
}

INSTANTIATE_TEST_SUITE_P(Specs, GpuMethod,
                         testing::Values("full", "streaming:window=128", "topk:k=40,window=128",
                                         "topk:k=40,window=128,per=kv-head",
                                         "topk:k=5%,window=128,dense_layers=2", "topk:mass=0.9,window=128",
                                         "random:fraction=10%,window=128",
                                         // The keys of one token are alike in the first layer, up to RoPE's
                                         // rounding, and may lie between two centroids.
                                         "kmeans:clusters=32,probes=6,window=128,dense_layers=1",
                                         "kmeans:clusters=32,probes=6,window=128,rope=on,dense_layers=1",
                                         "saap:probes=4,window=128", "saap:probes=4,window=128,rank=mass",
                                         "saap:probes=6,window=64,rank=key,dense_layers=2", "hash:budget=5%",
                                         "hash:budget=5%,per=query-head,window=16",
                                         "hyperplanes:budget=10%,mode=combined,depth=3,bits=128,window=128",
                                         "quest:budget=5%,window=128",
                                         "quest:budget=100,bits=4,per=kv-head,window=16"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

TEST(Gpu, TheShippedArtefactAndClustersAreChosenByTheGpu) {
  NEEDS_GPU();
  Context context = context_on(Device::cuda, DType::bf16, 4096);
  const std::map<std::string, ChosenBy> expected = {{"saap", ChosenBy::gpu},
                                                    {"saap:rank=key", ChosenBy::gpu},
                                                    {"saap:group=independent", ChosenBy::host},
                                                    {"squeezed", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:block=16", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:block=64", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:spread=off", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:centroids=f16", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:centroids=f16,spread=on", ChosenBy::host},
                                                    {"squeezed:block=100000", ChosenBy::host},
                                                    {"squeezed:levels=2", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:levels=auto", ChosenBy::gpu_by_host_index},
                                                    {"squeezed:levels=9", ChosenBy::host},
                                                    {"squeezed:levels=2,tail=on", ChosenBy::host},
                                                    {"squeezed:window=200", ChosenBy::host}};
  for (const auto& [spec, by] : expected) {
    const MethodId method = context.attach(parse_spec(spec));
    EXPECT_EQ(context.impl().methods[static_cast<std::size_t>(method)].chosen_by, by) << spec;
  }
}

/// The shipped artefact with its centroids in the linear path of classifiers that have a hidden layer, too.
void write_with_key_classifiers(const fs::path& path) {
  const fs::path shipped = source_dir() / "models/pocket" / "saap.safetensors";
  const ModelConfig& config = pocket()->config();
  std::map<int, std::vector<SaapHead>> layers;
  for (const auto& [layer, fingerprint] : read_saap_fingerprints(shipped)) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = config.query_heads,
                                    .kv_heads = config.kv_heads,
                                    .head_dim = config.head_dim};
    layers[layer] = read_saap(shipped, geometry, pocket()->fingerprint()).heads;
    for (SaapHead& head : layers[layer]) {
      constexpr std::int64_t kHidden = 16;
      const std::int64_t d = head.keys.inputs, c = head.keys.buckets;
      std::vector<float> centroids(static_cast<std::size_t>(c * d));
      kernels().widen(head.keys.linear_weight.data(), head.keys.type, c * d, centroids.data());
      const auto w1 = test::random_floats(kHidden * d, 1, 0.1), b1 = test::random_floats(kHidden, 2, 0.1),
                 w2 = test::random_floats(c * kHidden, 3, 0.3);
      head.keys = BucketNet(d, c, {w1, b1, w2, centroids, {}}, DType::f16);
      head.networks.resize(1);
    }
  }
  write_saap(path, layers, pocket()->fingerprint(), {{0, "{}"}});
}

TEST(Gpu, KeysOfATrainedClassifierAreLabelledOnTheHost) {
  NEEDS_GPU();
  const fs::path path = fs::temp_directory_path() / ("key-classifier-" + std::to_string(getpid()));
  write_with_key_classifiers(path);
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const int at = device == Device::cuda;
    Context context = context_on(device, DType::f32, 2048);
    const MethodId method = context.attach(parse_spec("saap:probes=4,window=128,weights=" + path.string()));
    if (at == 1) {
      EXPECT_EQ(context.impl().methods[static_cast<std::size_t>(method)].chosen_by, ChosenBy::host);
    }
    context.prefill(story(1500));
    context.build_indexes();
    logits[at] = context.forward(story(37), method, &work[at]);
  }
  fs::remove(path);
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
  EXPECT_NEAR(static_cast<double>(work[1].far_keys + 1) / static_cast<double>(work[0].far_keys + 1), 1.0,
              0.02);
}

// Where a row stands in a list decides the last bits, so it may depend on the position alone.
TEST(Gpu, AnIndexThatGrewWhileAskedGivesTheBitsOfOneThatDidNot) {
  NEEDS_GPU();
  for (const char* const spec : {"saap:probes=4,window=128", "kmeans:clusters=32,probes=6,window=128"}) {
    std::vector<float> logits[2];
    for (const bool asked : {false, true}) {
      Context context = context_on(Device::cuda, DType::f16, 4096);
      const MethodId method = context.attach(parse_spec(spec));
      context.prefill(story(1536));
      context.build_indexes();
      if (asked) {
        context.forward(story(3), method);
        context.roll_back(1536);
      }
      context.prefill(story(1024));
      if (asked) {
        for (const TokenId token : story(4)) context.forward({&token, 1}, method);
        context.roll_back(2560);
      }
      logits[asked] = context.forward(story(1), method);
    }
    EXPECT_EQ(logits[0], logits[1]) << spec;
  }
}

TEST(Gpu, BucketsAreOfTheTextThatTookAnothersPlace) {
  NEEDS_GPU();
  for (const char* const spec : {"saap:probes=4,window=128", "kmeans:clusters=32,probes=6,window=128"}) {
    std::vector<float> logits[2];
    for (const bool before : {false, true}) {
      Context context = context_on(Device::cuda, DType::f16, 4096);
      const MethodId method = context.attach(parse_spec(spec));
      const std::vector<TokenId> all = story(2400);
      if (before) {
        context.prefill(std::span(all).first(1100));
        context.build_indexes();
        context.forward(std::span(all).subspan(1100, 1), method);
        context.roll_back(0);
      }
      context.prefill(std::span(all).subspan(1200, 1000));
      context.build_indexes();
      logits[before] = context.forward(std::span(all).subspan(2200, 3), method);
      EXPECT_NE(context.impl().methods[static_cast<std::size_t>(method)].chosen_by, ChosenBy::host);
    }
    EXPECT_EQ(logits[1], logits[0]) << spec;
  }
}

TEST(Gpu, TheAlarmOfATextIsTheCpus) {
  NEEDS_GPU();
  std::string notices[2], after[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device, DType::f32, 4096);
    const MethodId method = context.attach(parse_spec("saap:alarm=1,window=512"));
    auto ids = story(1100);
    for (std::size_t i = 500; i < ids.size(); ++i) ids[i] = ids[i % 50];  // a text unlike others
    context.prefill(ids);
    context.build_indexes();
    WorkReport work;
    context.forward(story(1), method, &work);
    notices[device == Device::cuda] = work.notice;
    context.roll_back(0);  // and one like others, in its place
    context.prefill(story(1100));
    context.build_indexes();
    context.forward(story(1), method, &work);
    after[device == Device::cuda] = work.notice;
  }
  EXPECT_NE(notices[0], "");
  EXPECT_EQ(notices[0], notices[1]);
  EXPECT_NE(after[0], notices[0]);
  EXPECT_EQ(after[0], after[1]);
}

/// A question of so many tokens and an answer, twice: the same each time.
void expect_the_cpus_answer(const fs::path& path, std::int64_t question) {
  std::vector<TokenId> answers[2];
  std::int64_t far[2] = {};
  for (const Device device : {Device::cpu, Device::cuda}) {
    const int at = device == Device::cuda;
    Context context = Context::load(path, pocket(), {.device = device, .max_tokens = 8192});
    const std::int64_t tokens = context.tokens();
    for (int time = 0; time < 2; ++time) {
      const Generation answer =
          context.generate(story(question), 0, {.max_new_tokens = 16, .stop_at_eos = false});
      if (time > 0) {
        EXPECT_EQ(answer.tokens, answers[at]);
      }
      answers[at] = answer.tokens;
      far[at] = answer.work.far_keys;
      EXPECT_LT(answer.work.selectivity(), 0.9);
      context.roll_back(tokens);
    }
  }
  EXPECT_EQ(answers[0], answers[1]) << question;
  EXPECT_NEAR(static_cast<double>(far[1]) / static_cast<double>(far[0]), 1.0, 0.01) << question;
}

// From a file, so that both have the same clusters: the last bits of keys may move some between two.
// Questions choose together or in stretches, fit a step's lists or do not; the text grows by a part.
TEST(Gpu, SqueezedAnswersAsOnTheCpu) {
  NEEDS_GPU();
  const fs::path path =
      fs::temp_directory_path() / ("lodestone-squeezed-" + std::to_string(getpid()) + ".lode");
  for (const char* const spec :
       {"squeezed:clusters=10%,sparsity=0.8", "squeezed:clusters=10%,sparsity=0.7,block=4",
        "squeezed:clusters=10%,mass=0.9,block=40", "squeezed:clusters=10%,sparsity=0.8,spread=off",
        "squeezed:clusters=10%,sparsity=0.8,spread=question",
        "squeezed:clusters=10%,sparsity=0.8,spread=decode",
        "squeezed:clusters=10%,sparsity=0.8,centroids=f16", "squeezed:levels=auto,clusters=10%,sparsity=0.8",
        "squeezed:clusters=10%,clusters1=3%,levels=2,sparsity=0.8",
        "squeezed:clusters=20%,clusters1=2%,levels=3,sparsity=0.7,spread=off",
        "squeezed:clusters=10%,clusters1=3%,levels=2,mass=0.9,block=40,centroids=f16"}) {
    SCOPED_TRACE(spec);
    Context context = context_on(Device::cpu, DType::f32, 4096);
    context.attach(parse_spec(spec));
    context.prefill(story(1200));
    for (int part = 0; part < 2; ++part) {
      context.build_indexes();
      context.save(path, "");
      expect_the_cpus_answer(path, 20);
      expect_the_cpus_answer(path, 60);
      context.prefill(story(500));
    }
  }
  fs::remove(path);
}

// A store that is not exact, whose questions are looked up as blocks. What is kept is compared cluster by
// cluster in clusters_test.cc; here a cluster at the threshold may fall to either side and moves the logits
// by whatever its keys say, so the median of a spec's questions is close to the CPU's, not each.
TEST(Gpu, SqueezedLooksUpBlocksAsTheCpuDoes) {
  NEEDS_GPU();
  const fs::path path =
      fs::temp_directory_path() / ("lodestone-blocks-" + std::to_string(getpid()) + ".lode");
  for (const char* const spec :
       {"squeezed", "squeezed:clusters=10%,sparsity=0.8", "squeezed:clusters=10%,sparsity=0.8,spread=off",
        "squeezed:clusters=10%,sparsity=0.8,spread=question",
        "squeezed:clusters=10%,sparsity=0.8,spread=decode",
        "squeezed:clusters=10%,sparsity=0.8,centroids=f16"}) {
    SCOPED_TRACE(spec);
    Context written = context_on(Device::cpu, DType::f16, 4096);
    written.attach(parse_spec(spec));
    written.prefill(story(1700));
    written.build_indexes();
    written.save(path, "");
    std::vector<float> differences;
    for (const std::int64_t question : {40, 150, 700}) {
      std::vector<float> logits[2];
      WorkReport work[2];
      for (const Device device : {Device::cpu, Device::cuda}) {
        const int at = device == Device::cuda;
        Context context = Context::load(path, pocket(), {.device = device, .max_tokens = 4096});
        logits[at] = context.forward(story(question), 0, &work[at]);
      }
      differences.push_back(relative_difference(logits[1], logits[0]));
      EXPECT_LT(differences.back(), 0.6f) << question;
      EXPECT_NEAR(static_cast<double>(work[1].far_keys) / static_cast<double>(work[0].far_keys), 1.0, 0.03)
          << question;
      EXPECT_LT(work[1].selectivity(), 0.9);
    }
    std::sort(differences.begin(), differences.end());
    EXPECT_LT(differences[1], 3e-2f);
  }
  fs::remove(path);
}

TEST(Gpu, SelectingEveryKeyGivesTheBitsOfFullAttention) {
  NEEDS_GPU();
  Context context = context_on(Device::cuda, DType::bf16, 2048);
  const MethodId all = context.attach(parse_spec("topk:k=100000,window=128"));
  const MethodId host = context.attach(parse_spec("h2o:heavy_ratio=100%,window=128"));
  context.prefill(story(1500));
  context.build_indexes();
  for (const TokenId token : story(3)) {
    const auto full = context.forward({&token, 1}, kDense);
    context.roll_back(1500);
    EXPECT_EQ(context.forward({&token, 1}, all), full);
    context.roll_back(1500);
    EXPECT_EQ(context.forward({&token, 1}, host), full);
    context.roll_back(1500);
  }
}

TEST(Gpu, AFileWrittenByEitherDeviceIsReadByTheOther) {
  NEEDS_GPU();
  const fs::path path = fs::temp_directory_path() / ("lodestone-gpu-" + std::to_string(getpid()) + ".lode");
  for (const Device writer : {Device::cpu, Device::cuda}) {
    Context context = context_on(writer, DType::f32, 4096);  // exact: the same keys are chosen
    // Without the first layer: see the specs above.
    context.attach(parse_spec("kmeans:clusters=32,probes=6,window=128,dense_layers=1"));
    context.prefill(story(2000));
    context.build_indexes();
    context.save(path, "");
    const auto expected = context.forward(story(20), 0);
    const Device reader = writer == Device::cpu ? Device::cuda : Device::cpu;
    Context read = Context::load(path, pocket(), {.device = reader, .max_tokens = 4096});
    EXPECT_EQ(read.tokens(), 2000);
    EXPECT_LT(relative_difference(read.forward(story(20), 0), expected), 2e-3f);
    fs::remove(path);
  }
}

// Labels come from the file. Behind a cut within the text, other keys stand where those were that it knows.
TEST(Gpu, LabelsOfAFileEndWhereItsTextIsCut) {
  NEEDS_GPU();
  const fs::path path = fs::temp_directory_path() / ("lodestone-gpu-" + std::to_string(getpid()) + ".lode");
  Context written = context_on(Device::cpu, DType::f32, 2048);
  written.attach(parse_spec("kmeans:clusters=32,probes=6,window=64,dense_layers=1"));
  written.prefill(story(1200));
  written.build_indexes();
  written.save(path, "");
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = Context::load(path, pocket(), {.device = device, .max_tokens = 2048});
    const int at = device == Device::cuda;
    const std::vector<TokenId> other = story(700);
    for (const std::int64_t begin : {0, 300}) {
      context.roll_back(begin == 0 ? 1200 : 500);
      WorkReport more;
      const auto rows = context.forward(std::span(other).subspan(static_cast<std::size_t>(begin)), 0, &more);
      logits[at].insert(logits[at].end(), rows.begin(), rows.end());
      work[at] += more;
    }
  }
  fs::remove(path);
  // Of 1,100 tokens a few have two clusters that are as near as each other.
  EXPECT_LT(relative_difference(logits[1], logits[0]), 1e-2f);
  EXPECT_EQ(work[1].far_total, work[0].far_total);
  EXPECT_NEAR(static_cast<double>(work[1].far_keys) / static_cast<double>(work[0].far_keys), 1.0, 1e-3);
}

TEST(Gpu, TooLittleMemoryIsSaidWithNumbersAndLeavesTheProcessUsable) {
  NEEDS_GPU();
  try {
    Context context(pocket(), {.device = Device::cuda, .gpu_memory = 30 << 20, .max_tokens = 100000});
    FAIL() << "expected an error";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("100000 tokens"), std::string::npos) << e.what();
  }
  Context context = context_on(Device::cuda, DType::f16, 1024);
  EXPECT_NO_THROW(context.prefill(story(100)));
}

}  // namespace
}  // namespace lode
