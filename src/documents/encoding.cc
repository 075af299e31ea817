// SPDX-License-Identifier: Apache-2.0
#include "documents/encoding.h"

#include <fmt/format.h>
#include <iconv.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/utf8.h"

#if LODE_UCHARDET
#include <uchardet/uchardet.h>
#endif

namespace lode {

namespace {

struct Mark {
  std::string_view bytes;
  const char* encoding;
};
using namespace std::string_view_literals;
// UTF-32's little-endian mark begins with UTF-16's.
constexpr std::array<Mark, 5> kByteOrderMarks = {{{"\xef\xbb\xbf"sv, "UTF-8"},
                                                  {"\xff\xfe\0\0"sv, "UTF-32LE"},
                                                  {"\0\0\xfe\xff"sv, "UTF-32BE"},
                                                  {"\xff\xfe"sv, "UTF-16LE"},
                                                  {"\xfe\xff"sv, "UTF-16BE"}}};

/// "UTF-16LE" or "UTF-16BE" of a text without a mark whose letters are mostly Latin; else empty.
std::string_view unmarked_utf16(std::string_view bytes) {
  const std::string_view head = bytes.substr(0, 4096);
  std::array<std::size_t, 2> zeros = {};
  for (std::size_t i = 0; i < head.size(); ++i) zeros[i % 2] += head[i] == '\0';
  const std::size_t half = head.size() / 2;
  if (bytes.size() % 2 != 0 || half == 0) return {};
  if (zeros[1] * 10 >= half * 7 && zeros[0] * 10 < half) return "UTF-16LE";
  if (zeros[0] * 10 >= half * 7 && zeros[1] * 10 < half) return "UTF-16BE";
  return {};
}

std::string convert(std::string_view bytes, const std::string& from, std::string_view where) {
  const iconv_t opened = ::iconv_open("UTF-8", from.c_str());
  if (opened == reinterpret_cast<iconv_t>(-1))
    throw InputError(
        fmt::format("{}: expected a text in UTF-8 or in an encoding that this system's iconv "
                    "knows, found '{}'; convert it to UTF-8",
                    where, excerpt(from)));
  const std::unique_ptr<void, int (*)(iconv_t)> converter(opened, ::iconv_close);
  std::string text;
  std::array<char, 1 << 16> buffer;
  char* in = const_cast<char*>(bytes.data());
  std::size_t left = bytes.size();
  while (true) {
    char* out = buffer.data();
    std::size_t room = buffer.size();
    const bool flush = left == 0;
    const std::size_t status = ::iconv(opened, flush ? nullptr : &in, &left, &out, &room);
    text.append(buffer.data(), buffer.size() - room);
    if (status == static_cast<std::size_t>(-1) && errno != E2BIG)
      throw InputError(
          fmt::format("{}: expected a text in {}, as it looks, found an invalid byte at offset {}; "
                      "convert it to UTF-8",
                      where, from, bytes.size() - left));
    if (flush && status != static_cast<std::size_t>(-1)) return text;
  }
}

/// Text has tabs, line breaks, form feeds and escapes of terminals' colours; files of numbers have the rest.
void expect_text(std::string_view text, std::string_view where) {
  const std::size_t zero = text.find('\0');
  if (zero != std::string_view::npos)
    throw InputError(fmt::format(
        "{}: expected a text or a document, found binary data (a zero byte at offset {})", where, zero));
  const auto is_odd = [](char c) {
    const auto u = static_cast<unsigned char>(c);
    return (u < 0x20 && (u < '\t' || u > '\r') && u != 0x1b) || u == 0x7f;
  };
  const auto odd = static_cast<std::size_t>(std::count_if(text.begin(), text.end(), is_odd));
  if (odd * 20 > text.size())
    throw InputError(
        fmt::format("{}: expected a text or a document, found binary data ({} control characters in "
                    "{} bytes)",
                    where, odd, text.size()));
}

/// Whether this is UTF-8 with a fault rather than another encoding: cut inside its last character, or with
/// more whole characters beyond ASCII than bytes that belong to none.
bool is_damaged_utf8(std::string_view text) {
  std::size_t whole = 0, broken = 0;
  while (!text.empty()) {
    const Utf8Step step = utf8_step(text);
    if (step.kind == Utf8Kind::cut && broken == 0) return true;
    whole += step.kind == Utf8Kind::valid && step.bytes > 1;
    broken += step.kind != Utf8Kind::valid;
    text.remove_prefix(step.bytes);
  }
  return whole > broken;
}

}  // namespace

std::string guess_encoding([[maybe_unused]] std::string_view bytes, [[maybe_unused]] std::string_view where) {
#if LODE_UCHARDET
  const std::unique_ptr<uchardet, void (*)(uchardet_t)> detector(uchardet_new(), uchardet_delete);
  const std::string_view head = bytes.substr(0, std::size_t{1} << 22);
  if (uchardet_handle_data(detector.get(), head.data(), head.size()) != 0) return {};
  uchardet_data_end(detector.get());
  return uchardet_get_charset(detector.get());
#else
  throw InputError(
      fmt::format("{}: expected UTF-8, found an invalid byte at offset {}; other encodings need a "
                  "build with libuchardet (apt install libuchardet-dev)",
                  where, invalid_utf8(bytes)));
#endif
}

std::string text_as_utf8(std::string_view bytes, std::string_view where, std::string* encoding) {
  std::string from;
  for (const Mark& mark : kByteOrderMarks) {
    if (!from.empty() || !bytes.starts_with(mark.bytes)) continue;
    from = mark.encoding;
    bytes.remove_prefix(mark.bytes.size());
  }
  const bool marked = !from.empty();
  const std::size_t bad = invalid_utf8(bytes);
  if (from == "UTF-8" && bad != std::string_view::npos)
    throw InputError(fmt::format("{}: expected UTF-8, as its mark says, found an invalid byte at offset {}",
                                 where, bad + 3));
  if (!marked) from = unmarked_utf16(bytes);
  if (from.empty() && bad == std::string_view::npos) from = "UTF-8";
  if (from.empty()) {
    expect_text(bytes, where);
    if (!is_damaged_utf8(bytes)) from = guess_encoding(bytes, where);
    if (from.empty() || from == "UTF-8" || from == "ASCII")
      throw InputError(
          fmt::format("{}: expected UTF-8 or an encoding that can be told, found an invalid byte at "
                      "offset {}; convert it to UTF-8",
                      where, bad));
  }
  if (from != "UTF-8" && encoding != nullptr) *encoding = from;
  std::string text = from == "UTF-8" ? std::string(bytes) : convert(bytes, from, where);
  expect_text(text, where);
  return text;
}

}  // namespace lode
