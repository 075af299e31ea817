// SPDX-License-Identifier: Apache-2.0
// The stages of tokenizer.json in their order: added tokens in the text as it is, normalizer, added tokens in
// the normalized text, pre-tokenizer, BPE, post-processor.
#include "lodestone/tokenizer.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "io/gguf.h"
#include "lodestone/error.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/gguf_tokenizer.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pretokenizer.h"
#include "text/regex.h"
#include "text/token_decoder.h"
#include "text/utf8.h"

namespace lode {

namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 30;  // bytes of a text
constexpr std::size_t kMaxFile = 256 << 20;             // bytes of tokenizer.json
constexpr std::size_t kMaxBlob = kMaxFile;              // bytes that all tokens stand for

/// The tokens of words seen before in this text; a word takes the place of another one with the same hash.
class WordCache {
 public:
  explicit WordCache(std::size_t text_bytes)
      : slots_(std::clamp<std::size_t>(std::bit_ceil(text_bytes / 8 + 1), 16, std::size_t{1} << 15)) {}

  void encode(std::string_view word, const Bpe& bpe, Bpe::Scratch& scratch, std::vector<TokenId>& tokens) {
    if (word.size() <= kLongest) return encode_short(word, bpe, true, scratch, tokens);
    if (bpe.encode_whole(word, tokens)) return;
    while (!word.empty()) {
      const std::string_view part = word.substr(0, bpe.independent_bytes(word));
      word.remove_prefix(part.size());
      if (part.size() <= kLongest) {
        encode_short(part, bpe, false, scratch, tokens);
      } else {
        bpe.encode(part, scratch, tokens);
      }
    }
  }

 private:
  static constexpr std::size_t kLongest = 64;  // bytes
  struct Slot {
    std::string_view word;  // in the text or the arena, which outlive the cache
    std::array<TokenId, 6> tokens;
    std::uint32_t count = 0;
    bool whole = false;  // a piece rather than a part of one
  };

  void encode_short(std::string_view word, const Bpe& bpe, bool whole, Bpe::Scratch& scratch,
                    std::vector<TokenId>& tokens) {
    Slot& slot = slots_[XXH3_64bits(word.data(), word.size()) & (slots_.size() - 1)];
    if (slot.word == word && slot.whole == whole) {
      tokens.insert(tokens.end(), slot.tokens.begin(), slot.tokens.begin() + slot.count);
      return;
    }
    const std::size_t before = tokens.size();
    if (!whole || !bpe.encode_whole(word, tokens)) bpe.encode(word, scratch, tokens);
    const std::size_t count = tokens.size() - before;
    if (count > slot.tokens.size()) return;
    slot.word = word;
    slot.count = static_cast<std::uint32_t>(count);
    slot.whole = whole;
    std::copy_n(tokens.end() - static_cast<std::ptrdiff_t>(count), count, slot.tokens.begin());
  }

  std::vector<Slot> slots_;  // a power of two
};

}  // namespace

struct Tokenizer::Impl {
  Impl(const Json& json, const std::string& where)
      : normalizer(json_member(json, "normalizer"), where + ": normalizer"),
        pre_tokenizer(json_member(json, "pre_tokenizer"), where + ": pre_tokenizer"),
        bpe(json_member(json, "model"), pre_tokenizer.byte_level(), where + ": model"),
        added(json_member(json, "added_tokens"), bpe, normalizer, where + ": added_tokens"),
        decoder(json_member(json, "decoder"), where + ": decoder"),
        prefix(read_prefix(json_member(json, "post_processor"), where + ": post_processor")) {
    collect_bytes(where);
    for (const TokenId token : prefix) {
      if (text_of(token)) continue;
      throw InputError(where + ": post_processor: the token " + std::to_string(token) +
                       " is not in the vocabulary");
    }
  }

  TokenId size() const { return std::max(bpe.size(), added.size()); }
  std::optional<std::string_view> text_of(TokenId token) const {
    if (const AddedToken* known = added.find(token)) return known->text;
    return bpe.text_of(token);
  }
  std::string_view known_text_of(TokenId token) const {
    if (const auto text = text_of(token)) return *text;
    throw InputError("expected a token of the vocabulary, which has ids below " + std::to_string(size()) +
                     ", found " + std::to_string(token));
  }
  bool is_special(TokenId token) const {
    const AddedToken* known = added.find(token);
    return known != nullptr && known->special;
  }

  void collect_bytes(const std::string& where) {
    ends.reserve(static_cast<std::size_t>(size()));
    for (TokenId token = 0; token < size(); ++token) {
      if (const auto text = text_of(token))
        blob += decoder.bytes_of(*text);
      else
        gaps.push_back(token);
      if (blob.size() > kMaxBlob) {
        throw InputError(where + ": expected tokens of at most " + human_bytes(kMaxBlob) +
                         " in all, found more");
      }
      ends.push_back(blob.size());
    }
  }

  void encode(std::string_view text, bool specials, std::vector<TokenId>& tokens) const;

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Bpe bpe;
  AddedTokens added;
  TokenDecoder decoder;
  std::vector<TokenId> prefix;
  std::string blob;               // the bytes of all tokens
  std::vector<std::size_t> ends;  // of each token in blob
  std::vector<TokenId> gaps;
  std::string fingerprint;
};

