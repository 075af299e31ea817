// SPDX-License-Identifier: Apache-2.0
// A server whose documents do not all fit into memory.
#include "serve/engine/engine_backend.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "support/asking.h"
#include "support/served.h"

namespace lode::serve {
namespace {

using test::Crowd, test::lisbon, test::pocket, test::Told;

constexpr int kDocuments = 6;

EngineOptions options_for(const std::filesystem::path& folder, std::int64_t memory) {
  EngineOptions options;
  options.library.folder = folder;
  options.library.kv_type = DType::f16;
  options.library.memory = memory;
  options.question_template = "{question}";
  return options;
}

std::string name_of_document(int i) {
  return "d" + std::to_string(i);
}

/// Each document's answer, asked alone where all fit.
std::vector<std::string> store_and_ask(const std::filesystem::path& folder, std::int64_t& bytes) {
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder, std::int64_t{1} << 34));
  std::vector<std::string> answers;
  for (int i = 0; i < kDocuments; ++i)
    EXPECT_EQ(test::store(backend, name_of_document(i), lisbon(8 + i)), "");
  for (int i = 0; i < kDocuments; ++i) {
    Crowd alone(backend);
    alone.ask(name_of_document(i), test::kQuestions[0], 6);
    answers.push_back(alone.told().front().answer.text);
  }
  bytes = backend.stats().document_bytes;
  return answers;
}

TEST(EngineBackend, QuestionsAboutDocumentsThatDoNotFitTogetherWaitForTheirTurn) {
  const test::ContextsFolder folder;
  std::int64_t bytes = 0;
  const std::vector<std::string> expected = store_and_ask(folder.path(), bytes);
  for (const std::int64_t memory : {bytes / 2, bytes / kDocuments / 4}) {  // the last: each is opened alone
    EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), memory));
    Crowd crowd(backend);
    std::vector<std::uint64_t> ids;
    std::set<std::size_t> cancelled;
    for (int round = 0; round < 4; ++round)
      for (int i = 0; i < kDocuments; ++i)
        ids.push_back(crowd.ask(name_of_document(i), test::kQuestions[0], 6));
    for (std::size_t i = 0; i < ids.size(); i += 5) {
      backend.cancel(ids[i]);
      cancelled.insert(i);
    }
    const std::vector<Told> told = crowd.told();
    for (std::size_t i = 0; i < told.size(); ++i) {
      EXPECT_EQ(told[i].status, 200) << told[i].error;
      if (told[i].answer.ending == "cancelled" && cancelled.contains(i)) continue;
      EXPECT_EQ(told[i].answer.text, expected[i % kDocuments]) << i;
    }
    const BackendStats stats = backend.stats();
    EXPECT_EQ(stats.queued, 0);
    if (memory == bytes / 2) {
      EXPECT_LE(stats.document_bytes, memory);
    }
    EXPECT_LT(stats.documents_in_memory, kDocuments);
  }
}

TEST(EngineBackend, AsManyWaitAsMayAndTheServerStopsWithThem) {
  const test::ContextsFolder folder;
  std::int64_t bytes = 0;
  store_and_ask(folder.path(), bytes);
  auto options = options_for(folder.path(), bytes / kDocuments);
  options.scheduler.max_queued = 4;
  auto backend = std::make_unique<EngineBackend>(
      std::vector<std::pair<std::string, std::shared_ptr<const Model>>>{{"pocket", pocket()}}, options);
  Crowd crowd(*backend);
  int refused = 0, asked = 0;
  for (int i = 0; i < 40; ++i) {
    try {
      crowd.ask(name_of_document(i % kDocuments), test::kQuestions[0], 400);
      ++asked;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 429);
      EXPECT_GT(error.retry_seconds, 0);
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_LE(backend->stats().queued, 4);
  backend.reset();  // all that were taken hear how they ended
  EXPECT_GE(asked, 4);
}

TEST(EngineBackend, ADeletedDocumentsWaitersAreRefused) {
  const test::ContextsFolder folder;
  std::int64_t bytes = 0;
  store_and_ask(folder.path(), bytes);
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), bytes / kDocuments));
  Crowd crowd(backend);
  for (int i = 0; i < kDocuments; ++i) crowd.ask(name_of_document(i), test::kQuestions[0], 40);
  backend.remove(name_of_document(kDocuments - 1));
  const std::vector<Told> told = crowd.told();
  for (int i = 0; i + 1 < kDocuments; ++i) EXPECT_EQ(told[static_cast<std::size_t>(i)].status, 200);
  EXPECT_TRUE(told.back().status == 404 || told.back().status == 200) << told.back().error;
}

