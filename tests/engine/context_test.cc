// SPDX-License-Identifier: Apache-2.0
// Contexts on a random two-layer model: what must not change when work is cut, batched, undone or repeated.
#include "engine/context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "lodestone/error.h"
#include "select/shared/shares_index.h"
#include "support/compare.h"
#include "support/some_tokens.h"

namespace lode {
namespace {

constexpr const char* kShape = "L2q4kv2d16";
constexpr float kTolerance = 2e-4f;  // another cut of the work sums float32 in another order

class ContextTest : public testing::Test {
 protected:
  std::shared_ptr<const Model> model_ = Model::random(kShape, 2);

  Context context(std::int64_t chunk = 512) {
    return Context(model_, {.kv_type = DType::f32, .max_tokens = 1024, .chunk = chunk});
  }
  /// Logits of `question` under `spec` after a prefilled context.
  std::vector<float> logits(const char* spec, std::int64_t context_tokens, std::int64_t chunk) {
    Context c = context(chunk);
    const MethodId method = c.attach(parse_spec(spec));
    c.prefill(some_tokens(context_tokens, 1));
    c.build_indexes();
    return c.forward(some_tokens(9, 2), method);
  }
};

TEST_F(ContextTest, ChunkingThePrefillAndTheQuestionChangesNothing) {
  for (const char* spec : {"full", "streaming:window=20", "topk:k=5,window=20",
                           "kmeans:clusters=8,probes=3,window=20", "random:fraction=0.25,window=20",
                           "squeezed:clusters=20%,sparsity=0.5", "ideal:sparsity=0.5,block=4"}) {
    EXPECT_LT(worst_difference(logits(spec, 200, 512), logits(spec, 200, 4)), kTolerance) << spec;
  }
}

TEST_F(ContextTest, SelectingEveryKeyGivesTheBitsOfFullAttention) {
  const std::vector<float> full = logits("full", 200, 512);
  EXPECT_EQ(logits("topk:k=100000,window=20", 200, 512), full);
  EXPECT_EQ(logits("kmeans:clusters=8,probes=8,window=20", 200, 512), full);
  EXPECT_EQ(logits("random:fraction=1.0,window=20", 200, 512), full);
  EXPECT_EQ(logits("streaming:window=4000", 200, 512), full);
  EXPECT_EQ(logits("squeezed:sparsity=0", 200, 512), full);
}

/// Keys and values of a layer, [T, Hkv, d].
std::vector<float> rows_of(const Context& c, int layer, KvStore::Part part) {
  const ModelConfig& m = c.model().config();
  const auto d = static_cast<std::size_t>(m.head_dim), heads = static_cast<std::size_t>(m.kv_heads);
  std::vector<float> rows(static_cast<std::size_t>(c.tokens()) * heads * d);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto bytes = c.impl().kv.rows(layer, static_cast<int>(head), part);
    for (std::size_t t = 0; t < static_cast<std::size_t>(c.tokens()); ++t)
      std::memcpy(&rows[(t * heads + head) * d], bytes.data() + t * d * sizeof(float), d * sizeof(float));
  }
  return rows;
}

// The second layer's rows depend on what the first attended to: the same as in float32 within a chunk, but for f16.
TEST_F(ContextTest, RowsOfFourBitsAreReadAsTheyAreBeforeTheyAreCoded) {
  const std::vector<TokenId> text = some_tokens(200, 1);
  Context exact = context(), coded(model_, {.kv_type = DType::q4, .max_tokens = 1024, .chunk = 512}),
          cut(model_, {.kv_type = DType::q4, .max_tokens = 1024, .chunk = 50});
  EXPECT_EQ(Context(model_, {.kv_type = DType::q4, .max_tokens = 1024}).options().chunk, 2048);
  for (Context* const c : {&exact, &coded, &cut}) c->prefill(text);
  KvStore expected(coded.impl().kv.shape());
  for (int layer = 0; layer < 2; ++layer)
    expected.write(layer, 200, rows_of(exact, layer, KvStore::Part::k),
                   rows_of(exact, layer, KvStore::Part::v));
  expected.commit(200);
  const auto differing = [&](const Context& c) {
    std::int64_t found = 0;
    for (const KvStore::Part part : {KvStore::Part::k, KvStore::Part::v})
      for (int head = 0; head < model_->config().kv_heads; ++head) {
        const auto a = c.impl().kv.rows(1, head, part), b = expected.rows(1, head, part);
        for (std::size_t i = 0; i < a.size(); ++i) found += a[i] != b[i] ? 1 : 0;
      }
    return found;
  };
  const std::int64_t bytes =
      std::ssize(coded.impl().kv.rows(1, 0, KvStore::Part::k)) * 2 * 2;  // heads, parts
  EXPECT_LT(differing(coded), bytes * 15 / 100)
      << "f16 moves the last bits, and with them a ninth of the codes";
  EXPECT_GT(differing(cut), bytes / 4) << "a chunk reads the ones in front of it as they are stored";
}

TEST_F(ContextTest, TheSparsePathReallyRanAndSaysWhyWhenItDidNot) {
  Context c = context();
  const MethodId sparse = c.attach(parse_spec("streaming:window=20"));
  const MethodId wide = c.attach(parse_spec("streaming:window=4000"));
  c.prefill(some_tokens(200, 1));
  WorkReport work;
  c.forward(some_tokens(1, 2), sparse, &work);
  EXPECT_EQ(work.sparse_tokens, 2);  // one token, two layers
  EXPECT_EQ(work.far_keys, 0);
  EXPECT_EQ(work.far_total, 2 * 2 * (201 - 1 - 20));
  EXPECT_NEAR(work.density(), 21.0 / 201.0, 1e-12);
  EXPECT_TRUE(work.dense_reason.empty());
  c.roll_back(200);
  c.forward(some_tokens(1, 2), wide, &work);
  EXPECT_EQ(work.density(), 1.0);
  EXPECT_NE(work.dense_reason.find("fit into sink + window"), std::string::npos);
}

TEST_F(ContextTest, RollingBackForgets) {
  Context c = context();
  const MethodId method = c.attach(parse_spec("kmeans:clusters=8,probes=3,window=20"));
  c.prefill(some_tokens(200, 1));
  c.build_indexes();
  const std::vector<float> first = c.forward(some_tokens(40, 2), method);
  c.roll_back(200);
  c.forward(some_tokens(60, 3), method);
  c.roll_back(200);
  EXPECT_EQ(c.forward(some_tokens(40, 2), method), first);
}

TEST_F(ContextTest, SpecsThatOnlySearchOtherwiseShareTheirIndexAndAnswerAsIfAlone) {
  struct Case {
    const char *first, *second, *other;  // other: built otherwise
  };
  for (const Case& specs :
       {Case{"kmeans:clusters=8,probes=3,window=20", "kmeans:clusters=8,probes=5,window=20",
             "kmeans:clusters=9,probes=5,window=20"},
        Case{"ivf:nlist=8,nprobe=2,k=9,window=20", "ivf:nlist=8,nprobe=5,k=20,window=20",
             "ivf:nlist=8,nprobe=5,k=20,sink=7,window=20"},
        Case{"retrieval:k=4,beam=4,sink=1,window=20", "retrieval:k=9,warm=off,beam=4,sink=1,window=20",
             "retrieval:k=9,beam=4,sink=1,window=30"},
        Case{"retrieval:k=4,sink=1,window=20", "retrieval:k=7,recall=0.9,warm=off,sink=1,window=20",
             "retrieval:k=4,degree=20,sink=1,window=20"},
        Case{"hnsw:k=4,window=20", "hnsw:k=9,ef=20,window=20", "hnsw:k=9,M=8,window=20"},
        Case{"pqcache:budget=9,window=20", "pqcache:budget=30,per=query-head,window=20",
             "pqcache:budget=9,bits=4,window=20"},
        Case{"squeezed:clusters=20%,sparsity=0.8", "squeezed:clusters=20%,sparsity=0.5,block=4",
             "squeezed:clusters=20%,sparsity=0.5,metric=cosine"}}) {
    Context c = context();
    const MethodId first = c.attach(parse_spec(specs.first));
    const MethodId second = c.attach(parse_spec(specs.second));
    const MethodId other = c.attach(parse_spec(specs.other));
    c.prefill(some_tokens(400, 1));
    c.build_indexes();
    for (const MethodId method : {first, second, other}) {
      const char* const spec = method == first ? specs.first : method == second ? specs.second : specs.other;
      EXPECT_EQ(c.forward(some_tokens(9, 2), method), logits(spec, 400, 512)) << spec;
      c.roll_back(400);
    }
    const auto selector = [&](MethodId method) {
      return c.impl().methods[static_cast<std::size_t>(method)].selectors[1];
    };
    const KvLayer layer = c.impl().kv.layer(1);
    auto* const taker = dynamic_cast<SharesIndex*>(selector(second));
    ASSERT_NE(taker, nullptr) << specs.second;
    EXPECT_TRUE(taker->take_index(0, *selector(first), layer)) << specs.second;
    EXPECT_FALSE(taker->take_index(0, *selector(other), layer)) << specs.other;
  }
}

// As long as the text before, but not the same: what was built over that one is nobody's index.
TEST_F(ContextTest, AnIndexOfATextThatWasRolledBackIsNotShared) {
  std::vector<float> logits[2];
  for (const bool before : {false, true}) {
    Context c = context();
    if (before) c.attach(parse_spec("kmeans:clusters=8,probes=3,window=20"));
    c.prefill(some_tokens(400, 1));
    c.build_indexes();
    c.roll_back(100);
    c.prefill(some_tokens(300, 7));
    const MethodId method = c.attach(parse_spec("kmeans:clusters=8,probes=2,window=20"));
    c.build_indexes();
    logits[before] = c.forward(some_tokens(9, 2), method);
  }
  EXPECT_EQ(logits[1], logits[0]);
}

TEST_F(ContextTest, ATextInThePlaceOfAnotherIsIndexedAsIfAlone) {
  for (const char* text :
       {"kmeans:clusters=8,probes=2,window=20", "ivf:nlist=8,nprobe=2,k=5,window=20",
        "snapkv:window_size=8,max_capacity_prompt=20,window=20", "h2o:window=20",
        "infllm:block_size=8,topk=3,window=20", "double-sparsity:bits=2,channels=4,budget=9,window=20",
        "pqcache:budget=9,window=20", "magicpig:K=3,L=8,window=20",
        "quest:bits=2,page_size=4,budget=20,window=20", "retrieval:k=4,beam=3,sink=1,window=20,warm=off",
        "hnsw:k=5,M=4,window=20", "reformer:bucket_size=16,window=20",
        "squeezed:clusters=20%,sparsity=0.5"}) {
    const Spec spec = parse_spec(text);
    Context lived = context(), alone = context();
    const MethodId method = lived.attach(spec);
    alone.attach(spec);
    lived.prefill(some_tokens(400, 1));
    lived.build_indexes();
    lived.forward(some_tokens(5, 3), method);
    lived.roll_back(0);
    for (Context* c : {&lived, &alone}) {
      c->prefill(some_tokens(300, 4));
      c->build_indexes();
    }
    EXPECT_EQ(lived.forward(some_tokens(9, 2), method), alone.forward(some_tokens(9, 2), method)) << text;
  }
}

// The dense part of `squeezed` ends with the context, not with the query: question and answer never push keys
// of the context out of it. A context that is appended to takes its end along.
TEST_F(ContextTest, AWindowOfTheContextStaysAndGrowsWithIt) {
  Context c = context();
  const MethodId method = c.attach(parse_spec("squeezed:sparsity=0.5,clusters=20%"));
  c.prefill(some_tokens(200, 1));
  c.build_indexes();
  WorkReport work;
  c.forward(some_tokens(150, 2), method, &work);
  EXPECT_EQ(work.far_total, 150 * 2 * 2 * 100);  // tokens, layers, KV heads, keys before the last 100
  EXPECT_LT(work.far_keys, work.far_total);
  c.roll_back(200);
  c.prefill(some_tokens(300, 3));
  c.build_indexes();
  EXPECT_EQ(c.indexed_tokens(), 500);
  c.forward(some_tokens(7, 2), method, &work);
  EXPECT_EQ(work.far_total, 7 * 2 * 2 * 400);
  EXPECT_NEAR(work.selectivity(), 0.5, 0.25);
}

TEST_F(ContextTest, ARaggedBatchGivesWhatEachSequenceGivesAlone) {
  const ModelConfig& config = model_->config();
  const Rope rope(config, 256);
  Llama llama(config, model_->impl().weights, model_->pool());
  const auto store = [&] {
    return KvStore({.layers = 2, .kv_heads = 2, .head_dim = 16, .type = DType::f32, .max_tokens = 256});
  };
  const auto a = some_tokens(70, 1), b = some_tokens(3, 2);
  std::vector<float> alone_a, alone_b, together;
  KvStore kv_a = store(), kv_b = store(), kv_a2 = store(), kv_b2 = store();
  SequenceTokens one = {a, &kv_a, 0}, two = {b, &kv_b, 0};
  llama.forward({.sequences = {&one, 1}}, rope, LogitRows::last_of_each, alone_a);
  llama.forward({.sequences = {&two, 1}}, rope, LogitRows::last_of_each, alone_b);
  const SequenceTokens both[] = {{a, &kv_a2, 0}, {b, &kv_b2, 1}};
  llama.forward({.sequences = both}, rope, LogitRows::last_of_each, together);
  alone_a.insert(alone_a.end(), alone_b.begin(), alone_b.end());
  EXPECT_LT(worst_difference(together, alone_a), kTolerance);
}

TEST_F(ContextTest, TooManyTokensIsAnErrorWithBothNumbers) {
  Context c = context();
  c.prefill(some_tokens(1000, 1));
  try {
    c.prefill(some_tokens(25, 1));
    FAIL() << "1025 tokens went into 1024";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("1024"), std::string::npos) << e.what();
  }
  EXPECT_EQ(c.tokens(), 1000);
  EXPECT_THROW(Context(model_, {.max_tokens = model_->config().max_positions + 1}), InputError);
}

