// SPDX-License-Identifier: Apache-2.0
// Two kinds: "gpt2", byte-level BPE with merges, of which the file names only how texts are cut, and "llama",
// SentencePiece's BPE, whose merges follow from the tokens' scores.
#include "text/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/json.h"
#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/bpe.h"
#include "text/gguf_cutting.h"

namespace lode {

namespace {

const Cutting& cutting_of(const GgufMetadata& m) {
  std::vector<std::string_view> names;
  for (const Cutting& cutting : cuttings()) names.push_back(cutting.name);
  const std::string known = fmt::format("{}", fmt::join(names, ", "));
  if (!m.has("tokenizer.ggml.pre"))
    throw InputError(fmt::format(
        "{}: expected metadata 'tokenizer.ggml.pre', one of {}, which says how texts are cut into "
        "words, found none: the file was converted by an old tool; convert the model anew",
        m.where(), known));
  const std::string_view name = m.text("tokenizer.ggml.pre");
  const auto known_one = std::ranges::find(cuttings(), name, &Cutting::name);
  if (known_one != cuttings().end()) return *known_one;
  throw UnreadableError(fmt::format("{}: 'tokenizer.ggml.pre': expected one of {}, found '{}'", m.where(),
                                    known, excerpt(name)));
}

struct Vocabulary {
  std::vector<std::string> texts;  // by id
  std::vector<TokenKind> kinds;
};

Vocabulary read_vocabulary(const GgufMetadata& m) {
  Vocabulary v;
  const auto texts = m.texts("tokenizer.ggml.tokens");
  if (texts.empty() || texts.size() > static_cast<std::size_t>(Bpe::kMaxTokens))
    throw InputError(fmt::format("{}: 'tokenizer.ggml.tokens': expected 1 to {} tokens, found {}", m.where(),
                                 Bpe::kMaxTokens, texts.size()));
  std::vector<std::int64_t> kinds(texts.size(), 1);
  if (m.has("tokenizer.ggml.token_type")) kinds = m.integers("tokenizer.ggml.token_type", 0, 6);
  if (kinds.size() != texts.size())
    throw InputError(
        fmt::format("{}: 'tokenizer.ggml.token_type': expected a type for each of {} tokens, found {}",
                    m.where(), texts.size(), kinds.size()));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (invalid_utf8(texts[i]) != std::string_view::npos)
      throw InputError(fmt::format("{}: 'tokenizer.ggml.tokens': token {}: expected UTF-8, found '{}'",
                                   m.where(), i, excerpt(texts[i])));
    v.texts.emplace_back(texts[i]);
    v.kinds.push_back(kinds[i] == 0 ? TokenKind::normal : static_cast<TokenKind>(kinds[i]));
  }
  return v;
}

/// User-defined tokens are looked for in the text as it is, where a blank is a blank.
void spell_blanks(Vocabulary& v) {
  for (std::size_t i = 0; i < v.texts.size(); ++i) {
    if (v.kinds[i] != TokenKind::user_defined) continue;
    for (std::size_t at = 0; (at = v.texts[i].find(kSentencePieceBlank, at)) != std::string::npos; ++at)
      v.texts[i].replace(at, kSentencePieceBlank.size(), " ");
  }
}

Json vocab_json(const Vocabulary& v, const std::string& where) {
  Json vocab = Json::object();
  for (std::size_t i = 0; i < v.texts.size(); ++i) {
    const auto [at, fresh] = vocab.emplace(v.texts[i], i);
    if (fresh) continue;
    throw InputError(
        fmt::format("{}: 'tokenizer.ggml.tokens': expected texts that differ, found '{}' as {} and {}", where,
                    excerpt(v.texts[i]), at->dump(), i));
  }
  return vocab;
}

Json added_json(const GgufMetadata& m, const Vocabulary& v) {
  std::array<std::vector<std::int64_t>, kTokenFlags.size()> flagged;
  for (std::size_t i = 0; i < kTokenFlags.size(); ++i)
    if (m.has(kTokenFlags[i].key)) flagged[i] = m.integers(kTokenFlags[i].key, 0, std::ssize(v.texts) - 1);
  Json added = Json::array();
  for (std::size_t i = 0; i < v.texts.size(); ++i) {
    const bool special = v.kinds[i] == TokenKind::control || v.kinds[i] == TokenKind::unknown;
    if ((!special && v.kinds[i] != TokenKind::user_defined) || v.texts[i].empty()) continue;
    Json token = {{"id", i}, {"content", v.texts[i]}, {"special", special}, {"normalized", false}};
    for (std::size_t f = 0; f < kTokenFlags.size(); ++f)
      if (std::ranges::find(flagged[f], static_cast<std::int64_t>(i)) != flagged[f].end())
        token[kTokenFlags[f].field] = true;
    added.push_back(std::move(token));
  }
  return added;
}

std::optional<TokenId> token_id(const GgufMetadata& m, const char* key, std::size_t tokens) {
  if (!m.has(key)) return std::nullopt;
  return static_cast<TokenId>(m.integer(key, 0, static_cast<std::int64_t>(tokens) - 1));
}

bool flag(const GgufMetadata& m, const char* key, bool otherwise) {
  return m.has(key) ? m.boolean(key) : otherwise;
}

/// The beginning-of-text token in front of every text, where it is wanted.
Json post_processor(const GgufMetadata& m, const Vocabulary& v, bool usual) {
  if (flag(m, "tokenizer.ggml.add_eos_token", false))
    throw InputError(
        m.where() +
        ": 'tokenizer.ggml.add_eos_token': expected false, found true: a token behind every text is "
        "not supported");
  if (!flag(m, "tokenizer.ggml.add_bos_token", usual)) return nullptr;
  const auto bos = token_id(m, "tokenizer.ggml.bos_token_id", v.texts.size());
  if (!bos)
    throw InputError(
        m.where() +
        ": expected metadata 'tokenizer.ggml.bos_token_id', as texts are to begin with it, found none");
  const std::string& text = v.texts[static_cast<std::size_t>(*bos)];
  return {{"type", "TemplateProcessing"},
          {"single", {{{"SpecialToken", {{"id", text}}}}, {{"Sequence", {{"id", "A"}}}}}},
          {"special_tokens", {{text, {{"ids", {*bos}}}}}}};
}

Json merges_json(const GgufMetadata& m) {
  Json merges = Json::array();
  for (const std::string_view merge : m.texts("tokenizer.ggml.merges")) {
    if (invalid_utf8(merge) != std::string_view::npos)
      throw InputError(
          fmt::format("{}: 'tokenizer.ggml.merges': expected UTF-8, found '{}'", m.where(), excerpt(merge)));
    merges.push_back(merge);
  }
  return merges;
}

Json byte_level_json(const GgufMetadata& m) {
  const Cutting& cutting = cutting_of(m);
  const Vocabulary v = read_vocabulary(m);
  const auto split = [](std::string_view regex) {
    return Json{
        {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
  };
  Json steps = Json::array();
  for (std::size_t i = 0; i < cutting.count(); ++i) steps.push_back(split(cutting.steps[i]));
  steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  return {{"normalizer", cutting.nfc ? Json{{"type", "NFC"}} : Json()},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", steps}}},
          {"model",
           {{"type", "BPE"},
            {"ignore_merges", cutting.whole_words},
            {"vocab", vocab_json(v, m.where())},
            {"merges", merges_json(m)}}},
          {"added_tokens", added_json(m, v)},
          {"post_processor", post_processor(m, v, cutting.bos)},
          {"decoder", {{"type", "ByteLevel"}}}};
}

/// Scores of the tokens that characters may merge to; null for the others.
Json scores_json(const GgufMetadata& m, const Vocabulary& v) {
  const std::vector<float> scores = m.numbers("tokenizer.ggml.scores");
  if (scores.size() != v.texts.size())
    throw InputError(fmt::format("{}: 'tokenizer.ggml.scores': expected one for each of {} tokens, found {}",
                                 m.where(), v.texts.size(), scores.size()));
  Json json = Json::array();
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (!std::isfinite(scores[i]))
      throw InputError(
          fmt::format("{}: 'tokenizer.ggml.scores': expected finite numbers, found {} for token {}",
                      m.where(), scores[i], i));
    const bool merges = v.kinds[i] == TokenKind::normal || v.kinds[i] == TokenKind::unused;
    json.push_back(merges ? Json(scores[i]) : Json());
  }
  return json;
}

/// How texts get a blank in front: what turns their blanks into SentencePiece's and puts one there.
struct Blanks {
  Json normalizer, pre_tokenizer;
  bool prefix = false;
};

Blanks blanks_of(const GgufMetadata& m, bool usual) {
  Blanks b;
  b.prefix = flag(m, "tokenizer.ggml.add_space_prefix", usual);
  if (b.prefix && m.has(kPrependScheme)) {
    b.pre_tokenizer = {{"type", "Metaspace"},
                       {"replacement", kSentencePieceBlank},
                       {"prepend_scheme", m.text(kPrependScheme)},
                       {"split", false}};
    return b;
  }
  Json steps = Json::array();
  if (b.prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSentencePieceBlank}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSentencePieceBlank}});
  b.normalizer = {{"type", "Sequence"}, {"normalizers", std::move(steps)}};
  return b;
}

