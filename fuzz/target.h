// SPDX-License-Identifier: Apache-2.0
// A fuzz target: a function of arbitrary bytes that may end in an InputError and in nothing else. Every
// fuzz/NAME.cc has one; libFuzzer runs it (entry.cc), and the tests replay fuzz/corpus/NAME in every build
// (tests/fuzz).
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode::fuzz {

using Target = void (*)(std::string_view input);

/// By name, filled before main by LODE_FUZZ_TARGET.
inline std::map<std::string, Target>& targets() {
  static std::map<std::string, Target> all;
  return all;
}

struct Registration {
  Registration(const char* name, Target target) { targets()[name] = target; }
};

/// Runs a target; a refusal must be one short line of text.
inline void run(Target target, std::string_view input) {
  constexpr std::size_t kLongest = 1000;
  try {
    target(input);
  } catch (const InputError& e) {
    const std::string_view message = e.what();
    LODE_ASSERT(!message.empty() && message.size() <= kLongest);
    LODE_ASSERT(excerpt(message, kLongest) == message);
  }
}

}  // namespace lode::fuzz

#define LODE_FUZZ_TARGET(name)                                              \
  static void fuzz_##name(std::string_view input);                          \
  static const ::lode::fuzz::Registration registration(#name, fuzz_##name); \
  static void fuzz_##name(std::string_view input)
