// SPDX-License-Identifier: Apache-2.0
// Methods that keep whatever scores above one calibrated threshold (Squeezed Attention): the lookup of
// equations 1 to 3 over nodes that the method supplies, and the calibration over all layers.
//
//   S_i = exp(q . C_i) / sum_j N_j exp(q . C_j)         kept: mean of S_i over queries of the group > T
//
// Not in the paper: the mean is by default the root of the mean square. A question's tokens and a group's
// heads want different keys, and what one of 200 queries needs, a plain mean divides by 200; its square
// weighs more than many small ones.
//
// At the coarsest level j runs over all nodes; at each finer level over the children of kept nodes only, and
// those of pruned nodes are never read. Scores go through their log-sum-exp, so no logit overflows.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "lodestone/selector.h"
#include "select/shared/calibration.h"
#include "select/shared/estimates_rest.h"
#include "select/shared/query_metric.h"
#include "select/shared/rows.h"

namespace lode {

/// Query tokens that choose together, for one KV head.
struct ChoiceUnit {
  const QueryBlock* block = nullptr;
  QueryKind kind = QueryKind::alone;
  std::int64_t token_begin = 0, token_end = 0;  ///< of the block
  int kv_head = 0;
  std::int64_t together = 1;  ///< tokens that its threshold is for
  Position far_begin = 0;
  Position far_first = 0, far_last = 0;  ///< ends of the far keys of the first and the last token

  std::int64_t tokens() const { return token_end - token_begin; }
  const KvRows& kv() const { return block->kv.heads[static_cast<std::size_t>(kv_head)]; }
};

/// Consecutive nodes of one level of one part of an index.
struct NodeRange {
  std::int32_t part = 0, begin = 0, end = 0;
  std::int32_t count() const { return end - begin; }
};

/// The nodes of one level that a lookup reads.
struct Frontier {
  std::vector<NodeRange> ranges;
  std::vector<std::int32_t> keys;  // [nodes] N
  std::vector<float> scores;       // [nodes] mean of S, or of its square, with S times all keys of the index

  std::int64_t nodes() const { return std::ssize(keys); }
  void clear();
};

class ThresholdSelector : public Selector, public EstimatesRest, public BuiltByDevice, public HearsQueries {
 public:
  struct Options {
    Target target;
    std::int64_t stretch = 0;  ///< question tokens that are averaged; 0 = all
    bool tail = false;         ///< pruned nodes count with their centroid's weight and mean value
    bool squares = true;       ///< the root of the mean square of S, not the mean

    /// From the keys `average`, `block` and those of the target.
    static Options of(const Spec& spec);
  };

  /// The last tokens of a context that are never indexed (Squeezed Attention, section 6.1).
  static constexpr std::int64_t kLast = 100;

  ThresholdSelector(const LayerGeometry& geometry, const Options& options);

  bool estimates_rest() const override { return options_.tail; }

  bool wants_writes() const final { return true; }
  std::vector<Position> wanted_queries(std::int32_t sequence, Position begin,
                                       std::int64_t tokens) const final {
    const auto found = states_.find(sequence);
    return found != states_.end() ? found->second.sample.wanted(begin, tokens)
                                  : QuerySample().wanted(begin, tokens);
  }
  std::int64_t joint_query_tokens() const final { return options_.stretch; }
  void on_write(const KvWrite& write) final { state_of(write.sequence).sample.take(write); }
  void on_queries(const SampledQueries& chunk) final { state_of(chunk.sequence).sample.take_wanted(chunk); }
  std::vector<KeptQueries> kept_queries(std::int32_t sequence, Position begin, Position end) const final {
    const auto found = states_.find(sequence);
    return {found != states_.end() ? found->second.sample.kept(begin, end) : KeptQueries()};
  }
  std::int64_t kept_query_bytes(std::int64_t tokens) const final {
    return KeptQueries::rows_in_pieces(tokens, QuerySample::kMost) *
           (query_bytes() + std::int64_t{sizeof(Position)});
  }
  bool take_back(std::int32_t sequence, std::span<const KeptQueries> kept) final {
    return kept.size() == 1 && std::ssize(kept[0].rows) == std::ssize(kept[0].positions) * query_bytes() &&
           state_of(sequence).sample.take_back(kept[0]);
  }
  bool learns_from_the_end() const final { return true; }
  void build(std::int32_t sequence, KvLayer kv) final;
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override = 0;
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void select(std::span<const QueryBlock> blocks, Selection& out) final;
  void save(std::int32_t sequence, SectionWriter& out) const final;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) final;
  std::int64_t index_bytes() const override;

