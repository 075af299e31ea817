// SPDX-License-Identifier: Apache-2.0
// retrieval: RetrievalAttention (Liu et al. 2024). Far keys are found by a walk over a graph that was made
// for the queries of the prefill (section 3.2; the graph itself is in ann/graph/build.cc), beside 128 first
// and 512 last tokens that are always attended (section 4.1). Attention over what was found is merged with
// theirs exactly, as in equations 4 and 5: only queries go in, only (output, log-sum-exp) comes back.
//
// The paper builds a graph per query head (`per=query-head`). By default the heads of a group share one, made
// of all their queries, and search it each for itself: a quarter of the memory in a group of four.
//
// A GPU that holds the keys helps to build the graphs (select/device_keys.h).
//
// Queries are a bounded sample of those of the prefill, at the positions where they were asked; keys that
// came after a query count like others, which serves keys at the end of a text that few queries have seen. A
// text that was not prefilled here (its context was loaded, or appended) has none: then its graph is made of
// keys as queries, which finds less for the same work (docs/results/retrieval.md).
//
// A walk begins at the entries of the graph and at what the same head found for the token before, if that was
// searched too. It reads keys in int8, in the directions that queries tell apart (ann/graph/key_space.h); what it
// found is ranked by exact scores. The paper takes a fixed number of keys, which leaves out much of flat
// heads' attention: `mass` takes as many as hold that share of the far softmax weight, the unseen part of
// which is estimated from kSample random keys, and widens the walk until they do. `error` takes the keys above
// a threshold of each head, which is calibrated on the text's last queries (rest.h). With `rest`, which `error`
// has by default, an even sample stands for the keys that were not taken. Where a walk would look at most keys,
// all of them are scored instead.
//
// The paper's algorithm 1 inserts and removes keys as the window moves, which its graph cannot do. Here keys
// that left the window are scanned until there are kBatch of them, then linked in; rolling back undoes that
// to the bit, unless it reaches into what build() indexed: there the links are cut and the rest is connected
// anew. What a token is given depends on the keys before it and on the queries of the sparse tokens before
// it (with `warm=off` not on these either), not on how they came in chunks. What earlier walks found is
// forgotten when such tokens are rolled back.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/device_keys.h"
#include "select/methods.h"
#include "select/retrieval/file.h"
#include "select/retrieval/graphs_by_device.h"
#include "select/retrieval/index.h"
#include "select/retrieval/memory.h"
#include "select/retrieval/rest.h"
#include "select/shared/best_keys.h"
#include "select/shared/branches.h"
#include "select/shared/captured_queries.h"
#include "select/shared/observed_queries.h"
#include "select/shared/per_token.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr std::array<std::string_view, 2> kPer = {"kv-head", "query-head"}, kWarm = {"on", "off"};
constexpr std::int64_t kCapturedQueries = 40960;  // of one graph, at most; about half at least
constexpr std::int64_t kQueriesPerKey = 2;        // of a graph, at most
constexpr std::int64_t kJudgingTokens = 64;       // the last ones tell how wide searches must be
constexpr std::int64_t kLeastJudged = 1024;       // far keys
constexpr std::int64_t kSteadyKeys = 131072;      // up to so many a beam that follows from k alone does
constexpr std::int64_t kKeysPerBeam = RetrievalIndex::kKeysPerBeam;
constexpr int kHeadsAtOnce = 8;  // are indexed where a GPU does most of it
constexpr std::int64_t kKeysAtOnce =
    1 << 20;  // of them together: a key takes some 2 KB until its graph is there
constexpr std::int64_t kSample = 256;
constexpr std::int64_t kCalibrating = 16;  // of the judging tokens: as many tell a head's threshold
constexpr std::int64_t kLeastChosen = 8;   // keys, above the threshold or not
constexpr std::int64_t kLeastWanted = 64;  // keys that a walk looks for under a threshold
constexpr std::int64_t kLeastBeam = 64;    // with `mass`, at first

