// SPDX-License-Identifier: Apache-2.0
#include "lodestone/scheduler.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "lodestone/error.h"
#include "support/lisbon.h"

namespace lode {
namespace {

std::shared_ptr<const Model> pocket() {
  static const auto model = Model::load(std::filesystem::path(LODESTONE_SOURCE_DIR) / "models/pocket", 2);
  return model;
}

std::vector<TokenId> tokens_of(const std::string& text, Tokenizer::Bos bos = Tokenizer::Bos::none) {
  return pocket()->tokenizer().encode(text, bos);
}

std::shared_ptr<const Document> lisbon(std::int64_t needle, const std::vector<std::string>& specs = {}) {
  DocumentOptions options = {.kv_type = DType::bf16, .max_tokens = 8192};
  for (const std::string& spec : specs) options.specs.push_back(parse_spec(spec));
  const std::string text = test::lisbon_text(needle, 120);
  return Document::read(pocket(), tokens_of(text, Tokenizer::Bos::as_template), text, options);
}

TEST(Scheduler, AnswersAQuestionAboutADocument) {
  Scheduler scheduler(pocket());
  const auto document = lisbon(40, {"kmeans:window=255"});
  const auto answer = scheduler
                          .submit({.document = document,
                                   .prompt = tokens_of(test::kLisbonQuestion),
                                   .attention = document->methods()[0],
                                   .options = {.max_new_tokens = 8}})
                          .result.get();
  EXPECT_FALSE(answer.generation.text.empty());
  EXPECT_EQ(scheduler.stats().answered, 1);
}

TEST(Scheduler, RefusesWhatItCanNeverAnswer) {
  Scheduler scheduler(pocket());
  const auto document = lisbon(40);
  EXPECT_THROW(scheduler.submit({.document = document, .prompt = {5}, .attention = parse_spec("kmeans")}),
               InputError);
  EXPECT_THROW(scheduler.submit({.document = document, .prompt = {}, .attention = parse_spec("full")}),
               InputError);
  EXPECT_THROW(
      scheduler.submit(
          {.document = document, .prompt = std::vector<TokenId>(8192, 5), .attention = parse_spec("full")}),
      InputError);
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