  /// MethodInfo::finish: takes in what the context has grown by, then finds the thresholds of all layers
  /// together.
  static void finish(std::span<Selector* const> layers, std::int32_t sequence,
                     const std::function<KvLayer(int layer)>& kv);
  /// Null for a sequence that was never built.
  const Calibration* calibration(std::int32_t sequence) const;

 protected:
  /// The part of a context that is indexed ends here: its last tokens and the window are attended anyway.
  Position indexed_end(std::int64_t tokens) const;

  /// Indexes keys [begin, end) of a context as one part; `begin` is where the last part ends, or the sink.
  virtual void index_context(std::int32_t sequence, KvLayer kv, Position begin, Position end) = 0;
  /// Forgets all parts; what `kv` holds is the new context, long enough to be indexed or not.
  virtual void start(std::int32_t sequence, KvLayer kv) = 0;
  /// Of the queries of a context; empty for one that was read from a file.
  const QuerySample& sample(std::int32_t sequence) { return state_of(sequence).sample; }
  /// For SharesIndex::take_index: false when the other indexes other keys or nothing.
  bool copy_state(std::int32_t sequence, const ThresholdSelector& other);
  virtual void save_index(std::int32_t sequence, SectionWriter& out) const = 0;
  /// Restores an index whose calibration has so many levels (0: any), or throws and changes nothing; returns
  /// where its keys end.
  virtual Position load_index(std::int32_t sequence, const SectionReader& in, KvLayer kv,
                              std::int64_t levels) = 0;
  virtual int levels(std::int32_t sequence) const = 0;
  /// All parts of an index of one level, for a device that scores them; nothing where it cannot.
  virtual std::optional<ScoredClusters> scored_clusters(std::int32_t /*sequence*/) const {
    return std::nullopt;
  }
  /// Whether scores add spreads, where tokens choose so.
  virtual bool adds_spreads(std::int32_t /*sequence*/, QueryKind) const { return false; }
  /// Share of all keys that survive a level; of the last one only for targets by sparsity.
  virtual double kept_share(std::int32_t sequence, int level) const = 0;

  /// Nodes of the coarsest level, and the end of the keys below them.
  virtual Position top(const ChoiceUnit& unit, std::vector<NodeRange>& ranges) const = 0;
  /// N of a range's nodes.
  virtual void node_keys(const ChoiceUnit& unit, int level, const NodeRange& range,
                         std::int32_t* keys) const = 0;
  /// z[r * stride + i] = q[r] . C of the range's i-th node, for up to 8 scaled queries.
  virtual void logits(const ChoiceUnit& unit, int level, const NodeRange& range, const float* q, int rows,
                      float* z, std::int64_t stride) const = 0;
  /// Nodes of the next level below a range.
  virtual NodeRange children(const ChoiceUnit& unit, int level, const NodeRange& range) const = 0;
  /// Adds the keys of the first leaves, as far as these lie leaf by leaf, and returns how many ranges they
  /// were; the keys of the others are single rows (add_rows).
  virtual std::size_t add_runs(const ChoiceUnit&, std::span<const NodeRange> /*leaves*/, Selection&) const {
    return 0;
  }
  /// The keys of the leaves, each of which is in one of them; returns how many they are.
  virtual std::int64_t add_rows(const ChoiceUnit& unit, std::span<const NodeRange> leaves,
                                RowSet& rows) const = 0;
  virtual std::int64_t node_bytes(const ChoiceUnit& unit) const = 0;  ///< read per node
  virtual std::int64_t row_bytes() const = 0;                         ///< read of the index per key kept
  /// Mean value of a node, [d]; only methods with a tail have them.
  virtual void mean_value(const ChoiceUnit&, int, std::int32_t, std::int32_t, float*) const {}