constexpr float kUnknownFloor = -9.0f;  // of a text that nobody indexed: a share of e^-9

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Options {
  Amount k = {100, false};
  double mass = 0.0;         ///< 0: by count
  double error = 0.0;        ///< 0: not by thresholds; then `k` is the most that a query takes
  Amount rest = {0, false};  ///< keys that stand for those not taken; 0: none
  double recall = 0.95;      ///< of the k best keys, for which the beam is chosen
  std::int64_t beam = 0;     ///< 0: is chosen
  int degree = 24;
  int numbers = 0;  ///< 0: as many as queries tell apart
  bool per_query_head = false;
  bool warm = true;

  static Options of(const Spec& spec) {
    Options options;
    expect_not_both(spec, "k", "mass");
    expect_not_both(spec, "error", "mass");
    expect_not_both(spec, "mass", "recall");
    expect_not_both(spec, "beam", "recall");
    options.error = spec.number("error", 0.0, 1e-3, 10.0);
    options.k = spec.amount("k", options.error > 0.0 ? Amount{0.02, true} : options.k);
    options.rest = spec.amount("rest", options.error > 0.0 ? Amount{0.01, true} : options.rest);
    if (options.error > 0.0 && options.rest.value == 0.0)
      throw InputError("attention spec '" + spec.str() +
                       "': expected rest above 0 beside error, which counts on it, found 0");
    options.mass = spec.number("mass", 0.0, std::numeric_limits<double>::min(), 1.0);
    options.recall = spec.number("recall", options.recall, 0.5, 0.999);
    options.beam = spec.integer("beam", 0, 1, 1 << 20);
    options.degree = static_cast<int>(spec.integer("degree", options.degree, KeyGraph::kLeastDegree, 256));
    options.numbers = static_cast<int>(spec.integer("numbers", 0, KeyGraph::kLeastDegree, kMaxHeadDim));
    options.per_query_head = spec.choice("per", kPer[0], kPer) == "query-head";
    options.warm = spec.choice("warm", kWarm[0], kWarm) == "on";
    return options;
  }
  /// Whether so many far keys are worth judging how wide searches must be: fewer are scanned.
  bool judges(std::int64_t far_keys) const {
    const std::int64_t few = error > 0.0 ? kLeastWanted : k.of(far_keys);
    return beam == 0 && mass == 0.0 && far_keys > std::max(kLeastJudged, kKeysPerBeam * 2 * few);
  }
  /// Nodes to expand for so many keys of so many far ones; `judged`: those that the index was judged for.
  std::int64_t beam_for(const RetrievalIndex& index, std::int64_t keys, std::int64_t judged,
                        std::int64_t far_keys) const {
    if (beam > 0) return beam;
    if (mass > 0.0) return kLeastBeam;
    if (index.beam() > 0) {
      const std::int64_t reach = std::max<std::int64_t>(1, index.built_keys());
      judged = std::max<std::int64_t>(1, judged);
      return widened(index.beam(), reach, far_keys) * std::max(judged, keys) / judged;
    }
    return std::max<std::int64_t>(16, widened(2 * keys, kSteadyKeys, far_keys));
  }
  /// Each doubling of the keys beyond those for which a beam does takes 11/8 of it for the same recall. In
  /// whole numbers, so that all machines choose alike.
  static std::int64_t widened(std::int64_t beam, std::int64_t reach, std::int64_t far_keys) {
    for (; far_keys >= 2 * reach; reach *= 2) beam = beam * 11 / 8;
    return far_keys <= reach ? beam : beam + beam * 3 / 8 * (far_keys - reach) / reach;
  }
};

RetrievalIndex::Shape shape_of(const Options& options, const LayerGeometry& geometry) {
  return {.head_dim = geometry.head_dim,
          .degree = options.degree,
          .graphs = options.per_query_head ? geometry.group() : 1,
          .begin = static_cast<Position>(geometry.dense.sink),
          .numbers = options.numbers};
}

CapturedQueries capture_for(const Options& options, const LayerGeometry& geometry) {
  const std::int64_t tokens = kCapturedQueries / (options.per_query_head ? 1 : geometry.group());
  return CapturedQueries(geometry.query_heads, geometry.head_dim, tokens);
}

/// Where the searches of a sequence set out from.
struct Searches {
  Position last = -1;                              ///< the last token that was searched, -1 = none
  std::vector<std::vector<Node>> remembered = {};  // [Hq] what it found
  void forget() { *this = {}; }
};

/// One sequence.
struct Indexed {
  CapturedQueries captured;
  ObservedQueries observed = ObservedQueries(kJudgingTokens);
  std::vector<RetrievalIndex> heads;  // [Hkv]
  Searches searches = {};
  std::vector<HeadShare> shares = {};  // [Hq] with `error`
};

