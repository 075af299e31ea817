// SPDX-License-Identifier: Apache-2.0
// Makes the samples of a synthetic task: facts in a haystack, and questions about them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/tasks/haystack.h"
#include "lab/tasks/language.h"
#include "lab/tasks/sample_file.h"

namespace lode {

/// The name of all tasks in one: a text with the facts of every task that hides some, of each as many as a
/// text a quarter as long holds, and questions of each. So one text serves the comparison on all tasks.
inline constexpr std::string_view kMixed = "mixed";
/// Tasks whose questions `mixed` asks.
std::vector<std::string> mixed_tasks();

struct TaskOptions {
  std::string task;  ///< or kMixed
  std::int64_t tokens =
      0;  ///< context, question and longest answer of each sample: at most this, within 1 % of it
  std::int64_t count = 1;     ///< samples
  std::int64_t contexts = 0;  ///< at most, whatever `count` says; 0 = as many as it needs
  std::uint64_t seed = 0;
  std::int64_t questions = 0;  ///< about each context, as many as the task allows; 0 = 1 up to 4k tokens, 4
                               ///< up to 16k, else 8. Of `mixed`: about each context and task
  std::int64_t facts = 0;      ///< in each text, those that nobody asks about included, where facts_vary
                               ///< (families.h); 0 = more in longer texts
  Language::Wording wording = Language::Wording::trained;
};

/// The shortest length that tasks take; below it prompt and facts leave no text.
inline constexpr std::int64_t kFewestTokens = 256;

/// Hands `count` samples to `emit`, those of one context one after another; emit's flag says whether the
/// sample is the first of its context. The same options and haystack give the same samples on every machine.
/// Single facts lie uniformly over the depth (a golden-ratio sequence over the contexts, so that few samples
/// cover it as evenly as many), several facts at independent uniform depths. InputError when `tokens` cannot
/// hold the task's facts, or there are fewer than it asks about.
void make_samples(const TaskOptions& options, const Language& language, const Haystack& haystack,
                  const std::function<void(const Sample&, bool first)>& emit);

inline constexpr std::int64_t kEchoDistance = 8192, kEchoTail = 640;

/// Text that needs its far past, for `probe`: passages come back verbatim, and invented names that were
/// introduced come back, after more than `distance` tokens; the last `tail` tokens consist of such returns.
/// `tokens` in all, BOS included; InputError when they do not hold that distance.
std::string make_echo_text(std::int64_t tokens, std::uint64_t seed, const Language& language,
                           const Haystack& haystack, std::int64_t distance = kEchoDistance,
                           std::int64_t tail = kEchoTail);

/// The distance for a text of so many tokens: the usual one where it fits, else a third of the text.
/// InputError when that holds nothing.
std::int64_t echo_distance(std::int64_t tokens);

}  // namespace lode
