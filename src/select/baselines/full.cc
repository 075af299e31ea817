// SPDX-License-Identifier: Apache-2.0
// full: every key. The engine runs it without a selector; the object here serves comparisons.
#include "select/methods.h"
#include "select/shared/per_token.h"

namespace lode {

namespace {

class Full final : public PerTokenSelector {
 public:
  using PerTokenSelector::PerTokenSelector;

  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  void choose(const SelectUnit& unit, int, Selection& out, SelectWork&) override {
    out.add_set(unit.set(all_heads(geometry_.group())));
    out.add_run(unit.far_begin, unit.far_end);
  }
};

}  // namespace

std::unique_ptr<Selector> make_full_selector(const LayerGeometry& geometry) {
  return std::make_unique<Full>(geometry);
}

MethodInfo full_method() {
  return {.name = "full",
          .aliases = {},
          .source = "every token attends all tokens before it",
          .keys = {},
          .dense = {},
          .dense_layers = 0,
          .make = nullptr,
          .validate = nullptr};
}

}  // namespace lode
