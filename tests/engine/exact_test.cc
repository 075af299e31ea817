// SPDX-License-Identifier: Apache-2.0
// Exact answers: drafted under a method, verified by full attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "engine/draft.h"
#include "engine/running_answer.h"
#include "model/sampler.h"
#include "support/asking.h"

namespace lode {
namespace {

using test::ask, test::kMethods, test::kQuestions, test::lisbon, test::pocket, test::read, test::tokens_of;

Answer answer(Request request) {
  Scheduler scheduler(pocket(), {.max_sequences = 1});
  return scheduler.submit(std::move(request)).result.get();
}

Answer full_answer(Request request) {
  request.attention = parse_spec("full");
  request.exact = false;
  return answer(std::move(request));
}

Request ask_exactly(const std::shared_ptr<const Document>& document, const Spec& spec, std::size_t question,
                    std::int64_t tokens) {
  Request request = ask(document, spec, question, tokens);
  request.exact = true;
  return request;
}

const std::shared_ptr<const Document>& all_methods() {
  static const auto document = read(pocket(), lisbon(20), kMethods);
  return document;
}

TEST(Exact, TokensAreThoseOfFullUnderEveryMethod) {
  const auto& document = all_methods();
  ExactWork all;
  Scheduler scheduler(pocket(), {.max_sequences = 16});  // company changes no bit
  for (std::size_t q = 0; q < kQuestions.size(); ++q) {
    const auto expected = full_answer(ask(document, parse_spec("full"), q, 40));
    std::vector<Ticket<Answer>> tickets;
    for (const Spec& spec : document->methods())
      tickets.push_back(scheduler.submit(ask_exactly(document, spec, q, 40)));
    for (std::size_t m = 0; m < tickets.size(); ++m) {
      const Spec& spec = document->methods()[m];
      const Answer exact = tickets[m].result.get();
      EXPECT_EQ(exact.generation.tokens, expected.generation.tokens) << spec.str() << " question " << q;
      EXPECT_EQ(exact.ending, expected.ending);
      EXPECT_EQ(exact.exact.dense_steps + exact.exact.accepted + 1, 40) << spec.str();
      EXPECT_DOUBLE_EQ(exact.generation.work.density(), 1.0) << spec.str();
      all.drafted += exact.exact.drafted;
      all.accepted += exact.exact.accepted;
    }
  }
  EXPECT_GT(all.accepted_share(), 0.5);
  EXPECT_LT(all.accepted_share(), 1.0);  // else the test shows nothing
}

TEST(Exact, EndsWhereFullEnds) {
  const auto& document = all_methods();
  const Spec full = parse_spec("full");
  for (const char* const name : {"kmeans:probes=4,window=64", "h2o:window=64"}) {
    const Spec spec = parse_spec(name);
    const Answer whole = full_answer(ask(document, full, 1, 40));
    for (std::int64_t tokens = 0; tokens < 18; ++tokens) {
      const auto exact = answer(ask_exactly(document, spec, 1, tokens)).generation.tokens;
      EXPECT_EQ(std::ssize(exact), tokens);
      EXPECT_TRUE(std::equal(exact.begin(), exact.end(), whole.generation.tokens.begin())) << name;
    }
    // Every piece of the answer as a stop string, and its tokens as the text's end.
    for (std::size_t at = 1; at + 3 < whole.generation.text.size(); at += 11) {
      Request request = ask_exactly(document, spec, 1, 40);
      request.options.stop = {whole.generation.text.substr(at, 3)};
      request.options.stop_at_eos = true;
      std::string streamed;
      request.options.on_text = [&](std::string_view text) { streamed += text; };
      const Answer exact = answer(request);
      request.options.on_text = {};
      const Answer expected = full_answer(request);
      EXPECT_EQ(exact.generation.tokens, expected.generation.tokens) << name << " " << at;
      EXPECT_EQ(exact.generation.text, expected.generation.text);
      EXPECT_EQ(streamed, expected.generation.text);
      EXPECT_EQ(exact.ending, expected.ending);
      EXPECT_EQ(exact.generation.stopped, expected.generation.stopped);
    }
  }
}

TEST(Exact, EndsWithTheContextsRoom) {
  const std::string text = lisbon(20);
  const auto tokens = tokens_of(text, Tokenizer::Bos::as_template);
  const Spec spec = parse_spec("streaming:window=64");
  for (int room = 0; room < 12; ++room) {
    const std::int64_t most = std::ssize(tokens) + std::ssize(tokens_of(kQuestions[1])) + room;
    const auto document = Document::read(pocket(), tokens, text, {.specs = {spec}, .max_tokens = most});
    const Answer exact = answer(ask_exactly(document, spec, 1, 40)),
                 expected = full_answer(ask(document, spec, 1, 40));
    EXPECT_EQ(exact.generation.tokens, expected.generation.tokens) << room;
    EXPECT_EQ(exact.ending, Ending::room);
    EXPECT_EQ(expected.ending, Ending::room);
  }
}

TEST(Exact, SourcesAreThoseOfFull) {
  const auto& document = all_methods();
  for (const char* const name : {"kmeans:probes=4,window=64", "streaming:window=64"}) {
    Request request = ask_exactly(document, parse_spec(name), 0, 20);
    request.want_sources = true;
    const Answer exact = answer(request), expected = full_answer(request);
    EXPECT_EQ(exact.generation.tokens, expected.generation.tokens);
    EXPECT_EQ(exact.sources.mass, expected.sources.mass) << name;
  }
}

/// Beside others, which are as they are without it, and while some are cancelled.
TEST(Exact, NeitherIsChangedByCompany) {
  const auto& document = all_methods();
  std::vector<Request> requests;
  std::vector<std::vector<TokenId>> expected;
  for (std::size_t i = 0; i < kMethods.size(); ++i) {
    requests.push_back(ask(document, document->methods()[i], i, 25));
    requests.back().exact = i % 2 == 0;
    expected.push_back(answer(requests.back()).generation.tokens);
  }
  Scheduler together(pocket(), {.max_sequences = 16});
  std::vector<Ticket<Answer>> tickets, cancelled;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    cancelled.push_back(together.submit(ask_exactly(document, requests[i].attention, i + 1, 200)));
    tickets.push_back(together.submit(requests[i]));
  }
  for (const auto& ticket : cancelled) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    together.cancel(ticket.id);
  }
  for (std::size_t i = 0; i < requests.size(); ++i)
    EXPECT_EQ(tickets[i].result.get().generation.tokens, expected[i]) << requests[i].attention.str();
  for (std::size_t i = 0; i < cancelled.size(); ++i) {
    const Answer begun = cancelled[i].result.get();
    const auto whole = full_answer(ask(document, parse_spec("full"), i + 1, 200)).generation.tokens;
    const auto& tokens = begun.generation.tokens;
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), whole.begin())) << i;
    if (i == 1) break;  // 200 tokens of full attention each
  }
  EXPECT_EQ(together.stats().memory_used, 0);
}

