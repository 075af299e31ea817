// SPDX-License-Identifier: Apache-2.0
// A training of HashAttention's functions that takes a moment: settings and texts for the tiny model.
#pragma once

#include <string>
#include <vector>

#include "base/rng.h"
#include "lab/train/capture.h"
#include "lab/train/hash/settings.h"

namespace lode::test {

inline HashSettings small_hash_settings() {
  HashSettings settings;
  settings.widths = {64};
  settings.top = 4;
  settings.dense = {.sink = 2, .window = 8};
  settings.queries = 6;
  settings.others = 20;
  settings.steps = 2;
  settings.type = DType::f32;
  settings.seed = 3;
  return settings;
}

/// Prompts of 150 tokens of about so many random letters.
inline std::vector<Prompt> letters_for(const Model& model, std::size_t bytes) {
  std::string text;
  Rng rng(8);
  while (text.size() < bytes) text += static_cast<char>('a' + rng.below(26));
  return cut_into_prompts(model, "book", text, 150);
}

}  // namespace lode::test
