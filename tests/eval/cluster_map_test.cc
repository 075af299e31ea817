// SPDX-License-Identifier: Apache-2.0
// Principal axes of known clouds, and the clusters of a real index laid out by them.
#include "lab/studies/cluster_map.h"

#include <gtest/gtest.h>

#include <numeric>

#include "eval/tiny_model.h"
#include "lodestone/error.h"

namespace lode {
namespace {

TEST(ClusterMap, AxesAreThoseOfTheLargestSpreadInTurn) {
  // Rows along (3, 4, 0) / 5 by +-10, and along z by +-1.
  std::vector<float> rows = {6, 8, 1, -6, -8, 1, 6, 8, -1, -6, -8, -1}, along;
  EXPECT_NEAR(take_main_axis(rows, 3, along), 400.0, 1e-3);
  for (const float x : along) EXPECT_NEAR(std::abs(x), 10.0, 1e-4);
  EXPECT_NEAR(take_main_axis(rows, 3, along), 4.0, 1e-3);
  for (const float x : along) EXPECT_NEAR(std::abs(x), 1.0, 1e-4);
  EXPECT_NEAR(take_main_axis(rows, 3, along), 0.0, 1e-6);  // nothing is left
  EXPECT_EQ(along.size(), 4u);
  rows.clear();
  EXPECT_EQ(take_main_axis(rows, 3, along), 0.0);
  EXPECT_TRUE(along.empty());
}

TEST(ClusterMap, ShowsTheLargestClustersOfEachLayer) {
  std::string text;
  for (int i = 0; i < 80; ++i) text += "line " + std::to_string(i * i) + "; ";
  const auto named = [](const char* spec) { return NamedSpec{spec, parse_spec(spec)}; };
  ClusterMapOptions options;
  options.clusters = 3;
  options.keys = 5;
  const std::vector<Json> maps = cluster_maps(
      tiny_model(), text, {named("squeezed:metric=cosine"), named("squeezed:clusters=10")}, options);
  ASSERT_EQ(maps.size(), 4u);  // two layers
  for (std::size_t i = 0; i < maps.size(); ++i) {
    const Json& map = maps[i];
    EXPECT_EQ(map.at("attention"), i < 2 ? "squeezed:metric=cosine" : "squeezed:clusters=10");
    EXPECT_EQ(map.at("layer"), static_cast<int>(i % 2));
    ASSERT_EQ(map.at("groups").size(), 3u);
    EXPECT_GT(map.at("shown").get<double>(), 0.0);
    EXPECT_LE(map.at("shown").get<double>(), 1.0 + 1e-6);
    std::int64_t before = 1 << 20;
    for (const Json& group : map.at("groups")) {
      const auto keys = group.at("keys").get<std::int64_t>();
      EXPECT_LE(keys, before);
      EXPECT_EQ(std::ssize(group.at("points")), std::min<std::int64_t>(keys, 5));
      before = keys;
    }
  }
  EXPECT_EQ(maps[3].at("clusters"), 10);
  EXPECT_THROW(cluster_maps(tiny_model(), text, {named("topk:k=4")}, options), InputError);
  EXPECT_THROW(cluster_maps(tiny_model(), "short", {named("squeezed")}, options), InputError);
}

}  // namespace
}  // namespace lode
