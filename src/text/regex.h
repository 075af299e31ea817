// SPDX-License-Identifier: Apache-2.0
// The regular expressions of tokenizer.json, which are written for Oniguruma (Ruby syntax), run by PCRE2.
// What the two read differently is rewritten or refused, never passed on.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lode {

class Regex {
 public:
  /// InputError names `where`, the pattern and what is wrong with it.
  Regex(std::string_view pattern, std::string_view where);
  /// Matches `text` itself.
  static Regex literal(std::string_view text, std::string_view where);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  /// `text` with every match replaced. InputError when that makes it longer than max_growth allows.
  std::string replace_all(std::string_view text, std::string_view content) const;

  struct Range {
    std::size_t begin, end;
  };
  /// Goes over the matches in valid UTF-8 from left to right without overlap; no empty match directly after a
  /// match.
  class Matches {
   public:
    Matches(const Regex& regex, std::string_view text) : regex_(regex), text_(text) {}
    /// False when there are no more. InputError when the expression needs too many steps on this text or beyond
    /// the RegexBudget; Interrupted after Ctrl-C.
    bool next(Range& match);

   private:
    int match_here() const;
    const Regex& regex_;
    std::string_view text_;
    std::size_t from_ = 0;
    std::size_t last_end_ = std::string_view::npos;
  };

 private:
  struct Code;
  Regex(std::string pcre, std::string_view shown, std::string_view where);
  std::unique_ptr<Code> code_;
};

/// What all matches on this thread may take together while it lives: honest expressions take a few steps for each
/// byte of a text, and no limit of one match bounds a text in which every character begins another.
class RegexBudget {
 public:
  explicit RegexBudget(std::size_t text_bytes);
  ~RegexBudget();
  RegexBudget(const RegexBudget&) = delete;
  RegexBudget& operator=(const RegexBudget&) = delete;
  /// False when there are no more so many steps.
  bool take(std::size_t steps);
  static RegexBudget* current();

 private:
  std::size_t left_;
  RegexBudget* before_;
};

/// How long honest components may make a text: U+FDFA becomes 18 characters in NFKC, a blank one of three
/// bytes.
constexpr std::size_t max_growth(std::size_t bytes) {
  return 64 * (bytes + 16);
}

/// The same expression in PCRE2's syntax. InputError on what PCRE2 cannot say the same way.
std::string to_pcre2(std::string_view oniguruma, std::string_view where);

}  // namespace lode
