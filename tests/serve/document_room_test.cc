// SPDX-License-Identifier: Apache-2.0
// The rule by which documents are let into memory: never more than is counted, nobody starves, nothing is lost.
#include "serve/engine/document_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/rng.h"
#include "serve/engine/gpu_shares.h"

namespace lode::serve {
namespace {

using Key = DocumentRoom::Key;

/// A server in simulated time: documents of various sizes, questions that take a while, openings that do, too.
class Server {
 public:
  struct Question {
    Key document = 0;
    double asked = 0, takes = 0, began = -1, ends = -1;
    bool cancelled = false;
  };
  Server(std::int64_t bytes, std::vector<std::int64_t> sizes, double opening)
      : room(bytes), sizes_(std::move(sizes)), opening_(opening) {}

  std::size_t ask(Key document, double takes) {
    questions.push_back({.document = document, .asked = now, .takes = takes});
    if (room.enter(document))
      begin(questions.back());
    else
      wait(questions.size() - 1);
    return questions.size() - 1;
  }
  void cancel(std::size_t i) {
    Question& question = questions[i];
    if (question.ends >= 0) return;
    question.cancelled = true;
    if (question.began >= 0) return end(question);
    question.ends = now;
    auto& waiters = waiting_[question.document];
    std::erase(waiters, i);
    if (waiters.empty()) room.leave(question.document);
  }
  /// A tenth of a second.
  void tick() {
    now += 0.1;
    for (Question& question : questions)
      if (question.began >= 0 && question.ends < 0 && now - question.began >= question.takes) end(question);
    for (auto it = opening_until_.begin(); it != opening_until_.end();) {
      if (now < it->second) {
        ++it;
        continue;
      }
      if (fails > 0) {
        --fails;
        const std::int64_t counted = room.closed(it->first);
        if (!waiting_[it->first].empty())
          room.wait_in_front(it->first, std::min(room.bytes(), counted + counted / 4 + 1), now);
      } else {
        room.opened(it->first, sizes_[it->first], now);
        let_in(it->first);
      }
      it = opening_until_.erase(it);
    }
    for (bool more = true; more;) {
      const std::vector<Key> close = room.to_close(now);
      for (const Key key : close) EXPECT_FALSE(room.in_use(key));
      for (const Key key : close) room.closed(key), ++closings;
      more = !close.empty();
      if (more) continue;
      if (const auto next = room.to_open(now)) {
        more = true;
        room.open(*next) ? let_in(*next) : static_cast<void>(opening_until_[*next] = now + opening_);
        openings += room.open(*next) ? 0 : 1;
      }
    }
    EXPECT_LE(room.used(), room.bytes());
    EXPECT_GE(room.used(), 0);
  }
  bool all_ended() const {
    return std::ranges::all_of(questions, [](const Question& q) { return q.ends >= 0; });
  }

  DocumentRoom room;
  std::vector<Question> questions;
  double now = 0;
  int openings = 0, closings = 0, fails = 0;

 private:
  void begin(Question& question) { question.began = now; }
  void end(Question& question) {
    question.ends = now;
    room.end_use(question.document);
  }
  void wait(std::size_t i) {
    const Key document = questions[i].document;
    waiting_[document].push_back(i);
    room.wait(document, sizes_[document], now);
  }
  void let_in(Key document) {
    std::vector<std::size_t> left;
    for (const std::size_t i : waiting_[document])
      room.enter(document) ? begin(questions[i]) : static_cast<void>(left.push_back(i));
    waiting_[document] = left;
    left.empty() ? room.leave(document) : room.wait(document, sizes_[document], now);
  }

  std::vector<std::int64_t> sizes_;
  double opening_;
  std::map<Key, std::vector<std::size_t>> waiting_;
  std::map<Key, double> opening_until_;
};

/// Whatever comes, in whatever order: counted room is never exceeded, every question ends, and when all have, nothing
/// waits and nothing is in use.
TEST(DocumentRoom, HoldsNoMoreThanItsRoomAndForgetsNobody) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    const std::int64_t bytes = 100;
    std::vector<std::int64_t> sizes;
    for (std::uint64_t i = 0, n = 1 + rng.below(9); i < n; ++i)
      sizes.push_back(1 + static_cast<std::int64_t>(rng.below(rng.below(4) == 0 ? 100 : 45)));
    Server server(bytes, sizes, 0.1 * static_cast<double>(rng.below(30)));
    server.fails = static_cast<int>(rng.below(5));
    for (int step = 0; step < 400; ++step) {
      for (std::uint64_t n = rng.below(3); n > 0; --n)
        server.ask(rng.below(sizes.size()), 0.1 * static_cast<double>(1 + rng.below(60)));
      if (!server.questions.empty() && rng.below(4) == 0) server.cancel(rng.below(server.questions.size()));
      if (rng.below(50) == 0) server.room.retire(rng.below(sizes.size()));
      server.tick();
    }
    for (int step = 0; step < 5000 && !server.all_ended(); ++step) server.tick();
    ASSERT_TRUE(server.all_ended()) << seed;
    EXPECT_EQ(server.room.waiting(), 0u) << seed;
    for (Key key = 0; key < sizes.size(); ++key) EXPECT_FALSE(server.room.in_use(key)) << seed;
  }
}

