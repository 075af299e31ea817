// SPDX-License-Identifier: Apache-2.0
// What a training of SAAP was asked for and what it reports, as JSON: in checkpoints, artefacts and for
// --json.
#include <fmt/format.h>

#include "lab/train/saap/trainer.h"
#include "lodestone/error.h"

namespace lode {

namespace {

SaapCaptured captured_in(const Json& json, const char* key, const std::string& where) {
  SaapCaptured captured = {};
  if (!json.contains(key) || !json[key].is_array() || json[key].size() != captured.size())
    throw InputError(fmt::format("{}: '{}': expected {} numbers", where, key, captured.size()));
  for (std::size_t i = 0; i < captured.size(); ++i) {
    if (!json[key][i].is_number()) throw InputError(fmt::format("{}: '{}': expected numbers", where, key));
    captured[i] = json[key][i].get<double>();
  }
  return captured;
}

}  // namespace

Json SaapSettings::json() const {
  return {{"clusters", clusters},
          {"hidden", hidden},
          {"residual", residual},
          {"balance", balance},
          {"train_keys", train_keys},
          {"key_hidden", key_width()},
          {"key_steps", key_steps},
          {"key_sample", key_sample},
          {"key_queries", key_queries},
          {"sink", filter.sink},
          {"window", filter.window},
          {"distance", filter.distance},
          {"filter_pairs", filter.pairs},
          {"filter_queries", filter.queries},
          {"causal", filter.causal},
          {"dense_layers", dense_layers},
          {"samples", samples},
          {"late", late},
          {"late_tokens", late_tokens},
          {"shift", shift},
          {"shifted", shifted},
          {"shift_to", shift_to},
          {"key_prompts", key_prompts},
          {"held_out", held_out},
          {"adapt", adapt},
          {"test_as_asked", test_as_asked},
          {"steps", steps},
          {"batch", batch},
          {"rate", rate},
          {"decay", decay},
          {"weight_decay", weight_decay},
          {"type", std::string(name_of(type))},
          {"probes", probes},
          {"from", from.string()},
          {"add_network", add_network},
          {"replace_network", replace_network},
          {"seed", seed}};
}

std::int64_t saap_bytes_of_head(const SaapSettings& s, std::int64_t prompts, std::int64_t head_dim) {
  const std::int64_t d = head_dim, keys = s.key_sample, queries = s.key_queries;
  const std::int64_t examples = s.samples * (4 * d + 2 * s.clusters),
                     sample = s.train_keys ? 4 * d * (keys + queries) + 2 * keys * queries : 0;
  return prompts * std::max(examples, sample) + 1;
}

Json SaapHeadReport::json() const {
  return {{"layer", layer},
          {"head", head},
          {"examples", examples},
          {"held_out", held_out},
          {"train_loss", train_loss},
          {"loss", loss},
          {"mass", mass},
          {"selectivity", selectivity},
          {"kmeans_mass", kmeans_mass},
          {"kmeans_selectivity", kmeans_selectivity},
          {"best_mass", best_mass},
          {"gain", gain},
          {"captured", captured},
          {"kmeans_captured", kmeans_captured},
          {"best_captured", best_captured},
          {"start_loss", start_loss},
          {"start_captured", start_captured},
          {"imbalance", imbalance},
          {"near_only", near_only},
          {"seconds", seconds}};
}

SaapHeadReport SaapHeadReport::parse(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  const auto number = [&](const char* key) { return json_number(json, key, where, -1e18, 1e18); };
  const auto whole = [&](const char* key) { return json_int(json, key, where, 0, INT64_MAX); };
  return {.layer = static_cast<int>(whole("layer")),
          .head = static_cast<int>(whole("head")),
          .examples = whole("examples"),
          .held_out = whole("held_out"),
          .train_loss = number("train_loss"),
          .loss = number("loss"),
          .mass = number("mass"),
          .selectivity = number("selectivity"),
          .kmeans_mass = number("kmeans_mass"),
          .kmeans_selectivity = number("kmeans_selectivity"),
          .best_mass = number("best_mass"),
          .gain = number("gain"),
          .captured = captured_in(json, "captured", where),
          .kmeans_captured = captured_in(json, "kmeans_captured", where),
          .best_captured = captured_in(json, "best_captured", where),
          .start_loss = number("start_loss"),
          .start_captured = captured_in(json, "start_captured", where),
          .imbalance = number("imbalance"),
          .near_only = json_has(json, "near_only") && json_bool(json, "near_only", where),
          .seconds = number("seconds")};
}

}  // namespace lode
