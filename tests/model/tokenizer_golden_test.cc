// SPDX-License-Identifier: Apache-2.0
// The same tokens as Hugging Face's tokenizers, for one small tokenizer.json of every family, on texts chosen
// to hurt and on every character of Unicode 14. tests/golden/make_tokenizer_goldens.py writes the files.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "base/file.h"
#include "base/json.h"
#include "lodestone/tokenizer.h"
#include "support/source_dir.h"
#include "text/utf8.h"

namespace lode {
namespace {

const std::string kFolder = source_dir().string() + "/tests/golden/tokenizers/";

Json read_json(const std::string& name) {
  return parse_json(read_file(kFolder + name), name);
}

/// FNV-1a, 64 bits: what the generator can write in one line.
class Checksum {
 public:
  void add(std::string_view bytes) {
    for (const char byte : bytes) value_ = (value_ ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
  void add(const std::vector<TokenId>& ids) {
    add(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(TokenId)));
  }
  std::string take() {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value_));
    value_ = kStart;
    return text;
  }

 private:
  static constexpr std::uint64_t kStart = 0xcbf29ce484222325u;
  std::uint64_t value_ = kStart;
};

class Golden : public testing::TestWithParam<const char*> {
 protected:
  Tokenizer tokenizer_ = Tokenizer::parse(read_file(kFolder + GetParam() + ".tokenizer.json"), GetParam());
  Json golden_ = read_json(std::string(GetParam()) + ".golden.json");
  Json texts_ = read_json("texts.json");
};

TEST_P(Golden, SameTokensAndTexts) {
  Checksum as_text, decoded;
  for (std::size_t i = 0; i < texts_["texts"].size(); ++i) {
    const auto text = texts_["texts"][i].get<std::string>();
    const auto wanted = golden_["parsed"][i].get<std::vector<TokenId>>();
    EXPECT_EQ(tokenizer_.encode(text, Tokenizer::Bos::as_template, Tokenizer::Special::parsed), wanted)
        << texts_["texts"][i].dump();
    decoded.add(tokenizer_.decode(wanted, false));
    EXPECT_EQ(decoded.take(), golden_["decoded"][i]) << texts_["texts"][i].dump();
    as_text.add(tokenizer_.encode(text, Tokenizer::Bos::none));
  }
  EXPECT_EQ(as_text.take(), golden_["as_text"]);
}

class GoldenOfCharacters : public Golden {};
TEST_P(GoldenOfCharacters, EveryCharacterOfUnicode14) {
  Checksum sum;
  std::size_t block = 0, count = 0;
  for (const Json& range : texts_["assigned"]) {
    for (auto c = range[0].get<char32_t>(); c <= range[1].get<char32_t>(); ++c) {
      std::string one, text = "a";
      append_utf8(one, c);
      text.append(one).append("b ").append(one).append("1").append(one).append(one);
      sum.add(tokenizer_.encode(text, Tokenizer::Bos::none));
      if (++count % 4096 != 0) continue;
      EXPECT_EQ(sum.take(), golden_["characters"][block++]) << "up to " << static_cast<unsigned>(c);
    }
  }
  EXPECT_EQ(sum.take(), golden_["characters"][block]);
}

// What comes out piece by piece is what comes out at once. (Decoders that strip the blank in front of a whole
// text are left out: a stream continues one.)
class GoldenOfBytes : public Golden {};
TEST_P(GoldenOfBytes, StreamsAsItDecodes) {
  for (const Json& text : texts_["texts"]) {
    const auto ids = tokenizer_.encode(text.get<std::string>(), Tokenizer::Bos::none);
    StreamDecoder stream(tokenizer_);
    std::string streamed;
    for (const TokenId id : ids) streamed += stream.push(id);
    EXPECT_EQ(streamed + stream.finish(), tokenizer_.decode(ids)) << text.dump();
  }
}

std::string name_of(const testing::TestParamInfo<const char*>& info) {
  return info.param;
}

INSTANTIATE_TEST_SUITE_P(Families, Golden,
                         testing::Values("llama3", "qwen", "nemo", "smollm", "prefix_space", "deepseek",
                                         "deepseek_llm", "qwen35", "kimi", "llama2", "phi3", "mistral",
                                         "metaspace", "gemma", "unknown", "split_removed",
                                         "split_merged_with_previous", "split_contiguous"),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Families, GoldenOfCharacters,
                         testing::Values("qwen", "nemo", "deepseek", "deepseek_llm", "qwen35", "kimi"),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Families, GoldenOfBytes,
                         testing::Values("llama3", "qwen", "nemo", "smollm", "prefix_space", "deepseek",
                                         "deepseek_llm", "qwen35", "kimi", "split_removed",
                                         "split_merged_with_previous", "split_contiguous"),
                         name_of);

}  // namespace
}  // namespace lode