TEST_F(ContextTest, AnInterruptedForwardLeavesTheContextAsItWas) {
  Context c = context();
  const MethodId method = c.attach(parse_spec("kmeans:clusters=8,probes=3,window=20"));
  c.prefill(some_tokens(200, 1));
  c.build_indexes();
  const std::vector<float> before = c.forward(some_tokens(9, 2), method);
  c.roll_back(200);
  set_cancel(true);
  EXPECT_THROW(c.forward(some_tokens(9, 4), method), Interrupted);
  set_cancel(false);
  EXPECT_EQ(c.tokens(), 200);
  EXPECT_EQ(c.forward(some_tokens(9, 2), method), before);
}

TEST_F(ContextTest, TheAuditSeesNoErrorWhereEverythingIsSelectedAndSomeWhereNot) {
  for (const auto& [spec, exact] :
       {std::pair{"topk:k=100000,window=20", true}, std::pair{"streaming:window=20", false}}) {
    Context c(model_, {.kv_type = DType::f32, .max_tokens = 1024, .audit = 1.0});
    const MethodId method = c.attach(parse_spec(spec));
    c.prefill(some_tokens(200, 1));
    WorkReport work;
    c.forward(some_tokens(5, 2), method, &work);
    EXPECT_EQ(work.audited, 5 * 4 * 2) << spec;  // tokens, query heads, layers
    EXPECT_EQ(work.audit_error_max == 0, exact) << spec;
  }
}

