// SPDX-License-Identifier: Apache-2.0
#include "engine/next_token.h"

#include <algorithm>
#include <limits>

namespace lode {

bool TextCollector::push(TokenId token) {
  part_ = thoughts_.push(token);
  if (part_ == Thoughts::Part::answer) {
    before_answer_ += decoder_.push(token);
    return thoughts_.opening() < 0 && take(std::exchange(before_answer_, {}));
  }
  if (part_ == Thoughts::Part::thought)
    take_thought(thought_decoder_.push(token));
  else
    end_thought();
  return false;
}

bool TextCollector::take(std::string piece) {
  if (behind_thought_) {
    piece.erase(0, std::min(piece.find_first_not_of(kThoughtBlanks), piece.size()));
    behind_thought_ = piece.empty();
  }
  text_ += piece;
  std::size_t cut = std::string::npos;
  for (const std::string& stop : options_.stop) {
    const std::size_t at = stop.empty() ? std::string::npos : text_.find(stop);
    if (at >= cut) continue;
    cut = at;
    stop_ = stop;
  }
  if (cut != std::string::npos) {
    text_.resize(cut);
    return cut_ = true;
  }
  release(text_.size() - held());
  return false;
}

void TextCollector::take_thought(const std::string& piece) {
  held_thought_ += piece;
  if (!thought_begun_)
    held_thought_.erase(0, std::min(held_thought_.find_first_not_of(kThoughtBlanks), held_thought_.size()));
  const std::size_t last = held_thought_.find_last_not_of(kThoughtBlanks);
  if (last == std::string::npos) return;
  const std::string ready = std::exchange(before_thought_, {}) + held_thought_.substr(0, last + 1);
  held_thought_.erase(0, last + 1);
  thought_begun_ = true;
  thought_ += ready;
  if (options_.on_thought) options_.on_thought(ready);
}

void TextCollector::end_thought() {
  take_thought(thought_decoder_.finish());
  held_thought_.clear();
  before_answer_.clear();
  thought_begun_ = false;
  if (!thought_.empty()) before_thought_ = "\n\n";
  behind_thought_ = behind_thought_ || text_.empty();
}

std::string TextCollector::finish() {
  take_thought(thought_decoder_.finish());
  if (!cut_) take(before_answer_ + decoder_.finish());
  release(text_.size());
  return std::move(text_);
}

std::size_t TextCollector::held() const {
  std::size_t longest = 0;
  for (const std::string& stop : options_.stop) {
    for (std::size_t n = std::min(stop.size(), text_.size()); n > longest; --n) {
      if (text_.compare(text_.size() - n, n, stop, 0, n) == 0) longest = n;
    }
  }
  return longest;
}

void TextCollector::release(std::size_t end) {
  if (options_.on_text && end > released_)
    options_.on_text(std::string_view(text_).substr(released_, end - released_));
  released_ = std::max(released_, end);
}

std::span<const float> token_logits(const Model& model, std::span<float> logits) {
  // A vocabulary may be padded behind the tokenizer's ids, or have gaps: there is no text for such.
  const auto& tokenizer = model.impl().tokenizer;  // a model for benches has none
  if (!tokenizer) return logits;
  for (const TokenId gap : tokenizer->gaps())
    logits[static_cast<std::size_t>(gap)] = -std::numeric_limits<float>::infinity();
  return logits.first(static_cast<std::size_t>(std::min(model.config().vocab, tokenizer->vocab())));
}

TokenId next_token(const Model& model, Sampler& sampler, std::span<float> logits) {
  return sampler.next(token_logits(model, logits));
}

bool is_eos(const ModelConfig& config, TokenId token) {
  return std::find(config.eos.begin(), config.eos.end(), token) != config.eos.end();
}

}  // namespace lode
