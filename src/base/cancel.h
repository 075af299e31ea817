// SPDX-License-Identifier: Apache-2.0
// Ctrl-C: the first sets a flag that long work polls; the second leaves at once.
#pragma once

namespace lode {

/// Installs handlers for SIGINT and SIGTERM: the first signal raises the flag, the second calls _exit(130).
void install_cancel_handlers();
bool cancel_requested() noexcept;
/// Throws Interrupted when the flag is up. Call it at least once per layer and per 512 tokens.
void check_cancel();
/// As if a signal had come.
void set_cancel(bool on) noexcept;

}  // namespace lode
