// SPDX-License-Identifier: Apache-2.0
// The tokenizer on small vocabularies made here, where the right tokens can be told by hand.
#include "lodestone/tokenizer.h"

#include <gtest/gtest.h>

#include <ctime>
#include <string>

#include "base/json.h"
#include "base/rng.h"
#include "lodestone/error.h"

namespace lode {
namespace {

using Ids = std::vector<TokenId>;

// Ġ (U+0120) is how byte-level BPE spells a blank, Ã© the two bytes of é.
constexpr const char* kByteLevel = R"({
  "added_tokens": [{"id": 0, "content": "<bos>", "special": true}, {"id": 20, "content": "<tool>"}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
  "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}}},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "vocab": {"<bos>": 0, "a": 1, "b": 2, "c": 3, "Ġ": 4, "ab": 5, "abc": 6, "Ġa": 7,
    "<": 8, "o": 9, "s": 10, ">": 11, "Ã": 12, "©": 13, "bc": 14},
    "merges": ["a b", ["ab", "c"], "Ġ a", "b c"]}})";

TEST(Tokenizer, MergesByRank) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  EXPECT_EQ(t.encode("abc bc ab", Tokenizer::Bos::none), (Ids{6, 4, 14, 4, 5}));
  EXPECT_EQ(t.encode("", Tokenizer::Bos::none), Ids{});
  EXPECT_EQ(t.encode("", Tokenizer::Bos::as_template), Ids{0});
  EXPECT_EQ(t.vocab(), 21);
}

/// The tokens of a word after one merge at a time: the first in the list, of equal ones the leftmost.
std::vector<std::string> merged(std::string_view word,
                                const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> tokens;
  for (const char c : word) tokens.emplace_back(1, c);
  for (bool again = true; again;) {
    again = false;
    for (const auto& [left, right] : merges) {
      for (std::size_t i = 0; i + 1 < tokens.size() && !again; ++i) {
        if (tokens[i] != left || tokens[i + 1] != right) continue;
        tokens[i] += right;
        tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        again = true;
      }
      if (again) break;
    }
  }
  return tokens;
}

// Short and long words are merged in different ways, long ones with a queue.
TEST(Tokenizer, WordsOfAnyLengthMergeByRank) {
  const std::vector<std::pair<std::string, std::string>> merges = {
      {"b", "c"}, {"a", "bc"}, {"c", "a"}, {"a", "b"}, {"abc", "a"}, {"ab", "ab"}, {"abc", "abca"}};
  Json json = {
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}}}, {"merges", Json::array()}}}};
  for (const auto& [left, right] : merges) {
    json["model"]["vocab"].emplace(left + right, json["model"]["vocab"].size());
    json["model"]["merges"].push_back(left + " " + right);
  }
  const Tokenizer t = Tokenizer::parse(json.dump(), "test");
  Rng rng(1);
  for (std::size_t length = 1; length < 120; ++length) {
    std::string word;
    while (word.size() < length) word += static_cast<char>('a' + rng.below(3));
    Ids expected;
    for (const std::string& token : merged(word, merges)) expected.push_back(json["model"]["vocab"][token]);
    EXPECT_EQ(t.encode(word, Tokenizer::Bos::none), expected) << word;
  }
}

TEST(Tokenizer, SpecialTokensInTextAreTextUnlessParsed) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  EXPECT_EQ(t.encode("a<bos>b", Tokenizer::Bos::none), (Ids{1, 8, 2, 9, 10, 11, 2}));
  EXPECT_EQ(t.encode("a<bos>b", Tokenizer::Bos::none, Tokenizer::Special::parsed), (Ids{1, 0, 2}));
  EXPECT_EQ(t.encode("a<tool>b", Tokenizer::Bos::none), (Ids{1, 20, 2})) << "not special, so always found";
}

TEST(Tokenizer, InvalidUtf8IsNamedByOffset) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  try {
    t.encode("ab\xff", Tokenizer::Bos::none);
    FAIL();
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("offset 2"), std::string::npos) << e.what();
  }
}

std::string refusal(const std::string& json) {
  try {
    Tokenizer::parse(json, "T");
  } catch (const InputError& e) {
    return e.what();
  }
  return "accepted";
}

