// SPDX-License-Identifier: Apache-2.0
// Grammars of JSON schemas: what they let through, letter by letter, against lists of texts that do and do not meet them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "base/json.h"
#include "serve/backend.h"
#include "serve/schema/constraint.h"
#include "serve/schema/json_schema.h"
#include "support/source_dir.h"

namespace lode::serve {
namespace {

bool meets(const SchemaGrammar& schema, std::string_view text) {
  Matcher matcher(schema.grammar, schema.start);
  for (const char byte : text)
    if (!matcher.accept(static_cast<unsigned char>(byte))) return false;
  return matcher.complete();
}

struct Case {
  const char* schema;
  std::vector<std::string> good, bad;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {R"({"type":"string"})",
       {R"("")", R"("a b")", R"("\n\"\\A")", "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\xa7\xad\"", R"( "x")"},
       {"", "a", R"("a)", R"("a"b)", "\"a\nb\"", R"("\x")", "\"\xff\"", "\"\xc3\"", "\"\xed\xa0\x80\"",
        R"("\ud800")"}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {R"("ab")", "\"\xc3\xa4\xc3\xb6\xc3\xbc\""},
       {R"("a")", R"("abcd")"}},
      {R"({"type":"integer"})",
       {"0", "-7", "120"},
       {"", "01", "1.5", "1e3", "+1", "--1", "9999999999999999999"}},
      {R"({"type":"number"})", {"0", "-7.25", "1e3", "1.5E-10"}, {"1.", ".5", "1e", "NaN", "0x1"}},
      {R"({"type":["boolean","null"]})", {"true", "false", "null"}, {"True", "nul", "0"}},
      {R"({"enum":["red","a \"b\"",7,null]})", {R"("red")", R"("a \"b\"")", "7", "null"}, {R"("blue")", "8"}},
      {R"({"enum":["a",7,null],"type":["string","null"]})", {R"("a")", "null"}, {"7"}},
      {R"({"const":7,"type":"integer"})", {"7"}, {"8"}},
      {R"({"minItems":2})", {"[1,2]"}, {"[1]", "7", R"("a")"}},
      {R"({"maxLength":1})", {R"("a")"}, {R"("ab")", "7"}},
      {R"({"type":"object","additionalProperties":{}})", {"{}", R"({"a":1})"}, {"[]"}},
      // Recursion through choices alone says nothing, however it is wound.
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"},{"$ref":"#/$defs/b"}]},"b":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"boolean"}]}}})",
       {"null", "true"},
       {"7", ""}},
      {R"({"const":{"a":[1]}})", {R"({"a":[1]})"}, {R"({"a":[2]})"}},
      {R"({"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"boolean"}},"required":["b","a"],"additionalProperties":false})",
       {R"({"b":1,"a":true})", "{\n  \"b\": 1,\n  \"a\": true\n}", R"({ "b": 1, "a": true })"},
       {R"({"a":true,"b":1})", R"({"b":1})", "{}", R"({"b":1,"a":true,"c":0})", R"({"b":1,"a":true,})"}},
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"},"c":{"type":"integer"}},"required":["b"],"additionalProperties":false})",
       {R"({"b":1})", R"({"a":1,"b":1})", R"({"b":1,"c":1})", R"({"a":1,"b":2,"c":3})"},
       {R"({"a":1})", "{}", R"({"c":1,"b":1})", R"({,"b":1})", R"({"a":1,,"b":1})"}},
      {R"({"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false})",
       {"{}", R"({"a":1})"},
       {R"({"b":1})"}},
      {R"({"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":3})",
       {"[1]", "[1, 2,3]", "[ 1 ]"},
       {"[]", "[1,2,3,4]", "[1,]"}},
      {R"({"type":"array","items":{"type":"integer"}})",
       {"[]", "[ ]", "[1,2,3,4,5,6]"},
       {"[a]", "1", "[1 2]"}},
      {R"({"anyOf":[{"type":"integer"},{"type":"array","items":{"type":"null"}}]})",
       {"1", "[null]"},
       {R"("a")", "[1]"}},
      {R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["next"],"additionalProperties":false}}})",
       {R"({"next":null})", R"({"next":{"next":{"next":null}}})"},
       {R"({"next":1})", R"({"next":{}})"}},
      {"{}", {"1", R"({"a":[{},[],"",null,true,-1.5e2]})", "[]"}, {"", "a", "{a:1}", "[1,]"}},
  };
  return all;
}

