// SPDX-License-Identifier: Apache-2.0
// Half floats bit by bit against their definition; text helpers; the signal flag.
#include "lodestone/types.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cancel.h"
#include "base/hash.h"
#include "base/progress.h"
#include "base/text.h"
#include "support/refusal.h"

namespace lode {
namespace {

double value_of_half(std::uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return exponent == 0 ? sign * std::ldexp(mantissa, -24) : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Types, EveryHalfIsReadAndWrittenBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16 half{static_cast<std::uint16_t>(bits)};
    const double want = value_of_half(half.bits);
    const float got = to_float(half);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got));
      EXPECT_TRUE(std::isnan(to_float(to_f16(got))));
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), want) << bits;
    ASSERT_EQ(std::signbit(got), std::signbit(want)) << bits;
    ASSERT_EQ(to_f16(got).bits, half.bits);
  }
}

/// Between two neighbours: below the middle the lower, above it the upper, at it the even one.
TEST(Types, HalvesRoundToNearestEven) {
  for (std::uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const auto middle = static_cast<float>((value_of_half(bits) + value_of_half(next)) / 2);
    ASSERT_EQ(to_f16(middle).bits, bits % 2 == 0 ? bits : next);
    ASSERT_EQ(to_f16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(to_f16(std::nextafter(middle, 1e9f)).bits, next);
    ASSERT_EQ(to_f16(-middle).bits, 0x8000 | (bits % 2 == 0 ? bits : next));
  }
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_f16(1e-30f).bits, 0);
}

TEST(Types, BrainFloatsRoundToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 brain{static_cast<std::uint16_t>(bits)};
    const float value = to_float(brain);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(value))));
      continue;
    }
    ASSERT_EQ(to_bf16(value).bits, brain.bits);
    if (std::isinf(value)) continue;
    const float middle = std::bit_cast<float>(bits << 16 | 0x8000u);
    ASSERT_EQ(to_bf16(middle).bits, bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(to_bf16(std::bit_cast<float>(bits << 16 | 0x7fffu)).bits, bits);
    ASSERT_EQ(to_bf16(std::bit_cast<float>(bits << 16 | 0x8001u)).bits, bits + 1);
  }
}

TEST(Types, NamesRoundTrip) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4})
    EXPECT_EQ(parse_dtype(name_of(type)), type);
  for (const char* wrong : {"", "F32", "float", "q8 ", "int8"})
    test::expect_refused("bf16", [&] { parse_dtype(wrong); });
}

/// Against the definition: decode, encode again, compare.
bool valid_by_definition(std::uint32_t lead, std::uint32_t second) {
  const std::uint32_t code = (lead & 31) << 6 | (second & 63);
  return (lead & 0xe0) == 0xc0 && (second & 0xc0) == 0x80 && code >= 0x80;
}

TEST(Text, InvalidUtf8IsFound) {
  for (std::uint32_t a = 0; a < 256; ++a) {
    const std::string one(1, static_cast<char>(a));
    EXPECT_EQ(invalid_utf8(one), a < 128 ? std::string::npos : 0) << a;
    for (std::uint32_t b = 0; b < 256; ++b) {
      const std::string two = one + static_cast<char>(b);
      const std::size_t want = a < 128                     ? (b < 128 ? std::string::npos : 1)
                               : valid_by_definition(a, b) ? std::string::npos
                                                           : 0;
      ASSERT_EQ(invalid_utf8(two), want) << a << " " << b;
    }
  }
  for (const std::string& bad : std::vector<std::string>{
           "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
           "\xf8\x88\x80\x80\x80", "\xe2\x82", "\xf0\x9f\x98", "\xc0\x80"}) {
    EXPECT_EQ(invalid_utf8("ok " + bad), 3u);
    EXPECT_EQ(invalid_utf8("ok " + bad + "x"), 3u);
  }
  for (const std::string& good :
       std::vector<std::string>{"\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80",
                                "\xf4\x8f\xbf\xbf", "\xef\xbf\xbf"}) {
    EXPECT_EQ(invalid_utf8("ok " + good + "x"), std::string::npos);
  }
  EXPECT_EQ(invalid_utf8(std::string("a\0b", 3)), std::string::npos);
}

