// SPDX-License-Identifier: Apache-2.0
// EPUB: the pages of its spine, in that order.
#include <fmt/format.h>

#include <map>
#include <set>
#include <vector>

#include "base/text.h"
#include "documents/archive.h"
#include "documents/readers.h"
#include "documents/xml.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr const char* kContainer = "META-INF/container.xml";

std::string local_name(std::string_view name) {
  const std::size_t colon = name.find(':');
  return std::string(colon == std::string_view::npos ? name : name.substr(colon + 1));
}

/// "%20" and its like in a link.
std::string unescaped(std::string_view link) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string name;
  for (std::size_t i = 0; i < link.size(); ++i) {
    const bool escape =
        link[i] == '%' && i + 2 < link.size() && digit(link[i + 1]) >= 0 && digit(link[i + 2]) >= 0;
    if (escape) {
      name += static_cast<char>(digit(link[i + 1]) * 16 + digit(link[i + 2]));
      i += 2;
    } else {
      name += link[i];
    }
  }
  return name.substr(0, name.find('#'));
}

struct Spine {
  std::vector<std::string> pages;   ///< names in their order, each once
  std::vector<std::string> beside;  ///< that only links lead to, such as pages of notes
};
Spine spine_of(const std::string& package, const std::string& name, std::string_view where) {
  std::map<std::string, std::string> items;
  Spine spine;
  read_xml(package, fmt::format("{}: {}", where, name), [&](const XmlEvent& e) {
    if (e.kind != XmlEvent::Kind::begin) return;
    const std::string element = local_name(e.name);
    if (element == "item") items[e.attribute("id")] = name_in_archive(name, e.attribute("href"));
    if (element == "itemref")
      (e.attribute("linear") == "no" ? spine.beside : spine.pages).push_back(e.attribute("idref"));
  });
  // A book may name a page thousands of times; each is read once, where it is named first.
  std::set<std::string> taken = {""};
  for (std::vector<std::string>* pages : {&spine.pages, &spine.beside}) {
    for (std::string& page : *pages) page = items.contains(page) ? items.at(page) : std::string();
    std::erase_if(*pages, [&](const std::string& page) { return !taken.insert(page).second; });
  }
  return spine;
}

/// Whether some note stands on the page.
bool has_notes(const PageNotes& notes, const std::string& page) {
  const auto first = notes.labels.lower_bound(page + "#");
  return first != notes.labels.end() && first->first.starts_with(page + "#");
}

bool is_page(std::string_view name) {
  for (const std::string_view end : {".xhtml", ".html", ".htm", ".xml", ".opf"})
    if (name.ends_with(end)) return true;
  return false;
}

}  // namespace

std::string name_in_archive(const std::string& from, const std::string& link) {
  std::vector<std::string> parts;
  const auto add = [&](std::string_view path) {
    for (std::size_t at = 0; at <= path.size();) {
      const std::size_t end = std::min(path.find('/', at), path.size());
      const std::string_view part = path.substr(at, end - at);
      if (part == ".." && !parts.empty()) parts.pop_back();
      if (!part.empty() && part != "." && part != "..") parts.emplace_back(part);
      at = end + 1;
    }
  };
  const std::string path = unescaped(link);
  const std::size_t slash = from.rfind('/');
  if (!path.starts_with('/') && slash != std::string::npos) add(std::string_view(from).substr(0, slash));
  add(path);
  return join(parts, "/");
}

DocumentText read_epub(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  const auto parts = read_zip(bytes, where, options.largest_text, is_page);
  if (parts.contains("META-INF/encryption.xml") &&
      parts.at("META-INF/encryption.xml").find("xhtml") != std::string::npos)
    throw InputError(
        fmt::format("{}: expected a book that opens without a key, found an encrypted one", where));
  if (!parts.contains(kContainer))
    throw InputError(fmt::format("{}: expected '{}' in it, found none", where, kContainer));
  std::string package;
  read_xml(parts.at(kContainer), fmt::format("{}: {}", where, kContainer), [&](const XmlEvent& e) {
    if (package.empty() && e.kind == XmlEvent::Kind::begin && local_name(e.name) == "rootfile")
      package = name_in_archive("", e.attribute("full-path"));
  });
  if (!parts.contains(package))
    throw InputError(fmt::format("{}: expected the package '{}' in it, found none", where, excerpt(package)));
  DocumentText result;
  TextBuilder out(options.largest_text, std::string(where));
  out.at(0, 1);
  Spine spine = spine_of(parts.at(package), package, where);
  const auto in_book = [&](const std::string& name) { return fmt::format("{}: {}", where, excerpt(name)); };
  PageNotes notes;
  for (const std::string& name : spine.pages)
    if (const auto page = parts.find(name); page != parts.end()) {
      notes.page = name;
      find_notes(page->second, in_book(name), notes);
    }
  for (const std::string& name : spine.beside)
    if (has_notes(notes, name)) spine.pages.push_back(name);
  for (const std::string& name : spine.pages) {
    const auto page = parts.find(name);
    if (page == parts.end()) {
      result.remarks.push_back(fmt::format("{}: its page '{}' is not in it", where, excerpt(name)));
      continue;
    }
    out.break_line(2);
    notes.page = name;
    put_html(page->second, in_book(name), false, notes, out);
  }
  out.finish();
  if (out.text().empty())
    throw InputError(fmt::format("{}: expected a book with text, found none in it", where));
  result.text = out.take_text();
  result.marks = out.take_marks();
  return result;
}

}  // namespace lode
