// SPDX-License-Identifier: Apache-2.0
// What several machines bring: a model of cost whose parts are measured on one of them, with its share of the text, and
// on the link between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/link_speed.h"
#include "lodestone/engine.h"

namespace lode {

/// What one machine does by itself.
struct MachineParts {
  int layers = 0, query_heads = 0, head_dim = 0;
  double token_seconds = 0;      ///< of a prefill token, attention to earlier chunks apart
  double pair_seconds = 0;       ///< of a layer's attention, for one query and one earlier key
  std::int64_t token_bytes = 0;  ///< of keys and values
};

/// One step's part that ranks spend on telling each other.
struct StepMessages {
  std::int64_t tokens = 1;  ///< of the step
  bool chooses = false;     ///< its method finds the best keys of all ranks, budget by budget
  double budget = 0;        ///< keys of a choice
};

class MachinesModel {
 public:
  MachinesModel(const MachineParts& parts, int machines, const LinkSpeed& link)
      : parts_(parts), machines_(machines), link_(link) {}

  /// Of a text of so many tokens, on all machines; `communication` of it.
  struct Prefill {
    double seconds = 0, communication = 0;
    /// Share of the time that is not spent on telling each other.
    double efficiency() const { return seconds > 0 ? 1 - communication / seconds : 1; }
  };
  Prefill prefill(std::int64_t tokens) const;
  /// Seconds that ranks need to tell each other of a step.
  double step_communication(const StepMessages& step) const;

 private:
  double heads_bytes(double rows_a_head) const {
    return rows_a_head * parts_.query_heads * static_cast<double>(sizeof(float));
  }
  MachineParts parts_;
  int machines_;
  LinkSpeed link_;
};

}  // namespace lode
