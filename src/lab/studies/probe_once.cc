// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/probe_once.h"

#include "base/hash.h"
#include "lab/eval/settings.h"

namespace lode {

namespace {

/// What the log stores of a text's probe.
Json packed(const ProbeReport& report) {
  const auto number = [](const std::optional<double>& x) { return x ? Json(*x) : Json(); };
  Json rows = Json::array();
  for (const ProbeRow& row : report.rows) {
    Json heads = Json::array();
    for (const HeadMeasure& h : row.heads) heads.push_back({h.layer, h.head, h.read, h.error});
    rows.push_back({{"attention", row.attention},
                    {"loss", row.loss},
                    {"recovered", number(row.recovered)},
                    {"agreement", row.agreement},
                    {"kept", number(row.kept)},
                    {"divergence", row.divergence},
                    {"gap_divergence", row.gap_divergence},
                    {"density", row.density},
                    {"selectivity", row.selectivity},
                    {"selector_share", row.selector_share},
                    {"dense_heads", row.dense_heads},
                    {"heads", std::move(heads)}});
  }
  return {{"tokens", report.tokens},
          {"gap_tokens", report.gap_tokens},
          {"found_answers", report.found_answers},
          {"row_of", report.row_of},
          {"rows", std::move(rows)}};
}

ProbeReport unpacked(const Json& json) {
  const auto number = [](const Json& x) { return x.is_null() ? std::optional<double>() : x.get<double>(); };
  ProbeReport report = {.tokens = json.at("tokens"),
                        .gap_tokens = json.at("gap_tokens"),
                        .found_answers = json.at("found_answers"),
                        .row_of = json.at("row_of")};
  for (const Json& row : json.at("rows")) {
    report.rows.push_back({.attention = row.at("attention"),
                           .loss = row.at("loss"),
                           .recovered = number(row.at("recovered")),
                           .agreement = row.at("agreement"),
                           .kept = number(row.at("kept")),
                           .divergence = row.at("divergence"),
                           .gap_divergence = row.at("gap_divergence"),
                           .density = row.at("density"),
                           .selectivity = row.at("selectivity"),
                           .selector_share = row.at("selector_share"),
                           .dense_heads = row.at("dense_heads")});
    for (const Json& h : row.at("heads"))
      report.rows.back().heads.push_back(
          {.layer = h.at(0), .head = h.at(1), .read = h.at(2), .error = h.at(3)});
  }
  return report;
}

/// What a probe depends on. Plans for the time of a measurement have other names in every run, and count by their
/// contents.
Json key_of(const Model& model, std::string_view text, const std::vector<NamedSpec>& specs,
            const ProbeOptions& options) {
  Json asked = Json::array();
  for (const NamedSpec& s : specs) {
    const bool plan = s.spec.name == "plan";
    asked.push_back({plan ? "plan" : s.name, plan ? "" : probe_spec(s.spec, options.dense).str(),
                     files_hash(s.spec, model.path())});
  }
  return {{"run", run_settings(model, options.context)},
          {"text", hash_hex(text)},
          {"specs", std::move(asked)},
          {"last", options.last},
          {"sink", options.dense.sink},
          {"window", options.dense.window},
          {"measured", options.measured},
          {"of_far_past", options.of_far_past},
          {"divergence", options.divergence},
          {"gap", options.gap},
          {"sure", options.sure},
          {"marks", options.marks ? Json({options.marks->before, options.marks->after}) : Json()}};
}

}  // namespace

ProbeReport probe_once(StepLog* log, const std::shared_ptr<const Model>& model, const std::string& text,
                       const std::vector<NamedSpec>& specs, const ProbeOptions& options) {
  if (log == nullptr) return probe(model, text, specs, options);
  const Json key = key_of(*model, text, specs, options);
  if (const Json* const done = log->find(key)) {
    try {
      return unpacked(*done);
    } catch (const Json::exception&) {  // damaged: measured anew
    }
  }
  ProbeReport report = probe(model, text, specs, options);
  log->add(key, packed(report));
  return report;
}

}  // namespace lode
