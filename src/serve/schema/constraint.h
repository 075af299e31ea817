// SPDX-License-Identifier: Apache-2.0
// Decoding within a grammar: before each token, the logits of those that may not come are put to -inf.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
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
  Allowed allowed(const Matcher& place) const;
  const Matcher& place_behind(std::span<const TokenId> answer);

  std::shared_ptr<const SchemaGrammar> grammar_;
  std::shared_ptr<const TokenOrder> order_;
  const Tokenizer& tokenizer_;
  const std::vector<TokenId> ends_;
  std::vector<TokenId> taken_;            ///< the answer of the last call
  std::vector<Matcher> places_;           ///< [1 + taken] before its first token, and behind each
  std::map<std::string, Allowed> known_;  ///< by place: an answer comes back to few
};

}  // namespace lode::serve