/// kByteLevel with one member, named by a JSON pointer, replaced.
std::string with(const char* pointer, const char* value) {
  Json json = Json::parse(kByteLevel);
  json[Json::json_pointer(pointer)] = Json::parse(value);
  return json.dump();
}

TEST(Tokenizer, NamesWhatItDoesNotSupport) {
  const auto refused = [](const char* pointer, const char* value, const char* expected) {
    EXPECT_NE(refusal(with(pointer, value)).find(expected), std::string::npos)
        << pointer << " " << value << ": " << refusal(with(pointer, value));
  };
  refused("/model/type", R"("Unigram")", "'Unigram'");
  refused("/model/type", "7", "'type'");
  refused("/model/continuing_subword_prefix", R"("##")", "'continuing_subword_prefix'");
  refused("/model/end_of_word_suffix", R"("</w>")", "'end_of_word_suffix'");
  refused("/model/dropout", "0.1", "'dropout'");
  refused("/normalizer", R"({"type": "Lowercase"})", "'Lowercase'");
  refused("/normalizer", R"({"type": "Sequence"})", "'normalizers'");
  refused("/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": "x"})", "empty");
  refused("/pre_tokenizer", R"({"type": "Whitespace"})", "'Whitespace'");
  refused("/pre_tokenizer", R"({"type": "Split", "pattern": {"String": " "}, "behavior": "Odd"})", "'Odd'");
  refused("/pre_tokenizer",
          R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
          "ByteLevel");
  refused("/pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})", "'replacement'");
  refused("/post_processor", R"({"type": "BertProcessing"})", "'BertProcessing'");
  refused("/post_processor/single", R"([{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<bos>"}}])",
          "after the text");
  refused("/post_processor/special_tokens/<bos>/ids", "[99]", "99");
  refused("/post_processor/special_tokens/<bos>/ids", "[-1]", "special_tokens");
  refused("/decoder", R"({"type": "WordPiece"})", "'WordPiece'");
  refused("/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})", "'start'");
}

TEST(Tokenizer, RefusesADamagedVocabulary) {
  const auto refused = [](const char* pointer, const char* value, const char* expected) {
    EXPECT_NE(refusal(with(pointer, value)).find(expected), std::string::npos)
        << pointer << " " << value << ": " << refusal(with(pointer, value));
  };
  refused("/model/vocab", "{}", "'vocab'");
  refused("/model/vocab", "[]", "'vocab'");
  refused("/model/vocab/b", "1", "same id");
  refused("/model/vocab/b", "-1", "'b'");
  refused("/model/vocab/b", "2147483648", "'b'");
  refused("/model/vocab/b", "1e30", "'b'");
  refused("/model/merges", "7", "'merges'");
  refused("/model/merges/0", R"("ab")", "merge 0");
  refused("/model/merges/0", R"("a b c")", "merge 0");
  refused("/model/merges/0", R"(["a"])", "merge 0");
  refused("/model/merges/0", R"("a q")", "'q'");
  refused("/model/merges/0", R"("c a")", "'ca'");
  refused("/added_tokens/0/content", R"("")", "token 0");
  refused("/added_tokens/0/content", R"("<other>")", "at odds");
  refused("/added_tokens/0/id", "3", "at odds");
  refused("/added_tokens/0/id", "4194304", "'id'");
  refused("/added_tokens/1/id", "0", "at odds");
  refused("/added_tokens", "{}", "array");
  EXPECT_NE(refusal(with("/added_tokens/1/content", ('"' + std::string(1 << 20, 'x') + '"').c_str()))
                .find("1048576"),
            std::string::npos);
  for (const char* json :
       {"", "[]", "{", "null", R"({"model": 3})", R"({"a": 1, "a": 2})", "{\"a\": \"\\ud800\"}"}) {
    EXPECT_NE(refusal(json), "accepted") << json;
  }
  EXPECT_NE(refusal(std::string(100000, '[')), "accepted");
}

