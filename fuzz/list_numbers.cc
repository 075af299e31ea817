// SPDX-License-Identifier: Apache-2.0
// Any bytes as the list styles of a DOCX and of an ODT: refused, or marks of bounded length for whatever place a paragraph names.
#include "documents/docx_styles.h"
#include "documents/odt_lists.h"
#include "documents/xml.h"
#include "fuzz/target.h"

LODE_FUZZ_TARGET(list_numbers) {
  const auto expect_short = [&](const std::string& mark) {
    LODE_ASSERT(mark.size() <= 400 * input.size() + 16);
  };
  lode::DocxStyles docx;
  docx.read_numbering(input, "x");
  docx.read_styles(input, "x");
  for (const char* list : {"", "0", "1", "2", "x"})
    for (const char* style : {"", "Heading1", "a"})
      for (int level = -1; level < 9; ++level) expect_short(docx.next(style, {list, level}));
  lode::OdtLists odt;
  odt.read_styles(input, "x");
  lode::read_xml(input, "x", [&](const lode::XmlEvent& e) {
    const bool begin = e.kind == lode::XmlEvent::Kind::begin;
    if (begin) odt.note_style(e);
    if (begin && e.name == "text:list") odt.begin_list(e);
    if (begin && e.name == "text:list-item") odt.begin_item(e);
    if (begin && e.name == "text:p") expect_short(odt.begin_paragraph());
    if (begin && e.name == "text:h") expect_short(odt.heading(static_cast<int>(e.name.size()), e));
    if ((!begin || e.empty) && e.name == "text:list") odt.end_list();
  });
}