/// While its prompt is made of its text, which takes a moment, a question is neither among those that wait nor among
/// those that are answered.
TEST(EngineBackend, ACancelFindsAQuestionThatBegins) {
  const test::ContextsFolder folder;
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), std::int64_t{1} << 34));
  ASSERT_EQ(test::store(backend, "book", lisbon(8)), "");
  std::string longest;  // too long to be answered, which would be heard if the cancel were lost
  while (longest.size() < (std::size_t{8} << 20)) longest += lisbon(8);
  Crowd crowd(backend);
  const std::uint64_t id = crowd.ask("book", longest, 4);  // the document has to be opened first
  while (backend.stats().queued > 0) std::this_thread::yield();
  backend.cancel(id);
  const Told told = crowd.told().front();
  EXPECT_EQ(told.status, 200) << told.error;
  EXPECT_EQ(told.answer.ending, "cancelled");
}

/// Changes a byte in the middle of a document's file, where keys and values are.
void damage(const std::filesystem::path& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(std::filesystem::file_size(path) / 2));
  const char byte = static_cast<char>(~file.peek());
  file.seekp(file.tellg());
  file.put(byte);
}

/// Whatever it is asked by, and whatever it was asked by before: a damaged file is no fault of the question.
TEST(EngineBackend, ADamagedFileIsNamedWhateverTheQuestionAttendsBy) {
  const test::ContextsFolder folder;
  std::int64_t bytes = 0;
  store_and_ask(folder.path(), bytes);
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), bytes / kDocuments / 4));
  const auto ask = [&](const std::string& name, const std::string& attention) {
    Crowd crowd(backend);
    crowd.ask(name, test::kQuestions[0], 4, attention);
    return crowd.told().front();
  };
  const std::string other = "topk:k=32,window=64";  // which the file has no index for
  EXPECT_EQ(ask("d0", other).status, 200);
  EXPECT_EQ(ask("d1", "full").status, 200);  // there is room for one alone: d0 is closed
  damage(folder.path() / "d0.lode");
  for (const std::string& attention : {std::string("full"), std::string("quest:window=64"), other}) {
    const Told told = ask("d0", attention);
    EXPECT_EQ(told.status, 409) << attention << ": " << told.error;
    EXPECT_NE(told.error.find("cannot be used"), std::string::npos) << told.error;
  }
  EXPECT_EQ(ask("d1", other).status, 200);
}

/// A method that would have had to see the text being read.
TEST(EngineBackend, ASpecThatCannotBeHadIsTheQuestionsFaultAndClosesNothing) {
  const test::ContextsFolder folder;
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path(), std::int64_t{1} << 34));
  ASSERT_EQ(test::store(backend, "book", lisbon(8)), "");
  const auto status = [&](const std::string& attention) {
    Crowd crowd(backend);
    try {
      crowd.ask("book", test::kQuestions[0], 4, attention);
    } catch (const ApiError& error) {
      return error.status;
    }
    return crowd.told().front().status;
  };
  EXPECT_EQ(status("h2o:window=64"), 400);  // when it is opened
  EXPECT_EQ(status("full"), 200);
  EXPECT_EQ(status("snapkv:window=64"), 400);
  EXPECT_TRUE(backend.context("book").in_memory);
}

}  // namespace
}  // namespace lode::serve
