// SPDX-License-Identifier: Apache-2.0
// PDF by poppler's pdftotext, as a bounded child: it says each word and where it stands, page_layout.h puts
// them in order. (Its own order takes apart columns that stand close together.)
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "documents/child.h"
#include "documents/readers.h"
#include "lodestone/error.h"
#include "text/utf8.h"

namespace lode {

namespace {

constexpr std::size_t kBoxBytes = 24;  // of output a byte of text: a word comes with its box

/// What went wrong, when something did.
void expect_converted(const ChildResult& child, std::string_view where, const ReadOptions& options) {
  using End = ChildResult::End;
  if (child.end == End::out_of_time)
    throw InputError(
        fmt::format("{}: expected a PDF that can be read within {} s, found that pdftotext had not "
                    "finished",
                    where, options.converter_seconds));
  if (child.end == End::too_much_output)
    throw InputError(fmt::format("{}: expected a PDF of at most {} of text, found more", where,
                                 human_bytes(static_cast<std::int64_t>(options.largest_text))));
  const auto says = [&](std::string_view what) { return child.err.find(what) != std::string::npos; };
  if (says("Incorrect password"))
    throw InputError(
        fmt::format("{}: expected a PDF that opens without a password, found an encrypted one; take "
                    "the password off first (qpdf --decrypt --password=... in.pdf out.pdf)",
                    where));
  if (child.end == End::killed || says("bad_alloc") || says("Out of memory"))
    throw InputError(
        fmt::format("{}: expected a PDF that can be read within {}, found that pdftotext was ended by "
                    "signal {}",
                    where, human_bytes(static_cast<std::int64_t>(options.converter_memory)), child.code));
  if (child.code == 0) return;
  std::string said = child.err.substr(0, child.err.find('\n'));
  if (said.empty()) said = fmt::format("exit code {}", child.code);
  throw InputError(fmt::format("{}: expected a PDF, found one that pdftotext cannot read: {}", where,
                               excerpt(replace_invalid_utf8(said))));
}

/// "3, 7 and 12", at most ten of them.
std::string list_of(const std::vector<std::size_t>& numbers) {
  constexpr std::size_t kMost = 10;
  std::vector<std::string> words;
  for (const std::size_t n : numbers)
    if (words.size() < kMost) words.push_back(std::to_string(n));
  if (numbers.size() > kMost) words.push_back(fmt::format("{} more", numbers.size() - kMost));
  return join(words);
}

}  // namespace

DocumentText read_pdf(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  const std::string program = find_program("pdftotext");
  if (program.empty())
    throw InputError(
        fmt::format("{}: a PDF is read by the program pdftotext, which was not found; install it "
                    "(apt install poppler-utils)",
                    where));
  const ChildResult child =
      run_child({program, "-bbox", "-enc", "UTF-8", "-", "-"}, bytes,
                {.seconds = options.converter_seconds,
                 .memory = options.converter_memory,
                 .output = std::min(kBoxBytes * options.largest_text, std::size_t{512} << 20)});
  expect_converted(child, where, options);
  std::vector<PageLines> pages;
  std::vector<std::size_t> blank;
  for (std::vector<PageWord>& words : parse_word_boxes(replace_invalid_utf8(child.out))) {
    pages.push_back(lines_in_reading_order(std::move(words)));
    if (pages.back().body.empty() && pages.back().notes.empty()) blank.push_back(pages.size());
  }
  if (blank.size() == pages.size())
    throw InputError(
        fmt::format("{}: expected a PDF with text, found {} page{} without any (scanned?); it needs OCR "
                    "first (ocrmypdf in.pdf out.pdf)",
                    where, pages.size(), pages.size() == 1 ? "" : "s"));
  DocumentText result;
  TextBuilder out(options.largest_text, std::string(where));
  put_pages(pages, out);
  result.text = out.take_text();
  result.marks = out.take_marks();
  result.pages = static_cast<std::int64_t>(pages.size());
  if (!blank.empty())
    result.remarks.push_back(fmt::format("{}: no text on page{} {} of {}: an image needs OCR first", where,
                                         blank.size() == 1 ? "" : "s", list_of(blank), pages.size()));
  if (!child.offline)
    result.remarks.push_back(
        fmt::format("{}: pdftotext ran with access to the network: this system has no seccomp", where));
  return result;
}

}  // namespace lode
