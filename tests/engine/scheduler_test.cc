// SPDX-License-Identifier: Apache-2.0
#include "lodestone/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/rng.h"
#include "engine/batch.h"
#include "engine/row_order.h"
#include "engine/running_answer.h"
#include "lodestone/error.h"
#include "support/asking.h"

namespace lode {
namespace {

using test::ask, test::kMethods, test::kQuestions, test::lisbon, test::load_pocket, test::logits_alone,
    test::pocket, test::read, test::specs_of, test::tokens_of;

TEST(Scheduler, FindsTheFactUnderEveryKindOfMethod) {
  Scheduler scheduler(pocket());
  const auto document = read(pocket(), lisbon(20), {"kmeans:window=255", "hash:window=255"});
  for (const char* const spec : {"full", "kmeans:window=255", "hash:window=255"}) {
    const auto answer = scheduler.submit(ask(document, parse_spec(spec), 0)).result.get();
    EXPECT_TRUE(answer.generation.text.starts_with(test::kLisbonAnswer))
        << spec << ": " << answer.generation.text;
    EXPECT_EQ(answer.ending, Ending::length);
    EXPECT_EQ(std::ssize(answer.generation.tokens), 12);
  }
  EXPECT_EQ(scheduler.stats().answered, 3);
  EXPECT_EQ(scheduler.stats().memory_used, 0);
}

/// The answers are those of a Context, which attends to one span of rows and slides its window.
TEST(Scheduler, AnswersAsAContextDoes) {
  Scheduler scheduler(pocket());
  const std::string text = lisbon(20);
  for (const char* const name : {"full", "kmeans:window=255", "h2o:window=64", "snapkv:window=64"}) {
    const Spec spec = parse_spec(name);
    const auto document = read(pocket(), text, {name}, DType::f32);
    Context context(pocket(), {.kv_type = DType::f32, .max_tokens = 8192});
    const MethodId method = context.attach(spec);
    context.prefill(tokens_of(text, Tokenizer::Bos::as_template));
    context.build_indexes();
    const Request request = ask(document, spec, 0);
    const Generation expected = context.generate(request.prompt, method, request.options);
    EXPECT_EQ(scheduler.submit(request).result.get().generation.tokens, expected.tokens) << name;
  }
}

/// Tokens and logits of every method: alone, among fifteen others of other methods, documents and lengths, while
/// some of those are cancelled, and on 1, 2 and 7 threads.
TEST(Scheduler, BitsDoNotDependOnCompany) {
  std::vector<std::vector<TokenId>> expected;
  std::vector<std::vector<float>> expected_logits;
  for (const int threads : {2, 1, 7}) {
    const auto model = load_pocket(threads);
    const std::vector documents = {read(model, lisbon(20), kMethods), read(model, lisbon(30), kMethods)};
    const Spec full = parse_spec("full");
    std::vector<Request> requests;
    for (std::size_t i = 0; i <= kMethods.size(); ++i)
      requests.push_back(ask(documents[i % 2], i == kMethods.size() ? full : parse_spec(kMethods[i]), i));
    if (expected.empty()) {
      Scheduler alone(model, {.max_sequences = 1});
      for (const Request& request : requests) {
        expected.push_back(alone.submit(request).result.get().generation.tokens);
        expected_logits.push_back(
            logits_alone(model, request.document, request.attention, request.prompt, expected.back()));
      }
    }
    Scheduler together(model, {.max_sequences = 16});
    std::vector<Ticket<Answer>> tickets, others;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      tickets.push_back(together.submit(requests[i]));
      others.push_back(
          together.submit(ask(documents[i % 2], i % 3 == 0 ? full : requests[i].attention, i + 1, 30)));
      if (i % 2 == 0) together.cancel(others[i / 2].id);
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(tickets[i].result.get().generation.tokens, expected[i])
          << requests[i].attention.str() << " on " << threads << " threads";
      const auto logits =
          logits_alone(model, requests[i].document, requests[i].attention, requests[i].prompt, expected[i]);
      EXPECT_EQ(logits, expected_logits[i]) << requests[i].attention.str() << " on " << threads << " threads";
    }
    for (const auto& ticket : others) ticket.result.wait();
  }
}

/// One step of many rows gives each the logits that it has alone.
TEST(Batch, LogitsDoNotDependOnCompany) {
  const std::vector<std::string> methods = {"kmeans:probes=4,window=64", "retrieval:k=32,window=64",
                                            "h2o:window=64", "quest:window=64"};
  for (const DType type : {DType::f32, DType::bf16, DType::q8, DType::q4}) {
    const auto document = read(pocket(), lisbon(20), methods, type),
               other = read(pocket(), lisbon(30), methods, type);
    std::vector<Spec> specs = specs_of(methods);
    for (int i = 0; i < 12; ++i) specs.push_back(parse_spec("full"));
    BatchRunner runner(pocket());
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<std::vector<TokenId>> prompts, given(specs.size());
    std::vector<std::vector<float>> logits(specs.size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      sequences.push_back(std::make_unique<Sequence>(i % 3 == 2 ? other : document, specs[i], 256));
      prompts.push_back(tokens_of(kQuestions[i % kQuestions.size()]));
      for (TokenId t = 0; t < 5; ++t) given[i].push_back(300 + t + static_cast<TokenId>(i));
    }
    std::vector<BatchRow> rows;
    const auto run = [&] {
      runner.run(rows);
      for (const BatchRow& row : rows) {
        ASSERT_FALSE(row.error);
        for (std::size_t i = 0; i < sequences.size(); ++i)
          if (sequences[i].get() == row.sequence)
            logits[i].insert(logits[i].end(), row.logits.begin(), row.logits.end());
      }
      rows.clear();
    };
    // Half of them read their questions while the others generate.
    for (int time = 0; time < 8; ++time) {
      for (std::size_t i = 0; i < specs.size(); ++i) {
        const int step = time - (i % 2 == 0 ? 0 : 2);
        if (step < 0 || step > 5) continue;
        if (step == 0)
          rows.push_back({.sequence = sequences[i].get(), .tokens = prompts[i], .phase = Phase::question});
        else
          rows.push_back(
              {.sequence = sequences[i].get(), .tokens = {&given[i][static_cast<std::size_t>(step - 1)], 1}});
      }
      run();
    }
    for (std::size_t i = 0; i < specs.size(); ++i)
      EXPECT_EQ(logits[i],
                logits_alone(pocket(), i % 3 == 2 ? other : document, specs[i], prompts[i], given[i]))
          << specs[i].str() << " " << i;
  }
}

/// Drafted tokens, which come several at once, have the logits of tokens that were generated one by one.
TEST(Batch, DraftedTokensAreNarrow) {
  const auto document = read(pocket(), lisbon(20), {});
  const Spec full = parse_spec("full");
  const auto prompt = tokens_of(kQuestions[0]);
  std::vector<TokenId> draft;
  for (TokenId t = 0; t < 20; ++t) draft.push_back(300 + t);
  const auto one_by_one = logits_alone(pocket(), document, full, prompt, draft);
  BatchRunner runner(pocket());
  Sequence sequence(document, full, 256);
  std::vector<BatchRow> rows = {{.sequence = &sequence, .tokens = prompt, .phase = Phase::question}};
  runner.run(rows);
  std::vector<float> together(rows[0].logits.begin(), rows[0].logits.end());
  rows = {{.sequence = &sequence, .tokens = draft, .rows = LogitRows::all}};
  runner.run(rows);
  together.insert(together.end(), rows[0].logits.begin(), rows[0].logits.end());
  EXPECT_EQ(together, one_by_one);
  sequence.roll_back(document->tokens() + std::ssize(prompt));
  rows = {{.sequence = &sequence, .tokens = {draft.data(), 1}}};
  runner.run(rows);
  const auto vocab = static_cast<std::ptrdiff_t>(pocket()->config().vocab);
  EXPECT_TRUE(std::equal(rows[0].logits.begin(), rows[0].logits.end(), one_by_one.begin() + vocab));
}

/// A selection of every far key gives full attention's bits.
TEST(Batch, SelectingEverythingIsFull) {
  const auto document = read(pocket(), lisbon(20), {"topk:k=100000,window=64", "streaming:window=100000"});
  const auto prompt = tokens_of(kQuestions[0]);
  const std::vector<TokenId> answer = {300, 301, 302};
  const auto full = logits_alone(pocket(), document, parse_spec("full"), prompt, answer);
  for (const Spec& spec : document->methods())
    EXPECT_EQ(logits_alone(pocket(), document, spec, prompt, answer), full) << spec.str();
}

TEST(Document, OpenedItAnswersAsItDidWhenItWasRead) {
  const auto path = std::filesystem::temp_directory_path() / "lode-scheduler-test.lode";
  const auto document = read(pocket(), lisbon(20), kMethods);
  document->save(path);
  const auto opened = Document::open(path, pocket(), {.max_tokens = 16384});
  std::filesystem::remove(path);
  EXPECT_EQ(opened->fingerprint(), document->fingerprint());
  const auto prompt = tokens_of(kQuestions[0]);
  const std::vector<TokenId> answer = {300, 301, 302};
  std::vector<Spec> specs = document->methods();
  specs.push_back(parse_spec("full"));
  for (const Spec& spec : specs)
    EXPECT_EQ(logits_alone(pocket(), opened, spec, prompt, answer),
              logits_alone(pocket(), document, spec, prompt, answer))
        << spec.str();
}

/// Outputs beyond the limit become exact ones, so that with a limit of nothing the answer is full attention's.
TEST(Scheduler, AuditedLayersFallBack) {
  const auto document = read(pocket(), lisbon(20), {"kmeans:probes=4,window=64", "streaming:window=64"});
  Scheduler scheduler(pocket());
  for (const Spec& spec : document->methods()) {
    Request request = ask(document, spec, 1, 20);
    const auto plain = scheduler.submit(request).result.get();
    const auto full = scheduler.submit(ask(document, parse_spec("full"), 1, 20)).result.get();
    request.audit = 1;
    const auto audited = scheduler.submit(request).result.get();
    EXPECT_EQ(audited.generation.tokens, plain.generation.tokens) << spec.str();
    EXPECT_GT(audited.generation.work.audited, 0);
    EXPECT_GT(audited.generation.work.audit_error_max, 0);
    EXPECT_TRUE(audited.full_layers.empty());
    request.audit_limit = 0;
    const auto fallen = scheduler.submit(request).result.get();
    EXPECT_EQ(fallen.generation.tokens, full.generation.tokens) << spec.str();
    EXPECT_FALSE(fallen.full_layers.empty());
    EXPECT_NE(fallen.generation.work.notice.find("went back to full attention"), std::string::npos);
  }
}

/// Rows in the order of clusters answer as rows in the order of tokens do, and sources name tokens.
TEST(Scheduler, OrderedRowsAnswerAlike) {
  const std::string text = lisbon(20);
  const Spec spec = parse_spec("kmeans:probes=4,window=64");
  std::vector<Answer> answers;
  for (const bool ordered : {false, true}) {
    Context context(pocket(), {.kv_type = DType::f32, .max_tokens = 8192});
    context.attach(spec);
    context.prefill(tokens_of(text, Tokenizer::Bos::as_template));
    context.build_indexes();
    if (ordered) {
      ASSERT_TRUE(order_rows(context));
    }
    Scheduler scheduler(pocket());
    Request request = ask(Document::Impl::share(std::move(context), text, {}), spec, 1, 12);
    request.want_sources = true;
    answers.push_back(scheduler.submit(request).result.get());
  }
  EXPECT_EQ(answers[0].generation.tokens, answers[1].generation.tokens);
  ASSERT_EQ(answers[0].sources.mass.size(), answers[1].sources.mass.size());
  for (std::size_t i = 0; i < answers[0].sources.mass.size(); ++i)
    EXPECT_NEAR(answers[0].sources.mass[i], answers[1].sources.mass[i], 1e-3) << i;
}

/// Questions that attend to all keys share their steps when sources are wanted, too; each gets its own, to the bit.
TEST(Scheduler, SourcesDoNotDependOnCompany) {
  const auto document = read(pocket(), lisbon(20), {});
  const auto request = [&](std::size_t question) {
    Request one = ask(document, parse_spec("full"), question, 12);
    one.want_sources = true;
    return one;
  };
  Scheduler scheduler(pocket());
  std::vector<Answer> alone;
  for (std::size_t i = 0; i < std::size(kQuestions); ++i)
    alone.push_back(scheduler.submit(request(i)).result.get());
  std::vector<std::shared_future<Answer>> together;
  for (std::size_t i = 0; i < alone.size(); ++i) together.push_back(scheduler.submit(request(i)).result);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const Answer answer = together[i].get();
    EXPECT_EQ(answer.generation.tokens, alone[i].generation.tokens) << i;
    EXPECT_EQ(answer.sources.mass, alone[i].sources.mass) << i;
    EXPECT_GT(*std::max_element(answer.sources.mass.begin(), answer.sources.mass.end()), 0.0) << i;
  }
}

