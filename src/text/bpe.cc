// SPDX-License-Identifier: Apache-2.0
// BPE after Sennrich et al. 2016, with the rules of Hugging Face's tokenizers: the merge of lowest rank
// first, the leftmost of equal ones; unknown characters as bytes, as the unknown token, or dropped.
#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstdio>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/byte_level.h"
#include "text/utf8.h"

namespace lode {

namespace {

constexpr std::size_t kMostIdsPerToken = 4, kFreeIds = 64 << 10;  // keep tables in proportion to the file
constexpr std::size_t kLongestMerged = 512;  // bytes of a token with a score: each of its cuts is looked up
constexpr std::size_t kShortWord = 32;       // symbols up to which looking at every pair beats a queue

bool flag(const Json& model, const char* key, const std::string& where) {
  return json_has(model, key) && json_bool(model, key, where);
}

/// "a b" or ["a", "b"].
std::pair<std::string_view, std::string_view> parts_of(const Json& merge, std::size_t rank,
                                                       const std::string& where) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const std::size_t blank = text.find(' ');
    if (blank != std::string_view::npos && text.find(' ', blank + 1) == std::string_view::npos) {
      return {text.substr(0, blank), text.substr(blank + 1)};
    }
  }
  throw InputError(where + ": merge " + std::to_string(rank) +
                   ": expected two tokens, as \"a b\" or [\"a\", \"b\"], found " +
                   excerpt(merge.dump(-1, ' ', false, Json::error_handler_t::replace)));
}

}  // namespace

MergeTable::MergeTable(std::size_t merges) : slots_(std::bit_ceil(2 * merges + 2)) {}

std::size_t MergeTable::slot_of(std::uint64_t pair) const {
  std::uint64_t hash = pair * 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
  std::size_t slot = (hash ^ hash >> 32) & (slots_.size() - 1);
  while (slots_[slot].pair != pair && slots_[slot].pair != kEmpty) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

void MergeTable::put(TokenId left, TokenId right, Merge merge) {
  const std::uint64_t pair = pair_of(left, right);
  slots_[slot_of(pair)] = {pair, merge};
}

MergeTable::Merge MergeTable::find(TokenId left, TokenId right) const {
  const std::uint64_t pair = pair_of(left, right);
  return slots_[slot_of(pair)].merge;
}

Bpe::Bpe(const Json& model, bool byte_level, const std::string& where)
    : byte_level_(byte_level), where_(where) {
  if (json_has(model, "type") && json_string(model, "type", where) != "BPE") {
    throw UnreadableError(where + ": expected BPE, found '" + excerpt(json_string(model, "type", where)) +
                          "'");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (json_has(model, key) && !json_string(model, key, where).empty()) {
      throw InputError(where + ": '" + key + "' is not supported, found '" +
                       excerpt(json_string(model, key, where)) + "'");
    }
  }
  if (json_has(model, "dropout") && json_number(model, "dropout", where, 0, 1) != 0) {
    throw InputError(where + ": 'dropout' is for training: expected 0 or null, found " +
                     model["dropout"].dump());
  }
  byte_fallback_ = flag(model, "byte_fallback", where);
  fuse_unknown_ = flag(model, "fuse_unk", where);
  ignore_merges_ = flag(model, "ignore_merges", where);
  read_vocab(model, where);
  if (json_has(model, "scores")) {
    read_scores(model["scores"], where);
  } else {
    read_merges(model, where);
  }
  index_units();
  index_meetings();
  if (json_has(model, "unk_token")) {
    unknown_text_ = json_string(model, "unk_token", where);
    unknown_ = find(*unknown_text_);
  }
}

void Bpe::read_vocab(const Json& model, const std::string& where) {
  if (!json_has(model, "vocab") || !model["vocab"].is_object() || model["vocab"].empty()) {
    throw InputError(where + ": expected an object 'vocab' that is not empty");
  }
  const Json& vocab = model["vocab"];
  TokenId size = 0;
  for (const auto& [text, id] : vocab.items()) {
    if (!id.is_number_integer() || id < 0 || id >= kMaxTokens) {
      throw InputError(where + ": vocab: '" + excerpt(text) + "': expected an id from 0 to " +
                       std::to_string(kMaxTokens - 1) + ", found " +
                       excerpt(id.dump(-1, ' ', false, Json::error_handler_t::replace)));
    }
    size = std::max(size, id.get<TokenId>() + 1);
  }
  if (static_cast<std::size_t>(size) > kMostIdsPerToken * vocab.size() + kFreeIds) {
    throw InputError(where + ": vocab: expected ids with few gaps, found " + std::to_string(vocab.size()) +
                     " tokens with ids up to " + std::to_string(size - 1));
  }
  texts_.resize(static_cast<std::size_t>(size));
  ids_.reserve(vocab.size());
  for (const auto& [text, id] : vocab.items()) {
    const auto at = id.get<std::size_t>();
    if (text_of(id.get<TokenId>())) {
      throw InputError(where + ": vocab: '" + excerpt(text) + "' and '" + excerpt(texts_[at]) +
                       "' have the same id " + std::to_string(at));
    }
    texts_[at] = text;
    if (text.empty()) empty_token_ = id.get<TokenId>();
    ids_.emplace(texts_[at], id.get<TokenId>());
  }
}

void Bpe::read_merges(const Json& model, const std::string& where) {
  if (!json_has(model, "merges") || !model["merges"].is_array()) {
    throw InputError(where + ": expected an array 'merges'");
  }
  const Json& merges = model["merges"];
  if (merges.size() > kMaxTokens) {
    throw InputError(where + ": expected at most " + std::to_string(kMaxTokens) + " merges, found " +
                     std::to_string(merges.size()));
  }
  merges_ = MergeTable(merges.size());
  const auto known = [&](std::string_view text, std::size_t rank) {
    const auto id = find(text);
    if (id) return *id;
    throw InputError(where + ": merge " + std::to_string(rank) + ": '" + excerpt(text) +
                     "' is not in the vocabulary");
  };
  std::string both;
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = parts_of(merges[rank], rank, where);
    const TokenId first = known(left, rank), second = known(right, rank);
    both.assign(left).append(right);
    merges_.put(first, second, {static_cast<std::uint32_t>(rank), known(both, rank)});
  }
}

