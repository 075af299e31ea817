// SPDX-License-Identifier: Apache-2.0
// The three ways in which a call can fail, and the check for our own mistakes.
#pragma once

#include <stdexcept>
#include <string>

namespace lode {

/// The user's input is at fault: a flag, a file, a text. One sentence: what was expected, what was found,
/// where. Exit code 2.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The input is fine and the work failed all the same: disk full, out of memory, a device lost. Exit code 1.
class RunError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user asked to stop (Ctrl-C); everything half-written has been removed by the time this is caught. Exit
/// code 130.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace lode

/// A condition that only a bug of ours can break; checked in every build, never used on input.
#define LODE_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::lode::assertion_failed(#condition, __FILE__, __LINE__))
