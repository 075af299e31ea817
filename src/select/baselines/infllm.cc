// SPDX-License-Identifier: Apache-2.0
// infllm: keys are read by blocks; a block is chosen by the keys in it that the tokens after it looked at
// most (InfLLM: Training-Free Long-Context Extrapolation with an Efficient Context Memory, Xiao et al. 2024,
// section 3.2: representative scores, block memory units, relevance).
//
//   r_m      = mean over the next l_L tokens of q_{m+j} . k_m        the representative score of key m
//   reps(B)  = the `repr_topk` keys of B with the largest r
//   sim(q,B) = sum over reps(B) of q . k, summed over heads          the best `topk` blocks are attended
//
// Sums of products with the same vector are one product: a block keeps the mean of its representatives, and
// the local window enters as the sum of its queries. That window is counted in blocks, from the end of the
// key's own block over as many as hold the dense window (the paper: from the key on; the authors' program
// takes the softmax weights there). As published, relevance ignores where a block lies: keys enter before
// RoPE and the query is turned to the distance of the window; rope=on takes both as they are. Attention
// itself keeps true positions, where the paper gives all blocks one distance to go beyond a model's length.
// All heads of a layer choose together; per=kv-head lets each group choose.
//
// Blocks start behind the sink; the one that is not full, before the window, is always attended. Blocks that
// the context's queries say nothing of (an index made without a prefill, the context's last block, later
// ones) are represented by the mean of all their keys, so that an index that grows equals one that was built.
// `budget` takes an exact number of keys in place of `topk` blocks. Keys with a NaN or an infinity count as
// 0.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "io/container.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "lodestone/error.h"
#include "select/baselines/page_choice.h"
#include "select/methods.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::array<std::string_view, 2> kPer = {"layer", "kv-head"};
constexpr std::array<std::string_view, 2> kRope = {"fixed", "on"};

struct Options {
  std::int64_t block = 128, representatives = 4, topk = 16;  // of the authors' configurations
  std::optional<Amount> budget;
  bool per_layer = true, one_angle = true;

  static Options of(const Spec& spec) {
    Options options;
    expect_not_both(spec, "topk", "budget");
    options.block = spec.integer("block_size", options.block, 1, 1 << 16);
    options.representatives = spec.integer("repr_topk", options.representatives, 1, 1 << 16);
    options.topk = spec.integer("topk", options.topk, 1, 1 << 24);
    if (spec.text("budget")) options.budget = spec.amount("budget", {});
    options.per_layer = spec.choice("per", kPer[0], kPer) == kPer[0];
    options.one_angle = spec.choice("rope", kRope[0], kRope) == kRope[0];
    return options;
  }
  /// Keys to take of n.
  std::int64_t keys(std::int64_t n) const {
    return std::min(n, budget ? budget->of(n) : topk * block + n % block);
  }
};

/// Sums of the context's queries, over the tokens of each block and the heads of each group.
struct BlockQueries {
  std::vector<std::vector<float>> sums;  // [blocks][Hkv, d]
  std::vector<std::int64_t> tokens;      // [blocks]

  void cut(std::int64_t blocks) {
    if (std::ssize(sums) <= blocks) return;
    sums.resize(static_cast<std::size_t>(blocks));
    tokens.resize(static_cast<std::size_t>(blocks));
  }
  std::int64_t bytes() const {
    return sums.empty() ? 0 : std::ssize(sums) * std::ssize(sums[0]) * std::int64_t{sizeof(float)};
  }
};

class InfLlm final : public PerTokenSelector {
 public:
  InfLlm(const LayerGeometry& geometry, const Options& options)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {}