// A GPU finds the method of a step by where its selectors stand.
TEST_F(ContextTest, WhileNoLayerFellBackTheSelectorsStayWhereTheyAre) {
  Context c(model_, {.kv_type = DType::f32, .max_tokens = 1024});
  c.attach(parse_spec("streaming:window=20"));
  const std::vector<Selector*>& own = c.impl().methods.front().selectors;
  EXPECT_EQ(c.impl().audit.without_fallen(own).data(), own.data());
  EXPECT_EQ(std::ssize(c.impl().audit.without_fallen(own)), std::ssize(own));
}

TEST_F(ContextTest, BeyondTheAuditsLimitALayerAttendsFullyForTheRestOfAnAnswer) {
  Context exact(model_, {.kv_type = DType::f32, .max_tokens = 1024});
  exact.prefill(some_tokens(200, 1));
  const std::vector<float> truth = exact.forward(some_tokens(5, 2), kDense);
  std::vector<int> fallen;
  const auto ask = [&](double limit, WorkReport& work) {
    Context c(model_, {.kv_type = DType::f32, .max_tokens = 1024, .audit = 1.0});
    c.impl().audit.set_limit(limit);
    const MethodId method = c.attach(parse_spec("streaming:window=20"));
    c.prefill(some_tokens(200, 1));
    auto logits = c.forward(some_tokens(5, 2), method, &work);
    fallen = c.impl().audit.fallen_back();
    WorkReport next;
    c.forward(some_tokens(5, 3), method, &next);
    EXPECT_EQ(next.audited == 0, fallen.size() == 2) << "layers that attend fully are not audited";
    EXPECT_EQ(next.density() == 1.0, fallen.size() == 2);
    c.roll_back(200);
    WorkReport again;
    EXPECT_EQ(c.forward(some_tokens(5, 2), method, &again), logits) << "a new answer starts anew";
    EXPECT_EQ(again.audited, work.audited);
    return logits;
  };
  WorkReport work;
  EXPECT_EQ(ask(0.0, work), truth) << "what went beyond the limit is put right at once";
  EXPECT_THAT(fallen, testing::ElementsAre(0, 1));
  EXPECT_THAT(work.notice, testing::HasSubstr("layers 0, 1 went back to full attention"));
  work = {};
  EXPECT_NE(ask(1e6, work), truth);
  EXPECT_THAT(fallen, testing::IsEmpty());
  EXPECT_GT(work.audited, 0);
}

TEST(Audit, AnErrorThatIsNoNumberIsBeyondEveryLimit) {
  Audit audit(1.0, 1, 2);
  audit.set_limit(1e9);
  WorkReport report;
  const ForwardHooks hooks = audit.hooks(nullptr, report);
  std::vector<float> outputs = {std::numeric_limits<float>::quiet_NaN(), 1.0f};
  const std::vector<float> exact = {2.0f, 1.0f};
  hooks.compare(1, 2, outputs, exact);
  EXPECT_THAT(audit.fallen_back(), testing::ElementsAre(1));
  EXPECT_EQ(outputs, exact);
}

}  // namespace
}  // namespace lode