/// Characters merge by their tokens' scores, or, in Gemma 4's form, by a list of merges.
Json sentencepiece_json(const GgufMetadata& m, bool by_merges) {
  Vocabulary v = read_vocabulary(m);
  spell_blanks(v);
  Blanks blanks = blanks_of(m, !by_merges);
  Json decoders = Json::array();
  decoders.push_back({{"type", "Replace"}, {"pattern", {{"String", kSentencePieceBlank}}}, {"content", " "}});
  decoders.push_back({{"type", "ByteFallback"}});
  decoders.push_back({{"type", "Fuse"}});
  if (blanks.prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  Json model = {
      {"type", "BPE"}, {"byte_fallback", true}, {"fuse_unk", true}, {"vocab", vocab_json(v, m.where())}};
  if (by_merges)
    model["merges"] = merges_json(m);
  else
    model["scores"] = scores_json(m, v);
  if (const auto unknown = token_id(m, "tokenizer.ggml.unknown_token_id", v.texts.size()))
    model["unk_token"] = v.texts[static_cast<std::size_t>(*unknown)];
  return {{"normalizer", std::move(blanks.normalizer)},
          {"pre_tokenizer", std::move(blanks.pre_tokenizer)},
          {"model", std::move(model)},
          {"added_tokens", added_json(m, v)},
          {"post_processor", post_processor(m, v, true)},
          {"decoder", {{"type", "Sequence"}, {"decoders", std::move(decoders)}}}};
}

}  // namespace

