// SPDX-License-Identifier: Apache-2.0
// A context whose rows lie by clusters: answers, sources and files are those of one in token order, and
// whatever needs token order finds it.
#include "engine/row_order.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "base/file.h"
#include "kernels/bf16_product.h"
#include "lodestone/engine.h"
#include "support/lisbon.h"
#include "support/source_dir.h"

namespace lode {
namespace {

const std::filesystem::path kPocket = source_dir() / "models/pocket";

class RowOrderOnPocket : public testing::TestWithParam<const char*> {
 protected:
  Context context_of(int sentences) const {
    Context context(model_, {.max_tokens = 4096});
    context.attach(parse_spec(GetParam()));
    context.prefill(model_->tokenizer().encode(test::lisbon_text(0, sentences), Tokenizer::Bos::as_template));
    context.build_indexes();
    return context;
  }
  Generation ask(Context& context, SourceMass* sources = nullptr) const {
    const std::int64_t before = context.tokens();
    const auto question = model_->tokenizer().encode(test::kLisbonQuestion, Tokenizer::Bos::none);
    Generation g = context.generate(question, context.attach(parse_spec(GetParam())),
                                    {.max_new_tokens = 16, .stop = {"\n"}}, sources);
    context.roll_back(before);
    return g;
  }
  static bool ordered(const Context& context) { return ordered_end(context.impl()) > 0; }

