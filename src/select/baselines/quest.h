// SPDX-License-Identifier: Apache-2.0
// What a spec of quest says, and what a device asks of its selector that chooses in its place.
#pragma once

#include "lodestone/spec.h"
#include "select/baselines/page_bounds.h"

namespace lode {

struct QuestOptions {
  std::int64_t page = 16;         // section 4.1
  Amount budget = {1024, false};  // of the authors' examples
  int bits = 16;
  bool per_kv_head = false;

  static QuestOptions of(const Spec& spec);
  PageShape shape(Position sink, int kv_heads, int head_dim) const {
    return {.begin = sink, .heads = kv_heads, .d = head_dim, .page = page, .bits = bits};
  }
};

/// A selector whose coded bounds have levels that are taken from a text when it is indexed.
class PageBounder {
 public:
  struct Levels {
    std::int64_t version = 0;            ///< another one: other levels
    const PageBounds* bounds = nullptr;  ///< whose levels() they are; null: there are none yet
  };
  virtual ~PageBounder() = default;
  virtual Levels page_levels() const = 0;  ///< of sequence 0
};

}  // namespace lode