class Retrieval final : public Selector,
                        public SharesIndex,
                        public Branches,
                        public BuiltByDevice,
                        public HearsQueries {
 public:
  Retrieval(const LayerGeometry& geometry, const Options& options)
      : geometry_(geometry), options_(options), scratch_(at(geometry.pool->size())) {}

  bool wants_writes() const override { return true; }
  void on_write(const KvWrite& write) override {
    if (write.phase != Phase::context) return;
    of(write.sequence).captured.take(write);
    of(write.sequence).observed.take(write);
  }
  bool hears_rotated() const override { return true; }
  std::vector<Position> wanted_queries(std::int32_t sequence, Position begin,
                                       std::int64_t tokens) const override;
  void on_queries(const SampledQueries& chunk) override {
    LODE_ASSERT(
        std::ranges::equal(chunk.positions, wanted_queries(chunk.sequence, chunk.begin, chunk.tokens)));
    of(chunk.sequence).captured.take_wanted(chunk);
    of(chunk.sequence).observed.take_wanted(chunk);
  }
  std::vector<KeptQueries> kept_queries(std::int32_t sequence, Position begin, Position end) const override {
    const auto found = indexed_.find(sequence);
    return {found != indexed_.end() ? found->second.captured.kept(begin, end) : KeptQueries()};
  }
  std::int64_t kept_query_bytes(std::int64_t tokens) const override {
    return capture_for(options_, geometry_).bytes_in_pieces(tokens);
  }
  bool take_back(std::int32_t sequence, std::span<const KeptQueries> kept) override {
    return kept.size() == 1 && of(sequence).captured.take_back(kept[0]);
  }
  std::int64_t unkept_end() const override { return kJudgingTokens; }

  void build(std::int32_t sequence, KvLayer kv) override;
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer kv) override;
  void share_index(std::int32_t sequence, const Selector& other) override;
  void append(std::int32_t sequence, KvLayer, Position) override { of(sequence); }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void select(std::span<const QueryBlock> blocks, Selection& out) override;

  void save(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexed_.find(sequence);
    Indexed saved = fresh();
    // Keys that came later come again when they are asked for: a loaded index can then be rolled back to
    // everywhere, as this one can.
    for (std::size_t head = 0; found != indexed_.end() && head < saved.heads.size(); ++head)
      saved.heads[head] = found->second.heads[head].settled();
    save_retrieval(shape(), saved.heads, out);
    if (found != indexed_.end()) saved.searches = found->second.searches;
    save_remembered({saved.searches.last, saved.searches.remembered}, geometry_.query_heads, out);
    if (options_.error > 0.0) save_shares(found != indexed_.end() ? found->second.shares : saved.shares, out);
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    Indexed loaded = fresh();
    loaded.heads = load_retrieval(shape(), kv, in, *geometry_.pool);
    RememberedWalks walks = load_remembered(kv.tokens, geometry_.query_heads, in);
    loaded.searches = {walks.searched, std::move(walks.nodes)};
    if (options_.error > 0.0) loaded.shares = load_shares(geometry_.query_heads, in);
    indexed_.insert_or_assign(sequence, std::move(loaded));
  }
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, indexed] : indexed_) {
      bytes += indexed.captured.bytes() + indexed.observed.bytes();
      for (const RetrievalIndex& head : indexed.heads) bytes += head.bytes();
    }
    return bytes;
  }
  bool per_sequence() const override { return true; }
  void branch(std::int32_t id) override { branches_.insert_or_assign(id, of(0).searches); }
  void drop_branch(std::int32_t id) override { branches_.erase(id); }
  bool grows_with_window() const override { return true; }

 private:
  /// Query tokens of one block whose graphs hold the same keys.
  struct Segment {
    const QueryBlock* block;
    Indexed* indexed;
    Searches* searches;
    std::int64_t first, last;  // tokens
  };
  /// What one search is about.
  struct Search {
    const QueryBlock& block;
    Indexed& indexed;
    Searches& searches;
    std::int64_t token;
    int head;  // query head
    Position far_end;
    const float* q;  // [d], scaled
    std::int64_t far_keys() const { return std::int64_t{far_end} - block.far_begin; }
  };
  const KvRows& rows_of(const Search& search) const {
    return search.block.kv.heads[at(search.head / geometry_.group())];
  }
  const RetrievalIndex& index_of(const Search& search) const {
    return search.indexed.heads[at(search.head / geometry_.group())];
  }
  /// How many best keys searches of a KV head look for among so many far ones.
  std::int64_t wanted(const Indexed& indexed, int kv_head, std::int64_t far_keys) const;
  std::int64_t beam_for(const Indexed& indexed, int kv_head, std::int64_t far_keys) const {
    const RetrievalIndex& index = indexed.heads[at(kv_head)];
    return options_.beam_for(index, wanted(indexed, kv_head, far_keys),
                             wanted(indexed, kv_head, index.built_keys()), far_keys);
  }
  std::int64_t wanted(const Search& search) const {
    return wanted(search.indexed, search.head / geometry_.group(), search.far_keys());
  }
  void calibrate(Indexed& indexed, const KvLayer& kv) const;
  std::vector<JudgingQuery> judging_queries(const Indexed& indexed, int head, std::int64_t tokens) const;
  /// The sample that stands for the keys that one query does not take.
  void draw_rest(const Search& search, std::vector<Position>& rows) const;
  void take_by_share(const Search& search, const ScoredKeys& found, Selection& out, SelectWork& work) const;
  void take(const Search& search, std::span<const Position> rows, Selection& out) const;

  /// Keys in this token's window, which an index may hold: they are walked over but not taken.
  std::int64_t hidden(const Search& search) const {
    return std::max<std::int64_t>(0, index_of(search).keys() - search.far_keys());
  }
  std::int64_t beam_for(const Search& search) const {
    return beam_for(search.indexed, search.head / geometry_.group(), search.far_keys());
  }
  /// Nodes that a walk keeps: some more than are taken, since exact scores order them anew.
  std::int64_t keep_for(const Search& search) const {
    const std::int64_t beam = beam_for(search), keys = wanted(search);
    return options_.mass > 0.0 ? beam : std::max(beam, keys + keys / 4);
  }
  Position end_of(const KvLayer& kv) const {
    return static_cast<Position>(std::max<std::int64_t>(0, kv.tokens - geometry_.dense.window));
  }
  RetrievalIndex::Goal goal_for(const Indexed& indexed, Position end, int head) const;
  /// Whether an index that was judged for `other` can be searched here without being judged anew.
  bool judged_alike(const Options& other) const {
    const bool same_k = other.k.value == options_.k.value && other.k.is_share == options_.k.is_share;
    if (options_.error > 0.0 || other.error > 0.0) return options_.beam > 0;
    return options_.beam > 0 || options_.mass > 0.0 ||
           (other.beam == 0 && other.mass == 0.0 && same_k && other.recall == options_.recall);
  }
  enum class Way { all, scan, walk };

  RetrievalIndex::Shape shape() const { return shape_of(options_, geometry_); }
  Indexed fresh() const {
    Indexed none = {.captured = capture_for(options_, geometry_), .heads = {}};
    for (int head = 0; head < geometry_.kv_heads; ++head) none.heads.emplace_back(shape());
    return none;
  }
  /// A branch has the document's index.
  Indexed& of(std::int32_t sequence) {
    return indexed_.try_emplace(branches_.contains(sequence) ? 0 : sequence, fresh()).first->second;
  }
  Searches& searches_of(std::int32_t sequence) {
    const auto branch = branches_.find(sequence);
    return branch != branches_.end() ? branch->second : of(sequence).searches;
  }

  Way way(const Indexed& indexed, int kv_head, std::int64_t far_keys) const;
  std::vector<Segment> next_segments(std::span<const QueryBlock> blocks, std::vector<std::int64_t>& done);
  int heads_together(std::int64_t segments) const;
  void search_segment(const Segment& segment, int first_head, int heads, RetrievalScratch& scratch,
                      std::span<Selection> out, std::span<SelectWork> work) const;
  void search_token(std::span<const Search> searches, Way way, RetrievalScratch& scratch,
                    std::span<Selection> out, std::span<SelectWork> work) const;
  void scan(const Search& search, RetrievalScratch& scratch, Selection& out, SelectWork& work) const;
  void begin(const Search& search, BeamSearch& walk, RetrievalScratch& scratch) const;
  void finish(const Search& search, BeamSearch& walk, RetrievalScratch& scratch, Selection& out,
              SelectWork& work) const;
  std::int64_t rank(const Search& search, const BeamSearch& walk, std::int64_t most,
                    RetrievalScratch& scratch, std::vector<Position>& rows) const;
  double unseen_weight(const Search& search, std::span<const Position> seen, float peak,
                       RetrievalScratch& scratch) const;

  const LayerGeometry geometry_;
  const Options options_;
  std::map<std::int32_t, Indexed> indexed_;    // by sequence
  std::map<std::int32_t, Searches> branches_;  // of sequence 0
  std::vector<RetrievalScratch> scratch_;      // [workers]
};