TEST(Exact, DraftsNothingWhereNothingIsLeftOut) {
  const auto document = read(pocket(), lisbon(20), {"kmeans"});  // its window holds the text
  const Answer exact = answer(ask_exactly(document, document->methods()[0], 0, 20));
  EXPECT_LE(exact.exact.drafted, 1);
  EXPECT_EQ(answer(ask_exactly(document, parse_spec("full"), 0, 20)).exact.dense_steps, 0);
}

/// Whether counts of outcomes are as expected: Pearson's chi-square over those expected five times or more, the
/// others together, lies below 99.99 % of chi-squares (Wilson and Hilferty's approximation).
void expect_distribution(const std::map<std::vector<TokenId>, double>& expected,
                         const std::map<std::vector<TokenId>, double>& found, int outcomes) {
  double sum = 0, rest_expected = 0, rest_found = 0;
  int count = 0;
  const auto add = [&](double e, double f) { sum += (f - e) * (f - e) / e, ++count; };
  for (const auto& [outcome, times] : found)
    if (!expected.contains(outcome)) rest_found += times;
  for (const auto& [outcome, times] : expected) {
    const auto it = found.find(outcome);
    const double f = it == found.end() ? 0 : it->second;
    if (times >= 5)
      add(times, f);
    else
      rest_expected += times, rest_found += f;
  }
  if (rest_expected >= 5) add(rest_expected, rest_found);
  EXPECT_GE(count, outcomes);
  const double degrees = count - 1, a = 2 / (9 * degrees);
  EXPECT_LT(sum, degrees * std::pow(1 - a + 3.719 * std::sqrt(a), 3)) << "of " << count << " outcomes";
}

