// SPDX-License-Identifier: Apache-2.0
// Commands that are shown to be run again.
#pragma once

#include <string>

namespace lode::cli {

/// The value as a shell takes it for one word.
std::string as_word(const std::string& value);

}  // namespace lode::cli
