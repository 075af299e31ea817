// SPDX-License-Identifier: Apache-2.0
#include "documents/archive.h"

#include <fmt/format.h>

#include <memory>
#include <vector>

#include "base/text.h"
#include "lodestone/error.h"

#if LODE_LIBARCHIVE
#include <archive.h>
#include <archive_entry.h>
#endif

namespace lode {

#if LODE_LIBARCHIVE

namespace {

constexpr int kMostEntries = 100'000;

[[noreturn]] void damaged(std::string_view where, archive* zip) {
  const char* why = archive_error_string(zip);
  throw InputError(fmt::format("{}: expected a whole archive, found a damaged one ({})", where,
                               excerpt(why != nullptr ? why : "no reason given")));
}

/// Calls visit(name, entry, archive) for every entry until it returns false.
template <class Visit>
void each_entry(std::string_view bytes, std::string_view where, const Visit& visit) {
  const std::unique_ptr<archive, int (*)(archive*)> zip(archive_read_new(), archive_read_free);
  archive_read_support_format_zip_seekable(zip.get());
  if (archive_read_open_memory(zip.get(), bytes.data(), bytes.size()) != ARCHIVE_OK)
    damaged(where, zip.get());
  archive_entry* entry = nullptr;
  for (int n = 0;; ++n) {
    const int status = archive_read_next_header(zip.get(), &entry);
    if (status == ARCHIVE_EOF) return;
    if (status < ARCHIVE_WARN) damaged(where, zip.get());
    if (n == kMostEntries)
      throw InputError(
          fmt::format("{}: expected an archive of at most {} entries, found more", where, kMostEntries));
    const char* name = archive_entry_pathname(entry);
    if (name != nullptr && !visit(std::string(name), entry, zip.get())) return;
  }
}

/// The content of an entry, at most `limit` bytes of it and one more.
std::string content(archive* zip, std::string_view where, std::size_t limit) {
  std::string text;
  std::vector<char> buffer(1 << 16);
  while (text.size() <= limit) {
    const la_ssize_t n = archive_read_data(zip, buffer.data(), buffer.size());
    if (n < 0) damaged(where, zip);
    if (n == 0) break;
    text.append(buffer.data(), static_cast<std::size_t>(n));
  }
  return text;
}

}  // namespace

std::string zip_document_type(std::string_view bytes, std::string_view where) {
  std::string type;
  each_entry(bytes, where, [&](const std::string& name, archive_entry*, archive* zip) {
    if (name == "mimetype") type = content(zip, where, 200);
    for (const auto& [part, kind] : {std::pair("word/document", "docx"), std::pair("xl/workbook", "xlsx"),
                                     std::pair("ppt/presentation", "pptx")})
      if (name.starts_with(part) && name.ends_with(".xml") && name.find('/', 5) == std::string::npos)
        type = kind;
    return type.empty();
  });
  while (!type.empty() && (type.back() == '\n' || type.back() == '\r' || type.back() == ' ')) type.pop_back();
  return type;
}

std::map<std::string, std::string> read_zip(std::string_view bytes, std::string_view where, std::size_t limit,
                                            const std::function<bool(std::string_view)>& wanted) {
  std::map<std::string, std::string> parts;
  std::size_t left = limit;
  each_entry(bytes, where, [&](const std::string& name, archive_entry* entry, archive* zip) {
    if (!wanted(name)) return true;
    if (archive_entry_is_encrypted(entry) != 0)
      throw InputError(fmt::format(
          "{}: expected a document that opens without a password, found an encrypted one", where));
    std::string text = content(zip, where, left);
    if (text.size() > left)
      throw InputError(fmt::format("{}: expected a document of at most {} when unpacked, found more", where,
                                   human_bytes(static_cast<std::int64_t>(limit))));
    left -= text.size();
    parts.insert_or_assign(name, std::move(text));
    return true;
  });
  return parts;
}

#else

namespace {

[[noreturn]] void unavailable(std::string_view where) {
  throw InputError(
      fmt::format("{}: a document that is an archive (EPUB, DOCX, ODT) needs a build with libarchive, "
                  "which this one lacks (apt install libarchive-dev, then build again)",
                  where));
}

}  // namespace

std::string zip_document_type(std::string_view, std::string_view where) {
  unavailable(where);
}

std::map<std::string, std::string> read_zip(std::string_view, std::string_view where, std::size_t,
                                            const std::function<bool(std::string_view)>&) {
  unavailable(where);
}

#endif

}  // namespace lode