/// SentencePiece's BPE: two neighbours merge when their texts together are a token, the one of highest score
/// first. Our own addition to tokenizer.json, for GGUF files: a score for each id, null for tokens that
/// nothing merges to.
void Bpe::read_scores(const Json& scores, const std::string& where) {
  if (!scores.is_array() || std::ssize(scores) != size())
    throw InputError(where + ": scores: expected one for each of " + std::to_string(size()) + " tokens");
  std::vector<std::pair<double, TokenId>> ranked;
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    if (!scores[i].is_number()) continue;
    if (texts_[i].size() > kLongestMerged)
      throw InputError(where + ": scores: expected tokens of at most " + std::to_string(kLongestMerged) +
                       " bytes, found one of " + std::to_string(texts_[i].size()));
    ranked.emplace_back(-scores[i].get<double>(), static_cast<TokenId>(i));
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::pair<std::uint64_t, MergeTable::Merge>> merges;
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < ranked.size(); ++i) {
    if (i > 0 && ranked[i].first != ranked[i - 1].first) ++rank;  // equal scores: the leftmost first
    const TokenId token = ranked[i].second;
    const std::string_view text = texts_[static_cast<std::size_t>(token)];
    for (std::size_t at = 0; at < text.size();) {
      if (at > 0) {
        const auto left = find(text.substr(0, at)), right = find(text.substr(at));
        if (left && right)
          merges.emplace_back(MergeTable::pair_of(*left, *right), MergeTable::Merge{rank, token});
      }
      at += first_code_point(text.substr(at)).bytes;
    }
  }
  merges_ = MergeTable(merges.size());
  for (const auto& [pair, merge] : merges)
    merges_.put(static_cast<TokenId>(pair >> 32), static_cast<TokenId>(pair), merge);
}

void Bpe::index_units() {
  byte_tokens_.fill(-1);
  for (unsigned byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    byte_tokens_[byte] = find(name).value_or(-1);
  }
  if (byte_level_) {
    units_.assign(256, -1);
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::string character;
      append_utf8(character, byte_to_character(static_cast<unsigned char>(byte)));
      units_[byte] = find(character).value_or(-1);
    }
  } else {
    for (const auto& [text, id] : ids_) {
      if (text.empty()) continue;
      const CodePoint c = first_code_point(text);
      if (c.bytes != text.size()) continue;
      if (units_.size() <= c.value) units_.resize(c.value + 1, -1);
      units_[c.value] = id;
    }
  }
  if (!byte_level_ || !ignore_merges_) return;
  for (const auto& [text, id] : ids_) {
    if (auto bytes = bytes_of_characters(text)) whole_.emplace(std::move(*bytes), id);
  }
}

