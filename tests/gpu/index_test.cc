// SPDX-License-Identifier: Apache-2.0
// Methods with an index on the GPU that grows with its keys (quest, double-sparsity, pqcache, ivf), keys that
// the host keeps (snapkv), random ones, and plans of all these, against the host's choice. Run on a GPU, and
// where there is none on one that the host plays (tests/gpu_fake).
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "io/container.h"
#include "support/compare.h"
#include "support/gpu.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

Context context_on(Device device, DType type = DType::f32) {
  return Context(pocket(), {.kv_type = type, .device = device, .max_tokens = 2048});
}

struct Asked {
  std::vector<float> logits;
  WorkReport work;
};

/// Of a text of 703 tokens: questions longer than the window and shorter, tokens one at a time past the ends
/// of pages, a cut inside of a page and another text behind it.
Asked ask_in_steps(Context& context, MethodId method) {
  Asked asked;
  const auto ask = [&](std::span<const TokenId> tokens) {
    WorkReport more;
    const auto rows = context.forward(tokens, method, &more);
    asked.logits.insert(asked.logits.end(), rows.begin(), rows.end());
    asked.work += more;
  };
  ask(story(40));
  for (const TokenId token : story(36)) ask({&token, 1});
  context.roll_back(650);
  const std::vector<TokenId> other = story(60);
  ask(std::span(other).subspan(20));
  for (const TokenId token : story(3)) ask({&token, 1});
  return asked;
}
void expect_the_gpu_chose(const Context& context) {
  EXPECT_NE(context.impl().methods[0].chosen_by, ChosenBy::host);
  EXPECT_TRUE(context.impl().gpu->chooses(context.impl().methods[0].selectors));
}
/// What the GPU chooses is what the host does, with its counts.
void expect_same(const Asked& cpu, const Asked& gpu) {
  EXPECT_LT(relative_difference(gpu.logits, cpu.logits), 2e-3f);
  EXPECT_EQ(cpu.work.far_total, gpu.work.far_total);
  EXPECT_EQ(cpu.work.far_keys, gpu.work.far_keys);
  EXPECT_EQ(cpu.work.kv_bytes, gpu.work.kv_bytes);
  EXPECT_EQ(cpu.work.selector_bytes, gpu.work.selector_bytes);
  EXPECT_LT(gpu.work.far_keys, gpu.work.far_total);
}

/// From a file, so that both have the same centroids: the last bits of keys may lead k-means elsewhere.
void expect_same_from_a_file(const Spec& spec) {
  const fs::path path = fs::temp_directory_path() / ("lodestone-index-" + std::to_string(getpid()) + ".lode");
  Context written = context_on(Device::cpu);
  written.attach(spec);
  written.prefill(story(703));
  written.build_indexes();
  written.save(path, "");
  Asked asked[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = Context::load(path, pocket(), {.device = device, .max_tokens = 2048});
    asked[device == Device::cuda] = ask_in_steps(context, 0);
    if (device == Device::cuda) expect_the_gpu_chose(context);
  }
  fs::remove(path);
  expect_same(asked[0], asked[1]);
}

class GpuIndex : public testing::TestWithParam<const char*> {};

TEST_P(GpuIndex, StepsEqualTheHosts) {
  NEEDS_GPU();
  Asked asked[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device);
    const MethodId method = context.attach(parse_spec(GetParam()));
    context.prefill(story(703));
    context.build_indexes();
    asked[device == Device::cuda] = ask_in_steps(context, method);
    if (device == Device::cuda) expect_the_gpu_chose(context);
  }
  expect_same(asked[0], asked[1]);
}

