// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/haystack.h"

#include <algorithm>

#include "base/file.h"
#include "base/text.h"
#include "lab/tasks/prose.h"
#include "lodestone/error.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

/// A stretch without a sentence end (a table, verse) is cut at a word once it is this long.
constexpr std::size_t kLongestPiece = 2000;

std::vector<fs::path> text_files(const fs::path& path, const std::function<bool(std::string_view)>& keep) {
  if (fs::is_regular_file(path)) return {path};
  if (!fs::is_directory(path)) {
    throw InputError(path.string() + ": expected a folder of text files or one text file, found neither");
  }
  std::vector<fs::path> files;
  std::size_t seen = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (!Haystack::takes(entry)) continue;
    ++seen;
    if (!keep || keep(entry.path().filename().string())) files.push_back(entry.path());
  }
  if (files.empty()) {
    throw InputError(path.string() + ": expected text files (*.txt, *.md), found " +
                     (seen == 0 ? std::string("none") : "only files that training may have seen"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string read_haystack_file(const fs::path& file) {
  std::string text = read_file(file);
  expect_utf8(text, file.string());
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  std::erase(text, '\r');
  const std::size_t first = text.find_first_not_of(" \n\t");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \n\t") - first + 1);
}

/// Length of the closing mark that ends at text[at), or 0: ' " ) ] and the curly quotation marks.
std::size_t closing_mark(std::string_view text, std::size_t at) {
  const std::string_view before = text.substr(0, at);
  for (const std::string_view mark : {"\"", "'", ")", "]", "\u201d", "\u2019"}) {
    if (before.ends_with(mark)) return mark.size();
  }
  return 0;
}

}  // namespace

bool is_sentence_gap(std::string_view text, std::size_t at) {
  if (at == 0 || at + 1 >= text.size() || text[at] != ' ') return false;
  const std::string_view after = text.substr(at + 1);
  const bool opens = (after[0] >= 'A' && after[0] <= 'Z') || after[0] == '"' || after.starts_with("\u201c") ||
                     after.starts_with("\u2018");
  if (!opens) return false;
  std::size_t end = at;
  while (const std::size_t mark = closing_mark(text, end)) end -= mark;
  return end > 0 && (text[end - 1] == '.' || text[end - 1] == '!' || text[end - 1] == '?');
}

bool Haystack::takes(const fs::directory_entry& entry) {
  std::error_code unknown;  // a link that leads in a circle is no file
  return entry.is_regular_file(unknown) &&
         (entry.path().extension() == ".txt" || entry.path().extension() == ".md");
}

Haystack Haystack::read(const fs::path& path, TokenMeter meter,
                        const std::function<bool(std::string_view)>& keep) {
  std::string text;
  for (const fs::path& file : text_files(path, keep)) {
    const std::string content = read_haystack_file(file);
    if (!content.empty()) text += content + "\n\n";
  }
  if (text.empty()) throw InputError(path.string() + ": expected text, found empty files only");
  return Haystack(std::move(text), std::move(meter));
}

Haystack Haystack::prose(std::uint64_t seed, std::size_t bytes, TokenMeter meter) {
  return Haystack(make_prose(seed, bytes) + "\n\n", std::move(meter));
}

Haystack Haystack::prose_for(std::uint64_t seed, std::int64_t tokens, TokenMeter meter) {
  // Twelve bytes a token are about three contexts.
  return prose(seed, static_cast<std::size_t>(std::max<std::int64_t>(2'000'000, 12 * tokens)),
               std::move(meter));
}

Haystack::Haystack(std::string text, TokenMeter meter) : text_(std::move(text)), meter_(std::move(meter)) {
  LODE_ASSERT(!text_.empty());
  cuts_.push_back({});
  for (std::size_t at = 1; at + 1 < text_.size(); ++at) {
    if (text_[at] != ' ' || text_[at + 1] == ' ') continue;
    const bool gap = is_sentence_gap(text_, at);
    if (gap || at - cuts_.back().begin > kLongestPiece) cuts_.push_back({at, gap});
  }
  tokens_.assign(cuts_.size(), -1);
}

std::string_view Haystack::piece(std::size_t index) const {
  const std::size_t end = index + 1 < cuts_.size() ? cuts_[index + 1].begin : text_.size();
  return std::string_view(text_).substr(cuts_[index].begin, end - cuts_[index].begin);
}

std::int64_t Haystack::tokens_of(std::size_t index) const {
  if (tokens_[index] < 0) tokens_[index] = static_cast<std::int32_t>(meter_.count(piece(index)));
  return tokens_[index];
}

std::size_t Haystack::random_start(Rng& rng) const {
  for (int tries = 0; tries < 1000; ++tries) {
    const std::size_t index = rng.below(cuts_.size());
    if (index == 0 || cuts_[index].gap) return index;
  }
  return 0;
}

Passage Haystack::cut(std::int64_t tokens, Rng& rng) const {
  return cut_from(random_start(rng), tokens);
}

Passage Haystack::cut_from(std::size_t first, std::int64_t tokens) const {
  Passage passage;
  std::size_t pieces_since_growth = 0;
  for (std::size_t index = first; passage.tokens < tokens; index = (index + 1) % cuts_.size()) {
    if (pieces_since_growth++ > cuts_.size())
      throw InputError("haystack: expected a text that has tokens, found one that has none");
    std::string_view text = piece(index);
    std::int64_t count = tokens_of(index);
    if (passage.pieces.empty() && text.starts_with(' ')) {
      text.remove_prefix(1);
      count = meter_.count(text);
    }
    const bool whole = passage.tokens + count <= tokens;
    if (!whole && tokens - passage.tokens <= tokens / 200) break;  // near enough: end with a whole sentence
    if (!whole) {
      text = fitting_start(text, tokens - passage.tokens);
      count = meter_.count(text);
    }
    if (!text.empty()) {
      passage.pieces.push_back({text, count, cuts_[index].gap && !passage.pieces.empty()});
      passage.tokens += count;
      if (count > 0) pieces_since_growth = 0;
    }
    if (!whole) break;
  }
  return passage;
}

/// The longest start of `text` that ends at a word and has at most `tokens` tokens; may be empty.
std::string_view Haystack::fitting_start(std::string_view text, std::int64_t tokens) const {
  std::vector<std::size_t> ends;  // before each space: where the start may end
  for (std::size_t at = 1; at < text.size(); ++at) {
    if (text[at] == ' ' && text[at - 1] != ' ' && text[at - 1] != '\n') ends.push_back(at);
  }
  std::size_t low = 0, high = ends.size();  // ends[0, low) fit, ends[high, ...) do not
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (meter_.count(text.substr(0, ends[middle])) <= tokens) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low == 0 ? std::string_view() : text.substr(0, ends[low - 1]);
}

}  // namespace lode
