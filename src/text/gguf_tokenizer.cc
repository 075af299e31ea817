// SPDX-License-Identifier: Apache-2.0
// Two kinds: "gpt2", byte-level BPE with merges, of which the file names only how texts are cut, and "llama",
// SentencePiece's BPE, whose merges follow from the tokens' scores.
#include "text/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "text/bpe.h"

namespace lode {

namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581, SentencePiece's blank

enum class TokenKind { normal = 1, unknown, control, user_defined, unused, byte };

// How texts are cut before BPE: the parts that match, and what lies between them.
constexpr std::string_view kDigit = R"(\p{N})", kThreeDigits = R"(\p{N}{1,3})", kLineEnd = R"([\r\n])";
constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt4o =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kKimi =
    R"(\p{Han}+|[^\r\n\p{L}\p{N}]?(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])*(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])+(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDeepseekLetters =
    R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";
constexpr std::string_view kDeepseekSigns = R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)",
                           kDeepseekHan = R"([一-龥ࠀ-一가-퟿]+)",
                           kDeepseekKana = R"([一-龥぀-ゟ゠-ヿ]+)";
constexpr std::string_view kDeepseek3 =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Cutting {
  std::string_view name;  ///< tokenizer.ggml.pre
  /// Regular expressions, each of which cuts what the one before has left; "" for none.
  std::array<std::string_view, 6> steps;
  bool nfc = false;          ///< texts are normalised first
  bool whole_words = false;  ///< a piece that is a token needs no merges
  bool bos = false;          ///< where the file does not say

  constexpr std::size_t count() const {
    return static_cast<std::size_t>(std::ranges::find(steps, "") - steps.begin());
  }
};

// Of names with one meaning the first is what is written.
constexpr std::array<Cutting, 44> kCuttings = {{
    {"gpt-2", {kGpt2}},
    {"gpt2", {kGpt2}},
    {"smollm", {kDigit, kGpt2}},
    {"starcoder", {kDigit, kGpt2}},
    {"refact", {kDigit, kGpt2}},
    {"command-r", {kDigit, kGpt2}},
    {"codeshell", {kDigit, kGpt2}},
    {"exaone", {kDigit, kGpt2}},
    {"minerva-7b", {kDigit, kGpt2}},
    {"llama-bpe", {kLlama3}, false, true, true},
    {"llama3", {kLlama3}, false, true, true},
    {"llama-v3", {kLlama3}, false, true, true},
    {"smaug-bpe", {kLlama3}, false, true, true},
    {"falcon3", {kLlama3}, false, true, true},
    {"pixtral", {kLlama3}, false, true, true},
    {"lfm2", {kLlama3}, false, true, true},
    {"dbrx", {kLlama3}},
    {"glm4", {kLlama3}},
    {"chatglm-bpe", {kLlama3}},
    {"qwen2", {kQwen2}, true},
    {"deepseek-r1-qwen", {kQwen2}, true},
    {"megrez", {kQwen2}, true},
    {"qwen35", {kQwen35}, true},
    {"stablelm2", {kQwen2}},
    {"hunyuan", {kQwen2}},
    {"grok-2", {kQwen2}},
    {"tekken", {kTekken}, false, true, true},
    {"gpt-4o", {kGpt4o}},
    {"phi-4-mini", {kGpt4o}},
    {"llama4", {kGpt4o}},
    {"kanana2", {kGpt4o}},
    {"minimax-m2", {kGpt4o}},
    {"kimi-k2", {kKimi}},
    {"deepseek-llm", {kLineEnd, kDeepseekLetters, kDeepseekSigns, R"(\s+$)", kDeepseekHan, R"(\p{N}+)"}},
    {"deepseek-coder", {kLineEnd, R"(\s?\p{L}+)", R"(\s?\p{P}+)", kDeepseekHan, kDigit}},
    {"deepseek-v3", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"hunyuan-dense", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"joyai-llm", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"phi-2", {kGpt2}},
    {"olmo", {kGpt2}},
    {"gigachat", {kGpt2}},
    {"exaone4", {kGpt2}},
    {"trillion", {kGpt2}},
    {"mellum", {kGpt2}},
}};