TEST(Tokenizer, RefusesRegularExpressionsThatItWouldReadOtherwise) {
  for (const char* regex :
       {"(", "[a", "[a[b]]", "[a&&b]", "[]a]", "a{1,2}+", "a{,2}", "\\\\h", "\\\\Gx", "\\\\bx", "(*UTF)a",
        "(?<n>a)", "(?m:a)", "(?#a)", "\\\\p{Nonsense}", "\\\\pL", "\\\\x{110000}", "\\\\1", "a**+?+"}) {
    Json split = Json::parse(R"({"type": "Split", "behavior": "Isolated", "pattern": {}})");
    split["pattern"]["Regex"] = Json::parse('"' + std::string(regex) + '"');
    EXPECT_NE(refusal(with("/pre_tokenizer", split.dump().c_str())).find("regular expression"),
              std::string::npos)
        << regex << refusal(with("/pre_tokenizer", split.dump().c_str()));
  }
}

TEST(Tokenizer, GivesUpOnAnEndlessRegularExpression) {
  const Tokenizer t = Tokenizer::parse(
      with("/pre_tokenizer", R"({"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "(a+)+$"}})"),
      "T");
  EXPECT_THROW(t.encode(std::string(2000, 'a') + "b", Tokenizer::Bos::none), InputError);
}

TEST(Tokenizer, HolesInTheVocabularyMatterOnlyWhenUsed) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  EXPECT_EQ(t.decode(Ids{1, 20}), "a<tool>");
  for (const TokenId id : {15, 19, 21, -1, INT32_MAX, INT32_MIN}) {
    EXPECT_THROW(t.decode(Ids{id}), InputError) << id;
    EXPECT_THROW(t.bytes_of(id), InputError) << id;
    EXPECT_FALSE(t.is_special(id));
  }
}

TEST(Tokenizer, DecodesBrokenCharactersAsReplacements) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  EXPECT_EQ(t.decode(Ids{12, 1, 13, 13, 12, 13, 12}),
            "\xef\xbf\xbd"
            "a\xef\xbf\xbd\xef\xbf\xbdé\xef\xbf\xbd");
  EXPECT_EQ(t.decode(Ids{0, 1}), "a");
  EXPECT_EQ(t.decode(Ids{0, 1}, false), "<bos>a");
}

double seconds_to_encode(const Tokenizer& t, const std::string& text) {
  const std::clock_t start = std::clock();
  t.encode(text, Tokenizer::Bos::none);
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// A million blanks and a word of a megabyte: quadratic work would take hours. Bounds are loose for
// sanitizers.
TEST(Tokenizer, LongWordsTakeLinearTime) {
  const Tokenizer bytes = Tokenizer::parse(with("/model/vocab/ĠĠ", "15"), "T");
  Json json = Json::parse(with("/model/vocab/ĠĠ", "15"));
  json["model"]["merges"].push_back("Ġ Ġ");
  json["normalizer"] = {{"type", "NFC"}};
  const Tokenizer t = Tokenizer::parse(json.dump(), "T");
  EXPECT_LT(seconds_to_encode(t, std::string(1000000, ' ')), 10);
  EXPECT_LT(seconds_to_encode(t, std::string(1000000, 'a')), 10);
  EXPECT_LT(seconds_to_encode(bytes, std::string(1000000, 'x')), 10);
  std::string marks = "e";
  for (int i = 0; i < 100000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";
  EXPECT_LT(seconds_to_encode(t, marks), 10);
}

TEST(StreamDecoder, HoldsBackPartsOfCharacters) {
  const Tokenizer t = Tokenizer::parse(kByteLevel, "test");
  StreamDecoder stream(t);
  EXPECT_EQ(stream.push(1), "a");
  EXPECT_EQ(stream.push(12), "");
  EXPECT_EQ(stream.push(13), "é");
  EXPECT_EQ(stream.push(12), "");
  EXPECT_EQ(stream.push(1),
            "\xef\xbf\xbd"
            "a");
  EXPECT_EQ(stream.push(12), "");
  EXPECT_EQ(stream.finish(), "\xef\xbf\xbd");

  std::string json = kByteLevel;
  json.replace(json.find("\"bc\": 14"), 8, "\"bc\": 14, \"âĤ\": 15, \"¬\": 16");
  const Tokenizer longer = Tokenizer::parse(json, "test");
  StreamDecoder of_three(longer);
  EXPECT_EQ(of_three.push(15), "") << "two of a character's three bytes";
  EXPECT_EQ(of_three.push(16), "€");
}

}  // namespace
}  // namespace lode
