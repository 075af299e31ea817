// SPDX-License-Identifier: Apache-2.0
// The copies of the layer over which calls rotate are the layers of a cache and of a selector, so that
// indexes and trained weights rotate with the keys, as they do from layer to layer of a model.
#include "gpu/attention_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/cancel.h"
#include "gpu/select/selectors.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/kv_range.h"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/device/read.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kReplays = 11, kMostCalls = 2048, kMostPlaces = 64;
// Copies of a layer from here on hold the keys of those before: caches know keys by where they lie.
constexpr int kDistinctPlaces = 4;
constexpr int kMostAlone = 8;                                  ///< query tokens; more choose together
constexpr std::uint64_t kQuerySeeds = std::uint64_t{1} << 32;  // apart from those of keys
constexpr double kLeastMicroseconds = 3000;                    // of a replay
constexpr int kLeastCalls = 8;                                 // of a replay, where a call is short
// A call that reads a 25th of the keys must still meet caches that have forgotten it.
constexpr std::int64_t kRotatedBytes = std::int64_t{192} << 20, kReadShare = 25;
constexpr std::int64_t kMostCacheBytes = std::int64_t{32} << 30;

double middle(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + std::ssize(times) / 2, times.end());
  return times[times.size() / 2];
}

/// Many calls in one graph.
class Series {
 public:
  using Call = std::function<void(int)>;  ///< enqueues the i-th call

  /// A trial is one call.
  Series(const cuda::Stream& stream, int least_calls, bool trial, const Call& call) : stream_(stream) {
    for (calls_ = trial ? 1 : least_calls;; calls_ *= 2) {
      cuda::Graph::begin(stream.get());
      try {
        for (int i = 0; i < calls_; ++i) call(i);
      } catch (...) {
        cuda::Graph::abandon(stream.get());
        throw;
      }
      graph_ = cuda::Graph::end(stream.get());
      replay();
      if (trial || calls_ >= kMostCalls || replay() * calls_ >= kLeastMicroseconds) return;
    }
  }
  void measure() { times_.push_back(replay()); }
  double median() const { return middle(times_); }

 private:
  double replay() {  // microseconds of one call
    timer_.start(stream_.get());
    graph_.launch(stream_.get());
    timer_.stop(stream_.get());
    return timer_.microseconds() / calls_;
  }
  const cuda::Stream& stream_;
  int calls_ = 0;
  cuda::Graph graph_;
  cuda::Timer timer_;
  std::vector<double> times_;
};

/// A method under measurement.
struct Candidate {
  Spec spec;
  std::unique_ptr<GpuSelector> selector;  // null: full
  cuda::Buffer kept_rows, kept_counts;    // [places, lists, capacity], [places, lists]
  std::int64_t kept_capacity = 0;
  double far_chosen = 0, build_seconds = 0;  // far keys per query token and KV head
  double select_bytes = 0;                   // of a call
  std::unique_ptr<Series> whole, apart, select, attend, read;
};

class Bench {
 public:
  Bench(const GpuAttentionTask& task)
      : task_(task), layout_{task.shape->kv_heads, task.shape->head_dim, task.kv_type, 0} {
    const std::int64_t call_bytes = task.batch * layout_.layer_bytes(task.context);
    const std::int64_t wanted = task.rotate ? (kRotatedBytes * kReadShare + call_bytes - 1) / call_bytes : 1;
    places_ = static_cast<int>(std::clamp<std::int64_t>(
        wanted, 2, std::clamp<std::int64_t>(kMostCacheBytes / call_bytes, 2, kMostPlaces)));
    query_tokens_ = static_cast<int>(task.batch * task.queries);
    together_ = task.queries > kMostAlone;
  }

