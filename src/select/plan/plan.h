// SPDX-License-Identifier: Apache-2.0
// A plan's layers as those see them who run their parts: a selector, a device.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lodestone/spec.h"
#include "select/plan/file.h"

namespace lode {

/// The heads of one layer that share a spec.
struct PlanHeads {
  std::string text;  ///< the spec as the plan writes it
  Spec spec;         ///< with the plan's dense parts, and an artefact where its method needs one
  std::vector<int> heads;
};

/// In the order of their specs. `of_plan`: the spec that names the plan, whose dense parts all get; artefacts that the
/// plan does not name lie in its `folder`.
std::vector<PlanHeads> heads_by_spec(const Plan& plan, int layer, const Spec& of_plan);

/// A selector of a layer that has such parts.
class PlanLayer {
 public:
  struct Part {
    const PlanHeads* heads = nullptr;
    Selector* selector = nullptr;
  };
  virtual ~PlanLayer() = default;
  virtual std::vector<Part> plan_parts() const = 0;
};

}  // namespace lode
