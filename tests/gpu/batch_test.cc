// SPDX-License-Identifier: Apache-2.0
// Many sequences over several documents on a GPU: the CPU's answers, and bits that do not depend on company.
#include "engine/batch.h"

#include <gtest/gtest.h>

#include "base/out_of_memory.h"
#include "engine/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "support/asked_together.h"
#include "support/compare.h"
#include "support/family_folder.h"
#include "support/gpu.h"

namespace lode {
namespace {

std::vector<TokenId> part_of_story(std::int64_t from, std::int64_t tokens) {
  const std::vector<TokenId> all = story(from + tokens);
  return {all.begin() + from, all.end()};
}

std::shared_ptr<const Document> document_on(Device device, std::int64_t from, std::int64_t tokens,
                                            const std::vector<std::string>& specs = {},
                                            DType type = DType::f32) {
  DocumentOptions options = {.kv_type = type, .device = device, .max_tokens = 2048};
  for (const std::string& spec : specs) options.specs.push_back(parse_spec(spec));
  return Document::read(pocket(), part_of_story(from, tokens), "", options);
}

/// Questions of various lengths about one document, then others.
std::vector<AskedTogether> some(std::span<const std::shared_ptr<const Document>> documents,
                                std::span<const std::string> specs, int count, std::int64_t tokens = 3) {
  std::vector<AskedTogether> asked;
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<std::size_t>(i);
    asked.push_back({.document = documents[n % documents.size()],
                     .spec = specs[n / documents.size() % specs.size()],
                     .question = part_of_story(20 + 31 * i, 3 + 11 * (i % 4)),
                     .given = part_of_story(400 + 17 * i, tokens)});
  }
  return asked;
}

TEST(GpuBatch, LogitsAreTheCpus) {
  NEEDS_GPU();
  std::vector<std::vector<float>> found[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const std::shared_ptr<const Document> documents[] = {
        document_on(device, 0, 700), document_on(device, 100, 256), document_on(device, 300, 90)};
    const std::string specs[] = {"full"};
    found[device == Device::cuda] = logits_of(some(documents, specs, 19));
  }
  for (std::size_t i = 0; i < found[0].size(); ++i)
    EXPECT_LT(relative_difference(found[1][i], found[0][i]), 1e-4f) << i;
}

/// A method that lists every far key gives what full attention gives.
/// Layers with sliding windows, RoPEs of their own, sinks and experts.
class GpuBatchFamily : public testing::TestWithParam<std::string> {
 protected:
  static std::vector<TokenId> ids(TokenId from, std::int64_t tokens) {
    std::vector<TokenId> some(static_cast<std::size_t>(tokens));
    for (TokenId i = 0; i < static_cast<TokenId>(tokens); ++i)
      some[static_cast<std::size_t>(i)] = ((from + i) * (from + i) + 3 * i + i / 7) % 64;
    return some;
  }
  static constexpr const char* kAllKeys = "hnsw:k=100%,sink=1,window=16";
  std::shared_ptr<const Document> document(Device device, TokenId from, std::int64_t tokens) const {
    return Document::read(
        model_, ids(from, tokens), "",
        {.specs = {parse_spec(kAllKeys)}, .kv_type = DType::f32, .device = device, .max_tokens = 256});
  }
  std::vector<AskedTogether> asked(Device device, const char* spec = "full") const {
    // A document that ends in a block, one that fills blocks, and one that is shorter than a block.
    const std::shared_ptr<const Document> documents[] = {document(device, 0, 150), document(device, 9, 128),
                                                         document(device, 5, 20)};
    std::vector<AskedTogether> all;
    for (TokenId i = 0; i < 7; ++i)
      all.push_back({.document = documents[i % 3],
                     .spec = spec,
                     .question = ids(31 * i, 1 + 9 * (i % 4)),
                     .given = ids(7 * i, 40)});
    return all;
  }
  const FamilyFolder folder_{GetParam()};
  std::shared_ptr<const Model> model_ = folder_.load();
};

TEST_P(GpuBatchFamily, LogitsAreTheCpusWhateverTheCompany) {
  NEEDS_GPU();
  const auto expected = logits_of(asked(Device::cpu), model_);
  const std::vector<AskedTogether> there = asked(Device::cuda);
  const auto found = logits_of(there, model_);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT(relative_difference(found[i], expected[i]), 2e-4f) << i;
  for (const std::size_t i : {0u, 4u}) EXPECT_EQ(logits_of({there[i]}, model_).front(), found[i]) << i;
}

TEST_P(GpuBatchFamily, AllKeysThatTheHostChoosesAreFullAttention) {
  NEEDS_GPU();
  const auto expected = logits_of(asked(Device::cuda), model_),
             found = logits_of(asked(Device::cuda, kAllKeys), model_);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT(relative_difference(found[i], expected[i]), 2e-4f) << i;
}

INSTANTIATE_TEST_SUITE_P(Models, GpuBatchFamily,
                         testing::Values("mistral-window", "gemma3", "gpt-oss", "qwen3-moe", "gemma4",
                                         "gemma4-moe", "deepseek-v2", "deepseek-v3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(GpuBatch, EveryFarKeyIsFullAttention) {
  NEEDS_GPU();
  const std::string spec = "random:fraction=1.0,sink=4,window=50";
  const std::shared_ptr<const Document> documents[] = {document_on(Device::cuda, 0, 700, {spec})};
  const std::string full[] = {"full"}, sparse[] = {spec};
  const auto want = logits_of(some(documents, full, 2, 60)),
             found = logits_of(some(documents, sparse, 2, 60));
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_LT(relative_difference(found[i], want[i]), 1e-4f) << i;
}

TEST(GpuBatch, BitsDoNotDependOnCompany) {
  NEEDS_GPU();
  for (const DType type : {DType::f32, DType::bf16}) {
    const std::string specs[] = {"full", "streaming:sink=4,window=60",
                                 "random:fraction=1/4,sink=1,window=100"};
    const std::vector<std::string> indexed(specs + 1, specs + 3);
    const std::shared_ptr<const Document> documents[] = {document_on(Device::cuda, 0, 500, indexed, type),
                                                         document_on(Device::cuda, 100, 384, indexed, type)};
    const std::vector<AskedTogether> asked = some(documents, specs, 18);
    const auto together = logits_of(asked);
    for (std::size_t i = 0; i < asked.size(); i += 7) {
      EXPECT_EQ(logits_of({asked[i]}).front(), together[i]) << i << " " << asked[i].spec;
      EXPECT_EQ(logits_of({asked[i], asked[(i + 7) % 18], asked[(i + 8) % 18]}).front(), together[i]) << i;
    }
  }
}

/// Methods that the GPU has no selector for: walks that each sequence remembers, blocks of keys, weights of samples, an
/// estimate of the rest, questions that choose as a whole, and indexes that end with the document or in front of its window.
const std::string kOnHost[] = {"retrieval:k=8,beam=16,sink=4,window=200",
                               "infllm:topk=2,block_size=32,sink=4,window=200",
                               "magicpig:L=10,K=8,sink=4,window=200",
                               "hnsw:k=40,sink=4,window=200",
                               "ideal:sparsity=0.7,block=4,sink=4,window=200",
                               "squeezed:tail=on",
                               "squeezed:window=200"};

// The keys are the CPU's wherever the document ends: within the last block's window, or behind it.
TEST(GpuBatch, TheHostChoosesAsForTheCpu) {
  NEEDS_GPU();
  for (const std::string& spec : kOnHost) {
    std::vector<std::vector<float>> found[2];
    std::vector<ForwardWork> work[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      const std::shared_ptr<const Document> documents[] = {document_on(device, 0, 690, {spec}),
                                                           document_on(device, 100, 640, {spec}),
                                                           document_on(device, 50, 750, {spec})};
      const std::string sparse[] = {spec};
      const int at = device == Device::cuda;
      found[at] = logits_of(some(documents, sparse, 6, 20), pocket(), &work[at]);
    }
    for (std::size_t i = 0; i < 6; ++i) {
      const AttendWork &cpu = work[0][i].attend, &gpu = work[1][i].attend;
      EXPECT_EQ(gpu.far_total, cpu.far_total) << spec << " " << i;
      EXPECT_NEAR(static_cast<double>(gpu.far_keys), static_cast<double>(cpu.far_keys),
                  0.01 * static_cast<double>(cpu.far_keys))
          << spec << " " << i;
      EXPECT_LT(cpu.far_keys, cpu.far_total) << spec << " " << i;
      // Of 750 tokens, squeezed's index ends ten behind the last whole block, and a tail attends to those ten. Walks as
      // narrow as these may turn another way by the last bit of a query.
      const float allowed = spec == "squeezed:tail=on" && i % 3 == 2 ? 0.05f
                            : spec.starts_with("retrieval")          ? 1e-2f
                                                                     : 2e-3f;
      EXPECT_LT(relative_difference(found[1][i], found[0][i]), allowed) << spec << " " << i;
    }
  }
}

TEST(GpuBatch, EveryKeyThatTheHostChoosesIsFullAttention) {
  NEEDS_GPU();
  for (const std::string spec :
       {"infllm:topk=64,block_size=32,sink=4,window=50", "hnsw:k=100%,sink=4,window=50",
        "ideal:sparsity=0,sink=0,window=100", "squeezed:tail=on,sparsity=0"}) {
    const std::shared_ptr<const Document> documents[] = {document_on(Device::cuda, 0, 700, {spec}),
                                                         document_on(Device::cuda, 0, 750, {spec})};
    const std::string full[] = {"full"}, sparse[] = {spec};
    const auto want = logits_of(some(documents, full, 3, 60)),
               found = logits_of(some(documents, sparse, 3, 60));
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_LT(relative_difference(found[i], want[i]), 1e-4f) << spec << " " << i;
  }
}

TEST(GpuBatch, BitsDoNotDependOnCompanyWhereTheHostChooses) {
  NEEDS_GPU();
  std::vector<std::string> specs(std::begin(kOnHost), std::end(kOnHost));
  specs.insert(specs.end(), {"full", "random:fraction=1/4,sink=1,window=100"});
  std::vector<std::string> indexed = specs;
  std::erase(indexed, "full");
  const std::shared_ptr<const Document> documents[] = {
      document_on(Device::cuda, 0, 500, indexed, DType::bf16),
      document_on(Device::cuda, 100, 384, indexed, DType::bf16)};
  const std::vector<AskedTogether> asked = some(documents, specs, 28);
  const auto together = logits_of(asked);
  for (std::size_t i = 0; i < asked.size(); ++i)
    EXPECT_EQ(logits_of({asked[i]}).front(), together[i]) << i << " " << asked[i].spec;
}

TEST(GpuBatch, SaysThatTheHostChooses) {
  NEEDS_GPU();
  const auto document = document_on(Device::cuda, 0, 400, {"hnsw:k=40,window=60", "random:window=60"});
  Scheduler scheduler(pocket(), {.max_sequences = 2});
  const auto notice_of = [&](const char* spec) {
    return scheduler
        .submit({.document = document,
                 .prompt = part_of_story(400, 5),
                 .attention = parse_spec(spec),
                 .options = {.max_new_tokens = 2}})
        .result.get()
        .generation.work.notice;
  };
  for (int time = 0; time < 2; ++time)
    EXPECT_NE(
        notice_of("hnsw:k=40,window=60").find("on the host, not on the GPU: the choice of keys by hnsw"),
        std::string::npos);
  EXPECT_EQ(notice_of("random:window=60").find("on the host"), std::string::npos);
}

TEST(GpuBatch, AnswersOfASchedulerAreTheCpus) {
  NEEDS_GPU();
  std::vector<std::vector<TokenId>> answers[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const auto document = document_on(device, 0, 600, {"streaming:sink=4,window=60"});
    Scheduler scheduler(pocket(), {.max_sequences = 6});
    std::vector<Ticket<Answer>> tickets;
    for (int i = 0; i < 8; ++i)
      tickets.push_back(
          scheduler.submit({.document = document,
                            .prompt = part_of_story(600 + 13 * i, 5 + i),
                            .attention = parse_spec(i == 3 ? "streaming:sink=4,window=60" : "full"),
                            .options = {.max_new_tokens = 12, .stop_at_eos = false},
                            .exact = i == 3}));
    for (const auto& ticket : tickets)
      answers[device == Device::cuda].push_back(ticket.result.get().generation.tokens);
  }
  EXPECT_EQ(answers[0], answers[1]);
}

/// Shares near the threshold may fall on either side.
void expect_alike(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  double total = 0, apart = 0;
  for (std::size_t i = 0; i < found.size(); ++i)
    total += expected[i], apart += std::abs(found[i] - expected[i]);
  EXPECT_GT(total, 0.9);  // a sentence has one vote
  EXPECT_LT(apart, 0.01 * total);
}

Request asking(std::shared_ptr<const Document> document, int i, bool sources) {
  return {.document = std::move(document),
          .prompt = part_of_story(600 + 13 * i, 5 + i),
          .attention = parse_spec(i == 3 ? "streaming:sink=4,window=60" : "full"),
          .options = {.max_new_tokens = i == 2 ? 1 : 12, .stop_at_eos = false},
          .want_sources = sources,
          .exact = i == 3};
}

TEST(GpuBatch, SourcesAreTheCpus) {
  NEEDS_GPU();
  std::vector<Answer> answers[2], without;
  for (const Device device : {Device::cpu, Device::cuda}) {
    const auto document = document_on(device, 0, 700, {"streaming:sink=4,window=60"});
    for (const bool sources : {true, false}) {
      Scheduler scheduler(pocket(), {.max_sequences = 6});
      std::vector<Ticket<Answer>> tickets;
      for (int i = 0; i < 5; ++i) tickets.push_back(scheduler.submit(asking(document, i, sources)));
      for (const auto& ticket : tickets)
        (sources ? answers[device == Device::cuda] : without).push_back(ticket.result.get());
    }
  }
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(answers[1][i].generation.tokens, answers[0][i].generation.tokens);
    EXPECT_EQ(answers[1][i].generation.tokens, without[5 + i].generation.tokens);
    expect_alike(answers[1][i].sources.mass, answers[0][i].sources.mass);
  }
}

TEST(GpuBatch, AConversationGoesOnBehindSources) {
  NEEDS_GPU();
  std::vector<std::vector<TokenId>> answers[2];
  for (const bool sources : {false, true}) {
    Scheduler scheduler(pocket(), {.max_sequences = 2});
    Request request = asking(document_on(Device::cuda, 0, 500), 0, sources);
    request.cache = std::make_shared<SequenceCache>();
    for (int turn = 0; turn < 3; ++turn) {
      const Answer answer = scheduler.submit(request).result.get();
      answers[sources].push_back(answer.generation.tokens);
      request.prompt.insert(request.prompt.end(), answer.generation.tokens.begin(),
                            answer.generation.tokens.end());
      request.prompt.push_back(part_of_story(20 * turn, 1).front());
    }
  }
  EXPECT_EQ(answers[0], answers[1]);
}

TEST(GpuBatch, SourcesOfAContextStayOnTheGpu) {
  NEEDS_GPU();
  std::vector<double> mass[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context context(pocket(), {.kv_type = DType::f32, .device = device, .max_tokens = 1024});
    context.prefill(story(600));
    SourceMass sources;
    const Generation g = context.generate(part_of_story(600, 20), kDense,
                                          {.max_new_tokens = 12, .stop_at_eos = false}, &sources);
    EXPECT_EQ(g.work.notice.find("on the host"), std::string::npos) << g.work.notice;
    mass[device == Device::cuda] = sources.mass;
  }
  expect_alike(mass[1], mass[0]);
}

/// Four blocks: the first and the last two become free while the second is in use, so that three are free and no place
/// of three is there. Who waits for one is answered as with room for all.
TEST(GpuBatch, QuestionsWaitForAPlaceBehindTheirDocument) {
  NEEDS_GPU();
  const auto document = document_on(Device::cuda, 0, 640);
  const std::int64_t block = 128 * document->impl().parts().kv.shape().token_bytes();
  std::vector<std::vector<TokenId>> answers[2];
  for (const int blocks : {100, 4}) {
    Scheduler scheduler(pocket(), {.max_sequences = 6, .memory = blocks * block, .device = Device::cuda});
    std::vector<Ticket<Answer>> tickets;
    struct Lengths {
      std::int64_t prompt, answer;
    };
    for (const Lengths of : {Lengths{5, 20}, {6, 110}, {130, 4}, {260, 4}, {7, 5}, {250, 5}})
      tickets.push_back(scheduler.submit({.document = document,
                                          .prompt = part_of_story(640, of.prompt),
                                          .attention = parse_spec("full"),
                                          .options = {.max_new_tokens = of.answer, .stop_at_eos = false}}));
    for (const auto& ticket : tickets) answers[blocks == 4].push_back(ticket.result.get().generation.tokens);
    EXPECT_EQ(scheduler.stats().memory_used, 0);
    EXPECT_EQ(scheduler.stats().failed, 0);
  }
  EXPECT_EQ(answers[0], answers[1]);
}

/// Room that sequences keep for questions to come is theirs until they are given up, which is no fault of who finds none.
TEST(GpuBatch, RoomThatIsKeptLacksOnlyUntilItIsGivenUp) {
  NEEDS_GPU();
  const auto document = document_on(Device::cuda, 0, 640);
  const std::int64_t block = 128 * document->impl().parts().kv.shape().token_bytes(),
                     kept = (document->max_tokens() - document->tokens()) / 128;
  Scheduler scheduler(pocket(), {.memory = (kept + 1) * block, .device = Device::cuda});
  const auto ask = [&](std::int64_t answer, std::shared_ptr<SequenceCache> cache) {
    return scheduler
        .submit({.document = document,
                 .prompt = part_of_story(640, 5),
                 .attention = parse_spec("full"),
                 .options = {.max_new_tokens = answer, .stop_at_eos = false},
                 .cache = std::move(cache)})
        .result;
  };
  const auto cache = std::make_shared<SequenceCache>();
  EXPECT_EQ(ask(3, cache).get().generation.tokens.size(), 3u);
  EXPECT_EQ(ask(3, {}).get().generation.tokens.size(), 3u);  // the block beside it
  EXPECT_THROW(ask(130, {}).get(), OutOfDeviceMemory);
  cache->clear();
  EXPECT_EQ(ask(130, {}).get().generation.tokens.size(), 130u);
}

TEST(GpuBatch, WhatItCannotDoIsNamed) {
  NEEDS_GPU();
  const auto document = document_on(Device::cuda, 0, 300, {"h2o"});
  Scheduler scheduler(pocket(), {.max_sequences = 2});
  const auto ask = [&](const char* spec) {
    return scheduler.submit({.document = document,
                             .prompt = part_of_story(300, 200),
                             .attention = parse_spec(spec),
                             .options = {.max_new_tokens = 2}});
  };
  EXPECT_THROW(ask("h2o").result.get(), InputError);
  EXPECT_EQ(ask("full").result.get().generation.tokens.size(), 2u);
}

}  // namespace
}  // namespace lode
