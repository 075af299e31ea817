// SPDX-License-Identifier: Apache-2.0
// A context-free grammar over bytes, and where a text stands in it: the set of stacks of what may still come. Stacks
// instead of tables, since a grammar is used for one answer.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lode::serve {

class Grammar {
 public:
  using Bytes = std::bitset<256>;
  using Rule = std::uint32_t;

  /// One thing in a sequence: a byte of a set, or a rule.
  struct Element {
    bool is_rule = false;
    Rule rule = 0;
    Bytes bytes;
  };
  using Sequence = std::vector<Element>;

  static Element any_of(std::string_view bytes);
  static Element between(unsigned char first, unsigned char last);
  static Element of(Rule rule) { return {.is_rule = true, .rule = rule, .bytes = {}}; }
  static Sequence literal(std::string_view text);

  Rule declare();                                    ///< a rule without alternatives yet, for recursion
  void add(Rule rule, const Sequence& alternative);  ///< empty = nothing may stand there
  Rule choice(const std::vector<Sequence>& alternatives);
  Rule optional(const Sequence& sequence) { return choice({sequence, {}}); }
  /// `least` to `most` times; most < 0 = any number. Alternatives that begin alike are fine, endless nothing is not.
  Rule repeat(const Sequence& sequence, int least, int most);

  /// Whether some text is an end of the rule: false where it only leads to itself, or to rules that never end.
  bool can_end(Rule rule) const;
  std::size_t size() const { return elements_.size(); }

 private:
  friend class Matcher;
  static constexpr std::uint32_t kEnd = 0;  // of elements_: where a sequence ends
  std::vector<Element> elements_ = {Element()};
  std::vector<std::uint32_t> next_ = {kEnd};       // the element behind each, kEnd at the end of its sequence
  std::vector<std::vector<std::uint32_t>> rules_;  // first elements of alternatives; kEnd = nothing
};

/// Places in a grammar. Small and copied often.
class Matcher {
 public:
  /// RunError-free: a grammar may be ambiguous, the stacks are a set.
  Matcher(const Grammar& grammar, Grammar::Rule start);
  /// False when the byte may not come; the matcher is then dead.
  bool accept(unsigned char byte);
  bool complete() const;  ///< the text may end here
  bool dead() const { return stacks_.empty(); }
  bool may_go_on() const;   ///< some byte may come
  std::string key() const;  ///< equal places have equal keys

 private:
  using Stack = std::vector<std::uint32_t>;  // what is to come; the top is the last
  std::vector<Stack> expanded(std::vector<Stack> open) const;
  const Grammar* grammar_;
  std::vector<Stack> stacks_;  // each is empty (complete) or has a byte set on top
};

}  // namespace lode::serve
