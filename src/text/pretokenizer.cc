// SPDX-License-Identifier: Apache-2.0
// Follows the component types of Hugging Face's tokenizers: Sequence, Split, ByteLevel, Digits, Metaspace.
#include "text/pretokenizer.h"

#include <array>
#include <utility>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace lode {

namespace {

enum class Behavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

/// Goes over matches and the stretches between them and joins neighbours as `behavior` says.
class Joiner {
 public:
  Joiner(Behavior behavior, Piece piece, PieceSink out) : behavior_(behavior), piece_(piece), out_(out) {}

  void take(std::size_t begin, std::size_t end, bool match) {
    switch (behavior_) {
      case Behavior::isolated:
        return emit(begin, end);
      case Behavior::removed:
        return match ? void() : emit(begin, end);
      case Behavior::merged_with_previous:
        return hold(begin, end, match && !was_match_, match);
      case Behavior::merged_with_next:
        return hold(begin, end, !match && was_match_, match);
      case Behavior::contiguous:
        return hold(begin, end, match == was_match_, match);
    }
  }
  void finish() {
    if (held_) emit(begin_, end_);
  }

 private:
  void hold(std::size_t begin, std::size_t end, bool joins, bool match) {
    if (!(held_ && joins)) {
      finish();
      begin_ = begin;
    }
    end_ = end;
    held_ = true;
    was_match_ = match;
  }
  void emit(std::size_t begin, std::size_t end) {
    if (begin < end) out_({piece_.text.substr(begin, end - begin), piece_.at_start && begin == 0});
  }

  Behavior behavior_;
  Piece piece_;
  PieceSink out_;
  bool held_ = false, was_match_ = false;
  std::size_t begin_ = 0, end_ = 0;
};

class Split : public PreTokenizer::Step {
 public:
  Split(Regex regex, Behavior behavior, bool invert)
      : regex_(std::move(regex)), behavior_(behavior), invert_(invert) {}

  void cut(Piece piece, Arena&, PieceSink out) const override {
    Joiner joiner(behavior_, piece, out);
    Regex::Matches matches(regex_, piece.text);
    std::size_t done = 0;
    for (Regex::Range match; matches.next(match); done = match.end) {
      if (done != match.begin) joiner.take(done, match.begin, invert_);
      joiner.take(match.begin, match.end, !invert_);
    }
    if (done != piece.text.size()) joiner.take(done, piece.text.size(), invert_);
    joiner.finish();
  }

 private:
  Regex regex_;
  Behavior behavior_;
  bool invert_;
};

/// The part of ByteLevel that puts a blank in front.
class PrefixSpace : public PreTokenizer::Step {
 public:
  void cut(Piece piece, Arena& arena, PieceSink out) const override {
    if (!piece.text.starts_with(' ')) piece.text = arena.keep(" " + std::string(piece.text));
    out(piece);
  }
};

class Metaspace : public PreTokenizer::Step {
 public:
  enum class Prepend { always, first, never };
  Metaspace(std::string replacement, Prepend prepend, bool split)
      : replacement_(std::move(replacement)), prepend_(prepend), split_(split) {}

  void cut(Piece piece, Arena& arena, PieceSink out) const override {
    std::string text;
    text.reserve(piece.text.size() + replacement_.size());
    for (const char c : piece.text) {
      if (c == ' ') {
        text += replacement_;
      } else {
        text += c;
      }
    }
    const bool wanted = prepend_ == Prepend::always || (prepend_ == Prepend::first && piece.at_start);
    if (wanted && !text.starts_with(replacement_)) text.insert(0, replacement_);
    piece.text = arena.keep(std::move(text));
    if (!split_) return out(piece);
    Joiner joiner(Behavior::merged_with_next, piece, out);
    for (std::size_t at = 0, next = 0; at < piece.text.size(); at = next) {
      const bool match = piece.text.substr(at).starts_with(replacement_);
      next =
          match ? at + replacement_.size() : std::min(piece.text.find(replacement_, at), piece.text.size());
      joiner.take(at, next, match);
    }
    joiner.finish();
  }

