// SPDX-License-Identifier: Apache-2.0
// From logits to the next token, and from tokens to the answer's text.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "engine/model.h"
#include "lodestone/engine.h"
#include "model/sampler.h"

namespace lode {

/// Collects the answer's text, finds stop strings that span tokens, and releases text only once it cannot be
/// part of one.
class TextCollector {
 public:
  TextCollector(const Tokenizer& tokenizer, const GenerateOptions& options)
      : decoder_(tokenizer), options_(options) {}  // both outlive this

  /// True when the text now holds a stop string; it is cut there.
  bool push(TokenId token) { return take(decoder_.push(token)); }

  /// As far as it is, whole characters, without the stop string.
  std::string_view text() const { return text_; }

  /// With what is there of a character that the answer ends inside of.
  std::string finish() {
    if (!cut_) take(decoder_.finish());
    release(text_.size());
    return std::move(text_);
  }

 private:
  bool take(const std::string& piece);
  std::size_t held() const;  ///< bytes at the end that may be the beginning of a stop string
  void release(std::size_t end);

  StreamDecoder decoder_;
  const GenerateOptions& options_;
  std::string text_;
  std::size_t released_ = 0;
  bool cut_ = false;  ///< at a stop string
};

/// The logits [V] of one row that tokens have; changes those that no token has.
std::span<const float> token_logits(const Model& model, std::span<float> logits);
/// Draws from the logits [V] of one row; changes those that no token has.
TokenId next_token(const Model& model, Sampler& sampler, std::span<float> logits);
bool is_eos(const ModelConfig& config, TokenId token);

}  // namespace lode