/// The unit of the first or last character of a token, or -1 when that is none.
TokenId Bpe::unit_at_end(TokenId token, bool back) const {
  const std::string& text = texts_[static_cast<std::size_t>(token)];
  if (text.empty()) return -1;
  const char32_t character = (back ? last_code_point(text) : first_code_point(text)).value;
  if (!byte_level_) return character < units_.size() ? units_[character] : -1;
  const auto byte = character_to_byte(character);
  return byte ? units_[*byte] : -1;
}

void Bpe::index_meetings() {
  std::vector<std::uint64_t> meetings;
  meetings.reserve(merges_.slots() / 2);
  merges_.for_each([&](TokenId left, TokenId right) {
    const TokenId last = unit_at_end(left, true), first = unit_at_end(right, false);
    if (last >= 0 && first >= 0) meetings.push_back(MergeTable::pair_of(last, first));
  });
  std::sort(meetings.begin(), meetings.end());
  meetings.erase(std::unique(meetings.begin(), meetings.end()), meetings.end());
  meetings_ = MergeTable(meetings.size());
  for (const std::uint64_t pair : meetings) {
    meetings_.put(static_cast<TokenId>(pair >> 32), static_cast<TokenId>(pair), {0, 0});
  }
}

std::optional<std::string_view> Bpe::text_of(TokenId token) const {
  if (token < 0 || token >= size()) return std::nullopt;
  const std::string& text = texts_[static_cast<std::size_t>(token)];
  if (text.empty() && token != empty_token_) return std::nullopt;
  return text;
}

std::optional<TokenId> Bpe::find(std::string_view text) const {
  const auto at = ids_.find(text);
  return at == ids_.end() ? std::nullopt : std::optional(at->second);
}

bool Bpe::encode_whole(std::string_view piece, std::vector<TokenId>& tokens) const {
  if (!ignore_merges_) return false;
  std::optional<TokenId> id = find(piece);
  if (byte_level_) {
    const auto at = whole_.find(piece);
    id = at == whole_.end() ? std::nullopt : std::optional(at->second);
  }
  if (id) tokens.push_back(*id);
  return id.has_value();
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& tokens) const {
  scratch.word.clear();
  start(piece, scratch.word);
  if (scratch.word.size() > static_cast<std::size_t>(INT32_MAX)) {  // symbols are numbered in 32 bits
    throw InputError(where_ + ": expected a piece of text of at most " + std::to_string(INT32_MAX) +
                     " characters or bytes, found " + std::to_string(scratch.word.size()));
  }
  if (scratch.word.size() <= kShortWord) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  tokens.insert(tokens.end(), scratch.word.begin(), scratch.word.end());
}

CodePoint Bpe::first_unit(std::string_view piece) const {
  return byte_level_ ? CodePoint{static_cast<unsigned char>(piece[0]), 1} : first_code_point(piece);
}

std::size_t Bpe::independent_bytes(std::string_view piece) const {
  TokenId last = -1;
  for (std::size_t at = 0; at < piece.size();) {
    const CodePoint c = first_unit(piece.substr(at));
    const TokenId token = c.value < units_.size() ? units_[c.value] : -1;
    if (last >= 0 && token >= 0 && meetings_.find(last, token).rank == MergeTable::kNone) return at;
    last = token;
    at += c.bytes;
  }
  return piece.size();
}

