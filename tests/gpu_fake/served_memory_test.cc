// SPDX-License-Identifier: Apache-2.0
// A GPU that has less memory than was counted: others have taken some.
#include <gtest/gtest.h>

#include <thread>

#include "engine/batch.h"
#include "engine/memory.h"
#include "gpu_fake/play.h"
#include "support/gpu.h"
#include "support/lisbon.h"
#include "support/served.h"

namespace lode::serve {
namespace {

using test::Crowd, test::lisbon_text, test::Told;

EngineOptions options_for(const std::filesystem::path& folder, DType type = DType::f16) {
  const auto there = put_on_gpu(*pocket(), type);
  EngineOptions options;
  options.library.folder = folder;
  options.library.kv_type = type;
  options.library.memory = std::int64_t{1} << 32;
  options.library.gpu_memory = std::int64_t{1} << 32;
  options.gpu_question_memory = std::int64_t{1} << 24;
  options.on_gpu = {{"pocket", there.model}};
  options.question_template = "{question}";
  return options;
}

/// Bytes that a document is counted for which has room for questions behind it, as the library gives it.
std::int64_t counted_bytes(const EngineOptions& options, std::int64_t tokens) {
  constexpr std::int64_t kQuestions = 4096;
  return document_bytes(*pocket(), options.on_gpu.at("pocket").get(), options.library.kv_type, tokens,
                        tokens + kQuestions, {});
}

struct LessMemory {
  explicit LessMemory(std::int64_t bytes) { cuda::play_memory(bytes); }
  ~LessMemory() { cuda::play_memory(cuda::kPlayedMemory); }
};

TEST(GpuServed, DocumentsThatAreOpenedInVainAreOpenedWithLessBesideThem) {
  const test::ContextsFolder folder;
  EngineOptions options = options_for(folder.path());
  constexpr int kDocuments = 4;
  {
    EngineBackend backend({{"pocket", pocket()}}, options);
    for (int i = 0; i < kDocuments; ++i)
      ASSERT_EQ(test::store(backend, "d" + std::to_string(i), lisbon_text(0, 60 + 10 * i)), "");
    Crowd crowd(backend);
    crowd.ask("d3", "Who lives here?", 4);
    EXPECT_EQ(crowd.told().front().status, 200);
    options.library.gpu_memory = 5 * backend.stats().document_bytes;
  }
  EngineBackend backend({{"pocket", pocket()}}, options);
  Crowd first(backend);
  first.ask("d0", "Who lives here?", 4);  // the buffers of steps are there
  EXPECT_EQ(first.told().front().status, 200);
  // Room for two more of what five were counted for.
  const LessMemory less(cuda::play_memory(cuda::kPlayedMemory) + options.library.gpu_memory * 2 / 5);
  Crowd crowd(backend);
  for (int i = 0; i < 3 * kDocuments; ++i)
    crowd.ask("d" + std::to_string(i % kDocuments), "Who lives here?", 4);
  for (const Told& told : crowd.told()) EXPECT_EQ(told.status, 200) << told.error;
}

/// The claim to its memory is given back when it holds none any more: until then nothing is opened in its place.
TEST(GpuServed, ADocumentThatWasReadCountsUntilItIsWritten) {
  const test::ContextsFolder folder;
  EngineOptions options = options_for(folder.path());
  options.library.gpu_memory = counted_bytes(options, 2000);  // for one of the two
  EngineBackend backend({{"pocket", pocket()}}, options);
  ASSERT_EQ(test::store(backend, "asked", lisbon_text(0, 60)), "");
  const std::int64_t before = cuda::play_memory(cuda::kPlayedMemory);
  NewContext context = {.name = "written", .text = lisbon_text(0, 62)};
  context.attentions = {"full"};
  context.title = std::string(std::size_t{64} << 20, 'x');  // so that writing it takes a while
  backend.create(std::move(context));
  while (cuda::play_memory(cuda::kPlayedMemory) <= before) std::this_thread::yield();  // until it is read
  Crowd crowd(backend);
  crowd.ask("asked", "Who lives here?", 4);
  bool beside = false;
  for (bool reading = true, open = false; reading;) {
    reading = false;
    for (const ContextInfo& info : backend.contexts()) {
      if (info.name == "written") reading = info.state == ContextState::reading;
      if (info.name == "asked") open = info.in_memory;
    }
    beside = beside || (reading && open);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(beside);
  EXPECT_EQ(backend.context("written").error, "");
  EXPECT_EQ(crowd.told().front().status, 200);
}

/// Memory that others have taken keeps a document from being read there. It then fails with a sentence: keys and values
/// in host memory would answer questions one by one, and nobody would know.
TEST(GpuServed, ADocumentIsNotReadIntoHostMemoryUnsaid) {
  const test::ContextsFolder folder;
  const EngineOptions options = options_for(folder.path(), DType::f32);
  EngineBackend backend({{"pocket", pocket()}}, options);
  const std::string text = lisbon_text(0, 640);
  const std::int64_t tokens = std::ssize(pocket()->tokenizer().encode(text, Tokenizer::Bos::as_template));
  const std::int64_t pages = pocket()->config().layers * (std::int64_t{2} << 20), used = cuda::play_memory(0);
  // A little less than keys and values take, which is plenty for those of one layer.
  const LessMemory less(used + counted_bytes(options, tokens) - pages - (1 << 20));
  NewContext context = {.name = "book", .text = text};
  context.attentions = {"full"};
  backend.create(std::move(context));
  ContextInfo info;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    info = backend.context("book");
  } while (info.state == ContextState::reading && info.tokens_done == 0);
  EXPECT_EQ(info.tokens_done, 0);
  EXPECT_EQ(info.state, ContextState::failed);
  EXPECT_NE(info.error.find("of free GPU memory for the document"), std::string::npos) << info.error;
  backend.remove("book");
}

TEST(GpuServed, AQuestionThatTheGpuHasNoMemoryForIsToBeAskedAgain) {
  const test::ContextsFolder folder;
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path()));
  ASSERT_EQ(test::store(backend, "book", lisbon_text(0, 60)), "");
  const auto ask = [&](std::int64_t tokens) {
    Crowd crowd(backend);
    crowd.ask("book", "Who lives here?", tokens);
    return crowd.told().front();
  };
  EXPECT_EQ(ask(4).status, 200);
  {
    const LessMemory less(cuda::play_memory(cuda::kPlayedMemory));
    const Told told = ask(3000);
    EXPECT_EQ(told.status, 503) << told.error;
    EXPECT_GT(told.retry_seconds, 0);
  }
  EXPECT_EQ(ask(4).status, 200);
}

/// What index building holds is not promised to it again.
TEST(GpuMemory, CountsWhatIndexBuildingHolds) {
  constexpr std::int64_t kHeld = 5 << 20, kLimit = std::int64_t{1} << 30;
  cuda::play_held_clusters(1);
  const Context context(pocket(), {.device = Device::cuda, .gpu_memory = kLimit, .max_tokens = 1024});
  const std::int64_t bytes = context.impl().gpu->bytes(), left = cuda::left_to_index();
  cuda::play_held_clusters(1 + kHeld);
  EXPECT_EQ(context.impl().gpu->bytes(), bytes + kHeld);
  EXPECT_EQ(cuda::left_to_index(), left - kHeld);
  cuda::play_held_clusters(0);
}

}  // namespace
}  // namespace lode::serve
