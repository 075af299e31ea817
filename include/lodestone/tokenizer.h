// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE exactly as Hugging Face's tokenizers make it, read from tokenizer.json.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/types.h"

namespace lode {

class Tokenizer {
 public:
  /// InputError names an unknown or malformed component.
  static Tokenizer read(const std::filesystem::path& model_dir);
  static Tokenizer parse(std::string_view json, std::string_view where);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  enum class Special { as_text, parsed };  ///< whether "<|eot|>" inside the text becomes that special token
  enum class Bos { none, as_template };    ///< whether the post-processor's BOS is put in front
  /// InputError on invalid UTF-8, naming the byte offset.
  std::vector<TokenId> encode(std::string_view text, Bos bos, Special special = Special::as_text) const;
  std::string decode(std::span<const TokenId> tokens, bool skip_special = true) const;
  /// The bytes of one token; may be part of a UTF-8 character.
  std::string_view bytes_of(TokenId token) const;
  std::int64_t vocab() const;
  /// The ids below vocab() that no token has, rising.
  std::span<const TokenId> gaps() const;
  bool is_special(TokenId token) const;
  /// The ids that the post-processor puts in front of a text (usually one BOS, may be none).
  std::span<const TokenId> prefix() const;
  /// XXH3-128 of the file's bytes, in hex.
  const std::string& fingerprint() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

/// Turns a stream of tokens into text, holding back bytes that do not yet end a UTF-8 character.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(TokenId token);
  std::string finish();  ///< what was held back, invalid bytes as U+FFFD

 private:
  const Tokenizer& tokenizer_;
  std::string held_;
};

}  // namespace lode
