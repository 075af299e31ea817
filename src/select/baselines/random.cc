// SPDX-License-Identifier: Apache-2.0
// random: far keys drawn uniformly without replacement, the floor under every method (SAAP, appendix B:
// "uniform sampling"). One draw per (layer, KV head, position), from a generator seeded by these, serves all
// heads of the group: every far key has a number of the generator, in their order, and those of the largest
// numbers are drawn, ties to the newer key. So a GPU draws the same keys, each thread its own numbers.
#include "base/rng.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/best_keys.h"
#include "select/shared/per_token.h"

namespace lode {

namespace {

constexpr Amount kFraction = {0.05, true};

class Random final : public PerTokenSelector {
 public:
  Random(const LayerGeometry& geometry, Amount fraction)
      : PerTokenSelector(geometry), fraction_(fraction), scratch_(static_cast<std::size_t>(workers())) {}

  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  struct Scratch {
    std::vector<float> numbers, best;
    std::vector<Position> drawn;
  };

  bool divides() const override { return true; }

  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork&) override {
    const std::int64_t wanted = fraction_.of(unit.all_far_keys());
    out.add_set(unit.set(all_heads(geometry_.group())));
    if (wanted >= unit.all_far_keys()) return out.add_run(unit.far_begin, unit.far_end);
    const std::uint64_t seed =
        hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(unit.kv_head), unit.position());
    Scratch& s = scratch_[static_cast<std::size_t>(worker)];
    s.numbers.resize(static_cast<std::size_t>(unit.far_keys()));
    const auto first = static_cast<std::size_t>(unit.far_begin - unit.all_far_begin);
    for (std::size_t i = 0; i < s.numbers.size(); ++i) s.numbers[i] = nth_uniform(seed, first + i);
    s.drawn.clear();
    top_count(s.numbers, wanted, unit.far_begin, s.drawn);
    out.add_rows(s.drawn);
    s.best.clear();
    for (const Position row : s.drawn)
      s.best.push_back(s.numbers[static_cast<std::size_t>(row - unit.far_begin)]);
    rank_rows(unit, {.budget = wanted}, s.drawn, s.best);
  }

  Amount fraction_;
  std::vector<Scratch> scratch_;  // [workers]
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
