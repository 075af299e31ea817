// SPDX-License-Identifier: Apache-2.0
// Tokens per second of a whole model, prompt and generation, behind so many tokens: the table of llama.cpp's
// llama-bench.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/engine.h"

namespace lode {

struct ModelBenchOptions {
  std::vector<std::int64_t> depths = {0};     ///< tokens that are there already; each is read once, untimed
  std::vector<std::int64_t> prompts = {512};  ///< tokens of one prompt; none: no prompts are timed
  std::int64_t generated = 32;                ///< tokens of one answer; 0: none are timed
  int repetitions = 3;
  /// Of keys and values in memory, as `ask` has it: "token", "cluster" (InputError where no single method has one), or
  /// "auto": cluster where a single method has one, on the CPU.
  std::string order = "auto";
  ContextOptions context;  ///< its room is set here
};

struct ModelBenchRow {
  std::string attention;  ///< of generated tokens; prompts are read densely, as everywhere
  std::int64_t prompt = 0, generated = 0, depth = 0;  ///< one of the first two is 0
  bool by_cluster = false;                            ///< the order of keys and values in memory
  std::vector<double> seconds;                        ///< of each repetition

  std::string test() const;  ///< "pp512 @ d4096"
  double tokens_per_second(std::size_t repetition) const;
  double average() const;    ///< tokens per second
  double deviation() const;  ///< standard deviation of the sample; 0 of one repetition
};

/// Tokens are random. Generated tokens attend in full and under each spec, in turn; a spec needs keys behind it,
/// so that none runs at depth 0. A text longer than the model's positions is reached by scaling its RoPE, which
/// `note` is told: it changes no speed.
std::vector<ModelBenchRow> bench_model(const std::shared_ptr<const Model>& model,
                                       const ModelBenchOptions& options, std::span<const Spec> specs,
                                       const std::function<void(std::string_view)>& note);

}  // namespace lode
