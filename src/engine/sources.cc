// SPDX-License-Identifier: Apache-2.0
// From attention mass to the passages that an answer rests on.
#include "lodestone/sources.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/context.h"
#include "engine/sentences.h"

namespace lode {

namespace {

constexpr std::size_t kSinkTokens = 4;        // StreamingLLM: the first four tokens serve as attention sinks
constexpr std::size_t kLongestPassage = 600;  // bytes shown of one sentence
constexpr std::int64_t kNeutralTokens = 8;    // of the answer to a question that asks for nothing

double total_of(const std::vector<double>& mass) {
  return std::max(1e-30, std::accumulate(mass.begin(), mass.end(), 0.0));
}

/// Shares of the sharp attention, [tokens of the indexed text], without what a neutral question attends to.
std::vector<double> excess_of(const Context& context, const SourceMass& answer,
                              const std::vector<double>& neutral) {
  const auto tokens = static_cast<std::size_t>(context.indexed_tokens());
  const double total = total_of(answer.mass);
  std::vector<double> excess(tokens, 0.0);
  for (std::size_t i = kSinkTokens; i < std::min(tokens, answer.mass.size()); ++i)
    excess[i] = std::max(0.0, answer.mass[i] / total - (i < neutral.size() ? neutral[i] : 0.0));
  return excess;
}

struct Weighed {
  Sentence sentence;
  double weight = 0;
  std::size_t token_begin = 0, token_end = 0, peak = 0;  // tokens
};

/// Sentences with the tokens that begin in them and their weight.
std::vector<Weighed> weigh(const std::vector<Sentence>& sentences, const std::vector<std::size_t>& offsets,
                           const std::vector<double>& excess) {
  std::vector<Weighed> weighed;
  std::size_t token = 0;
  for (const Sentence& sentence : sentences) {
    Weighed w = {.sentence = sentence};
    while (token < excess.size() && offsets[token + 1] <= sentence.begin) ++token;
    w.token_begin = w.peak = token;
    for (; token < excess.size() && offsets[token] < sentence.end; ++token) {
      w.weight += excess[token];
      if (excess[token] > excess[w.peak]) w.peak = token;
    }
    w.token_end = token;
    weighed.push_back(w);
  }
  return weighed;
}

bool inside_character(std::string_view text, std::size_t at) {
  return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
}

/// Cuts a long sentence to the words around its heaviest token.
void shorten(Weighed& w, std::string_view text, const std::vector<std::size_t>& offsets) {
  if (w.sentence.end - w.sentence.begin <= kLongestPassage) return;
  const std::size_t peak = offsets[w.peak];
  std::size_t begin = std::clamp(peak - std::min(peak, kLongestPassage / 2), w.sentence.begin,
                                 w.sentence.end - kLongestPassage);
  std::size_t end = begin + kLongestPassage;
  const std::size_t blank = text.substr(begin, kLongestPassage / 8).find(' ');
  if (begin > w.sentence.begin && blank != std::string_view::npos) begin += blank + 1;
  const std::size_t last = text.substr(0, end).rfind(' ');
  if (end < w.sentence.end && last != std::string_view::npos && last + kLongestPassage / 8 > end) end = last;
  while (inside_character(text, begin)) ++begin;
  while (inside_character(text, end)) ++end;
  w.sentence = {begin, std::min(end, w.sentence.end)};
  while (w.token_begin + 1 < w.token_end && offsets[w.token_begin + 1] <= begin) ++w.token_begin;
  while (w.token_end > w.token_begin + 1 && offsets[w.token_end - 1] >= end) --w.token_end;
}

Citation citation_of(const SourceText& source, const Weighed& w) {
  const std::string_view text = source.text;
  Citation c = {.cited_text = std::string(text.substr(w.sentence.begin, w.sentence.end - w.sentence.begin)),
                .weight = w.weight,
                .token_begin = static_cast<std::int64_t>(w.token_begin),
                .token_end = static_cast<std::int64_t>(w.token_end)};
  const Place begin = place_of(source, w.sentence.begin), end = place_of(source, w.sentence.end);
  const Place last = place_of(source, w.sentence.end - 1);
  if (begin.file != nullptr) c.document_title = begin.file->path;
  if (begin.page > 0) {
    c.start_page = begin.page;
    c.end_page = std::max(begin.page, last.page) + 1;
  }
  c.line = begin.line;
  c.start_char = begin.character;
  c.end_char = end.file == begin.file ? end.character : last.character + 1;
  return c;
}

/// Neighbours are one passage, as heavy as both.
std::vector<Weighed> merged(std::vector<Weighed> chosen, std::string_view text) {
  std::sort(chosen.begin(), chosen.end(),
            [](const Weighed& a, const Weighed& b) { return a.sentence.begin < b.sentence.begin; });
  std::vector<Weighed> passages;
  for (const Weighed& w : chosen) {
    const bool next = !passages.empty() && w.sentence.begin - passages.back().sentence.end <= 1 &&
                      text.substr(passages.back().sentence.end, 1) == " ";
    if (!next) {
      passages.push_back(w);
      continue;
    }
    Weighed& before = passages.back();
    before.weight += w.weight;
    before.sentence.end = w.sentence.end;
    before.token_end = w.token_end;
  }
  return passages;
}

}  // namespace

std::vector<Citation> cite(const Context& context, const SourceMass& answer,
                           const std::vector<double>& neutral, std::size_t count) {
  const SourceText& source = source_of(context);
  const std::vector<double> excess = excess_of(context, answer, neutral);
  const std::vector<std::size_t> offsets = token_offsets(context);
  std::vector<Weighed> weighed = weigh(sentences_of(source), offsets, excess);
  double total = 0;
  for (const Weighed& w : weighed) total += w.weight;
  const auto heavier = [](const Weighed& a, const Weighed& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token_begin < b.token_begin;
  };
  count = std::min(count, weighed.size());
  std::partial_sort(weighed.begin(), weighed.begin() + static_cast<std::ptrdiff_t>(count), weighed.end(),
                    heavier);
  weighed.resize(count);
  std::erase_if(weighed, [](const Weighed& w) { return w.weight <= 0; });
  for (Weighed& w : weighed) {
    w.weight /= total;
    shorten(w, source.text, offsets);
  }
  weighed = merged(std::move(weighed), source.text);
  std::sort(weighed.begin(), weighed.end(), heavier);
  std::vector<Citation> citations;
  for (const Weighed& w : weighed) citations.push_back(citation_of(source, w));
  return citations;
}

SourceFinder::SourceFinder(Context& context, std::vector<TokenId> neutral_prompt)
    : SourceFinder(context, std::move(neutral_prompt),
                   [&context](const std::vector<TokenId>& prompt, MethodId method, std::int64_t tokens) {
                     const std::int64_t indexed = context.indexed_tokens();
                     SourceMass mass;
                     context.generate(prompt, method, {.max_new_tokens = tokens}, &mass);
                     context.roll_back(indexed);
                     return mass;
                   }) {}

SourceFinder::SourceFinder(const Context& context, std::vector<TokenId> neutral_prompt, Ask ask)
    : context_(context), neutral_prompt_(std::move(neutral_prompt)), ask_(std::move(ask)) {}

const std::vector<double>& SourceFinder::neutral(MethodId method) {
  const auto [at, fresh] = neutral_.try_emplace(method);
  if (!fresh) return at->second;
  const std::int64_t indexed = context_.indexed_tokens();
  const SourceMass mass = ask_(neutral_prompt_, method, kNeutralTokens);
  const double total = total_of(mass.mass);
  at->second.assign(mass.mass.begin(), mass.mass.begin() + indexed);
  for (double& m : at->second) m /= total;
  return at->second;
}

std::vector<Citation> SourceFinder::find(const SourceMass& answer, MethodId method, std::size_t count) {
  const bool room = context_.tokens() + std::ssize(neutral_prompt_) + 1 <= context_.options().max_tokens;
  static const std::vector<double> kNothing;
  const bool ask = room && !neutral_prompt_.empty();
  return cite(context_, answer, ask ? neutral(method) : kNothing, count);
}

}  // namespace lode
