// SPDX-License-Identifier: Apache-2.0
// A method that leaves nothing out, for comparing with full attention.
#pragma once

#include "lodestone/selector.h"

namespace lode {

/// A method that selects every far key.
class Everything : public Selector {
 public:
  explicit Everything(const LayerGeometry& geometry) : geometry_(geometry) {}
  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override { ++calls; }
  void roll_back(std::int32_t, std::int64_t) override {}
  void select(std::span<const QueryBlock> blocks, Selection& out) override {
    for (const QueryBlock& block : blocks)
      for (std::int64_t t = 0; t < block.tokens; ++t)
        for (int head = 0; head < geometry_.kv_heads; ++head) {
          out.add_set({block.sequence, head, all_heads(geometry_.group()), static_cast<std::int32_t>(t),
                       static_cast<std::int32_t>(t + 1)});
          out.add_run(block.far_begin, block.far_end(t, geometry_.dense));
        }
  }
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }
  int calls = 0;

 private:
  LayerGeometry geometry_;
};

}  // namespace lode
