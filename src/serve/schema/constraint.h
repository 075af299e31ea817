// SPDX-License-Identifier: Apache-2.0
// Decoding within a grammar: before each token, the logits of those that may not come are put to -inf.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

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
class Constraint {
 public:
  Constraint(std::shared_ptr<const SchemaGrammar> grammar, std::shared_ptr<const TokenOrder> order,
             const Tokenizer& tokenizer, std::vector<TokenId> ends);
  /// `generated`: the answer's tokens so far, those of the last call among them. [V] logits.
  void apply(std::span<const TokenId> generated, std::span<float> logits);

 private:
  std::vector<bool> allowed();
  std::shared_ptr<const SchemaGrammar> grammar_;
  std::shared_ptr<const TokenOrder> order_;
  const Tokenizer& tokenizer_;
  const std::vector<TokenId> ends_;
  Matcher matcher_;
  std::size_t seen_ = 0;                            ///< tokens that the matcher has taken
  std::map<std::string, std::vector<bool>> known_;  ///< allowed tokens by place: an answer comes back to few
};

}  // namespace lode::serve