INSTANTIATE_TEST_SUITE_P(Specs, GpuIndex,
                         testing::Values("quest:budget=64,window=16", "quest:budget=10%,sink=7,window=16",
                                         "quest:budget=50,page_size=5,window=64,per=kv-head",
                                         "quest:budget=64,bits=4,window=16,dense_layers=0",
                                         "quest:budget=77,bits=2,window=30,per=kv-head",
                                         "quest:budget=700,sink=16,window=16,bits=4,per=kv-head",
                                         "double-sparsity:budget=64,window=16",
                                         "double-sparsity:budget=64,window=16,dense_layers=2",
                                         "double-sparsity:budget=10%,window=64,bits=2,per=kv-head",
                                         "double-sparsity:budget=60,sink=3,window=30,bits=16,channels=24",
                                         "random:window=16", "random:fraction=99,sink=7,window=30"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

class GpuIndexFromAFile : public testing::TestWithParam<const char*> {};

TEST_P(GpuIndexFromAFile, StepsEqualTheHosts) {
  NEEDS_GPU();
  expect_same_from_a_file(parse_spec(GetParam()));
}

// The texts are cut behind the keys that snapkv chose, or among them.
INSTANTIATE_TEST_SUITE_P(Specs, GpuIndexFromAFile,
                         testing::Values("pqcache:window=16", "pqcache:budget=64,window=16,per=query-head",
                                         "pqcache:budget=10%,sink=7,window=64,m=8,bits=4",
                                         "pqcache:budget=50,window=30,m=1,bits=3,per=query-head",
                                         "pqcache:budget=64,window=16,m=4,bits=8,dense_layers=2",
                                         "pqcache:budget=99,window=16,m=64,bits=2",
                                         "ivf:window=16,nprobe=3,k=40",
                                         "ivf:k=5%,nprobe=2,nlist=40,window=64",
                                         "ivf:k=1000,nprobe=1,nlist=7,sink=7,window=30,dense_layers=2",
                                         "ivf:k=20,nprobe=1000,window=16",
                                         "snapkv:max_capacity_prompt=100,window=16",
                                         "snapkv:max_capacity_prompt=80,window_size=16,window=16,sink=7",
                                         "snapkv:max_capacity_prompt=20%,window=30,per=kv-head",
                                         "snapkv:max_capacity_prompt=90,window_size=8,window=20,"
                                         "per=kv-head,dense_layers=2"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

TEST(GpuIvf, ListsAreThoseOfTheTextThatWasIndexedLast) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device);
    // From the second layer on: in the first the keys of one token are alike, and may lie between two lists.
    const MethodId method = context.attach(parse_spec("ivf:k=30,nprobe=4,window=16,dense_layers=1"));
    for (int part = 0; part < 2; ++part) {
      context.prefill(story(400));
      if (part > 0) context.build_indexes();  // before, all keys lie in one list
      for (const TokenId token : story(2)) {
        const auto row = context.forward({&token, 1}, method);
        logits[device == Device::cuda].insert(logits[device == Device::cuda].end(), row.begin(), row.end());
      }
    }
    if (device == Device::cuda) expect_the_gpu_chose(context);
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
}

// Keys are kept when a text is indexed, again and again; until then all are attended.
TEST(GpuSnapKv, KeepsTheKeysOfTheTextThatWasIndexedLast) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const int at = device == Device::cuda;
    Context context = context_on(device);
    const MethodId method =
        context.attach(parse_spec("snapkv:max_capacity_prompt=64,window_size=16,window=16,dense_layers=0"));
    const auto ask = [&] {
      const std::vector<TokenId> question = story(30);
      for (std::size_t i = 0; i < 3; ++i) {
        const auto row = context.forward(std::span(question).subspan(i * 10, i == 2 ? 1 : 10), method);
        logits[at].insert(logits[at].end(), row.begin(), row.end());
      }
    };
    context.prefill(story(300));
    context.build_indexes();
    ask();
    context.roll_back(200);  // among the keys that are kept
    ask();
    context.prefill(story(250));
    context.build_indexes();
    ask();
    if (at == 1) expect_the_gpu_chose(context);
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
}

// Nothing of a text is left where another takes its place from the first token on.
TEST(GpuIndexes, AreOfTheTextThatTookAnothersPlace) {
  NEEDS_GPU();
  const std::vector<TokenId> all = story(600);
  for (const char* spec :
       {"ivf:k=30,nprobe=4,window=16,dense_layers=1", "pqcache:budget=40,window=16,dense_layers=1",
        "double-sparsity:budget=40,window=16,dense_layers=1",
        "quest:budget=48,bits=4,window=16,dense_layers=1",
        "snapkv:max_capacity_prompt=64,window_size=16,window=16,dense_layers=0"}) {
    std::vector<float> logits[2];
    for (const bool before : {false, true}) {
      Context context = context_on(Device::cuda);
      const MethodId method = context.attach(parse_spec(spec));
      if (before) {
        context.prefill(std::span(all).first(300));
        context.build_indexes();
        context.forward(std::span(all).subspan(300, 1), method);
        context.roll_back(0);
      }
      context.prefill(std::span(all).subspan(320, 240));
      context.build_indexes();
      logits[before] = context.forward(std::span(all).subspan(560, 3), method);
      expect_the_gpu_chose(context);
    }
    EXPECT_EQ(logits[1], logits[0]) << spec;
  }
}

/// The files of a method's indexes in all layers.
std::string saved_indexes(Context& context, MethodId method) {
  const fs::path path = fs::temp_directory_path() / ("lodestone-saved-" + std::to_string(getpid()));
  ContainerWriter out(path);
  const auto& selectors = context.impl().methods[static_cast<std::size_t>(method)].selectors;
  for (std::size_t layer = 0; layer < selectors.size(); ++layer) {
    if (selectors[layer] == nullptr) continue;
    SectionWriter sections(out, "x" + std::to_string(layer) + "/");
    selectors[layer]->save(0, sections);
  }
  out.finish();
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  fs::remove(path);
  return bytes;
}

// Alone it hears of some queries, beside a method that listens to keys of whole writes; its index is the same.
TEST(GpuRetrieval, HearsSomeQueriesAndNoKeysOfThePrefill) {
  NEEDS_GPU();
  std::string indexes[2];
  for (const bool alone : {true, false}) {
    Context context = context_on(Device::cuda);
    const MethodId method = context.attach(parse_spec("retrieval:k=10,window=16"));
    if (!alone) context.attach(parse_spec("double-sparsity:budget=64,window=16"));
    const std::vector<TokenId> text = story(1500);
    context.prefill(std::span(text).first(1300));
    context.prefill(std::span(text).subspan(1300));
    EXPECT_EQ(context.impl().kv.tokens(), alone ? 0 : 1500);
    context.build_indexes();
    indexes[alone ? 1 : 0] = saved_indexes(context, method);
    EXPECT_FALSE(context.forward(story(3), method).empty());
  }
  EXPECT_EQ(indexes[0], indexes[1]);
}

// Fewer keys than codes; what comes later is coded by the same centroids.
TEST(GpuPqCache, CentroidsOfAShortTextStay) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device);
    const MethodId method = context.attach(parse_spec("pqcache:budget=40,window=16,dense_layers=0"));
    context.prefill(story(20));
    context.build_indexes();
    context.prefill(story(500));
    context.build_indexes();
    logits[device == Device::cuda] = context.forward(story(30), method);
    if (device == Device::cuda) expect_the_gpu_chose(context);
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
}

