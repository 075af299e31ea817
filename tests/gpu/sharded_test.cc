// SPDX-License-Identifier: Apache-2.0
// GPUs that share a model by its KV heads against one GPU that has all of it. On a host with one GPU that one takes
// both parts; where there is none, the host plays them (tests/gpu_fake).
#include "gpu/sharded.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/threads.h"
#include "lodestone/error.h"
#include "support/compare.h"
#include "support/everything.h"
#include "support/family_golden.h"
#include "support/gpu.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

/// A model of its own: one that is in use is shared as it is.
std::shared_ptr<const Model> fresh_pocket() {
  return Model::load(source_dir().string() + "/models/pocket");
}

/// So many GPUs of the host, or some of them several times.
std::vector<int> gpus(int count) {
  std::vector<int> some;
  for (int i = 0; i < count; ++i) some.push_back(i % cuda::device_count());
  return some;
}
std::vector<int> two_gpus() {
  return gpus(2);
}

struct Kind {
  std::vector<int> gpus;
  DType type = DType::f32;
  GpuSum sum = GpuSum::automatic;
  int ranges = 1;
  std::int64_t max_tokens = 2048;
};

Context context_on(const Kind& kind) {
  return Context(fresh_pocket(), {.kv_type = kind.type,
                                  .device = Device::cuda,
                                  .gpus = kind.gpus,
                                  .context_parallel = kind.ranges,
                                  .gpu_sum = kind.sum,
                                  .max_tokens = kind.max_tokens});
}

