// SPDX-License-Identifier: Apache-2.0
// quest: keys are read by pages; a page is chosen by the largest score that any key in it could have (Quest:
// Query-Aware Sparsity, Tang et al. 2024, section 3.3 and algorithm 1; named by the other papers as their
// strongest baseline).
//
//   bound(q, page) = sum_c max(q_c least_c(page), q_c largest_c(page))  >=  q . k  for every key of the page
//
// The best pages by bound are attended, `budget` keys in all, each query head by itself; per=kv-head adds the
// bounds over the heads of a group, so that it reads a group's share of the pages. Pages start behind the
// sink. As in the authors' program the last page is always attended: here it is the one that is not yet full,
// before the window. `bits` codes the bounds, always outwards, by levels for each channel and head that the
// context's keys span (HashAttention, table 1, counts Quest so: 16 keys in 2 bits are 32 bits a token for
// d = 128); keys beyond that span, in later pages, are bounded by its ends.
//
// Differs from the authors' program: the budget is exact, for the last page in rank gives its newest keys
// alone where a whole one would exceed it, and there is no least number of pages. Keys that hold a NaN or an
// infinity count as 0 in the bounds.
#include "select/baselines/quest.h"

#include <array>
#include <map>

#include "lodestone/error.h"
#include "select/baselines/page_choice.h"
#include "select/methods.h"
#include "select/shared/per_token.h"

namespace lode {

namespace {

constexpr int kDenseLayers = 2;  // section 4.1
constexpr std::array<std::string_view, 3> kBits = {"16", "4", "2"};
constexpr std::array<std::string_view, 2> kPer = {"query-head", "kv-head"};

class Quest final : public PerTokenSelector, public PageBounder {
 public:
  Quest(const LayerGeometry& geometry, const QuestOptions& options)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {}

  void build(std::int32_t sequence, KvLayer kv) override {
    PageBounds index(shape());
    index.calibrate(kv, all());
    index.extend(kv, static_cast<Position>(kv.tokens), all());
    indexes_.insert_or_assign(sequence, std::move(index));
    ++version_;
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    indexes_.try_emplace(sequence, shape()).first->second.extend(kv, far_end, all());
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.roll_back(tokens);
  }
  void save(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexes_.find(sequence);
    (found == indexes_.end() ? PageBounds(shape()) : found->second).save(out);
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    indexes_.insert_or_assign(sequence, PageBounds::load(shape(), in, kv));
    ++version_;
  }
  Levels page_levels() const override {
    const auto found = indexes_.find(0);
    return {version_, found != indexes_.end() && found->second.ready() ? &found->second : nullptr};
  }
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, index] : indexes_) bytes += index.bytes();
    return bytes;
  }

 private:
  struct Scratch {
    PageBounds::Scratch bounds;
    std::vector<float> scores;  // [G, padded pages]
    std::vector<Position> pages;
  };

  PageShape shape() const {
    return options_.shape(static_cast<Position>(geometry_.dense.sink), geometry_.kv_heads,
                          geometry_.head_dim);
  }
  PageBounds::ForEach all() const {
    return [this](std::int64_t items, const auto& body) { for_each(items, body); };
  }

  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  QuestOptions options_;
  std::map<std::int32_t, PageBounds> indexes_;
  std::int64_t version_ = 0;      // of indexes
  std::vector<Scratch> scratch_;  // [workers]
};

void Quest::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const PageBounds& index = indexes_.at(unit.block->sequence);
  const std::int64_t n = unit.far_keys(), pages = n / options_.page;
  if (!index.ready() || options_.budget.of(n) >= n) {
    out.add_set(unit.set(all_heads(geometry_.group())));
    return out.add_run(unit.far_begin, unit.far_end);
  }
  LODE_ASSERT(unit.far_begin == geometry_.dense.sink && index.pages() >= pages);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::int64_t stride = PageBounds::padded(pages);
  const int choices = options_.per_kv_head ? 1 : geometry_.group();
  s.scores.resize(static_cast<std::size_t>(choices * stride));
  const std::span<const float> q = unit.group_of(unit.block->q, geometry_);
  index.score(unit.kv_head, {q.data(), geometry_.group(), geometry_.head_dim}, options_.per_kv_head, pages,
              s.scores.data(), stride, s.bounds);
  work.bytes += pages * index.page_bytes();
  work.keys_scored += pages;
  for (int g = 0; g < choices; ++g) {
    out.add_set(unit.set(options_.per_kv_head ? all_heads(geometry_.group()) : 1u << g));
    add_best_pages(unit, options_.page, options_.budget.of(n),
                   {s.scores.data() + g * stride, static_cast<std::size_t>(pages)}, s.pages, out);
  }
}

}  // namespace

QuestOptions QuestOptions::of(const Spec& spec) {
  QuestOptions options;
  options.page = spec.integer("page_size", options.page, 1, 4096);
  options.budget = spec.amount("budget", options.budget);
  options.bits = std::stoi(spec.choice("bits", kBits[0], kBits));
  options.per_kv_head = spec.choice("per", kPer[0], kPer) == "kv-head";
  return options;
}

MethodInfo quest_method() {
  return {.name = "quest",
          .aliases = {},
          .source = "pages of keys by the bound of their scores (Quest)",
          .keys = {{"page_size", "keys of a page, 1 to 4096", "16"},
                   {"budget", "keys that a choice takes, a count or a share of the far keys", "1024"},
                   {"bits", "of a bound: 16 (as the keys are stored), 4 or 2", "16"},
                   {"per", "who chooses: query-head (each its own pages) or kv-head (the group together)",
                    "query-head"}},
          .dense = {},
          .dense_layers = kDenseLayers,
          .make = make_of<Quest, QuestOptions>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                // Bounds as the keys are stored count as 16 bits, the type that caches have unless told.
                const QuestOptions options = QuestOptions::of(spec);
                return geometry.kv_heads * (tokens / options.page) * 2 * geometry.head_dim * options.bits / 8;
              },
          .validate = check_of<QuestOptions>};
}

}  // namespace lode
