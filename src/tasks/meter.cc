// SPDX-License-Identifier: Apache-2.0
#include "tasks/meter.h"

#include <algorithm>
#include <span>

#include "lodestone/tokenizer.h"

namespace lode {

TokenMeter make_meter(const Tokenizer& tokenizer) {
  return {
      .count =
          [&tokenizer](std::string_view text) {
            return static_cast<std::int64_t>(tokenizer.encode(text, Tokenizer::Bos::none).size());
          },
      .first =
          [&tokenizer](std::string_view text, std::int64_t n) {
            const auto ids = tokenizer.encode(text, Tokenizer::Bos::none);
            return tokenizer.decode(std::span(ids).first(std::min(ids.size(), static_cast<std::size_t>(n))));
          },
      .prefix = static_cast<std::int64_t>(tokenizer.prefix().size())};
}

}  // namespace lode
