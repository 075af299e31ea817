// SPDX-License-Identifier: Apache-2.0
#include "engine/audit.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/relative_error.h"
#include "base/rng.h"

namespace lode {

Audit::Audit(double rate, std::uint64_t seed, int layers)
    : rate_(rate), seed_(seed), seen_(static_cast<std::size_t>(layers)) {}

bool Audit::samples(int layer, Position begin) const {
  return Rng(hash_seed(seed_, layer, begin)).uniform() < rate_;
}

bool Audit::count(int layer, std::int64_t d, std::span<const float> outputs, std::span<const float> exact,
                  WorkReport& report) {
  Seen& seen = seen_[static_cast<std::size_t>(layer)];
  const std::int64_t rows = std::ssize(outputs) / d;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double error = relative_error(outputs.data() + r * d, exact.data() + r * d, d);
    seen.error_sum += error;
    report.audit_error_sum += error;
    report.audit_error_max = std::max(report.audit_error_max, error);
  }
  seen.outputs += rows;
  report.audited += rows;
  // Written so that an error that is no number passes every limit.
  return limit_ && !(seen.error_sum <= *limit_ * static_cast<double>(seen.outputs));
}

void Audit::fall_back(int layer) {
  fallen_back_.insert(std::lower_bound(fallen_back_.begin(), fallen_back_.end(), layer), layer);
}

void Audit::compare(const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                    std::span<float* const> outputs, WorkReport& report) {
  const std::int64_t d = geometry.head_dim;
  std::vector<std::vector<float>> exact;  // per block: [T, Hq, d]
  bool beyond = false;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    exact.emplace_back(static_cast<std::size_t>(blocks[b].tokens * geometry.query_heads * d));
    float* const exact_output = exact.back().data();
    attend_full(blocks.subspan(b, 1), geometry, {&exact_output, 1});
    beyond = count(geometry.layer, d, {outputs[b], exact.back().size()}, exact.back(), report);
  }
  if (!beyond) return;
  for (std::size_t b = 0; b < blocks.size(); ++b) std::copy(exact[b].begin(), exact[b].end(), outputs[b]);
  fall_back(geometry.layer);
}

ForwardHooks Audit::hooks(const ForwardHooks* next, WorkReport& report) {
  ForwardHooks hooks = next != nullptr ? *next : ForwardHooks();
  hooks.attended = [this, next, &report](const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                                         const Selection* selection, std::span<float* const> outputs) {
    if (selection != nullptr && samples(geometry.layer, blocks.front().begin))
      compare(geometry, blocks, outputs, report);
    if (next != nullptr && next->attended) next->attended(geometry, blocks, selection, outputs);
  };
  if (next != nullptr) return hooks;
  hooks.samples = [this](int layer, Position begin) { return samples(layer, begin); };
  hooks.compare = [this, &report](int layer, std::int64_t d, std::span<float> outputs,
                                  std::span<const float> exact) {
    if (!count(layer, d, outputs, exact, report)) return;
    std::ranges::copy(exact, outputs.begin());
    fall_back(layer);
  };
  return hooks;
}

std::span<Selector* const> Audit::without_fallen(std::span<Selector* const> selectors) {
  if (fallen_back_.empty()) return selectors;
  left_.assign(selectors.begin(), selectors.end());
  for (const int layer : fallen_back_) left_[static_cast<std::size_t>(layer)] = nullptr;
  const bool any = std::any_of(left_.begin(), left_.end(), [](const Selector* s) { return s != nullptr; });
  return any ? std::span<Selector* const>(left_) : std::span<Selector* const>();
}

std::string Audit::notice() const {
  if (fallen_back_.empty()) return {};
  return fmt::format("layer{} {} went back to full attention: audited outputs beyond the limit of {}",
                     fallen_back_.size() == 1 ? "" : "s", fmt::join(fallen_back_, ", "), *limit_);
}

void Audit::forget() {
  std::fill(seen_.begin(), seen_.end(), Seen());
  fallen_back_.clear();
}

}  // namespace lode
