// SPDX-License-Identifier: Apache-2.0
// A program that reads a stranger's file: bounded in time, memory and output, and without a network.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

struct ChildLimits {
  int seconds = 120;                            ///< by the clock, and of a core
  std::size_t memory = std::size_t{2} << 30;    ///< bytes of address space
  std::size_t output = std::size_t{256} << 20;  ///< bytes on its standard output
};

struct ChildResult {
  enum class End { exited, killed, out_of_time, too_much_output };
  End end = End::exited;
  int code = 0;          ///< its exit code, or the signal that killed it
  std::string out, err;  ///< of `err` the first 64 KiB
  bool offline = true;   ///< whether the system let us take its network away
};

/// Where a program lies by $PATH; empty when it is not there.
std::string find_program(std::string_view name);

/// Runs `argv`, whose first element is a path, with `input` on its standard input and nothing else open. It
/// can make no files and, where the system has seccomp, no sockets. It is killed at a limit, and when the
/// user asks to stop (Interrupted). RunError when it cannot be started.
ChildResult run_child(const std::vector<std::string>& argv, std::string_view input,
                      const ChildLimits& limits);

}  // namespace lode
