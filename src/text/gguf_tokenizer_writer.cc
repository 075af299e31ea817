// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json as a GGUF file's metadata: byte-level BPE, or BPE over characters with bytes for what it lacks.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "text/bpe.h"
#include "text/gguf_cutting.h"
#include "text/gguf_tokenizer.h"
#include "text/pretokenizer.h"
#include "text/utf8.h"

namespace lode {

namespace {

/// As cuttings() spells it: some tokenizer.json have line ends themselves, or a backslash in front of a quote.
std::string spelled_alike(std::string regex) {
  using Spelling = std::pair<std::string_view, std::string_view>;
  for (const auto& [theirs, ours] : {Spelling{"\r", R"(\r)"}, {"\n", R"(\n)"}, {R"(\")", R"(")"}})
    for (std::size_t at = 0; (at = regex.find(theirs, at)) != std::string::npos; at += ours.size())
      regex.replace(at, theirs.size(), ours);
  return regex;
}

/// What a tokenizer.json says of cutting texts.
struct Cuts {
  std::vector<std::string> steps;
  bool byte_level = false;
};

void read_cuts(const Json& step, std::string_view where, Cuts& cuts) {
  if (!step.is_object()) return;
  const std::string type = json_string(step, "type", where);
  if (type == "Sequence") {
    for (const Json& part : json_member(step, "pretokenizers")) read_cuts(part, where, cuts);
  } else if (type == "Digits") {
    const bool each = json_has(step, "individual_digits") && json_bool(step, "individual_digits", where);
    cuts.steps.emplace_back(each ? kCutDigit : R"(\p{N}+)");
  } else if (type == "Split" && json_has(json_member(step, "pattern"), "Regex")) {
    cuts.steps.push_back(spelled_alike(json_string(json_member(step, "pattern"), "Regex", where)));
  } else if (type == "ByteLevel") {
    cuts.byte_level = true;
    if (!json_has(step, "use_regex") || json_bool(step, "use_regex", where))
      cuts.steps.emplace_back(kGpt2Cut);
  } else {
    cuts.steps.emplace_back();  // what no file has a name for
  }
}

bool flag(const Json& json, const char* key, std::string_view where) {
  return json_has(json, key) && json_bool(json, key, where);
}

std::string_view cutting_name(const Json& tokenizer, std::string_view where) {
  Cuts cuts;
  read_cuts(json_member(tokenizer, "pre_tokenizer"), where, cuts);
  const bool nfc = json_member(tokenizer, "normalizer").is_object() &&
                   json_string(tokenizer["normalizer"], "type", where) == "NFC";
  const bool whole = flag(json_member(tokenizer, "model"), "ignore_merges", where);
  for (const Cutting& c : cuttings()) {
    if (cuts.byte_level && std::ranges::equal(cuts.steps, std::span(c.steps).first(c.count())) &&
        c.nfc == nfc && c.whole_words == whole)
      return c.name;
  }
  throw InputError(
      fmt::format("{}: 'pre_tokenizer': expected byte-level BPE that cuts texts in a way that "
                  "GGUF files have a name for, or BPE with 'byte_fallback', found another",
                  where));
}

/// Whether texts begin with a special token, and with which.
std::optional<std::string> first_token(const Json& tokenizer, std::string_view where) {
  const Json* processor = &json_member(tokenizer, "post_processor");
  if (const Json& parts = json_member(*processor, "processors"); parts.is_array())
    for (const Json& part : parts)
      if (json_has(part, "single")) processor = &part;
  const Json& single = json_member(*processor, "single");
  if (!single.is_array() || single.empty() || !json_has(single[0], "SpecialToken")) return std::nullopt;
  return json_string(single[0]["SpecialToken"], "id", where);
}

/// Tokens by id with what kind each is.
struct Tokens {
  std::vector<std::string> texts;
  std::vector<TokenKind> kinds;

  void put(std::int64_t id, const std::string& text, TokenKind kind, std::string_view where) {
    if (id < 0 || id >= std::ssize(texts))
      throw InputError(fmt::format("{}: expected ids below the model's vocabulary of {}, found {}", where,
                                   texts.size(), id));
    texts[static_cast<std::size_t>(id)] = text;
    kinds[static_cast<std::size_t>(id)] = kind;
  }
};

Tokens read_tokens(const Json& tokenizer, std::int64_t vocab, std::string_view where) {
  Tokens t;
  for (std::int64_t i = 0; i < vocab; ++i) t.texts.push_back(fmt::format("[PAD{}]", i));
  t.kinds.assign(t.texts.size(), TokenKind::unused);
  const Json& known = json_member(json_member(tokenizer, "model"), "vocab");
  for (const auto& [text, id] : known.items()) t.put(id.get<std::int64_t>(), text, TokenKind::normal, where);
  for (const Json& added : json_member(tokenizer, "added_tokens")) {
    const std::string text = json_string(added, "content", where);
    const bool special = json_bool(added, "special", where);
    // Texts have blanks, not their signs: such tokens come of merges alone.
    if (!special && known.contains(text) && text.find(kSentencePieceBlank) != std::string::npos) continue;
    t.put(json_int(added, "id", where, 0, vocab - 1), text,
          special ? TokenKind::control : TokenKind::user_defined, where);
  }
  return t;
}

using Merge = std::pair<std::string, std::string>;

std::vector<Merge> merges_of(const Json& model, std::string_view where) {
  std::vector<Merge> merges;
  for (const Json& merge : json_member(model, "merges")) {
    Merge parts;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
      parts = {merge[0].get<std::string>(), merge[1].get<std::string>()};
    else if (const std::string text = merge.is_string() ? merge.get<std::string>() : "";
             text.find(' ') != std::string::npos)
      parts = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
    else
      throw InputError(
          fmt::format("{}: 'merges': expected pairs of texts, found {}", where, merge.type_name()));
    if (parts.first.find(' ') != std::string::npos || parts.second.find(' ') != std::string::npos)
      throw InputError(
          fmt::format("{}: 'merges': expected texts without blanks, which GGUF files cannot hold, "
                      "found '{}' and '{}'",
                      where, excerpt(parts.first), excerpt(parts.second)));
    merges.push_back(std::move(parts));
  }
  return merges;
}

void add_merges(std::span<const Merge> merges, GgufWriter& to) {
  std::vector<std::string> texts;
  for (const auto& [left, right] : merges) texts.push_back(left + " " + right);
  to.add_texts("tokenizer.ggml.merges", texts);
}

void add_tokens(const Tokens& tokens, GgufWriter& to) {
  std::vector<std::int32_t> kinds;
  for (const TokenKind kind : tokens.kinds) kinds.push_back(static_cast<std::int32_t>(kind));
  to.add_texts("tokenizer.ggml.tokens", tokens.texts);
  to.add_i32s("tokenizer.ggml.token_type", kinds);
}

/// What added tokens do to the text around them.
void add_token_flags(const Json& tokenizer, std::string_view where, GgufWriter& to) {
  for (const auto& [field, key] : kTokenFlags) {
    std::vector<std::int32_t> ids;
    for (const Json& added : json_member(tokenizer, "added_tokens"))
      if (flag(added, field, where)) ids.push_back(added["id"].get<std::int32_t>());
    if (!ids.empty()) to.add_i32s(key, ids);
  }
}

void add_byte_level(const Json& tokenizer, const Tokens& tokens, std::string_view where, GgufWriter& to) {
  to.add("tokenizer.ggml.model", std::string_view("gpt2"));
  to.add("tokenizer.ggml.pre", cutting_name(tokenizer, where));
  add_tokens(tokens, to);
  add_merges(merges_of(json_member(tokenizer, "model"), where), to);
}

// ---- BPE over characters, as SentencePiece has it. ------------------------------------------------------------

/// How blanks become SentencePiece's sign, and where one is put in front.
struct Blanks {
  bool replaced = false, prefix = false, cut = false;
  std::string scheme;  ///< of Metaspace; empty: before every stretch between special tokens
};

[[noreturn]] void refuse_step(const char* key, std::string_view where) {
  throw InputError(
      fmt::format("{}: '{}': expected blanks that become U+2581, perhaps with one in front, and no "
                  "other step: GGUF files have no words for one",
                  where, key));
}

void read_normalizer(const Json& step, std::string_view where, Blanks& blanks) {
  if (step.is_null()) return;
  const std::string type = json_string(step, "type", where);
  if (type == "Sequence") {
    for (const Json& part : json_member(step, "normalizers")) read_normalizer(part, where, blanks);
  } else if (type == "Prepend" && json_string(step, "prepend", where) == kSentencePieceBlank) {
    blanks.prefix = true;
  } else if (type == "Replace" && json_member(step, "pattern") == Json{{"String", " "}} &&
             json_string(step, "content", where) == kSentencePieceBlank) {
    blanks.replaced = true;
  } else {
    refuse_step("normalizer", where);
  }
}

void read_pre_tokenizer(const Json& step, std::string_view where, Blanks& blanks) {
  if (step.is_null()) return;
  const std::string type = json_string(step, "type", where);
  // Gemma's, which finds none of the blanks that are replaced already.
  if (type == "Split" && json_member(step, "pattern") == Json{{"String", " "}} && blanks.replaced) return;
  if (type != "Metaspace" || json_string(step, "replacement", where) != kSentencePieceBlank || blanks.prefix)
    refuse_step("pre_tokenizer", where);
  const bool old = !json_has(step, "prepend_scheme");
  const bool wanted = !json_has(step, "add_prefix_space") || json_bool(step, "add_prefix_space", where);
  blanks.scheme = old ? (wanted ? "always" : "never") : json_string(step, "prepend_scheme", where);
  blanks.prefix = blanks.scheme != "never";
  blanks.cut = !json_has(step, "split") || json_bool(step, "split", where);
  blanks.replaced = true;
}

Blanks read_blanks(const Json& tokenizer, std::span<const Merge> merges, std::string_view where) {
  Blanks blanks;
  read_normalizer(json_member(tokenizer, "normalizer"), where, blanks);
  read_pre_tokenizer(json_member(tokenizer, "pre_tokenizer"), where, blanks);
  // Cutting in front of each blank changes nothing where no merge goes over one.
  const auto goes_over = [](const Merge& m) {
    return m.second.find(kSentencePieceBlank) != std::string::npos;
  };
  if (!blanks.replaced || (blanks.cut && std::any_of(merges.begin(), merges.end(), goes_over)))
    refuse_step("pre_tokenizer", where);
  return blanks;
}

/// Whether any two neighbours merge that together are a token, in the order of these tokens: what scores say.
class Scores {
 public:
  Scores(const Tokens& tokens, std::span<const Merge> merges) {
    for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
      if (tokens.kinds[i] == TokenKind::normal) ids_.emplace(tokens.texts[i], static_cast<TokenId>(i));
      if (tokens.kinds[i] == TokenKind::control) control_.insert(tokens.texts[i]);
    }
    scores_.assign(tokens.texts.size(), -static_cast<float>(merges.size()));  // of what nothing merges to
    made_.assign(tokens.texts.size(), false);
    say_all_ = read_merges(merges) && merges.size() < kExact && has_all_cuts();
  }
  bool say_all() const { return say_all_; }
  const std::vector<float>& numbers() const { return scores_; }

 private:
  static constexpr std::size_t kExact = 1 << 24;     // ranks as float32
  static constexpr std::size_t kLongestToken = 512;  // that readers look for cuts of

  /// False: merges of one token stand apart, so that it has no place among the others; or some make a control token,
  /// which has no score.
  bool read_merges(std::span<const Merge> merges) {
    TokenId last = -1;
    for (std::size_t rank = 0; rank < merges.size(); ++rank) {
      const std::string text = merges[rank].first + merges[rank].second;
      const auto both = ids_.find(text);
      if (control_.contains(text)) return false;
      if (both == ids_.end()) continue;  // of a token that texts are searched for before anything merges
      const auto id = static_cast<std::size_t>(both->second);
      if (made_[id] && last != both->second) return false;
      if (!made_[id]) scores_[id] = -static_cast<float>(rank);
      made_[id] = true;
      last = both->second;
      const auto left = ids_.find(merges[rank].first), right = ids_.find(merges[rank].second);
      if (left != ids_.end() && right != ids_.end())
        pairs_.insert(MergeTable::pair_of(left->second, right->second));
    }
    return true;
  }

  /// A character's token, or one that merges make.
  std::optional<TokenId> part(const std::string& text) const {
    const auto at = ids_.find(text);
    if (at == ids_.end()) return std::nullopt;
    const bool character = first_code_point(text).bytes == text.size();
    return character || made_[static_cast<std::size_t>(at->second)] ? std::optional(at->second)
                                                                    : std::nullopt;
  }

  bool has_all_cuts() const {
    for (const auto& [text, id] : ids_) {
      if (text.size() > kLongestToken) return false;
      for (std::size_t at = first_code_point(text).bytes; at < text.size();
           at += first_code_point(std::string_view(text).substr(at)).bytes) {
        const auto left = part(text.substr(0, at)), right = part(text.substr(at));
        if (left && right && !pairs_.contains(MergeTable::pair_of(*left, *right))) return false;
      }
    }
    return true;
  }

  std::unordered_map<std::string, TokenId> ids_;  // of normal tokens
  std::unordered_set<std::string> control_;       // texts of control tokens
  std::vector<float> scores_;
  std::vector<bool> made_;
  std::unordered_set<std::uint64_t> pairs_;
  bool say_all_ = false;
};

/// Byte tokens and the unknown one have kinds of their own. Returns the unknown one.
std::optional<TokenId> mark_kinds(const Json& model, Tokens& tokens, std::string_view where) {
  std::optional<TokenId> unknown;
  const std::string unknown_text =
      json_has(model, "unk_token") ? json_string(model, "unk_token", where) : std::string();
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
    const std::string& text = tokens.texts[i];
    unsigned value = 0;
    if (text.size() == 6 && text.starts_with("<0x") && text.ends_with('>') &&
        std::sscanf(text.c_str(), "<0x%02X>", &value) == 1) {
      tokens.kinds[i] = TokenKind::byte;
      ++bytes;
    } else if (!unknown_text.empty() && text == unknown_text) {
      tokens.kinds[i] = TokenKind::unknown;
      unknown = static_cast<TokenId>(i);
    }
  }
  if (unknown && bytes < 256 && !flag(model, "fuse_unk", where))
    throw InputError(fmt::format(
        "{}: 'fuse_unk': expected true, or tokens for all 256 bytes, found {} of them", where, bytes));
  return unknown;
}

void add_sentencepiece(const Json& tokenizer, Tokens& tokens, std::string_view where, GgufWriter& to) {
  const Json& model = json_member(tokenizer, "model");
  if (flag(model, "ignore_merges", where))
    throw InputError(
        fmt::format("{}: 'ignore_merges': expected false with 'byte_fallback', found true", where));
  const std::vector<Merge> merges = merges_of(model, where);
  const Blanks blanks = read_blanks(tokenizer, merges, where);
  const std::optional<TokenId> unknown = mark_kinds(model, tokens, where);
  const Scores scores(tokens, merges);
  to.add("tokenizer.ggml.model", std::string_view(scores.say_all() ? "llama" : "gemma4"));
  add_tokens(tokens, to);
  if (scores.say_all())
    to.add_f32s("tokenizer.ggml.scores", scores.numbers());
  else
    add_merges(merges, to);
  to.add("tokenizer.ggml.add_space_prefix", blanks.prefix);
  if (blanks.prefix && !blanks.scheme.empty()) to.add(kPrependScheme, blanks.scheme);
  if (unknown) to.add_u32("tokenizer.ggml.unknown_token_id", static_cast<std::uint32_t>(*unknown));
}

}  // namespace

void add_tokenizer(const Json& tokenizer, std::string_view where, std::int64_t vocab, GgufWriter& to,
                   std::span<const TokenId> bos) {
  Tokens tokens = read_tokens(tokenizer, vocab, where);
  if (flag(json_member(tokenizer, "model"), "byte_fallback", where))
    add_sentencepiece(tokenizer, tokens, where, to);
  else
    add_byte_level(tokenizer, tokens, where, to);
  add_token_flags(tokenizer, where, to);
  const std::optional<std::string> first = first_token(tokenizer, where);
  to.add("tokenizer.ggml.add_bos_token", first.has_value());
  if (!first && !bos.empty())
    to.add_u32("tokenizer.ggml.bos_token_id", static_cast<std::uint32_t>(bos.front()));
  if (!first) return;
  const auto at = std::find(tokens.texts.begin(), tokens.texts.end(), *first);
  if (at == tokens.texts.end())
    throw InputError(
        fmt::format("{}: 'post_processor': expected a known token, found '{}'", where, excerpt(*first)));
  to.add_u32("tokenizer.ggml.bos_token_id", static_cast<std::uint32_t>(at - tokens.texts.begin()));
}

}  // namespace lode
