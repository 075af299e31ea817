// SPDX-License-Identifier: Apache-2.0
// What `--audit` found, as results show it.
#pragma once

#include <string>

#include "base/json.h"
#include "lodestone/engine.h"

namespace lode {

/// Adds "audit": {"outputs", "mean_error", "max_error"} when any output was audited.
void put_audit(Json& result, const WorkReport& work);
/// "; output error 0.0123 on average, 0.0456 at most, over 64 audited outputs"; empty when none was.
std::string audit_remark(const WorkReport& work);

}  // namespace lode
