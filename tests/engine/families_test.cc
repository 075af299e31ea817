// SPDX-License-Identifier: Apache-2.0
// Documents, branches and batches of models whose layers are not those of a Llama: hybrids with recurrent states,
// mixtures of experts, attention sinks. The tiny models are those of tests/golden/families.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "base/file.h"
#include "base/json.h"
#include "engine/batch.h"
#include "engine/context.h"
#include "engine/join/join_texts.h"
#include "engine/prefill_log.h"
#include "engine/row_order.h"
#include "kernels/kv_row.h"
#include "lodestone/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "model/kv_shape.h"
#include "support/family_folder.h"
#include "support/family_golden.h"
#include "support/latent_model.h"
#include "support/refusal.h"

namespace lode {
namespace {

class EngineFamily : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (TokenId i = 0; i < kTokens; ++i) ids_.push_back((i * i + 3 * i + i / 7) % 64);
  }

  std::span<const TokenId> ids(std::int64_t begin, std::int64_t count) const {
    return std::span(ids_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
  }
  Context context(std::int64_t chunk = 16) const {
    return Context(model_, {.kv_type = DType::f32, .max_tokens = 256, .chunk = chunk});
  }
  static constexpr MethodId kFull = kDense;
  static constexpr TokenId kTokens = 200;
  const FamilyFolder folder_{GetParam()};
  const std::filesystem::path dir_ = folder_.path();
  std::shared_ptr<const Model> model_ = folder_.load();
  std::vector<TokenId> ids_;
};

std::vector<TokenId> answer(Context& c, std::span<const TokenId> prompt, MethodId method) {
  return c.generate(prompt, method, {.max_new_tokens = 12, .stop_at_eos = false}).tokens;
}

TEST_P(EngineFamily, GoesBackAndOnAsIfItHadReadNothingElse) {
  Context fresh = context();
  fresh.prefill(ids(0, 100));
  const std::vector<float> expected = fresh.forward(ids(100, 20), kFull);
  Context c = context();
  c.prefill(ids(0, 100));
  c.build_indexes();
  EXPECT_EQ(c.forward(ids(100, 20), kFull), expected);
  c.roll_back(100);
  EXPECT_EQ(c.forward(ids(100, 20), kFull), expected) << "to the document's end";
  answer(c, ids(5, 9), kFull);
  c.roll_back(100);
  EXPECT_EQ(c.forward(ids(100, 20), kFull), expected) << "behind an answer";
  for (const std::int64_t cut : {110, 83, 64, 1}) {  // to where no state was kept, tokens are read again
    c.roll_back(cut);
    EXPECT_EQ(c.tokens(), cut);
    if (cut < 100) c.prefill(ids(cut, 100 - cut));
    c.build_indexes();
    std::vector<float> got =
        c.forward(ids(std::max<std::int64_t>(cut, 100), 120 - std::max<std::int64_t>(cut, 100)), kFull);
    const std::vector<float> want(expected.end() - std::ssize(got), expected.end());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-3) << cut << " " << i;
    c.roll_back(100);
  }
  c.roll_back(0);
  c.prefill(ids(0, 100));
  EXPECT_EQ(c.forward(ids(100, 20), kFull), expected) << "from nothing";
}

TEST_P(EngineFamily, JoinedTextsHaveTheFirstLayerOfOneReading) {
  std::vector<std::filesystem::path> paths;
  for (const auto& [begin, count] : {std::pair(0, 90), std::pair(90, 70)}) {
    Context c = context();
    c.prefill(ids(begin, count));
    c.build_indexes();
    paths.push_back(dir_ / ("part" + std::to_string(begin) + ".lode"));
    c.save(paths.back(), "");
  }
  const std::vector<std::int64_t> recurrent = model_->config().plan.recurrent_floats();
  if (!recurrent.empty())
    return test::expect_refused("recurrent layers", [&] { join_texts(paths, model_, {.chunk = 16}); });
  if (!kv_shape(model_->config(), DType::f32, 1).by_layer.empty())
    return test::expect_refused("rows of their own", [&] { join_texts(paths, model_, {.chunk = 16}); });
  const JoinedTexts joined = join_texts(paths, model_, {.chunk = 16});
  Context one = context();
  one.prefill(ids(0, 160));
  const KvLayer found = joined.context.impl().kv.layer(0), wanted = one.impl().kv.layer(0);
  std::vector<float> a(static_cast<std::size_t>(model_->config().head_dim)), b(a.size());
  for (std::size_t head = 0; head < wanted.heads.size(); ++head)
    for (std::int64_t row = 0; row < 160; ++row) {
      read_key_row(found.heads[head], row, a.data());
      read_key_row(wanted.heads[head], row, b.data());
      for (std::size_t i = 0; i < a.size(); ++i)
        ASSERT_NEAR(a[i], b[i], 1e-4) << head << " " << row << " " << i;
    }
}