/// What the graphs of a KV head over the keys before `end` are judged by.
RetrievalIndex::Goal Retrieval::goal_for(const Indexed& indexed, Position end, int head) const {
  const std::int64_t far = std::max<std::int64_t>(0, end - geometry_.dense.sink);
  if (!options_.judges(far)) return {};
  RetrievalIndex::Goal goal = {.k = wanted(indexed, head, far), .recall = options_.recall};
  if (far <= kKeysPerBeam * 2 * goal.k) return {};  // is scanned
  const int heads_per_graph = options_.per_query_head ? 1 : geometry_.group();
  for (int first = head * geometry_.group(); first < (head + 1) * geometry_.group(); first += heads_per_graph)
    goal.asked.push_back(indexed.observed.of_heads(first, heads_per_graph, geometry_.head_dim));
  return goal;
}

std::int64_t Retrieval::wanted(const Indexed& indexed, int kv_head, std::int64_t far_keys) const {
  if (options_.error == 0.0) return options_.k.of(far_keys);
  double share = 0.0;
  const auto group = at(geometry_.group()), first = at(kv_head) * group;
  for (std::size_t h = first; h < first + group && h < indexed.shares.size(); ++h)
    share = std::max(share, indexed.shares[h].wanted);
  // A quarter more than the average query takes.
  const auto keys = static_cast<std::int64_t>(std::ceil(1.25 * share * static_cast<double>(far_keys)));
  return std::min(far_keys, std::max(kLeastWanted, std::min(keys, options_.k.of(far_keys))));
}

/// Queries of the text's last tokens; where nobody told of any, some that the graphs were made of, as if they
/// stood at its end.
std::vector<JudgingQuery> Retrieval::judging_queries(const Indexed& indexed, int head,
                                                     std::int64_t tokens) const {
  const std::int64_t d = geometry_.head_dim, seen = indexed.observed.tokens();
  std::vector<JudgingQuery> queries;
  const auto add = [&](const float* q, Position position) {
    if (std::all_of(q, q + d, [](float x) { return std::isfinite(x); })) queries.push_back({q, position});
  };
  const std::int64_t some = std::min(seen, kCalibrating);
  for (std::int64_t i = 0; i < some; ++i) {
    const std::int64_t t = (2 * i + 1) * seen / (2 * some);
    add(indexed.observed.q().data() + (t * geometry_.query_heads + head) * d,
        static_cast<Position>(indexed.observed.begin() + t));
  }
  if (seen > 0) return queries;
  const RetrievalIndex& index = indexed.heads[at(head / geometry_.group())];
  const std::vector<float>& known =
      index.guides(options_.per_query_head ? head % geometry_.group() : 0).queries;
  const std::int64_t count = std::ssize(known) / d, kept = std::min(count, kCalibrating);
  for (std::int64_t i = 0; i < kept; ++i)
    add(known.data() + i * count / kept * d, static_cast<Position>(tokens - 1));
  return queries;
}

void Retrieval::calibrate(Indexed& indexed, const KvLayer& kv) const {
  if (options_.error == 0.0) return;
  indexed.shares.clear();
  for (int head = 0; head < geometry_.query_heads; ++head) {
    const ShareGoal goal = {
        .error = options_.error,
        .rest = options_.rest,
        .most = options_.k,
        .dense = geometry_.dense,
        .scale = geometry_.scale,
        .seed = hash_seed(geometry_.seed, geometry_.layer, geometry_.query_head_in_layer(head))};
    indexed.shares.push_back(calibrate_share(judging_queries(indexed, head, kv.tokens),
                                             kv.heads[at(head / geometry_.group())], goal, *geometry_.pool));
  }
}

bool Retrieval::take_index(std::int32_t sequence, const Selector& other, KvLayer kv) {
  const auto* const same = dynamic_cast<const Retrieval*>(&other);
  if (same == nullptr || !same->indexed_.contains(sequence) || same->options_.degree != options_.degree ||
      same->options_.numbers != options_.numbers ||
      same->options_.per_query_head != options_.per_query_head ||
      same->geometry_.dense.sink != geometry_.dense.sink ||
      same->geometry_.dense.window != geometry_.dense.window)
    return false;
  Indexed taken = fresh();
  // Another layer's keys are the same until now at most.
  const bool same_keys = same->geometry_.layer == geometry_.layer;
  for (std::size_t head = 0; head < taken.heads.size(); ++head) {
    const RetrievalIndex& found = same->indexed_.at(sequence).heads[head];
    taken.heads[head] = same_keys ? found.shared() : found.settled();
  }
  Indexed& own = of(sequence);
  taken.observed = std::move(own.observed);
  calibrate(taken, kv);
  for (int head = 0; !judged_alike(same->options_) && head < geometry_.kv_heads; ++head)
    taken.heads[at(head)].judge(kv.heads[at(head)], goal_for(taken, end_of(kv), head), *geometry_.pool);
  taken.observed = ObservedQueries(kJudgingTokens);
  indexed_.insert_or_assign(sequence, std::move(taken));
  return true;
}

