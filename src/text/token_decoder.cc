// SPDX-License-Identifier: Apache-2.0
// Follows the component types of Hugging Face's tokenizers: Sequence, ByteLevel, Replace, ByteFallback, Fuse,
// Strip, Metaspace.
#include "text/token_decoder.h"

#include <charconv>
#include <optional>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/byte_level.h"
#include "text/regex.h"
#include "text/utf8.h"

namespace lode {

namespace {

using Texts = TokenDecoder::Texts;

std::string joined(const Texts& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

std::size_t bytes_in(const Texts& tokens) {
  std::size_t bytes = 0;
  for (const std::string& token : tokens) bytes += token.size();
  return bytes;
}

class ByteLevel : public TokenDecoder::Step {
 public:
  Texts apply(Texts tokens) const override {
    std::string bytes;
    for (std::string& token : tokens) bytes += bytes_of(std::move(token));
    return {replace_invalid_utf8(bytes)};
  }
  std::string bytes_of(std::string token) const override {
    return bytes_of_characters(token).value_or(token);
  }
};

class Replace : public TokenDecoder::Step {
 public:
  Replace(Regex pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  Texts apply(Texts tokens) const override {
    for (std::string& token : tokens) token = bytes_of(std::move(token));
    return tokens;
  }
  std::string bytes_of(std::string token) const override { return pattern_.replace_all(token, content_); }

 private:
  Regex pattern_;
  std::string content_;
};

/// The byte of "<0xHH>".
std::optional<char> byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  unsigned byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (error != std::errc() || end != token.data() + 5) return std::nullopt;
  return static_cast<char>(byte);
}

/// A run of byte tokens is a text when it is valid as a whole; else every byte is U+FFFD, as in the
/// reference.
class ByteFallback : public TokenDecoder::Step {
 public:
  Texts apply(Texts tokens) const override {
    Texts result;
    std::string run;
    const auto flush = [&] {
      if (invalid_utf8(run) == std::string_view::npos) {
        if (!run.empty()) result.push_back(run);
      } else {
        for (std::size_t i = 0; i < run.size(); ++i) result.emplace_back(kReplacement);
      }
      run.clear();
    };
    for (std::string& token : tokens) {
      if (const auto byte = byte_of(token)) {
        run += *byte;
        continue;
      }
      flush();
      result.push_back(std::move(token));
    }
    flush();
    return result;
  }
  std::string bytes_of(std::string token) const override {
    const auto byte = byte_of(token);
    return byte ? std::string(1, *byte) : token;
  }
};

class Fuse : public TokenDecoder::Step {
 public:
  Texts apply(Texts tokens) const override { return {joined(tokens)}; }
};

/// Takes up to `start` characters off the front of every token, and up to `stop` off its back.
class Strip : public TokenDecoder::Step {
 public:
  Strip(std::string content, std::int64_t start, std::int64_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}
  Texts apply(Texts tokens) const override {
    for (std::string& token : tokens) {
      std::string_view rest = token;
      for (std::int64_t i = 0; i < start_ && rest.starts_with(content_); ++i) {
        rest.remove_prefix(content_.size());
      }
      for (std::int64_t i = 0; i < stop_ && rest.ends_with(content_); ++i)
        rest.remove_suffix(content_.size());
      token = std::string(rest);
    }
    return tokens;
  }

 private:
  std::string content_;
  std::int64_t start_, stop_;
};

/// The replacement character becomes a blank, or nothing in the first token when a blank was put there.
class Metaspace : public TokenDecoder::Step {
 public:
  Metaspace(std::string replacement, bool prepended)
      : replacement_(std::move(replacement)), prepended_(prepended) {}
  Texts apply(Texts tokens) const override {
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = replaced(tokens[i], i == 0 && prepended_);
    return tokens;
  }
  std::string bytes_of(std::string token) const override { return replaced(token, false); }

 private:
  std::string replaced(std::string_view token, bool drop) const {
    std::string result;
    for (std::size_t at = 0; at < token.size();) {
      if (token.substr(at).starts_with(replacement_)) {
        if (!drop) result += ' ';
        at += replacement_.size();
      } else {
        result += token[at++];
      }
    }
    return result;
  }
  std::string replacement_;
  bool prepended_;
};

std::string one_character(const Json& json, const char* key, const std::string& where) {
  std::string text = json_string(json, key, where);
  if (text.empty() || first_code_point(text).bytes != text.size()) {
    throw InputError(where + ": '" + key + "': expected one character, found '" + excerpt(text) + "'");
  }
  return text;
}

std::unique_ptr<TokenDecoder::Step> replace(const Json& json, const std::string& where) {
  const Json& pattern = json_member(json, "pattern");
  const bool literal = json_has(pattern, "String");
  const std::string text = json_string(pattern, literal ? "String" : "Regex", where + ": pattern");
  return std::make_unique<Replace>(literal ? Regex::literal(text, where) : Regex(text, where),
                                   json_string(json, "content", where));
}

std::unique_ptr<TokenDecoder::Step> strip(const Json& json, const std::string& where) {
  return std::make_unique<Strip>(one_character(json, "content", where),
                                 json_int(json, "start", where, 0, INT32_MAX),
                                 json_int(json, "stop", where, 0, INT32_MAX));
}

std::unique_ptr<TokenDecoder::Step> metaspace(const Json& json, const std::string& where) {
  bool prepended = json_has(json, "add_prefix_space") ? json_bool(json, "add_prefix_space", where) : true;
  if (json_has(json, "prepend_scheme")) prepended = json_string(json, "prepend_scheme", where) != "never";
  return std::make_unique<Metaspace>(one_character(json, "replacement", where), prepended);
}

}  // namespace

TokenDecoder::TokenDecoder(const Json& json, const std::string& where) : where_(where) {
  if (!json.is_null()) add(json, where);
}

void TokenDecoder::add(const Json& json, const std::string& where) {
  const std::string type = json_string(json, "type", where);
  if (steps_.size() == kMaxSteps) {
    throw InputError(where + ": expected at most " + std::to_string(kMaxSteps) + " components, found more");
  }
  if (type == "Sequence") {
    if (!json_has(json, "decoders") || !json["decoders"].is_array()) {
      throw InputError(where + ": expected a Sequence to have an array 'decoders'");
    }
    for (const Json& part : json["decoders"]) add(part, where);
  } else if (type == "ByteLevel") {
    steps_.push_back(std::make_unique<ByteLevel>());
  } else if (type == "Replace") {
    steps_.push_back(replace(json, where + ": Replace"));
  } else if (type == "ByteFallback") {
    steps_.push_back(std::make_unique<ByteFallback>());
  } else if (type == "Fuse") {
    steps_.push_back(std::make_unique<Fuse>());
  } else if (type == "Strip") {
    steps_.push_back(strip(json, where + ": Strip"));
  } else if (type == "Metaspace") {
    steps_.push_back(metaspace(json, where + ": Metaspace"));
  } else {
    throw UnreadableError(
        where + ": expected Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip or Metaspace, found '" +
        excerpt(type) + "'");
  }
}

/// Each component keeps within max_growth of what it is given, which over many of them is no bound at all.
void TokenDecoder::require_growth(std::size_t from, std::size_t to) const {
  if (to <= max_growth(from)) return;
  throw InputError(where_ + ": makes tokens of " + std::to_string(from) +
                   " bytes more than 64 times as long");
}

std::string TokenDecoder::decode(Texts tokens) const {
  if (steps_.empty()) return join(tokens, " ");
  const std::size_t bytes = bytes_in(tokens);
  for (const auto& step : steps_) {
    tokens = step->apply(std::move(tokens));
    require_growth(bytes, bytes_in(tokens));
  }
  return joined(tokens);
}

std::string TokenDecoder::bytes_of(std::string_view token) const {
  std::string bytes(token);
  for (const auto& step : steps_) {
    // A single byte is final: the other components read characters.
    if (invalid_utf8(bytes) != std::string_view::npos) break;
    bytes = step->bytes_of(std::move(bytes));
    require_growth(token.size(), bytes.size());
  }
  return bytes;
}

}  // namespace lode
