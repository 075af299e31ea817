// SPDX-License-Identifier: Apache-2.0
// Numbers of lists' items, as a page shows them.
#pragma once

#include <cstdint>
#include <string>

namespace lode {

/// In the form that `type` names as HTML's attribute does: 1, a, A, i or I. Decimal where letters and Roman numerals have no such number.
std::string item_number(char type, std::int64_t number);

/// A whole number of an attribute, whatever stands behind it; `otherwise` where it begins with none, or one that 32 bits do not hold.
std::int64_t number_of(const std::string& text, std::int64_t otherwise);

}  // namespace lode