void Retrieval::share_index(std::int32_t sequence, const Selector& other) {
  const auto* const same = dynamic_cast<const Retrieval*>(&other);
  if (same == nullptr || !same->indexed_.contains(sequence) || same->geometry_.layer != geometry_.layer)
    return;
  Indexed& own = of(sequence);
  const Indexed& found = same->indexed_.at(sequence);
  for (std::size_t head = 0; head < own.heads.size(); ++head) own.heads[head].share(found.heads[head]);
}

std::vector<Position> Retrieval::wanted_queries(std::int32_t sequence, Position begin,
                                                std::int64_t tokens) const {
  const auto found = indexed_.find(branches_.contains(sequence) ? 0 : sequence);
  const auto wanted_by = [&](const Indexed& indexed) {
    std::vector<Position> all;
    std::ranges::set_union(indexed.captured.wanted_of(begin, tokens),
                           indexed.observed.wanted_of(begin, tokens), std::back_inserter(all));
    return all;
  };
  return found != indexed_.end() ? wanted_by(found->second) : wanted_by(fresh());
}

void Retrieval::build(std::int32_t sequence, KvLayer kv) {
  Indexed& indexed = of(sequence);
  const Position end = end_of(kv);
  const std::int64_t far = std::max<std::int64_t>(0, end - geometry_.dense.sink);
  // Whoever judges must not have made the graph; one that is not judged here is the same, so as to be shared.
  if (far > kLeastJudged && indexed.observed.tokens() > 0) indexed.captured.cut(indexed.observed.begin());
  if (indexed.observed.tokens() > 0) calibrate(indexed, kv);
  const std::int64_t most = std::max(kQueriesPerKey * far, KeySpace::kSample);  // queries of a graph
  // One thread's work each, so that of all heads first.
  std::vector<KeySpace> spaces(at(geometry_.kv_heads), KeySpace(geometry_.head_dim));
  geometry_.pool->for_each(geometry_.kv_heads, [&](std::int64_t head, int) {
    const int group = geometry_.group();
    spaces[at(head)] = RetrievalIndex::space_for(
        shape(), kv.heads[at(head)], end,
        indexed.captured.of_heads(static_cast<int>(head) * group, group, KeySpace::kSample / group));
  });
  GraphsByDevice graphs(device_, *geometry_.pool);
  std::vector<std::optional<RetrievalIndex>> heads(at(geometry_.kv_heads));
  const std::int64_t heads_at_once =
      std::clamp<std::int64_t>(kKeysAtOnce / std::max<std::int64_t>(1, far), 1, kHeadsAtOnce);
  geometry_.pool->side_by_side(
      geometry_.kv_heads, device_ != nullptr ? static_cast<int>(heads_at_once) : 1, [&](std::int64_t number) {
        const auto head = static_cast<int>(number);
        std::vector<std::vector<float>> queries;
        const int heads_per_graph = options_.per_query_head ? 1 : geometry_.group();
        for (int first = head * geometry_.group(); first < (head + 1) * geometry_.group();
             first += heads_per_graph)
          queries.push_back(indexed.captured.of_heads(first, heads_per_graph, most / heads_per_graph));
        heads[at(head)].emplace(shape(), kv.heads[at(head)], end, std::move(spaces[at(head)]), queries,
                                goal_for(indexed, end, head), *geometry_.pool, graphs);
      });
  indexed.heads.clear();
  for (std::optional<RetrievalIndex>& head : heads) indexed.heads.push_back(std::move(*head));
  if (indexed.observed.tokens() == 0) calibrate(indexed, kv);
  indexed.captured.clear();
  indexed.observed = ObservedQueries(kJudgingTokens);
  indexed.searches.forget();
}

void Retrieval::roll_back(std::int32_t sequence, std::int64_t tokens) {
  if (const auto branch = branches_.find(sequence); branch != branches_.end()) {
    if (branch->second.last >= tokens) branch->second.forget();
    return;
  }
  const auto found = indexed_.find(sequence);
  if (found == indexed_.end()) return;
  Indexed& indexed = found->second;
  indexed.captured.cut(tokens);
  indexed.observed.roll_back(tokens);
  for (RetrievalIndex& head : indexed.heads) head.cut(tokens, *geometry_.pool);
  if (indexed.searches.last >= tokens) indexed.searches.forget();
}

Retrieval::Way Retrieval::way(const Indexed& indexed, int kv_head, std::int64_t far_keys) const {
  std::int64_t k = wanted(indexed, kv_head, far_keys);
  if (options_.error > 0.0) k += sample_size(options_.rest, far_keys);
  if (options_.mass >= 1.0 || (options_.mass == 0.0 && k >= far_keys)) return Way::all;
  return far_keys <= kKeysPerBeam * beam_for(indexed, kv_head, far_keys) ? Way::scan : Way::walk;
}

