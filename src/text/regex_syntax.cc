// SPDX-License-Identifier: Apache-2.0
// Oniguruma's Ruby syntax into PCRE2's. The differences that matter for pre-tokenizers: \s (PCRE2 counts
// U+180E), \w, \h, \v, \u, \p{Script} (PCRE2 takes script extensions), classes within classes and &&, {n,m}+,
// inline options.
#include <algorithm>
#include <array>
#include <cctype>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/regex.h"

namespace lode {

namespace {

// The contents of a class; \s is White_Space of Unicode, \w is Oniguruma's letters, marks, numbers and
// connectors.
constexpr std::string_view kSpace =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kWord = R"(\p{L}\p{M}\p{N}\p{Pc})";

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view where) : in_(pattern), where_(where) {}

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        escape();
      } else if (c == '[') {
        bracket();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        braces();
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw InputError(std::string(where_) + ": the regular expression '" + excerpt(in_, 400) + "' uses " +
                     excerpt(what) + " at byte " + std::to_string(at_) + ", which is not supported");
  }
  bool follows(std::string_view text) const { return in_.substr(at_).starts_with(text); }
  void copy(std::size_t bytes) {
    out_ += in_.substr(at_, bytes);
    at_ += bytes;
  }

  void group() {
    if (!follows("(?")) {
      if (follows("(*")) refuse("'(*'");
      return copy(1);
    }
    constexpr std::array<std::string_view, 8> kGroups = {"(?:",  "(?=",  "(?!",  "(?>",
                                                         "(?<=", "(?<!", "(?i:", "(?i)"};
    const auto known =
        std::find_if(kGroups.begin(), kGroups.end(), [&](std::string_view g) { return follows(g); });
    if (known == kGroups.end()) refuse("a kind of group");
    copy(known->size());
  }

  // Ruby reads {n,m}+ as repeated repetition where PCRE2 reads it as possessive, and {,m} as {0,m}.
  void braces() {
    const std::size_t close = in_.find('}', at_);
    if (close == std::string_view::npos) return out_ += "\\{", void(++at_);
    const std::string_view inside = in_.substr(at_ + 1, close - at_ - 1);
    const bool count = !inside.empty() && std::all_of(inside.begin(), inside.end(), [](unsigned char c) {
      return std::isdigit(c) || c == ',';
    });
    if (!count || inside.front() == ',') refuse("'{' that does not begin a count");
    if (in_.substr(close + 1).starts_with('+')) refuse("'}+'");
    copy(close + 1 - at_);
  }

  void bracket() {
    copy(1);
    if (follows("^")) copy(1);
    if (follows("]")) refuse("an empty class");
    while (!follows("]")) {
      if (at_ >= in_.size()) refuse("a '[' without ']'");
      if (in_[at_] == '\\') {
        escape_in_class();
        continue;
      }
      if (in_[at_] == '[') refuse("a class within a class");
      if (follows("&&")) refuse("'&&'");
      copy(1);
    }
    copy(1);
  }

  void escape() {
    if (at_ + 1 >= in_.size()) refuse("a backslash at its end");
    const char c = in_[at_ + 1];
    const auto in_brackets = [&](std::string_view open, std::string_view contents) {
      out_.append(open).append(contents).append("]");
      at_ += 2;
    };
    if (c == 's') return in_brackets("[", kSpace);
    if (c == 'S') return in_brackets("[^", kSpace);
    if (c == 'w') return in_brackets("[", kWord);
    if (c == 'W') return in_brackets("[^", kWord);
    character_escape();
  }

  void escape_in_class() {
    if (at_ + 1 >= in_.size()) refuse("a backslash at its end");
    const char c = in_[at_ + 1];
    if (c == 's' || c == 'w') {
      out_ += c == 's' ? kSpace : kWord;
      at_ += 2;
    } else if (c == 'S') {
      out_ += "\\S\\x{180e}";
      at_ += 2;
    } else if (c == 'W') {
      refuse("\\W in a class");
    } else {
      character_escape();
    }
  }

  // Escapes that mean the same inside a class and outside.
  void character_escape() {
    const char c = in_[at_ + 1];
    if (c == 'p' || c == 'P') return property();
    if (c == 'x' || c == 'u') return code_point();
    if (c == 'v') return out_ += "\\x0b", void(at_ += 2);
    if (std::string_view("nrtfdD").find(c) != std::string_view::npos) return copy(2);
    if (std::isalnum(static_cast<unsigned char>(c)) || static_cast<unsigned char>(c) >= 0x80) {
      refuse(std::string("'\\") + c + "'");
    }
    copy(2);
  }

  void property() {
    const std::size_t close = in_.find('}', at_);
    if (!in_.substr(at_ + 2).starts_with('{') || close == std::string_view::npos) refuse("\\p without {}");
    std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    std::string negation;
    if (name.starts_with('^')) negation = "^", name.remove_prefix(1);
    const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
      return std::isalpha(c) || c == '_';
    });
    if (!plain) refuse("a property");
    const std::string_view kind = name.size() <= 2 || name == "Alphabetic" ? "" : "sc:";
    out_.append(in_.substr(at_, 2)).append("{").append(negation).append(kind).append(name).append("}");
    at_ = close + 1;
  }

  // \xHH, \x{H...} and \uHHHH.
  void code_point() {
    std::string_view digits = in_.substr(at_ + 2);
    const bool braced = digits.starts_with('{');
    const std::size_t close = digits.find('}');
    if (braced && close == std::string_view::npos) refuse("a code point without '}'");
    const std::size_t wanted = in_[at_ + 1] == 'u' ? 4 : 2;
    digits = braced ? digits.substr(1, close - 1) : digits.substr(0, wanted);
    const bool hex =
        !digits.empty() && digits.size() <= 6 && (braced || digits.size() == wanted) &&
        std::all_of(digits.begin(), digits.end(), [](unsigned char c) { return std::isxdigit(c); });
    // Without braces Ruby's \xHH from 80 on is a byte, no code point.
    if (!hex || (!braced && wanted == 2 && digits.front() >= '8')) refuse("a code point");
    out_.append("\\x{").append(digits).append("}");
    at_ += 2 + digits.size() + (braced ? 2 : 0);
  }

  std::string_view in_, where_;
  std::size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string to_pcre2(std::string_view oniguruma, std::string_view where) {
  return Translator(oniguruma, where).run();
}

}  // namespace lode