  bool wants_writes() const override { return true; }
  void on_write(const KvWrite& write) override;
  void build(std::int32_t sequence, KvLayer kv) override {
    Index& index = indexes_[sequence];
    index.blocks = 0;
    index.vectors.assign(static_cast<std::size_t>(geometry_.kv_heads), {});
    extend(index, kv, static_cast<Position>(kv.tokens));
    index.queries = {};
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    extend(indexes_[sequence], kv, far_end);
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    const auto found = indexes_.find(sequence);
    if (found == indexes_.end()) return;
    Index& index = found->second;
    index.queries.cut(blocks_in(tokens));
    index.blocks = std::min(index.blocks, blocks_in(tokens));
    for (auto& vectors : index.vectors)
      vectors.resize(static_cast<std::size_t>(index.blocks * geometry_.head_dim));
  }
  void select(std::span<const QueryBlock> blocks, Selection& out) override;

  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, index] : indexes_) {
      bytes += index.queries.bytes();
      for (const auto& vectors : index.vectors)
        bytes += static_cast<std::int64_t>(vectors.capacity() * sizeof(float));
    }
    return bytes;
  }

 private:
  struct Index {
    std::int64_t blocks = 0;
    std::vector<std::vector<float>> vectors;  // [Hkv][blocks, d]
    BlockQueries queries;
  };
  struct Scratch {
    std::vector<float> q, scores;  // [d], [blocks]
    std::vector<Position> pages;
  };

  Position begin() const { return static_cast<Position>(geometry_.dense.sink); }
  std::int64_t blocks_in(std::int64_t tokens) const {
    return std::max<std::int64_t>(0, tokens - begin()) / options_.block;
  }
  const Rope* rope() const { return options_.one_angle ? geometry_.rope : nullptr; }

  void extend(Index& index, KvLayer kv, Position end) const;
  void represent(const Index& index, const KvRows& kv, int head, std::int64_t block, float* to) const;
  std::vector<float> local_query(const Index& index, int head, std::int64_t block) const;
  void relevance(const QueryBlock& block, std::int64_t token, int head, std::int64_t blocks,
                 Scratch& s) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  Options options_;
  std::map<std::int32_t, Index> indexes_;
  std::map<const QueryBlock*, std::vector<std::vector<float>>> shared_;  // per=layer: [tokens][blocks]
  std::vector<Scratch> scratch_;                                         // [workers]
};

void InfLlm::on_write(const KvWrite& write) {
  if (write.phase != Phase::context || write.tokens == 0) return;
  BlockQueries& heard = indexes_[write.sequence].queries;
  const std::int64_t d = geometry_.head_dim, width = geometry_.kv_heads * d, group = geometry_.group();
  heard.cut(blocks_in(write.begin) + 1);
  for (std::int64_t t = 0; t < write.tokens; ++t) {
    if (write.begin + t < begin()) continue;
    const auto block = static_cast<std::size_t>(blocks_in(write.begin + t));
    heard.sums.resize(std::max(heard.sums.size(), block + 1),
                      std::vector<float>(static_cast<std::size_t>(width)));
    heard.tokens.resize(heard.sums.size());
    ++heard.tokens[block];
    const float* const q = write.q.data() + t * geometry_.query_heads * d;
    for (std::int64_t i = 0; i < geometry_.query_heads * d; ++i)
      heard.sums[block][static_cast<std::size_t>(i / (group * d) * d + i % d)] += q[i];
  }
}

void InfLlm::extend(Index& index, KvLayer kv, Position end) const {
  const std::int64_t first = index.blocks, wanted = blocks_in(end), d = geometry_.head_dim;
  if (wanted <= first) return;
  LODE_ASSERT(end <= kv.tokens);
  index.vectors.resize(static_cast<std::size_t>(geometry_.kv_heads));
  for (auto& vectors : index.vectors) vectors.resize(static_cast<std::size_t>(wanted * d));
  for_each((wanted - first) * geometry_.kv_heads, [&](std::int64_t item, int) {
    const auto head = static_cast<std::size_t>(item % geometry_.kv_heads);
    const std::int64_t block = first + item / geometry_.kv_heads;
    represent(index, kv.heads[head], static_cast<int>(head), block, index.vectors[head].data() + block * d);
  });
  index.blocks = wanted;
}

