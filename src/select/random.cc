// SPDX-License-Identifier: Apache-2.0
// random: far keys drawn uniformly without replacement, the floor under every method (SAAP, appendix B:
// "uniform sampling"). One draw per (layer, KV head, position), from a generator seeded by these, serves all
// heads of the group.
#include <bit>

#include "base/rng.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/per_token.h"
#include "select/rows.h"

namespace lode {

namespace {

constexpr Amount kFraction = {0.05, true};

class Random final : public PerTokenSelector {
 public:
  Random(const LayerGeometry& geometry, Amount fraction)
      : PerTokenSelector(geometry), fraction_(fraction), drawn_(static_cast<std::size_t>(workers())) {}

  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork&) override {
    const std::int64_t n = unit.far_keys(), wanted = fraction_.of(n);
    out.add_set(unit.set(all_heads(geometry_.group())));
    if (wanted >= n) return out.add_run(unit.far_begin, unit.far_end);
    Rng rng(hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(unit.kv_head),
                      unit.position()));
    RowSet& drawn = drawn_[static_cast<std::size_t>(worker)];
    drawn.reset(n);
    // Floyd's sampling: every subset of `wanted` keys is equally likely, and no draw is repeated.
    for (std::int64_t last = n - wanted; last < n; ++last) {
      const auto at = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(last + 1)));
      drawn.insert(drawn.contains(at) ? last : at);
    }
    drawn.drain([&](std::int64_t at) { out.add_row(unit.far_begin + static_cast<Position>(at)); });
  }

  Amount fraction_;
  std::vector<RowSet> drawn_;  // [workers]
};

}  // namespace

MethodInfo random_method() {
  return {.name = "random",
          .aliases = {},
          .source = "uniform sampling without replacement (SAAP, appendix B)",
          .keys = {{"fraction", "keys drawn, a count or a share of the far keys", "5%"}},
          .dense = {},
          .dense_layers = 0,
          .make =
              [](const Spec& spec, const LayerGeometry& geometry, std::string_view) {
                return std::make_unique<Random>(geometry, spec.amount("fraction", kFraction));
              },
          .validate = [](const Spec& spec) { spec.amount("fraction", kFraction); }};
}

}  // namespace lode
