// SPDX-License-Identifier: Apache-2.0
// What is kept of a run of SAAP's training, so that another one goes on from there to the same bits.
#include <fmt/format.h>

#include <bit>

#include "base/hash.h"
#include "lab/train/saap/run.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// For what exported networks are kept as.
SaapClassifier exported_shape(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool residual) {
  const auto zeros = [](std::int64_t n) { return std::vector<float>(static_cast<std::size_t>(n), 0.0f); };
  const auto w1 = zeros(hidden * d), b1 = zeros(hidden), w2 = zeros(buckets * hidden),
             w3 = zeros(residual ? buckets * d : 0), b2 = zeros(buckets);
  return SaapClassifier(BucketNet(d, buckets, {w1, b1, w2, w3, b2}, DType::f32));
}

}  // namespace

std::string SaapRun::Head::prefix() const {
  return fmt::format("layer.{}.head.{}.", layer, head);
}

void SaapRun::open_checkpoint() {
  Hasher hasher;
  for (const Prompt& prompt : prompts_) hasher.add(std::as_bytes(std::span(prompt.tokens)));
  Json settings = settings_.json();
  settings["prompts"] = hasher.hex();
  settings["model"] = model_->fingerprint();
  // What keys were stored as, and turned by; runs with the defaults have checkpoints from before these were told.
  if (context_options_.kv_type != DType::f16)
    settings["kv_type"] = std::string(name_of(context_options_.kv_type));
  if (context_options_.rope_factor.value_or(1.0) != 1.0)
    settings["rope_factor"] = *context_options_.rope_factor;
  if (context_options_.device == Device::cuda) settings["device"] = "cuda";  // its sums have other last bits
  if (!settings_.from.empty()) {  // by what it holds: another file may have come to its place
    Hasher from;
    for (const auto& [layer, fingerprint] : read_saap_fingerprints(settings_.from))
      from.add(std::as_bytes(std::span(fingerprint)));
    settings["from_fingerprint"] = from.hex();
  }
  if (std::filesystem::exists(path_)) {
    checkpoint_ = Checkpoint::read(path_);
    const auto found = checkpoint_.notes.find("settings");
    if (found == checkpoint_.notes.end() || found->second != settings.dump()) {
      throw InputError(
          path_.string() +
          ": expected the checkpoint of a run with these settings and texts, found another: remove it "
          "to start anew");
    }
  }
  checkpoint_.notes["settings"] = settings.dump();
}

void SaapRun::save_checkpoint(bool now) {
  if (!now && Clock::now() - saved_ < kCheckpointEvery) return;
  checkpoint_.write(path_);
  saved_ = Clock::now();
}

/// A finished head: its networks as float32 and what was measured.
void SaapRun::keep(const Head& head) {
  const std::string prefix = head.prefix();
  checkpoint_.erase(prefix + "net.");
  SaapClassifier classifier(head.trained().queries);
  checkpoint_.put(prefix + "done.", classifier.module());
  checkpoint_.arrays[prefix + "load"] = head.result.load;
  checkpoint_.arrays[prefix + "imbalance"] = {head.result.imbalance};
  checkpoint_.arrays[prefix + "selectivity"] = head.trained().selectivity;
  checkpoint_.notes[prefix + "report"] = head.report.json().dump();
}

bool SaapRun::restore(Head& head) {
  const std::string prefix = head.prefix(), where = path_.string();
  const auto report = checkpoint_.notes.find(prefix + "report");
  if (report == checkpoint_.notes.end()) return false;
  // The exported network's shape, filled from the checkpoint.
  const bool residual = checkpoint_.arrays.contains(prefix + "done.projection.weight");
  const auto bias = checkpoint_.arrays.find(prefix + (residual ? "done.inner.0.bias" : "done.0.bias"));
  if (bias == checkpoint_.arrays.end()) throw InputError(where + ": expected a finished network, found none");
  const std::int64_t c = head.keys().buckets;
  SaapClassifier classifier = exported_shape(config_.head_dim, std::ssize(bias->second), c, residual);
  checkpoint_.get(prefix + "done.", classifier.module(), nullptr, where);
  head.result = assembled(head,
                          {.queries = classifier.exported(settings_.type),
                           .selectivity = checkpoint_.array(
                               prefix + "selectivity", std::bit_width(static_cast<std::uint64_t>(c)), where)},
                          checkpoint_.array(prefix + "load", c, where),
                          checkpoint_.array(prefix + "imbalance", 1, where).front());
  head.report = SaapHeadReport::parse(report->second, where);
  head.result.near_only = head.report.near_only;
  return true;
}

bool SaapRun::restore_keys(Head& head) {
  const std::string prefix = head.prefix() + "keys.";
  if (!checkpoint_.arrays.contains(prefix + "inner.0.weight")) return false;
  SaapClassifier kept = exported_shape(config_.head_dim, settings_.key_width(), settings_.clusters, true);
  checkpoint_.get(prefix, kept.module(), nullptr, path_.string());
  head.start.keys = kept.exported(type_of_keys());
  return true;
}

}  // namespace lode