/// Sum of the queries of the window that follows a block; empty if none were heard.
std::vector<float> InfLlm::local_query(const Index& index, int head, std::int64_t block) const {
  const std::int64_t d = geometry_.head_dim,
                     window = std::max<std::int64_t>(
                         1, (geometry_.dense.window + options_.block - 1) / options_.block);
  const std::int64_t end = std::min(block + 1 + window, std::ssize(index.queries.sums));
  std::vector<float> sum;
  for (std::int64_t b = block + 1; b < end; ++b) {
    if (index.queries.tokens[static_cast<std::size_t>(b)] == 0) continue;
    sum.resize(static_cast<std::size_t>(d));
    const float* const from = index.queries.sums[static_cast<std::size_t>(b)].data() + head * d;
    for (std::int64_t c = 0; c < d; ++c) sum[static_cast<std::size_t>(c)] += from[c];
  }
  return sum;
}

/// Mean of a block's representatives, or of all its keys.
void InfLlm::represent(const Index& index, const KvRows& kv, int head, std::int64_t block, float* to) const {
  const auto d = static_cast<std::size_t>(geometry_.head_dim);
  const auto first = static_cast<Position>(begin() + block * options_.block);
  std::vector<float> key(d);
  std::vector<Position> rows(static_cast<std::size_t>(options_.block));
  std::iota(rows.begin(), rows.end(), first);
  if (const std::vector<float> local = local_query(index, head, block); !local.empty()) {
    std::vector<float> scores;
    for (const Position row : rows) {
      read_stored_keys({&kv, 1}, row, nullptr, key);
      scores.push_back(kernels().dot(local.data(), key.data(), geometry_.head_dim));
    }
    top_k(scores, options_.representatives, first, rows);
  }
  std::vector<double> sum(d, 0.0);
  for (const Position row : rows) {
    read_stored_keys({&kv, 1}, row, rope(), key);
    for (std::size_t c = 0; c < d; ++c) sum[c] += key[c];
  }
  for (std::size_t c = 0; c < d; ++c) to[c] = static_cast<float>(sum[c] / static_cast<double>(rows.size()));
}

/// s.scores := relevance of blocks [0, blocks) for the heads of one group.
void InfLlm::relevance(const QueryBlock& block, std::int64_t token, int head, std::int64_t blocks,
                       Scratch& s) const {
  const std::int64_t d = geometry_.head_dim, group = geometry_.group();
  const std::span<const float> all = rope() != nullptr ? block.q_unrotated : block.q;
  const float* const q = all.data() + (token * geometry_.query_heads + head * group) * d;
  s.q.assign(static_cast<std::size_t>(d), 0.0f);
  for (std::int64_t i = 0; i < group * d; ++i) s.q[static_cast<std::size_t>(i % d)] += q[i];
  if (rope() != nullptr)
    rope()->rotate(s.q, static_cast<Position>(std::min<std::int64_t>(geometry_.dense.window, 1 << 20)));
  s.scores.resize(static_cast<std::size_t>(blocks));
  const std::vector<float>& vectors = indexes_.at(block.sequence).vectors[static_cast<std::size_t>(head)];
  kernels().gemv(s.q.data(), 1, vectors.data(), DType::f32, d, 0, blocks, s.scores.data(), blocks);
}

/// Where all heads choose together, the sums come first.
void InfLlm::select(std::span<const QueryBlock> blocks, Selection& out) {
  shared_.clear();
  if (options_.per_layer) {
    std::vector<std::pair<const QueryBlock*, std::int64_t>> tokens;
    for (const QueryBlock& block : blocks) {
      shared_[&block].resize(static_cast<std::size_t>(block.tokens));
      for (std::int64_t t = 0; t < block.tokens; ++t) tokens.emplace_back(&block, t);
    }
    for_each(std::ssize(tokens), [&](std::int64_t item, int worker) {
      const auto& [block, token] = tokens[static_cast<std::size_t>(item)];
      const std::int64_t n = std::int64_t{block->far_end(token, geometry_.dense)} - block->far_begin;
      if (options_.keys(n) >= n) return;
      Scratch& s = scratch_[static_cast<std::size_t>(worker)];
      std::vector<float>& sums = shared_.at(block)[static_cast<std::size_t>(token)];
      sums.assign(static_cast<std::size_t>(n / options_.block), 0.0f);
      for (int head = 0; head < geometry_.kv_heads; ++head) {
        relevance(*block, token, head, std::ssize(sums), s);
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += s.scores[i];
      }
    });
  }
  PerTokenSelector::select(blocks, out);
}

