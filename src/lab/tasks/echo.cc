// SPDX-License-Identifier: Apache-2.0
// Text that needs its far past: what its last tokens say was said once, long before.
#include <algorithm>
#include <string>
#include <vector>

#include "lab/tasks/samples.h"
#include "lodestone/error.h"

namespace lode {

namespace {

std::string spaced(std::string text) {
  return text.insert(0, 1, ' ');
}

class EchoText {
 public:
  EchoText(std::uint64_t seed, const Language& language, const Haystack& haystack)
      : rng_(hash_seed(seed, crc32("echo"))),
        language_(language),
        entry_(language.family("echo")),
        haystack_(haystack) {}

  std::string make(std::int64_t tokens, std::int64_t distance, std::int64_t tail) {
    const TokenMeter& meter = haystack_.meter();
    const std::int64_t body = tokens - meter.prefix - tail;
    const std::int64_t early = body - distance;  // what comes back stands in the first `early` tokens
    if (early < 2 * tail) {
      throw InputError("echo: expected a text of at least " +
                       std::to_string(meter.prefix + distance + 3 * tail) +
                       " tokens, for passages come back after " + std::to_string(distance) +
                       " of them, found " + std::to_string(tokens));
    }
    introduce(static_cast<std::size_t>(tail / 60));
    std::int64_t of_facts = 0;
    for (const Name& name : names_) of_facts += meter.count(name.first);
    const Passage text = haystack_.cut(body - of_facts, rng_);
    std::string out = lay_out(text, early - of_facts);
    return out + cut_to(returns(tail + 64), tokens - meter.prefix - meter.count(out));
  }

 private:
  struct Name {
    std::string first, again;  // with the space before
  };

  void introduce(std::size_t count) {
    const Json& templates = entry_.at("names");
    for (std::size_t i = 0; i < count; ++i) {
      const Json& t = templates.at(i % templates.size());
      const std::string city = language_.word("city", rng_), place = language_.word("place", rng_),
                        person = language_.word("person", rng_), invented = language_.word("invented", rng_),
                        adjective = language_.word("adjective", rng_), noun = language_.word("noun", rng_);
      const Slots slots = {{"city", city},         {"place", place},         {"person", person},
                           {"invented", invented}, {"adjective", adjective}, {"noun", noun}};
      names_.push_back(
          {spaced(fill(t.at("first").get<std::string>(), slots)),
           spaced(fill(t.at("again").at(rng_.below(t.at("again").size())).get<std::string>(), slots))});
    }
  }

  /// The passage with the names' introductions spread over its first `early` tokens; collects what may be
  /// quoted.
  std::string lay_out(const Passage& text, std::int64_t early) {
    std::string out;
    std::int64_t done = 0;
    std::size_t told = 0;
    std::string quote;  // whole sentences of one paragraph, growing
    for (const Passage::Piece& piece : text.pieces) {
      const double due =
          static_cast<double>(early) * static_cast<double>(told) / static_cast<double>(names_.size());
      if (piece.gap && told < names_.size() && static_cast<double>(done) >= due) {
        out += names_[told++].first;
        quote.clear();
      }
      out += piece.text;
      done += piece.tokens;
      quote =
          piece.gap && piece.text.find('\n') == std::string_view::npos ? quote + std::string(piece.text) : "";
      if (done < early && std::count(quote.begin(), quote.end(), ' ') >= 30) {
        quotes_.push_back(std::move(quote));
        quote.clear();
      }
    }
    return out;
  }

  /// At least `tokens` tokens of passages and names that come back, each once, in random order.
  std::string returns(std::int64_t tokens) {
    shuffle(quotes_, rng_);
    shuffle(names_, rng_);
    const auto leads = entry_.at("leads").get<std::vector<std::string>>();
    std::string out;
    for (std::size_t i = 0; haystack_.meter().count(out) < tokens; ++i) {
      if (i >= quotes_.size())
        throw InputError("echo: expected a haystack with sentences inside paragraphs, found too few");
      const std::string& lead = pick(leads, rng_);
      if (!lead.empty()) out += spaced(lead.substr(0, lead.find_last_not_of(' ') + 1));
      out += quotes_[i];
      if (i < names_.size()) out += names_[i].again;
    }
    return out;
  }

  /// The longest start that ends at a word and has at most `tokens` tokens.
  std::string cut_to(std::string text, std::int64_t tokens) const {
    while (haystack_.meter().count(text) > tokens) text.resize(text.rfind(' '));
    return text;
  }

  Rng rng_;
  const Language& language_;
  const Json& entry_;
  const Haystack& haystack_;
  std::vector<Name> names_;
  std::vector<std::string> quotes_;
};

}  // namespace

std::int64_t echo_distance(std::int64_t tokens) {
  constexpr std::int64_t kFewest = 3072;         // below, what comes back would not have stood far before
  constexpr std::int64_t kRoom = 4 * kEchoTail;  // for what comes back, and for where it stood
  if (tokens < kFewest) {
    throw InputError("echo: expected --tokens of at least " + std::to_string(kFewest) + ", found " +
                     std::to_string(tokens));
  }
  return tokens >= kEchoDistance + kRoom ? kEchoDistance : tokens / 3;
}

std::string make_echo_text(std::int64_t tokens, std::uint64_t seed, const Language& language,
                           const Haystack& haystack, std::int64_t distance, std::int64_t tail) {
  return EchoText(seed, language, haystack).make(tokens, distance, tail);
}

}  // namespace lode
