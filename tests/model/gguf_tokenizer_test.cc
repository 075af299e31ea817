// SPDX-License-Identifier: Apache-2.0
// Tokenizers of GGUF files: the same tokens as Hugging Face's tokenizers and as sentencepiece
// (tests/golden/make_gguf_goldens.py), and metadata that does not fit together is named.
#include "text/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "io/gguf_writer.h"
#include "lodestone/tokenizer.h"
#include "support/gguf_file.h"
#include "support/refusal.h"
#include "support/source_dir.h"

namespace lode {
namespace {

using test::expect_refused;
using test::GgufBuilder;
using test::raw;

const std::string kGolden = source_dir().string() + "/tests/golden/";

Json read_json(const std::string& name) {
  return parse_json(read_file(kGolden + name), name);
}

Tokenizer tokenizer_of(const GgufBuilder& builder) {
  const std::string bytes = builder.file();
  const GgufFile file = parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf");
  return Tokenizer::parse(tokenizer_json(file.metadata), "m.gguf");
}

/// What a converter makes of a tokenizer.json: byte-level with a cutting, else characters of Gemma 4's kind.
GgufBuilder converted(const Json& json, const char* cutting) {
  std::vector<std::string> texts, merges;
  std::vector<std::int32_t> kinds;
  const auto put = [&](std::size_t id, const std::string& text, std::int32_t kind) {
    if (texts.size() <= id) texts.resize(id + 1), kinds.resize(id + 1, 1);
    texts[id] = text;
    kinds[id] = kind;
  };
  for (const auto& [text, id] : json["model"]["vocab"].items()) put(id.get<std::size_t>(), text, 1);
  for (const Json& token : json["added_tokens"])
    put(token["id"].get<std::size_t>(), token["content"].get<std::string>(),
        token["special"] == true ? 3 : 4);
  for (const Json& merge : json["model"]["merges"])
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  GgufBuilder b;
  if (cutting != nullptr)
    b.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", cutting);
  else
    b.text("tokenizer.ggml.model", "gemma4").number("tokenizer.ggml.unknown_token_id", 0);
  b.texts("tokenizer.ggml.tokens", texts).texts("tokenizer.ggml.merges", merges);
  b.array("tokenizer.ggml.token_type", test::kI32, kinds);
  return b.number("tokenizer.ggml.bos_token_id", json["model"]["vocab"]["<s>"].get<std::uint32_t>());
}

/// Added tokens that strip blanks or stand alone, of which converted files say nothing.
std::vector<std::string> odd_tokens(const Json& json, const std::vector<const char*>& keys = {
                                                          "lstrip", "rstrip", "single_word", "normalized"}) {
  std::vector<std::string> odd;
  for (const Json& token : json["added_tokens"])
    for (const char* key : keys)
      if (token[key] == true) odd.push_back(token["content"].get<std::string>());
  odd.push_back("cafe\xcc\x81");  // equal to one of them when normalised
  return odd;
}

struct ConvertedCase {
  const char *golden, *cutting;
};

class ConvertedGolden : public testing::TestWithParam<ConvertedCase> {};

TEST_P(ConvertedGolden, SameTokensAsTokenizers) {
  const std::string name = std::string("tokenizers/") + GetParam().golden;
  const Json json = read_json(name + ".tokenizer.json"), golden = read_json(name + ".golden.json"),
             texts = read_json("tokenizers/texts.json")["texts"];
  const Tokenizer tokenizer = tokenizer_of(converted(json, GetParam().cutting));
  const std::vector<std::string> odd = odd_tokens(json);
  int compared = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto has = [&](const std::string& token) { return text.find(token) != std::string::npos; };
    if (std::any_of(odd.begin(), odd.end(), has)) continue;
    EXPECT_EQ(tokenizer.encode(text, Tokenizer::Bos::as_template, Tokenizer::Special::parsed),
              golden["parsed"][i].get<std::vector<TokenId>>())
        << texts[i].dump();
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

INSTANTIATE_TEST_SUITE_P(Cuttings, ConvertedGolden,
                         testing::Values(ConvertedCase{"llama3", "llama-bpe"}, ConvertedCase{"qwen", "qwen2"},
                                         ConvertedCase{"smollm", "smollm"}, ConvertedCase{"gemma", nullptr},
                                         ConvertedCase{"qwen35", "qwen35"}, ConvertedCase{"kimi", "kimi-k2"},
                                         ConvertedCase{"deepseek", "deepseek-v3"},
                                         ConvertedCase{"deepseek_llm", "deepseek-llm"}),
                         [](const auto& info) { return info.param.golden; });

TEST(SentencePieceGolden, SameTokensAsSentencePiece) {
  const Tokenizer tokenizer = Tokenizer::read(kGolden + "gguf/sentencepiece.gguf");
  const Json golden = read_json("gguf/sentencepiece.json");
  for (const Json& one : golden) {
    const auto text = one["text"].get<std::string>();
    const auto tokens = tokenizer.encode(text, Tokenizer::Bos::as_template);
    EXPECT_EQ(tokens, one["ids"].get<std::vector<TokenId>>()) << one["text"].dump();
    EXPECT_EQ(tokenizer.decode(tokens), one["decoded"].get<std::string>());
  }
  EXPECT_GT(golden.size(), 100u);
}

/// What add_tokenizer writes, read back.
struct Written {
  explicit Written(const Json& json) {
    std::int64_t vocab = 0;
    for (const auto& [text, id] : json["model"]["vocab"].items())
      vocab = std::max(vocab, id.get<std::int64_t>() + 1);
    for (const Json& token : json["added_tokens"])
      vocab = std::max(vocab, token["id"].get<std::int64_t>() + 1);
    GgufWriter writer;
    add_tokenizer(json, "tokenizer.json", vocab, writer);
    bytes = writer.metadata_alone();
    file = parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf");
  }
  std::string_view kind() const { return file.metadata.text("tokenizer.ggml.model"); }
  Tokenizer tokenizer() const { return Tokenizer::parse(tokenizer_json(file.metadata), "m.gguf"); }

  std::string bytes;
  GgufFile file;
};

/// As in files converted from SentencePiece: every way to cut a token into two that are known merges to it, and none to
/// a special token.
Json with_all_cuts(Json json) {
  for (Json& token : json["added_tokens"])
    if (token["content"] == "\n\n") token["special"] = false;
  Json& model = json["model"];
  Json merges = Json::array();
  for (const Json& merge : model["merges"]) {
    const std::string text = merge.is_string()
                                 ? merge.get<std::string>()
                                 : merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    const std::string both = text.substr(0, text.find(' ')) + text.substr(text.find(' ') + 1);
    for (std::size_t at = 1; at < both.size(); ++at) {
      const std::string left = both.substr(0, at), right = both.substr(at);
      if (model["vocab"].contains(left) && model["vocab"].contains(right)) merges.push_back({left, right});
    }
  }
  model["merges"] = std::move(merges);
  return json;
}

/// Merges of one token stand apart: the first cut of each, then the others.
Json with_cuts_apart(const Json& json) {
  Json all = with_all_cuts(json), firsts = Json::array(), others = Json::array();
  std::set<std::string> seen;
  for (const Json& merge : all["model"]["merges"])
    (seen.insert(merge[0].get<std::string>() + merge[1].get<std::string>()).second ? firsts : others)
        .push_back(merge);
  firsts.insert(firsts.end(), others.begin(), others.end());
  all["model"]["merges"] = std::move(firsts);
  return all;
}

void expect_same_tokens(const Json& json, const Tokenizer& written) {
  const Tokenizer original = Tokenizer::parse(json.dump(), "tokenizer.json");
  const Json texts = read_json("tokenizers/texts.json")["texts"];
  const std::vector<std::string> odd = odd_tokens(json, {"normalized"});
  const bool decodes = json["decoder"]["type"] != "Metaspace";  // such a one leaves byte tokens as they are
  int compared = 0;
  for (const Json& one : texts) {
    const auto text = one.get<std::string>();
    const auto has = [&](const std::string& token) { return text.find(token) != std::string::npos; };
    if (std::any_of(odd.begin(), odd.end(), has)) continue;
    for (const auto special : {Tokenizer::Special::parsed, Tokenizer::Special::as_text}) {
      const auto tokens = written.encode(text, Tokenizer::Bos::as_template, special);
      EXPECT_EQ(tokens, original.encode(text, Tokenizer::Bos::as_template, special)) << one.dump();
      if (decodes) {
        EXPECT_EQ(written.decode(tokens), original.decode(tokens)) << one.dump();
      }
    }
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

class WrittenTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(WrittenTokenizer, GivesTheSameTokens) {
  const Json json = read_json(std::string("tokenizers/") + GetParam() + ".tokenizer.json");
  expect_same_tokens(json, Written(json).tokenizer());
  if (!json["model"].value("byte_fallback", false)) return;
  const Json all = with_all_cuts(json), apart = with_cuts_apart(json);
  const Written scored(all), listed(apart);
  EXPECT_EQ(scored.kind(), "llama");
  EXPECT_EQ(listed.kind(), "gemma4");
  expect_same_tokens(all, scored.tokenizer());
  expect_same_tokens(apart, listed.tokenizer());
}

INSTANTIATE_TEST_SUITE_P(Goldens, WrittenTokenizer,
                         testing::Values("llama2", "gemma", "mistral", "phi3", "metaspace", "llama3", "qwen",
                                         "smollm", "qwen35", "kimi", "deepseek", "deepseek_llm"),
                         [](const auto& info) { return info.param; });

/// The merges that transformers makes of a SentencePiece vocabulary: all cuts of a token side by side, the best first.
Json merges_of_scores(std::span<const std::string_view> texts, std::span<const float> scores,
                      const Json& vocab) {
  std::vector<std::size_t> order(texts.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[a] > scores[b]; });
  Json merges = Json::array();
  for (const std::size_t id : order)
    for (std::size_t at = 1; at < texts[id].size(); ++at) {
      const std::string left(texts[id].substr(0, at)), right(texts[id].substr(at));
      if (invalid_utf8(left) == std::string_view::npos && vocab.contains(left) && vocab.contains(right))
        merges.push_back({left, right});
    }
  return merges;
}

TEST(WrittenTokenizer, AVocabularyOfSentencePieceComesBackAsOne) {
  const MappedFile mapped(kGolden + "gguf/sentencepiece.gguf");
  const GgufFile file = parse_gguf(mapped.bytes(), "sentencepiece.gguf");
  const auto texts = file.metadata.texts("tokenizer.ggml.tokens");
  const auto scores = file.metadata.numbers("tokenizer.ggml.scores");
  const auto kinds = file.metadata.integers("tokenizer.ggml.token_type", 0, 6);
  Json json = read_json("tokenizers/llama2.tokenizer.json"), vocab = Json::object(), added = Json::array();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    vocab[std::string(texts[i])] = i;
    if (kinds[i] == 2 || kinds[i] == 3)
      added.push_back({{"id", i}, {"content", texts[i]}, {"special", true}});
  }
  json["model"]["merges"] = merges_of_scores(texts, scores, vocab);
  json["model"]["vocab"] = std::move(vocab);
  json["added_tokens"] = std::move(added);
  const Written written(json);
  EXPECT_EQ(written.kind(), "llama");
  const Tokenizer tokenizer = written.tokenizer();
  for (const Json& one : read_json("gguf/sentencepiece.json"))
    EXPECT_EQ(tokenizer.encode(one["text"].get<std::string>(), Tokenizer::Bos::as_template),
              one["ids"].get<std::vector<TokenId>>())
        << one["text"].dump();
}

TEST(WrittenTokenizer, WhatGgufHasNoWordsForIsNamed) {
  const Json llama = read_json("tokenizers/llama2.tokenizer.json");
  const auto refused = [&](std::string_view what, const char* pointer, Json value) {
    Json json = llama;
    json[Json::json_pointer(pointer)] = std::move(value);
    expect_refused(what, [&] { Written written(json); });
  };
  refused("'normalizer'", "/normalizer", {{"type", "NFC"}});
  refused("'pre_tokenizer'", "/normalizer", nullptr);
  refused("'pre_tokenizer'", "/pre_tokenizer", {{"type", "Digits"}});
  refused("'ignore_merges'", "/model/ignore_merges", true);
  refused("blanks", "/model/merges/0", {"t ", "h"});
  refused("'byte_fallback'", "/model/byte_fallback", false);
  GgufWriter writer;
  expect_refused("vocabulary of 100", [&] { add_tokenizer(llama, "tokenizer.json", 100, writer); });
}

TEST(WrittenTokenizer, WhatTokensDoToBlanksComesBack) {
  for (const char* const golden : {"llama2", "qwen"}) {
    Json json = read_json(std::string("tokenizers/") + golden + ".tokenizer.json");
    Json& token = json["added_tokens"][1];
    const std::string text = "a \n" + token["content"].get<std::string>() + " \n b";
    for (const char* const field : {"lstrip", "rstrip", "single_word"}) token[field] = true;
    token["normalized"] = false;
    const auto encode = [&](const Tokenizer& t) {
      return t.encode(text, Tokenizer::Bos::none, Tokenizer::Special::parsed);
    };
    EXPECT_EQ(encode(Written(json).tokenizer()), encode(Tokenizer::parse(json.dump(), "tokenizer.json")))
        << golden;
  }
}

TEST(WrittenTokenizer, ABeginningThatTextsDoNotHaveIsNamed) {
  Json json = read_json("tokenizers/llama2.tokenizer.json");
  json["post_processor"] = nullptr;
  GgufWriter writer;
  const std::vector<TokenId> bos = {1};
  add_tokenizer(json, "tokenizer.json", 32000, writer, bos);
  const std::string bytes = writer.metadata_alone();
  const GgufFile file = parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf");
  EXPECT_EQ(file.metadata.integer("tokenizer.ggml.bos_token_id", 0, 9), 1);
  const Tokenizer written = Tokenizer::parse(tokenizer_json(file.metadata), "m.gguf");
  EXPECT_EQ(written.encode("a", Tokenizer::Bos::as_template), written.encode("a", Tokenizer::Bos::none));
}

/// A SentencePiece vocabulary of a few words.
GgufBuilder small(const char* without = "") {
  const std::vector<std::string> texts = {
      "<unk>", "<s>", "</s>", "\xe2\x96\x81", "a", "b", "ab", "<end_of_turn>", "\xe2\x96\x81\xe2\x96\x81"};
  GgufBuilder b;
  const auto wanted = [&](std::string_view key) { return key != without; };
  if (wanted("model")) b.text("tokenizer.ggml.model", "llama");
  if (wanted("tokens")) b.texts("tokenizer.ggml.tokens", texts);
  if (wanted("scores")) b.array<float>("tokenizer.ggml.scores", test::kF32, {0, 0, 0, -3, -4, -5, -1, 0, 0});
  if (wanted("types"))
    b.array<std::int32_t>("tokenizer.ggml.token_type", test::kI32, {2, 3, 3, 1, 1, 1, 1, 3, 4});
  if (wanted("bos")) b.number("tokenizer.ggml.bos_token_id", 1);
  b.number("tokenizer.ggml.unknown_token_id", 0);
  return b;
}

TEST(GgufTokenizer, SpecialTokensPrefixesAndUnknowns) {
  const Tokenizer t = tokenizer_of(small());
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(t.encode("ab", Tokenizer::Bos::as_template), (Ids{1, 3, 6}));
  EXPECT_EQ(t.encode("x", Tokenizer::Bos::none), (Ids{3, 0}));  // no byte tokens: unknown
  EXPECT_EQ(t.encode("a<end_of_turn>", Tokenizer::Bos::none, Tokenizer::Special::parsed), (Ids{3, 4, 7}));
  EXPECT_EQ(t.encode("a  b", Tokenizer::Bos::none),
            (Ids{3, 4, 8, 3, 5}));  // two blanks are a token of their own
  EXPECT_EQ(t.decode(Ids{1, 3, 6}), "ab");
  GgufBuilder b = small();
  b.key("tokenizer.ggml.add_bos_token", test::kBool, raw(std::uint8_t{0}));
  b.key("tokenizer.ggml.add_space_prefix", test::kBool, raw(std::uint8_t{0}));
  EXPECT_EQ(tokenizer_of(b).encode("ab", Tokenizer::Bos::as_template), Ids{6});
}

TEST(GgufTokenizer, EndTokensAreThoseOfTheFileAndOfTurns) {
  GgufBuilder b = small();
  b.number("tokenizer.ggml.eos_token_id", 2).number("tokenizer.ggml.eot_token_id", 2);
  const std::string bytes = b.file();
  EXPECT_EQ(end_tokens(parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf").metadata),
            (std::vector<TokenId>{2, 7}));
  b.array<std::int32_t>(kEndTokens, test::kI32, {3, 2});
  const std::string more = b.file();
  EXPECT_EQ(end_tokens(parse_gguf(std::as_bytes(std::span(more)), "m.gguf").metadata),
            (std::vector<TokenId>{2, 3, 7}));
}

TEST(GgufTokenizer, AChannelsEndIsNoEndOfAnAnswer) {
  const auto ends = [](const std::vector<std::string>& texts) {
    GgufBuilder b;
    b.texts("tokenizer.ggml.tokens", texts).number("tokenizer.ggml.eos_token_id", 1);
    const std::string bytes = b.file();
    return end_tokens(parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf").metadata);
  };
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(ends({"a", "<|end|>"}), Ids{1});  // Phi's
  EXPECT_EQ(ends({"a", "<|return|>", "<|end|>"}), (Ids{1, 2}));
  EXPECT_EQ(ends({"a", "<|return|>", "<|end|>", "<|call|>"}), (Ids{1, 3}));
  EXPECT_EQ(ends({"<|call|>", "<|end|>", "<|return|>"}), (Ids{0, 2}));  // though the file names it
}

TEST(GgufTokenizer, WhatDoesNotFitIsNamed) {
  const auto refused = [](std::string_view what, const GgufBuilder& b) {
    expect_refused(what, [&] { tokenizer_of(b); });
  };
  refused("tokenizer.ggml.merges", small("model").text("tokenizer.ggml.model", "gemma4"));
  for (const char* key : {"model", "tokens", "scores"})
    refused(std::string("tokenizer.ggml.") + key, small(key));
  refused("bos_token_id", small("bos"));
  refused("tokenizer.ggml.model", small("model").text("tokenizer.ggml.model", "t5"));
  refused("tokenizer.ggml.scores", small("scores").array<float>("tokenizer.ggml.scores", test::kF32, {0, 0}));
  refused("tokenizer.ggml.scores", small("scores").array<std::uint8_t>("tokenizer.ggml.scores", test::kU8,
                                                                       std::vector<std::uint8_t>(9)));
  refused("finite",
          small("scores").array<float>("tokenizer.ggml.scores", test::kF32,
                                       {0, 0, 0, 0, 0, 0, std::numeric_limits<float>::quiet_NaN(), 0, 0}));
  refused("tokenizer.ggml.token_type",
          small("types").array<std::int32_t>("tokenizer.ggml.token_type", test::kI32, {1, 2}));
  refused("tokenizer.ggml.token_type",
          small("types").array<std::int32_t>("tokenizer.ggml.token_type", test::kI32,
                                             std::vector<std::int32_t>(9, 7)));
  refused("tokenizer.ggml.bos_token_id", small("bos").number("tokenizer.ggml.bos_token_id", 9));
  refused("add_eos_token", small().key("tokenizer.ggml.add_eos_token", test::kBool, raw(std::uint8_t{1})));
  std::vector<std::string> texts(9, "same");
  refused("'same'", small("tokens").texts("tokenizer.ggml.tokens", texts));
  for (int i = 0; i < 9; ++i) texts[static_cast<std::size_t>(i)] = std::to_string(i);
  texts[4] = "\xff";
  refused("token 4", small("tokens").texts("tokenizer.ggml.tokens", texts));
  texts[4] = std::string(600, 'x');
  refused("512", small("tokens").texts("tokenizer.ggml.tokens", texts));
  GgufBuilder bytes;
  bytes.text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", {"a", "b", "ab"});
  refused("tokenizer.ggml.pre", bytes);
  GgufBuilder unknown = bytes;
  refused("'mystery'", unknown.text("tokenizer.ggml.pre", "mystery"));
  bytes.text("tokenizer.ggml.pre", "gpt-2");
  refused("tokenizer.ggml.merges", bytes);
  GgufBuilder merges = bytes;
  refused("'c'", merges.texts("tokenizer.ggml.merges", {"a c"}));
  merges = bytes;
  refused("merge", merges.texts("tokenizer.ggml.merges", {"ab"}));
  EXPECT_EQ(tokenizer_of(bytes.texts("tokenizer.ggml.merges", {"a b"})).encode("ab", Tokenizer::Bos::none),
            std::vector<TokenId>{2});
}

}  // namespace
}  // namespace lode
