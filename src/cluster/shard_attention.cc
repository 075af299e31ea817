// SPDX-License-Identifier: Apache-2.0
#include "cluster/shard_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "attend/attend.h"
#include "cluster/merge_states.h"
#include "engine/document.h"
#include "lodestone/error.h"
#include "select/rank_choice.h"

namespace lode {

namespace {

/// Rows [begin, end) of a head.
KvRows part_of(KvRows rows, const Share& range) {
  rows.k += range.begin * rows.row_bytes();
  rows.v += range.begin * rows.row_bytes();
  if (rows.k_scale != nullptr) rows.k_scale += range.begin;
  if (rows.v_scale != nullptr) rows.v_scale += range.begin;
  rows.rows = range.count();
  return rows;
}

/// A position of the document, counted from a range's first and kept inside of it.
Position inside(std::int64_t position, const Share& range) {
  return static_cast<Position>(std::clamp<std::int64_t>(position - range.begin, 0, range.count()));
}

/// The keys of a choice that lie in a range, counted from its first. Estimates of what was skipped stay with the
/// range that begins the document.
Selection part_of(const Selection& all, const Share& range) {
  Selection part;
  for (std::int64_t i = 0; i < all.sets(); ++i) {
    const Selection::Set set = all.set(i);
    part.add_set(set.queries);
    for (const Run& run : set.runs) part.add_run(inside(run.begin, range), inside(run.end, range));
    const auto first =
        std::ranges::lower_bound(set.rows, static_cast<Position>(range.begin)) - set.rows.begin();
    for (auto r = static_cast<std::size_t>(first); r < set.rows.size() && set.rows[r] < range.end; ++r)
      part.add_row(inside(set.rows[r], range), set.log_weights.empty() ? 0.0f : set.log_weights[r]);
    if (!set.tail_lse.empty() && range.begin == 0) part.set_tail(set.tail_output, set.tail_lse);
  }
  return part;
}

AttendWork work_in_window(const QueryBlock& block, std::int64_t window) {
  AttendWork work;
  for (std::int64_t t = 0; t < block.tokens; ++t)
    for (const KvRows& head : block.kv.heads)
      work += work_of(std::min(window, std::int64_t{block.begin} + t + 1), 0, 0, head.token_bytes());
  return work;
}

/// No far keys at all: what is left is the window.
Selection nothing(const QueryBlock& block, const LayerGeometry& geometry) {
  Selection selection;
  for (int head = 0; head < geometry.kv_heads; ++head)
    selection.add_set({.sequence = block.sequence,
                       .kv_head = head,
                       .heads = all_heads(geometry.group()),
                       .token_begin = 0,
                       .token_end = static_cast<std::int32_t>(block.tokens)});
  return selection;
}

}  // namespace

struct ShardAttention::Local {
  std::vector<KvRows> rows;  // [Hkv]
  QueryBlock block;
  TailRows tail;
  LayerGeometry geometry;