  std::int64_t query_bytes() const { return QuerySample::bytes_for(geometry_, 1); }  ///< of a token
  int workers() const;
  void for_each(std::int64_t items, const std::function<void(std::int64_t, int)>& body) const;

  const LayerGeometry geometry_;
  const Options options_;

 private:
  struct State {
    QuerySample sample;
    Calibration calibration;
    Position context_end = 0;  // of the keys indexed as context
    /// Whether the sample can say what thresholds should be: nothing follows from few queries, and while less
    /// came behind a context that was read from a file than is in it, its thresholds are the better ones.
    bool observed() const;
  };
  /// One lookup, level by level.
  struct Lookup {
    Position end = 0;                            // keys [far_begin, end) are below the top
    std::vector<Frontier> levels;                // those that were read
    std::vector<std::vector<NodeRange>> pruned;  // [levels], empty ranges unless there is a tail
    std::vector<NodeRange> kept;                 // of the last level
    std::vector<std::int32_t> places;            // scratch of a level: where kept nodes lie in the frontier
  };
  struct Scratch {
    Lookup lookup;
    RowSet rows;
    std::vector<Position> chosen;
  };
  struct Trial;  // these three: threshold_calibration.cc
  class Search;
  class OnDevice;
  /// Runs the pieces of one unit: on the pool when the unit is large, else on the thread that has it.
  using Loop = std::function<void(std::int64_t, const std::function<void(std::int64_t)>&)>;

  std::vector<ChoiceUnit> units_of(std::span<const QueryBlock> blocks, const LocalWindow& dense) const;
  void select_units(std::span<const ChoiceUnit> units, Selection& out);
  /// Reads level 0 and what is below its kept nodes, down to level `last`, which is scored and, if asked,
  /// cut.
  void look_up(const ChoiceUnit& unit, int last, bool cut_last, const Loop& loop, Lookup& out) const;
  void score(const ChoiceUnit& unit, int level, std::int64_t keys, const Loop& loop,
             Frontier& frontier) const;
  /// Splits the last level read into kept and pruned nodes.
  void cut(double tau, Lookup& out, int level) const;
  /// The average that a frontier's score stands for.
  double average_of(float score) const {
    return options_.squares ? std::sqrt(static_cast<double>(score)) : score;
  }
  double threshold(const ChoiceUnit& unit, int level, std::int64_t keys, const Frontier& frontier) const;
  void choose(const ChoiceUnit& unit, const Loop& loop, Scratch& scratch, Selection& out,
              SelectWork& work) const;
  void add_tail(const ChoiceUnit& unit, const Lookup& lookup, const Loop& loop, Selection& out) const;
  void tail_rows(const ChoiceUnit& unit, const Lookup& lookup, std::int64_t begin, std::int64_t end,
                 float* output, float* lse) const;
  void gather(const ChoiceUnit& unit, std::int64_t row_begin, std::int64_t row_end, float* q) const;
  void add_rows_scores(const ChoiceUnit& unit, int level, double keys, std::int64_t begin, std::int64_t end,
                       const Frontier& frontier, std::span<float> sum) const;
  void grow(std::int32_t sequence, KvLayer kv);

  static void calibrate(std::span<ThresholdSelector* const> layers, std::int32_t sequence,
                        const std::function<KvLayer(int layer)>& kv);

  State& state_of(std::int32_t sequence) {
    const auto sink = static_cast<Position>(geometry_.dense.sink);
    return states_.try_emplace(sequence, State{.sample = {}, .calibration = {}, .context_end = sink})
        .first->second;
  }

  std::map<std::int32_t, State> states_;
  bool scored_by_device_ = false;      ///< while thresholds are searched for
  std::vector<Scratch> scratch_;       // [workers]
  std::vector<Selection> chosen_;      // [units]
  std::vector<SelectWork> unit_work_;  // [units]
};

}  // namespace lode
