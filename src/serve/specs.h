// SPDX-License-Identifier: Apache-2.0
// Attention specs that come in requests.
#pragma once

#include <string>

#include "lodestone/spec.h"

namespace lode::serve {

/// ApiError 400 on an unknown spec, and on one that names a file: no path from a request reaches the file system.
Spec parse_request_spec(const std::string& text);

}  // namespace lode::serve
