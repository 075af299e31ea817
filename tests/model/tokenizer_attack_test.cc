// SPDX-License-Identifier: Apache-2.0
// Tokenizers and texts made to hurt: malformed or malicious tokenizer.json, texts that are slow elsewhere,
// ids and bytes that mean nothing.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "lodestone/tokenizer.h"
#include "support/refusal.h"
#include "support/tiny_tokenizer.h"

namespace lode {
namespace {

using test::expect_refused;
using test::refusal;

Tokenizer tokenizer_of(const Json& json) {
  return Tokenizer::parse(json.dump(), "tokenizer.json");
}

std::string refusal_of(const Json& json) {
  const std::string message = refusal([&] { tokenizer_of(json); });
  EXPECT_NE(message.find("tokenizer.json"), std::string::npos) << message;
  return message;
}

/// The byte-level tokenizer with one place changed.
Json with(const std::string& pointer, const std::string& value) {
  Json json = test::byte_level_tokenizer();
  json[Json::json_pointer(pointer)] = Json::parse(value);
  return json;
}

struct Change {
  std::string pointer, value, what;
};

TEST(TokenizerFile, MalformedPartsAreNamed) {
  const std::vector<Change> changes = {
      {"/model", "null", "model"},
      {"/model", "[]", "model"},
      {"/model/type", R"("Unigram")", "'Unigram'"},
      {"/model/type", R"("WordPiece")", "'WordPiece'"},
      {"/model/type", "5", "'type'"},
      {"/model/vocab", "null", "'vocab'"},
      {"/model/vocab", "{}", "'vocab'"},
      {"/model/vocab", R"([["a", 0.0]])", "'vocab'"},
      {"/model/vocab/ab", "-1", "'ab'"},
      {"/model/vocab/ab", "2147483648", "'ab'"},
      {"/model/vocab/ab", "4294967296", "'ab'"},
      {"/model/vocab/ab", "18446744073709551615", "'ab'"},
      {"/model/vocab/ab", "4194304", "'ab'"},
      {"/model/vocab/ab", "4194303", "gaps"},
      {"/model/vocab/ab", "1.5", "'ab'"},
      {"/model/vocab/ab", R"("259")", "'ab'"},
      {"/model/vocab/ab", "[[[[]]]]", "'ab'"},
      {"/model/vocab/ab", "97", "same id 97"},
      {"/model/merges", "null", "'merges'"},
      {"/model/merges", "{}", "'merges'"},
      {"/model/merges/1", R"("ab")", "merge 1"},
      {"/model/merges/1", R"("a b c")", "merge 1"},
      {"/model/merges/1", R"("")", "merge 1"},
      {"/model/merges/1", R"(["a"])", "merge 1"},
      {"/model/merges/1", R"(["a", "b", "c"])", "merge 1"},
      {"/model/merges/1", R"([1, 2])", "merge 1"},
      {"/model/merges/1", R"({"a": "b"})", "merge 1"},
      {"/model/merges/1", R"(" b")", "merge 1"},
      {"/model/merges/1", R"("a nothing")", "'nothing'"},
      {"/model/merges/1", R"("b a")", "'ba'"},
      {"/model/continuing_subword_prefix", R"("##")", "'continuing_subword_prefix'"},
      {"/model/end_of_word_suffix", R"("</w>")", "'end_of_word_suffix'"},
      {"/model/dropout", "0.1", "'dropout'"},
      {"/model/dropout", "7", "'dropout'"},
      {"/model/ignore_merges", R"("yes")", "'ignore_merges'"},
      {"/normalizer", "5", "normalizer"},
      {"/normalizer", R"({"type": "Lowercase"})", "'Lowercase'"},
      {"/normalizer", R"({"type": "Sequence"})", "normalizers"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"Regex": "("}, "content": ""})", "'('"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": "a"})", "empty"},
      {"/normalizer", R"({"type": "Replace", "pattern": "a", "content": ""})", "pattern"},
      {"/pre_tokenizer", R"({"type": "BertPreTokenizer"})", "'BertPreTokenizer'"},
      {"/pre_tokenizer", R"({"type": 3})", "'type'"},
      {"/pre_tokenizer/pretokenizers/0/behavior", R"("Gone")", "'Gone'"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "[a"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a{9,1}"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "(?<=a*)b"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"_({"Regex": "(a)\\1"})_", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"_({"Regex": "(?R)"})_", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "a\\Kb"})", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "\\C"})", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"_({"Regex": "(*ACCEPT)"})_", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "\\é"})", "not supported"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "\\x{110000}"})", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/1", R"({"type": "Metaspace", "replacement": "ab"})", "'replacement'"},
      {"/pre_tokenizer/pretokenizers/1", R"({"type": "Metaspace", "replacement": ""})", "'replacement'"},
      {"/decoder", R"({"type": "WordPiece"})", "'WordPiece'"},
      {"/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})", "'start'"},
      {"/post_processor", R"({"type": "BertProcessing"})", "'BertProcessing'"},
      {"/post_processor/special_tokens", "{}", "'<bos>'"},
      {"/post_processor/special_tokens/<bos>/ids", "[-1]", "'<bos>'"},
      {"/post_processor/special_tokens/<bos>/ids", "[999]", "999"},
      {"/post_processor/special_tokens/<bos>/ids", "[4294967552]", "'<bos>'"},
      {"/post_processor/single", R"([{"Sequence": {}}, {"SpecialToken": {"id": "<bos>"}}])",
       "after the text"},
      {"/post_processor/single", R"([{"Sequence": {}}, {"Sequence": {}}])", "twice"},
      {"/post_processor/single", "[5]", "SpecialToken"},
      {"/added_tokens", "{}", "added_tokens"},
      {"/added_tokens/0", "7", "added_tokens"},
      {"/added_tokens/0/content", R"("")", "1 to 512 bytes, found 0"},
      {"/added_tokens/0/content", "null", "'content'"},
      {"/added_tokens/0/id", "-1", "'id'"},
      {"/added_tokens/0/id", "4294967552", "'id'"},
      {"/added_tokens/0/id", "97", "at odds"},
      {"/added_tokens/2/id", "257", "257"},
      {"/added_tokens/0/special", "1", "'special'"}};
  for (const Change& change : changes) {
    SCOPED_TRACE(change.pointer + " = " + change.value);
    EXPECT_NE(refusal_of(with(change.pointer, change.value)).find(change.what), std::string::npos)
        << refusal_of(with(change.pointer, change.value));
  }
}