std::string tokenizer_json(const GgufMetadata& m) {
  const std::string_view model = m.text("tokenizer.ggml.model");
  if (model == "gpt2") return byte_level_json(m).dump();
  if (model == "llama" || model == "gemma4") return sentencepiece_json(m, model == "gemma4").dump();
  throw UnreadableError(fmt::format("{}: 'tokenizer.ggml.model': expected gpt2, llama or gemma4, found '{}'",
                                    m.where(), excerpt(model)));
}

std::vector<TokenId> end_tokens(const GgufMetadata& m) {
  constexpr std::array<std::string_view, 11> kEnds = {
      "<|eot_id|>", "<|eom_id|>", "<|im_end|>",      "<|end|>", "<|endoftext|>", "<end_of_turn>",
      "<|return|>", "<|call|>",   "<|end_of_text|>", "<turn|>", "[EOT]"};
  std::vector<TokenId> ends;
  const auto texts = m.texts("tokenizer.ggml.tokens");
  const auto add = [&](TokenId id) {
    if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
  };
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const auto id = token_id(m, key, texts.size())) add(*id);
  }
  if (m.has(kEndTokens))
    for (const std::int64_t id : m.integers(kEndTokens, 0, std::ssize(texts) - 1))
      add(static_cast<TokenId>(id));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (std::find(kEnds.begin(), kEnds.end(), texts[i]) != kEnds.end()) add(static_cast<TokenId>(i));
  }
  // Where a vocabulary has harmony's ends of answers, "<|end|>" ends a channel alone: its answer is still to come.
  const auto has = [&](std::string_view text) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
  };
  if (has("<|return|>") && has("<|call|>"))
    std::erase_if(ends, [&](TokenId id) { return texts[static_cast<std::size_t>(id)] == "<|end|>"; });
  return ends;
}

}  // namespace lode
