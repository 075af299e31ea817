// SPDX-License-Identifier: Apache-2.0
// Named settings of methods: `preset=paper` is a method as its authors measure it, or as the paper does that has it as a baseline.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

namespace lode {

struct Preset {
  std::string_view method, name;
  std::string_view keys;  ///< key=value,...
  std::string_view note;  ///< what it is, and what our defaults are instead
};

/// All of a method's.
std::span<const Preset> presets_of(std::string_view method);

/// Puts the keys of `preset`, if it is among those given, in its place; keys given beside it stay as they are.
/// InputError, which begins with "attention spec `text`", of an unknown one.
void apply_preset(std::string_view method, std::string_view text, std::map<std::string, std::string>& given);

}  // namespace lode