// Layers of one method and of several, for query heads and for KV heads, `full` among them; a method may
// serve other heads in other layers, and each head its own centroids.
TEST(GpuPlan, StepsEqualTheHosts) {
  NEEDS_GPU();
  const std::string pq = "pqcache:budget=64,m=8,bits=4", quest = "quest:budget=50,bits=4,per=kv-head",
                    labels = "double-sparsity:budget=10%,bits=2";
  const PlanFile plan({.sink = 5, .window = 24}, {{"full", "full"},
                                                  {"full", pq},
                                                  {pq, "quest:budget=40"},
                                                  {quest, quest},
                                                  {"snapkv:window_size=20,max_capacity_prompt=70", labels},
                                                  {"random:fraction=50", pq}});
  expect_same_from_a_file(plan.spec());
}

TEST(GpuPlan, DenseLayersStayDense) {
  NEEDS_GPU();
  const std::string lists = "ivf:k=40,nprobe=3", pq = "pqcache:budget=64,per=query-head",
                    quest = "quest:budget=50,per=kv-head";
  const PlanFile plan({.sink = 1, .window = 16}, {{pq, quest},
                                                  {pq, quest},
                                                  {quest, lists},
                                                  {lists, "full"},
                                                  {"streaming", pq},
                                                  {"random", "snapkv:max_capacity_prompt=80,per=kv-head"}});
  expect_same_from_a_file(plan.spec(",dense_layers=2"));
}

