// SPDX-License-Identifier: Apache-2.0
// A device's memory did not suffice: who holds some of it that can be given back may do so and try again.
#pragma once

#include "lodestone/error.h"

namespace lode {

class OutOfDeviceMemory : public RunError {
 public:
  using RunError::RunError;
};

}  // namespace lode
