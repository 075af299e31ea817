// SPDX-License-Identifier: Apache-2.0
// What may go wrong while sequences are answered: each ends with a reason or as if nothing had happened, the others
// get the bits that they would have had, and engine and documents stay usable.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <new>
#include <thread>

#include "engine/running_answer.h"
#include "lodestone/error.h"
#include "lodestone/register_method.h"
#include "support/asking.h"
#include "support/everything.h"

namespace lode {
namespace {

using test::ask, test::lisbon, test::logits_alone, test::pocket, test::read;

/// Called by each choice of keys, in the middle of a step; the window tells methods apart.
std::function<void(std::int64_t window)> in_a_step;

class Trapped : public Everything {
 public:
  explicit Trapped(const LayerGeometry& geometry) : Everything(geometry), window_(geometry.dense.window) {}
  void select(std::span<const QueryBlock> blocks, Selection& out) override {
    if (in_a_step) in_a_step(window_);
    Everything::select(blocks, out);
  }

 private:
  std::int64_t window_;
};

constexpr std::int64_t kVictim = 64, kWitness = 65;
const std::vector<std::string> kTrapped = {"trapped:window=64", "trapped:window=65"};

/// A document that the trapped method is indexed for, and what its questions are answered by themselves.
class Hostile : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_method({.name = "trapped",
                     .source = "a test",
                     .make = [](const Spec&, const LayerGeometry& geometry, std::string_view) {
                       return std::make_unique<Trapped>(geometry);
                     }});
    document_ = read(pocket(), lisbon(20), kTrapped);
    Scheduler scheduler(pocket());
    for (const std::size_t which : {0, 1})
      expected_.push_back(scheduler.submit(question(which)).result.get().generation.tokens);
  }
  static void TearDownTestSuite() { document_.reset(); }
  void TearDown() override { in_a_step = nullptr; }

  /// The victim's (0), or the witness's.
  static Request question(std::size_t which) {
    return ask(document_, document_->methods()[which], which, kTokens);
  }
  static constexpr std::int64_t kTokens = 4;

  static inline std::shared_ptr<const Document> document_;
  static inline std::vector<std::vector<TokenId>> expected_;
};

/// As many choices of keys as the victim makes: one a layer for its prompt and for each token but the last.
int choices() {
  return pocket()->config().layers * 4;
}

TEST_F(Hostile, CancelledAtEveryPointOfAStep) {
  Scheduler scheduler(pocket());
  for (int point = 0; point < choices(); ++point) {
    std::promise<std::uint64_t> submitted;
    const std::shared_future<std::uint64_t> victim_id = submitted.get_future().share();
    std::atomic<int> made = 0;
    in_a_step = [&](std::int64_t window) {
      if (window == kVictim && made++ == point) scheduler.cancel(victim_id.get());
    };
    const auto victim = scheduler.submit(question(0)), witness = scheduler.submit(question(1));
    submitted.set_value(victim.id);
    const Answer ended = victim.result.get();
    EXPECT_TRUE(
        std::equal(ended.generation.tokens.begin(), ended.generation.tokens.end(), expected_[0].begin()))
        << point;
    EXPECT_TRUE(ended.ending == Ending::cancelled || ended.generation.tokens == expected_[0]) << point;
    EXPECT_EQ(witness.result.get().generation.tokens, expected_[1]) << point;
  }
  EXPECT_GT(scheduler.stats().cancelled, 0);
  EXPECT_EQ(scheduler.stats().memory_used, 0);
  in_a_step = nullptr;
  EXPECT_EQ(scheduler.submit(question(0)).result.get().generation.tokens, expected_[0]);
}

/// Logits of a question and three tokens behind it, step by step; fewer where a step ends with an error, which is one of
/// memory and leaves the sequence as it was.
struct Asked {
  Sequence sequence;
  std::vector<TokenId> prompt, answer = {300, 301, 302};
  std::vector<float> logits = {};
  bool ended = false;

  BatchRow row(std::size_t step) {
    if (step == 0) return {.sequence = &sequence, .tokens = prompt, .phase = Phase::question};
    return {.sequence = &sequence, .tokens = {&answer[step - 1], 1}};
  }
  void take(const BatchRow& row, std::int64_t tokens_before) {
    if (!row.error) {
      logits.insert(logits.end(), row.logits.begin(), row.logits.end());
      return;
    }
    ended = true;
    EXPECT_EQ(sequence.tokens(), tokens_before);
    try {
      std::rethrow_exception(row.error);
    } catch (const RunError& error) {
      EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos) << error.what();
    }
  }
};