TEST(JsonSchema, LetsThroughWhatMeetsIt) {
  for (const Case& c : cases()) {
    const SchemaGrammar schema = grammar_of_schema(c.schema);
    for (const std::string& text : c.good) EXPECT_TRUE(meets(schema, text)) << c.schema << " " << text;
    for (const std::string& text : c.bad) EXPECT_FALSE(meets(schema, text)) << c.schema << " " << text;
  }
}

TEST(JsonSchema, AnyObject) {
  const SchemaGrammar object = grammar_of_object();
  EXPECT_TRUE(meets(object, R"({"a": {"b": [1, 2]}})"));
  for (const char* text : {"[]", "1", "", "{", "{}}"}) EXPECT_FALSE(meets(object, text)) << text;
}

/// Whatever way a random walk goes, what it ends with is JSON.
TEST(JsonSchema, RandomWalksEndInJson) {
  std::mt19937 rng(5);
  int ended = 0;
  for (const Case& c : cases()) {
    const SchemaGrammar schema = grammar_of_schema(c.schema);
    for (int walk = 0; walk < 12; ++walk) {
      Matcher matcher(schema.grammar, schema.start);
      std::string text;
      while (text.size() < 120 && !(matcher.complete() && rng() % 2 == 0) && matcher.may_go_on()) {
        const auto first = static_cast<unsigned>(rng() % 256);
        for (unsigned i = 0; i < 256; ++i) {
          Matcher next = matcher;
          const auto byte = static_cast<unsigned char>((first + i) % 256);
          if (!next.accept(byte)) continue;
          matcher = std::move(next);
          text += static_cast<char>(byte);
          break;
        }
      }
      EXPECT_FALSE(matcher.dead());
      if (!matcher.complete()) continue;
      ++ended;
      EXPECT_NO_THROW(parse_json(text, "walk")) << c.schema << " " << text;
    }
  }
  EXPECT_GT(ended, 30);
}

const Tokenizer& pocket() {
  static const Tokenizer tokenizer = Tokenizer::read(source_dir() / "models" / "pocket");
  return tokenizer;
}

constexpr TokenId kEnd = 0;

Constraint constraint_of(const std::string& schema) {
  static const auto order = std::make_shared<const TokenOrder>(pocket());
  return {std::make_shared<const SchemaGrammar>(grammar_of_schema(schema)), order, pocket(), {kEnd}};
}

std::vector<TokenId> allowed_by(Constraint& constraint, std::span<const TokenId> answer) {
  std::vector<float> logits(static_cast<std::size_t>(pocket().vocab()), 0.0F);
  std::vector<TokenId> allowed;
  if (!constraint.apply(answer, logits)) return allowed;
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (logits[id] == 0.0F) allowed.push_back(static_cast<TokenId>(id));
  return allowed;
}

/// Against a walk of each token's bytes.
TEST(Constraint, LetsThroughTheTokensWhoseBytesMayCome) {
  std::mt19937 rng(7);
  for (const Case& c : cases()) {
    const SchemaGrammar schema = grammar_of_schema(c.schema);
    Constraint constraint = constraint_of(c.schema);
    std::vector<TokenId> answer;
    Matcher place(schema.grammar, schema.start);
    for (int step = 0; step < 12; ++step) {
      std::vector<TokenId> expected;
      for (TokenId id = 0; id < pocket().vocab(); ++id) {
        Matcher next = place;
        const std::string_view bytes = pocket().bytes_of(id);
        const bool text = !pocket().is_special(id) && !bytes.empty();
        if (text && std::all_of(bytes.begin(), bytes.end(),
                                [&](char byte) { return next.accept(static_cast<unsigned char>(byte)); }))
          expected.push_back(id);
        else if (id == kEnd && place.complete())
          expected.push_back(id);
      }
      if (place.complete() && !place.may_go_on()) expected.clear();
      const std::vector<TokenId> found = allowed_by(constraint, answer);
      ASSERT_EQ(found, expected) << c.schema << " behind " << pocket().decode(answer);
      const auto drawn = found.empty() ? kEnd : found[rng() % found.size()];
      if (drawn == kEnd) break;
      answer.push_back(drawn);
      for (const char byte : pocket().bytes_of(drawn)) place.accept(static_cast<unsigned char>(byte));
    }
  }
}