/// Streams of questions that never pause keep some documents in use for ever; the others have their turn all the same,
/// within a time that does not grow with how long the streams have run.
TEST(DocumentRoom, NoQuestionStarvesBesideStreamsThatNeverPause) {
  constexpr std::size_t kDocuments = 8;
  Server server(5, std::vector<std::int64_t>(kDocuments, 1), 1.0);
  std::vector<std::size_t> last(kDocuments, 0);
  for (int step = 0; step < 6000; ++step) {
    for (Key key = 0; key < kDocuments; ++key) {
      // Three times as many questions about the first five as would keep them in use.
      if (step % (key < 5 ? 10 : 100) == 0) last[key] = server.ask(key, 3.0);
    }
    server.tick();
  }
  for (int step = 0; step < 5000 && !server.all_ended(); ++step) server.tick();
  ASSERT_TRUE(server.all_ended());
  double longest = 0;
  for (const Server::Question& question : server.questions)
    longest = std::max(longest, question.began - question.asked);
  // In front of it wait at most seven documents, each for a turn (2 s), the end of what runs (3 s) and an opening.
  EXPECT_LT(longest, 7 * (2 + 3 + 1.5));
}

/// Documents that all fit are never closed, whoever asks.
TEST(DocumentRoom, ClosesNothingThatNobodyNeedsTheRoomOf) {
  Server server(8, std::vector<std::int64_t>(8, 1), 0.5);
  Rng rng(3);
  for (int step = 0; step < 1000; ++step) {
    if (step % 3 == 0) server.ask(rng.below(8), 1.0);
    server.tick();
  }
  EXPECT_EQ(server.openings, 8);
  EXPECT_EQ(server.closings, 0);
}

TEST(DocumentRoom, ClosesTheLeastRecentlyUsedFirst) {
  Server server(3, {1, 1, 1, 1}, 0.1);
  for (const Key key : {0, 1, 2, 0}) {
    server.ask(key, 0.1);
    for (int i = 0; i < 5; ++i) server.tick();
  }
  server.ask(3, 0.1);
  for (int i = 0; i < 5; ++i) server.tick();
  EXPECT_TRUE(server.room.open(0));
  EXPECT_FALSE(server.room.open(1));
  EXPECT_TRUE(server.room.open(2));
}

/// A turn ends questions about a document for new ones alone.
TEST(DocumentRoom, QuestionsUnderWayEndInPeace) {
  Server server(1, {1, 1}, 0.1);
  const std::size_t first = server.ask(0, 30.0);
  for (int i = 0; i < 50; ++i) server.tick();
  const std::size_t second = server.ask(1, 1.0);
  for (int i = 0; i < 50; ++i) server.tick();
  const std::size_t third = server.ask(0, 1.0);  // behind the second: its document has had its turn
  for (int i = 0; i < 400; ++i) server.tick();
  EXPECT_NEAR(server.questions[first].ends - server.questions[first].began, 30.0, 0.2);
  EXPECT_GE(server.questions[second].began, server.questions[first].ends);
  EXPECT_GE(server.questions[third].began, server.questions[second].ends);
}

TEST(GpuShares, AreNeverMoreThanThereIs) {
  Rng rng(1);
  for (int i = 0; i < 10000; ++i) {
    const auto below = [&](int bits) {
      return static_cast<std::int64_t>(rng.below(std::uint64_t{1} << bits));
    };
    const std::int64_t free = below(38), steps = below(33), models = 1 + below(2), wanted = below(38);
    const GpuShares shares = share_gpu(free, steps, models, wanted);
    EXPECT_GE(shares.documents, 0);
    EXPECT_GE(shares.questions, 0);
    EXPECT_LE(shares.documents + models * shares.questions + shares.reserve, std::max<std::int64_t>(free, 0));
    if (wanted > 0) {
      EXPECT_LE(shares.documents, wanted);
    }
    if (free > steps + shares.reserve) {
      EXPECT_LE(shares.documents + models * shares.questions + shares.reserve + steps, free);
    }
  }
}

}  // namespace
}  // namespace lode::serve
