// SPDX-License-Identifier: Apache-2.0
#include "text/gguf_cutting.h"

#include "text/pretokenizer.h"

namespace lode {

namespace {

constexpr std::string_view kThreeDigits = R"(\p{N}{1,3})", kLineEnd = R"([\r\n])";
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

constexpr std::array<Cutting, 44> kCuttings = {{
    {"gpt-2", {kGpt2Cut}},
    {"gpt2", {kGpt2Cut}},
    {"smollm", {kCutDigit, kGpt2Cut}},
    {"starcoder", {kCutDigit, kGpt2Cut}},
    {"refact", {kCutDigit, kGpt2Cut}},
    {"command-r", {kCutDigit, kGpt2Cut}},
    {"codeshell", {kCutDigit, kGpt2Cut}},
    {"exaone", {kCutDigit, kGpt2Cut}},
    {"minerva-7b", {kCutDigit, kGpt2Cut}},
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
    {"deepseek-coder", {kLineEnd, R"(\s?\p{L}+)", R"(\s?\p{P}+)", kDeepseekHan, kCutDigit}},
    {"deepseek-v3", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"hunyuan-dense", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"joyai-llm", {kThreeDigits, kDeepseekKana, kDeepseek3}},
    {"phi-2", {kGpt2Cut}},
    {"olmo", {kGpt2Cut}},
    {"gigachat", {kGpt2Cut}},
    {"exaone4", {kGpt2Cut}},
    {"trillion", {kGpt2Cut}},
    {"mellum", {kGpt2Cut}},
}};

}  // namespace

std::span<const Cutting> cuttings() {
  return kCuttings;
}

}  // namespace lode
