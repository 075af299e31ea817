// SPDX-License-Identifier: Apache-2.0
// ideal: every far key is scored exactly, and those are attended whose softmax weight is above one calibrated
// threshold (Squeezed Attention, appendix E). It is `squeezed` with every key a cluster of its own: what
// clusters lose is what lies between the two.
#include "kernels/kernels.h"
#include "select/methods.h"
#include "select/shared/query_metric.h"
#include "select/shared/threshold_selector.h"

namespace lode {

namespace {

class Ideal final : public ThresholdSelector {
 public:
  using ThresholdSelector::ThresholdSelector;
  void append(std::int32_t, KvLayer, Position) override {}

 private:
  void index_context(std::int32_t, KvLayer, Position, Position) override {}
  void start(std::int32_t, KvLayer) override {}
  void save_index(std::int32_t, SectionWriter&) const override {}
  Position load_index(std::int32_t, const SectionReader&, KvLayer kv, std::int64_t) override {
    return indexed_end(kv.tokens);
  }
  int levels(std::int32_t) const override { return 1; }
  double kept_share(std::int32_t, int) const override { return 1.0 - options_.target.value; }

  // A node is a key: node i is row far_begin + i.
  Position top(const ChoiceUnit& unit, std::vector<NodeRange>& ranges) const override {
    ranges.push_back({0, 0, unit.far_first - unit.far_begin});
    return unit.far_first;
  }
  void node_keys(const ChoiceUnit&, int, const NodeRange& range, std::int32_t* keys) const override {
    std::fill_n(keys, range.count(), 1);
  }
  void logits(const ChoiceUnit& unit, int, const NodeRange& range, const float* q, int rows, float* z,
              std::int64_t stride) const override {
    kernels().score_run(q, rows, unit.kv(), unit.far_begin + range.begin, unit.far_begin + range.end, z,
                        stride);
  }
  NodeRange children(const ChoiceUnit&, int, const NodeRange& range) const override { return range; }
  std::int64_t add_rows(const ChoiceUnit& unit, std::span<const NodeRange> leaves,
                        RowSet& rows) const override {
    std::int64_t count = 0;
    for (const NodeRange& range : leaves) {
      for (std::int32_t i = range.begin; i < range.end; ++i) rows.insert(unit.far_begin + i);
      count += range.count();
    }
    return count;
  }
  std::int64_t node_bytes(const ChoiceUnit& unit) const override { return unit.kv().token_bytes() / 2; }
  std::int64_t row_bytes() const override { return 0; }
};

}  // namespace

MethodInfo ideal_method() {
  return {
      .name = "ideal",
      .aliases = {},
      .source = "exact scores under one calibrated threshold (Squeezed Attention, appendix E)",
      .keys = {{"sparsity",
                "share of the keys to leave out, calibrated over all layers and heads, 0 to 0.999999", "0.9"},
               {"mass", "instead of sparsity: share of the attention to capture, 0.01 to 1", ""},
               {"error", "instead of sparsity: relative error of the output to allow, 0 to 10", ""},
               {"average", "of scores over a question and a group: squares (root of their mean) or plain",
                "squares"},
               {"block", "question tokens whose scores are averaged, 1 to 1048576", "the whole question"}},
      .dense = {},
      .dense_layers = 0,
      .make = make_of<Ideal, ThresholdSelector::Options>,
      .index_bytes = [](const Spec&, const LayerGeometry& geometry,
                        std::int64_t tokens) { return QuerySample::bytes_for(geometry, tokens); },
      .validate = check_of<ThresholdSelector::Options>,
      .finish = &ThresholdSelector::finish};
}

}  // namespace lode