TEST(Text, NearestNameHelpsWithTyposOnly) {
  const std::vector<std::string> names = {"full", "streaming", "topk", "kmeans", "random"};
  EXPECT_EQ(nearest_name("kmean", names), "kmeans");
  EXPECT_EQ(nearest_name("steaming", names), "streaming");
  EXPECT_EQ(nearest_name("zebra", names), "");
  EXPECT_EQ(nearest_name("", names), "");
}

TEST(Text, BytesForPeople) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(std::int64_t{3} << 40), "3.0 TiB");
}

TEST(Hash, PiecesGiveTheHashOfTheWhole) {
  const std::string text(100000, 'x');
  Hasher hasher;
  for (std::size_t at = 0, step = 1; at < text.size(); at += step, step = step * 3 % 1000 + 1) {
    hasher.add(std::as_bytes(std::span(text)).subspan(at, std::min(step, text.size() - at)));
  }
  EXPECT_EQ(hasher.hex(), hash_hex(text));
  EXPECT_EQ(hash_hex(std::string_view()),
            "99aa06d3014798d86001c324468d497f");  // XXH3-128 of nothing, by its specification
}

/// Exit code of a child that gets `signals` interrupts.
int interrupted(int signals) {
  const pid_t child = fork();
  if (child == 0) {
    install_cancel_handlers();
    for (int i = 0; i < signals; ++i) raise(SIGINT);
    try {
      check_cancel();
    } catch (const Interrupted&) {
      _exit(3);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Cancel, FirstInterruptRaisesTheFlagSecondLeaves) {
  EXPECT_EQ(interrupted(0), 0);
  EXPECT_EQ(interrupted(1), 3);
  EXPECT_EQ(interrupted(2), 130);
}

TEST(Progress, WorkWhoseUnitsBecomeDearerIsPredictedFromItsBeginning) {
  const auto seconds = [](double n) { return 2e-3 * n + 3e-7 * n * n; };
  GrowingCost cost;
  EXPECT_EQ(cost.left(100'000), 0.0);
  for (std::int64_t n = 512; n <= 10'240; n += 512) cost.add(n, seconds(static_cast<double>(n)));
  EXPECT_NEAR(cost.left(100'000), seconds(100'000) - seconds(10'240), 1e-6 * seconds(100'000));
  EXPECT_NEAR(cost.left(10'240), 0.0, 1e-9);
}

TEST(Progress, WhatAnEarlierRunDidIsNoCost) {
  GrowingCost resumed;
  resumed.skip(1000);
  resumed.add(1100, 10.0);
  EXPECT_NEAR(resumed.left(1200), 10.0, 1e-9);
}

TEST(Progress, NeitherPartOfTheCostIsNegative) {
  GrowingCost slow_start;  // then even
  slow_start.add(512, 10.0);
  slow_start.add(1024, 11.0);
  slow_start.add(1024, 11.5);  // nothing done: no step
  EXPECT_NEAR(slow_start.left(2048), 11.0, 1e-9) << "as much again, not less";
  GrowingCost steep;
  steep.add(512, 0.0);
  steep.add(1024, 9.0);
  EXPECT_GT(steep.left(2048), 9.0);
}

TEST(Progress, WhatAnEarlierRunDidIsNoSpeed) {
  testing::internal::CaptureStderr();
  {
    Progress progress("training", 1'000'000, "steps");
    progress.skip(900'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    progress.at(900'001);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  const std::size_t at = said.find("steps, ");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_LE(std::stoll(said.substr(at + 7)), 50) << said;
}

TEST(Progress, WhatTakesNoTimeHasNoSpeed) {
  testing::internal::CaptureStderr();
  { Progress("indexes", 48, "layers").at(48); }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "indexes: 48/48 layers, in 1 s\n");
}

TEST(Progress, SilentWhenQuietAndBrieflyOtherwise) {
  testing::internal::CaptureStderr();
  { Progress("reading", 1000, "tokens", Progress::Mode::quiet).at(1000); }
  { Progress("nothing", 0, "tokens").at(0); }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  {
    Progress progress("reading", 1000, "tokens");
    for (int i = 0; i <= 1000; ++i) progress.at(i);
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("1000/1000 tokens"), std::string::npos);
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 12);
  EXPECT_EQ(text.find('\033'), std::string::npos);
}

}  // namespace
}  // namespace lode
