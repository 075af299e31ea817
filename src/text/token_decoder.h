// SPDX-License-Identifier: Apache-2.0
// Turns the texts of tokens back into plain text: the "decoder" of tokenizer.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace lode {

class TokenDecoder {
 public:
  using Texts = std::vector<std::string>;
  /// One component.
  class Step {
   public:
    virtual ~Step() = default;
    virtual Texts apply(Texts tokens) const = 0;
    /// What it makes of one token in the middle of a text, as bytes that may be part of a character.
    virtual std::string bytes_of(std::string token) const { return token; }
  };

  /// `json` may be null. InputError names a component that is unknown or not supported.
  TokenDecoder(const Json& json, const std::string& where);

  static constexpr std::size_t kMaxSteps = 64;

  /// The whole text of tokens as the vocabulary spells them; invalid bytes become U+FFFD. InputError, here
  /// and in bytes_of, when the components together make it longer than max_growth allows.
  std::string decode(Texts tokens) const;
  std::string bytes_of(std::string_view token) const;

 private:
  void add(const Json& json, const std::string& where);
  void require_growth(std::size_t from, std::size_t to) const;
  std::string where_;
  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace lode