TEST(TokenizerFile, TextThatIsNoTokenizerIsRefused) {
  for (const std::string text :
       {"", "{", "[]", "null", "5", "{}", "{\"model\":{}}", "\"\\ud800\"", "\xef\xbb\xbf{}"}) {
    refusal([&] { Tokenizer::parse(text, "tokenizer.json"); });
  }
  const test::TestFolder folder;
  expect_refused("tokenizer.json", [&] { Tokenizer::read(folder.path()); });
}

TEST(TokenizerFile, LongAddedTokensAreRefused) {
  Json json = test::byte_level_tokenizer();
  json["added_tokens"][2]["content"] = std::string(1 << 20, 'x');
  EXPECT_NE(refusal_of(json).find("found 1048576"), std::string::npos);
}

TEST(TokenizerFile, NamesInMessagesAreShortAndPrintable) {
  const std::string evil = "\x1b[2J\n" + std::string(1 << 16, 'n');
  for (const std::string pointer :
       {"/model/type", "/normalizer/type", "/pre_tokenizer/type", "/decoder/type", "/post_processor/type",
        "/model/end_of_word_suffix", "/model/merges/0", "/pre_tokenizer/pretokenizers/0/behavior",
        "/pre_tokenizer/pretokenizers/0/pattern/Regex", "/post_processor/single/0/SpecialToken/id"}) {
    Json json = test::byte_level_tokenizer();
    json[Json::json_pointer(pointer)] = pointer.ends_with("Regex") ? "(" + evil : evil;
    const std::string message = refusal_of(json);
    EXPECT_EQ(message.find_first_of("\x1b\n"), std::string::npos) << message;
    EXPECT_EQ(invalid_utf8(message), std::string::npos);
  }
}

