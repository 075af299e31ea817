// SPDX-License-Identifier: Apache-2.0
// For methods with an index that does not depend on how it is searched: specs that differ in that alone are
// indexed once.
#pragma once

#include <cstdint>
#include <optional>

#include "lodestone/selector.h"
#include "lodestone/spec.h"

namespace lode {

inline bool same_amount(const std::optional<Amount>& a, const std::optional<Amount>& b) {
  return a.has_value() == b.has_value() && (!a || (a->value == b->value && a->is_share == b->is_share));
}

class SharesIndex {
 public:
  virtual ~SharesIndex() = default;
  /// In place of build(sequence, kv): takes a copy of what `other`, a selector of the same layer and heads,
  /// has built over the same keys, and does what little is left. False, and nothing has changed, when that is
  /// not what build() would make here.
  virtual bool take_index(std::int32_t sequence, const Selector& other, KvLayer kv) = 0;
  /// After load() of both: what is the same as `other` has, and large, is held once from here on.
  virtual void share_index(std::int32_t /*sequence*/, const Selector& /*other*/) {}
};

}  // namespace lode
