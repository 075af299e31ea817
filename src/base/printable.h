// SPDX-License-Identifier: Apache-2.0
// Text from files on its way to a terminal: documents, names and metadata may hold escape sequences, which move the
// cursor, set titles or hide what stands there.
#pragma once

#include <string>
#include <string_view>

namespace lode {

/// The text with '?' in the place of each control character and of each byte that is no UTF-8. Newlines and tabs
/// stay; a carriage return goes where a newline follows.
std::string printable(std::string_view text);

}  // namespace lode
