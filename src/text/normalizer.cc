// SPDX-License-Identifier: Apache-2.0
// Follows the component types of Hugging Face's tokenizers: Sequence, NFC, NFD, NFKC, NFKD, Prepend, Replace.
#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <new>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace lode {

namespace {

using CodePoints = std::vector<utf8proc_int32_t>;

/// Unicode's four normal forms. The marks after a letter are put in order here because utf8proc's own sort
/// takes quadratic time in their number.
class NormalForm : public Normalizer::Step {
 public:
  NormalForm(bool compose, bool compatible) : compose_(compose), compatible_(compatible) {}

  std::string apply(std::string_view text) const override {
    std::string result;
    result.reserve(text.size());
    while (!text.empty()) {
      const std::size_t plain = unchanged(text);
      result += text.substr(0, plain);
      text.remove_prefix(plain);
      std::size_t end = 0;
      // No character below U+0300 changes with what stands before it.
      while (end < text.size() && (end == 0 || first_code_point(text.substr(end)).value >= kFirstMark)) {
        end += first_code_point(text.substr(end)).bytes;
      }
      if (end > 0) rewrite(text.substr(0, end), result);
      text.remove_prefix(end);
    }
    return result;
  }

 private:
  static constexpr char32_t kFirstMark = 0x300;

  /// Bytes at the front that stay as they are whatever follows.
  std::size_t unchanged(std::string_view text) const {
    const char32_t limit = compose_ && !compatible_ ? kFirstMark : 0x80;
    std::size_t last = 0, at = 0;
    while (at < text.size()) {
      const CodePoint c = first_code_point(text.substr(at));
      if (c.value >= limit) return c.value >= kFirstMark ? last : at;
      last = at;
      at += c.bytes;
    }
    return at;
  }

  void rewrite(std::string_view text, std::string& result) const {
    CodePoints characters = decomposed(text);
    order_marks(characters);
    if (compose_) {
      const auto size = utf8proc_normalize_utf32(characters.data(),
                                                 static_cast<utf8proc_ssize_t>(characters.size()), options());
      characters.resize(static_cast<std::size_t>(std::max<utf8proc_ssize_t>(size, 0)));
    }
    for (const utf8proc_int32_t c : characters) append_utf8(result, static_cast<char32_t>(c));
  }

  utf8proc_option_t options() const {
    return static_cast<utf8proc_option_t>(UTF8PROC_STABLE |
                                          (compose_ ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                                          (compatible_ ? UTF8PROC_COMPAT : 0));
  }

  CodePoints decomposed(std::string_view text) const {
    constexpr utf8proc_ssize_t kLongest = 18;  // U+FDFA
    CodePoints characters;
    characters.reserve(text.size());
    while (!text.empty()) {
      const CodePoint c = first_code_point(text);
      text.remove_prefix(c.bytes);
      utf8proc_int32_t parts[kLongest];
      int boundary = 0;
      const utf8proc_ssize_t count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.value), parts,
                                                             kLongest, options(), &boundary);
      LODE_ASSERT(count >= 0 && count <= kLongest);
      characters.insert(characters.end(), parts, parts + count);
    }
    return characters;
  }

  static void order_marks(CodePoints& characters) {
    const auto mark_class = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
    for (auto at = characters.begin(); at != characters.end();) {
      const auto is_starter = [&](utf8proc_int32_t c) { return mark_class(c) == 0; };
      const auto begin = std::find_if_not(at, characters.end(), is_starter);
      at = std::find_if(begin, characters.end(), is_starter);
      std::stable_sort(begin, at, [&](auto a, auto b) { return mark_class(a) < mark_class(b); });
    }
  }

  bool compose_, compatible_;
};

class Prepend : public Normalizer::Step {
 public:
  explicit Prepend(std::string text) : text_(std::move(text)) {}
  std::string apply(std::string_view text) const override {
    return text.empty() ? std::string() : text_ + std::string(text);
  }

 private:
  std::string text_;
};

class Replace : public Normalizer::Step {
 public:
  Replace(Regex pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  std::string apply(std::string_view text) const override { return pattern_.replace_all(text, content_); }

 private:
  Regex pattern_;
  std::string content_;
};

}  // namespace

Normalizer::Normalizer(const Json& json, const std::string& where) : where_(where) {
  if (!json.is_null()) add(json, where);
}

void Normalizer::add(const Json& json, const std::string& where) {
  const std::string type = json_string(json, "type", where);
  if (steps_.size() == kMaxSteps) {
    throw InputError(where + ": expected at most " + std::to_string(kMaxSteps) + " components, found more");
  }
  if (type == "Sequence") {
    if (!json_has(json, "normalizers") || !json["normalizers"].is_array()) {
      throw InputError(where + ": expected a Sequence to have an array 'normalizers'");
    }
    for (const Json& part : json["normalizers"]) add(part, where);
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    steps_.push_back(std::make_unique<NormalForm>(type.back() == 'C', type[2] == 'K'));
  } else if (type == "Prepend") {
    steps_.push_back(std::make_unique<Prepend>(json_string(json, "prepend", where + ": Prepend")));
  } else if (type == "Replace") {
    const Json& pattern = json_member(json, "pattern");
    const bool literal = json_has(pattern, "String");
    const std::string text = json_string(pattern, literal ? "String" : "Regex", where + ": Replace: pattern");
    steps_.push_back(std::make_unique<Replace>(literal ? Regex::literal(text, where) : Regex(text, where),
                                               json_string(json, "content", where + ": Replace")));
  } else {
    throw UnreadableError(where + ": expected Sequence, NFC, NFD, NFKC, NFKD, Prepend or Replace, found '" +
                          excerpt(type) + "'");
  }
}

std::string Normalizer::apply(std::string_view text) const {
  std::string result(text);
  for (const auto& step : steps_) {
    result = step->apply(result);
    if (result.size() <= max_growth(text.size())) continue;
    throw InputError(where_ + ": makes a text of " + std::to_string(text.size()) +
                     " bytes more than 64 times as long");
  }
  return result;
}

}  // namespace lode