  Local(const DistributedCall& call, std::size_t b, const Share& range, bool has_tail)
      : block(call.blocks[b]), tail(call.tails[b]), geometry(call.geometry) {
    for (const KvRows& head : block.kv.heads) rows.push_back(part_of(head, range));
    block.kv = {.heads = rows, .tokens = range.count()};
    block.begin -= static_cast<Position>(range.begin);
    block.far_begin = inside(block.far_begin, range);
    block.far_limit = inside(block.far_limit, range);
    tail.seam = static_cast<Position>(range.count());
    tail.elsewhere = !has_tail;
    if (call.window == 0) return;
    geometry.dense = {.sink = 0, .window = call.window};
    block.far_begin = 0;
    block.far_limit = QueryBlock::kNoLimit;
  }
};

ShardAttention::ShardAttention(Communicator& ranks, std::int64_t tokens, const ModelConfig& config)
    : ranks_(ranks),
      range_(token_share(tokens, ranks.rank(), ranks.size())),
      has_tail_(ranks.rank() + 1 == ranks.size()),
      first_layer_(config.layers) {
  for (int layer = 0; layer < config.layers; ++layer) {
    if (config.plan.layer(layer).recurrent) continue;
    first_layer_ = std::min(first_layer_, layer);
    last_layer_ = layer;
  }
}

/// Each sequence's choice, of the whole document or of this rank's keys; none for full attention.
std::vector<ShardAttention::Choice> ShardAttention::choose(const DistributedCall& call) {
  const Step& step = call.step;
  std::vector<Choice> choices;
  if (call.window > 0)
    for (const QueryBlock& block : call.blocks) choices.push_back({nothing(block, call.geometry), {}});
  if (call.selector == nullptr || call.window > 0) return choices;
  if (call.selector->wants_mass()) throw InputError(kNeedsMass);
  const auto layer = static_cast<std::size_t>(call.geometry.layer);
  std::unique_lock<std::mutex> choosing;
  if (step.choosing != nullptr) choosing = std::unique_lock(*step.choosing);
  const Traffic before = ranks_.sent();
  for (std::size_t i = 0; i < call.blocks.size(); ++i) {
    if (step.by_id.empty() || step.by_id[layer] == 0) call.blocks[i].sequence = 0;
    Choice& choice = choices.emplace_back();
    call.selector->select(call.blocks.subspan(i, 1), choice.keys);
    choice.work = call.selector->take_work();
  }
  selection_sent_ += ranks_.sent() - before;
  return choices;
}

void ShardAttention::attend_part(const DistributedCall& call, std::span<const Choice> choices,
                                 std::span<const AttentionState> states) const {
  for (std::size_t b = 0; b < call.blocks.size(); ++b) {
    Local local(call, b, range_, has_tail_);
    std::vector<Selection> selection;
    if (!choices.empty()) selection.push_back(part_of(choices[b].keys, range_));
    AttendWork uncounted;  // of this part
    attend_branches({.blocks = {&local.block, 1},
                     .tails = {&local.tail, 1},
                     .outputs = {&states[b].output, 1},
                     .selections = selection,
                     .work = {&uncounted, 1},
                     .lse = {&states[b].lse, 1}},
                    local.geometry);
  }
}

/// What one machine would count; of a choice over ranks its parts add up at the step's end.
void ShardAttention::count(const DistributedCall& call, std::span<const Choice> choices) {
  const bool divided = call.selector != nullptr && is_divided(call.selector);
  if (call.geometry.layer == first_layer_) steps_.erase(&call.step);
  Shared& shared = steps_[&call.step];
  shared.any = shared.any || divided;
  shared.work.resize(call.blocks.size());
  for (std::size_t b = 0; b < call.blocks.size(); ++b) {
    const auto block = call.blocks.subspan(b, 1);
    ForwardWork& work = call.step.work[b];
    const AttendWork attended = call.window > 0   ? work_in_window(block.front(), call.window)
                                : choices.empty() ? count_full(block, call.geometry)
                                                  : count_attended(block, choices[b].keys, call.geometry);
    if (call.selector != nullptr) {
      work.sparse_tokens += block.front().tokens;
      SelectWork& selected = divided ? shared.work[b].select : work.select;
      selected.bytes += choices[b].work.bytes;
      selected.keys_scored += choices[b].work.keys_scored;
    }
    if (!divided) {
      work.attend += attended;
      continue;
    }
    AttendWork everywhere = count_attended(block, nothing(block.front(), call.geometry), call.geometry);
    shared.work[b].attend.far_keys += attended.far_keys - everywhere.far_keys;
    shared.work[b].attend.kv_bytes += attended.kv_bytes - everywhere.kv_bytes;
    work.attend += everywhere;
  }
}

/// Sums over the ranks what each has done of a step.
void ShardAttention::add_up(const DistributedCall& call) {
  const Shared shared = std::move(steps_[&call.step]);
  steps_.erase(&call.step);
  if (!shared.any) return;
  std::vector<std::int64_t> numbers;
  for (const ForwardWork& work : shared.work)
    numbers.insert(numbers.end(),
                   {work.attend.far_keys, work.attend.kv_bytes, work.select.bytes, work.select.keys_scored});
  const Traffic before = ranks_.sent();
  ranks_.sum(numbers);
  selection_sent_ += ranks_.sent() - before;
  for (std::size_t b = 0; b < shared.work.size(); ++b) {
    const std::int64_t* const sum = numbers.data() + 4 * b;
    call.step.work[b].attend.far_keys += sum[0];
    call.step.work[b].attend.kv_bytes += sum[1];
    call.step.work[b].select.bytes += sum[2];
    call.step.work[b].select.keys_scored += sum[3];
  }
}

void ShardAttention::attend(const DistributedCall& call) {
  if (call.step.hooks != nullptr && (call.step.hooks->mass || call.step.hooks->attended))
    throw InputError(
        "over several ranks: expected an answer without --show-sources and --audit, which look into the "
        "attention of one machine");
  const std::vector<Choice> choices = choose(call);
  const std::int64_t heads = call.geometry.query_heads, d = call.geometry.head_dim;
  std::int64_t rows = 0;
  for (const QueryBlock& block : call.blocks) rows += block.tokens * heads;
  std::vector<float> output(static_cast<std::size_t>(rows * d)), lse(static_cast<std::size_t>(rows));
  std::vector<AttentionState> states;
  std::int64_t row = 0;
  for (const QueryBlock& block : call.blocks) {
    states.push_back({output.data() + row * d, lse.data() + row, block.tokens * heads, d});
    row += states.back().rows;
  }
  attend_part(call, choices, states);
  merge_states(ranks_, {output.data(), lse.data(), rows, d},
               call.lse.empty() ? MergedParts::output : MergedParts::output_and_lse);
  for (std::size_t b = 0; b < call.blocks.size(); ++b) {
    std::copy_n(states[b].output, states[b].rows * d, call.outputs[b]);
    if (!call.lse.empty()) std::copy_n(states[b].lse, states[b].rows, call.lse[b]);
  }
  count(call, choices);
  if (call.geometry.layer == last_layer_) add_up(call);
}

void share_out(const Document& document, Communicator& ranks) {
  if (document.tokens() < ranks.size())
    throw InputError(fmt::format("expected a text of at least {} tokens, one for each rank, found {}",
                                 ranks.size(), document.tokens()));
  expect_like_layers(document.impl().parts().config, "over several ranks");
  document.impl().distributed =
      std::make_shared<ShardAttention>(ranks, document.tokens(), document.impl().parts().config);
}

Traffic selection_sent(const Document& document) {
  const auto* const shared = dynamic_cast<const ShardAttention*>(document.impl().distributed.get());
  return shared == nullptr ? Traffic{} : shared->selection_sent();
}

}  // namespace lode
