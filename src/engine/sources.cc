// SPDX-License-Identifier: Apache-2.0
#include "engine/sources.h"

#include <algorithm>
#include <utility>

namespace lode {

namespace {

constexpr std::int64_t kSinkTokens = 4;       // StreamingLLM: the first four tokens serve as attention sinks
constexpr std::int64_t kLongestPassage = 48;  // tokens shown of one sentence

/// True when a sentence or line ends with this token.
bool ends_sentence(std::string_view bytes) {
  return bytes.find('\n') != std::string_view::npos || bytes.ends_with('.') || bytes.ends_with('!') ||
         bytes.ends_with('?');
}

std::vector<Passage> sentences_of(const Context& context) {
  const Tokenizer& tokenizer = context.model().tokenizer();
  const auto ids = context.token_ids().first(static_cast<std::size_t>(context.indexed_tokens()));
  std::vector<Passage> sentences;
  std::int64_t begin = kSinkTokens;
  bool blank = true;  // breaks between paragraphs belong to the sentence after them
  for (std::int64_t i = kSinkTokens; i < context.indexed_tokens(); ++i) {
    const bool last = i + 1 == context.indexed_tokens();
    const std::string_view bytes = tokenizer.bytes_of(ids[static_cast<std::size_t>(i)]);
    blank = blank && bytes.find_first_not_of(" \t\r\n") == std::string_view::npos;
    if (!last && (blank || !ends_sentence(bytes))) continue;
    if (blank && !sentences.empty()) {  // nothing comes after them
      sentences.back().token_end = i + 1;
      continue;
    }
    sentences.push_back({.token_begin = begin, .token_end = i + 1, .weight = 0, .text = {}});
    begin = i + 1;
    blank = true;
  }
  return sentences;
}

/// True when a token goes on with a character that one before it began.
bool goes_on(const Context& context, std::int64_t token) {
  const TokenId id = context.token_ids()[static_cast<std::size_t>(token)];
  const std::string_view bytes = context.model().tokenizer().bytes_of(id);
  return !bytes.empty() && (static_cast<unsigned char>(bytes.front()) & 0xc0) == 0x80;
}

/// Cuts a long sentence to the stretch around its heaviest token, between characters.
void shorten(Passage& sentence, const Context& context, const SourceMass& sources) {
  if (sentence.token_end - sentence.token_begin <= kLongestPassage) return;
  const auto first = sources.mass.begin();
  const auto peak = std::max_element(first + sentence.token_begin, first + sentence.token_end) - first;
  sentence.token_begin =
      std::clamp(peak - kLongestPassage / 2, sentence.token_begin, sentence.token_end - kLongestPassage);
  const std::int64_t last = std::exchange(sentence.token_end, sentence.token_begin + kLongestPassage);
  while (sentence.token_begin < sentence.token_end && goes_on(context, sentence.token_begin))
    ++sentence.token_begin;
  while (sentence.token_end < last && goes_on(context, sentence.token_end)) ++sentence.token_end;
}

}  // namespace

std::vector<Passage> top_passages(const Context& context, const SourceMass& sources, std::size_t count) {
  std::vector<Passage> sentences = sentences_of(context);
  double total = 0;
  for (Passage& sentence : sentences) {
    for (std::int64_t i = sentence.token_begin; i < sentence.token_end; ++i) {
      sentence.weight += sources.mass[static_cast<std::size_t>(i)];
    }
    total += sentence.weight;
  }
  const auto heavier = [](const Passage& a, const Passage& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token_begin < b.token_begin;
  };
  count = std::min(count, sentences.size());
  std::partial_sort(sentences.begin(), sentences.begin() + static_cast<std::ptrdiff_t>(count),
                    sentences.end(), heavier);
  sentences.resize(count);
  std::erase_if(sentences, [](const Passage& p) { return p.weight <= 0; });
  for (Passage& sentence : sentences) {
    sentence.weight /= total;
    shorten(sentence, context, sources);
    const auto ids =
        context.token_ids().subspan(static_cast<std::size_t>(sentence.token_begin),
                                    static_cast<std::size_t>(sentence.token_end - sentence.token_begin));
    sentence.text = context.model().tokenizer().decode(ids);
  }
  return sentences;
}

}  // namespace lode