void InfLlm::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const std::int64_t n = unit.far_keys(), blocks = n / options_.block, budget = options_.keys(n);
  out.add_set(unit.set(all_heads(geometry_.group())));
  if (budget >= n) return out.add_run(unit.far_begin, unit.far_end);
  LODE_ASSERT(unit.far_begin == begin() && indexes_.at(unit.block->sequence).blocks >= blocks);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  if (!options_.per_layer) relevance(*unit.block, unit.token, unit.kv_head, blocks, s);
  const std::vector<float>& scores =
      options_.per_layer ? shared_.at(unit.block)[static_cast<std::size_t>(unit.token)] : s.scores;
  work.bytes += blocks * geometry_.head_dim * std::int64_t{sizeof(float)};
  work.keys_scored += blocks;
  add_best_pages(unit, options_.block, budget, scores, s.pages, out);
}

// Sections: shape = {heads, d, block, representatives, rope, begin, blocks} int64, vectors [heads, blocks, d]
// float.
void InfLlm::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = indexes_.find(sequence);
  const std::int64_t blocks = found == indexes_.end() ? 0 : found->second.blocks;
  const std::array<std::int64_t, 7> shape = {geometry_.kv_heads,
                                             geometry_.head_dim,
                                             options_.block,
                                             options_.representatives,
                                             rope() != nullptr ? 1 : 0,
                                             begin(),
                                             blocks};
  std::vector<float> all;
  for (int head = 0; head < geometry_.kv_heads && blocks > 0; ++head) {
    const std::vector<float>& own = found->second.vectors[static_cast<std::size_t>(head)];
    all.insert(all.end(), own.begin(), own.end());
  }
  out.add<std::int64_t>("shape", shape);
  out.add<float>("vectors", all);
}

void InfLlm::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 7 && shape[0] == geometry_.kv_heads && shape[1] == geometry_.head_dim &&
              shape[2] == options_.block && shape[3] == options_.representatives &&
              shape[4] == (rope() != nullptr ? 1 : 0) && shape[5] == begin(),
          "heads, channels and blocks of the spec");
  require(shape[6] >= 0 && shape[6] <= blocks_in(kv.tokens), "blocks that lie within the context");
  const auto all = in.values<float>("vectors");
  const std::int64_t each = shape[6] * geometry_.head_dim;
  require(std::ssize(all) == geometry_.kv_heads * each &&
              std::all_of(all.begin(), all.end(), [](float x) { return std::isfinite(x); }),
          "a section 'vectors' of finite numbers of the size that 'shape' gives");
  Index index;
  index.blocks = shape[6];
  for (int head = 0; head < geometry_.kv_heads; ++head)
    index.vectors.emplace_back(all.begin() + head * each, all.begin() + (head + 1) * each);
  indexes_.insert_or_assign(sequence, std::move(index));
}

}  // namespace

MethodInfo infllm_method() {
  return {.name = "infllm",
          .aliases = {},
          .source = "blocks by their representative tokens (InfLLM)",
          .keys = {{"block_size", "keys of a block, 1 to 65536", "128"},
                   {"repr_topk", "representative keys of a block, 1 to 65536", "4"},
                   {"topk", "blocks that a choice takes, 1 to 16777216", "16"},
                   {"budget", "instead of topk: keys that it takes, a count or a share of the far keys", ""},
                   {"per", "who chooses: layer (all heads together) or kv-head (each group)", "layer"},
                   {"rope", "distance at which a block is scored: fixed (that of the window) or on (its own)",
                    "fixed"}},
          .dense = {},
          .dense_layers = 0,
          .make = make_of<InfLlm, Options>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                return geometry.kv_heads * (tokens / Options::of(spec).block) * geometry.head_dim *
                       std::int64_t{sizeof(float)};
              },
          .validate = check_of<Options>};
}

}  // namespace lode
