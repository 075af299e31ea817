// SPDX-License-Identifier: Apache-2.0
// The two readers of UTF-8 agree, and what replaces broken text is valid.
#include "text/utf8.h"

#include "base/text.h"
#include "fuzz/target.h"

namespace {

/// The same code points written anew; nothing is left out only when `text` is valid.
std::string rewritten(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const lode::Utf8Step step = lode::utf8_step(text);
    LODE_ASSERT(step.bytes >= 1 && step.bytes <= text.size());
    if (step.kind != lode::Utf8Kind::valid) break;
    lode::append_utf8(result, lode::first_code_point(text).value);
    text.remove_prefix(step.bytes);
  }
  return result;
}

}  // namespace

LODE_FUZZ_TARGET(utf8) {
  const std::size_t bad = lode::invalid_utf8(input);
  const std::string same = rewritten(input), replaced = lode::replace_invalid_utf8(input);
  LODE_ASSERT(same == input.substr(0, bad));
  LODE_ASSERT(lode::invalid_utf8(replaced) == std::string_view::npos);
  LODE_ASSERT((bad == std::string_view::npos) == (replaced == input));
  LODE_ASSERT(lode::invalid_utf8(lode::excerpt(input)) == std::string_view::npos);
  if (!same.empty()) LODE_ASSERT(lode::last_code_point(same).bytes <= 4);
}
