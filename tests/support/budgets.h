// SPDX-License-Identifier: Apache-2.0
// What tests of methods with a budget of keys share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/selectors.h"

namespace lode::test {

/// Where all keys score alike, exactly `budget` of them are chosen, the newest.
inline void expect_exact_budgets(const std::string& method, int group,
                                 const std::vector<std::int64_t>& budgets) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = group, .d = 64, .dense = {1, 16}});
  world.shape_key = [](Position, int, int, float) { return 0.0f; };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(300);
  const QueryBlock block = world.block(299, 1);
  for (const std::int64_t budget : budgets) {
    const auto selector = make(method + ":budget=" + std::to_string(budget), geometry);
    selector->build(0, world.store().layer(0));
    const FarSet found = select(*selector, block, geometry)[0];
    EXPECT_EQ(std::ssize(found), std::min<std::int64_t>(budget, 283));
    EXPECT_EQ(found.begin()->first, 284 - std::min<std::int64_t>(budget, 283));
  }
}

/// 200 more tokens one by one behind a window of 16, with a rollback to 507 on the way.
inline void grow_and_roll_back(World& world, Selector& selector) {
  for (int i = 0; i < 200; ++i) {
    world.write(1);
    selector.append(0, world.store().layer(0), static_cast<Position>(world.tokens() - 16));
    if (i == 150) {
      world.store().roll_back(507);
      selector.roll_back(0, 507);
    }
  }
}

}  // namespace lode::test
