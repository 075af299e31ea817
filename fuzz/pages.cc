// SPDX-License-Identifier: Apache-2.0
// Any text as the pages of a PDF, form feeds between them: what flows out of it is no longer.
#include "documents/readers.h"
#include "fuzz/target.h"

LODE_FUZZ_TARGET(pages) {
  std::vector<lode::PageLines> pages(1, {.body = {""}, .notes = {}});
  for (const char c : input) {
    if (c == '\f')
      pages.push_back({.body = {""}, .notes = {}});
    else if (c == '\n')
      pages.back().body.emplace_back();
    else
      pages.back().body.back() += c;
  }
  lode::TextBuilder out(1 << 22, "x");
  lode::put_pages(pages, out);
  LODE_ASSERT(out.text().size() <= 2 * input.size() + 2);
  for (const lode::PlaceMark& m : out.take_marks())
    LODE_ASSERT(m.page >= 1 && m.page <= static_cast<std::int32_t>(pages.size()) && m.line >= 1);
}
