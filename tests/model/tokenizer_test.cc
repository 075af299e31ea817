// SPDX-License-Identifier: Apache-2.0
// The tokenizer on small vocabularies made here, where the right tokens can be told by hand.
#include "lodestone/tokenizer.h"

#include <gtest/gtest.h>

#include <string>

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
}

}  // namespace
}  // namespace lode