 private:
  std::string replacement_;
  Prepend prepend_;
  bool split_;
};

Behavior behavior_of(const Json& json, const std::string& where) {
  constexpr std::array<std::pair<std::string_view, Behavior>, 5> kNames = {
      {{"Isolated", Behavior::isolated},
       {"Removed", Behavior::removed},
       {"MergedWithPrevious", Behavior::merged_with_previous},
       {"MergedWithNext", Behavior::merged_with_next},
       {"Contiguous", Behavior::contiguous}}};
  const std::string name = json_string(json, "behavior", where);
  for (const auto& [known, behavior] : kNames) {
    if (name == known) return behavior;
  }
  throw InputError(where +
                   ": 'behavior': expected Isolated, Removed, MergedWithPrevious, MergedWithNext or "
                   "Contiguous, found '" +
                   excerpt(name) + "'");
}

bool flag(const Json& json, const char* key, const std::string& where, bool otherwise) {
  return json_has(json, key) ? json_bool(json, key, where) : otherwise;
}

std::unique_ptr<PreTokenizer::Step> metaspace(const Json& json, const std::string& where) {
  const std::string replacement = json_string(json, "replacement", where);
  if (replacement.empty() || first_code_point(replacement).bytes != replacement.size()) {
    throw InputError(where + ": 'replacement': expected one character, found '" + excerpt(replacement) + "'");
  }
  auto prepend =
      flag(json, "add_prefix_space", where, true) ? Metaspace::Prepend::always : Metaspace::Prepend::never;
  if (json_has(json, "prepend_scheme")) {
    const std::string scheme = json_string(json, "prepend_scheme", where);
    if (scheme != "always" && scheme != "first" && scheme != "never") {
      throw InputError(where + ": 'prepend_scheme': expected always, first or never, found '" +
                       excerpt(scheme) + "'");
    }
    prepend = scheme == "always"  ? Metaspace::Prepend::always
              : scheme == "first" ? Metaspace::Prepend::first
                                  : Metaspace::Prepend::never;
  }
  return std::make_unique<Metaspace>(replacement, prepend, flag(json, "split", where, true));
}

}  // namespace

void Arena::allow_for(std::size_t text_bytes) {
  text_bytes_ += text_bytes;
  most_ += max_growth(text_bytes);
}

std::string_view Arena::keep(std::string text) {
  bytes_ += text.size();
  if (bytes_ > most_)
    throw InputError("tokenizer.json: pre_tokenizer: makes a text of " + std::to_string(text_bytes_) +
                     " bytes more than 64 times as long");
  return strings_.emplace_back(std::move(text));
}

PreTokenizer::PreTokenizer(const Json& json, const std::string& where) {
  if (!json.is_null()) add(json, where);
}

void PreTokenizer::add(const Json& json, const std::string& where) {
  const std::string type = json_string(json, "type", where);
  if (byte_level_) {
    throw InputError(where + ": expected ByteLevel to come last, found " + excerpt(type) + " after it");
  }
  if (steps_.size() >= kMaxSteps) {
    throw InputError(where + ": expected at most " + std::to_string(kMaxSteps) + " components, found more");
  }
  if (type == "Sequence") {
    if (!json_has(json, "pretokenizers") || !json["pretokenizers"].is_array()) {
      throw InputError(where + ": expected a Sequence to have an array 'pretokenizers'");
    }
    for (const Json& part : json["pretokenizers"]) add(part, where);
  } else if (type == "Split") {
    add_split(json, where + ": Split");
  } else if (type == "ByteLevel") {
    add_byte_level(json, where + ": ByteLevel");
  } else if (type == "Digits") {
    const bool individual = flag(json, "individual_digits", where + ": Digits", false);
    steps_.push_back(std::make_unique<Split>(Regex(individual ? R"(\p{N})" : R"(\p{N}+)", where),
                                             Behavior::isolated, false));
  } else if (type == "Metaspace") {
    steps_.push_back(metaspace(json, where + ": Metaspace"));
  } else {
    throw UnreadableError(where + ": expected Sequence, Split, ByteLevel, Digits or Metaspace, found '" +
                          excerpt(type) + "'");
  }
}

void PreTokenizer::add_split(const Json& json, const std::string& where) {
  const Json& pattern = json_member(json, "pattern");
  const bool literal = json_has(pattern, "String");
  const std::string text = json_string(pattern, literal ? "String" : "Regex", where + ": pattern");
  steps_.push_back(std::make_unique<Split>(literal ? Regex::literal(text, where) : Regex(text, where),
                                           behavior_of(json, where), flag(json, "invert", where, false)));
}

void PreTokenizer::add_byte_level(const Json& json, const std::string& where) {
  if (flag(json, "add_prefix_space", where, true)) steps_.push_back(std::make_unique<PrefixSpace>());
  if (flag(json, "use_regex", where, true)) {
    steps_.push_back(std::make_unique<Split>(Regex(kGpt2Cut, where), Behavior::isolated, false));
  }
  byte_level_ = true;
}

void PreTokenizer::cut_from(std::size_t step, Piece piece, Arena& arena, PieceSink out) const {
  if (step == steps_.size()) return out(piece);
  const auto next = [&](Piece part) { cut_from(step + 1, part, arena, out); };
  steps_[step]->cut(piece, arena, next);
}

}  // namespace lode
