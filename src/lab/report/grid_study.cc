// SPDX-License-Identifier: Apache-2.0
// The part of a grid that measures the model alone: how keys and queries lie, and what a classifier learns.
#include <fmt/format.h>

#include <algorithm>

#include "lab/eval/work_cost.h"
#include "lab/report/grid.h"
#include "lab/studies/bucket_drift.h"
#include "lab/studies/key_query.h"
#include "lab/studies/saap_variants.h"
#include "lab/tasks/samples.h"

namespace lode {

Json MeasurementRunner::study_key(const SuiteRun& run, std::int64_t length) const {
  Json key = base_key(name_of(run.kind));
  key.update({{"seed", run.seed}, {"haystack", haystack_hash_}, {"tokens", length}});
  if (run.kind == RunKind::key_query)
    key["medians"] = true;  // which older results lack
  else
    key["texts"] = run.texts;
  if (run.kind == RunKind::training) key.update({{"steps", run.steps}, {"variants", run.variants}});
  return key;
}

void MeasurementRunner::plan_study(const SuiteRun& run, std::vector<Part>& parts) {
  for (const std::int64_t length : run.lengths) {
    const Json key = study_key(run, length);
    if (!is_new(key)) continue;
    std::int64_t cost = prefill_cost(length);
    if (run.kind == RunKind::drift) cost *= 2 * run.texts;
    // Texts are read twice for each variant; a thousand steps of all heads take about as long as 40k tokens.
    if (run.kind == RunKind::training)
      cost = std::ssize(run.variants) * (2 * run.texts * cost + 40 * run.steps);
    parts.push_back(
        {.name = effort_name(run, length), .cost = cost, .work = [this, &run, length, key](const auto&) {
           cells_.add(key, measure_study(run, length));
         }});
  }
}

/// Texts of a length or a little more, as probes read them, each of another seed.
std::vector<std::string> MeasurementRunner::study_texts(const SuiteRun& run, std::int64_t length,
                                                        std::int64_t count) const {
  const std::int64_t tokens = length + length / 64 + 64;
  const std::shared_ptr<const Haystack> hay = haystack(run.seed, count * tokens);
  std::vector<std::string> texts;
  for (std::int64_t i = 0; i < count; ++i)
    texts.push_back(make_echo_text(tokens, run.seed + static_cast<std::uint64_t>(i), Language::built_in(),
                                   *hay, echo_distance(tokens)));
  return texts;
}

Json MeasurementRunner::measure_study(const SuiteRun& run, std::int64_t length) const {
  if (run.kind == RunKind::key_query)
    return key_query_studies(model_, probe_text(run, length),
                             {.context = options_.context, .seed = run.seed});
  if (run.kind == RunKind::drift) {
    const std::vector<std::string> texts = study_texts(run, length, 2 * run.texts);
    const auto half = texts.begin() + run.texts;
    return bucket_drift(
        model_, {texts.begin(), half}, {half, texts.end()},
        {.context = options_.context, .tokens = length, .keys = length / 2, .seed = run.seed});
  }
  return saap_variants(model_, study_texts(run, length, run.texts), run.variants,
                       {.context = options_.context,
                        .tokens = length,
                        .steps = run.steps,
                        .seed = run.seed,
                        .progress = Progress::Mode::quiet});
}

std::vector<Json> MeasurementRunner::study(const SuiteRun& run, std::int64_t length) const {
  const Json* found = cells_.find(study_key(run, length));
  return found == nullptr ? std::vector<Json>() : found->get<std::vector<Json>>();
}

}  // namespace lode
