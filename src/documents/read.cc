// SPDX-License-Identifier: Apache-2.0
// Files and folders as one text, each piece of which knows its place.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <map>

#include "base/cancel.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "documents/encoding.h"
#include "documents/folder.h"
#include "documents/readers.h"
#include "lodestone/error.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

DocumentText read_kind(DocumentKind kind, std::string_view bytes, std::string_view where,
                       const ReadOptions& options) {
  switch (kind) {
    case DocumentKind::html:
      return read_html(bytes, where, options);
    case DocumentKind::pdf:
      return read_pdf(bytes, where, options);
    case DocumentKind::epub:
      return read_epub(bytes, where, options);
    case DocumentKind::docx:
      return read_docx(bytes, where, options);
    case DocumentKind::odt:
      return read_odt(bytes, where, options);
    case DocumentKind::text:
      break;
  }
  return read_plain_text(bytes, where, options);
}

/// Gathers files into one text.
class Gathering {
 public:
  explicit Gathering(const ReadOptions& options, SourceText before = {})
      : options_(options), all_(std::move(before)) {}

  /// `in_folder`: has a heading in front, unless there are to be none.
  void add(std::string_view bytes, const std::string& name, bool in_folder) {
    check_cancel();
    if (bytes.empty()) throw InputError(name + ": expected a text, found an empty file");
    const DocumentKind kind = recognise(bytes, name);
    DocumentText document = read_kind(kind, bytes, name, options_);
    const bool headed = options_.headings == ReadOptions::Headings::on ||
                        (options_.headings == ReadOptions::Headings::automatic &&
                         (in_folder || (kind != DocumentKind::text && !all_.files.empty())));
    if (document.text.size() > options_.largest_text - std::min(options_.largest_text, all_.text.size()))
      throw InputError(fmt::format("{}: expected texts of at most {} in all, found more with it", name,
                                   human_bytes(static_cast<std::int64_t>(options_.largest_text))));
    if (headed) put_heading(document.pages > 0 ? fmt::format("File: {}, page 1", name) : "File: " + name);
    SourceFile file = {.path = name,
                       .kind = name_of(kind),
                       .checksum = hash_hex(bytes),
                       .begin = all_.text.size(),
                       .pages = document.pages};
    put(document, headed ? name : std::string());
    file.end = all_.text.size();
    all_.files.push_back(std::move(file));
    for (std::string& remark : document.remarks) all_.remarks.push_back(std::move(remark));
    pages_ += document.pages;
    if (options_.progress) options_.progress(std::ssize(all_.files), pages_);
  }

  void add_file(const std::string& path, const std::string& name, bool in_folder) {
    const MappedFile file(path);
    const auto bytes = file.bytes();
    if (bytes.size() > options_.largest_file)
      throw InputError(fmt::format("{}: expected a file of at most {}, found {}", path,
                                   human_bytes(static_cast<std::int64_t>(options_.largest_file)),
                                   human_bytes(static_cast<std::int64_t>(bytes.size()))));
    add({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, name, in_folder);
  }

  void add_folder(const std::string& path) {
    FolderListing listing = list_folder(path, options_);
    for (UnreadFile& skipped : listing.skipped) all_.unread.push_back(std::move(skipped));
    for (std::string& remark : listing.remarks) all_.remarks.push_back(std::move(remark));
    const std::string prefix = fs::canonical(path).filename().string() + "/";
    const std::size_t before = all_.files.size();
    unchanged_first(path, prefix, listing.files);
    for (const std::string& file : listing.files) {
      const std::string full = (fs::path(path) / file).string();
      try {
        expect_utf8(file, "its name");
        add_file(full, prefix + file, true);
      } catch (const InputError& error) {
        std::string why = error.what();
        for (const std::string& front : {full + ": ", prefix + file + ": "})
          if (why.starts_with(front)) why.erase(0, front.size());
        all_.unread.push_back({full, std::move(why)});
      }
    }
    if (all_.files.size() == before)
      throw InputError(fmt::format("{}: expected a folder with texts or documents, found none{}{}", path,
                                   options_.include.empty() && options_.exclude.empty()
                                       ? ""
                                       : " among the files that --include and --exclude leave",
                                   first_reason()));
  }

  void asked(std::string path) { all_.inputs.push_back(std::move(path)); }
  SourceText take() { return std::move(all_); }

 private:
  /// Files that were read before and are as they were, in the order they had then; the others behind them.
  void unchanged_first(const fs::path& folder, const std::string& prefix,
                       std::vector<std::string>& files) const {
    std::map<std::string, std::size_t> order;
    for (std::size_t i = 0; i < options_.before.size(); ++i) order.emplace(options_.before[i].path, i);
    std::map<std::string, std::size_t> place;
    for (const std::string& file : files) {
      const auto known = order.find(prefix + file);
      const bool same = known != order.end() &&
                        checksum_or_nothing(folder / file) == options_.before[known->second].checksum;
      place[file] = same ? known->second : options_.before.size();
    }
    std::stable_sort(files.begin(), files.end(),
                     [&](const std::string& a, const std::string& b) { return place.at(a) < place.at(b); });
  }

  static std::string checksum_or_nothing(const fs::path& file) {
    try {
      return hash_hex(MappedFile(file).bytes());
    } catch (const InputError&) {
      return {};  // will be listed as not read
    }
  }

  std::string first_reason() const {
    if (all_.unread.empty()) return {};
    return fmt::format(" that could be read ({}: {})", all_.unread.front().path, all_.unread.front().why);
  }

  void mark(std::int32_t page, std::int32_t line) { all_.marks.push_back({all_.text.size(), page, line}); }

  void put_heading(const std::string& heading) {
    mark(0, 0);
    if (!all_.text.empty() && !all_.text.ends_with("\n\n"))
      all_.text += all_.text.ends_with("\n") ? "\n" : "\n\n";
    all_.text += heading + "\n\n";
  }

  /// With a `name`, each page that begins a line has a heading of its own, behind the first.
  void put(const DocumentText& document, const std::string& name) {
    std::int32_t page = document.marks.empty() ? 0 : document.marks.front().page;
    for (std::size_t i = 0; i < document.marks.size(); ++i) {
      const PlaceMark& m = document.marks[i];
      const std::size_t end =
          i + 1 < document.marks.size() ? document.marks[i + 1].begin : document.text.size();
      if (m.page != page && !name.empty() && all_.text.ends_with('\n'))
        put_heading(fmt::format("File: {}, page {}", name, m.page));
      page = m.page;
      mark(m.page, m.line);
      all_.text.append(document.text, m.begin, end - m.begin);
    }
  }

  const ReadOptions& options_;
  SourceText all_;
  std::int64_t pages_ = 0;
};

std::string read_standard_input(std::size_t limit) {
  std::string text;
  std::array<char, 1 << 16> buffer;
  while (true) {
    const ssize_t n = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    check_cancel();
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw InputError("standard input: cannot be read");
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(n));
    if (text.size() > limit)
      throw InputError(fmt::format("standard input: expected at most {}, found more",
                                   human_bytes(static_cast<std::int64_t>(limit))));
  }
}

}  // namespace

