// SPDX-License-Identifier: Apache-2.0
// For methods that were trained or chosen on texts of some length.
#pragma once

#include <cstdint>
#include <string>

#include "lodestone/selector.h"

namespace lode {

/// A remark is made where a context has more than so many times the tokens that a method was made on. The shipped
/// functions of 16k tokens are as good at 32k, and lose a fifth of the lookups at 64k (docs/results/saap.md).
inline constexpr std::int64_t kBeyondReach = 2;

class MadeForLength {
 public:
  virtual ~MadeForLength() = default;
  /// The remark for a context of this many tokens; empty when nothing speaks against it.
  virtual std::string remark_on_length(std::int64_t tokens) const = 0;
};

/// Of a selector, which may be null.
inline std::string remark_on_length(const Selector* selector, std::int64_t tokens) {
  const auto* const made = dynamic_cast<const MadeForLength*>(selector);
  return made == nullptr ? std::string() : made->remark_on_length(tokens);
}

}  // namespace lode
