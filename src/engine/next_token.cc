// SPDX-License-Identifier: Apache-2.0
#include "engine/next_token.h"

#include <algorithm>
#include <limits>

namespace lode {

bool TextCollector::take(const std::string& piece) {
  text_ += piece;
  std::size_t cut = std::string::npos;
  for (const std::string& stop : options_.stop) {
    if (!stop.empty()) cut = std::min(cut, text_.find(stop));
  }
  if (cut != std::string::npos) {
    text_.resize(cut);
    return cut_ = true;
  }
  release(text_.size() - held());
  return false;
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