/// A text in chunks, some tokens together and some alone.
std::vector<float> logits_of(Context& context, MethodId method = kDense) {
  std::vector<float> all = context.forward(story(37), method);
  for (const TokenId token : story(6)) {
    const auto row = context.forward({&token, 1}, method);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}
std::vector<float> logits_on(const Kind& kind) {
  Context context = context_on(kind);
  context.prefill(story(900));
  return logits_of(context);
}

TEST(GpusThatShareAModel, GiveTheLogitsOfOne) {
  NEEDS_GPU();
  const std::vector<float> one = logits_on({}), two = logits_on({two_gpus()});
  EXPECT_LT(relative_difference(two, one), 1e-4f);
  EXPECT_EQ(logits_on({two_gpus()}), two);  // whenever the GPUs come
}

TEST(GpusThatShareAModel, OfSixteenBitTypesToo) {
  NEEDS_GPU();
  for (const DType type : {DType::f16, DType::bf16})
    EXPECT_LT(relative_difference(logits_on({two_gpus(), type}), logits_on({{}, type})), 3e-2f)
        << name_of(type);
}

TEST(GpusThatShareAModel, GiveTheGreedyTokensOfOne) {
  NEEDS_GPU();
  std::vector<TokenId> tokens[2];
  for (const bool two : {false, true}) {
    Context context = context_on({two ? two_gpus() : std::vector<int>{}});
    context.prefill(story(700));
    tokens[two] = context.generate(story(701), kDense, {.max_new_tokens = 256, .stop_at_eos = false}).tokens;
  }
  EXPECT_EQ(tokens[0].size(), 256u);
  EXPECT_EQ(tokens[1], tokens[0]);
}

TEST(GpusThatShareAModel, SumByEachWayThatTheyHave) {
  NEEDS_GPU();
  const std::vector<float> one = logits_on({});
  for (const GpuSum sum : {GpuSum::peers, GpuSum::nccl}) {
    try {
      EXPECT_LT(relative_difference(logits_on({two_gpus(), DType::f32, sum}), one), 1e-4f)
          << static_cast<int>(sum);
    } catch (const RunError& error) {  // no NCCL, or the same GPU twice
      EXPECT_EQ(sum, GpuSum::nccl) << error.what();
    }
  }
}

TEST(GpusThatShareAModel, SaveAndReadTheFilesOfOne) {
  NEEDS_GPU();
  const fs::path path =
      fs::temp_directory_path() / ("lodestone-sharded-" + std::to_string(getpid()) + ".lode");
  Context two = context_on({two_gpus()});
  two.prefill(story(700));
  two.build_indexes();
  two.save(path, "");
  const std::vector<float> want = logits_of(two);
  Context one = Context::load(path, fresh_pocket(), {.device = Device::cuda, .max_tokens = 2048});
  Context again =
      Context::load(path, fresh_pocket(), {.device = Device::cuda, .gpus = two_gpus(), .max_tokens = 2048});
  fs::remove(path);
  EXPECT_LT(relative_difference(logits_of(one), want), 1e-4f);
  EXPECT_EQ(logits_of(again), want);
}

TEST(GpusThatShareAModel, RollBackAndGoOn) {
  NEEDS_GPU();
  Context context = context_on({two_gpus()});
  context.prefill(story(300));
  const std::vector<float> before = logits_of(context);
  context.roll_back(300);
  EXPECT_EQ(logits_of(context), before);
}

// ---- Ranges of a text.

/// By ranges alone, or by heads, too.
class GpusThatShareAText : public testing::TestWithParam<std::pair<int, int>> {
 protected:
  Kind shared(DType type = DType::f32) const {
    const auto [ranges, heads] = GetParam();
    // Two ranks of one GPU have no NCCL; and of two pairs of GPUs there may be one.
    return {gpus(ranges * heads), type, GpuSum::peers, ranges, 1250};
  }
};

// A text of 900 tokens is read across cuts, and its question lies in the last range.
TEST_P(GpusThatShareAText, GiveTheLogitsOfOne) {
  NEEDS_GPU();
  const std::vector<float> one = logits_on({}), several = logits_on(shared());
  EXPECT_LT(relative_difference(several, one), 1e-4f);
  EXPECT_EQ(logits_on(shared()), several);  // whenever the GPUs come
  EXPECT_LT(relative_difference(logits_on(shared(DType::bf16)), logits_on({{}, DType::bf16})), 3e-2f);
}

TEST_P(GpusThatShareAText, GiveTheGreedyTokensOfOne) {
  NEEDS_GPU();
  std::vector<TokenId> tokens[2];
  for (const bool several : {false, true}) {
    Context context = context_on(several ? shared() : Kind{});
    context.prefill(story(700));
    tokens[several] =
        context.generate(story(51), kDense, {.max_new_tokens = 64, .stop_at_eos = false}).tokens;
  }
  EXPECT_EQ(tokens[0].size(), 64u);
  EXPECT_EQ(tokens[1], tokens[0]);
}

TEST_P(GpusThatShareAText, SaveAndReadTheFilesOfOne) {
  NEEDS_GPU();
  const fs::path path =
      fs::temp_directory_path() / ("lodestone-ranges-" + std::to_string(getpid()) + ".lode");
  const Kind kind = shared();
  Context several = context_on(kind);
  several.prefill(story(900));
  several.build_indexes();
  several.save(path, "");
  const std::vector<float> want = logits_of(several);
  ContextOptions options = {.device = Device::cuda, .max_tokens = 2048};
  Context one = Context::load(path, fresh_pocket(), options);
  options.gpus = kind.gpus, options.context_parallel = kind.ranges, options.gpu_sum = kind.sum;
  Context again = Context::load(path, fresh_pocket(), options);  // cut by its own length
  fs::remove(path);
  EXPECT_LT(relative_difference(logits_of(one), want), 1e-4f);
  EXPECT_LT(relative_difference(logits_of(again), want), 1e-4f);
}

TEST_P(GpusThatShareAText, RollBackAndGoOnAndTakeAnotherText) {
  NEEDS_GPU();
  Context context = context_on(shared());
  context.prefill(story(900));
  const std::vector<float> before = logits_of(context);
  context.roll_back(900);
  EXPECT_EQ(logits_of(context), before);
  context.roll_back(300);  // in the first range
  context.prefill(story(100));
  context.roll_back(0);
  context.prefill(story(900));
  EXPECT_EQ(logits_of(context), before);
}

/// Whether the GPU chooses a method's keys: where the host plays it, it does not for all.
bool gpu_chooses(const char* spec) {
  Context alone = context_on({{}});
  alone.attach(parse_spec(spec));
  return alone.impl().methods[0].chosen_by != ChosenBy::host;
}

TEST_P(GpusThatShareAText, ChooseWhatOneDoes) {
  NEEDS_GPU();
  for (const char* const spec :
       {"streaming:window=128", "hash:budget=5%,window=128", "hash:budget=40,per=query-head,window=64,sink=7",
        "hyperplanes:budget=10%,mode=combined,depth=3,bits=128,window=128"}) {
    if (!gpu_chooses(spec)) continue;
    std::vector<float> logits[2];
    WorkReport work[2];
    for (const bool several : {false, true}) {
      Context context = context_on(several ? shared() : Kind{});
      const MethodId method = context.attach(parse_spec(spec));
      context.prefill(story(1100));
      context.build_indexes();
      logits[several] = context.forward(story(9), method);
      for (const TokenId token : story(20)) {
        WorkReport more;
        const auto row = context.forward({&token, 1}, method, &more);
        logits[several].insert(logits[several].end(), row.begin(), row.end());
        work[several] += more;
      }
    }
    EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f) << spec;
    EXPECT_EQ(work[1].far_keys, work[0].far_keys) << spec;
    EXPECT_EQ(work[1].far_total, work[0].far_total) << spec;
    EXPECT_EQ(work[1].kv_bytes, work[0].kv_bytes) << spec;
    EXPECT_EQ(work[1].full_bytes, work[0].full_bytes) << spec;
    EXPECT_EQ(work[1].sparse_tokens, work[0].sparse_tokens) << spec;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, GpusThatShareAText,
                         testing::Values(std::pair(2, 1), std::pair(3, 1), std::pair(2, 2)),
                         [](const auto& info) {
                           return "r" + std::to_string(info.param.first) + "h" +
                                  std::to_string(info.param.second);
                         });

TEST(RangesOfAText, RefuseWhatTheyDoNotDo) {
  NEEDS_GPU();
  const auto model = [](std::vector<int> gpus, int ranges) {
    return make_gpu_model(pocket()->config(), pocket()->impl().weights, 0,
                          {.devices = std::move(gpus), .ranges = ranges});
  };
  EXPECT_THROW(model({0, 0, 0}, 2), InputError);
  const FamilyModel windows(kFamilies / "mistral-window");
  EXPECT_THROW(make_gpu_model(windows.config, windows.weights, 0, {.devices = two_gpus(), .ranges = 2}),
               InputError);
  ModelConfig odd = pocket()->config();
  odd.head_dim = 62;
  EXPECT_THROW(make_gpu_model(odd, pocket()->impl().weights, 0, {.devices = two_gpus(), .ranges = 2}),
               InputError);
  Context context = context_on({two_gpus(), DType::f32, GpuSum::automatic, 2, 1250});
  EXPECT_THROW(context.attach(parse_spec("kmeans:clusters=32,probes=6,window=128")), InputError);
  const MethodId method = context.attach(parse_spec("streaming:window=128"));
  context.prefill(story(700));  // the last range begins at 512 and holds the window from 639 tokens on
  context.build_indexes();
  EXPECT_NO_THROW(context.forward(story(3), method));
  context.roll_back(600);
  EXPECT_THROW(context.forward(story(3), method), InputError);
  EXPECT_EQ(context.tokens(), 600);
}

TEST(TextRange, RangesHoldEveryTokenOnce) {
  for (const std::int64_t tokens : {0, 1, 127, 128, 129, 1000, 4096, 130000}) {
    for (const int size : {1, 2, 3, 8}) {
      std::int64_t at = 0, rows = 0;
      for (int rank = 0; rank < size; ++rank) {
        const TextRange range = text_range(tokens, rank, size);
        EXPECT_EQ(range.begin, at);
        EXPECT_EQ(range.begin % cuda::kBlockTokens, 0);
        at = range.end;
        rows += range.count(tokens);
      }
      EXPECT_EQ(at, TextRange::kNoEnd);
      EXPECT_EQ(rows, tokens);
    }
  }
}

/// Each GPU chooses for its own heads what one chooses for all.
class MethodOfSeveralGpus : public testing::TestWithParam<const char*> {};

TEST_P(MethodOfSeveralGpus, ChoosesWhatItDoesOnOne) {
  NEEDS_GPU();
  std::vector<float> logits[2];
  WorkReport work[2];
  for (const bool two : {false, true}) {
    Context context = context_on({{}});
    const MethodId alone = context.attach(parse_spec(GetParam()));
    if (context.impl().methods[0].chosen_by == ChosenBy::host) GTEST_SKIP() << "the host chooses here";
    Context sharing = context_on({two ? two_gpus() : std::vector<int>{}});
    const MethodId method = sharing.attach(parse_spec(GetParam()));
    ASSERT_EQ(method, alone);
    sharing.prefill(story(1200));
    sharing.build_indexes();
    for (const TokenId token : story(20)) {
      WorkReport more;
      const auto row = sharing.forward({&token, 1}, method, &more);
      logits[two].insert(logits[two].end(), row.begin(), row.end());
      work[two] += more;
    }
  }
  EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f);
  EXPECT_EQ(work[1].far_total, work[0].far_total);
  EXPECT_EQ(work[1].full_bytes, work[0].full_bytes);
  EXPECT_EQ(work[1].sparse_tokens, work[0].sparse_tokens);
  EXPECT_NEAR(static_cast<double>(work[1].far_keys), static_cast<double>(work[0].far_keys),
              0.01 * static_cast<double>(work[0].far_keys));
  EXPECT_LT(work[1].far_keys, work[1].far_total);
}

