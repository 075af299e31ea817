// SPDX-License-Identifier: Apache-2.0
// Small tokenizer.json files of the two families in use, with a vocabulary that can spell any text.
#pragma once

#include <cstdio>
#include <string>

#include "base/json.h"
#include "text/byte_level.h"
#include "text/utf8.h"

namespace lode::test {

inline constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// As of Llama 3: byte-level BPE after a regular expression. Ids 0 to 255 are the bytes, 256 "<bos>", 257
/// "<eos>", 258 "<tool>" (not special), then merges.
inline Json byte_level_tokenizer() {
  Json json = Json::parse(R"({
    "normalizer": null,
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 256, "content": "<bos>", "special": true}, {"id": 257, "content": "<eos>", "special": true},
                     {"id": 258, "content": "<tool>"}],
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}}},
    "model": {"type": "BPE", "merges": ["a b", "ab ab", "Ġ Ġ", "ĠĠ ĠĠ", "Ġ a", "Ã ©"],
      "vocab": {"<bos>": 256, "<eos>": 257, "ab": 259, "abab": 260, "ĠĠ": 261, "ĠĠĠĠ": 262, "Ġa": 263, "Ã©": 264}}})");
  json["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", kLlama3Pattern}}}, {"behavior", "Isolated"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(character, byte_to_character(static_cast<unsigned char>(byte)));
    json["model"]["vocab"][character] = byte;
  }
  return json;
}

/// As of Llama 2 and Mistral: characters, blanks as U+2581, unknown characters as bytes. Ids 0 to 2 are
/// "<unk>",
/// "<s>", "</s>", then the bytes.
inline Json character_tokenizer() {
  Json json = Json::parse(R"({
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "pre_tokenizer": null,
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
                     {"id": 2, "content": "</s>", "special": true}],
    "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
      "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 259, "a": 260, "b": 261, "ab": 262, "▁a": 263, "▁▁": 264, "é": 265},
      "merges": ["a b", "▁ a", "▁ ▁"]}})");
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    json["model"]["vocab"][name] = byte + 3;
  }
  return json;
}

/// All that the others leave out: normal forms, Metaspace, Digits, several splits, tokens that take blanks
/// along.
inline Json mixed_tokenizer() {
  Json json = character_tokenizer();
  json["normalizer"] =
      Json::parse(R"({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "NFD"}, {"type": "NFC"},
    {"type": "Replace", "pattern": {"Regex": "\\s{3,}"}, "content": "  "}]})");
  json["pre_tokenizer"] =
      Json::parse(R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
    {"type": "Split", "pattern": {"Regex": "[[:punct:]]"}, "behavior": "MergedWithNext"},
    {"type": "Split", "pattern": {"String": "b"}, "behavior": "Contiguous"},
    {"type": "Split", "pattern": {"Regex": "x*"}, "behavior": "Removed"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}]})");
  json["pre_tokenizer"]["pretokenizers"][1]["pattern"]["Regex"] = "[!-/]";
  json["decoder"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}};
  json["added_tokens"].push_back({{"id", 270}, {"content", "<l>"}, {"lstrip", true}, {"rstrip", true}});
  json["added_tokens"].push_back(
      {{"id", 271}, {"content", "word"}, {"single_word", true}, {"normalized", false}});
  json["added_tokens"].push_back(
      {{"id", 272}, {"content", " "}, {"rstrip", true}, {"lstrip", true}, {"special", true}});
  return json;
}

}  // namespace lode::test
