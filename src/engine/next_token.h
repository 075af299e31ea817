// SPDX-License-Identifier: Apache-2.0
// From logits to the next token, and from tokens to the answer's text.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "engine/model.h"
#include "lodestone/engine.h"
#include "model/sampler.h"
#include "text/thoughts.h"

namespace lode {

/// Collects the answer's text, finds stop strings that span tokens, and releases text only once it cannot be
/// part of one. Thoughts are collected apart; stop strings are no matter of theirs.
class TextCollector {
 public:
  /// `thoughts`: how what the model says begins. Tokenizer and options outlive this.
  TextCollector(const Tokenizer& tokenizer, const GenerateOptions& options, Thoughts thoughts)
      : thoughts_(std::move(thoughts)), decoder_(tokenizer), thought_decoder_(tokenizer), options_(options) {}

  /// True when the text now holds a stop string; it is cut there.
  bool push(TokenId token);

  /// As far as it is, whole characters, without the stop string.
  std::string_view text() const { return text_; }
  /// Behind the tokens that were pushed.
  const Thoughts& thoughts() const { return thoughts_; }
  /// The stop string that ended the text; empty: none has.
  std::string_view stop() const { return stop_; }
  /// Whether the token that was pushed last belongs to the answer.
  bool answers() const { return part_ == Thoughts::Part::answer; }
  bool thinks() const { return part_ == Thoughts::Part::thought; }  ///< the same of thoughts, marks apart

  /// With what is there of a character that the answer ends inside of.
  std::string finish();
  /// The thoughts' text, without blanks around them; an empty line between two. Call it after finish().
  std::string finish_thoughts() { return std::move(thought_); }

 private:
  bool take(std::string piece);
  void take_thought(const std::string& piece);
  void end_thought();
  std::size_t held() const;  ///< bytes at the end that may be the beginning of a stop string
  void release(std::size_t end);

  Thoughts thoughts_;
  Thoughts::Part part_ = Thoughts::Part::answer;
  StreamDecoder decoder_, thought_decoder_;
  const GenerateOptions& options_;
  std::string text_, thought_;
  std::string before_answer_;    ///< blanks that thoughts may follow
  std::string held_thought_;     ///< blanks that may be the last of a thought
  std::string before_thought_;   ///< goes in front of the next one
  bool thought_begun_ = false;   ///< the one that is open has text
  bool behind_thought_ = false;  ///< blanks are dropped until the answer begins
  std::size_t released_ = 0;
  bool cut_ = false;       ///< at a stop string
  std::string_view stop_;  ///< that one
};

/// The logits [V] of one row that tokens have; changes those that no token has.
std::span<const float> token_logits(const Model& model, std::span<float> logits);
/// Draws from the logits [V] of one row; changes those that no token has.
TokenId next_token(const Model& model, Sampler& sampler, std::span<float> logits);
bool is_eos(const ModelConfig& config, TokenId token);

}  // namespace lode
