// SPDX-License-Identifier: Apache-2.0
// Names of contexts: the only part of a request that becomes part of a file's name.
#pragma once

#include <string>
#include <string_view>

namespace lode::serve {

inline constexpr std::size_t kLongestContextName = 128;

/// Letters, digits, '.', '_' and '-', not beginning with a dot or dash, 1 to 128 of them.
bool is_context_name(std::string_view name);
/// ApiError 400 otherwise.
void expect_context_name(std::string_view name);
/// What is left of a file's name: "My book (2).pdf" gives "My-book-2-.pdf"; "document" when nothing is.
std::string context_name_of(std::string_view file_name);
/// With a number, as where the name itself is taken: "report.pdf" and 2 give "report-2.pdf". As long as a name may be.
std::string numbered_name(std::string_view name, int number);
/// %41 becomes A; false where a '%' has no two hexadecimal digits behind it.
bool percent_decode(std::string_view text, std::string& out);

}  // namespace lode::serve
