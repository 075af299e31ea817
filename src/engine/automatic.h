// SPDX-License-Identifier: Apache-2.0
// What methods do to a text, measured when it is indexed.
#pragma once

#include <string>

#include "lodestone/automatic.h"

namespace lode {

/// Measures all methods of an indexed context but `full`: passages of the text are recited behind it, so that queries
/// have to find them, and each method's outputs and what it recites are compared with full attention's. Returns the
/// text of the attachment. The context ends as it was.
std::string measure_automatic(Context& context);

}  // namespace lode
