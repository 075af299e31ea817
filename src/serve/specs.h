// SPDX-License-Identifier: Apache-2.0
// Attention specs that come in requests.
#pragma once

#include <optional>
#include <string>

#include "lodestone/automatic.h"
#include "lodestone/spec.h"

namespace lode::serve {

/// `auto` and its keys, ApiError 400 on others; none when the text names another method.
std::optional<AutoSpec> parse_request_auto(const std::string& text);
/// ApiError 400 on an unknown spec, and on one that names a file: no path from a request reaches the file system.
Spec parse_request_spec(const std::string& text);

}  // namespace lode::serve
