// SPDX-License-Identifier: Apache-2.0
// What selectors share that keep something of every key and take as many as a budget says.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"

namespace lode {

/// How far the indexes of all sequences have come. Keys are taken in before a step, for all layers at once: a
/// step's own keys are in the window, so the next step is early enough. Steps of more tokens than the window
/// take in what they lack layer by layer.
class IndexedKeys {
 public:
  explicit IndexedKeys(int sequences) : sequences_(static_cast<std::size_t>(sequences)) {}

  /// take(keys, begin, end) for those that are new.
  template <class Take>
  void prepare(const GpuKeys& keys, const Take& take) {
    Sequence& sequence = sequences_[static_cast<std::size_t>(keys.sequence)];
    sequence.keys = keys;
    if (sequence.end < keys.tokens) take(keys, sequence.end, keys.tokens);
    sequence.end = std::max(sequence.end, keys.tokens);
  }
  void roll_back(int sequence, std::int64_t tokens) {
    std::int64_t& end = sequences_[static_cast<std::size_t>(sequence)].end;
    end = std::min(end, tokens);
  }
  void forget() {
    for (Sequence& sequence : sequences_) sequence.end = 0;
  }

  void begin(const GpuStep& step, const LocalWindow& dense) {
    for (Sequence& sequence : sequences_) sequence.needed = 0;
    for (const cuda::QueryToken& query : step.queries) {
      std::int64_t& needed = sequences_[static_cast<std::size_t>(query.sequence)].needed;
      needed = std::max(needed, query.position + 1 - dense.window);
    }
  }
  /// The same take for those that the running step itself makes far; whether there were any.
  template <class Take>
  bool take_needed(const Take& take) const {
    bool any = false;
    for (const Sequence& sequence : sequences_) {
      if (sequence.end >= sequence.needed) continue;
      take(sequence.keys, sequence.end, sequence.needed);
      any = true;
    }
    return any;
  }

 private:
  struct Sequence {
    GpuKeys keys;
    std::int64_t end = 0;     ///< keys below are in every layer's index
    std::int64_t needed = 0;  ///< keys below are far in the running step
  };
  std::vector<Sequence> sequences_;
};

/// How many far keys each query token of a step takes.
class StepBudgets {
 public:
  StepBudgets(Amount budget, std::int64_t most_queries)
      : budget_(budget), device_(most_queries * 4, "the budgets of a step"), staged_(most_queries * 4) {}

  std::int64_t of(std::int64_t far) const { return budget_.of(far); }
  void begin(const GpuStep& step, const LocalWindow& dense) {
    for (std::size_t i = 0; i < step.queries.size(); ++i) {
      const auto budget = static_cast<std::int32_t>(
          of(step.far.empty() ? far_keys(dense, step.queries[i].position) : step.far[i]));
      std::int32_t& staged = staged_.as<std::int32_t>()[i];
      has_news_ = has_news_ || staged != budget;
      staged = budget;
    }
  }
  void upload(cuda::StreamHandle stream) {
    cuda::copy_numbers(device_.as<void>(), staged_, device_.bytes(), stream);
    has_news_ = false;
  }
  bool has_news() const { return has_news_; }
  const std::int32_t* get() const { return device_.as<std::int32_t>(); }
  std::int64_t bytes() const { return device_.bytes(); }

 private:
  Amount budget_;
  cuda::Buffer device_;        // [most_queries]
  cuda::PinnedBuffer staged_;  // the same
  bool has_news_ = true;
};

}  // namespace lode
