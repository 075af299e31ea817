// SPDX-License-Identifier: Apache-2.0
#include "lodestone/automatic.h"

#include <gtest/gtest.h>

#include "engine/automatic.h"
#include "lodestone/error.h"
#include "support/asking.h"

namespace lode {
namespace {

using test::pocket, test::tokens_of;

Attachments measured(const std::string& methods) {
  return {{kAutoAttachment, {.text = R"({"version":1,"tokens":9000,"methods":[)" + methods + "]}"}}};
}
const std::string kDear =
                      R"({"attention":"squeezed","error":0.01,"agreement":1,"density":0.4,"index_bytes":1})",
                  kCheap =
                      R"({"attention":"kmeans","error":0.03,"agreement":0.99,"density":0.2,"index_bytes":1})",
                  kWrong =
                      R"({"attention":"quest","error":0.03,"agreement":0.5,"density":0.1,"index_bytes":1})";
const std::vector<Spec> kIndexed = {parse_spec("squeezed"), parse_spec("kmeans"), parse_spec("quest")};

TEST(Auto, IsASpecOfItsOwn) {
  EXPECT_FALSE(parse_auto("full"));
  EXPECT_FALSE(parse_auto("autos"));
  ASSERT_TRUE(parse_auto("auto"));
  EXPECT_FALSE(parse_auto("auto")->error);
  EXPECT_FALSE(parse_auto("auto")->share);
  EXPECT_EQ(parse_auto("auto:error=0.02")->error, 0.02);
  EXPECT_TRUE(parse_auto("auto:error=0.02,share=on")->share);
  for (const char* const bad : {"auto:", "auto:error", "auto:error=", "auto:error=0", "auto:error=-1",
                                "auto:error=nan", "auto:share=maybe", "auto:mistake=1", "auto:error=0.1,,"}) {
    if (std::string(bad) == "auto:") continue;  // no keys
    EXPECT_THROW(parse_auto(bad), InputError) << bad;
  }
}

TEST(Auto, TakesTheCheapestThatIsGoodEnough) {
  const Attachments all = measured(kDear + "," + kCheap + "," + kWrong);
  const auto chosen = [&](const std::string& spec) {
    return choose_attention(*parse_auto(spec), all, kIndexed).spec.str();
  };
  EXPECT_EQ(chosen("auto"), "kmeans");
  EXPECT_EQ(choose_attention({}, measured(kCheap + "," + kDear), kIndexed).spec.str(), "kmeans");
  EXPECT_EQ(chosen("auto:error=0.02"), "squeezed");
  EXPECT_EQ(chosen("auto:error=0.001"), "full");
  EXPECT_EQ(chosen("auto:error=0.06"), "quest");  // by the error alone
  EXPECT_EQ(choose_attention({}, all, std::span(kIndexed).first(1)).spec.str(), "squeezed");
  EXPECT_EQ(choose_attention({.share = true}, all, kIndexed).full_beside, 5);
  EXPECT_EQ(choose_attention({}, all, kIndexed).full_beside, 0);
}

/// A fifth of the bytes: 64 MiB are saved of 80.
TEST(Auto, OnAGpuWhatSavesNoTimeIsFull) {
  const Attachments all = measured(kCheap);
  const auto chosen = [&](const AutoPlace& place) {
    return choose_attention({}, all, kIndexed, place).spec.str();
  };
  constexpr std::int64_t kMiB = 1 << 20;
  EXPECT_EQ(chosen({.gpu = false, .layer_bytes = kMiB}), "kmeans");
  EXPECT_EQ(chosen({.gpu = true, .layer_bytes = 79 * kMiB}), "full");
  EXPECT_EQ(chosen({.gpu = true, .layer_bytes = 81 * kMiB}), "kmeans");
  const AutoChoice full =
      choose_attention({.share = true}, all, kIndexed, {.gpu = true, .layer_bytes = kMiB});
  EXPECT_EQ(full.density, 1);
  EXPECT_EQ(full.full_beside, 0);
  EXPECT_FALSE(full.why.empty());
}

TEST(Auto, WithoutAMeasurementItIsFull) {
  for (const Attachments& none : {Attachments(), measured("")}) {
    const AutoChoice choice = choose_attention({}, none, kIndexed);
    EXPECT_EQ(choice.spec.str(), "full");
    EXPECT_FALSE(choice.why.empty());
  }
}

TEST(Auto, AQuestionThatNamesNoMethodIsAnsweredByTheUsualOnes) {
  const auto usual = [](const Attachments& attachments, std::span<const Spec> methods) {
    std::vector<std::string> specs;
    for (const AutoChoice& choice : usual_attention(attachments, methods)) specs.push_back(choice.spec.str());
    return specs;
  };
  using Specs = std::vector<std::string>;
  EXPECT_EQ(usual(measured(kDear + "," + kCheap), kIndexed), Specs{"kmeans"});
  EXPECT_EQ(usual(measured(""), kIndexed), Specs{"full"});
  Specs all;
  for (const Spec& spec : kIndexed) all.push_back(spec.str());
  EXPECT_EQ(usual({}, kIndexed), all);
  EXPECT_EQ(usual({}, {}), Specs{"full"});
}

TEST(Auto, RefusesADamagedMeasurement) {
  for (const char* const text :
       {"", "[]", "{}", R"({"version":2,"methods":[]})", R"({"version":1})",
        R"({"version":1,"methods":[{}]})",
        R"({"version":1,"methods":[{"attention":"kmeans","error":-1,"agreement":1,"density":1}]})"})
    EXPECT_THROW(choose_attention({}, {{kAutoAttachment, {.text = text}}}, kIndexed), InputError) << text;
}

TEST(Auto, MeasuresALongDocumentWhenItIsRead) {
  std::string text;
  for (int i = 0; i < 9; ++i)
    text += test::lisbon_text(100 * i + 5, 100 * i + 55) + std::to_string(7919 * i) + ".\n";
  const auto tokens = tokens_of(text, Tokenizer::Bos::as_template);
  ASSERT_GT(tokens.size(), 8192U);
  auto document = Document::read(pocket(), tokens, text,
                                 {.kv_type = DType::bf16, .max_tokens = 16384, .automatic = true});
  EXPECT_EQ(document->methods().size(), automatic_methods(*pocket(), 8192).size());
  ASSERT_NE(document->attachment(kAutoAttachment), nullptr);
  const AutoPlace place = auto_place(document->impl().context);
  EXPECT_FALSE(place.gpu);
  EXPECT_EQ(place.layer_bytes * pocket()->config().layers, document->kv_bytes());
  const AutoChoice choice = choose_attention({.error = 10}, *document);
  EXPECT_TRUE(document->answers(choice.spec));
  EXPECT_NE(choice.spec.str(), "full") << *document->attachment(kAutoAttachment);
  EXPECT_LT(choice.density, 0.6);
  EXPECT_EQ(choose_attention({.error = 1e-6}, document->attachments(), document->methods()).spec.str(),
            "full");
  const std::string measured = *document->attachment(kAutoAttachment);
  Context context = Document::Impl::take_back(std::move(document));
  EXPECT_EQ(measure_automatic(context), measured) << "the same again";
}

TEST(Auto, IndexesAShortDocumentForNothing) {
  const auto document = Document::read(pocket(), tokens_of("A short text."), "A short text.",
                                       {.max_tokens = 4096, .automatic = true});
  EXPECT_TRUE(document->methods().empty());
  EXPECT_EQ(choose_attention({}, document->attachments(), document->methods()).spec.str(), "full");
}

}  // namespace
}  // namespace lode