  void fill() {
    std::vector<const char*> bases;
    for (std::int64_t b = 0; b < task_.batch; ++b) {
      ranges_.push_back(std::make_unique<cuda::KvRange>(layout_, places_, task_.context));
      ranges_.back()->back(task_.context);
      bases.push_back(ranges_.back()->base());
      for (int place = 0; place < places_; ++place) {
        if (place < kDistinctPlaces)
          fill(*ranges_.back(), place, b);
        else
          repeat(*ranges_.back(), place);
      }
    }
    layout_ = ranges_.front()->layout();
    for (std::int64_t b = 0; b < task_.batch; ++b)
      for (std::int64_t t = 0; t < task_.queries; ++t)
        tokens_host_.push_back(
            {static_cast<std::int32_t>(b), static_cast<std::int32_t>(task_.context - task_.queries + t)});
    bases_ = upload(bases, "bases");
    tokens_ = upload(tokens_host_, "query tokens");
    const auto frequencies = task_.rope->frequencies();
    frequencies_ = upload(std::vector<float>(frequencies.begin(), frequencies.end()), "frequencies");
    std::vector<float> q, q_unrotated, one, one_unrotated;
    for (int place = 0; place < places_; ++place) {
      for (std::int64_t b = 0; b < task_.batch; ++b) {
        task_.make_queries(seed_of(place % kDistinctPlaces, b), seed_of(place, b) + kQuerySeeds, one,
                           one_unrotated);
        q.insert(q.end(), one.begin(), one.end());
        q_unrotated.insert(q_unrotated.end(), one_unrotated.begin(), one_unrotated.end());
      }
    }
    q_ = upload(q, "queries");
    q_unrotated_ = upload(q_unrotated, "queries");
    output_ = cuda::Buffer(q_.bytes() / places_, "the output of attention");
    workspace_ =
        cuda::Buffer(together_ ? cuda::rows_prefill_workspace_bytes(task_.shape->head_dim)
                               : cuda::decode_workspace_bytes(query_tokens_, task_.shape->query_heads,
                                                              layout_.kv_heads, task_.shape->head_dim),
                     "partial results of attention");
    cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
    const std::int64_t most = std::max(kv_bytes(task_.context), task_.rotate ? kRotatedBytes * 6 : 0);
    readable_ = cuda::Buffer(most, "bytes to read");
    cuda::fill(readable_.as<void>(), 1, readable_.bytes(), stream_.get());
    stream_.synchronize();
  }

