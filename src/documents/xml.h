// SPDX-License-Identifier: Apache-2.0
// The XML of office documents as a stream of events: no entities but XML's own, no document types, no files.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace lode {

/// Where the stream stands.
class XmlEvent {
 public:
  virtual ~XmlEvent() = default;
  enum class Kind { begin, end, text };
  Kind kind = Kind::begin;
  std::string_view
      name;  ///< of the element with its namespace's usual prefix, "w:p", whichever the document wrote
  std::string_view text;
  bool empty = false;  ///< the element ends with its begin: no `end` follows
  /// Empty when there is none.
  virtual std::string attribute(const char* name) const = 0;
};

/// Whether an element of this name stands somewhere, with whichever prefix.
bool has_element(std::string_view xml, std::string_view local_name);

/// InputError when the XML is malformed, has a document type (no office program writes one) or is nested too
/// deep; `where` begins the message.
void read_xml(std::string_view xml, std::string_view where,
              const std::function<void(const XmlEvent&)>& visit);

}  // namespace lode
