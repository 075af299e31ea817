// SPDX-License-Identifier: Apache-2.0
// How fast ranks tell each other something.
#pragma once

#include "base/communicator.h"

namespace lode {

struct LinkSpeed {
  double latency = 50e-6;         ///< seconds until a small message to one other rank has come
  double message = 5e-6;          ///< seconds that each further one of the same exchange takes
  double bytes_per_second = 1e9;  ///< that a rank sends while all others do
  /// Seconds of an exchange in which each rank sends so many bytes to others, over all of its messages.
  double exchange(int ranks, double bytes) const {
    if (ranks < 2) return 0;
    return latency + (ranks - 2) * message + bytes / bytes_per_second;
  }
};

/// By exchanges of all ranks, for about a second; the same figures on all of them. The time of a further message needs
/// three ranks: with two it is a tenth of the latency.
LinkSpeed measure_link(Communicator& ranks);

}  // namespace lode
