// SPDX-License-Identifier: Apache-2.0
// Where keys and values go for a given amount of GPU memory, and what is said of it.
#include "kv/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lodestone/error.h"

namespace lode {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

/// Llama-3.1-8B: 128 KiB a token in bf16, 32 layers.
PlacementTask task(std::int64_t tokens, std::int64_t limit) {
  return {.weights = 15317 * kMiB,
          .working = 600 * kMiB,
          .token_bytes = 131072,
          .layers = 32,
          .max_tokens = tokens,
          .held = 700 * kMiB,
          .moved = kMiB,
          .limit = limit,
          .by_flag = true};
}

TEST(Placement, KeysStayOnTheGpuWhereTheyFitToTheByte) {
  const std::int64_t needed = (15317 + 600) * kMiB + 131072 * 1024;
  EXPECT_FALSE(place_kv(task(1024, needed)).on_host);
  const Placement place = place_kv(task(131072, 24576 * kMiB));
  EXPECT_TRUE(place.on_host);
  EXPECT_EQ(place.gpu_bytes, (15317 + 600 + 700 + 1) * kMiB + 131072 * 4096LL);
  EXPECT_EQ(place.host_bytes, 131072 * 131072LL);
}

TEST(Placement, OneByteTooFewSendsKeysToTheHost) {
  // So many tokens that the host's placement needs less than the GPU's.
  const std::int64_t needed = (15317 + 600) * kMiB + 131072LL * 65536;
  EXPECT_FALSE(place_kv(task(65536, needed)).on_host);
  EXPECT_TRUE(place_kv(task(65536, needed - 1)).on_host);
}

TEST(Placement, TheMostTokensThatAreNamedFitAndOneMoreDoesNot) {
  const std::int64_t limit = 24576 * kMiB;
  const Placement place = place_kv(task(131072, limit));
  EXPECT_TRUE(place_kv(task(place.most_on_host, limit)).on_host);
  EXPECT_THROW(place_kv(task(place.most_on_host + 1, limit)), InputError);
  EXPECT_FALSE(place_kv(task(place.most_on_gpu, limit)).on_host);
  EXPECT_TRUE(place_kv(task(place.most_on_gpu + 1, limit)).on_host);
}

TEST(Placement, WhatTheUserWantsIsDoneOrRefusedWithNumbers) {
  PlacementTask wanted = task(1024, 24576 * kMiB);
  wanted.wanted = KvTier::host;
  EXPECT_TRUE(place_kv(wanted).on_host);
  wanted = task(131072, 24576 * kMiB);
  wanted.wanted = KvTier::gpu;
  try {
    place_kv(wanted);
    FAIL() << "expected an error";
  } catch (const InputError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("--gpu-memory of 24576 MiB"));
    EXPECT_THAT(e.what(), testing::HasSubstr("131072 tokens take 16384 MiB"));
  }
}

/// 8 bits in host memory, 16 on the GPU: a layer there takes twice what it takes here.
TEST(Placement, TheGpuMayHaveALargerType) {
  PlacementTask wide = task(131072, 24576 * kMiB);
  wide.wanted = KvTier::host;
  wide.gpu_token_bytes = wide.token_bytes;
  wide.token_bytes /= 2;
  const Placement place = place_kv(wide);
  EXPECT_EQ(place.host_bytes, 131072 * wide.token_bytes);
  EXPECT_EQ(place.gpu_bytes, place_kv(task(131072, 24576 * kMiB)).gpu_bytes);
}

TEST(Placement, WeightsThatDoNotFitLeaveNothing) {
  try {
    place_kv(task(1024, 1000 * kMiB));
    FAIL() << "expected an error";
  } catch (const InputError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("0 tokens fit on the GPU and 0 with"));
  }
}

}  // namespace
}  // namespace lode
