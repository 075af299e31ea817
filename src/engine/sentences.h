// SPDX-License-Identifier: Apache-2.0
// The sentences of a text: what is cited.
#pragma once

#include <cstddef>
#include <vector>

#include "lodestone/documents.h"

namespace lode {

struct Sentence {
  std::size_t begin = 0, end = 0;  ///< bytes [begin, end), without blanks around it
};

/// In the order of the text, apart; none crosses a file's end or holds a heading of ours. A sentence ends
/// behind . ! or ? and a blank, at a blank line, and at a line's end unless the sentence plainly goes on.
std::vector<Sentence> sentences_of(const SourceText& source);

}  // namespace lode
