// SPDX-License-Identifier: Apache-2.0
#include "documents/xml.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <memory>

#include "base/text.h"
#include "lodestone/error.h"

#if LODE_LIBXML2
#include <libxml/xmlreader.h>
#endif

namespace lode {

bool has_element(std::string_view xml, std::string_view local_name) {
  constexpr std::size_t kLongestPrefix = 64;
  for (std::size_t at = xml.find(local_name); at != std::string_view::npos;
       at = xml.find(local_name, at + 1)) {
    const std::string_view before =
        xml.substr(at - std::min(at, kLongestPrefix), std::min(at, kLongestPrefix));
    const std::size_t begin = before.rfind('<');
    if (begin == std::string_view::npos) continue;
    const std::string_view prefix = before.substr(begin + 1);
    if (prefix.empty() ||
        (prefix.back() == ':' && prefix.find_first_of(" >\t\n\r/") == std::string_view::npos))
      return true;
  }
  return false;
}

#if LODE_LIBXML2

namespace {

/// Namespaces by the prefixes that office programs write, so that readers know names by them. Another program may write
/// others, or none.
struct Namespace {
  std::string_view prefix;
  const char* uri;
};
constexpr Namespace kNamespaces[] = {
    {"w", "http://schemas.openxmlformats.org/wordprocessingml/2006/main"},
    {"w", "http://purl.oclc.org/ooxml/wordprocessingml/main"},
    {"mc", "http://schemas.openxmlformats.org/markup-compatibility/2006"},
    {"relations", "http://schemas.openxmlformats.org/package/2006/relationships"},
    {"office", "urn:oasis:names:tc:opendocument:xmlns:office:1.0"},
    {"text", "urn:oasis:names:tc:opendocument:xmlns:text:1.0"},
    {"table", "urn:oasis:names:tc:opendocument:xmlns:table:1.0"},
    {"style", "urn:oasis:names:tc:opendocument:xmlns:style:1.0"},
    {"draw", "urn:oasis:names:tc:opendocument:xmlns:drawing:1.0"},
    {"fo", "urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0"},
    {"dc", "http://purl.org/dc/elements/1.1/"},
    {"xlink", "http://www.w3.org/1999/xlink"}};

std::string_view prefix_of(std::string_view name) {
  const std::size_t colon = name.find(':');
  return colon == std::string_view::npos ? std::string_view() : name.substr(0, colon);
}

/// Keeps the first thing that the parser says.
void keep_first(void* first, const char* message, xmlParserSeverities, xmlTextReaderLocatorPtr) {
  auto& text = *static_cast<std::string*>(first);
  if (text.empty()) text = message;
}

class Event : public XmlEvent {
 public:
  explicit Event(xmlTextReader* reader) : reader_(reader) {}

  std::string attribute(const char* wanted) const override {
    Text value = renames_ ? by_namespace(wanted) : as_written(wanted);
    if (value == nullptr) value = renames_ ? as_written(wanted) : by_namespace(wanted);
    return value == nullptr ? std::string() : reinterpret_cast<const char*>(value.get());
  }

  /// False: nothing that a document's text is made of.
  bool take() {
    name = usual(view(xmlTextReaderConstName(reader_)));
    text = {};
    empty = false;
    switch (xmlTextReaderNodeType(reader_)) {
      case XML_READER_TYPE_ELEMENT:
        kind = Kind::begin;
        empty = xmlTextReaderIsEmptyElement(reader_) == 1;
        return true;
      case XML_READER_TYPE_END_ELEMENT:
        kind = Kind::end;
        return true;
      case XML_READER_TYPE_TEXT:
      case XML_READER_TYPE_CDATA:
      case XML_READER_TYPE_SIGNIFICANT_WHITESPACE:
      case XML_READER_TYPE_WHITESPACE:
        kind = Kind::text;
        text = view(xmlTextReaderConstValue(reader_));
        return true;
      default:
        return false;
    }
  }

 private:
  using Text = std::unique_ptr<xmlChar, void (*)(void*)>;

  Text as_written(const char* wanted) const {
    return {xmlTextReaderGetAttribute(reader_, BAD_CAST wanted), xmlFree};
  }
  Text by_namespace(const char* wanted) const {
    const std::string_view prefix = prefix_of(wanted);
    Text value(nullptr, xmlFree);
    for (const Namespace& known : kNamespaces)
      if (value == nullptr && known.prefix == prefix)
        value.reset(
            xmlTextReaderGetAttributeNs(reader_, BAD_CAST(wanted + prefix.size() + 1), BAD_CAST known.uri));
    return value;
  }

  static std::string_view view(const xmlChar* s) {
    return s == nullptr ? std::string_view() : std::string_view(reinterpret_cast<const char*>(s));
  }

  /// The name with the usual prefix of its namespace.
  std::string_view usual(std::string_view written) {
    const std::string_view prefix = prefix_of(written), uri = view(xmlTextReaderConstNamespaceUri(reader_));
    if (uri.empty()) return written;
    for (const Namespace& known : kNamespaces) {
      if (known.uri != uri) continue;
      if (known.prefix == prefix) return written;
      renames_ = true;
      renamed_ = fmt::format("{}:{}", known.prefix, view(xmlTextReaderConstLocalName(reader_)));
      return renamed_;
    }
    return written;
  }

  xmlTextReader* reader_;
  std::string renamed_;
  /// Some name had another prefix: attributes are looked up by their namespaces first.
  bool renames_ = false;
};

}  // namespace

void read_xml(std::string_view xml, std::string_view where,
              const std::function<void(const XmlEvent&)>& visit) {
  if (xml.size() > INT_MAX)
    throw InputError(fmt::format("{}: expected XML of at most 2 GiB, found more", where));
  if (xml.empty()) throw InputError(fmt::format("{}: expected XML, found nothing", where));
  const std::unique_ptr<xmlTextReader, void (*)(xmlTextReader*)> reader(
      xmlReaderForMemory(xml.data(), static_cast<int>(xml.size()), nullptr, nullptr,
                         XML_PARSE_NONET | XML_PARSE_NOERROR | XML_PARSE_NOWARNING),
      xmlFreeTextReader);
  if (reader == nullptr) throw RunError(fmt::format("{}: no memory for its XML", where));
  std::string fault;
  xmlTextReaderSetErrorHandler(reader.get(), keep_first, &fault);
  Event event(reader.get());
  int status = 0;
  while ((status = xmlTextReaderRead(reader.get())) == 1) {
    if (xmlTextReaderNodeType(reader.get()) == XML_READER_TYPE_DOCUMENT_TYPE)
      throw InputError(
          fmt::format("{}: expected a document's XML, found a document type with entities in it", where));
    if (event.take()) visit(event);
  }
  while (!fault.empty() && fault.back() == '\n') fault.pop_back();
  if (status != 0)
    throw InputError(
        fmt::format("{}: expected a document's XML, found it damaged ({})", where, excerpt(fault)));
}

#else

void read_xml(std::string_view, std::string_view where, const std::function<void(const XmlEvent&)>&) {
  throw InputError(
      fmt::format("{}: this kind of document needs a build with libxml2, which this one lacks (apt "
                  "install libxml2-dev, then build again)",
                  where));
}

#endif

}  // namespace lode
