// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/saap_variants.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "base/text.h"
#include "lab/train/saap/trainer.h"
#include "lodestone/error.h"

namespace lode {

namespace {

struct Variant {
  std::string_view name;
  bool residual, drop_near_queries, causal;
};
constexpr Variant kVariants[] = {{"long-range", false, true, false},
                                 {"short-range", false, false, false},
                                 {"residual", true, false, false},
                                 {"causal", true, false, true}};

const Variant& variant_of(std::string_view name) {
  std::vector<std::string> names;
  for (const Variant& variant : kVariants) {
    if (variant.name == name) return variant;
    names.emplace_back(variant.name);
  }
  throw InputError(fmt::format("expected one of the variants {}; found '{}'", join(names), excerpt(name)));
}

SaapSettings settings_of(const Variant& variant, const SaapVariantOptions& options) {
  SaapSettings settings;
  settings.clusters = options.clusters;
  settings.hidden = options.hidden;
  settings.samples = options.samples;
  settings.batch = options.batch;
  settings.steps = options.steps;
  settings.residual = variant.residual;
  settings.filter.window = options.window;
  settings.filter.distance = options.distance;
  settings.filter.queries = variant.drop_near_queries;
  settings.filter.causal = variant.causal;
  settings.test_as_asked = true;
  settings.late = 0.5;
  settings.probes = 16;
  settings.seed = options.seed;
  return settings;
}

/// The mean over the heads, as a JSON list.
Json mean_of(const std::vector<SaapHeadReport>& heads, SaapCaptured SaapHeadReport::*captured) {
  std::vector<double> mean(kSaapShares.size(), 0.0);
  for (const SaapHeadReport& head : heads) {
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += (head.*captured)[i] / static_cast<double>(heads.size());
  }
  return mean;
}

}  // namespace

void check_saap_variant(std::string_view name) {
  variant_of(name);
}

std::vector<Json> saap_variants(const std::shared_ptr<const Model>& model,
                                const std::vector<std::string>& texts,
                                const std::vector<std::string>& variants, const SaapVariantOptions& options) {
  std::vector<Prompt> prompts;
  for (const std::string& text : texts)
    prompts.push_back(cut_into_prompts(*model, "text", text, options.tokens).front());
  ContextOptions context = options.context;
  context.device = Device::cpu;
  std::vector<Json> results;
  for (const std::string& name : variants) {
    const std::filesystem::path checkpoint =
        std::filesystem::temp_directory_path() /
        fmt::format("lodestone-variant-{}-{}.checkpoint", getpid(), name);
    const SaapResult trained = train_saap(model, context, settings_of(variant_of(name), options), prompts,
                                          checkpoint, options.progress);
    std::filesystem::remove(checkpoint);
    double loss = 0;
    for (const SaapHeadReport& head : trained.heads)
      loss += head.loss / static_cast<double>(trained.heads.size());
    results.push_back({{"variant", name},
                       {"shares", kSaapShares},
                       {"loss", loss},
                       {"captured", mean_of(trained.heads, &SaapHeadReport::captured)},
                       {"centroids", mean_of(trained.heads, &SaapHeadReport::kmeans_captured)},
                       {"best", mean_of(trained.heads, &SaapHeadReport::best_captured)}});
  }
  return results;
}

}  // namespace lode