/// For each block the tokens after those done for which the graphs need not change.
std::vector<Retrieval::Segment> Retrieval::next_segments(std::span<const QueryBlock> blocks,
                                                         std::vector<std::int64_t>& done) {
  std::vector<Segment> segments;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const QueryBlock& block = blocks[b];
    if (done[b] == block.tokens) continue;
    Indexed& indexed = of(block.sequence);
    const auto keys = [&](std::int64_t token) {
      return indexed.heads[0].keys_for(block.far_end(token, geometry_.dense));
    };
    std::int64_t last = done[b] + 1;
    while (last < block.tokens && keys(last) == keys(done[b])) ++last;
    segments.push_back({&block, &indexed, &searches_of(block.sequence), done[b], last});
    done[b] = last;
  }
  return segments;
}

void Retrieval::select(std::span<const QueryBlock> blocks, Selection& out) {
  std::vector<std::int64_t> done(blocks.size(), 0);
  for (;;) {
    check_cancel();
    const std::vector<Segment> segments = next_segments(blocks, done);
    if (segments.empty()) return;
    const std::int64_t kv_heads = geometry_.kv_heads, heads = geometry_.query_heads;
    geometry_.pool->for_each(std::ssize(segments) * kv_heads, [&](std::int64_t item, int worker) {
      const Segment& s = segments[at(item / kv_heads)];
      RetrievalIndex& index = s.indexed->heads[at(item % kv_heads)];
      bool walks = false;
      for (std::int64_t token = s.first; token < s.last; ++token)
        walks |= way(*s.indexed, static_cast<int>(item % kv_heads),
                     s.block->far_end(token, geometry_.dense) - s.block->far_begin) == Way::walk;
      if (!walks) return;
      const Position far_end = s.block->far_end(s.last - 1, geometry_.dense);
      index.advance(index.keys_for(far_end), s.block->kv.heads[at(item % kv_heads)], scratch_[at(worker)]);
    });
    for (const Segment& s : segments) {
      s.searches->remembered.resize(at(heads));
      if (s.searches->last != s.block->begin + s.first - 1)
        for (std::vector<Node>& nodes : s.searches->remembered) nodes.clear();
      s.searches->last = static_cast<Position>(s.block->begin + s.last - 1);
    }
    std::vector<Selection> chosen(segments.size() * at(heads));
    std::vector<SelectWork> works(chosen.size());
    const int group = geometry_.group(), together = heads_together(std::ssize(segments));
    const int parts = (group + together - 1) / together;  // of a KV head's group
    geometry_.pool->for_each(std::ssize(segments) * kv_heads * parts, [&](std::int64_t item, int worker) {
      const std::int64_t part = item % parts, segment = item / parts / kv_heads;
      const auto first = static_cast<int>(item / parts % kv_heads * group + part * together);
      const int count = std::min(together, static_cast<int>(group - part * together));
      const std::size_t place = at(segment * heads + first);
      search_segment(segments[at(segment)], first, count, scratch_[at(worker)],
                     std::span(chosen).subspan(place, at(count)), std::span(works).subspan(place, at(count)));
    });
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      out.append(chosen[i]);
      work_.bytes += works[i].bytes;
      work_.keys_scored += works[i].keys_scored;
    }
  }
}

/// Heads of a group whose walks take turns on one thread: all, unless threads would be left without work.
/// What is found does not depend on it.
int Retrieval::heads_together(std::int64_t segments) const {
  int together = geometry_.group();
  while (together > 1 && segments * geometry_.query_heads / together < geometry_.pool->size())
    together = (together + 1) / 2;
  return together;
}

/// The tokens of some heads of a group, one after the other: each begins with what the last one found.
void Retrieval::search_segment(const Segment& segment, int first_head, int heads, RetrievalScratch& scratch,
                               std::span<Selection> out, std::span<SelectWork> work) const {
  const std::int64_t d = geometry_.head_dim;
  std::vector<float> q(at(heads * d));
  std::vector<Search> searches;
  for (std::int64_t token = segment.first; token < segment.last; ++token) {
    const Position far_end = segment.block->far_end(token, geometry_.dense);
    const float* const given = segment.block->q.data() + (token * geometry_.query_heads + first_head) * d;
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = given[i] * geometry_.scale;
    searches.clear();
    for (int head = 0; head < heads; ++head)
      searches.push_back({*segment.block, *segment.indexed, *segment.searches, token, first_head + head,
                          far_end, q.data() + head * d});
    search_token(searches, way(*segment.indexed, first_head / geometry_.group(), searches[0].far_keys()),
                 scratch, out, work);
  }
}

/// One token of some heads of a group. `out` and `work` are the heads'.
void Retrieval::search_token(std::span<const Search> searches, Way way, RetrievalScratch& scratch,
                             std::span<Selection> out, std::span<SelectWork> work) const {
  const int group = geometry_.group();
  if (scratch.walks.size() < searches.size()) scratch.walks.resize(searches.size());
  const std::span<BeamSearch> walks = std::span(scratch.walks).first(searches.size());
  if (way == Way::walk) {
    for (std::size_t i = 0; i < searches.size(); ++i) begin(searches[i], walks[i], scratch);
    run_together(walks, beam_for(searches[0]) + hidden(searches[0]));
  }
  for (std::size_t i = 0; i < searches.size(); ++i) {
    const Search& search = searches[i];
    const int within = search.head % group;
    QuerySet set = {.sequence = search.block.sequence,
                    .kv_head = search.head / group,
                    .heads = 1u << within,
                    .token_begin = static_cast<std::int32_t>(search.token),
                    .token_end = static_cast<std::int32_t>(search.token + 1)};
    if (way == Way::all) {  // the first head of the group speaks for all, so that keys are read once
      if (within != 0) continue;
      set.heads = all_heads(group);
      out[i].add_set(set);
      out[i].add_run(search.block.far_begin, search.far_end);
      continue;
    }
    out[i].add_set(set);
    way == Way::scan ? scan(search, scratch, out[i], work[i])
                     : finish(search, walks[i], scratch, out[i], work[i]);
  }
}

