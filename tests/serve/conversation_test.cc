// SPDX-License-Identifier: Apache-2.0
// Requests whose client goes at an awkward moment, over a backend that does nothing by itself.
#include "serve/conversation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serve/metrics.h"
#include "support/no_backend.h"

namespace lode::serve {
namespace {

using testing::ElementsAre;

/// Knows one document, which it finds in every text.
class StillBackend : public test::NoBackend {
 public:
  std::optional<Recognised> recognise(std::string_view, const std::string&) override {
    return Recognised{.context = "book", .begin = 0, .end = 1};
  }
  std::uint64_t ask(Question question, Listener listener) override {
    asked.push_back(std::move(question));
    listeners.push_back(std::move(listener));
    if (while_asked) while_asked();
    return asked.size();
  }
  void cancel(std::uint64_t id) override { cancelled.push_back(id); }

  std::vector<Question> asked;
  std::vector<Listener> listeners;
  std::vector<std::uint64_t> cancelled;
  std::function<void()> while_asked;
};

class StillReply : public HttpReply {
 public:
  void send(HttpResponse response) override { sent.push_back(response.status); }
  void begin(HttpResponse) override {}
  void write(std::string) override {}
  void finish() override {}
  void on_gone(std::function<void()> gone_) override { gone = std::move(gone_); }

  std::vector<int> sent;
  std::function<void()> gone;
};

class StillVoice : public Voice {
 public:
  Json whole(const std::vector<Answer>&, const Reuse&) override { return {}; }
  std::string opening(const Answer&) override { return {}; }
  std::string piece(std::size_t, std::string_view) override { return {}; }
  std::string thought(std::size_t, std::string_view) override { return {}; }
  std::string end_of(std::size_t, const Answer&, const Reuse&) override { return {}; }
  std::string closing(const std::vector<Answer>&) override { return {}; }
  std::string failure(const ApiError&) override { return {}; }
};

struct Asked {
  StillBackend backend;
  Metrics metrics;
  std::shared_ptr<StillReply> reply = std::make_shared<StillReply>();

  Asked() {
    const Call call = {.request = std::make_shared<HttpRequest>(), .reply = reply, .name = {}};
    Conversation conversation;
    conversation.question.turns = {{"user", "a text and a question"}};
    converse(backend, metrics, call, std::move(conversation), std::make_unique<StillVoice>());
  }
};

const ApiError kDamaged(409, "the context 'book' cannot be used: it is damaged", "context_failed");

TEST(Conversation, WhatWasRecognisedInVainIsAskedAsItCame) {
  Asked asked;
  EXPECT_EQ(asked.backend.asked.at(0).context, "book");
  asked.backend.listeners[0].on_failure(kDamaged);
  ASSERT_EQ(asked.backend.asked.size(), 2u);
  EXPECT_EQ(asked.backend.asked[1].context, "");
  EXPECT_EQ(asked.backend.asked[1].turns.front().text, "a text and a question");
  EXPECT_THAT(asked.reply->sent, ElementsAre());
}

TEST(Conversation, NothingIsAskedAnewForAClientThatHasGone) {
  Asked asked;
  asked.reply->gone();
  EXPECT_THAT(asked.backend.cancelled, ElementsAre(1));
  asked.backend.listeners[0].on_failure(kDamaged);
  EXPECT_EQ(asked.backend.asked.size(), 1u);
}

/// The question's number is not known yet when its client goes.
TEST(Conversation, AClientThatGoesWhileItIsAskedAnewCancelsThat) {
  Asked asked;
  asked.backend.while_asked = [&] { asked.reply->gone(); };
  asked.backend.listeners[0].on_failure(kDamaged);
  EXPECT_EQ(asked.backend.asked.size(), 2u);
  EXPECT_THAT(asked.backend.cancelled, ElementsAre(1, 2));
}

}  // namespace
}  // namespace lode::serve