/// The symbols before any merge: a token for each byte or character.
void Bpe::start(std::string_view piece, std::vector<TokenId>& word) const {
  bool unknown_waits = false;  // it is written before the next known symbol, so that fuse_unk can join them
  std::string unit;
  for (std::size_t at = 0; at < piece.size();) {
    const CodePoint c = first_unit(piece.substr(at));
    at += c.bytes;
    const TokenId token = c.value < units_.size() ? units_[c.value] : -1;
    if (token >= 0) {
      if (unknown_waits) word.push_back(*unknown_);
      unknown_waits = false;
      word.push_back(token);
      continue;
    }
    unit.clear();
    append_utf8(unit, byte_level_ ? byte_to_character(static_cast<unsigned char>(c.value)) : c.value);
    if (byte_fallback_ && put_bytes(unit, word)) continue;
    if (!unknown_text_) continue;
    if (!unknown_) {
      throw InputError(where_ + ": 'unk_token' '" + excerpt(*unknown_text_) +
                       "' is not in the vocabulary, and the text has a character that is not either");
    }
    if (unknown_waits && !fuse_unknown_) word.push_back(*unknown_);
    unknown_waits = true;
  }
  if (unknown_waits) word.push_back(*unknown_);
}

/// False, and nothing written, when one of the bytes has no token.
bool Bpe::put_bytes(std::string_view unit, std::vector<TokenId>& word) const {
  const auto token_of = [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)]; };
  if (std::any_of(unit.begin(), unit.end(), [&](char c) { return token_of(c) < 0; })) return false;
  for (const char c : unit) word.push_back(token_of(c));
  return true;
}

void Bpe::merge_short(Scratch& scratch) const {
  std::vector<TokenId>& word = scratch.word;
  std::vector<std::uint32_t>& ranks = scratch.ranks;  // ranks[i]: of the merge of word[i] and word[i + 1]
  if (word.size() < 2) return;
  const auto rank_at = [&](std::size_t i) { return merges_.find(word[i], word[i + 1]).rank; };
  ranks.resize(word.size() - 1);
  for (std::size_t i = 0; i + 1 < word.size(); ++i) ranks[i] = rank_at(i);
  while (!ranks.empty()) {
    const auto best = static_cast<std::size_t>(std::min_element(ranks.begin(), ranks.end()) - ranks.begin());
    if (ranks[best] == MergeTable::kNone) return;
    word[best] = merges_.find(word[best], word[best + 1]).token;
    word.erase(word.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(best));
    if (best < ranks.size()) ranks[best] = rank_at(best);
    if (best > 0) ranks[best - 1] = rank_at(best - 1);
  }
}

void Bpe::merge_long(Scratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& queue = scratch.queue;
  const auto count = static_cast<std::int32_t>(scratch.word.size());
  symbols.resize(scratch.word.size());
  queue.clear();
  const auto entry = [](std::uint32_t rank, std::int32_t at) {
    return static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint32_t>(at);
  };
  const auto merge_at = [&](std::int32_t at) {
    const Scratch::Symbol& left = symbols[static_cast<std::size_t>(at)];
    if (left.token < 0 || left.after < 0) return MergeTable::Merge{};
    return merges_.find(left.token, symbols[static_cast<std::size_t>(left.after)].token);
  };
  for (std::int32_t i = 0; i < count; ++i) {
    symbols[static_cast<std::size_t>(i)] = {scratch.word[static_cast<std::size_t>(i)], i - 1,
                                            i + 1 < count ? i + 1 : -1};
  }
  for (std::int32_t i = 0; i < count; ++i) {
    const std::uint32_t rank = merge_at(i).rank;
    if (rank != MergeTable::kNone) queue.push_back(entry(rank, i));
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto push = [&](std::int32_t at) {
    if (at < 0) return;
    const std::uint32_t rank = merge_at(at).rank;
    if (rank == MergeTable::kNone) return;
    queue.push_back(entry(rank, at));
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const std::uint64_t top = queue.back();
    queue.pop_back();
    const auto at = static_cast<std::int32_t>(top & UINT32_MAX);
    // An entry is stale when its pair has changed since; ranks tell pairs apart.
    const MergeTable::Merge merge = merge_at(at);
    if (merge.rank != top >> 32 || merge.rank == MergeTable::kNone) continue;
    Scratch::Symbol& left = symbols[static_cast<std::size_t>(at)];
    Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.after)];
    left = {merge.token, left.before, right.after};
    right.token = -1;
    if (left.after >= 0) symbols[static_cast<std::size_t>(left.after)].before = at;
    push(left.before);
    push(at);
  }
  scratch.word.clear();
  for (const Scratch::Symbol& symbol : symbols) {
    if (symbol.token >= 0) scratch.word.push_back(symbol.token);
  }
}

}  // namespace lode