/// All far keys, exactly.
void Retrieval::scan(const Search& search, RetrievalScratch& scratch, Selection& out,
                     SelectWork& work) const {
  const KvRows& kv = rows_of(search);
  const std::int64_t n = search.far_keys();
  scratch.scores.resize(at(n));
  kernels().score_run(search.q, 1, kv, search.block.far_begin, search.far_end, scratch.scores.data(), n);
  work.bytes += n * kv.token_bytes() / 2;
  work.keys_scored += n;
  if (options_.error > 0.0) {
    ScoredKeys found = {.rows = {}, .scores = std::move(scratch.scores)};
    for (Position row = search.block.far_begin; row < search.far_end; ++row) found.rows.push_back(row);
    take_by_share(search, found, out, work);
    scratch.scores = std::move(found.scores);
    return;
  }
  std::vector<Position> rows;
  if (options_.mass > 0.0) {
    top_mass(scratch.scores, options_.mass, search.block.far_begin, rows);
  } else {
    top_count(scratch.scores, options_.k.of(n), search.block.far_begin, rows);
  }
  take(search, rows, out);
}

void Retrieval::draw_rest(const Search& search, std::vector<Position>& rows) const {
  const std::uint64_t seed =
      hash_seed(geometry_.seed, geometry_.layer, geometry_.query_head_in_layer(search.head),
                search.block.begin + search.token);
  draw_even(search.block.far_begin, search.far_end, sample_size(options_.rest, search.far_keys()), seed,
            rows);
}

/// The keys above the head's threshold, and a sample for all others.
void Retrieval::take_by_share(const Search& search, const ScoredKeys& found, Selection& out,
                              SelectWork& work) const {
  const std::int64_t n = search.far_keys();
  const KvRows& kv = rows_of(search);
  ScoredKeys sample;
  draw_rest(search, sample.rows);
  sample.scores.resize(sample.rows.size());
  kernels().score_rows(search.q, 1, kv, sample.rows.data(), std::ssize(sample.rows), sample.scores.data(),
                       std::ssize(sample.rows));
  work.bytes += std::ssize(sample.rows) * kv.token_bytes() / 2;
  work.keys_scored += std::ssize(sample.rows);
  const std::vector<HeadShare>& shares = search.indexed.shares;
  const float floor = at(search.head) < shares.size() ? shares[at(search.head)].floor : kUnknownFloor;
  choose_with_rest(found, sample, n, {floor, kLeastChosen, options_.k.of(n)}, out);
}

/// Keys that were chosen otherwise, and a sample for all others where one is asked for.
void Retrieval::take(const Search& search, std::span<const Position> rows, Selection& out) const {
  if (options_.rest.value == 0.0) return out.add_rows(rows);
  std::vector<Position> sample;
  draw_rest(search, sample);
  add_with_rest(rows, sample, search.far_keys(), out);
}

/// Exact scores, into scratch.scores, of the best `most` far keys that the walk found and of those behind the
/// graph; their positions into `rows`, rising. Returns how many lie behind the graph.
std::int64_t Retrieval::rank(const Search& search, const BeamSearch& walk, std::int64_t most,
                             RetrievalScratch& scratch, std::vector<Position>& rows) const {
  rows.clear();
  for (std::int64_t rank = 0; rank < walk.found() && std::ssize(rows) < most; ++rank) {
    const Position row = search.block.far_begin + walk.node(rank);
    if (row < search.far_end) rows.push_back(row);
  }
  std::sort(rows.begin(), rows.end());
  const std::int64_t walked = std::ssize(rows);
  const auto indexed = static_cast<Position>(search.block.far_begin + index_of(search).keys());
  for (Position row = indexed; row < search.far_end; ++row) rows.push_back(row);
  scratch.scores.resize(rows.size());
  kernels().score_rows(search.q, 1, rows_of(search), rows.data(), std::ssize(rows), scratch.scores.data(),
                       std::ssize(rows));
  return std::ssize(rows) - walked;
}

/// Sum of exp(score - peak) over far keys that are not in `seen` (rising), from a sample of evenly spread
/// ones.
double Retrieval::unseen_weight(const Search& search, std::span<const Position> seen, float peak,
                                RetrievalScratch& scratch) const {
  const std::int64_t n = search.far_keys();
  std::vector<Position> sample;
  Rng rng(hash_seed(geometry_.seed, geometry_.layer, geometry_.query_head_in_layer(search.head),
                    search.block.begin + search.token));
  for (std::int64_t i = 0; i < kSample; ++i) {
    const std::int64_t low = i * n / kSample, high = (i + 1) * n / kSample;
    if (low == high) continue;
    const auto row =
        static_cast<Position>(search.block.far_begin + low +
                              static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(high - low))));
    if (!std::binary_search(seen.begin(), seen.end(), row)) sample.push_back(row);
  }
  if (sample.empty()) return 0.0;
  std::vector<float>& scores = scratch.distance;
  scores.resize(sample.size());
  kernels().score_rows(search.q, 1, rows_of(search), sample.data(), std::ssize(sample), scores.data(),
                       std::ssize(sample));
  double sum = 0.0;
  for (const float s : scores) sum += weight_below(s, peak);
  return sum * static_cast<double>(n - std::ssize(seen)) / static_cast<double>(sample.size());
}

