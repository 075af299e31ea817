// SPDX-License-Identifier: Apache-2.0
// Models with recurrent layers on a GPU: the CPU's answers; what a text, a branch, a file and a cut have of their states;
// and bits that depend neither on chunks nor on company.
#include <gtest/gtest.h>

#include "engine/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "support/gpu.h"
#include "support/interrupted_reading.h"
#include "support/tiny_family.h"

namespace lode {
namespace {

class GpuRecurrent : public testing::Test, protected test::TinyFamily {
 protected:
  GpuRecurrent() : TinyFamily("qwen35") {}
  std::shared_ptr<const Document> document(Device device, std::int64_t tokens = 120) const {
    return Document::read(model_, ids(0, tokens), "",
                          {.kv_type = DType::f32, .device = device, .chunk = 16, .max_tokens = 256});
  }
  Request request(std::shared_ptr<const Document> about, std::size_t i) const {
    return {.document = std::move(about),
            .prompt = {ids_.begin() + 120 + static_cast<std::ptrdiff_t>(i), ids_.begin() + 130},
            .attention = parse_spec("full"),
            .options = {.max_new_tokens = 10, .stop_at_eos = false}};
  }
};

TEST_F(GpuRecurrent, ContextsAnswerAsTheCpus) {
  NEEDS_GPU();
  expect_contexts_answer_as_the_cpus();
}

TEST_F(GpuRecurrent, GoBackToWhatIsKeptAndReadTheRestAgain) {
  NEEDS_GPU();
  Context fresh = context();
  fresh.prefill(ids(0, 100));
  const std::vector<float> expected = fresh.forward(ids(100, 20), kDense);
  Context c = context();
  c.prefill(ids(0, 100));
  c.build_indexes();
  EXPECT_EQ(c.forward(ids(100, 20), kDense), expected);
  c.roll_back(100);
  EXPECT_EQ(c.forward(ids(100, 20), kDense), expected) << "to the document's end";
  c.generate(ids(5, 9), kDense, {.max_new_tokens = 12, .stop_at_eos = false});
  c.roll_back(100);
  EXPECT_EQ(c.forward(ids(100, 20), kDense), expected) << "behind an answer";
  c.roll_back(83);
  c.prefill(ids(83, 17));
  EXPECT_LT(relative_difference(c.forward(ids(100, 20), kDense), expected), 1e-4f) << "where none was kept";
  c.roll_back(0);
  c.prefill(ids(0, 100));
  EXPECT_EQ(c.forward(ids(100, 20), kDense), expected) << "from nothing";
}

/// Of a question that attends sparsely some tokens have been taken when the last one is refused.
TEST_F(GpuRecurrent, AStepThatFailsLeavesTheStatesAsTheyWere) {
  NEEDS_GPU();
  Context c = context(Device::cuda, 64);
  const MethodId method = c.attach(parse_spec("streaming:sink=1,window=20,dense_layers=0"));
  c.prefill(ids(0, 100));
  c.build_indexes();
  const std::vector<float> expected = c.forward(ids(100, 40), method);
  c.roll_back(100);
  std::vector<TokenId> wrong(ids_.begin() + 100, ids_.begin() + 140);
  wrong.back() = 999;
  EXPECT_THROW(c.forward(wrong, method), InputError);
  EXPECT_EQ(c.tokens(), 100);
  EXPECT_EQ(c.forward(ids(100, 40), method), expected);
}

/// Methods that go over all layers find nothing to index in those without keys; one that lists every key gives what
/// full attention gives.
TEST_F(GpuRecurrent, MethodsChooseInTheLayersThatAttend) {
  NEEDS_GPU();
  Context c = context();
  std::vector<MethodId> methods;
  for (const char* spec : {"random:fraction=1.0", "quest:budget=200", "pqcache:budget=200", "topk:k=200",
                           "double-sparsity:bits=2,channels=4,budget=200", "ivf:nlist=4,nprobe=4,k=200"})
    methods.push_back(c.attach(parse_spec(spec + std::string(",sink=1,window=16,dense_layers=0"))));
  c.prefill(ids(0, 150));
  c.build_indexes();
  const std::vector<float> expected = c.forward(ids(150, 10), kDense);
  for (const MethodId method : methods) {
    c.roll_back(150);
    EXPECT_LT(relative_difference(c.forward(ids(150, 10), method), expected), 2e-4f) << method;
  }
}

/// What was read here is asked there, with the states that are in the file.
TEST_F(GpuRecurrent, SavedDocumentsAreAskedOnEitherDevice) {
  NEEDS_GPU();
  const auto file = folder_.path() / "document.lode";
  Context c = context();
  c.prefill(ids(0, 120));
  c.build_indexes();
  c.save(file, "");
  const std::vector<float> logits = c.forward(ids(120, 30), kDense);
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context loaded = Context::load(file, model_, {.device = device, .chunk = 16});
    EXPECT_EQ(loaded.tokens(), 120);
    const std::vector<float> found = loaded.forward(ids(120, 30), kDense);
    if (device == Device::cuda)
      EXPECT_EQ(found, logits) << "no bit is lost, and no token read again";
    else
      EXPECT_LT(relative_difference(found, logits), 2e-4f);
  }
}

TEST_F(GpuRecurrent, AnInterruptedReadingGoesOn) {
  NEEDS_GPU();
  test::expect_an_interrupted_reading_goes_on([&] { return context(); }, ids_, folder_.path());
}

TEST_F(GpuRecurrent, BranchesAnswerAsTheCpusInAnyCompany) {
  NEEDS_GPU();
  std::vector<std::vector<TokenId>> answers[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const auto about = document(device);
    Scheduler together(model_, {.max_sequences = 6});
    std::vector<Ticket<Answer>> tickets;
    for (std::size_t i = 0; i < 6; ++i) tickets.push_back(together.submit(request(about, i)));
    for (auto& ticket : tickets)
      answers[device == Device::cuda].push_back(ticket.result.get().generation.tokens);
    if (device == Device::cpu) continue;
    for (std::size_t i = 0; i < 6; i += 2)
      EXPECT_EQ(
          Scheduler(model_, {.max_sequences = 1}).submit(request(about, i)).result.get().generation.tokens,
          answers[1][i]);
  }
  EXPECT_EQ(answers[1], answers[0]);
}

TEST_F(GpuRecurrent, BitsOfABranchDoNotDependOnCompanyAndTheDocumentStaysAsItWas) {
  NEEDS_GPU();
  const auto first = document(Device::cuda), second = document(Device::cuda, 77);
  expect_bits_without_company(
      [&](int i) { return std::make_unique<Sequence>(i % 2 == 0 ? first : second, parse_spec("full"), 60); });
}

/// The second question of a conversation begins as the first did: its states are gone but for the beginning and the end.
TEST_F(GpuRecurrent, AConversationGoesOnOrBeginsAnew) {
  NEEDS_GPU();
  std::vector<std::vector<TokenId>> answers[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    Scheduler scheduler(model_, {.max_sequences = 2});
    Request asked = request(document(device), 0);
    asked.cache = std::make_shared<SequenceCache>();
    for (int turn = 0; turn < 3; ++turn) {
      answers[device == Device::cuda].push_back(scheduler.submit(asked).result.get().generation.tokens);
      const auto& last = answers[device == Device::cuda].back();
      asked.prompt.insert(asked.prompt.end(), last.begin(), turn == 0 ? last.end() : last.end() - 3);
      asked.prompt.push_back(7 + turn);
    }
  }
  EXPECT_EQ(answers[1], answers[0]);
}

/// A question that begins otherwise leaves nothing of the one before, though it is too short to write over all of it.
TEST_F(GpuRecurrent, AnotherConversationHasNothingOfTheOneBefore) {
  NEEDS_GPU();
  Scheduler scheduler(model_, {.max_sequences = 2});
  const auto text = document(Device::cuda);
  const auto ask = [&](std::vector<TokenId> prompt, int tokens, std::shared_ptr<SequenceCache> cache) {
    Request asked = request(text, 0);
    asked.prompt = std::move(prompt);
    asked.options.max_new_tokens = tokens;
    asked.cache = std::move(cache);
    return scheduler.submit(asked).result.get().generation.tokens;
  };
  const auto prompt_of = [](TokenId first, int tokens) {
    std::vector<TokenId> prompt;
    for (TokenId i = 0; i < tokens; ++i) prompt.push_back((first + 5 * i) % 60 + 1);
    return prompt;
  };
  for (TokenId i = 0; i < 6; ++i) {
    const auto cache = std::make_shared<SequenceCache>();
    ask(prompt_of(3 + 7 * i, 10), 2, cache);
    std::vector<TokenId> other = prompt_of(18 + 7 * i, 20);
    ask(other, 1, cache);
    other.resize(15);
    other.insert(other.end(), {9, 33, 4});
    EXPECT_EQ(ask(other, 16, cache), ask(other, 16, std::make_shared<SequenceCache>())) << i;
  }
}

TEST_F(GpuRecurrent, WhatIsNotThereIsRefused) {
  NEEDS_GPU();
  EXPECT_THROW(context_with({.kv_type = DType::q8}), InputError);
  EXPECT_THROW(context_with({.kv_type = DType::f32, .kv_tier = KvTier::host}), InputError);
}

}  // namespace
}  // namespace lode
