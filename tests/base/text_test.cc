// SPDX-License-Identifier: Apache-2.0
// Tables as terminals show them, and text that is safe to show there.
#include "base/text.h"

#include <gtest/gtest.h>

#include <sstream>

#include "base/printable.h"

namespace lode {
namespace {

TEST(Text, PrintableHasNoControlCharacters) {
  EXPECT_EQ(printable("plain\ttext\n\u00e9\u4e2d\U0001f600"), "plain\ttext\n\u00e9\u4e2d\U0001f600");
  EXPECT_EQ(printable("\x1b[2J\x07\x08\x7f"), "?[2J???");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(printable("\u009b2J\u0085\u00a0"), "?2J?\u00a0");  // C1
  EXPECT_EQ(printable("one\r\ntwo\rover"), "one\ntwo?over");
  EXPECT_EQ(printable("\xff\xe2\x82 \xc2"), "??? ?");
  EXPECT_EQ(printable(""), "");
  std::string all;
  for (int c = 0; c < 256; ++c) all += static_cast<char>(c);
  EXPECT_EQ(invalid_utf8(printable(all)), std::string::npos);
}

using Rows = std::vector<std::vector<std::string>>;

TEST(TextTable, NamesStandLeftNumbersRight) {
  EXPECT_EQ(text_table(Rows{{"name", "x", "share"}, {"a", "10", "1 %"}, {"longer", "9", "100 %"}}),
            "name     x  share\n"
            "a       10    1 %\n"
            "longer   9  100 %\n");
  EXPECT_EQ(text_table(Rows{}), "");
  EXPECT_EQ(text_table(Rows{{"n", "x"}, {"a", ""}}), "n  x\na\n") << "no blanks at an end";
  EXPECT_EQ(text_table(Rows{{"n", "µ"}, {"µ", "12"}}), "n   µ\nµ  12\n") << "characters count, not bytes";
}

TEST(TextTable, ALongNameTakesALineAndNoLineIsTooLong) {
  const Rows rows = {{"name", "value"}, {std::string(15, 'n'), "1"}, {"short", "22222"}, {"    a remark"}};
  std::istringstream lines(text_table(rows, 20));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 20u) << line;
  EXPECT_EQ(text_table(rows, 20),
            "name           value\n"
            "nnnnnnnnnnnnnnn\n"
            "                   1\n"
            "short          22222\n"
            "    a remark\n");
}

TEST(Counted, OneIsNoPlural) {
  EXPECT_EQ(counted(0, "key"), "0 keys");
  EXPECT_EQ(counted(1, "key"), "1 key");
  EXPECT_EQ(counted(2, "KV head"), "2 KV heads");
  EXPECT_EQ(counted(2, "query", "queries"), "2 queries");
}

}  // namespace
}  // namespace lode