/// Sets out from the entries and from what the head found for the token before.
void Retrieval::begin(const Search& search, BeamSearch& walk, RetrievalScratch& scratch) const {
  const RetrievalIndex& index = index_of(search);
  const KeyGraph& graph = index.graph(options_.per_query_head ? search.head % geometry_.group() : 0);
  std::vector<Node>& remembered = search.searches.remembered[at(search.head)];
  std::erase_if(remembered, [&](Node node) { return node >= graph.nodes(); });
  scratch.towards.resize(at(index.space().numbers()));
  index.space().query(search.q, scratch.towards);
  walk.begin(graph, index.walk_keys(), scratch.towards.data(), keep_for(search) + hidden(search),
             options_.mass > 0.0);
  walk.visit(graph.entries());
  walk.visit(remembered);
}

/// Takes the best keys of a walk that has run, which goes on where it found too little.
void Retrieval::finish(const Search& search, BeamSearch& walk, RetrievalScratch& scratch, Selection& out,
                       SelectWork& work) const {
  const KvRows& kv = rows_of(search);
  const std::int64_t n = search.far_keys(), k = wanted(search), hidden = this->hidden(search);
  const std::int64_t nodes = index_of(search).keys();
  std::int64_t beam = beam_for(search), keep = keep_for(search);
  std::int64_t behind = 0;
  std::vector<Position> rows, best;
  for (;;) {
    // Fewer than asked for: a narrow beam has stopped early.
    while (walk.found() < std::min(keep + hidden, nodes) && beam < keep) walk.run((beam *= 2) + hidden);
    behind = rank(search, walk, options_.mass > 0.0 || options_.error > 0.0 ? keep : 2 * k, scratch, rows);
    work.bytes += std::ssize(rows) * kv.token_bytes() / 2;
    if (options_.error > 0.0) break;
    if (options_.mass == 0.0) {
      top_k(scratch.scores, k, 0, best);
      break;
    }
    work.bytes += kSample * kv.token_bytes() / 2;
    work.keys_scored += kSample;
    float peak = -std::numeric_limits<float>::infinity();
    for (const float score : scratch.scores) peak = std::max(peak, score);  // a NaN stays out
    const double unseen = unseen_weight(search, rows, peak, scratch);
    if (take_mass(scratch.scores, options_.mass, peak, unseen, best)) break;
    beam *= 2;
    keep = beam;
    if (kKeysPerBeam * beam >= n) return scan(search, scratch, out, work);
    walk.widen(keep + hidden);
    walk.run(beam + hidden);
  }
  std::vector<Node>& remembered = search.searches.remembered[at(search.head)];
  remembered.clear();
  for (std::int64_t rank = 0; options_.warm && rank < walk.found() && remembered.size() < kRememberedNodes;
       ++rank)
    remembered.push_back(walk.node(rank));
  if (options_.error > 0.0) {
    const ScoredKeys found = {.rows = std::move(rows), .scores = scratch.scores};
    take_by_share(search, found, out, work);
  } else {
    for (Position& row : best) row = rows[at(row)];
    take(search, best, out);
  }
  work.keys_scored += walk.scored() + behind;
  work.bytes += walk.scored() * index_of(search).walk_keys().rows.stride +
                walk.expanded() * options_.degree * std::int64_t{sizeof(Link)};
}

}  // namespace

std::int64_t retrieval_prefill_bytes(const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
  if (spec.name != "retrieval") return 0;
  const std::int64_t observed = std::min(tokens, kJudgingTokens) * geometry.query_heads * geometry.head_dim;
  return capture_for(Options::of(spec), geometry).bytes_for(tokens) + observed * std::int64_t{sizeof(float)};
}

MethodInfo retrieval_method() {
  return {
      .name = "retrieval",
      .aliases = {},
      .source = "RetrievalAttention (Liu et al. 2024)",
      .keys =
          {{"k", "keys a query takes, a count or a share of the far keys", "100; with error 2%"},
           {"mass",
            "instead of k: as many keys as hold this share of the far softmax weight, as far as a "
            "sample tells, above 0 up to 1",
            ""},
           {"error",
            "instead of a fixed k: keys above a threshold of each head, which is calibrated so that the "
            "output's "
            "relative error on the text's last queries is this, 0.001 to 10; k is then the most that a query "
            "takes",
            ""},
           {"rest",
            "keys of an even sample that stand for all that were not taken, a count or a share of the far "
            "keys",
            "0; with error 1%"},
           {"recall",
            "share of the k best keys that a search is to find, 0.5 to 0.999: the beam is chosen for it, as "
            "far as the last queries of the text tell",
            "0.95"},
           {"beam", "instead of recall: keys whose links a search follows, 1 to 1048576",
            "where no queries tell 2 k, beyond 131072 far keys 11/8 of it per doubling; with mass 64 at "
            "first"},
           {"degree", "links of a key, 4 to 256", "24"},
           {"numbers", "of a key that walks compare, 4 to 256; with 60 or fewer a key is one cache line",
            "60, or 124 where queries tell more directions apart"},
           {"per", "whose queries make a graph: kv-head (its group's) or query-head (its own)", "kv-head"},
           {"warm", "whether a search begins with what its head found for the token before, too: on or off",
            "on"}},
      .dense = {.sink = 128, .window = 512},
      .dense_layers = 0,
      .make = make_of<Retrieval, Options>,
      .index_bytes =
          [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
            const std::int64_t far = tokens - geometry.dense.sink - geometry.dense.window;
            return geometry.kv_heads * RetrievalIndex::bytes_for(shape_of(Options::of(spec), geometry), far);
          },
      .validate = check_of<Options>};
}

}  // namespace lode
