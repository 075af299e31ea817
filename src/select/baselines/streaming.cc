// SPDX-License-Identifier: Apache-2.0
// streaming: sink and window, nothing between. Xiao et al., "Efficient Streaming Language Models with
// Attention Sinks" (2023), section 3.2. Differs from the paper: positions stay the text's own instead of
// being renumbered inside the cache, since all methods here share one KV store whose keys are already
// rotated.
#include "select/methods.h"
#include "select/shared/per_token.h"

namespace lode {

namespace {

class Streaming final : public PerTokenSelector {
 public:
  using PerTokenSelector::PerTokenSelector;

  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  bool divides() const override { return true; }
  void choose(const SelectUnit& unit, int, Selection& out, SelectWork&) override {
    out.add_set(unit.set(all_heads(geometry_.group())));
  }
};

}  // namespace

MethodInfo streaming_method() {
  return {.name = "streaming",
          .aliases = {},
          .source = "StreamingLLM (Xiao et al. 2023): sink and window only",
          .keys = {},
          .dense = {},
          .dense_layers = 0,
          .make = [](const Spec&, const LayerGeometry& geometry,
                     std::string_view) { return std::make_unique<Streaming>(geometry); },
          .validate = nullptr};
}

}  // namespace lode