INSTANTIATE_TEST_SUITE_P(
    Methods, MethodOfSeveralGpus,
    testing::Values("streaming:window=128", "topk:k=40,window=128", "topk:k=40,window=128,per=kv-head",
                    "kmeans:clusters=32,probes=6,window=128,dense_layers=1", "saap:probes=4,window=128",
                    "hash:budget=5%", "hash:budget=5%,per=query-head,window=16",
                    "hyperplanes:budget=10%,mode=combined,depth=3,bits=128,window=128", "squeezed"),
    [](const auto& info) { return "spec" + std::to_string(info.index); });

TEST(GpusThatShareAModel, RefuseWhatTheyDoNotDo) {
  NEEDS_GPU();
  const auto model = [](std::vector<int> gpus) {
    return make_gpu_model(pocket()->config(), pocket()->impl().weights, 0, {.devices = std::move(gpus)});
  };
  EXPECT_THROW(model({0, 0, 0}), InputError);  // 2 KV heads
  EXPECT_THROW(model({0, 99}), InputError);
  EXPECT_THROW(Context(fresh_pocket(), {.device = Device::cuda, .kv_tier = KvTier::host, .gpus = two_gpus()}),
               InputError);
  Context context = context_on({two_gpus()});
  EXPECT_THROW(context.attach(parse_spec("random:k=10,window=16")), InputError);
  EXPECT_THROW(context.attach(parse_spec("h2o")), InputError);
  context.prefill(story(40));
  EXPECT_EQ(context.tokens(), 40);
}