/// What is held of a conversation is not read again; its answers are those of one that is read as a whole.
TEST(Scheduler, AConversationReadsWhatIsNew) {
  const auto document = read(pocket(), lisbon(20), {"kmeans:probes=4,window=64"}, DType::f32);
  std::vector<Spec> specs = document->methods();
  specs.push_back(parse_spec("full"));
  for (const Spec& spec : specs) {
    Scheduler scheduler(pocket());
    const auto cache = std::make_shared<SequenceCache>();
    std::vector<TokenId> said;
    std::int64_t read_before = 0;
    for (std::size_t turn = 0; turn < 3; ++turn) {
      Request request = ask(document, spec, turn, 12);
      const std::int64_t question = std::ssize(request.prompt);
      request.prompt.insert(request.prompt.begin(), said.begin(), said.end());
      const auto whole = scheduler.submit(request).result.get().generation.tokens;
      const std::int64_t before = scheduler.stats().prompt_tokens;
      request.cache = cache;
      const auto tokens = scheduler.submit(request).result.get().generation.tokens;
      EXPECT_EQ(tokens, whole) << spec.str() << " " << turn;
      read_before = scheduler.stats().prompt_tokens - before;
      // The last token of the answer before was never read.
      EXPECT_EQ(read_before, question + (turn > 0 ? 1 : 0)) << spec.str();
      said = request.prompt;
      said.insert(said.end(), tokens.begin(), tokens.end());
    }
    cache->clear();
    Request again = ask(document, spec, 0, 1);
    again.prompt = said;
    again.cache = cache;
    const std::int64_t before = scheduler.stats().prompt_tokens;
    scheduler.submit(again).result.wait();
    EXPECT_EQ(scheduler.stats().prompt_tokens - before, std::ssize(said));
    Request other = again;  // another method reads it anew
    other.attention = spec.str() == "full" ? specs[0] : parse_spec("full");
    scheduler.submit(other).result.wait();
    EXPECT_EQ(scheduler.stats().prompt_tokens - before, 2 * std::ssize(said));
  }
}

