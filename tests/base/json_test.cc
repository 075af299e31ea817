// SPDX-License-Identifier: Apache-2.0
// JSON that hurts is refused with a short sentence; getters convert nothing in silence.
#include "base/json.h"

#include <gtest/gtest.h>

#include <string>

#include "lodestone/error.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::expect_refused;
using test::refusal;

std::string nested(std::size_t depth, const std::string& open, const std::string& close) {
  std::string text;
  for (std::size_t i = 0; i < depth; ++i) text += open;
  text += "1";
  for (std::size_t i = 0; i < depth; ++i) text += close;
  return text;
}

TEST(Json, MalformedTextIsRefusedByName) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[1,]"), std::string("{} x"),
        std::string("\xef\xbb\xbf"), std::string("{\"a\":NaN}"), std::string("{\"a\":1e400}"),
        std::string("{'a':1}"), std::string("\"\xff\""), std::string("\"\xed\xa0\x80\""),
        std::string("\"\\ud800\""), std::string("nul"), std::string("{\"a\" 1}"), std::string("\0", 1),
        std::string("{\"a\":1}\0", 8), std::string("{}\0{", 4), std::string("[1] // comment"),
        std::string("01")}) {
    const std::string message = refusal([&] { parse_json(text, "x.json"); });
    EXPECT_NE(message.find("x.json"), std::string::npos) << text;
  }
}

TEST(Json, DepthIsBounded) {
  EXPECT_NO_THROW(parse_json(nested(64, "[", "]"), "x.json"));
  for (const std::size_t depth : {65u, 1000u, 1000000u}) {
    EXPECT_NE(refusal([&] { parse_json(nested(depth, "[", "]"), "x.json"); }).find("deep"),
              std::string::npos);
    refusal([&] { parse_json(nested(depth, "{\"a\":", "}"), "x.json"); });
    refusal([&] { parse_json(nested(depth, "[", ""), "x.json"); });
  }
}

TEST(Json, DuplicateKeysAreRefusedInTheSameObjectOnly) {
  EXPECT_NE(refusal([] { parse_json(R"({"a":1,"b":{"c":1,"c":2}})", "x.json"); }).find("'c'"),
            std::string::npos);
  EXPECT_NO_THROW(parse_json(R"({"a":{"a":1},"b":{"a":[{"a":1},{"a":2}]}})", "x.json"));
}

TEST(Json, MessagesAreShortAndPrintable) {
  for (const std::string& text :
       {"\"" + std::string(1 << 20, 'a') + "\x01\"",
        "{\"" + std::string(1 << 20, 'a') + "\":1,\"" + std::string(1 << 20, 'a') + "\":2}",
        std::string("\"\x1b[31m\"")}) {
    const std::string message = refusal([&] { parse_json(text, "x.json"); });
    EXPECT_LT(message.size(), 400u);
    for (const char c : message) EXPECT_GE(c, ' ');
  }
}

/// Two bytes of text are sixteen to a hundred in memory: a file of a size that is honest for one string is not so for
/// as many numbers.
TEST(Json, ValuesAreLimited) {
  std::string list = "[0";
  for (std::size_t i = 1; i < std::size_t{1} << 23; ++i) list += ",0";
  EXPECT_THROW(parse_json(list + "]", "x.json"), InputError);
  std::string nested = "[";
  for (std::size_t i = 0; i < std::size_t{1} << 23; ++i) nested += "[],";
  EXPECT_THROW(parse_json(nested + "0]", "x.json"), InputError);
  EXPECT_EQ(parse_json("[\"" + std::string(std::size_t{64} << 20, 'x') + "\"]", "x.json").size(), 1u);
}

TEST(Json, GettersCheckTypeAndRange) {
  const Json json = parse_json(
      R"({"n":7,"minus":-1,"big":18446744073709551615,"real":1.5,"whole":7.0,"text":"7","yes":true,"none":null,"list":[1]})",
      "x.json");
  EXPECT_EQ(json_int(json, "n", "x.json", 0, 7), 7);
  EXPECT_EQ(json_int(json, "minus", "x.json", -1, 7), -1);
  for (const char* key : {"minus", "big", "real", "whole", "text", "yes", "none", "list", "missing"}) {
    const std::string message = refusal([&] { json_int(json, key, "x.json", 0, INT64_MAX); });
    EXPECT_NE(message.find("x.json"), std::string::npos);
    EXPECT_NE(message.find(key), std::string::npos);
  }
  EXPECT_EQ(json_number(json, "n", "x.json", 0, 10), 7.0);
  EXPECT_EQ(json_number(json, "real", "x.json", 0, 10), 1.5);
  for (const char* key : {"big", "text", "yes", "none", "missing"}) {
    refusal([&] { json_number(json, key, "x.json", 0, 10); });
  }
  EXPECT_EQ(json_string(json, "text", "x.json"), "7");
  refusal([&] { json_string(json, "n", "x.json"); });
  EXPECT_TRUE(json_bool(json, "yes", "x.json"));
  refusal([&] { json_bool(json, "n", "x.json"); });
  EXPECT_FALSE(json_has(json, "none"));
  EXPECT_FALSE(json_has(Json(3), "none"));
  refusal([] { json_int(Json::array(), "n", "x.json", 0, 1); });
}

}  // namespace
}  // namespace lode
