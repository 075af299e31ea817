// SPDX-License-Identifier: Apache-2.0
// Decoding within a grammar: before each token, the logits of those that may not come are put to -inf.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lodestone/token_filter.h"
#include "lodestone/tokenizer.h"
#include "serve/schema/json_schema.h"

namespace lode::serve {

/// The tokens of a model by their bytes, in order, so that a walk over them shares what they begin with.
class TokenOrder {
 public:
  explicit TokenOrder(const Tokenizer& tokenizer);
  struct Entry {
    TokenId id = 0;
    std::string_view bytes;  ///< of the tokenizer, never empty
    std::size_t shared = 0;  ///< bytes at the beginning that the entry before has, too
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// Where texts stand in a grammar, by number: what a byte leads to is worked out once.
class Places {
 public:
  using Place = std::int32_t;
  static constexpr Place kNowhere = -1;
  explicit Places(const SchemaGrammar& grammar);
  Place start() const { return 0; }
  Place behind(Place place, unsigned char byte);  ///< kNowhere when the byte may not come
  const Matcher& at(Place place) const { return matchers_[static_cast<std::size_t>(place)]; }
  std::size_t size() const { return matchers_.size(); }

 private:
  static constexpr Place kUnknown = -2;
  Place number_of(Matcher matcher);
  std::vector<Matcher> matchers_;
  std::vector<std::array<Place, 256>> next_;  // [places]
  std::unordered_map<std::string, Place> by_key_;
};

/// Of one answer.
class Constraint : public TokenFilter {
 public:
  /// The tokenizer must outlive this; `ends`: tokens that end an answer.
  Constraint(std::shared_ptr<const SchemaGrammar> grammar, std::shared_ptr<const TokenOrder> order,
             const Tokenizer& tokenizer, std::vector<TokenId> ends);
  bool apply(std::span<const TokenId> answer, std::span<float> logits) override;

 private:
  struct Allowed {
    std::vector<bool> tokens;  // [vocabulary of the tokenizer]
    bool any = false;
  };
  Allowed allowed(Places::Place place);
  Places::Place behind(Places::Place place, std::string_view bytes);
  Places::Place place_behind(std::span<const TokenId> answer);
  void forget();

  std::shared_ptr<const SchemaGrammar> grammar_;
  std::shared_ptr<const TokenOrder> order_;
  const Tokenizer& tokenizer_;
  const std::vector<TokenId> ends_;
  Places places_;
  std::vector<TokenId> taken_;                ///< the answer of the last call
  std::vector<Places::Place> taken_places_;   ///< [1 + taken] before its first token, and behind each
  std::map<Places::Place, Allowed> allowed_;  ///< an answer comes back to few places
};

}  // namespace lode::serve