// One GPU fails before the others wait for it, or the whole step is refused: the context stays as it was.
TEST(GpusThatShareAModel, GoOnAfterAStepThatFailed) {
  NEEDS_GPU();
  Context context = context_on({two_gpus()});
  context.prefill(story(100));
  const TokenId none = 1 << 20;
  EXPECT_THROW(context.forward({&none, 1}, kDense), InputError);
  EXPECT_EQ(context.tokens(), 100);
  const std::vector<float> found = logits_of(context);
  Context other = context_on({two_gpus()});
  other.prefill(story(100));
  EXPECT_EQ(logits_of(other), found);
}

/// Families with biases, norms by head and behind the layer, windows, multipliers.
class FamilyOfSeveralGpus : public testing::TestWithParam<std::string> {};

TEST_P(FamilyOfSeveralGpus, EqualsTransformers) {
  NEEDS_GPU();
  const FamilyTokens golden(GetParam());
  const FamilyModel model(kFamilies / GetParam());
  const int kv_heads = model.config.kv_heads;
  if (kv_heads % 2 != 0) GTEST_SKIP() << kv_heads << " KV heads";
  const auto tokens = std::ssize(golden.ids);
  const auto weights = make_gpu_model(model.config, model.weights, 0, {.devices = two_gpus()});
  const Rope rope(model.config, tokens);
  ThreadPool pool(2);
  for (const std::size_t chunk : {golden.ids.size(), std::size_t{11}, std::size_t{1}}) {
    KvStore kv({.layers = model.config.layers,
                .kv_heads = kv_heads,
                .head_dim = model.config.head_dim,
                .type = DType::f32,
                .max_tokens = tokens});
    const auto gpus = make_gpu_context(
        model.config, weights, {.pool = &pool, .kv_type = DType::f32, .max_tokens = tokens, .chunk = tokens});
    std::vector<float> all, logits;
    for (std::size_t at = 0; at < golden.ids.size(); at += chunk) {
      const SequenceTokens part = {std::span(golden.ids).subspan(at, std::min(chunk, golden.ids.size() - at)),
                                   &kv, 0};
      gpus->forward({.sequences = {&part, 1}, .phase = Phase::context}, rope, LogitRows::all, logits);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    EXPECT_LT(relative_difference(all, golden.logits), 2e-4f) << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FamilyOfSeveralGpus,
                         testing::Values("llama", "mistral-window", "ministral3", "qwen2", "qwen2-window",
                                         "qwen3", "gemma3", "phi3", "smollm3", "granite", "glm4"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

/// Keeps what it hears.
class Recorder : public Everything {
 public:
  using Everything::Everything;
  void on_write(const KvWrite& write) override {
    for (const std::span<const float> part :
         {write.q_unrotated, write.k_unrotated, write.q, write.k, write.v})
      heard.insert(heard.end(), part.begin(), part.end());
    tokens += write.tokens;
  }
  std::vector<float> heard;
  std::int64_t tokens = 0;
};

// A method that learns while a text is read hears of all heads, in the order in which one GPU has them; and the host's
// store gets them.
TEST(GpusThatShareAModel, TellListenersOfAllHeads) {
  NEEDS_GPU();
  constexpr std::int64_t kTokens = 30, kChunk = 16;
  const Model::Impl& m = pocket()->impl();
  const std::vector<TokenId> tokens = story(kTokens);
  const Rope rope(m.config, kTokens);
  std::vector<float> heard[2], stored[2];
  for (const bool two : {false, true}) {
    const auto weights =
        make_gpu_model(m.config, m.weights, 0, {.devices = two ? two_gpus() : std::vector<int>{}});
    const auto gpu =
        make_gpu_context(m.config, weights, {.kv_type = DType::f32, .max_tokens = kTokens, .chunk = kChunk});
    KvStore kv({m.config.layers, m.config.kv_heads, m.config.head_dim, DType::f32, kTokens});
    Recorder recorder({.query_heads = m.config.query_heads, .kv_heads = m.config.kv_heads, .head_dim = 64});
    std::vector<std::vector<Selector*>> listeners(static_cast<std::size_t>(m.config.layers));
    listeners[1] = listeners[4] = {&recorder};
    const SequenceTokens all = {tokens, &kv, 0};
    std::vector<float> logits;
    gpu->forward({.sequences = {&all, 1}, .phase = Phase::context, .listeners = listeners}, rope,
                 LogitRows::none, logits);
    EXPECT_EQ(recorder.tokens, 2 * kTokens);
    EXPECT_EQ(kv.tokens(), kTokens);
    EXPECT_EQ(gpu->tokens(), kTokens);
    heard[two] = recorder.heard;
    for (int head = 0; head < m.config.kv_heads; ++head) {
      const auto* const rows = reinterpret_cast<const float*>(kv.rows(3, head, KvStore::Part::k).data());
      stored[two].insert(stored[two].end(), rows, rows + kTokens * m.config.head_dim);
    }
  }
  EXPECT_EQ(std::ssize(heard[0]), 2 * kTokens * (2 * m.config.query_heads + 3 * m.config.kv_heads) * 64);
  EXPECT_LT(relative_difference(heard[1], heard[0]), 1e-4f);
  EXPECT_LT(relative_difference(stored[1], stored[0]), 1e-4f);
}

// ---- What each GPU has.

TEST(ModelShare, RowsAndColumnsAreCutOnce) {
  const Model::Impl& m = pocket()->impl();
  const ModelConfig part = share_of(m.config, 2);
  EXPECT_EQ(part.query_heads, 4);
  EXPECT_EQ(part.kv_heads, 1);
  EXPECT_EQ(part.intermediate, 416);
  EXPECT_EQ(part.vocab, m.config.vocab);
  const ModelWeights second = share_of(m.weights, m.config, {1, 2});
  const LayerWeights &whole = m.weights.layers[3], &own = second.layers[3];
  const std::int64_t d = m.config.head_dim, bytes = bytes_of(whole.q.type, 1);
  EXPECT_EQ(own.q.rows, 4 * d);
  EXPECT_EQ(own.q.data, whole.q.data + 4 * d * whole.q.cols * bytes);
  EXPECT_EQ(own.k.rows, d);
  EXPECT_EQ(own.k.data, whole.k.data + d * whole.k.cols * bytes);
  EXPECT_EQ(own.o.rows, whole.o.rows);
  EXPECT_EQ(own.o.cols, 4 * d);
  EXPECT_EQ(own.o.data, whole.o.data + 4 * d * bytes);
  EXPECT_EQ(own.down.cols, 416);
  EXPECT_EQ(own.down.data, whole.down.data + 416 * bytes);
}

TEST(ModelShare, OutputRowsCoverTheVocabularyOnce) {
  for (const std::int64_t vocab : {256, 4096, 49152, 128256, 151669}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      std::int64_t at = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const OutputRows rows = output_rows(vocab, {rank, ranks});
        EXPECT_EQ(rows.first, at);
        EXPECT_GT(rows.end, rows.first);
        EXPECT_EQ(rows.first % 32, 0);
        at = rows.end;
      }
      EXPECT_EQ(at, vocab);
    }
  }
}

TEST(ModelShare, BlocksOfQuantisedColumnsStayWhole) {
  const ModelConfig config = named_shape("L2q8kv4d64");
  EXPECT_NO_THROW(expect_shares(config, ModelWeights::shapes(config, WeightType::q8_0), 2));
  ModelWeights weights = ModelWeights::shapes(config, WeightType::q4_k);
  for (LayerWeights& layer : weights.layers)
    layer.o.cols = 256;  // one block: of two GPUs each would have half
  EXPECT_THROW(expect_shares(config, weights, 2), InputError);
  EXPECT_THROW(expect_shares(config, ModelWeights::shapes(config, WeightType::bf16), 3), InputError);
}

TEST(RankThreads, ThrowWhatTheRankThatFailedThrew) {
  NEEDS_GPU();
  const std::vector<int> devices(4, 0);
  RankThreads threads(devices);
  std::vector<int> met(4);
  const auto body = [&](int failing) {
    return [&threads, &met, failing](int rank) {
      if (rank == failing) throw InputError("rank " + std::to_string(rank));
      threads.meet();
      ++met[static_cast<std::size_t>(rank)];
    };
  };
  for (int failing = 0; failing < 4; ++failing) {
    try {
      threads.run(body(failing));
      FAIL();
    } catch (const InputError& error) {
      EXPECT_EQ(error.what(), "rank " + std::to_string(failing));
    }
  }
  EXPECT_EQ(met, (std::vector<int>{0, 0, 0, 0}));
  threads.run(body(-1));
  EXPECT_EQ(met, (std::vector<int>{1, 1, 1, 1}));
}

}  // namespace
}  // namespace lode
