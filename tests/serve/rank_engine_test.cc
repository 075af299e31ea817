// SPDX-License-Identifier: Apache-2.0
// A server over several ranks, which are threads here.
#include "serve/engine/rank_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <functional>
#include <new>

#include "cluster/local_ranks.h"
#include "lodestone/error.h"
#include "serve/engine/engine_backend.h"
#include "support/asking.h"
#include "support/served.h"

namespace lode::serve {
namespace {

using test::Crowd, test::lisbon, test::pocket, test::Told;

const std::vector<std::string> kNames = {"d0", "d1", "d2"};

EngineOptions options_for(const std::filesystem::path& folder) {
  EngineOptions options;
  options.library.folder = folder;
  options.library.kv_type = DType::f32;
  options.library.memory = std::int64_t{1} << 34;
  options.question_template = "{question}";
  return options;
}

/// A rank that fails where it sends its `failing`th larger message; 0: it does not.
class Failing : public Communicator {
 public:
  Failing(Communicator& inner, std::atomic<int>& failing, std::exception_ptr failure)
      : inner_(inner), failing_(failing), failure_(std::move(failure)) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void fail(const std::string& reason) noexcept override { inner_.fail(reason); }
  void expect_alive() override { inner_.expect_alive(); }

 private:
  void transfer(std::span<const std::span<const std::byte>> out,
                std::span<const std::span<std::byte>> in) override {
    std::size_t most = 0;
    for (const auto& message : out) most = std::max(most, message.size());
    if (most > 64 && failing_ > 0 && --failing_ == 0) std::rethrow_exception(failure_);
    inner_.exchange(out, in);
  }
  void drop_messages() override { inner_.abandon(); }

  Communicator& inner_;
  std::atomic<int>& failing_;
  const std::exception_ptr failure_;
};

/// Rank 0's backend, while the others follow it. `failing` and `failure` are rank 1's.
void serve_over(int size, const std::filesystem::path& folder,
                const std::function<void(EngineBackend&)>& body, std::atomic<int>* failing = nullptr,
                const std::exception_ptr& failure = std::make_exception_ptr(std::bad_alloc())) {
  std::atomic<int> never = 0;
  run_local_ranks(size, [&](Communicator& inner) {
    Failing ranks(inner, failing != nullptr && inner.rank() == 1 ? *failing : never, failure);
    EngineOptions options = options_for(folder);
    options.ranks = &ranks;
    const RankEngine::Models models = {{"pocket", pocket()}};
    if (ranks.rank() > 0)
      return RankEngine(ranks, models, options.scheduler, options.question_template).follow();
    EngineBackend backend(models, options);
    body(backend);
  });
}

void store_all(Backend& backend) {
  for (std::size_t i = 0; i < kNames.size(); ++i)
    EXPECT_EQ(test::store(backend, kNames[i], lisbon(18 + static_cast<int>(i))), "");
}

/// Answers about all documents at once, by two methods each.
std::vector<std::string> ask_all(Backend& backend) {
  Crowd crowd(backend);
  for (const std::string& name : kNames)
    for (const char* const spec : {"full", "kmeans"})
      for (const std::string& question : test::kQuestions) crowd.ask(name, question, 8, spec);
  std::vector<std::string> texts;
  for (const Told& told : crowd.told()) {
    EXPECT_EQ(told.status, 200) << told.error;
    texts.push_back(told.answer.text);
  }
  return texts;
}

std::vector<std::string> answers_of_one_process() {
  const test::ContextsFolder folder;
  EngineBackend backend({{"pocket", pocket()}}, options_for(folder.path()));
  store_all(backend);
  return ask_all(backend);
}

TEST(RankEngine, AnswersAreThoseOfOneProcessWhateverNumberOfRanksReadTheTexts) {
  const std::vector<std::string> expected = answers_of_one_process();
  const test::ContextsFolder folder;
  serve_over(3, folder.path(), [&](EngineBackend& backend) {
    store_all(backend);
    EXPECT_EQ(ask_all(backend), expected);
  });
  for (const int size : {2, 4})
    serve_over(size, folder.path(), [&](EngineBackend& backend) {
      for (const ContextInfo& info : backend.contexts())
        EXPECT_EQ(info.state, ContextState::ready) << info.error;
      EXPECT_EQ(ask_all(backend), expected) << size;
    });
}

TEST(RankEngine, QuestionsComeAndGoWhileATextIsRead) {
  const test::ContextsFolder folder;
  serve_over(2, folder.path(), [&](EngineBackend& backend) {
    store_all(backend);
    const std::vector<std::string> expected = ask_all(backend);
    NewContext long_text;
    long_text.name = "long";
    long_text.text = test::lisbon_text(0, 200);
    backend.create(long_text);
    Crowd others(backend);
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < 6; ++i)
      ids.push_back(others.ask(kNames[static_cast<std::size_t>(i % 3)], test::kQuestions[1], 400));
    for (const std::uint64_t id : ids) backend.cancel(id);
    EXPECT_EQ(ask_all(backend), expected);
    for (const Told& told : others.told()) EXPECT_EQ(told.answer.ending, "cancelled") << told.error;
    backend.remove("long");  // read or not
    EXPECT_EQ(backend.contexts().size(), kNames.size());
    EXPECT_EQ(test::store(backend, "again", lisbon(20)), "");
  });
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder.path()))
    files += file.path().filename().string().starts_with("long") ? 1 : 0;
  EXPECT_EQ(files, 0);
}

