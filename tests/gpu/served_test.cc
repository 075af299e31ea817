// SPDX-License-Identifier: Apache-2.0
// A server with documents on a GPU that do not all fit there.
#include "support/served.h"

#include <gtest/gtest.h>

#include "engine/batch.h"
#include "engine/memory.h"
#include "support/gpu.h"
#include "support/lisbon.h"

namespace lode::serve {
namespace {

using test::Crowd, test::lisbon_text, test::Told;

constexpr int kDocuments = 5, kTokens = 6;

EngineOptions options_for(const std::filesystem::path& folder, double documents) {
  const auto there = put_on_gpu(*pocket(), DType::f16);
  EngineOptions options;
  options.library.folder = folder;
  options.library.memory = std::int64_t{1} << 32;
  options.library.gpu_memory = static_cast<std::int64_t>(
      documents * static_cast<double>(document_bytes(*pocket(), there.model.get(), DType::f16, 1000,
                                                     pocket()->config().max_positions, {})));
  options.gpu_question_memory = std::int64_t{1} << 28;
  options.on_gpu = {{"pocket", there.model}};
  options.question_template = "{question}";
  return options;
}

std::string document(int i) {
  return "d" + std::to_string(i);
}

/// Every question is answered, as one is that nobody stands beside, and counted room is not exceeded.
void expect_answers(EngineBackend& backend, std::int64_t room, const std::vector<std::string>& expected) {
  Crowd crowd(backend);
  std::vector<std::uint64_t> ids;
  for (int round = 0; round < 3; ++round)
    for (int i = 0; i < kDocuments; ++i) ids.push_back(crowd.ask(document(i), "Who lives here?", kTokens));
  backend.cancel(ids[7]);
  const std::vector<Told> told = crowd.told();
  for (std::size_t i = 0; i < told.size(); ++i) {
    EXPECT_EQ(told[i].status, 200) << told[i].error;
    if (told[i].answer.ending == "cancelled") continue;
    EXPECT_EQ(told[i].answer.text, expected[i % kDocuments]) << i;
  }
  EXPECT_LE(backend.stats().document_bytes, room);
}

std::vector<std::string> store_and_ask(const std::filesystem::path& folder) {
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder, 8));
  std::vector<std::string> expected;
  for (int i = 0; i < kDocuments; ++i)
    EXPECT_EQ(test::store(backend, document(i), lisbon_text(0, 60 + 10 * i)), "");
  for (int i = 0; i < kDocuments; ++i) {
    Crowd alone(backend);
    alone.ask(document(i), "Who lives here?", kTokens);
    expected.push_back(alone.told().front().answer.text);
  }
  return expected;
}

TEST(GpuServed, QuestionsAboutDocumentsThatDoNotFitTogetherWaitForTheirTurn) {
  NEEDS_GPU();
  const test::ContextsFolder folder;
  const std::vector<std::string> expected = store_and_ask(folder.path());
  const EngineOptions options = options_for(folder.path(), 2.2);
  EngineBackend backend({{"pocket", pocket()}}, options);
  expect_answers(backend, options.library.gpu_memory, expected);
}

TEST(GpuServed, WhatCanNeverFitIsRefusedWithNumbers) {
  NEEDS_GPU();
  const test::ContextsFolder folder;
  store_and_ask(folder.path());
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), 0.1));
  Crowd crowd(backend);
  try {
    crowd.ask(document(0), "Who lives here?", kTokens);
    FAIL() << "expected a refusal";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 503);
    EXPECT_GT(error.retry_seconds, 0);
    EXPECT_NE(std::string(error.what()).find("found a need for"), std::string::npos) << error.what();
  }
  EXPECT_NE(test::store(backend, "more", lisbon_text(0, 90)), "");
}

}  // namespace
}  // namespace lode::serve
