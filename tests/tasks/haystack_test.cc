// SPDX-License-Identifier: Apache-2.0
// Haystacks from folders: order, encodings, errors; passages of a wanted length.
#include "lab/tasks/haystack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fake_meter.h"
#include "lodestone/error.h"
#include "support/refusal.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

class Folder : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  std::string all_text(const Haystack& h) {
    std::string text;
    for (const auto& piece : h.cut_from(0, 1'000'000).pieces) text += piece.text;
    return text;
  }
  std::string error() {
    try {
      Haystack::read(path_, fake_meter());
    } catch (const InputError& e) {
      return e.what();
    }
    return "no error";
  }
  const test::TestFolder folder_;
  const fs::path path_ = folder_.path();
};

TEST_F(Folder, FilesInTheOrderOfTheirNames) {
  write("b.txt", "Second. Here.");
  write("a.txt", "\xef\xbb\xbf\n First. There.\r\n\r\nMore. \n\n");
  write("c.tsv", "not text");
  fs::create_directory(path_ / "d.txt");
  const Haystack h = Haystack::read(path_, fake_meter());
  EXPECT_EQ(h.bytes(), std::string("First. There.\n\nMore.\n\nSecond. Here.\n\n").size());
  EXPECT_THAT(all_text(h), testing::StartsWith("First. There.\n\nMore.\n\nSecond. Here.\n\nFirst. There."));
}

TEST_F(Folder, KeepChoosesFiles) {
  write("a.txt", "Alpha.");
  write("b.md", "Beta.");
  const Haystack h =
      Haystack::read(path_, fake_meter(), [](std::string_view name) { return name == "b.md"; });
  EXPECT_THAT(all_text(h), testing::StartsWith("Beta."));
  EXPECT_THROW(Haystack::read(path_, fake_meter(), [](std::string_view) { return false; }), InputError);
}

TEST_F(Folder, AFileCountsAsAFolderOfOne) {
  write("any.name", "Some text.");
  EXPECT_THAT(all_text(Haystack::read(path_ / "any.name", fake_meter())), testing::StartsWith("Some text."));
}

TEST_F(Folder, ErrorsSayWhat) {
  EXPECT_THAT(error(), testing::HasSubstr("found none"));
  write("a.txt", "good");
  write("b.txt", "ab\xc3\x28");
  EXPECT_THAT(error(), testing::AllOf(testing::HasSubstr("b.txt"), testing::HasSubstr("offset 2")));
  fs::remove_all(path_);
  EXPECT_THAT(error(), testing::HasSubstr("found neither"));
  fs::create_directory(path_);
  write("a.txt", " \n ");
  EXPECT_THAT(error(), testing::HasSubstr("empty"));
}

TEST(Passage, HasAtMostTheTokensAndNearlyAsMany) {
  const Haystack h = Haystack::prose(5, 100'000, fake_meter());
  const TokenMeter meter = fake_meter();
  for (const std::int64_t tokens : {20, 100, 1000, 5000, 60'000}) {
    Rng rng(static_cast<std::uint64_t>(tokens));
    const Passage p = h.cut(tokens, rng);
    std::string text;
    for (const auto& piece : p.pieces) text += piece.text;
    EXPECT_LE(p.tokens, tokens);
    EXPECT_GE(p.tokens, tokens - std::max<std::int64_t>(tokens / 200, 6));
    EXPECT_EQ(meter.count(text), p.tokens) << "pieces count alone what they count together";
    EXPECT_NE(text[0], ' ');
  }
}

}  // namespace
}  // namespace lode
