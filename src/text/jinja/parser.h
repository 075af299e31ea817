// SPDX-License-Identifier: Apache-2.0
// From the words of a template to its tree, with Jinja's grammar and order of operators.
#pragma once

#include <string_view>

#include "text/jinja/ast.h"

namespace lode::jinja {

/// InputError "line N: ..." on what is no template, on tags that chat templates have no use for (include, import,
/// extends), and on trees that are too deep. `source` is valid UTF-8.
Body parse(std::string_view source);

}  // namespace lode::jinja
