// SPDX-License-Identifier: Apache-2.0
// Lengths in tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace lode {

class Tokenizer;

/// What samples need of a tokenizer, so that tests can count words instead.
struct TokenMeter {
  std::function<std::int64_t(std::string_view)> count;  ///< tokens of a text, without BOS
  std::function<std::string(std::string_view, std::int64_t)>
      first;                ///< what of a text its first n tokens are
  std::int64_t prefix = 0;  ///< tokens put in front of a prompt (BOS)
};

/// The tokenizer must outlive the meter.
TokenMeter make_meter(const Tokenizer& tokenizer);

}  // namespace lode
