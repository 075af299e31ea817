// SPDX-License-Identifier: Apache-2.0
#include "text/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/utf8.h"

namespace lode {

namespace {

constexpr std::size_t kMaxNodes = 4 << 20;  // about 300 MB

/// White_Space of Unicode.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

/// \w of UTS 18, but for letters' look-alikes that Unicode calls Other_Alphabetic symbols.
bool is_word(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Circled and squared letters, and the joiners.
      return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
             (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189) || c == 0x200c || c == 0x200d;
  }
}

bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) {
  return (begin == 0 || !is_word(last_code_point(text.substr(0, begin)).value)) &&
         (end == text.size() || !is_word(first_code_point(text.substr(end)).value));
}

}  // namespace

StringFinder::StringFinder() : nodes_(1) {}

const std::pair<unsigned char, std::uint32_t>* StringFinder::child(std::uint32_t node,
                                                                   unsigned char byte) const {
  const auto& children = nodes_[node].children;
  const auto at = std::lower_bound(children.begin(), children.end(), byte,
                                   [](const auto& entry, unsigned char b) { return entry.first < b; });
  return at == children.end() || at->first != byte ? nullptr : &*at;
}

void StringFinder::add(std::string_view text, std::size_t value) {
  if (text.empty()) return;
  begins_[static_cast<unsigned char>(text[0])] = true;
  std::uint32_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (const auto* known = child(node, byte)) {
      node = known->second;
      continue;
    }
    const auto fresh = static_cast<std::uint32_t>(nodes_.size());
    nodes_.emplace_back();
    auto& children = nodes_[node].children;
    children.insert(std::upper_bound(children.begin(), children.end(), std::pair(byte, fresh)),
                    {byte, fresh});
    node = fresh;
  }
  // Of equal strings the first counts.
  if (nodes_[node].value == SIZE_MAX) nodes_[node].value = value;
}

bool StringFinder::next(std::string_view text, std::size_t from, Match& match) const {
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<unsigned char>(text[begin])]) continue;
    bool found = false;
    std::uint32_t node = 0;
    for (std::size_t at = begin; at < text.size(); ++at) {
      const auto* step = child(node, static_cast<unsigned char>(text[at]));
      if (step == nullptr) break;
      node = step->second;
      if (nodes_[node].value == SIZE_MAX) continue;
      match = {begin, at + 1, nodes_[node].value};
      found = true;
    }
    if (found) return true;
  }
  return false;
}

AddedTokens::AddedTokens(const Json& json, const Bpe& bpe, const Normalizer& normalizer,
                         const std::string& where) {
  if (json.is_null()) return;
  if (!json.is_array()) throw InputError(where + ": expected an array, found " + json.type_name());
  for (const Json& token : json) add(token, bpe, where);
  // Specials come first, as in the reference; it matters for equal strings only.
  for (const bool special : {true, false}) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const AddedToken& token = tokens_[i];
      if (token.special != special) continue;
      if (token.normalized) {
        normalized_.add(normalizer.apply(token.text), i);
      } else {
        raw_.add(token.text, i);
      }
      if (raw_.nodes() + normalized_.nodes() <= kMaxNodes) continue;
      throw InputError(where + ": expected at most " + std::to_string(kMaxNodes) +
                       " bytes of texts in all, found more");
    }
  }
}

void AddedTokens::add(const Json& json, const Bpe& bpe, const std::string& where) {
  const auto flag = [&](const char* key, bool otherwise) {
    return json_has(json, key) ? json_bool(json, key, where) : otherwise;
  };
  AddedToken token{};
  token.id = static_cast<TokenId>(json_int(json, "id", where, 0, Bpe::kMaxTokens - 1));
  token.text = json_string(json, "content", where);
  token.special = flag("special", false);
  token.lstrip = flag("lstrip", false);
  token.rstrip = flag("rstrip", false);
  token.single_word = flag("single_word", false);
  token.normalized = flag("normalized", !token.special);
  const std::string id = std::to_string(token.id);
  if (token.text.empty() || token.text.size() > StringFinder::kMaxBytes) {
    throw InputError(where + ": token " + id + ": expected a content of 1 to " +
                     std::to_string(StringFinder::kMaxBytes) + " bytes, found " +
                     std::to_string(token.text.size()));
  }
  const auto known = bpe.find(token.text);
  const auto taken = bpe.text_of(token.id);
  if ((known && *known != token.id) || (taken && *taken != token.text)) {
    throw InputError(where + ": token " + id + ": '" + excerpt(token.text) +
                     "' is at odds with the vocabulary, which has " +
                     (known ? "it as " + std::to_string(*known) : "'" + excerpt(*taken) + "' there"));
  }
  const auto [at, fresh] = by_id_.emplace(token.id, tokens_.size());
  if (!fresh) {
    if (tokens_[at->second].text == token.text) return;
    throw InputError(where + ": '" + excerpt(token.text) + "' and '" + excerpt(tokens_[at->second].text) +
                     "' have the same id " + id);
  }
  tokens_.push_back(std::move(token));
}

void AddedTokens::cut(std::string_view text, Stage stage, bool specials,
                      std::vector<Segment>& segments) const {
  const StringFinder& finder = stage == Stage::before_normalizer ? raw_ : normalized_;
  std::size_t done = 0, spaces_end = 0;  // a run of blanks is walked over once, however many tokens are in it
  StringFinder::Match match{};
  for (std::size_t from = 0; finder.next(text, from, match); from = match.end) {
    const AddedToken& token = tokens_[match.value];
    // What is passed over here is not searched again: the reference does the same.
    if (token.special && !specials) continue;
    if (token.single_word && !stands_alone(text, match.begin, match.end)) continue;
    std::size_t begin = match.begin, end = match.end;
    if (token.lstrip) {
      while (begin > done) {
        const CodePoint c = last_code_point(text.substr(0, begin));
        if (!is_space(c.value)) break;
        begin -= c.bytes;
      }
      begin = std::max(begin, done);
    }
    if (token.rstrip) {
      end = std::max(end, spaces_end);
      while (end < text.size()) {
        const CodePoint c = first_code_point(text.substr(end));
        if (!is_space(c.value)) break;
        end += c.bytes;
      }
      spaces_end = end;
    }
    if (done < begin) segments.push_back({text.substr(done, begin - done), -1});
    segments.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) segments.push_back({text.substr(done), -1});
}

const AddedToken* AddedTokens::find(TokenId id) const {
  const auto at = by_id_.find(id);
  return at == by_id_.end() ? nullptr : &tokens_[at->second];
}

}  // namespace lode
