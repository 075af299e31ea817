// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

#include "lodestone/error.h"

namespace lode {

namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);  // distances of a[0, i) to every prefix of b
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

/// Bytes of the UTF-8 sequence at the start of `text`, or 0 when it is invalid (overlong, surrogate, beyond
/// U+10FFFF).
std::size_t sequence_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool legal = !(lead == 0xe0 && second < 0xa0) && !(lead == 0xed && second > 0x9f) &&
                     !(lead == 0xf0 && second < 0x90) && !(lead == 0xf4 && second > 0x8f);
  return legal ? bytes : 0;
}

/// Columns of a terminal that a text takes, each character one.
std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string nearest_name(std::string_view word, std::span<const std::string> names) {
  std::size_t best = std::max<std::size_t>(1, word.size() / 3) + 1;
  std::string nearest;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(word, name);
    if (distance < best) {
      best = distance;
      nearest = name;
    }
  }
  return nearest;
}

std::string join(std::span<const std::string> parts, std::string_view between) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += between;
    text += part;
  }
  return text;
}

std::size_t invalid_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = sequence_bytes(text.substr(at));
    if (bytes == 0) return at;
    at += bytes;
  }
  return std::string_view::npos;
}

void expect_utf8(std::string_view text, std::string_view where) {
  if (const std::size_t bad = invalid_utf8(text); bad != std::string_view::npos)
    throw InputError(std::string(where) + ": expected UTF-8, found an invalid byte at offset " +
                     std::to_string(bad));
}

std::string excerpt(std::string_view text, std::size_t limit) {
  std::string shown;
  while (!text.empty()) {
    const std::size_t bytes = std::max<std::size_t>(1, sequence_bytes(text));
    if (shown.size() + bytes > limit) return shown + "...";
    const auto lead = static_cast<unsigned char>(text[0]);
    const bool c1 = lead == 0xc2 && bytes == 2 && static_cast<unsigned char>(text[1]) < 0xa0;
    const bool plain = bytes > 1 ? !c1 : lead >= 0x20 && lead < 0x7f;
    shown += plain ? text.substr(0, bytes) : "?";
    text.remove_prefix(bytes);
  }
  return shown;
}

std::string counted(std::int64_t n, std::string_view one, std::string_view many) {
  const std::string number = std::to_string(n) + " ";
  if (n == 1) return number + std::string(one);
  return number + (many.empty() ? std::string(one) + "s" : std::string(many));
}

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string text_table(std::span<const std::vector<std::string>> rows, std::size_t width) {
  const auto is_row = [](const auto& row) { return row.size() > 1; };
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    if (!is_row(row)) continue;
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns_of(row[i]));
  }
  if (widths.empty()) return "";
  const std::size_t cells = std::accumulate(widths.begin() + 1, widths.end(), std::size_t{0}),
                    count = widths.size() - 1, gap = widths[0] + cells + 2 * count <= width ? 2 : 1,
                    numbers = cells + gap * count;
  const std::size_t name = std::min(widths[0], width > numbers ? width - numbers : 0);
  std::string text;
  for (const auto& row : rows) {
    const std::size_t taken = columns_of(row[0]);
    text += row[0];
    if (!is_row(row)) {
      text += "\n";
      continue;
    }
    text += taken > name ? "\n" + std::string(name, ' ') : std::string(name - taken, ' ');
    for (std::size_t i = 1; i < row.size(); ++i)
      text += std::string(gap + widths[i] - columns_of(row[i]), ' ') + row[i];
    text.resize(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
  return text;
}

}  // namespace lode
