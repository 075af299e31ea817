// SPDX-License-Identifier: Apache-2.0
// Reading order, after the recursive XY-cut (Nagy and Seth 1984): where a stretch of the page has a gutter
// that no word crosses, with running text on both sides, its left column is read before its right one; what
// lies above and below is read before and behind. Rows of tables have few words a cell, and stay rows.
#include "documents/page_layout.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "text/utf8.h"

namespace lode {

namespace {

using Words = std::vector<PageWord>;

constexpr float kGutter = 0.6f;       // narrowest gutter, in heights of a line
constexpr int kColumnRows = 4;        // a column has at least so many rows,
constexpr double kWordsARow = 3.5;    // of at least so many words on the average
constexpr int kDeepest = 6;           // columns within columns
constexpr float kNoteHeight = 0.92f;  // footnotes are lower than this share of the body's height
constexpr float kGap = 1.4f;          // a gap between paragraphs, in usual distances of rows
constexpr float kUpright = 2.5f;      // a box so much higher than a line and narrower than one is turned text
constexpr std::size_t kMostWords = 20'000;  // on a page whose layout is looked at

float median(std::vector<float> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

float height_of(const Words& words) {
  std::vector<float> heights;
  for (const PageWord& word : words) heights.push_back(word.height());
  return median(std::move(heights));
}

struct Row {
  Words words;           // by x
  float y0 = 0, y1 = 0;  // of its highest word
};

bool is_right_to_left(const PageWord& word) {
  const char32_t c = first_code_point(word.text).value;
  return (c >= 0x590 && c < 0x900) || (c >= 0xFB1D && c < 0xFE00) || (c >= 0xFE70 && c < 0xFEFF);
}

/// Words whose boxes share half of the lower one's height stand in one row; so do superscripts.
std::vector<Row> rows_of(Words words) {
  std::stable_sort(words.begin(), words.end(),
                   [](const PageWord& a, const PageWord& b) { return a.middle() < b.middle(); });
  std::vector<Row> rows;
  for (PageWord& word : words) {
    Row* const row = rows.empty() ? nullptr : &rows.back();
    const float shared = row ? std::min(row->y1, word.y1) - std::max(row->y0, word.y0) : -1;
    if (row == nullptr || shared < 0.5f * std::min(row->y1 - row->y0, word.height())) {
      rows.push_back({.words = {}, .y0 = word.y0, .y1 = word.y1});
    } else if (word.height() > row->y1 - row->y0) {
      row->y0 = word.y0;
      row->y1 = word.y1;
    }
    rows.back().words.push_back(std::move(word));
  }
  for (Row& row : rows) {
    const auto turned = std::count_if(row.words.begin(), row.words.end(), is_right_to_left);
    const bool from_right = 2 * turned > static_cast<std::ptrdiff_t>(row.words.size());
    std::stable_sort(row.words.begin(), row.words.end(), [&](const PageWord& a, const PageWord& b) {
      return from_right ? a.x1 > b.x1 : a.x0 < b.x0;
    });
  }
  return rows;
}

/// Words that touch belong together ("1543." and the mark of a footnote); wide blanks part the cells of a row.
std::string text_of(const Row& row, float height) {
  std::string text;
  const PageWord* before = nullptr;
  for (const PageWord& word : row.words) {
    if (before != nullptr) {
      const float apart = std::max(word.x0 - before->x1, before->x0 - word.x1);
      text += apart < 0.08f * height ? "" : apart > 2.5f * height ? "  " : " ";
    }
    text += word.text;
    before = &word;
  }
  return text;
}

/// A stretch of the page, [y0, y1), that is clear at x.
struct Gutter {
  float x = 0, y0 = 0, y1 = 0;
  float length() const { return y1 - y0; }
};

bool has_running_text(const Words& words) {
  const auto rows = rows_of(words);
  return rows.size() >= kColumnRows &&
         static_cast<double>(words.size()) >= kWordsARow * static_cast<double>(rows.size());
}

struct Parts {
  Words above, left, right, below;
};

Parts cut(const Words& words, const Gutter& gutter) {
  Parts parts;
  for (const PageWord& word : words) {
    Words& part = word.middle() < gutter.y0    ? parts.above
                  : word.middle() >= gutter.y1 ? parts.below
                  : word.x1 <= gutter.x        ? parts.left
                                               : parts.right;
    part.push_back(word);
  }
  return parts;
}

bool parts_columns(const Parts& parts, float height) {
  if (!has_running_text(parts.left) || !has_running_text(parts.right)) return false;
  float left = parts.left.front().x1, right = parts.right.front().x0;
  for (const PageWord& word : parts.left) left = std::max(left, word.x1);
  for (const PageWord& word : parts.right) right = std::min(right, word.x0);
  return right - left >= kGutter * height;
}

/// The longest clear stretch at each whole point of x between the words, longest first.
std::vector<Gutter> clear_stretches(const Words& words) {
  float low = words.front().x0, high = words.front().x1;
  for (const PageWord& word : words) {
    low = std::min(low, word.x0);
    high = std::max(high, word.x1);
  }
  std::vector<Gutter> found;
  constexpr float kWidest = 5000;  // points: pages are at most 200 inches wide
  if (!(high - low < kWidest)) return found;
  std::vector<const PageWord*> by_y;
  for (const PageWord& word : words) by_y.push_back(&word);
  std::sort(by_y.begin(), by_y.end(), [](const PageWord* a, const PageWord* b) { return a->y0 < b->y0; });
  const float top = by_y.front()->y0 - 1;
  float bottom = top;
  for (const PageWord& word : words) bottom = std::max(bottom, word.y1 + 1);
  for (float x = std::ceil(low) + 1; x < high; x += 1) {
    Gutter best{x, top, top};
    float clear_from = top;
    for (const PageWord* const word : by_y) {
      if (word->x1 <= x || word->x0 >= x) continue;
      if (word->y0 - clear_from > best.length()) best = {x, clear_from, word->y0};
      clear_from = std::max(clear_from, word->y1);
    }
    if (bottom - clear_from > best.length()) best = {x, clear_from, bottom};
    found.push_back(best);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Gutter& a, const Gutter& b) { return a.length() > b.length(); });
  return found;
}

/// The longest gutter that parts columns; none = an empty part on each side.
Parts columns_of(const Words& words, float height) {
  if (words.size() > kMostWords || words.size() < 2 * kColumnRows) return {};
  const float least = kColumnRows * height;
  for (const Gutter& gutter : clear_stretches(words)) {
    if (gutter.length() < least) break;
    Parts parts = cut(words, gutter);
    if (parts_columns(parts, height)) return parts;
  }
  return {};
}

/// "1 See", "* A", "† B", "[3] C": what a footnote begins with.
bool begins_note(std::string_view text) {
  if (text.empty()) return false;
  const char c = text.front();
  if ((c >= '0' && c <= '9') || c == '*' || c == '[') return true;
  const char32_t sign = first_code_point(text).value;
  return sign == U'†' || sign == U'‡' || sign == U'§' || sign == U'∗' || (sign >= U'⁰' && sign <= U'⁹') ||
         sign == U'¹' || sign == U'²' || sign == U'³';
}

class Layout {
 public:
  explicit Layout(float height) : height_(height) {}