void Tokenizer::Impl::encode(std::string_view text, bool specials, std::vector<TokenId>& tokens) const {
  const RegexBudget budget(text.size());
  std::deque<std::string> normal_forms;
  Arena arena;
  Bpe::Scratch scratch;
  WordCache cache(text.size());
  const auto encode_word = [&](Piece piece) { cache.encode(piece.text, bpe, scratch, tokens); };
  std::vector<AddedTokens::Segment> raw, normalized;
  added.cut(text, AddedTokens::Stage::before_normalizer, specials, raw);
  for (const AddedTokens::Segment& segment : raw) {
    if (segment.token >= 0) {
      tokens.push_back(segment.token);
      continue;
    }
    const std::string_view plain =
        normalizer.empty() ? segment.text
                           : std::string_view(normal_forms.emplace_back(normalizer.apply(segment.text)));
    normalized.clear();
    added.cut(plain, AddedTokens::Stage::after_normalizer, specials, normalized);
    for (const AddedTokens::Segment& part : normalized) {
      const bool at_start = segment.text.data() == text.data() && part.text.data() == plain.data();
      if (part.token >= 0) {
        tokens.push_back(part.token);
      } else {
        arena.allow_for(part.text.size());
        pre_tokenizer.cut({part.text, at_start}, arena, encode_word);
      }
    }
  }
}

Tokenizer Tokenizer::read(const std::filesystem::path& model_dir) {
  if (GgufModel::is_file(model_dir)) {
    return parse(tokenizer_json(GgufModel::open(model_dir).metadata()), model_dir.string());
  }
  const std::filesystem::path path = model_dir / "tokenizer.json";
  return parse(read_file(path, kMaxFile), path.string());
}

Tokenizer Tokenizer::parse(std::string_view json, std::string_view where) {
  const Json parsed = parse_json(json, where);
  if (!parsed.is_object()) {
    throw InputError(std::string(where) + ": expected an object, found " + parsed.type_name());
  }
  const RegexBudget budget(json.size());  // normal forms of added tokens, bytes of all tokens
  auto impl = std::make_unique<Impl>(parsed, std::string(where));
  impl->fingerprint = hash_hex(json);
  return Tokenizer(std::move(impl));
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<TokenId> Tokenizer::encode(std::string_view text, Bos bos, Special special) const {
  if (text.size() > kMaxText) {
    throw InputError("expected a text of at most " + human_bytes(kMaxText) + ", found " +
                     human_bytes(static_cast<std::int64_t>(text.size())));
  }
  if (const std::size_t at = invalid_utf8(text); at != std::string_view::npos) {
    throw InputError("expected a text in UTF-8, found an invalid byte at offset " + std::to_string(at));
  }
  std::vector<TokenId> tokens;
  tokens.reserve(text.size() / 3 + impl_->prefix.size());
  if (bos == Bos::as_template) tokens = impl_->prefix;
  impl_->encode(text, special == Special::parsed, tokens);
  return tokens;
}

std::string Tokenizer::decode(std::span<const TokenId> tokens, bool skip_special) const {
  TokenDecoder::Texts texts;
  texts.reserve(tokens.size());
  for (const TokenId token : tokens) {
    const std::string_view text = impl_->known_text_of(token);
    if (!skip_special || !impl_->is_special(token)) texts.emplace_back(text);
  }
  return impl_->decoder.decode(std::move(texts));
}

std::string_view Tokenizer::bytes_of(TokenId token) const {
  impl_->known_text_of(token);
  const auto at = static_cast<std::size_t>(token);
  const std::size_t begin = at == 0 ? 0 : impl_->ends[at - 1];
  return std::string_view(impl_->blob).substr(begin, impl_->ends[at] - begin);
}

std::int64_t Tokenizer::vocab() const {
  return impl_->size();
}
std::span<const TokenId> Tokenizer::gaps() const {
  return impl_->gaps;
}
bool Tokenizer::is_special(TokenId token) const {
  return impl_->is_special(token);
}
std::span<const TokenId> Tokenizer::prefix() const {
  return impl_->prefix;
}
const std::string& Tokenizer::fingerprint() const {
  return impl_->fingerprint;
}

std::string StreamDecoder::push(TokenId token) {
  if (tokenizer_.is_special(token)) return {};
  held_ += tokenizer_.bytes_of(token);
  std::size_t keep = held_.size();
  // Only the last three bytes can begin a character that is still to end.
  for (std::size_t back = std::min<std::size_t>(3, held_.size()); back > 0; --back) {
    const Utf8Step step = utf8_step(std::string_view(held_).substr(held_.size() - back));
    if (step.kind != Utf8Kind::cut) continue;
    keep = held_.size() - back;
    break;
  }
  std::string text = replace_invalid_utf8(std::string_view(held_).substr(0, keep));
  held_.erase(0, keep);
  return text;
}

std::string StreamDecoder::finish() {
  return replace_invalid_utf8(std::exchange(held_, {}));
}

}  // namespace lode
