// SPDX-License-Identifier: Apache-2.0
#include "engine/blanking.h"

#include <algorithm>

#include "engine/context.h"
#include "engine/row_order.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Every key is far but the query's own, and all far keys are chosen but those blanked.
class AllBut final : public Selector {
 public:
  AllBut(const LayerGeometry& geometry, std::shared_ptr<const std::vector<Run>> blanked)
      : geometry_(geometry), blanked_(std::move(blanked)) {}

  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override { LODE_ASSERT(false); }
  void load(std::int32_t, SectionReader&, KvLayer) override { LODE_ASSERT(false); }
  std::int64_t index_bytes() const override { return 0; }

  void select(std::span<const QueryBlock> blocks, Selection& out) override {
    for (const QueryBlock& block : blocks) {
      const auto tokens = static_cast<std::int32_t>(block.tokens);
      const Position end = block.far_end(block.tokens - 1, geometry_.dense);
      for (int head = 0; head < geometry_.kv_heads; ++head) {
        out.add_set({.sequence = block.sequence,
                     .kv_head = head,
                     .heads = all_heads(geometry_.group()),
                     .token_begin = 0,
                     .token_end = tokens});
        Position at = block.far_begin;
        for (const Run& run : *blanked_) {
          if (run.begin > at && at < end) out.add_run(at, std::min(run.begin, end));
          at = std::max(at, run.end);
        }
        if (at < end) out.add_run(at, end);
      }
    }
  }

 private:
  LayerGeometry geometry_;
  std::shared_ptr<const std::vector<Run>> blanked_;
};

}  // namespace

Blanking::Blanking(Context& context) : blanked_(std::make_shared<std::vector<Run>>()) {
  Context::Impl& c = context.impl();
  LODE_ASSERT(c.gpu == nullptr && c.indexed == c.tokens());
  restore_rows(c);
  AttachedMethod method;
  method.spec.name = "blanking";
  method.spec.dense = {.sink = 0, .window = 1};
  for (int layer = 0; layer < c.config.layers; ++layer) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = c.config.query_heads,
                                    .kv_heads = c.config.kv_heads_of(layer),
                                    .head_dim = c.config.head_dim_of(layer),
                                    .scale = score_scale(c.config),
                                    .dense = method.spec.dense,
                                    .rope = &c.rope,
                                    .pool = &c.model->pool(),
                                    .seed = c.options.seed};
    method.owned.push_back(std::make_unique<AllBut>(geometry, blanked_));
    method.selectors.push_back(method.owned.back().get());
  }
  method.built = method.built_on_host = true;
  method.built_over = c.tokens();
  c.specs.push_back(method.spec);
  c.methods.push_back(std::move(method));
  method_ = static_cast<MethodId>(c.methods.size() - 1);
}

Blanking::~Blanking() = default;

void Blanking::set(std::vector<Run> blanked) {
  *blanked_ = std::move(blanked);
}

namespace {

constexpr Position kSinkTokens = 4;  // as for sources: what stands there is attended to whatever it says
constexpr int kTries = 1000;

bool meets(const std::vector<Run>& runs, const Run& run) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const Run& r) { return r.begin < run.end && run.begin < r.end; });
}

void sort_by_place(std::vector<Run>& runs) {
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
}

}  // namespace

std::vector<Run> runs_of(const std::vector<Citation>& citations) {
  std::vector<Run> runs;
  for (const Citation& c : citations)
    runs.push_back({static_cast<Position>(c.token_begin), static_cast<Position>(c.token_end)});
  sort_by_place(runs);
  return runs;
}

std::vector<Run> runs_beside(const std::vector<Run>& runs, std::int64_t tokens, Rng& rng) {
  std::vector<Run> others;
  for (const Run& run : runs) {
    const Position length = run.end - run.begin;
    const std::int64_t places = tokens - length - kSinkTokens;
    bool found = false;
    for (int tries = 0; tries < kTries && places > 0 && !found; ++tries) {
      const auto begin = static_cast<Position>(kSinkTokens + rng.below(static_cast<std::uint64_t>(places)));
      const Run other = {begin, begin + length};
      found = !meets(runs, other) && !meets(others, other);
      if (found) others.push_back(other);
    }
    if (!found) return {};
  }
  sort_by_place(others);
  return others;
}

}  // namespace lode
