// SPDX-License-Identifier: Apache-2.0
#include "text/thoughts.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace lode {

namespace {

/// Marks that are a token each, and the name that stands behind the one that opens.
struct Marks {
  std::string_view open, close, name = {};
};
constexpr std::array<Marks, 3> kMarks = {
    {{"<think>", "</think>"}, {"[THINK]", "[/THINK]"}, {"<|channel>", "<channel|>", "thought\n"}}};

constexpr std::size_t kLookBack = 256;  // tokens in which the end of a prompt opens a thought

/// The token that a mark is; -1 where the text is several tokens.
TokenId token_of(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, Tokenizer::Bos::none, Tokenizer::Special::parsed);
  return ids.size() == 1 && tokenizer.decode(ids, false) == text ? ids.front() : TokenId{-1};
}

std::span<const TokenId> last_of(std::span<const TokenId> tokens, std::size_t most) {
  return tokens.last(std::min(tokens.size(), most));
}

}  // namespace

Thoughts::Thoughts(const Tokenizer& tokenizer, std::span<const TokenId> before,
                   std::span<const TokenId> prompt)
    : tokenizer_(&tokenizer) {
  find_marks();
  if (open_ < 0 && !harmony()) return;
  prompt = last_of(prompt, kLookBack);
  for (const TokenId token : last_of(before, kLookBack - prompt.size())) read_prompt(token);
  for (const TokenId token : prompt) read_prompt(token);
}

void Thoughts::find_marks() {
  const std::array<TokenId, 4> channels = {
      token_of(*tokenizer_, "<|start|>"), token_of(*tokenizer_, "<|channel|>"),
      token_of(*tokenizer_, "<|message|>"), token_of(*tokenizer_, "<|end|>")};
  if (std::ranges::find(channels, -1) == channels.end()) {
    start_ = channels[0];
    channel_ = channels[1];
    message_ = channels[2];
    end_ = channels[3];
    return;
  }
  for (const auto& [open, close, name] : kMarks) {
    const TokenId opens = token_of(*tokenizer_, open), closes = token_of(*tokenizer_, close);
    if (opens < 0 || closes < 0) continue;
    open_ = opens;
    close_ = closes;
    named_ = name;
    return;
  }
}

/// A prompt opens a thought by a mark at its end. Text or a special token behind a mark says that somebody spoke of it.
void Thoughts::read_prompt(TokenId token) {
  if (harmony()) {
    push_harmony(token);
  } else if (token == open_) {
    open();
  } else if (token == close_) {
    close();
  } else if (!still_names(token) &&
             (tokenizer_->is_special(token) || (state_ == State::thought && !is_blank(token)))) {
    state_ = State::answer;
    thought_ = false;
  }
}

Thoughts::Part Thoughts::push(TokenId token) {
  if (harmony()) return push_harmony(token);
  if (open_ < 0) return Part::answer;
  if (state_ == State::thought) {
    if (token != close_) return still_names(token) ? Part::mark : Part::thought;
    close();
    return Part::mark;
  }
  if (!said_ && token == open_) {
    open();
    return Part::mark;
  }
  if (!said_ && token == close_) return Part::mark;
  said_ = said_ || !is_blank(token);
  return Part::answer;
}

std::vector<TokenId> Thoughts::closing() const {
  if (state_ != State::thought || naming_) return {};
  if (!harmony()) return {close_};
  return tokenizer_->encode("<|end|><|start|>assistant<|channel|>final<|message|>", Tokenizer::Bos::none,
                            Tokenizer::Special::parsed);
}

void Thoughts::open() {
  state_ = State::thought;
  thought_ = false;
  naming_ = !named_.empty();
  name_.clear();
}

void Thoughts::close() {
  state_ = State::answer;
  thought_ = true;
  naming_ = false;
}

/// Whether a token is of the name behind the mark that opens thoughts. What is another text is a thought.
bool Thoughts::still_names(TokenId token) {
  if (harmony() || !naming_) return false;
  name_ += tokenizer_->bytes_of(token);
  naming_ = name_.size() < named_.size();
  return named_.starts_with(name_) || (!naming_ && name_.starts_with(named_) &&
                                       name_.find_first_not_of(kThoughtBlanks, named_.size()) == name_.npos);
}

/// A message without a channel is an answer, as one of "final"; "analysis" and "commentary" are thoughts.
Thoughts::Part Thoughts::push_harmony(TokenId token) {
  if (token == start_ || token == channel_) {
    state_ = State::header;
    naming_ = token == channel_;
    name_.clear();
  } else if (token == message_) {
    const std::string_view name = std::string_view(name_).substr(0, name_.find_first_of(" <"));
    state_ = name.empty() || name == "final" ? State::answer : State::thought;
    naming_ = false;
  } else if (token == end_) {
    state_ = State::between;
  } else if (state_ == State::answer || state_ == State::thought) {
    return state_ == State::answer ? Part::answer : Part::thought;
  } else if (naming_) {
    name_ += tokenizer_->bytes_of(token);
  }
  return Part::mark;
}

bool Thoughts::is_blank(TokenId token) const {
  return tokenizer_->is_special(token) ||
         tokenizer_->bytes_of(token).find_first_not_of(kThoughtBlanks) == std::string_view::npos;
}

}  // namespace lode