TEST_P(EngineFamily, ASavedDocumentIsTheDocument) {
  Context c = context();
  const MethodId method = c.attach(parse_spec("kmeans:clusters=8,probes=2,window=15,dense_layers=0"));
  c.prefill(ids(0, 120));
  c.build_indexes();
  const auto file = dir_ / "document.lode";
  c.save(file, "");
  const std::vector<TokenId> full = answer(c, ids(120, 9), kFull);
  c.roll_back(120);
  const std::vector<TokenId> sparse = answer(c, ids(120, 9), method);
  c.roll_back(120);
  const std::vector<float> logits = c.forward(ids(120, 30), kFull);

  Context loaded = Context::load(file, model_, {.chunk = 16});
  EXPECT_EQ(loaded.tokens(), 120);
  EXPECT_EQ(loaded.forward(ids(120, 30), kFull), logits) << "no bit is lost, and no token read again";
  loaded.roll_back(120);
  EXPECT_EQ(answer(loaded, ids(120, 9), kFull), full);
  loaded.roll_back(120);
  EXPECT_EQ(answer(loaded, ids(120, 9), 0), sparse);

  loaded.roll_back(120);  // it grows as one that never was in a file does
  loaded.prefill(ids(120, 40));
  Context whole = context();
  whole.prefill(ids(0, 120));
  whole.prefill(ids(120, 40));
  EXPECT_EQ(loaded.forward(ids(160, 20), kFull), whole.forward(ids(160, 20), kFull));
}

TEST_P(EngineFamily, BranchesAnswerAsAContextInAnyCompany) {
  const std::vector<Spec> specs = {parse_spec("full"),
                                   parse_spec("kmeans:clusters=8,probes=2,window=15,dense_layers=0"),
                                   parse_spec("topk:k=16,window=15,dense_layers=0")};
  const auto document =
      Document::read(model_, ids(0, 120), "",
                     {.specs = {specs[1], specs[2]}, .kv_type = DType::f32, .chunk = 16, .max_tokens = 256});
  const auto request = [&](std::size_t i) {
    return Request{.document = document,
                   .prompt = {ids_.begin() + 120 + static_cast<std::ptrdiff_t>(i), ids_.begin() + 130},
                   .attention = specs[i % specs.size()],
                   .options = {.max_new_tokens = 12, .stop_at_eos = false}};
  };
  std::vector<std::vector<TokenId>> alone;
  for (std::size_t i = 0; i < 6; ++i)
    alone.push_back(
        Scheduler(model_, {.max_sequences = 1}).submit(request(i)).result.get().generation.tokens);
  Scheduler together(model_, {.max_sequences = 6});
  std::vector<Ticket<Answer>> tickets;
  for (std::size_t i = 0; i < 6; ++i) tickets.push_back(together.submit(request(i)));
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(tickets[i].result.get().generation.tokens, alone[i]) << i;
  for (std::size_t i = 0; i < 6; i += 3) {
    Context c = context();
    c.prefill(ids(0, 120));
    c.build_indexes();
    EXPECT_EQ(answer(c, request(i).prompt, kFull), alone[i]) << i;
  }
  Request exact = request(1);
  exact.exact = true;
  Request dense = request(1);
  dense.attention = specs[0];
  EXPECT_EQ(together.submit(exact).result.get().generation.tokens,
            together.submit(dense).result.get().generation.tokens);
}

