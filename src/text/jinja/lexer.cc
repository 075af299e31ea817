// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_name(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80) != 0;
}

/// As Python reads a source: every kind of line break is \n, and the last one goes.
std::string with_plain_breaks(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r')
      text += source[i];
    else if (i + 1 == source.size() || source[i + 1] != '\n')
      text += '\n';
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(with_plain_breaks(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) text();
    add(Token::Kind::end, "");
    return std::move(tokens_);
  }

 private:
  using Kind = Token::Kind;

  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("line {}: {}", line_, what));
  }
  void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  void skip(std::size_t bytes) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at_ + bytes), '\n'));
    at_ += bytes;
    if (bytes > 0) at_line_start_ = source_[at_ - 1] == '\n';
  }
  void skip_space() { skip(rest().size() - without_leading_space(rest()).size()); }

  void text();
  std::string_view before_tag(std::string_view text, char sign, bool output) const;
  void comment();
  bool raw();
  void end_of_raw(std::size_t begin);
  void tag(Kind end, std::string_view closing);
  bool ends_here(std::string_view closing, Kind end);
  void word(std::string_view closing);
  void number();
  void string(char quote);
  std::size_t escape(std::string_view text, std::string& out) const;
  void op(std::string_view closing);

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::string open_;  ///< brackets of the tag that await their ends
  std::vector<Token> tokens_;
};

/// The text before a tag, less the white space that the tag takes away.
std::string_view Lexer::before_tag(std::string_view text, char sign, bool output) const {
  if (sign == '-') return without_trailing_space(text);
  if (sign == '+' || output) return text;
  const std::size_t line = text.rfind('\n') + 1;  // 0 when there is none
  if (line == 0 && !at_line_start_) return text;
  return without_leading_space(text.substr(line)).empty() ? text.substr(0, line) : text;
}

void Lexer::text() {
  std::size_t tag = at_;
  const auto opens = [&] { return std::string_view("{%#").find(source_[tag + 1]) != std::string_view::npos; };
  while ((tag = source_.find('{', tag)) != std::string::npos && (tag + 1 >= source_.size() || !opens()))
    ++tag;
  if (tag == std::string::npos) {
    const std::string all(rest());
    add(Kind::text, all);
    return skip(all.size());
  }
  const char kind = source_[tag + 1], sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
  const std::string before(before_tag(rest().substr(0, tag - at_), sign, kind == '{'));
  if (!before.empty()) add(Kind::text, before);
  skip(tag - at_ + 2);
  if (sign == '-' || sign == '+') skip(1);
  if (kind == '#') return comment();
  if (kind == '%' && raw()) return;
  add(kind == '%' ? Kind::block_begin : Kind::output_begin, "");
  this->tag(kind == '%' ? Kind::block_end : Kind::output_end, kind == '%' ? "%}" : "}}");
}

void Lexer::comment() {
  const std::size_t end = source_.find("#}", at_);
  if (end == std::string::npos) fail("expected the end of a comment, '#}', found none");
  const char sign = end > at_ ? source_[end - 1] : ' ';
  skip(end + 2 - at_);
  if (sign == '-') return skip_space();
  if (sign != '+' && rest().starts_with('\n')) skip(1);
}

/// {% raw %}: all up to {% endraw %} is text. False when the tag is another one.
bool Lexer::raw() {
  std::string_view text = without_leading_space(rest());
  if (!text.starts_with("raw")) return false;
  text = without_leading_space(text.substr(3));
  const bool strips = text.starts_with("-%}");
  if (!strips && !text.starts_with("%}")) return false;
  skip(rest().size() - text.size() + (strips ? 3 : 2));
  if (strips) skip_space();
  for (std::size_t tag = at_; (tag = source_.find("{%", tag)) != std::string::npos; ++tag) {
    std::string_view name = std::string_view(source_).substr(tag + 2);
    if (name.starts_with('-') || name.starts_with('+')) name.remove_prefix(1);
    if (!without_leading_space(name).starts_with("endraw")) continue;
    end_of_raw(tag);
    return true;
  }
  fail("expected {% endraw %}, found the end of the template");
}

void Lexer::end_of_raw(std::size_t begin) {
  const std::string before(before_tag(rest().substr(0, begin - at_), source_[begin + 2], false));
  if (!before.empty()) add(Kind::text, before);
  const std::size_t end = source_.find("%}", begin + 2);
  if (end == std::string::npos) fail("expected the end of the tag 'endraw', '%}', found none");
  const char sign = source_[end - 1];
  skip(end + 2 - at_);
  if (sign == '-') return skip_space();
  if (sign != '+' && rest().starts_with('\n')) skip(1);
}

/// Whether the tag ends here; then goes behind it and the white space that it takes away.
bool Lexer::ends_here(std::string_view closing, Kind end) {
  if (!open_.empty()) return false;
  const std::string_view text = rest();
  const bool block = end == Kind::block_end;
  const bool strips = text.starts_with('-') && text.substr(1).starts_with(closing);
  const bool keeps = block && text.starts_with('+') && text.substr(1).starts_with(closing);
  if (!strips && !keeps && !text.starts_with(closing)) return false;
  add(end, "");
  skip(closing.size() + (strips || keeps ? 1 : 0));
  if (strips)
    skip_space();
  else if (block && !keeps && rest().starts_with('\n'))
    skip(1);
  return true;
}