/// Once: the step is run again, row by row, and nobody sees it. From then on: the victim ends with the reason.
TEST_F(Hostile, OutOfMemoryAtEveryPointOfAStep) {
  std::vector<std::vector<float>> alone;
  for (const std::size_t which : {0, 1})
    alone.push_back(logits_alone(pocket(), document_, document_->methods()[which], question(which).prompt,
                                 {300, 301, 302}));
  BatchRunner runner(pocket());
  for (const bool for_good : {false, true}) {
    for (int point = 0; point < choices(); ++point) {
      int made = 0;
      in_a_step = [&](std::int64_t window) {
        if (window != kVictim) return;
        const int at = made++;
        if (at == point || (for_good && at > point)) throw std::bad_alloc();
      };
      Asked victim = {{document_, document_->methods()[0], 256}, question(0).prompt},
            witness = {{document_, document_->methods()[1], 256}, question(1).prompt};
      for (std::size_t step = 0; step < 4; ++step) {
        std::vector<BatchRow> rows = {witness.row(step)};
        if (!victim.ended) rows.push_back(victim.row(step));
        const std::int64_t before = victim.sequence.tokens();
        runner.run(rows);
        witness.take(rows[0], 0);
        if (rows.size() == 2) victim.take(rows[1], before);
      }
      EXPECT_EQ(victim.ended, for_good) << point;
      EXPECT_EQ(witness.logits, alone[1]) << point;
      EXPECT_TRUE(std::equal(victim.logits.begin(), victim.logits.end(), alone[0].begin())) << point;
    }
  }
}

/// Whoever asks keeps the document: its owner may let go of it.
TEST_F(Hostile, ADocumentThatIsClosedWhileItIsAsked) {
  auto document = read(pocket(), lisbon(30), kTrapped);
  const std::weak_ptr<const Document> watched = document;
  Scheduler scheduler(pocket());
  Request request = ask(document, document->methods()[0], 0, 4);
  const auto expected = scheduler.submit(request).result.get().generation.tokens;
  std::promise<void> closed;
  const std::shared_future<void> is_closed = closed.get_future().share();
  in_a_step = [&](std::int64_t) { is_closed.wait(); };
  const auto ticket = scheduler.submit(std::move(request));
  document.reset();
  EXPECT_FALSE(watched.expired());
  closed.set_value();
  EXPECT_EQ(ticket.result.get().generation.tokens, expected);
  in_a_step = nullptr;
  scheduler.submit(question(0)).result.wait();  // behind the step that let go of it
  EXPECT_TRUE(watched.expired());
}

/// A file is replaced as a whole: who asks goes on with the one that it opened.
TEST_F(Hostile, AFileThatIsReplacedWhileItIsAsked) {
  const auto path = std::filesystem::temp_directory_path() / "lode-hostile-test.lode";
  document_->save(path);
  const auto opened = Document::open(path, pocket(), {.max_tokens = 16384});
  const auto other = read(pocket(), lisbon(30), kTrapped);
  Scheduler scheduler(pocket());
  std::atomic<bool> replaced = false;
  in_a_step = [&](std::int64_t) {
    if (!replaced.exchange(true)) other->save(path);
  };
  const auto answer = scheduler.submit(ask(opened, opened->methods()[0], 0, kTokens)).result.get();
  in_a_step = nullptr;
  EXPECT_TRUE(replaced);
  EXPECT_EQ(answer.generation.tokens, expected_[0]);
  EXPECT_EQ(Document::open(path, pocket(), {.max_tokens = 16384})->fingerprint(), other->fingerprint());
  std::filesystem::remove(path);
}

/// Room for two sequences: the others wait, and all are answered as by themselves. More than may wait are refused.
TEST_F(Hostile, MoreSequencesThanRoom) {
  const std::int64_t bytes = Sequence::bytes(*document_, RunningAnswer::room_of(question(0)));
  Scheduler scheduler(pocket(), {.max_queued = 5, .memory = 2 * bytes + bytes / 2});
  std::promise<void> all_submitted;
  const std::shared_future<void> are_submitted = all_submitted.get_future().share();
  std::atomic<int> most = 0;
  in_a_step = [&](std::int64_t) {
    are_submitted.wait();
    most = std::max<int>(most, scheduler.stats().running);
  };
  std::vector<Ticket<Answer>> tickets = {scheduler.submit(question(0))};
  while (scheduler.stats().running == 0) std::this_thread::yield();
  for (int i = 0; i < 5; ++i) tickets.push_back(scheduler.submit(question(0)));
  try {
    scheduler.submit(question(0));
    ADD_FAILURE();
  } catch (const RunError& error) {
    EXPECT_NE(std::string(error.what()).find("5 requests are waiting"), std::string::npos) << error.what();
  }
  all_submitted.set_value();
  for (const auto& ticket : tickets) EXPECT_EQ(ticket.result.get().generation.tokens, expected_[0]);
  EXPECT_EQ(most, 2);
  EXPECT_EQ(scheduler.stats().memory_used, 0);
}

}  // namespace
}  // namespace lode