/// A method that chooses every key, over a text of 900 tokens.
void expect_the_bits_of_full(Context& context, MethodId all) {
  context.prefill(story(900));
  context.build_indexes();
  const TokenId token = story(10).back();
  const auto full = context.forward({&token, 1}, kDense);
  context.roll_back(900);
  EXPECT_EQ(context.forward({&token, 1}, all), full);
}

TEST(GpuPlan, HeadsOfFullAttentionGiveItsBits) {
  NEEDS_GPU();
  const PlanFile plan({.sink = 3, .window = 40},
                      std::vector<std::vector<std::string>>(6, {"full", "quest:budget=100%,per=kv-head"}));
  Context context = context_on(Device::cuda, DType::bf16);
  const MethodId all = context.attach(plan.spec());
  expect_the_bits_of_full(context, all);
  expect_the_gpu_chose(context);
}

// One method that the host chooses leaves the plan to it.
TEST(GpuPlan, AMemberOfTheHostLeavesThePlanToIt) {
  NEEDS_GPU();
  const PlanFile plan({.sink = 1, .window = 64},
                      std::vector<std::vector<std::string>>(6, {"quest:budget=64", "h2o"}));
  std::vector<float> logits[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context = context_on(device);
    const MethodId method = context.attach(plan.spec());
    context.prefill(story(500));
    context.build_indexes();
    logits[device == Device::cuda] = context.forward(story(30), method);
    if (device == Device::cuda) {
      EXPECT_EQ(context.impl().methods[0].chosen_by, ChosenBy::host);
    }
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
}

TEST(GpuQuest, ABudgetOfAllGivesTheBitsOfFullAttention) {
  NEEDS_GPU();
  Context context = context_on(Device::cuda, DType::bf16);
  const MethodId all = context.attach(parse_spec("quest:budget=100%,window=64,dense_layers=0"));
  expect_the_bits_of_full(context, all);
}

// Levels come from the text that was indexed last, or from the file.
TEST(GpuQuest, CodedBoundsFollowTheText) {
  NEEDS_GPU();
  const fs::path path = fs::temp_directory_path() / ("lodestone-quest-" + std::to_string(getpid()) + ".lode");
  std::vector<float> logits[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const int at = device == Device::cuda;
    const auto ask = [&](Context& context) {
      const auto rows = context.forward(story(30), 0);
      logits[at].insert(logits[at].end(), rows.begin(), rows.end());
      context.roll_back(context.tokens() - 30);
    };
    Context context = context_on(device);
    context.attach(parse_spec("quest:budget=64,bits=2,window=16,dense_layers=0"));
    context.prefill(story(400));
    context.build_indexes();
    ask(context);
    context.prefill(story(500));
    context.build_indexes();
    ask(context);
    context.save(path, "");
    Context loaded = Context::load(path, pocket(), {.device = device, .max_tokens = 2048});
    ask(loaded);
  }
  fs::remove(path);
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
}

}  // namespace
}  // namespace lode
