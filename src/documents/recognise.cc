// SPDX-License-Identifier: Apache-2.0
// What a file is, by its bytes.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "documents/archive.h"
#include "documents/readers.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using namespace std::string_view_literals;

struct Known {
  std::string_view magic;
  const char* what;
};
/// What people may take for a document, and what to do about it.
constexpr Known kNoDocuments[] = {
    {"\x89PNG\r\n\x1a\n"sv, "a PNG image; its text needs OCR first"},
    {"\xff\xd8\xff"sv, "a JPEG image; its text needs OCR first"},
    {"GIF8"sv, "a GIF image; its text needs OCR first"},
    {"II*\0"sv, "a TIFF image; its text needs OCR first"},
    {"MM\0*"sv, "a TIFF image; its text needs OCR first"},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv,
     "a document of an old Office (DOC, XLS, PPT); save it as DOCX, ODT or PDF"},
    {"{\\rtf"sv, "rich text (RTF); save it as DOCX, ODT or PDF"},
    {"\x1f\x8b"sv, "a gzip file; unpack it first"},
    {"BZh"sv, "a bzip2 file; unpack it first"},
    {"\xfd\x37zXZ\0"sv, "an xz file; unpack it first"},
    {"\x28\xb5\x2f\xfd"sv, "a zstd file; unpack it first"},
    {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive; unpack it first"},
    {"Rar!\x1a\x07"sv, "a RAR archive; unpack it first"},
    {"SQLite format 3\0"sv, "an SQLite database; export what is to be read"},
    {"\x7f\x45LF"sv, "a program"},
    {"%!PS"sv, "PostScript; convert it to PDF (ps2pdf)"},
    {"LODE\r\n\x1a\n"sv, "an indexed text (.lode); `index --append` adds to one, `ask` takes several"},
};

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool starts_with_tag(std::string_view text, std::string_view tag) {
  if (text.size() <= tag.size()) return false;
  if (!std::equal(tag.begin(), tag.end(), text.begin(), [](char a, char b) { return a == lower(b); }))
    return false;
  const char next = text[tag.size()];
  return next == '>' || next == ' ' || next == '\n' || next == '\r' || next == '\t';
}

/// HTML begins with its type or one of its outer tags, behind blanks, comments and an XML declaration.
bool is_html(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  for (int steps = 0; steps < 64; ++steps) {
    const std::size_t letter = text.find_first_not_of(" \t\r\n");
    if (letter == std::string_view::npos) return false;
    text.remove_prefix(letter);
    for (const std::string_view tag : {"<!doctype html"sv, "<html"sv, "<head"sv, "<body"sv})
      if (starts_with_tag(text, tag)) return true;
    const std::string_view end = text.starts_with("<!--") ? "-->"sv : text.starts_with("<?") ? "?>"sv : ""sv;
    const std::size_t at = end.empty() ? std::string_view::npos : text.find(end);
    if (at == std::string_view::npos) return false;
    text.remove_prefix(at + end.size());
  }
  return false;
}

DocumentKind kind_of_zip(std::string_view bytes, std::string_view where) {
  const std::string type = zip_document_type(bytes, where);
  if (type == "application/epub+zip") return DocumentKind::epub;
  if (type == "application/vnd.oasis.opendocument.text") return DocumentKind::odt;
  if (type == "docx") return DocumentKind::docx;
  if (type == "xlsx" || type == "application/vnd.oasis.opendocument.spreadsheet")
    throw InputError(
        fmt::format("{}: expected a text or a document, found a spreadsheet; save it as CSV", where));
  if (type == "pptx" || type == "application/vnd.oasis.opendocument.presentation")
    throw InputError(fmt::format("{}: expected a text or a document, found slides; save them as PDF", where));
  throw InputError(fmt::format(
      "{}: expected a text or a document, found a ZIP archive; unpack it and name the folder", where));
}

}  // namespace

const char* name_of(DocumentKind kind) {
  constexpr std::array kNames = {"text", "html", "pdf", "epub", "docx", "odt"};
  return kNames[static_cast<std::size_t>(kind)];
}

DocumentKind recognise(std::string_view bytes, std::string_view where) {
  // A PDF may begin with a few other bytes; a text that speaks of one does not begin a line with a version.
  const std::size_t pdf = bytes.substr(0, 1024).find("%PDF-1.");
  const std::size_t pdf2 = bytes.substr(0, 1024).find("%PDF-2.");
  const std::size_t at = std::min(pdf, pdf2);
  if (at == 0 || (at != std::string_view::npos && bytes.find("\nstartxref") != std::string_view::npos))
    return DocumentKind::pdf;
  if (bytes.starts_with("PK\x03\x04") || bytes.starts_with("PK\x05\x06")) return kind_of_zip(bytes, where);
  for (const Known& known : kNoDocuments)
    if (bytes.starts_with(known.magic))
      throw InputError(fmt::format("{}: expected a text or a document, found {}", where, known.what));
  return is_html(bytes.substr(0, 1 << 16)) ? DocumentKind::html : DocumentKind::text;
}

}  // namespace lode
