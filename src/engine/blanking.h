// SPDX-License-Identifier: Apache-2.0
// Attention without some of the text: the test of whether an answer rests on the passages that are cited.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/rng.h"
#include "lodestone/engine.h"
#include "lodestone/sources.h"

namespace lode {

/// Attends exactly to every key but those that are blanked. For measurements: a context with it cannot be
/// saved. On the CPU.
class Blanking {
 public:
  /// The context must outlive this and be indexed.
  explicit Blanking(Context& context);
  ~Blanking();
  /// What questions attend by.
  MethodId method() const { return method_; }
  /// Tokens that are left out from now on: runs, rising and apart.
  void set(std::vector<Run> blanked);

 private:
  std::shared_ptr<std::vector<Run>> blanked_;
  MethodId method_ = kDense;
};

/// The tokens of passages, rising and apart.
std::vector<Run> runs_of(const std::vector<Citation>& citations);
/// As many runs of the same lengths, drawn from the first `tokens` tokens, that meet none of these and no attention
/// sink; none where no such are found.
std::vector<Run> runs_beside(const std::vector<Run>& runs, std::int64_t tokens, Rng& rng);

}  // namespace lode
