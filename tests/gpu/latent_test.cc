// SPDX-License-Identifier: Apache-2.0
// Latent rows of the published size on a GPU: the CPU's logits, methods over them, their files, and questions asked
// together. Run on a GPU, and where there is none on one that the host plays (tests/gpu_fake).
#include <gtest/gtest.h>

#include <algorithm>

#include "kv/placement.h"
#include "lodestone/error.h"
#include "support/asked_together.h"
#include "support/compare.h"
#include "support/gpu.h"
#include "support/latent_model.h"
#include "support/refusal.h"

namespace lode {
namespace {

class GpuLatent : public testing::Test {
 protected:
  void SetUp() override {
    NEEDS_GPU();
    for (TokenId i = 0; i < 600; ++i) ids_.push_back((i * i + 5 * i + i / 9) % 64);
  }
  std::span<const TokenId> ids(std::size_t begin, std::size_t count) const {
    return std::span(ids_).subspan(begin, count);
  }
  Context context(Device device, DType type = DType::f32, KvTier tier = KvTier::automatic) const {
    return Context(model_,
                   {.kv_type = type, .device = device, .kv_tier = tier, .max_tokens = 700, .chunk = 64});
  }
  /// A question of several tokens, then one token at a time.
  std::vector<float> ask(Context& c, MethodId method, std::size_t at, WorkReport* work = nullptr) const {
    std::vector<float> all = c.forward(ids(at, 9), method, work);
    for (std::size_t i = 0; i < 6; ++i) {
      const std::vector<float> one = c.forward(ids(at + 9 + i, 1), method);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  std::ptrdiff_t near_rows(std::span<const float> found, std::span<const float> want) const {
    const auto vocab = static_cast<std::size_t>(model_->config().vocab);
    std::ptrdiff_t near = 0;
    for (std::size_t at = 0; at < want.size(); at += vocab)
      near += relative_difference(found.subspan(at, vocab), want.subspan(at, vocab)) < 2e-3f ? 1 : 0;
    return near;
  }
  const test::LatentFolder folder_;
  std::shared_ptr<const Model> model_ = folder_.load();
  std::vector<TokenId> ids_;
};

TEST_F(GpuLatent, LogitsAreTheCpusWhereverRowsLie) {
  Context cpu = context(Device::cpu);
  cpu.prefill(ids(0, 160));
  const std::vector<float> want = ask(cpu, kDense, 160);
  for (const KvTier tier : {KvTier::gpu, KvTier::host}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::q8, DType::q4}) {
      if (!lies_on_gpu(type) && tier == KvTier::gpu) continue;
      SCOPED_TRACE(testing::Message() << name_of(type) << (tier == KvTier::gpu ? "" : ", on the host"));
      Context gpu = context(Device::cuda, type, tier);
      gpu.prefill(ids(0, 100));
      gpu.prefill(ids(100, 55));
      gpu.prefill(ids(155, 5));
      EXPECT_LT(relative_difference(ask(gpu, kDense, 160), want), type == DType::f32  ? 2e-3f
                                                                  : type == DType::q4 ? 0.3f
                                                                                      : 6e-2f);
    }
  }
}

TEST_F(GpuLatent, EveryMethodThatSelectsAllOfThemIsFullAttention) {
  const std::string dense = ",sink=1,window=31,dense_layers=0";
  Context exact = context(Device::cpu);
  exact.prefill(ids(0, 70));
  const std::vector<float> want = ask(exact, kDense, 70);
  for (const std::string& spec : std::vector<std::string>{
           "topk:k=100000" + dense, "topk:k=100000,per=kv-head" + dense, "topk:k=100000,by=value" + dense,
           "kmeans:clusters=12,probes=12,sink=1,window=40,dense_layers=0", "squeezed:sparsity=0" + dense,
           "hash:budget=1.0,weights=" + folder_.signatures(*model_).string() + dense,
           "hyperplanes:budget=1.0" + dense, "retrieval:k=100000" + dense, "random:fraction=1.0" + dense,
           "quest:budget=100000" + dense, "double-sparsity:budget=100000" + dense,
           "pqcache:budget=100000,m=8,bits=4" + dense, "ivf:k=100000,nprobe=1000" + dense}) {
    SCOPED_TRACE(spec);
    Context c = context(Device::cuda);
    const MethodId method = c.attach(parse_spec(spec));
    c.prefill(ids(0, 70));
    c.build_indexes();
    WorkReport work;
    EXPECT_LT(relative_difference(ask(c, method, 70, &work), want), 2e-3f);
    EXPECT_GT(work.sparse_tokens, 0) << work.dense_reason;
  }
}

/// From a file, so that both have the same index.
TEST_F(GpuLatent, FewRowsAreThoseThatTheCpuChooses) {
  const std::filesystem::path path = folder_.path() / "document.lode";
  for (const std::string& spec : std::vector<std::string>{
           "topk:k=3,sink=1,window=31", "topk:k=3,per=kv-head,sink=1,window=31",
           "kmeans:clusters=16,probes=4,sink=1,window=31", "squeezed:sparsity=0.7,window=31",
           "retrieval:k=3,beam=24,sink=1,window=31"}) {
    SCOPED_TRACE(spec);
    Context written = context(Device::cpu);
    written.attach(parse_spec(spec));
    written.prefill(ids(0, 160));
    written.build_indexes();
    written.save(path, "");
    std::vector<float> logits[2];
    WorkReport work[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      Context c = Context::load(path, model_, {.device = device, .max_tokens = 700, .chunk = 64});
      const int at = device == Device::cuda;
      logits[at] = ask(c, 0, 160, &work[at]);
    }
    EXPECT_GE(near_rows(logits[1], logits[0]), 13)
        << "of 15: scores that are nearly alike may rank otherwise";
    EXPECT_EQ(work[1].far_total, work[0].far_total);
    EXPECT_NEAR(static_cast<double>(work[1].far_keys), static_cast<double>(work[0].far_keys),
                0.03 * static_cast<double>(work[0].far_keys));
    EXPECT_LT(work[1].far_keys, work[1].far_total);
  }
}

TEST_F(GpuLatent, AFileWrittenOnAGpuHoldsEachRowOnce) {
  const std::filesystem::path path = folder_.path() / "document.lode";
  Context c = context(Device::cuda, DType::f16);
  c.prefill(ids(0, 300));
  const std::vector<float> want = ask(c, kDense, 300);
  c.roll_back(300);
  c.build_indexes();
  c.save(path, "");
  EXPECT_LT(std::filesystem::file_size(path), 300 * 2 * 576 * 2 + (std::uintmax_t{1} << 18))
      << "tokens times layers times numbers times bytes";
  for (const Device device : {Device::cuda, Device::cpu}) {
    Context opened = Context::load(path, model_, {.device = device, .max_tokens = 700, .chunk = 64});
    const std::vector<float> got = ask(opened, kDense, 300);
    if (device == Device::cuda)
      EXPECT_EQ(got, want);
    else
      EXPECT_LT(relative_difference(got, want), 2e-2f);
  }
}

TEST_F(GpuLatent, QuestionsAskedTogetherHaveTheCpusLogitsWhateverTheCompany) {
  const std::string sparse = "random:fraction=1/4,sink=1,window=40";
  const auto asked = [&](Device device, DType type) {
    std::vector<AskedTogether> all;
    std::vector<std::shared_ptr<const Document>> documents;
    for (const std::size_t tokens : {160u, 128u, 20u})
      documents.push_back(Document::read(
          model_, ids(tokens % 7, tokens), "",
          {.specs = {parse_spec(sparse)}, .kv_type = type, .device = device, .max_tokens = 400}));
    for (std::size_t i = 0; i < 5; ++i) {
      const auto question = ids(31 * i, 1 + 9 * (i % 4)), given = ids(7 * i, 8);
      all.push_back({.document = documents[i % 3],
                     .spec = device == Device::cuda && i == 3 ? sparse : "full",
                     .question = {question.begin(), question.end()},
                     .given = {given.begin(), given.end()}});
    }
    return all;
  };
  const auto expected = logits_of(asked(Device::cpu, DType::f32), model_);
  for (const DType type : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name_of(type));
    const std::vector<AskedTogether> there = asked(Device::cuda, type);
    const auto found = logits_of(there, model_);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (i == 3) continue;
      EXPECT_LT(relative_difference(found[i], expected[i]), type == DType::f32 ? 2e-3f : 8e-2f) << i;
    }
    for (const std::size_t i : {0u, 3u}) EXPECT_EQ(logits_of({there[i]}, model_).front(), found[i]) << i;
  }
}

TEST_F(GpuLatent, WhatTheyDoNotHaveIsRefusedByName) {
  test::expect_refused("latent rows", [&] {
    Context(model_,
            {.device = Device::cuda, .kv_tier = KvTier::host, .active_memory = 1 << 24, .max_tokens = 700});
  });
  test::expect_refused("latent rows", [&] {
    Context(model_, {.device = Device::cuda, .gpus = {0, 1}, .max_tokens = 700});
  });
}

}  // namespace
}  // namespace lode