void Lexer::tag(Kind end, std::string_view closing) {
  for (;;) {
    skip_space();
    if (at_ == source_.size()) fail(fmt::format("expected the end of a tag, '{}', found none", closing));
    if (ends_here(closing, end)) return;
    word(closing);
  }
}

void Lexer::word(std::string_view closing) {
  const char c = source_[at_];
  if (is_digit(c)) return number();
  if (c == '"' || c == '\'') return string(c);
  if (!is_name(c)) return op(closing);
  const auto end =
      std::find_if_not(source_.begin() + static_cast<std::ptrdiff_t>(at_), source_.end(), is_name);
  const auto bytes = static_cast<std::size_t>(end - source_.begin()) - at_;
  add(Kind::name, source_.substr(at_, bytes));
  skip(bytes);
}

void Lexer::number() {
  const bool member = !tokens_.empty() && tokens_.back().kind == Kind::op && tokens_.back().text == ".";
  std::size_t end = at_;
  const auto digit_at = [&](std::size_t i) { return i < source_.size() && is_digit(source_[i]); };
  const auto digits = [&] {
    while (digit_at(end) || (end < source_.size() && source_[end] == '_' && digit_at(end + 1))) ++end;
  };
  digits();
  bool real = false;
  if (!member && end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
    real = true;
    ++end;
    digits();
  }
  if (!member && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
    const bool sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-');
    if (digit_at(end + (sign ? 2 : 1))) {
      real = true;
      end += sign ? 2 : 1;
      digits();
    }
  }
  std::string text = source_.substr(at_, end - at_);
  std::erase(text, '_');
  if (text.size() > 40) fail("expected a number of at most 40 digits, found " + excerpt(text));
  add(real ? Kind::real : Kind::integer, text);
  skip(end - at_);
}

/// What a backslash and the text behind it stand for in Python; gives the bytes behind the backslash.
std::size_t Lexer::escape(std::string_view text, std::string& out) const {
  constexpr std::string_view kNames = "\\'\"abfnrtv\n", kMeanings = "\\'\"\a\b\f\n\r\t\v";
  const char c = text[0];
  if (const std::size_t known = kNames.find(c); known != std::string_view::npos) {
    if (c != '\n') out += kMeanings[known];
    return 1;
  }
  const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  const bool octal = c >= '0' && c <= '7';
  if (digits == 0 && !octal) {
    out += '\\';
    return 0;
  }
  std::size_t begin = octal ? 0 : 1, end = begin;
  const std::string_view allowed = octal ? "01234567" : "0123456789abcdefABCDEF";
  while (end < text.size() && end - begin < (octal ? 3 : digits) && allowed.find(text[end]) != allowed.npos)
    ++end;
  if (!octal && end - begin != digits)
    fail(fmt::format("expected {} hexadecimal digits behind '\\{}', found {}", digits, c, end - begin));
  const auto code = static_cast<char32_t>(
      std::stoul(std::string(text.substr(begin, end - begin)), nullptr, octal ? 8 : 16));
  if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
    fail("expected the code of a character, found '\\" + std::string(text.substr(0, end)) + "'");
  append_utf8(out, code);
  return end;
}

void Lexer::string(char quote) {
  std::string value;
  std::size_t at = at_ + 1;
  while (at < source_.size() && source_[at] != quote) {
    if (source_[at] != '\\') {
      value += source_[at++];
    } else if (++at < source_.size()) {
      at += escape(std::string_view(source_).substr(at), value);
    }
  }
  if (at >= source_.size()) fail("expected the end of a string, found the end of the template");
  add(Kind::string, value);
  skip(at + 1 - at_);
}

void Lexer::op(std::string_view closing) {
  static constexpr std::array<std::string_view, 25> kOps = {"==", "!=", ">=", "<=", "//", "**", "+", "-", "/",
                                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                            "<",  ">",  "=",  ".",  ":",  "|",  ","};
  const std::string_view text = rest();
  const auto op =
      std::find_if(kOps.begin(), kOps.end(), [&](std::string_view o) { return text.starts_with(o); });
  if (op == kOps.end())
    fail(fmt::format("expected a tag that ends in '{}', found '{}' in it", closing,
                     excerpt(text.substr(0, first_code_point(text).bytes))));
  const char c = (*op)[0];
  if (c == '(' || c == '[' || c == '{') open_ += c == '(' ? ')' : c == '[' ? ']' : '}';
  if (c == ')' || c == ']' || c == '}') {
    if (open_.empty() || open_.back() != c) fail(fmt::format("found '{}' without its beginning", c));
    open_.pop_back();
  }
  add(Kind::op, std::string(*op));
  skip(op->size());
}

}  // namespace

std::size_t leading_space(std::string_view text) {
  const CodePoint c = first_code_point(text);
  return is_space(c.value) ? c.bytes : 0;
}

std::string_view without_leading_space(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = leading_space(text);
    if (bytes == 0) break;
    text.remove_prefix(bytes);
  }
  return text;
}

std::string_view without_trailing_space(std::string_view text) {
  while (!text.empty()) {
    const CodePoint c = last_code_point(text);
    if (!is_space(c.value)) break;
    text.remove_suffix(c.bytes);
  }
  return text;
}

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace lode::jinja