  void read(const Words& words, int depth) {
    if (words.empty()) return;
    const Parts parts = depth < kDeepest ? columns_of(words, height_) : Parts{};
    if (parts.left.empty()) return put(rows_of(words));
    read(parts.above, depth + 1);
    read(parts.left, depth + 1);
    read(parts.right, depth + 1);
    read(parts.below, depth + 1);
  }

  PageLines take() { return std::move(lines_); }

 private:
  /// Index of the first row of the footnotes at a column's end; rows.size() = there are none.
  std::size_t first_note(const std::vector<Row>& rows) const {
    std::size_t first = rows.size();
    for (std::size_t i = rows.size(); i > 0; --i) {
      if (height_of(rows[i - 1].words) >= kNoteHeight * height_) break;
      if (begins_note(text_of(rows[i - 1], height_))) first = i - 1;
    }
    return first == 0 ? rows.size() : first;  // a column of small print is no footnote
  }

  void put(const std::vector<Row>& rows) {
    std::vector<float> steps;
    for (std::size_t i = 1; i < rows.size(); ++i) steps.push_back(rows[i].y1 - rows[i - 1].y1);
    const float step = std::max(median(std::move(steps)), 0.5f * height_);
    const std::size_t notes = first_note(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<std::string>& to = i < notes ? lines_.body : lines_.notes;
      const bool gap = i > 0 && i != notes && rows[i].y1 - rows[i - 1].y1 > kGap * step;
      if (gap && !to.empty()) to.emplace_back();
      to.push_back(text_of(rows[i], height_));
    }
  }

  float height_;
  PageLines lines_;
};

/// Text that is turned by a quarter, such as a stamp in the margin, is taken out and read last.
Words take_turned(Words& words, float height) {
  const auto upright = std::stable_partition(words.begin(), words.end(), [&](const PageWord& word) {
    return word.height() < kUpright * height || word.x1 - word.x0 > kUpright * height || word.text.size() < 3;
  });
  Words turned(std::make_move_iterator(upright), std::make_move_iterator(words.end()));
  words.erase(upright, words.end());
  return turned;
}

}  // namespace

PageLines lines_in_reading_order(std::vector<PageWord> words) {
  const float height = height_of(words);
  const Words turned = take_turned(words, height);
  Layout layout(height);
  layout.read(words, 0);
  PageLines lines = layout.take();
  if (!turned.empty()) {
    std::string text;
    for (const PageWord& word : turned) text += (text.empty() ? "" : " ") + word.text;
    lines.notes.push_back(std::move(text));
  }
  return lines;
}

}  // namespace lode
