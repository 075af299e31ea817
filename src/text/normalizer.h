// SPDX-License-Identifier: Apache-2.0
// Rewrites a text before it is cut: the "normalizer" of tokenizer.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace lode {

class Normalizer {
 public:
  /// One component.
  class Step {
   public:
    virtual ~Step() = default;
    virtual std::string apply(std::string_view text) const = 0;
  };

  /// `json` may be null. InputError names a component that is unknown or not supported.
  Normalizer(const Json& json, const std::string& where);

  static constexpr std::size_t kMaxSteps = 64;

  bool empty() const { return steps_.empty(); }
  /// `text` is valid UTF-8.
  std::string apply(std::string_view text) const;

 private:
  void add(const Json& json, const std::string& where);
  std::string where_;
  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace lode