/// A prompt that was read before gives the bits of one that is read densely with the answer.
TEST(Scheduler, APromptIsReadOnceForSeveralMethods) {
  for (const DType type : {DType::bf16, DType::q8}) {
    const auto document =
        read(pocket(), lisbon(20), {"kmeans:probes=4,window=64", "h2o:window=64", "snapkv:window=64"}, type);
    std::vector<Spec> specs = document->methods();
    specs.push_back(parse_spec("full"));
    Scheduler scheduler(pocket());
    const auto read = read_prompt(document, ask(document, specs[0], 0).prompt);
    for (const Spec& spec : specs) {
      for (const std::int64_t most : {0, 1, 12}) {
        Request request = ask(document, spec, 0, most);
        request.options.sparse_prompt_tokens = 0;
        const Answer whole = scheduler.submit(request).result.get();
        request.read = read;
        const Answer answer = scheduler.submit(request).result.get();
        EXPECT_EQ(answer.generation.tokens, whole.generation.tokens) << spec.str() << " " << most;
        EXPECT_EQ(answer.generation.work.kv_bytes, whole.generation.work.kv_bytes) << spec.str();
        EXPECT_EQ(answer.ending, whole.ending);
      }
    }
    EXPECT_EQ(scheduler.stats().memory_used, 0);
  }
}