TEST_P(EngineFamily, AnInterruptedReadingGoesOn) {
  const auto path = PrefillLog::beside(dir_ / "document.lode");
  {
    Context c = context();
    PrefillLog log(path, c, 1'700'000'000);
    const auto first = static_cast<std::uint64_t>(log.room(c, 64));
    c.prefill(ids(0, 64));
    log.save(c);
    EXPECT_EQ(first, std::filesystem::file_size(path));
    EXPECT_EQ(log.room(c, 64), 0);
    const auto second = static_cast<std::uint64_t>(log.room(c, 96));
    c.prefill(ids(64, 32));
    log.save(c);
    EXPECT_EQ(first + second, std::filesystem::file_size(path));
  }  // the process ends here, in whatever way
  EXPECT_EQ(PrefillLog::time_of(path), 1'700'000'000);
  EXPECT_EQ(PrefillLog::time_of(dir_ / "config.json"), std::nullopt);
  EXPECT_EQ(PrefillLog::time_of(dir_ / "none"), std::nullopt);
  Context c = context();
  PrefillLog log(path, c);
  EXPECT_EQ(log.restore(c, ids(0, 150)), 96);
  c.prefill(ids(96, 54));
  Context whole = context();
  whole.prefill(ids(0, 64));
  whole.prefill(ids(64, 32));
  whole.prefill(ids(96, 54));
  EXPECT_EQ(c.forward(ids(150, 20), kFull), whole.forward(ids(150, 20), kFull));
}

TEST_P(EngineFamily, AnInterruptedReadingIsTakenAsFarAsItIsWholeAndOfThisText) {
  const auto path = PrefillLog::beside(dir_ / "document.lode");
  {
    Context c = context();
    PrefillLog log(path, c);
    c.prefill(ids(0, 64));
    log.save(c);
    c.prefill(ids(64, 32));
    log.save(c);
  }
  std::string whole = read_file(path);
  bool another = false;
  const auto restored = [&](const std::string& bytes, std::vector<TokenId> tokens, ContextOptions options) {
    std::ofstream(path, std::ios::binary) << bytes;
    Context c(model_, options);
    PrefillLog log(path, c);
    const std::int64_t taken = log.restore(c, tokens);
    EXPECT_EQ(c.tokens(), taken);
    another = log.holds_another();
    return taken;
  };
  const ContextOptions usual = {.kv_type = DType::f32, .max_tokens = 256, .chunk = 16};
  const std::vector<TokenId> text(ids_.begin(), ids_.begin() + 150);
  EXPECT_EQ(restored(whole, text, usual), 96);
  for (const auto& [changed, taken] :
       {std::pair<std::size_t, std::int64_t>{3, 0}, {63, 0}, {64, 64}, {95, 64}, {96, 96}}) {
    std::vector<TokenId> other = text;
    other[changed] ^= 1;
    EXPECT_EQ(restored(whole, other, usual), taken) << changed;
    EXPECT_EQ(another, taken == 0) << changed;
  }
  // Of two blocks of 64 and 32 tokens the second takes less than half, but both hold states of one size.
  for (const auto& [at, taken] :
       {std::pair<std::size_t, std::int64_t>{whole.size() - 5, 64}, {whole.size() / 3, 0}}) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_EQ(restored(damaged, text, usual), taken) << at;
    EXPECT_FALSE(another) << "what is damaged is nobody's";
  }
  EXPECT_EQ(restored(whole.substr(0, whole.size() - 1), text, usual), 64);
  ContextOptions halves = usual;
  halves.kv_type = DType::f16;
  EXPECT_EQ(restored(whole, text, halves), 0);
  EXPECT_TRUE(another);
}

class LatentRows : public testing::Test {
 protected:
  void SetUp() override {
    for (TokenId i = 0; i < 600; ++i) ids_.push_back((i * i + 5 * i + i / 9) % 64);
  }
  std::span<const TokenId> ids(std::size_t begin, std::size_t count) const {
    return std::span(ids_).subspan(begin, count);
  }
  Context context(DType type = DType::f32) const {
    return Context(model_, {.kv_type = type, .max_tokens = 700, .chunk = 64});
  }
  static constexpr MethodId kFull = kDense;
  const test::LatentFolder folder_;
  const std::filesystem::path dir_ = folder_.path();
  std::shared_ptr<const Model> model_ = folder_.load();
  std::vector<TokenId> ids_;
};

TEST_F(LatentRows, AreKeptOnceAtTheirPublishedSize) {
  const ModelConfig& c = model_->config();
  EXPECT_EQ(c.head_dim, 576);
  EXPECT_EQ(c.kv_heads, 2);
  Context kept = context(DType::bf16);
  EXPECT_EQ(kept.impl().kv.shape().token_bytes(), 2 * 576 * 2) << "layers times numbers times bytes";
  for (const DType type : {DType::f32, DType::bf16, DType::q8}) {
    Context whole = context(type), steps = context(type);
    whole.prefill(ids(0, 300));
    for (std::size_t at = 0; at < 300; at += 50) steps.prefill(ids(at, 50));
    const std::vector<float> want = whole.forward(ids(300, 20), kFull);
    std::vector<float> got;
    for (std::size_t i = 0; i < 20; ++i) {
      const std::vector<float> one = steps.forward(ids(300 + i, 1), kFull);
      got.insert(got.end(), one.begin(), one.end());
    }
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], want[i], type == DType::f32 ? 1e-3 : 6e-2) << name_of(type) << " " << i;
  }
}