  /// False, and nothing is added, where there are many tokens and the GPU does not choose for them together.
  bool add(const Spec& spec) {
    Candidate c;
    c.spec = spec;
    if (spec.name == "full") {
      candidates_.push_back(std::move(c));
      return true;
    }
    const GpuGeometry geometry = {.layers = places_,
                                  .query_heads = task_.shape->query_heads,
                                  .kv_heads = task_.shape->kv_heads,
                                  .head_dim = task_.shape->head_dim,
                                  .max_tokens = task_.context,
                                  .most_queries = together_ ? kMostAlone : query_tokens_,
                                  .most_tokens = query_tokens_,
                                  .sequences = static_cast<int>(task_.batch),
                                  .key_row_bytes = layout_.row_bytes(),
                                  .stream = stream_.get(),
                                  .distinct_layers = kDistinctPlaces};
    const bool first_saap = spec.name == "saap" && !std::exchange(met_saap_, true);
    c.selector = make_gpu_selector_for_bench(spec, geometry, task_.seed, first_saap ? task_.largest : 0.0);
    if (c.selector == nullptr && together_) return false;
    if (c.selector == nullptr) {
      throw InputError(fmt::format(
          "bench attention: expected a method whose keys the GPU chooses by itself, found '{}'", spec.str()));
    }
    if (together_ &&
        (!c.selector->chooses_together() ||
         std::min(c.selector->most_together(), c.selector->most_tokens(0, Phase::question)) < query_tokens_))
      return false;
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t b = 0; b < task_.batch; ++b) {
      c.selector->prepare(
          {.sequence = static_cast<int>(b),
           .base = ranges_[static_cast<std::size_t>(b)]->base(),
           .layout = layout_,
           .tokens = task_.context - task_.queries,  // those of the queries come with the step
           .frequencies = frequencies_.as<float>(),
           .rope_scale = task_.rope->attention_scaling()},
          stream_.get());
    }
    stream_.synchronize();
    c.build_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
                      places_ / static_cast<double>(task_.batch);
    c.selector->begin({.queries = tokens_host_, .phase = together_ ? Phase::question : Phase::generation});
    c.selector->upload(stream_.get());
    for (int place = 0; place < places_; ++place) take_lists(c, place);
    candidates_.push_back(std::move(c));
    return true;
  }

  std::vector<GpuAttentionRow> measure() {
    for (Candidate& c : candidates_) record(c);
    wait_alone_ = std::make_unique<Series>(stream_, kLeastCalls, !task_.rotate, [&](int) { wait(); });
    for (int replay = 0; replay < (task_.rotate ? kReplays : 1); ++replay) {
      for (Candidate& c : candidates_) {
        check_cancel();
        for (Series* series : {c.whole.get(), c.apart.get(), c.select.get(), c.attend.get(), c.read.get()})
          if (series != nullptr) series->measure();
      }
      wait_alone_->measure();
    }
    std::vector<GpuAttentionRow> rows;
    for (const Candidate& c : candidates_) rows.push_back(row_of(c));
    return rows;
  }

 private:
  template <class T>
  cuda::Buffer upload(const std::vector<T>& from, const char* what) {
    cuda::Buffer to(std::ssize(from) * std::int64_t{sizeof(T)}, what);
    cuda::copy(to.as<void>(), from.data(), to.bytes(), stream_.get());
    stream_.synchronize();
    return to;
  }
  std::uint64_t seed_of(int place, std::int64_t sequence) const {
    return task_.seed + static_cast<std::uint64_t>(sequence) * kMostPlaces +
           static_cast<std::uint64_t>(place);
  }
  std::int64_t kv_bytes(std::int64_t keys) const {
    return task_.batch * keys * layout_.kv_heads * 2 * layout_.row_bytes();
  }

  void fill(cuda::KvRange& range, int place, std::int64_t sequence) {
    check_cancel();
    const std::uint64_t seed = seed_of(place, sequence);
    if (!task_.make_keys) {
      constexpr float kWidth = 1.7320508f;  // of a uniform number with variance 1
      cuda::fill_uniform(range.base() + place * range.layout().layer_stride, task_.kv_type,
                         range.layout().layer_bytes(task_.context) / bytes_of(task_.kv_type), 0.0f, kWidth,
                         seed, stream_.get());
      return;
    }
    KvStore store({1, layout_.kv_heads, layout_.head_dim, task_.kv_type, task_.context});
    task_.make_keys(seed, store);
    for (int head = 0; head < layout_.kv_heads; ++head) {
      for (const bool values : {false, true})
        range.to_device(
            place, head, values ? cuda::KvRange::Part::v : cuda::KvRange::Part::k, 0, task_.context,
            store.rows(0, head, values ? KvStore::Part::v : KvStore::Part::k).data(), stream_.get());
    }
    stream_.synchronize();
  }

  void repeat(const cuda::KvRange& range, int place) {
    char* const to = range.base() + place * range.layout().layer_stride;
    const char* const from = range.base() + place % kDistinctPlaces * range.layout().layer_stride;
    cuda::copy(to, from, range.layout().layer_bytes(task_.context), stream_.get());
  }

  cuda::Queries queries(int place) const {
    const std::int64_t each = q_.bytes() / places_;
    return {.tokens = tokens_.as<cuda::QueryToken>(),
            .bases = bases_.as<const char*>(),
            .layer_offset = place * layout_.layer_stride,
            .layout = layout_,
            .count = query_tokens_,
            .query_heads = task_.shape->query_heads,
            .scale = 1.0f / std::sqrt(static_cast<float>(task_.shape->head_dim)),
            .q = reinterpret_cast<const float*>(q_.as<char>() + place * each),
            .o = output_.as<float>()};
  }
  const float* q_unrotated(int place) const {
    return reinterpret_cast<const float*>(q_unrotated_.as<char>() + place * (q_.bytes() / places_));
  }
  /// Far keys are those of all tokens that choose together, so of the first one.
  std::int64_t far_of(const Candidate& c) const {
    return far_keys(c.spec.dense, task_.context - (together_ ? task_.queries : 1));
  }
  cuda::RowLists choose(const Candidate& c, int place) {
    if (together_) return c.selector->select_together(place, queries(place), stream_.get());
    return c.selector->select(place, queries(place), q_unrotated(place), stream_.get());
  }
  /// At most: layers may differ.
  std::int64_t lists_of(const Candidate& c) const { return lists_of(c.selector->lists_per_head()); }
  std::int64_t lists_of(int lists_per_head) const {
    return std::int64_t{lists_per_kv_head()} * layout_.kv_heads * lists_per_head;
  }
  /// Times the lists of one query head.
  int lists_per_kv_head() const { return together_ ? 1 : query_tokens_; }

  /// Chooses once to see how many keys come; with `keep`, cuts or fills the lists to that share.
  void take_lists(Candidate& c, int place) {
    const cuda::RowLists lists = choose(c, place);
    count(c, place);
    if (task_.keep) {
      const std::int64_t n = lists_of(lists.lists_per_head), far = far_of(c);
      std::vector<std::int32_t> counts(static_cast<std::size_t>(n));
      cuda::copy(counts.data(), lists.counts, n * 4, stream_.get());
      stream_.synchronize();
      const auto kept = static_cast<std::int64_t>(std::ceil(*task_.keep * static_cast<double>(far)));
      if (c.kept_capacity == 0) {
        c.kept_capacity = std::max<std::int64_t>(1, kept);
        c.kept_rows = cuda::Buffer(places_ * lists_of(c) * c.kept_capacity * 4, "kept rows");
        c.kept_counts = cuda::Buffer(places_ * lists_of(c) * 4, "counts of kept rows");
      }
      std::vector<std::int32_t> all(static_cast<std::size_t>(n * c.kept_capacity), 0);
      for (std::int64_t list = 0; list < n; ++list) {
        std::vector<std::int32_t> rows(static_cast<std::size_t>(counts[static_cast<std::size_t>(list)]));
        cuda::copy(rows.data(), lists.rows + list * lists.capacity, std::ssize(rows) * 4, stream_.get());
        stream_.synchronize();
        keep_share(rows, c.spec.dense.sink, far, kept);
        std::copy(rows.begin(), rows.end(), all.begin() + list * c.kept_capacity);
        counts[static_cast<std::size_t>(list)] = static_cast<std::int32_t>(rows.size());
      }
      cuda::copy(c.kept_rows.as<std::int32_t>() + place * lists_of(c) * c.kept_capacity, all.data(),
                 std::ssize(all) * 4, stream_.get());
      cuda::copy(c.kept_counts.as<std::int32_t>() + place * lists_of(c), counts.data(), n * 4, stream_.get());
      stream_.synchronize();
      const double chosen = std::accumulate(counts.begin(), counts.end(), 0.0);
      add_far(c, chosen);
    }
  }
  void add_far(Candidate& c, double chosen) const {
    // Lists of one KV head may share keys; read once they can at most be all there are.
    c.far_chosen +=
        std::min(chosen / (lists_per_kv_head() * layout_.kv_heads), static_cast<double>(far_of(c))) / places_;
  }
  /// What choosing has just taken, and how many keys it has listed.
  void count(Candidate& c, int place) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(places_ * c.selector->counts_per_layer()));
    c.selector->copy_counts(counts.data(), places_, stream_.get());
    stream_.synchronize();
    const std::vector<int> heads = all_kv_heads(layout_.kv_heads);
    double all = 0;
    for (int token = 0; token < lists_per_kv_head(); ++token) {
      const CountedToken of = {.counts = counts.data(),
                               .layer = place,
                               .kv_heads = layout_.kv_heads,
                               .token = c.selector->counted_token(token),
                               .position = tokens_host_[static_cast<std::size_t>(token)].position};
      std::int64_t chosen = 0;
      for (const int head : heads) chosen += c.selector->listed(of, head);
      all += static_cast<double>(chosen);
      c.select_bytes += static_cast<double>(c.selector->select_bytes(of, heads, chosen)) / places_;
    }
    if (!task_.keep) add_far(c, all);
  }

  /// The same rows up to `wanted`, or others besides, evenly spread.
  static void keep_share(std::vector<std::int32_t>& rows, std::int64_t sink, std::int64_t far,
                         std::int64_t wanted) {
    std::vector<char> taken(static_cast<std::size_t>(far), 0);
    if (std::ssize(rows) > wanted) rows.resize(static_cast<std::size_t>(wanted));
    for (const std::int32_t row : rows) taken[static_cast<std::size_t>(row - sink)] = 1;
    std::int64_t left = wanted - std::ssize(rows);
    const std::int64_t step = left > 0 ? std::max<std::int64_t>(1, far / left) : 1;
    for (std::int64_t offset = 0; offset < step && left > 0; ++offset) {
      for (std::int64_t at = offset; at < far && left > 0; at += step) {
        if (taken[static_cast<std::size_t>(at)]) continue;
        taken[static_cast<std::size_t>(at)] = 1;
        --left;
      }
    }
    rows.clear();
    for (std::int64_t at = 0; at < far; ++at)
      if (taken[static_cast<std::size_t>(at)]) rows.push_back(static_cast<std::int32_t>(sink + at));
  }

  cuda::RowLists kept(const Candidate& c, cuda::RowLists lists, int place) const {
    if (!task_.keep) return lists;
    const std::int64_t n = lists_of(c);
    lists.rows = c.kept_rows.as<std::int32_t>() + place * n * c.kept_capacity;
    lists.counts = c.kept_counts.as<std::int32_t>() + place * n;
    lists.capacity = c.kept_capacity;
    return lists;
  }

  std::int32_t first_position() const { return static_cast<std::int32_t>(task_.context - task_.queries); }
  void attend_full(int place) {
    if (together_) return attend_prefill(queries(place), first_position(), stream_.get());
    attend_full_decode(queries(place), task_.context, workspace_.as<void>(), stream_.get());
  }
  void attend(const Candidate& c, const cuda::RowLists& lists, int place) {
    const cuda::RowLists rows = kept(c, lists, place);
    if (together_)
      return attend_rows_prefill(queries(place), first_position(), rows, workspace_.as<void>(),
                                 stream_.get());
    attend_rows_decode(queries(place), rows, task_.context, workspace_.as<void>(), stream_.get());
  }

  /// Kernels that follow begin when those before have ended.
  void wait() { cuda::fill(wait_target_.as<void>(), 0, wait_target_.bytes(), stream_.get()); }

  void call(Candidate& c, int place) {
    if (c.selector == nullptr) return attend_full(place);
    if (task_.keep || together_ ||
        !c.selector->attend(place, queries(place), q_unrotated(place), workspace_.as<void>(), stream_.get()))
      attend(c, choose(c, place), place);
  }

  void record(Candidate& c) {
    const auto series = [&](const Series::Call& call) {
      return std::make_unique<Series>(stream_, together_ ? places_ : kLeastCalls, !task_.rotate, call);
    };
    c.whole = series([&](int i) { call(c, i % places_); });
    c.apart = series([&](int i) {
      wait();
      call(c, i % places_);
    });
    if (c.selector != nullptr) {
      c.select = series([&](int i) { choose(c, i % places_); });
      const cuda::RowLists lists = choose(c, 0);
      c.attend = series([&](int i) { attend(c, lists, i % places_); });
    }
    const std::int64_t bytes = std::min(bytes_of_call(c), readable_.bytes());
    const std::int64_t slots =
        std::max<std::int64_t>(1, readable_.bytes() / std::max<std::int64_t>(16, bytes));
    c.read = series([&](int i) {
      cuda::read_only(readable_.as<char>() + i % slots * (bytes / 16 * 16), bytes, kReadBlocks,
                      readable_.as<void>(), stream_.get());
    });
  }

  std::int64_t bytes_of_call(const Candidate& c) const {
    if (c.selector == nullptr) return kv_bytes(task_.context);
    const std::int64_t far = far_of(c);
    // Few query tokens of one sequence choose apart; what they share is read once.
    const auto chosen =
        static_cast<std::int64_t>(c.far_chosen * (together_ ? 1.0 : static_cast<double>(task_.queries)));
    return kv_bytes(task_.context - far + std::min(chosen, far)) + static_cast<std::int64_t>(c.select_bytes);
  }

  GpuAttentionRow row_of(const Candidate& c) const {
    const std::int64_t far = far_of(c);
    GpuAttentionRow row = {
        .attention = c.spec.str(),
        .median_us = c.whole->median(),
        .apart_us = task_.rotate ? c.apart->median() - wait_alone_->median() : c.whole->median(),
        .attend_us = c.whole->median(),
        .bytes = bytes_of_call(c),
        .limit_us = c.read->median(),
        .build_seconds = c.build_seconds};
    if (c.selector == nullptr) return row;
    row.selectivity = far == 0 ? 1.0 : c.far_chosen / static_cast<double>(far);
    row.select_us = c.select->median();
    row.attend_us = c.attend->median();
    return row;
  }

  static constexpr int kReadBlocks = 528;  // four on each of an H200's processors

  const GpuAttentionTask& task_;
  cuda::KvLayout layout_;
  int places_ = 2, query_tokens_ = 1;
  bool together_ = false;  ///< query tokens choose together, and dense attention is that of a prefill
  cuda::Stream stream_;
  std::vector<std::unique_ptr<cuda::KvRange>> ranges_;  // [B]
  std::vector<cuda::QueryToken> tokens_host_;           // [B, T]
  cuda::Buffer bases_, tokens_, frequencies_;           // [B], [B, T], [d/2]
  cuda::Buffer q_, q_unrotated_;                        // [places, B, T, Hq, d]
  cuda::Buffer output_, workspace_, readable_;
  cuda::Buffer wait_target_{16, "what a call waits for"};
  std::vector<Candidate> candidates_;
  std::unique_ptr<Series> wait_alone_;
  bool met_saap_ = false;
};

}  // namespace

std::vector<GpuAttentionRow> bench_attention_on_gpu(const GpuAttentionTask& task, std::span<const Spec> specs,
                                                    const std::function<void(std::string_view)>& note) {
  if (task.queries > kMostAlone && task.batch > 1)
    throw InputError(fmt::format("--queries: expected at most {} with --device cuda and --batch {}, found {}",
                                 kMostAlone, task.batch, task.queries));
  Bench bench(task);
  note("making keys and values");
  bench.fill();
  note("building indexes");
  bench.add(parse_spec("full"));
  for (const Spec& spec : specs)
    if (spec.name != "full" && !bench.add(spec))
      note(fmt::format("leaving {} out: more than {} of its query tokens do not choose on the GPU",
                       spec.str(), kMostAlone));
  note("measuring");
  return bench.measure();
}

}  // namespace lode
