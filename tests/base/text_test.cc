// SPDX-License-Identifier: Apache-2.0
// Tables as terminals show them.
#include "base/text.h"

#include <gtest/gtest.h>

#include <sstream>

namespace lode {
namespace {

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

}  // namespace
}  // namespace lode