TEST_F(LatentRows, EveryMethodThatSelectsAllOfThemIsFullAttention) {
  const std::string dense = ",sink=1,window=31,dense_layers=0";
  const std::vector<std::string> specs = {
      "topk:k=100000" + dense,
      "topk:k=100000,per=kv-head,by=value" + dense,
      "topk:mass=1" + dense,
      "kmeans:clusters=12,probes=12" + dense,
      "squeezed:sparsity=0" + dense,
      "squeezed:sparsity=0,levels=2,clusters=20%,clusters1=5%" + dense,
      "hash:budget=1.0,weights=" + folder_.signatures(*model_).string() + dense,
      "hyperplanes:budget=1.0" + dense,
      "retrieval:k=100000" + dense};
  Context exact = context();
  exact.prefill(ids(0, 250));
  const std::vector<float> question = exact.forward(ids(250, 9), kFull);
  exact.roll_back(250);
  const std::vector<TokenId> said = answer(exact, ids(250, 9), kFull);
  for (const std::string& spec : specs) {
    Context c = context();
    const MethodId method = c.attach(parse_spec(spec));
    c.prefill(ids(0, 250));
    c.build_indexes();
    WorkReport work;
    EXPECT_EQ(c.forward(ids(250, 9), method, &work), question) << spec;
    EXPECT_GT(work.sparse_tokens, 0) << spec << ": " << work.dense_reason;
    c.roll_back(250);
    EXPECT_EQ(answer(c, ids(250, 9), method), said) << spec;
  }
}

TEST_F(LatentRows, AnIndexOfThemSurvivesItsFile) {
  for (const char* spec :
       {"topk:k=4,by=value,sink=1,window=31", "kmeans:clusters=16,probes=4,sink=1,window=31",
        "squeezed:sparsity=0.7,window=31", "retrieval:k=20,beam=24,sink=1,window=31"}) {
    Context c = context(DType::f16);
    const MethodId method = c.attach(parse_spec(spec));
    c.prefill(ids(0, 500));
    c.build_indexes();
    c.save(dir_ / "document.lode", "");
    WorkReport work;
    const std::vector<float> logits = c.forward(ids(500, 5), method, &work);
    EXPECT_LT(work.far_keys, work.far_total) << spec;
    Context loaded = Context::load(dir_ / "document.lode", model_, {.chunk = 64});
    EXPECT_EQ(loaded.forward(ids(500, 5), 0), logits) << spec;
  }
}

TEST_F(LatentRows, CannotFollowTheClustersOfEachHead) {
  Context c = context();
  c.attach(parse_spec("kmeans:clusters=16,probes=4,window=31"));
  test::expect_refused("latent rows", [&] { expect_order(c); });
}

INSTANTIATE_TEST_SUITE_P(Models, EngineFamily,
                         testing::Values("mixtral", "gpt-oss", "qwen3-next", "qwen35", "qwen35-moe",
                                         "deepseek-v3", "gemma4", "gemma4-moe"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lode
