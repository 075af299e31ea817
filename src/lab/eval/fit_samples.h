// SPDX-License-Identifier: Apache-2.0
// Samples that are longer than a model's context: left out by name, or cut in the middle as LongBench's authors cut
// theirs. One such sample does not end an evaluation of thousands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lab/tasks/datasets.h"
#include "lab/tasks/sample_file.h"
#include "lodestone/engine.h"

namespace lode {

/// Tokens that a sample's answer may take, where `tokens_of` counts those of a text.
std::int64_t most_new_tokens(const TokenCount& tokens_of, const Sample& sample);
std::int64_t most_new_tokens(const Tokenizer& tokenizer, const Sample& sample);

/// Tokens that a prompt and its answer may have: the model's context, stretched by the RoPE factor, or `max_tokens`
/// where the options name fewer.
std::int64_t most_tokens(const Model& model, const ContextOptions& options);

enum class Truncate {
  none,
  middle,  ///< of prompt and answer's room, the first half and what is left of the end, as LongBench has it
};
Truncate parse_truncate(std::string_view text);  ///< "none" or "middle"; InputError otherwise

struct FittedSamples {
  struct LeftOut {
    std::string id;
    std::int64_t tokens;
  };
  std::vector<Sample> samples;
  std::vector<LeftOut> left_out;  ///< whose prompt has no room, tokens counted
  std::int64_t cut = 0;           ///< samples that lost their middle
};

/// All questions about one context are asked about one text: it is cut for the longest of them.
FittedSamples fit_samples(const Model& model, std::vector<Sample> samples, std::int64_t most_tokens,
                          Truncate truncate);

}  // namespace lode
