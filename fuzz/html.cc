// SPDX-License-Identifier: Apache-2.0
// Any bytes as a page of HTML: refused, or a text in UTF-8 that is no longer than a few times the page,
// but for the first empty cells beside those that span columns.
#include "documents/readers.h"
#include "fuzz/target.h"

LODE_FUZZ_TARGET(html) {
  lode::TextBuilder out(1 << 22, "x");
  lode::put_html(input, "x", true, {}, out);
  out.finish();
  LODE_ASSERT(lode::invalid_utf8(out.text()) == std::string::npos);
  LODE_ASSERT(out.text().size() <= (4 << 10) + 64 + 16 * input.size());
}
