// SPDX-License-Identifier: Apache-2.0
// Signals that end the program, where their reason is known: one sentence and exit code 1 in place of a core dump.
#pragma once

namespace lode {

/// SIGBUS: a mapped file was cut short, or its disk fails. SIGSEGV while the address space (ulimit -v) is used up: a
/// library did not look at whether it got memory, or the stack could not grow; at any other time it ends as it did before.
void install_fatal_handlers();
/// Where their sentences are written from now on; standard error unless somebody says otherwise.
void set_fatal_output(int fd) noexcept;

}  // namespace lode
