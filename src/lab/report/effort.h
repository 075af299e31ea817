// SPDX-License-Identifier: Apache-2.0
// What a piece of work took, and whether the machine was its own: times that were taken while other programs
// ran are too long.
#pragma once

#include <string>

#include "base/json.h"

namespace lode {

struct CostLog {
  double wall = 0;       ///< seconds on the clock
  double processor = 0;  ///< seconds of processors that this program used
  double others = 0;     ///< seconds of processors that other programs used meanwhile
  double room = 0;       ///< seconds of processors that there were: wall x processors

  CostLog& operator+=(const CostLog& other);
  /// Share of the machine that others had.
  double others_share() const { return room > 0 ? others / room : 0; }
  Json json() const;
  static CostLog of(const Json& json);
};

/// Others had more of the machine than a quiet system does.
inline constexpr double kQuietShare = 0.05;
/// A sentence on times taken under so much other work; empty when the machine was quiet.
std::string busy_warning(double others_share);

/// Counts from its making on. Where the system does not tell what others do, they count as nothing.
class EffortClock {
 public:
  EffortClock();
  CostLog effort() const;

 private:
  double wall_, own_, all_;  // seconds at the start
};

}  // namespace lode
