// SPDX-License-Identifier: Apache-2.0
// Probes of a long study, each of which is made once, however often the study is ended and begun again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lab/eval/probe.h"
#include "lab/studies/step_log.h"

namespace lode {

/// probe(), or what the log has of the same; a null log has nothing. Of heads it keeps bytes and errors alone.
ProbeReport probe_once(StepLog* log, const std::shared_ptr<const Model>& model, const std::string& text,
                       const std::vector<NamedSpec>& specs, const ProbeOptions& options);

}  // namespace lode
