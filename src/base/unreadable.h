// SPDX-License-Identifier: Apache-2.0
// A file that may be sound though it is refused.
#pragma once

#include "lodestone/error.h"

namespace lode {

/// This release does not know what the file holds, such as the architecture of a model, or nobody may open it here. Other
/// InputErrors about a file say that something in it is wrong.
class UnreadableError : public InputError {
 public:
  using InputError::InputError;
};

}  // namespace lode
