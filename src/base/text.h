// SPDX-License-Identifier: Apache-2.0
// Small helpers for text that people read and write.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

/// The name that is closest to `word` by edit distance (at most a third of its length, at least 1); empty if
/// none is.
std::string nearest_name(std::string_view word, std::span<const std::string> names);
/// "a, b, c".
std::string join(std::span<const std::string> parts, std::string_view between = ", ");
/// Byte offset of the first invalid UTF-8 sequence, or npos.
std::size_t invalid_utf8(std::string_view text);
/// InputError where there is one; `where` begins the message.
void expect_utf8(std::string_view text, std::string_view where);
/// Text of unknown origin as messages show it: control characters and broken UTF-8 become '?', and what
/// stands beyond `limit` bytes becomes "...".
std::string excerpt(std::string_view text, std::size_t limit = 80);
/// "1 thread", "3 threads"; `many` where that is not `one` with an s.
std::string counted(std::int64_t n, std::string_view one, std::string_view many = {});
/// "1.5 GiB", "20.3 MiB", "512 B".
std::string human_bytes(std::int64_t bytes);
/// Rows, the first of which is the head, as lines of a terminal of `width` columns: names to the left,
/// numbers to the right. A name that leaves its numbers no room has a line to itself; a row of one cell is a
/// remark.
std::string text_table(std::span<const std::vector<std::string>> rows, std::size_t width = 80);

}  // namespace lode
