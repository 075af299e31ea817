// SPDX-License-Identifier: Apache-2.0
// Any text as a haystack: refused, or passages of it that are as long as they say.
#include "lab/tasks/haystack.h"

#include "fuzz/target.h"
#include "tasks/fake_meter.h"

LODE_FUZZ_TARGET(haystack) {
  if (input.empty()) return;
  const lode::Haystack haystack(std::string(input), lode::fake_meter());
  lode::Rng rng(1);
  for (const std::int64_t tokens : {0, 1, 7, 100}) {
    const lode::Passage passage = haystack.cut(tokens, rng);
    std::int64_t sum = 0;
    for (const lode::Passage::Piece& piece : passage.pieces) sum += piece.tokens;
    LODE_ASSERT(sum == passage.tokens && sum <= tokens);
  }
}
