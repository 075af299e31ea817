// SPDX-License-Identifier: Apache-2.0
// From attention mass to the passages that an answer rests on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/engine.h"

namespace lode {

struct Passage {
  std::int64_t token_begin = 0, token_end = 0;  ///< positions, [begin, end)
  double weight = 0;  ///< share of the sharp attention that fell on the text, 0 to 1
  std::string text;
};

/// The `count` sentences of the indexed text that got the most sharp attention, heaviest first; of a long
/// sentence, the stretch around its heaviest token. The first tokens are left out: they take the attention of
/// heads that have nothing to look up.
std::vector<Passage> top_passages(const Context& context, const SourceMass& sources, std::size_t count);

}  // namespace lode