/// Of many about one document those that come last attend fully, and say so.
TEST(Scheduler, CrowdsMayAttendFully) {
  const auto document = read(pocket(), lisbon(20), {"kmeans:probes=4,window=64"});
  const Spec spec = document->methods()[0];
  Scheduler scheduler(pocket());
  std::vector<Ticket<Answer>> tickets;
  for (int i = 0; i < 4; ++i) {
    Request request = ask(document, spec, 1, 100);
    request.full_beside = i == 3 ? 2 : 5;
    tickets.push_back(scheduler.submit(request));
  }
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(tickets[static_cast<std::size_t>(i)].result.get().attention, i == 3 ? "full" : spec.str());
}

TEST(Scheduler, RefusesWhatItCanNeverAnswer) {
  Scheduler scheduler(pocket(), {.memory = 1 << 20});
  const auto document = read(pocket(), lisbon(20), {});
  const Spec full = parse_spec("full");
  EXPECT_THROW(scheduler.submit(ask(document, parse_spec("kmeans"), 0)), InputError);
  EXPECT_THROW(scheduler.submit({.document = document, .prompt = {}, .attention = full}), InputError);
  EXPECT_THROW(
      scheduler.submit({.document = document, .prompt = std::vector<TokenId>(16384, 5), .attention = full}),
      InputError);
  try {
    scheduler.submit(ask(document, full, 0, 1000));
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("1.0 MiB"), std::string::npos) << error.what();
  }
  Request bad_sampling = ask(document, full, 0);
  bad_sampling.options.sampling.temperature = -1;
  EXPECT_THROW(scheduler.submit(bad_sampling), InputError);
}