  std::shared_ptr<const Model> model_ = Model::load(kPocket);
};

TEST_P(RowOrderOnPocket, AnswersAndSourcesAreTheSame) {
  Context context = context_of(75);
  SourceMass before, after;
  const Generation plain = ask(context, &before);
  EXPECT_FALSE(ordered(context)) << "nobody has asked for it";
  ASSERT_TRUE(order_rows(context));
  EXPECT_TRUE(ordered(context));
  EXPECT_TRUE(order_rows(context)) << "again: nothing to do";
  const Generation g = ask(context, &after);
  EXPECT_EQ(g.tokens, plain.tokens);
  EXPECT_EQ(g.text, test::kLisbonAnswer);
  // Sums over rows in another order have other last bits, which products in bf16 may round the other way.
  const double share = bf16_product_kernels() == nullptr ? 0 : 1e-3;
  EXPECT_NEAR(static_cast<double>(g.work.far_keys), static_cast<double>(plain.work.far_keys),
              share * static_cast<double>(plain.work.far_keys));
  EXPECT_TRUE(ordered(context)) << "a question that is rolled back leaves the order";
  ASSERT_EQ(after.mass.size(), before.mass.size());
  const auto moved = static_cast<std::size_t>(ordered_end(context.impl()));
  EXPECT_GT(
      std::accumulate(before.mass.begin() + 8, before.mass.begin() + static_cast<std::ptrdiff_t>(moved), 0.0),
      0.1)
      << "the rows that have moved matter";
  double most = 0.0;
  for (std::size_t i = 0; i < before.mass.size(); ++i)
    most = std::max<double>(most, std::abs(after.mass[i] - before.mass[i]));
  EXPECT_LT(most, 2e-3 * *std::max_element(before.mass.begin(), before.mass.end()))
      << "sources are tokens, not rows";
}

TEST_P(RowOrderOnPocket, SavedToTheBitAsBefore) {
  const auto path = [](const char* name) {
    return std::filesystem::temp_directory_path() / ("order-" + std::to_string(getpid()) + name);
  };
  Context context = context_of(75);
  context.save(path("a"), "text");
  ASSERT_TRUE(order_rows(context));
  context.save(path("b"), "text");
  EXPECT_TRUE(read_file(path("a")) == read_file(path("b")));

  // Mapped rows move as well, and the file stays what it is.
  Context loaded = Context::load(path("b"), model_, {});
  ASSERT_TRUE(order_rows(loaded));
  EXPECT_EQ(ask(loaded).tokens, ask(context).tokens);
  EXPECT_TRUE(read_file(path("a")) == read_file(path("b")));
  EXPECT_TRUE(ordered(loaded));
  loaded.save(path("c"), "text");
  EXPECT_TRUE(read_file(path("a")) == read_file(path("c")));
  for (const char* name : {"a", "b", "c"}) std::filesystem::remove(path(name));
}

TEST_P(RowOrderOnPocket, TokenOrderWhereItIsNeeded) {
  Context context = context_of(75);
  ASSERT_TRUE(order_rows(context));
  const std::int64_t half = context.tokens() / 2;
  context.roll_back(half);
  EXPECT_FALSE(ordered(context)) << "rows that are cut are named by tokens";
  Context plain = context_of(75);
  plain.roll_back(half);
  for (int layer : {0, 3})
    for (const KvStore::Part part : {KvStore::Part::k, KvStore::Part::v})
      EXPECT_TRUE(
          std::ranges::equal(context.impl().kv.rows(layer, 1, part), plain.impl().kv.rows(layer, 1, part)));
  EXPECT_EQ(ask(context).tokens, ask(plain).tokens);

  Context other = context_of(75);
  ASSERT_TRUE(order_rows(other));
  const MethodId topk = other.attach(parse_spec("topk:k=64"));
  EXPECT_FALSE(ordered(other)) << "another method reads rows by their tokens";
  EXPECT_FALSE(order_rows(other)) << "two methods";
  other.build_indexes();
  const auto question =
      model_->tokenizer().encode(" The entry code of the Lisbon archive is", Tokenizer::Bos::none);
  EXPECT_EQ(other.generate(question, topk, {.max_new_tokens = 6}).text, test::kLisbonAnswer);
}

TEST_P(RowOrderOnPocket, GrowsBehindTheOrderedRows) {
  Context ordered_rows = context_of(75), plain = context_of(75);
  ASSERT_TRUE(order_rows(ordered_rows));
  for (Context* context : {&ordered_rows, &plain}) {
    context->prefill(model_->tokenizer().encode(test::lisbon_text(0, 12), Tokenizer::Bos::none));
    context->build_indexes();
  }
  EXPECT_TRUE(ordered(ordered_rows));
  EXPECT_EQ(ask(ordered_rows).tokens, ask(plain).tokens);
}

/// What was appended is forgotten and other text appended: an index anew over rows of the old order would be
/// of no text.
TEST_P(RowOrderOnPocket, ForgetsWhatWasAppended) {
  Context ordered_rows = context_of(75), plain = context_of(75);
  const std::int64_t first = plain.tokens();
  ASSERT_TRUE(order_rows(ordered_rows));
  const auto path = [](const char* name) {
    return std::filesystem::temp_directory_path() / ("forget-" + std::to_string(getpid()) + name);
  };
  for (Context* context : {&ordered_rows, &plain}) {
    context->prefill(model_->tokenizer().encode(test::lisbon_text(0, 12), Tokenizer::Bos::none));
    context->build_indexes();
    context->roll_back(first);
    context->prefill(model_->tokenizer().encode(test::lisbon_text(12, 26), Tokenizer::Bos::none));
    context->build_indexes();
  }
  EXPECT_EQ(ask(ordered_rows).tokens, ask(plain).tokens);
  ordered_rows.save(path("a"), "text");
  plain.save(path("b"), "text");
  EXPECT_TRUE(read_file(path("a")) == read_file(path("b")));
  for (const char* name : {"a", "b"}) std::filesystem::remove(path(name));
}

INSTANTIATE_TEST_SUITE_P(Engine, RowOrderOnPocket,
                         testing::Values("kmeans:window=256", "saap:window=256",
                                         "squeezed:levels=2,sparsity=0.5,spread=off"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase_if(name, [](char c) { return std::isalnum(c) == 0; });
                           return name;
                         });

TEST(RowOrder, NothingToOrder) {
  const auto model = Model::load(kPocket);
  for (const char* const text : {"full", "hash", "squeezed"}) {
    Context context(model, {.max_tokens = 512});
    context.attach(parse_spec(text));
    EXPECT_FALSE(order_rows(context)) << "before there is an index";
    context.prefill(model->tokenizer().encode("A short text.", Tokenizer::Bos::as_template));
    context.build_indexes();
    EXPECT_FALSE(order_rows(context)) << text;
  }
}

}  // namespace
}  // namespace lode