/// Drafts are refused, and the answer goes on from where it was.
TEST(Constraint, DependsOnTheAnswerAlone) {
  const std::string schema =
      R"({"type":"object","properties":{"a":{"type":"string","maxLength":40}},"required":["a"]})";
  Constraint constraint = constraint_of(schema);
  const std::vector<TokenId> one =
                                 pocket().encode(R"({"a": "the mill and the harbour)", Tokenizer::Bos::none),
                             other = pocket().encode(R"({"a": "the old carter of)", Tokenizer::Bos::none);
  for (const auto& [tokens, length] : {std::pair{&one, one.size()},
                                       {&other, other.size()},
                                       {&one, 3ul},
                                       {&other, 0ul},
                                       {&one, one.size()}}) {
    const std::span<const TokenId> answer = std::span(*tokens).first(length);
    Constraint fresh = constraint_of(schema);
    EXPECT_EQ(allowed_by(constraint, answer), allowed_by(fresh, answer));
  }
}

TEST(JsonSchema, RefusesWhatItDoesNotHold) {
  for (const char* schema : {R"({"type":"string","pattern":"a+"})",
                             R"({"type":"integer","minimum":3})",
                             R"({"type":"text"})",
                             R"({"type":[]})",
                             R"({"enum":[]})",
                             R"({"anyOf":[]})",
                             R"({"$ref":"#/$defs/none"})",
                             R"({"$ref":"http://a.example/b"})",
                             R"({"$ref":7})",
                             R"({"type":"array","minItems":2,"maxItems":1})",
                             R"({"type":"string","minLength":-1})",
                             R"({"type":"array","minItems":1000000})",
                             R"({"type":"object","properties":{"a":{}},"required":["b"]})",
                             R"({"type":"object","properties":[]})",
                             R"({"anyOf":[{"$ref":"#"}]})",
                             R"({"type":"object","required":["a"]})",
                             R"({"required":["a"]})",
                             R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})",
                             R"({"type":"object","additionalProperties":{"type":"integer"}})",
                             R"({"type":"string","enum":[1]})",
                             R"({"type":"text","enum":[1]})",
                             R"({"anyOf":[{}],"type":"object"})",
                             R"({"$ref":"#","minItems":1})",
                             R"({"enum":["a"],"maxLength":3})",
                             R"({"anyOf":[{}],"oneOf":[{}]})",
                             "[]",
                             "7",
                             R"({"allOf":[{}]})",
                             R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}})"})
    EXPECT_THROW(grammar_of_schema(schema), ApiError) << schema;
}

/// A thousand times a thousand times a thousand alternatives are alike, and a text of megabytes is no schema.
TEST(JsonSchema, WhatIsWrittenOftenOrLongCostsLittle) {
  std::string schema = R"({"$ref":"#/$defs/a","$defs":{)";
  for (const char name : {'a', 'b', 'c'}) {
    schema += fmt::format(R"("{}":{{"anyOf":[)", name);
    for (int i = 0; i < 1000; ++i)
      schema += fmt::format(R"({}{{"$ref":"#/$defs/{}"}})", i > 0 ? "," : "", static_cast<char>(name + 1));
    schema += "]},";
  }
  schema += R"("d":{"type":"null"}}})";
  EXPECT_TRUE(meets(grammar_of_schema(schema), "null"));
  std::string chain = R"({"$ref":"#/$defs/0","$defs":{)";
  for (int i = 0; i < 1000; ++i)
    chain += fmt::format(R"("{}":{{"items":{{"$ref":"#/$defs/{}"}}}},)", i, i + 1);
  EXPECT_THROW(grammar_of_schema(chain + R"("1000":{"type":"null"}}})"), ApiError);
  EXPECT_THROW(grammar_of_schema(R"({"const":")" + std::string(1 << 20, 'a') + R"("})"), ApiError);
  EXPECT_THROW(grammar_of_schema(R"({"properties":{")" + std::string(1 << 20, 'a') + R"(":{}}})"), ApiError);
}

}  // namespace
}  // namespace lode::serve