TEST(Scheduler, WhatGoesWrongEndsOneAnswerAlone) {
  Scheduler scheduler(pocket());
  const auto document = read(pocket(), lisbon(20), {});
  const Spec full = parse_spec("full");
  const auto expected = scheduler.submit(ask(document, full, 0)).result.get().generation.tokens;
  Request throws = ask(document, full, 1), outside = ask(document, full, 1);
  throws.options.on_text = [](std::string_view) { throw RunError("the reader has gone"); };
  outside.prompt.back() = 1 << 20;
  const auto fine = scheduler.submit(ask(document, full, 0));
  const auto gone = scheduler.submit(throws), no_token = scheduler.submit(outside);
  EXPECT_THROW(gone.result.get(), RunError);
  EXPECT_THROW(no_token.result.get(), InputError);
  EXPECT_EQ(fine.result.get().generation.tokens, expected);
  EXPECT_EQ(scheduler.stats().failed, 2);
  EXPECT_EQ(scheduler.stats().memory_used, 0);
}

TEST(Scheduler, CancelledAtAnyPointItGoesOn) {
  const auto document = read(pocket(), lisbon(20), {"h2o:window=64"});
  Scheduler scheduler(pocket(), {.max_sequences = 2});
  std::vector<Ticket<Answer>> tickets;
  for (int i = 0; i < 8; ++i)
    tickets.push_back(scheduler.submit(ask(document, document->methods()[0], 0, 500)));
  for (int i = 0; i < 8; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3 * i));
    scheduler.cancel(tickets[static_cast<std::size_t>(7 - i)].id);
  }
  for (const auto& ticket : tickets) {
    const Answer answer = ticket.result.get();
    EXPECT_TRUE(answer.ending == Ending::length || answer.ending == Ending::cancelled);
  }
  EXPECT_FALSE(scheduler.cancel(tickets[0].id));
  EXPECT_EQ(scheduler.submit(ask(document, parse_spec("full"), 0, 4)).result.get().ending, Ending::length);
  EXPECT_EQ(scheduler.stats().memory_used, 0);
}