TEST(TokenizerFile, ComponentsCannotPileUp) {
  const std::size_t kMany = 200000;
  Json json = test::byte_level_tokenizer();
  const auto list_of = [&](const Json& part) { return Json(std::vector<Json>(kMany, part)); };
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", list_of({{"type", "Digits"}})}};
  EXPECT_NE(refusal_of(json).find("at most 64"), std::string::npos);
  json = test::byte_level_tokenizer();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", list_of({{"type", "NFC"}})}};
  EXPECT_NE(refusal_of(json).find("at most 64"), std::string::npos);
  json = test::byte_level_tokenizer();
  json["decoder"] = {{"type", "Sequence"}, {"decoders", list_of({{"type", "Fuse"}})}};
  EXPECT_NE(refusal_of(json).find("at most 64"), std::string::npos);
  json = test::byte_level_tokenizer();
  EXPECT_NO_THROW(tokenizer_of(with("/post_processor/single", R"([{"SpecialToken": {"id": "<bos>"}}])")));
  json["post_processor"] = {{"type", "Sequence"},
                            {"processors", std::vector<Json>(kMany / 8, json["post_processor"])}};
  EXPECT_NE(refusal_of(json).find("at most 64"), std::string::npos);
  json["post_processor"] = test::byte_level_tokenizer()["post_processor"];
  json["post_processor"]["single"] = list_of({{"SpecialToken", {{"id", "<bos>"}}}});
  EXPECT_NE(refusal_of(json).find("at most 64"), std::string::npos);
}

TEST(TokenizerFile, TextsCannotBlowUp) {
  Json twice = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  Json json = test::byte_level_tokenizer();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", std::vector<Json>(60, twice)}};
  json["added_tokens"] = Json::array();
  json["post_processor"] = nullptr;
  const Tokenizer bomb = tokenizer_of(json);
  expect_refused("64 times", [&] { bomb.encode("aaaa", Tokenizer::Bos::none); });
  EXPECT_EQ(bomb.encode("b", Tokenizer::Bos::none), std::vector<TokenId>{'b'});
  json["normalizer"] = {
      {"type", "Replace"}, {"pattern", {{"Regex", ""}}}, {"content", std::string(1 << 20, 'a')}};
  const Tokenizer empty_matches = tokenizer_of(json);
  expect_refused("64 times", [&] { empty_matches.encode("bbb", Tokenizer::Bos::none); });
  json["normalizer"] = {{"type", "Prepend"}, {"prepend", std::string(1 << 20, 'a')}};
  expect_refused("64 times", [&] { tokenizer_of(json).encode("b", Tokenizer::Bos::none); });
  json["normalizer"] = nullptr;
  json["decoder"] = {{"type", "Sequence"}, {"decoders", std::vector<Json>(60, twice)}};
  EXPECT_NE(refusal_of(json).find("64 times"), std::string::npos);
}

TEST(TokenizerFile, CatastrophicExpressionsEndInTime) {
  Json json = test::byte_level_tokenizer();
  for (const std::string pattern : {"(a+)+$", "(a|a)*c", "(a|aa)+$", "(.*)*x", "((a{0,5}){0,5}){0,5}c"}) {
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern;
    const Tokenizer tokenizer = tokenizer_of(json);
    const test::CpuClock clock;
    try {
      tokenizer.encode(std::string(64, 'a') + "b", Tokenizer::Bos::none);
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find("regular expression"), std::string::npos) << e.what();
    }
    EXPECT_LT(clock.seconds(), 10.0) << pattern;
  }
}

/// Texts on which BPE or regular expressions take quadratic time elsewhere.
TEST(Encode, LongRunsTakeLinearTime) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  constexpr std::size_t kLong =
      12'000'000;  // the expression goes back over more blanks than it may else take steps
  constexpr std::size_t n = 1'000'000;
  std::string pairs, breaks;
  for (std::size_t i = 0; i < n; ++i) pairs += i % 3 == 0 ? "ab" : "ba";
  for (std::size_t i = 0; i < n; ++i) breaks += " \n";
  for (const std::string& text :
       {std::string(kLong, ' ') + "x", std::string(n, ' '), std::string(n, '\n'), std::string(n, 'a'),
        std::string(n, '7'), std::string(n, '!'), pairs, breaks, std::string(n, '\0')}) {
    const test::CpuClock clock;
    const auto tokens = tokenizer.encode(text, Tokenizer::Bos::none);
    EXPECT_LT(clock.seconds(), 20.0) << text.substr(0, 4);
    EXPECT_TRUE(tokenizer.decode(tokens) == text) << text.substr(0, 4);
  }
}

