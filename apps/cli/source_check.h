// SPDX-License-Identifier: Apache-2.0
// Whether an answer rests on the passages that it cites: it is given again without them, and without as many others.
#pragma once

#include <vector>

#include "asker.h"
#include "base/json.h"
#include "base/rng.h"
#include "engine/blanking.h"
#include "lodestone/sources.h"

namespace lode::cli {

class SourceCheck {
 public:
  /// Of a text that is not asked yet. On the CPU.
  explicit SourceCheck(Context& context) : blanking_(context) {}

  /// `question` as it was asked under full attention, with the answer that came and what it cites. Null where nothing
  /// is cited.
  Json check(Asker& asker, Asker::Question question, const std::string& answer,
             const std::vector<Citation>& citations);

 private:
  Blanking blanking_;
  Rng others_{1};
};

/// What the check found, as a line for people.
std::string source_check_text(const Json& checked);

}  // namespace lode::cli