const Cutting& cutting_of(const GgufMetadata& m) {
  std::vector<std::string_view> names;
  for (const Cutting& cutting : kCuttings) names.push_back(cutting.name);
  const std::string known = fmt::format("{}", fmt::join(names, ", "));
  if (!m.has("tokenizer.ggml.pre"))
    throw InputError(fmt::format(
        "{}: expected metadata 'tokenizer.ggml.pre', one of {}, which says how texts are cut into "
        "words, found none: the file was converted by an old tool; convert the model anew",
        m.where(), known));
  const std::string_view name = m.text("tokenizer.ggml.pre");
  const auto at =
      std::find_if(kCuttings.begin(), kCuttings.end(), [&](const Cutting& c) { return c.name == name; });
  if (at != kCuttings.end()) return *at;
  throw InputError(fmt::format("{}: 'tokenizer.ggml.pre': expected one of {}, found '{}'", m.where(), known,
                               excerpt(name)));
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
    for (std::size_t at = 0; (at = v.texts[i].find(kSpace, at)) != std::string::npos; ++at)
      v.texts[i].replace(at, kSpace.size(), " ");
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

Json added_json(const Vocabulary& v) {
  Json added = Json::array();
  for (std::size_t i = 0; i < v.texts.size(); ++i) {
    if (v.kinds[i] != TokenKind::control && v.kinds[i] != TokenKind::user_defined) continue;
    if (v.texts[i].empty()) continue;
    added.push_back({{"id", i},
                     {"content", v.texts[i]},
                     {"special", v.kinds[i] == TokenKind::control},
                     {"normalized", false}});
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
          {"added_tokens", added_json(v)},
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

/// Characters merge by their tokens' scores, or, in Gemma 4's form, by a list of merges.
Json sentencepiece_json(const GgufMetadata& m, bool by_merges) {
  Vocabulary v = read_vocabulary(m);
  spell_blanks(v);
  const bool prefix = flag(m, "tokenizer.ggml.add_space_prefix", !by_merges);
  const Json blanks = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpace}};
  Json normalizers = Json::array(), decoders = Json::array();
  if (prefix) normalizers.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
  normalizers.push_back(blanks);
  decoders.push_back({{"type", "Replace"}, {"pattern", {{"String", kSpace}}}, {"content", " "}});
  decoders.push_back({{"type", "ByteFallback"}});
  decoders.push_back({{"type", "Fuse"}});
  if (prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  Json model = {
      {"type", "BPE"}, {"byte_fallback", true}, {"fuse_unk", true}, {"vocab", vocab_json(v, m.where())}};
  if (by_merges)
    model["merges"] = merges_json(m);
  else
    model["scores"] = scores_json(m, v);
  if (const auto unknown = token_id(m, "tokenizer.ggml.unknown_token_id", v.texts.size()))
    model["unk_token"] = v.texts[static_cast<std::size_t>(*unknown)];
  return {{"normalizer", {{"type", "Sequence"}, {"normalizers", std::move(normalizers)}}},
          {"model", std::move(model)},
          {"added_tokens", added_json(v)},
          {"post_processor", post_processor(m, v, true)},
          {"decoder", {{"type", "Sequence"}, {"decoders", std::move(decoders)}}}};
}

}  // namespace

std::string tokenizer_json(const GgufMetadata& m) {
  const std::string_view model = m.text("tokenizer.ggml.model");
  if (model == "gpt2") return byte_level_json(m).dump();
  if (model == "llama" || model == "gemma4") return sentencepiece_json(m, model == "gemma4").dump();
  throw InputError(fmt::format("{}: 'tokenizer.ggml.model': expected gpt2, llama or gemma4, found '{}'",
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

namespace {

/// Line ends as kCuttings spells them: some tokenizer.json have the characters themselves.
std::string with_line_ends_spelled(std::string regex) {
  for (const auto& [character, spelled] : {std::pair{'\r', R"(\r)"}, {'\n', R"(\n)"}})
    for (std::size_t at = 0; (at = regex.find(character, at)) != std::string::npos; at += 2)
      regex.replace(at, 1, spelled);
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
    cuts.steps.emplace_back(each ? kDigit : R"(\p{N}+)");
  } else if (type == "Split") {
    cuts.steps.push_back(with_line_ends_spelled(json_string(json_member(step, "pattern"), "Regex", where)));
  } else if (type == "ByteLevel") {
    cuts.byte_level = true;
    if (!json_has(step, "use_regex") || json_bool(step, "use_regex", where)) cuts.steps.emplace_back(kGpt2);
  }
}

std::string_view cutting_name(const Json& tokenizer, std::string_view where) {
  Cuts cuts;
  read_cuts(json_member(tokenizer, "pre_tokenizer"), where, cuts);
  const bool nfc = json_member(tokenizer, "normalizer").is_object() &&
                   json_string(tokenizer["normalizer"], "type", where) == "NFC";
  const Json& model = json_member(tokenizer, "model");
  const bool whole = json_has(model, "ignore_merges") && json_bool(model, "ignore_merges", where);
  for (const Cutting& c : kCuttings) {
    if (cuts.byte_level && std::ranges::equal(cuts.steps, std::span(c.steps).first(c.count())) &&
        c.nfc == nfc && c.whole_words == whole)
      return c.name;
  }
  throw InputError(
      fmt::format("{}: 'pre_tokenizer': expected byte-level BPE that cuts texts in a way that "
                  "GGUF files have a name for, found another",
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
void put_token(std::vector<std::string>& texts, std::vector<std::int32_t>& kinds, std::int64_t id,
               const std::string& text, TokenKind kind, std::string_view where) {
  if (id < 0 || id >= std::ssize(texts))
    throw InputError(fmt::format("{}: expected ids below the model's vocabulary of {}, found {}", where,
                                 texts.size(), id));
  texts[static_cast<std::size_t>(id)] = text;
  kinds[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(kind);
}

std::vector<std::string> merges_of(const Json& model, std::string_view where) {
  std::vector<std::string> merges;
  for (const Json& merge : json_member(model, "merges")) {
    const bool pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
    if (!pair && !merge.is_string())
      throw InputError(
          fmt::format("{}: 'merges': expected pairs of texts, found {}", where, merge.type_name()));
    merges.push_back(pair ? merge[0].get<std::string>() + " " + merge[1].get<std::string>()
                          : merge.get<std::string>());
  }
  return merges;
}

}  // namespace

void add_tokenizer(const Json& tokenizer, std::string_view where, std::int64_t vocab, GgufWriter& to) {
  const std::string_view pre = cutting_name(tokenizer, where);
  const Json& model = json_member(tokenizer, "model");
  std::vector<std::string> texts(static_cast<std::size_t>(vocab));
  std::vector<std::int32_t> kinds(texts.size(), static_cast<std::int32_t>(TokenKind::unused));
  for (std::size_t i = 0; i < texts.size(); ++i) texts[i] = fmt::format("[PAD{}]", i);
  for (const auto& [text, id] : json_member(model, "vocab").items())
    put_token(texts, kinds, id.get<std::int64_t>(), text, TokenKind::normal, where);
  for (const Json& added : json_member(tokenizer, "added_tokens"))
    put_token(texts, kinds, json_int(added, "id", where, 0, vocab - 1), json_string(added, "content", where),
              json_bool(added, "special", where) ? TokenKind::control : TokenKind::user_defined, where);
  to.add("tokenizer.ggml.model", std::string_view("gpt2"));
  to.add("tokenizer.ggml.pre", pre);
  to.add_texts("tokenizer.ggml.tokens", texts);
  to.add_i32s("tokenizer.ggml.token_type", kinds);
  to.add_texts("tokenizer.ggml.merges", merges_of(model, where));
  const std::optional<std::string> first = first_token(tokenizer, where);
  to.add("tokenizer.ggml.add_bos_token", first.has_value());
  if (!first) return;
  const auto at = std::find(texts.begin(), texts.end(), *first);
  if (at == texts.end())
    throw InputError(
        fmt::format("{}: 'post_processor': expected a known token, found '{}'", where, excerpt(*first)));
  to.add_u32("tokenizer.ggml.bos_token_id", static_cast<std::uint32_t>(at - texts.begin()));
}

}  // namespace lode