TEST(Encode, LongRunsOfCharactersTakeLinearTime) {
  const Tokenizer tokenizer = tokenizer_of(test::character_tokenizer());
  const std::size_t n = 1'000'000;
  for (const std::string& text : {std::string(n, ' '), std::string(n, 'a'), std::string(n, '\1')}) {
    const test::CpuClock clock;
    const auto tokens = tokenizer.encode(text, Tokenizer::Bos::none);
    EXPECT_LT(clock.seconds(), 20.0) << text.substr(0, 4);
    EXPECT_TRUE(tokenizer.decode(tokens) == text) << text.substr(0, 4);
  }
}

TEST(Encode, CombiningMarksTakeLinearTime) {
  const Tokenizer tokenizer = tokenizer_of(test::mixed_tokenizer());
  std::string marks = "e", expanders;
  for (int i = 0; i < 100000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";
  for (int i = 0; i < 20000; ++i) expanders += "\ufdfa";
  for (const std::string& text : {marks, expanders}) {
    const test::CpuClock clock;
    EXPECT_FALSE(tokenizer.encode(text, Tokenizer::Bos::none).empty());
    EXPECT_LT(clock.seconds(), 20.0);
  }
}

TEST(Encode, TokensThatTakeBlanksAlongTakeLinearTime) {
  Json json = test::character_tokenizer();
  json["normalizer"] = nullptr;
  json["added_tokens"].push_back({{"id", 270}, {"content", " "}, {"rstrip", true}});
  json["added_tokens"].push_back({{"id", 271}, {"content", "<l>"}, {"lstrip", true}, {"normalized", false}});
  const Tokenizer tokenizer = tokenizer_of(json);
  const test::CpuClock clock;
  EXPECT_FALSE(tokenizer.encode(std::string(1'000'000, ' ') + "<l>", Tokenizer::Bos::none).empty());
  EXPECT_LT(clock.seconds(), 10.0);
}

/// Each pair of components puts a character of its own in front of every character: the text doubles each time.
TEST(Encode, ComponentsThatMakePiecesGrowAreStopped) {
  Json json = test::byte_level_tokenizer();
  Json chain = Json::array();
  for (int i = 0; i < 31; ++i) {
    std::string letter = "\u4e00";
    letter[2] = static_cast<char>(letter[2] + i);
    chain.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", "."}}}, {"behavior", "Isolated"}, {"invert", false}});
    chain.push_back(
        {{"type", "Metaspace"}, {"replacement", letter}, {"prepend_scheme", "always"}, {"split", false}});
  }
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", chain}};
  const Tokenizer bomb = tokenizer_of(json);
  expect_refused("more than 64 times as long", [&] { bomb.encode("twelve bytes", Tokenizer::Bos::none); });
  json["pre_tokenizer"]["pretokenizers"] = Json(std::vector<Json>(chain.begin(), chain.begin() + 4));
  const Tokenizer honest = tokenizer_of(json);
  EXPECT_FALSE(honest.encode(std::string(10'000, 'a'), Tokenizer::Bos::none).empty());
}

/// No match reaches the limit of one match; there are as many as characters.
TEST(Encode, AmbiguousExpressionIsStoppedOverAWholeText) {
  Json json = test::byte_level_tokenizer();
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = {{"type", "Split"},
                           {"pattern", {{"Regex", "(?:[a-zA-Z ]|[a-zA-Z ]){1,21}~|."}}},
                           {"behavior", "Isolated"},
                           {"invert", false}};
  const Tokenizer tokenizer = tokenizer_of(json);
  const test::CpuClock clock;
  expect_refused("match limit", [&] { tokenizer.encode(std::string(24'000, 'a'), Tokenizer::Bos::none); });
  EXPECT_LT(clock.seconds(), 5.0);
  set_cancel(true);
  EXPECT_THROW(tokenizer.encode(std::string(24'000, 'a'), Tokenizer::Bos::none), Interrupted);
  set_cancel(false);
}

TEST(Encode, InvalidUtf8IsNamedByOffset) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  for (const std::string bad :
       {"\x80", "\xbf", "\xc0\xaf", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x80\xaf", "\xe0\x9f\xbf", "\xe2\x82",
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x80\x80\xaf", "\xf0\x8f\xbf\xbf", "\xf0\x9f\x98",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf8\x88\x80\x80\x80", "\xfe", "\xff"}) {
    expect_refused("offset 3", [&] { tokenizer.encode("ab " + bad + " c", Tokenizer::Bos::none); });
    expect_refused("offset 3", [&] { tokenizer.encode("ab " + bad, Tokenizer::Bos::none); });
  }
}

TEST(Encode, OddCharactersComeBack) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  for (const std::string& text :
       {std::string("\xef\xbb\xbftext"), std::string("a\0b\0\0", 5), std::string("\u180e \u00a0\u2028\u3000"),
        std::string("\U0010ffff\ufffe\ufdd0"), std::string("\r\n\r\r\n\t\v\f"),
        std::string("e\u0301\u200d\u200b"), std::string("<bos><eos><tool></s><|eot_id|>"),
        std::string(" 's'S'RE '\u017f")}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, Tokenizer::Bos::none)), text);
    EXPECT_EQ(tokenizer.decode(
                  tokenizer.encode(text, Tokenizer::Bos::as_template, Tokenizer::Special::parsed), false),
              "<bos>" + text);
  }
}

TEST(Encode, SpecialTokensInATextStayText) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  for (const TokenId token : tokenizer.encode("<bos>a<eos><eos", Tokenizer::Bos::none)) {
    EXPECT_FALSE(tokenizer.is_special(token));
  }
  EXPECT_EQ(tokenizer.encode("<bos>", Tokenizer::Bos::none, Tokenizer::Special::parsed),
            std::vector<TokenId>{256});
}

TEST(Encode, OverlappingAddedTokensTakeTheLongest) {
  Json json = test::byte_level_tokenizer();
  for (const auto& [id, text] : std::vector<std::pair<int, std::string>>{
           {300, "<a"}, {301, "<a>"}, {302, "a><a>"}, {303, "<a><b"}, {304, "\u20ac"}}) {
    json["added_tokens"].push_back({{"id", id}, {"content", text}});
  }
  const Tokenizer tokenizer = tokenizer_of(json);
  EXPECT_EQ(tokenizer.encode("<a><b<a<a>\u20ac", Tokenizer::Bos::none),
            (std::vector<TokenId>{303, 300, 301, 304}));
}

TEST(Decode, IdsThatMeanNothingAreRefused) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  for (const TokenId id : {-1, INT32_MIN, INT32_MAX, static_cast<TokenId>(tokenizer.vocab())}) {
    expect_refused(std::to_string(id), [&] { tokenizer.decode(std::vector<TokenId>{id}); });
    expect_refused(std::to_string(id), [&] { tokenizer.bytes_of(id); });
    EXPECT_FALSE(tokenizer.is_special(id));
    StreamDecoder stream(tokenizer);
    expect_refused(std::to_string(id), [&] { stream.push(id); });
  }
}

TEST(Decode, BrokenCharactersBecomeReplacementCharacters) {
  const Tokenizer tokenizer = tokenizer_of(test::byte_level_tokenizer());
  std::vector<TokenId> tokens;
  for (int i = 0; i < 1000; ++i) {
    for (const char byte : {'\xff', '\xe2', '\x82', 'a', '\xf0'}) {
      tokens.push_back(tokenizer.encode("a", Tokenizer::Bos::none)[0]);
      for (TokenId id = 0; id < 256; ++id) {
        if (tokenizer.bytes_of(id) == std::string_view(&byte, 1)) tokens.back() = id;
      }
    }
  }
  const std::string whole = tokenizer.decode(tokens);
  EXPECT_EQ(invalid_utf8(whole), std::string::npos);
  StreamDecoder stream(tokenizer);
  std::string streamed;
  for (const TokenId token : tokens) {
    const std::string part = stream.push(token);
    EXPECT_EQ(invalid_utf8(part), std::string::npos);
    streamed += part;
  }
  EXPECT_EQ(streamed + stream.finish(), whole);
}

}  // namespace
}  // namespace lode
