// SPDX-License-Identifier: Apache-2.0
// Any bytes as the XML of an office document: refused, or events that nest.
#include "documents/xml.h"
#include "fuzz/target.h"

LODE_FUZZ_TARGET(office_xml) {
  int depth = 0;
  std::size_t text = 0;
  lode::read_xml(input, "x", [&](const lode::XmlEvent& e) {
    depth += e.kind == lode::XmlEvent::Kind::begin && !e.empty;
    depth -= e.kind == lode::XmlEvent::Kind::end;
    text += e.text.size();
    LODE_ASSERT(depth >= 0);
  });
  LODE_ASSERT(depth == 0 && text <= 4 * input.size());
}
