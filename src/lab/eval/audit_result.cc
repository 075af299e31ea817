// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/audit_result.h"

#include <fmt/format.h>

namespace lode {

namespace {

double mean_error(const WorkReport& work) {
  return work.audit_error_sum / static_cast<double>(work.audited);
}

}  // namespace

void put_audit(Json& result, const WorkReport& work) {
  if (work.audited == 0) return;
  result["audit"] = {
      {"outputs", work.audited}, {"mean_error", mean_error(work)}, {"max_error", work.audit_error_max}};
}

std::string audit_remark(const WorkReport& work) {
  if (work.audited == 0) return "";
  return fmt::format("; output error {:.4f} on average, {:.4f} at most, over {} audited outputs",
                     mean_error(work), work.audit_error_max, work.audited);
}

}  // namespace lode