TEST(RankEngine, WhatRanksCannotDoIsSaidAndTheyGoOn) {
  const test::ContextsFolder folder;
  serve_over(2, folder.path(), [&](EngineBackend& backend) {
    NewContext wanted;
    wanted.name = "text";
    wanted.text = lisbon(20);
    wanted.attentions = {"auto"};
    EXPECT_THROW(backend.create(wanted), ApiError);
    wanted.attentions = {"quest"};
    backend.create(wanted);
    while (backend.context("text").state == ContextState::reading)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_THAT(backend.context("text").error, testing::HasSubstr("index the text on one machine"));
    EXPECT_EQ(test::store(backend, "text", lisbon(20)), "");
    Crowd crowd(backend);
    crowd.ask("text", test::kQuestions[0], 4, "h2o");
    crowd.ask("text", test::kQuestions[0], 4, "quest");  // every rank runs the whole selection
    crowd.ask("text", test::kQuestions[0], 4);
    const std::vector<Told> told = crowd.told();
    EXPECT_EQ(told[0].status, 400);
    EXPECT_THAT(told[0].error, testing::HasSubstr("learns from the prefill itself"));
    EXPECT_EQ(told[1].status, 200) << told[1].error;
    EXPECT_EQ(told[2].status, 200) << told[2].error;
  });
}

/// Each rank looks at its own rows: one alone finds them damaged.
TEST(RankEngine, WhatOneRankFindsWrongIsWrongForAllAndTheyGoOn) {
  const test::ContextsFolder folder;
  serve_over(2, folder.path(), store_all);
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
    const std::string name = file.path().filename().string();
    if (!name.starts_with("d0.lode.") || !name.ends_with("-2of2")) continue;
    std::fstream shard(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    shard.seekp(static_cast<std::streamoff>(std::filesystem::file_size(file.path()) / 2));
    shard.write("damaged!", 8);
  }
  serve_over(2, folder.path(), [&](EngineBackend& backend) {
    Crowd crowd(backend);
    for (const std::string& name : kNames) crowd.ask(name, test::kQuestions[0], 4);
    const std::vector<Told> told = crowd.told();
    EXPECT_EQ(told[0].status, 409);
    EXPECT_THAT(told[0].error, testing::HasSubstr("rank 1: "));
    EXPECT_EQ(told[1].status, 200) << told[1].error;
    EXPECT_EQ(told[2].status, 200) << told[2].error;
  });
}