/// Sixteen sequences over three documents while a fourth is read beside them and a fifth by somebody else.
TEST(Scheduler, AnswersWhileDocumentsAreRead) {
  const std::vector<std::string> methods = {"kmeans:probes=4,window=64", "retrieval:k=32,window=64",
                                            "h2o:window=64"};
  std::vector<std::shared_ptr<const Document>> documents;
  for (const int begin : {20, 30, 40}) documents.push_back(read(pocket(), lisbon(begin), methods));
  Scheduler scheduler(pocket(), {.max_sequences = 16});
  const std::string text = lisbon(40);
  auto fourth = scheduler.read(tokens_of(text, Tokenizer::Bos::as_template), text,
                               {.specs = specs_of(methods), .kv_type = DType::bf16, .max_tokens = 8192});
  std::jthread other([&] { read(pocket(), lisbon(50), methods); });
  std::vector<Ticket<Answer>> tickets;
  for (std::size_t i = 0; i < 16; ++i) {
    const auto& document = documents[i % 3];
    tickets.push_back(
        scheduler.submit(ask(document, i % 4 == 3 ? parse_spec("full") : document->methods()[i % 4], i)));
  }
  for (const auto& ticket : tickets) EXPECT_EQ(ticket.result.get().ending, Ending::length);
  const auto document = fourth.result.get();
  EXPECT_EQ(document->text(), text);
  EXPECT_EQ(scheduler.submit(ask(document, document->methods()[1], 0)).result.get().ending, Ending::length);
  auto stopped = scheduler.read(tokens_of(text), text, {});
  scheduler.cancel(stopped.id);
  try {
    stopped.result.get();
  } catch (const Interrupted&) {
  }
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::int64_t kilobytes = 0;
    if (word == "VmRSS:" && file >> kilobytes) return kilobytes << 10;
  }
  return 0;
}

/// A document whose keys and values are made up.
std::shared_ptr<const Document> made_up(std::int64_t tokens) {
  Context context(pocket(), {.kv_type = DType::bf16, .max_tokens = tokens + 1024});
  Context::Impl& c = context.impl();
  const std::int64_t chunk = 1000, row = c.config.kv_heads * c.config.head_dim;
  std::vector<float> values(static_cast<std::size_t>(chunk * row));
  Rng rng(1);
  for (float& x : values) x = static_cast<float>(rng.uniform() - 0.5);
  for (std::int64_t at = 0; at < tokens; at += chunk) {
    for (int layer = 0; layer < c.config.layers; ++layer) c.kv.write(layer, chunk, values, values);
    c.kv.commit(chunk);
  }
  c.ids.assign(static_cast<std::size_t>(tokens), 300);
  c.indexed = tokens;
  return Document::Impl::share(std::move(context), {}, {});
}

/// Sixteen branches of a document of 40,000 tokens take a hundredth more than one, and their tails in whole pages.
TEST(Sequence, BranchesShareTheDocument) {
  const auto document = made_up(40'000);
  BatchRunner runner(pocket());
  const auto prompt = tokens_of(kQuestions[0]);
  std::vector<std::unique_ptr<Sequence>> sequences;
  const auto branch = [&](int count) {
    std::vector<BatchRow> rows;
    for (int i = 0; i < count; ++i) {
      sequences.push_back(std::make_unique<Sequence>(document, parse_spec("full"), 128));
      rows.push_back({.sequence = sequences.back().get(), .tokens = prompt, .phase = Phase::question});
      runner.run({&rows.back(), 1});
      ASSERT_FALSE(rows.back().error);
    }
  };
  branch(
      16);  // by now each thread has the scratch that it keeps, on a machine that gives it little time, too
  const std::int64_t before = resident_bytes();
  branch(15);
  const std::int64_t parts = 6 * 2 * 2, tail = parts * ((std::ssize(prompt) * 128 + 8191) / 4096 * 4096);
  EXPECT_LE(resident_bytes() - before, document->kv_bytes() / 100 + 15 * tail + (1 << 20));
}

TEST(Document, IsSavedWithWhatIsAttached) {
  const auto path = std::filesystem::temp_directory_path() / "lode-document-test.lode";
  DocumentOptions options = {
      .max_tokens = 4096,
      .attachments = {{"places", {.text = "{\"page\": 1}"}}, {"chat", {.text = "{}", .required = true}}}};
  const auto document = Document::read(pocket(), tokens_of("A short text."), "A short text.", options);
  document->save(path);
  const auto again = Document::open(path, pocket());
  std::filesystem::remove(path);
  EXPECT_EQ(again->text(), "A short text.");
  EXPECT_EQ(again->tokens(), document->tokens());
  ASSERT_NE(again->attachment("places"), nullptr);
  EXPECT_EQ(*again->attachment("places"), "{\"page\": 1}");
  EXPECT_TRUE(again->attachments().at("chat").required);
  EXPECT_EQ(again->attachment("none"), nullptr);
}

}  // namespace
}  // namespace lode
