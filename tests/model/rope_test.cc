// SPDX-License-Identifier: Apache-2.0
// Rotations against transformers for every kind of scaling (tests/golden/make_rope_goldens.py), far positions
// included.
#include "kernels/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/file.h"
#include "base/json.h"
#include "model/config.h"
#include "support/source_dir.h"

namespace lode {
namespace {

Json goldens() {
  const std::string path = source_dir().string() + "/tests/golden/rope.json";
  return parse_json(read_file(path), path);
}

Rope rope_of(const Json& golden) {
  return Rope(parse_config(golden["config"].dump(), golden["name"].get<std::string>()),
              golden["tokens"].get<std::int64_t>());
}

/// Units in the last place between two positive floats.
std::int64_t ulps(float a, float b) {
  return std::abs(std::int64_t{std::bit_cast<std::int32_t>(a)} - std::bit_cast<std::int32_t>(b));
}

TEST(RopeGolden, FrequenciesEqualTransformers) {
  for (const Json& golden : goldens()) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const Rope rope = rope_of(golden);
    const auto want = golden["frequencies"].get<std::vector<float>>();
    ASSERT_EQ(rope.frequencies().size(), want.size());
    EXPECT_FLOAT_EQ(rope.attention_scaling(), golden["scaling"].get<float>());
    // Dynamic scaling has a base of its own, which transformers rounds to float32 on the way.
    const bool dynamic = golden["name"] == "dynamic-long";
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_LE(ulps(rope.frequencies()[i], want[i]), dynamic ? 8 : 1) << i;
  }
}

TEST(RopeGolden, RotationsEqualTransformers) {
  for (const Json& golden : goldens()) {
    const Rope rope = rope_of(golden);
    const std::size_t half = rope.frequencies().size();
    for (const auto& [text, want] : golden["at"].items()) {
      SCOPED_TRACE(golden["name"].get<std::string>() + " at " + text);
      const auto position = static_cast<Position>(std::stol(text));
      std::vector<float> x(2 * half, 0.0f);  // (1, 0) in each plane turns into (cos, sin)
      std::fill_n(x.begin(), half, 1.0f);
      rope.rotate(x, position);
      std::vector<float> y(2 * half, 0.0f);  // and (0, 1) into (-sin, cos)
      std::fill_n(y.begin() + static_cast<std::ptrdiff_t>(half), half, 1.0f);
      rope.rotate(y, position);
      for (std::size_t i = 0; i < half; ++i) {
        const float ulp_of_angle = static_cast<float>(position) * rope.frequencies()[i] * 0x1p-23f;
        const float tolerance = 2e-6f + (golden["name"] == "dynamic-long" ? 8 : 1.5f) * ulp_of_angle;
        EXPECT_NEAR(x[i], want["cos"][i].get<float>(), tolerance) << i;
        EXPECT_NEAR(x[i + half], want["sin"][i].get<float>(), tolerance) << i;
        EXPECT_EQ(y[i], -x[i + half]) << i;
        EXPECT_EQ(y[i + half], x[i]) << i;
      }
    }
  }
}

TEST(Rope, UnrotateUndoesRotate) {
  for (const Json& golden : goldens()) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const Rope rope = rope_of(golden);
    std::vector<float> x(3 * 2 * rope.frequencies().size());  // three heads
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i));
    for (const Position position : {0, 1, 77, 131071, 1000000}) {
      std::vector<float> y = x;
      rope.rotate(y, position);
      rope.unrotate(y, position);
      for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 2e-6f);
    }
  }
}

/// The score of a query and a key depends on their distance alone, which is what the rotation is for.
TEST(Rope, ScoresDependOnTheDistance) {
  const ModelConfig config = named_shape("L1q1kv1d64");
  const Rope rope(config, 4096);
  std::vector<float> q(64), k(64);
  for (std::size_t i = 0; i < 64; ++i) {
    q[i] = std::cos(static_cast<float>(3 * i));
    k[i] = std::cos(static_cast<float>(5 * i + 1));
  }
  const auto score = [&](Position at, Position distance) {
    std::vector<float> a = q, b = k;
    rope.rotate(a, at + distance);
    rope.rotate(b, at);
    double sum = 0;
    for (std::size_t i = 0; i < 64; ++i) sum += static_cast<double>(a[i]) * b[i];
    return sum;
  };
  for (const Position distance : {0, 1, 10, 500}) {
    for (const Position at : {1, 100, 3000})
      EXPECT_NEAR(score(at, distance), score(0, distance), 2e-2) << at << " " << distance;
  }
}

}  // namespace
}  // namespace lode