TEST(RankEngine, AStepThatFailsOnOneRankFailsOnAllAndTheyGoOn) {
  const test::ContextsFolder folder;
  std::atomic<int> failing = 0;
  serve_over(
      2, folder.path(),
      [&](EngineBackend& backend) {
        store_all(backend);
        const std::vector<std::string> expected = ask_all(backend);
        for (const int at : {1, 3, 9}) {
          failing = at;
          Crowd crowd(backend);
          crowd.ask("d0", test::kQuestions[0], 8, "full");
          const Told told = crowd.told().front();
          EXPECT_EQ(told.status, 500);
          EXPECT_THAT(told.error, testing::HasSubstr("out of memory"));
        }
        EXPECT_EQ(ask_all(backend), expected);
        EXPECT_EQ(backend.failure(), "");
      },
      &failing);
}

TEST(RankEngine, AReadingAndAnOpeningThatAreInterruptedSayWhoEndsTheRanks) {
  const test::ContextsFolder folder;
  const auto reason = testing::HasSubstr("is ending all ranks");
  std::atomic<int> failing = 0;
  serve_over(2, folder.path(),
             [](EngineBackend& backend) { EXPECT_EQ(test::store(backend, "d0", lisbon(18)), ""); });
  serve_over(
      2, folder.path(),
      [&](EngineBackend& backend) {
        failing = 1;
        Crowd crowd(backend);
        crowd.ask("d0", test::kQuestions[0], 8);
        const Told told = crowd.told().front();
        EXPECT_EQ(told.status, 503);
        EXPECT_THAT(told.error, reason);
        failing = 1;
        EXPECT_THAT(test::store(backend, "more", lisbon(18)), reason);
      },
      &failing, std::make_exception_ptr(Interrupted()));
}

TEST(RankEngine, WhenARankIsLostAllQuestionsEndWithTheReason) {
  const test::ContextsFolder folder;
  std::promise<void> asked;
  std::vector<Told> told;
  EXPECT_THROW(run_local_ranks(2,
                               [&](Communicator& ranks) {
                                 EngineOptions options = options_for(folder.path());
                                 options.ranks = &ranks;
                                 const RankEngine::Models models = {{"pocket", pocket()}};
                                 if (ranks.rank() > 0) {
                                   RankEngine engine(ranks, models, options.scheduler, "{question}");
                                   std::thread loses([&] {
                                     asked.get_future().wait();
                                     ranks.fail("the machine burns");
                                   });
                                   try {
                                     engine.follow();
                                   } catch (const RankLost&) {
                                     loses.join();
                                     throw;
                                   }
                                   loses.join();
                                   return;
                                 }
                                 EngineBackend backend(models, options);
                                 EXPECT_EQ(test::store(backend, "text", lisbon(20)), "");
                                 Crowd first(backend), crowd(backend);
                                 first.ask("text", test::kQuestions[1], 4);
                                 EXPECT_EQ(first.told().front().status, 200);
                                 const std::string lengthy = test::lisbon_text(0, 100) + test::kQuestions[1];
                                 for (int i = 0; i < 4; ++i) crowd.ask("text", lengthy, 400);
                                 asked.set_value();
                                 told = crowd.told();
                                 while (backend.failure().empty()) std::this_thread::yield();
                                 EXPECT_THAT(backend.failure(), testing::HasSubstr("the machine burns"));
                                 EXPECT_THROW(crowd.ask("text", test::kQuestions[1], 4), ApiError);
                               }),
               RankLost);
  ASSERT_EQ(told.size(), 4);
  for (const Told& one : told) {
    EXPECT_EQ(one.status, 503);
    EXPECT_THAT(one.error, testing::HasSubstr("the machine burns"));
  }
}

}  // namespace
}  // namespace lode::serve
