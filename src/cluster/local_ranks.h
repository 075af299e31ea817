// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process: for tests, where every failure can be had.
#pragma once

#include <chrono>
#include <functional>

#include "base/communicator.h"

namespace lode {

/// Runs body once a rank, each in a thread with its own end of the communicator. When all have ended, rethrows the
/// exception of the first rank that failed by itself. A rank that waits for longer than `patience` fails.
void run_local_ranks(int size, const std::function<void(Communicator&)>& body,
                     std::chrono::milliseconds patience = std::chrono::seconds(60));

}  // namespace lode