DocumentText read_plain_text(std::string_view bytes, std::string_view where, const ReadOptions&) {
  DocumentText result;
  std::string encoding;
  result.text = text_as_utf8(bytes, where, &encoding);
  if (result.text.find_first_not_of(" \t\r\n\f\v") == std::string::npos)
    throw InputError(fmt::format("{}: expected a text, found {}", where,
                                 result.text.empty() ? "an empty one" : "white space alone"));
  result.marks = {{.begin = 0, .page = 0, .line = 1}};
  if (!encoding.empty()) result.remarks.push_back(fmt::format("{}: read as {}", where, excerpt(encoding)));
  return result;
}

SourceText read_document(std::string_view bytes, std::string_view name, const ReadOptions& options) {
  Gathering all(options);
  all.add(bytes, std::string(name), false);
  return all.take();
}

SourceText read_documents(std::span<const std::string> paths, const ReadOptions& options) {
  SourceText source;
  append_documents(source, paths, options);
  return source;
}

void append_documents(SourceText& source, std::span<const std::string> paths, const ReadOptions& options) {
  Gathering all(options, std::move(source));
  for (const std::string& path : paths) {
    std::error_code none;
    all.asked(path == "-" ? path : fs::absolute(path, none).lexically_normal().string());
    if (path == "-")
      all.add(read_standard_input(options.largest_file), "standard input", false);
    else if (fs::is_directory(path, none))
      all.add_folder(path);
    else
      all.add_file(path, path, false);
  }
  source = all.take();
}

Place place_of(const SourceText& source, std::size_t offset) {
  Place place;
  const auto& files = source.files;
  const auto next = std::upper_bound(files.begin(), files.end(), offset,
                                     [](std::size_t at, const SourceFile& f) { return at < f.begin; });
  if (next == files.begin()) return place;
  const SourceFile& file = *(next - 1);
  if (offset > file.end) return place;
  place.file = &file;
  const auto& marks = source.marks;
  auto mark = std::upper_bound(marks.begin(), marks.end(), file.begin,
                               [](std::size_t at, const PlaceMark& m) { return at < m.begin; });
  if (mark != marks.begin()) --mark;
  const std::string_view text = source.text;
  for (; mark != marks.end() && mark->begin <= offset; ++mark) {
    const std::size_t begin = std::max<std::size_t>(mark->begin, file.begin);
    const std::size_t end =
        mark + 1 == marks.end() ? offset : std::min<std::size_t>(offset, (mark + 1)->begin);
    if (mark->line == 0) continue;  // a heading of ours
    const std::string_view stretch = text.substr(begin, end - begin);
    place.character += std::count_if(stretch.begin(), stretch.end(),
                                     [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
    place.page = mark->page;
    place.line = mark->line + static_cast<std::int32_t>(std::count(stretch.begin(), stretch.end(), '\n'));
  }
  return place;
}

}  // namespace lode