TEST(Sampler, CorrectedTokensAreDistributedAsWanted) {
  constexpr int kDraws = 200000;
  const std::vector<float> drafted = {0.0f, 2.0f, -1.0f, 0.5f, 1.0f},
                           wanted = {1.0f, 0.3f, -0.5f, 2.0f, -3.0f};
  for (const Sampling& options :
       {Sampling{.temperature = 1.0, .seed = 1}, Sampling{.temperature = 0.7, .seed = 2},
        Sampling{.temperature = 1.3, .top_k = 3, .seed = 3},
        Sampling{.temperature = 1.0, .top_p = 0.8, .seed = 4}}) {
    Sampler sampler(options);
    const TokenProbabilities q = sampler.probabilities(drafted), p = sampler.probabilities(wanted);
    std::map<std::vector<TokenId>, double> expected, found, plain;
    for (const TokenProbability& one : p) expected[{one.token}] = one.probability * kDraws;
    for (int i = 0; i < kDraws; ++i) {
      ++found[{sampler.correct(sampler.draw(q), q, p)}];
      ++plain[{sampler.next(wanted)}];
    }
    expect_distribution(expected, found, static_cast<int>(p.size()));
    expect_distribution(expected, plain, static_cast<int>(p.size()));
  }
}

/// The first tokens of sampled answers, with drafts of which many are refused, beside their probabilities under full
/// attention.
TEST(Exact, SampledAnswersAreDistributedAsFulls) {
  constexpr int kAnswers = 600;
  const auto& document = all_methods();
  const Spec spec = parse_spec("streaming:window=64");
  Request request = ask_exactly(document, spec, 1, 4);
  request.options.sampling = {.temperature = 3, .top_k = 3};
  // The probability of each answer, by full attention over every continuation.
  std::map<std::vector<TokenId>, double> expected, found;
  const std::function<void(std::vector<TokenId>, double)> follow = [&](std::vector<TokenId> begun,
                                                                       double weight) {
    if (begun.size() == 3) {
      expected[begun] += weight * kAnswers;
      return;
    }
    BatchRunner runner(pocket());
    Sequence sequence(document, parse_spec("full"), 256);
    std::vector<BatchRow> rows = {
        {.sequence = &sequence, .tokens = request.prompt, .phase = Phase::question, .sparse = false}};
    runner.run(rows);
    for (const TokenId& token : begun) {
      rows = {{.sequence = &sequence, .tokens = {&token, 1}}};
      runner.run(rows);
    }
    Sampler sampler(request.options.sampling);
    for (const auto& [token, p] : sampler.probabilities(token_logits(*pocket(), rows[0].logits))) {
      std::vector<TokenId> next = begun;
      next.push_back(token);
      follow(std::move(next), weight * p);
    }
  };
  follow({}, 1.0);
  request.read = read_prompt(document, request.prompt);
  Scheduler scheduler(pocket(), {.max_sequences = 16});
  std::vector<Ticket<Answer>> tickets;
  ExactWork work;
  const auto take = [&](const Ticket<Answer>& ticket) {
    const Answer one = ticket.result.get();
    work.drafted += one.exact.drafted;
    work.accepted += one.exact.accepted;
    const auto& tokens = one.generation.tokens;
    ++found[std::vector<TokenId>(tokens.begin(), tokens.begin() + 3)];
  };
  for (int i = 0; i < kAnswers; ++i) {
    request.options.sampling.seed = static_cast<std::uint64_t>(i);
    tickets.push_back(scheduler.submit(request));
    if (tickets.size() == 16) {
      for (const auto& ticket : tickets) take(ticket);
      tickets.clear();
    }
  }
  for (const auto& ticket : tickets) take(ticket);
  expect_distribution(expected, found, 6);
  EXPECT_LT(work.accepted_share(), 0.95);
  EXPECT_GT(work.accepted_share(), 0.2);
}

TEST(Draft, ItsLengthFollowsWhatIsAccepted) {
  DraftLength length;
  EXPECT_EQ(length.next(), 4);
  for (int i = 0; i < 20; ++i) length.learn(length.next(), length.next());
  EXPECT_EQ(length.next(), DraftLength::kMost);
  for (int i = 0; i < 20; ++i) length.learn(0, length.next());
  EXPECT_EQ(length.next(), 1);
  for (int i = 0; i < 20; ++i) length.learn(std::min<std::int64_t>(length.next(), 3), length.next());
  EXPECT_GE(length.next(), 3);
}

}  // namespace
}  // namespace lode
