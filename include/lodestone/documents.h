// SPDX-License-Identifier: Apache-2.0
// Documents as people have them, and the place of every piece of their text in its file.
//
//   lode::SourceText source = lode::read_documents({{"report.pdf"}}, {});
//   lode::Place place = lode::place_of(source, source.text.find("revenue"));
//   // place.file->path == "report.pdf", place.page == 12, place.line == 3
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

/// One file that a text was read from.
struct SourceFile {
  std::string path;                ///< as it was named, or the folder's name and the path below it
  std::string kind;                ///< "text", "html", "pdf", "epub", "docx" or "odt"
  std::string checksum;            ///< XXH3-128 of its bytes, in hex
  std::size_t begin = 0, end = 0;  ///< where its text stands, bytes [begin, end) of the whole
  std::int64_t pages = 0;          ///< 0: its kind has no pages
  friend bool operator==(const SourceFile&, const SourceFile&) = default;
};

/// From byte `begin` of the text on, up to the next mark: page and line of the source; each line break adds
/// a line. Pages and lines count from 1; 0 = the source has none, or the text is a heading of ours.
struct PlaceMark {
  std::uint64_t begin = 0;
  std::int32_t page = 0, line = 0;
  friend bool operator==(const PlaceMark&, const PlaceMark&) = default;
};

/// A file that was asked for and could not be read.
struct UnreadFile {
  std::string path, why;
};

/// A text and where it comes from.
struct SourceText {
  std::string text;               ///< UTF-8
  std::vector<SourceFile> files;  ///< in the order of the text; empty: not known
  std::vector<PlaceMark> marks;   ///< rising, apart
  std::vector<UnreadFile> unread;
  std::vector<std::string> inputs;   ///< paths that were asked for, absolute
  std::vector<std::string> remarks;  ///< what the user should know, a sentence each
};

struct Place {
  const SourceFile* file = nullptr;  ///< null: between files
  std::int32_t page = 0, line = 0;
  std::int64_t character = 0;  ///< characters of the file's text before it
};
/// Of the byte at `offset`, which is at most the text's size.
Place place_of(const SourceText& source, std::size_t offset);

struct ReadOptions {
  std::vector<std::string> include, exclude;  ///< globs on the path below a folder, or on the file's name
  /// Whether a line with its path stands in front of a file. automatic: of files of folders, and of each
  /// further one that is no plain text; plain texts that are named one by one go on as `cat` has them.
  enum class Headings { automatic, on, off };
  Headings headings = Headings::automatic;
  std::size_t largest_file = std::size_t{1} << 30;      ///< bytes of one file
  std::size_t largest_text = std::size_t{1} << 30;      ///< bytes of the text of all
  std::size_t converter_memory = std::size_t{2} << 30;  ///< bytes of a program that converts a file
  int converter_seconds = 120;                          ///< it may take for one file
  /// What was read before: files of a folder that have not changed come first, in the order they had then, so
  /// that as much as possible of the text stays the same.
  std::vector<SourceFile> before;
  std::function<void(std::int64_t files, std::int64_t pages)> progress;
};

/// Reads files and folders, by what they hold and not by their names; "-" is standard input. A file that was
/// named and cannot be read is an InputError; one of a folder is listed in `unread`.
SourceText read_documents(std::span<const std::string> paths, const ReadOptions& options);

/// The same behind what `source` holds.
void append_documents(SourceText& source, std::span<const std::string> paths, const ReadOptions& options);

/// The same of one file's bytes, which `name` names in messages and citations.
SourceText read_document(std::string_view bytes, std::string_view name, const ReadOptions& options);

}  // namespace lode
