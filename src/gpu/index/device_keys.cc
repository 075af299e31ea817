// SPDX-License-Identifier: Apache-2.0
// All heads of a layer go through each kernel together, or as many of them as there is memory for: bits do not
// depend on how many.
#include "gpu/index/device_keys.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <numeric>
#include <type_traits>

#include "base/cancel.h"
#include "base/out_of_memory.h"
#include "gpu/index/cluster_scorer.h"
#include "gpu/index/device_links.h"
#include "gpu/index/device_memory.h"
#include "gpu/index/device_walks.h"
#include "gpu/index/lloyd.h"
#include "gpu/index/nearest_rows.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/saap/buckets.h"
#include "kernels/rope.h"

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float);
constexpr std::int64_t kMostClusters = std::int64_t{1} << 20, kMostKeys = std::int64_t{1} << 26;
constexpr std::int64_t kMostBytes = std::int64_t{2} << 30;  // of what is clustered together
constexpr int kSampleRounds = 10;                           // ann/kmeans.h
constexpr int kRounds = 12;      // over all keys: tighter than what the host's two steps give
constexpr int kCellRounds = 20;  // ann/partition.cc

class KeysOfContext final : public DeviceKeys {
 public:
  KeysOfContext(std::function<GpuKeys()> keys, int query_heads, std::function<std::int64_t()> limit)
      : keys_(std::move(keys)), query_heads_(query_heads), limit_(std::move(limit)) {}

  bool takes(const KeysOnDevice& keys, std::int64_t clusters) const override {
    const GpuKeys there = keys_();
    const LloydTask head = {.width = there.layout.head_dim, .count = keys.count(), .clusters = clusters};
    const Rope* const rope = keys.unrotate_by;
    // The kernel divides all pairs by RoPE's scale, also those that do not turn.
    const bool unrotates = rope == nullptr || rope->attention_scaling() == 1.0f ||
                           2 * static_cast<int>(rope->turning_pairs()) == there.layout.head_dim;
    return unrotates && keys.count() >= kFewest && keys.count() < kMostKeys && clusters <= kMostClusters &&
           there.layout.head_dim <= kWidestEverywhere && keys.end <= there.tokens &&
           bytes_for(head) <= room();
  }

  std::vector<std::vector<float>> centroids(const KeysOnDevice& keys,
                                            std::span<const std::vector<Position>> samples,
                                            std::int64_t clusters,
                                            std::span<const std::uint64_t> seeds) override {
    return with_what_there_is([&] { return centroids_of(keys, samples, clusters, seeds); });
  }

  std::vector<std::int32_t> labels(const KeysOnDevice& keys,
                                   std::span<const std::vector<float>> centroids) override {
    return with_what_there_is([&] { return labels_of(keys, centroids); });
  }

  std::vector<KeyClusters> clusters(const KeysOnDevice& keys, const ClusterTask& task) override {
    return with_what_there_is([&] { return clusters_of(keys, task); });
  }

  std::vector<double> sharpness(const KeysOnDevice& keys, std::span<const float> queries, int group,
                                float scale) override {
    return with_what_there_is([&] { return sharpness_of(keys, queries, group, scale); });
  }

  void attend(int layer, std::int64_t tokens, std::span<const float> queries, float scale,
              std::span<float> outputs, std::span<float> lse) override {
    with_what_there_is([&] {
      attend_tokens(layer, tokens, queries, scale, kMostSparseTokens,
                    [&](std::int64_t, const cuda::Queries& some, std::int64_t keys) {
                      cuda::attend_full_decode(some, keys, workspace_.as<void>(), stream_.get());
                    });
      take_states(outputs, lse);
    });
  }

  bool hold_clusters(int layer, const ScoredClusters& clusters, std::int64_t most_tokens) override {
    const GpuKeys there = keys_();
    const std::int64_t group = query_heads_ / there.layout.kv_heads;
    const auto keys = std::ssize(clusters.heads[0].rows);
    if (keys < kFewest || keys > there.tokens || there.layout.head_dim > kWidestEverywhere ||
        std::ssize(clusters.heads) != there.layout.kv_heads ||
        ClusterScorer::bytes_of(clusters) + ClusterScorer::scratch_bytes(clusters, there.layout.head_dim,
                                                                         most_tokens,
                                                                         static_cast<int>(group)) >
            limit_())
      return false;
    scorer_.hold(layer, clusters, there.layout.head_dim, stream_.get());
    return true;
  }
  void forget_clusters() override { scorer_.release(); }

  void count_scores(const ScoringQueries& queries, const ScoreBins& bins) override {
    check_cancel();
    scorer_.count(queries, query_heads_, bins, stream_);
  }

  void attend_chosen(const ScoringQueries& queries, const ChosenAttention& chosen) override {
    const std::int64_t tokens = std::ssize(chosen.lse) / query_heads_;
    with_what_there_is([&] {
      scorer_.choose(queries, query_heads_, chosen.threshold, stream_.get());
      attend_tokens(queries.layer, tokens, queries.q, queries.scale, ClusterScorer::kMostListed,
                    [&](std::int64_t token, const cuda::Queries& some, std::int64_t keys) {
                      cuda::RowLists lists = scorer_.list(token, some.count, stream_.get());
                      lists.sink = chosen.sink;
                      lists.window = chosen.window;
                      cuda::attend_rows_decode(some, lists, keys, workspace_.as<void>(), stream_.get());
                    });
      take_states(chosen.outputs, chosen.lse);
      scorer_.kept(chosen.kept, stream_);
    });
  }

  bool takes_nearest(std::int64_t queries, std::int64_t keys, std::int64_t width,
                     std::int64_t k) const override {
    const std::lock_guard lock(graphs_turn_);
    const cuda::OnDevice here(device_);
    return queries > 0 && NearestRows::takes(keys, width, k) &&
           NearestRows::bytes_for(queries, keys, width, k) <= room();
  }

  std::vector<std::int32_t> nearest_keys(Matrix<const float> queries, Matrix<const float> keys,
                                         std::int64_t k) override {
    const std::lock_guard lock(graphs_turn_);
    const cuda::OnDevice here(device_);
    return with_what_there_is([&] { return nearest_.find(queries, keys, static_cast<int>(k), stream_); });
  }

  std::unique_ptr<GraphLinker> linker(Matrix<const float> keys, std::span<const Node> nearest,
                                      std::int64_t each, int degree) override {
    const std::int64_t queries = std::ssize(nearest) / each;
    return where_there_is_room<GraphLinker>(
        device_linker_bytes(keys.rows, keys.cols, queries, each, degree),
        [&](auto held) { return device_linker(keys, nearest, each, degree, std::move(held)); });
  }

  std::unique_ptr<QueryWalks> walks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like) override {
    return where_there_is_room<QueryWalks>(device_walks_bytes(of, keys, like), [&](auto held) {
      return device_walks(of, keys, like, std::move(held));
    });
  }

  void release() override {
    one_by_one_ = false;
    scorer_.release();
    give_back();
  }

  std::int64_t bytes() const override { return own_bytes() + helpers_; }

 private:
  /// Of a head: its keys as they are and as they are compared, what clusters take, and three results of them.
  static std::int64_t bytes_for(const LloydTask& head) {
    return Lloyd::bytes_for(head) + (2 * head.count + 3 * head.clusters) * head.width * kFloat;
  }
  /// Calls body(buffer) for all that hold memory beside lloyd_'s.
  static void for_buffers(auto& self, const auto& body) {
    for (auto* const buffer :
         {&self.rows_, &self.places_, &self.positions_, &self.found_, &self.means_, &self.middle_,
          &self.metric_, &self.frequencies_, &self.base_, &self.workspace_, &self.halves_, &self.factors_})
      body(*buffer);
  }
  std::int64_t own_bytes() const {
    std::int64_t held = lloyd_.bytes() + scorer_.bytes() + nearest_.bytes();
    for_buffers(*this, [&](const cuda::Buffer& buffer) { held += buffer.bytes(); });
    return held;
  }
  /// What it may take, with what it holds already.
  std::int64_t room() const { return limit_() + own_bytes(); }
  /// Others may take memory between a look at what is free and the use of it: then all that is held is given back, and
  /// heads go one by one. What does not suffice even so is said.
  template <class Work>
  std::invoke_result_t<Work> with_what_there_is(const Work& work) {
    try {
      return work();
    } catch (const OutOfDeviceMemory&) {
      give_back();
    }
    one_by_one_ = true;
    return work();
  }
  /// All that is made anew for each call; held clusters stay.
  void give_back() {
    lloyd_.release();
    nearest_.release();
    for_buffers(*this, [](cuda::Buffer& buffer) { buffer = cuda::Buffer(); });
  }
  /// What make(held) gives, which holds so many bytes for as long as it keeps `held`; null where there are none to hold,
  /// or no room.
  template <class Helper, class Make>
  std::unique_ptr<Helper> where_there_is_room(std::int64_t bytes, const Make& make) {
    const std::lock_guard lock(graphs_turn_);
    const cuda::OnDevice here(device_);
    if (bytes == 0 || bytes > limit_()) return nullptr;
    helpers_ += bytes;
    const std::shared_ptr<void> held(
        &helpers_, [bytes](void* sum) { *static_cast<std::atomic<std::int64_t>*>(sum) -= bytes; });
    try {
      return make(held);
    } catch (const OutOfDeviceMemory&) {
      return nullptr;  // others have taken it
    }
  }
  /// Calls body(first, how many) for heads that go together.
  template <class Body>
  void for_groups(const KeysOnDevice& keys, const LloydTask& head, const Body& body) const {
    const std::int64_t fit = one_by_one_ ? 1 : std::min(kMostBytes, room()) / bytes_for(head);
    const auto most = static_cast<std::size_t>(std::max<std::int64_t>(1, fit));
    for (std::size_t first = 0; first < keys.heads.size(); first += most)
      body(first, std::min(most, keys.heads.size() - first));
  }

  std::vector<std::vector<float>> centroids_of(const KeysOnDevice& keys,
                                               std::span<const std::vector<Position>> samples,
                                               std::int64_t clusters, std::span<const std::uint64_t> seeds) {
    const GpuKeys there = keys_();
    const std::int64_t d = there.layout.head_dim, count = std::ssize(samples[0]);
    std::vector<std::vector<float>> out;
    const LloydTask head = {.width = static_cast<int>(d), .count = count, .clusters = clusters};
    for_groups(keys, head, [&](std::size_t first, std::size_t some) {
      reserve(rows_, static_cast<std::int64_t>(some) * count * d * kFloat);
      reserve(positions_, count * kFloat);
      for (std::size_t h = 0; h < some; ++h) {
        upload<Position>(positions_.as<void>(), samples[first + h], stream_);
        gather(there, keys, first + h, positions_.as<std::int32_t>(), count,
               rows_.as<float>() + static_cast<std::int64_t>(h) * count * d);
      }
      LloydTask task = head;
      task.heads = static_cast<int>(some);
      task.rounds = kSampleRounds;
      task.seeds = seeds.subspan(first, some);
      lloyd_.run(rows_.as<float>(), task, stream_.get());
      const std::vector<float> all =
          downloaded(lloyd_.centroids(), static_cast<std::int64_t>(some) * clusters * d, stream_);
      for (auto at = all.begin(); at != all.end(); at += clusters * d)
        out.emplace_back(at, at + clusters * d);
    });
    return out;
  }

  std::vector<std::int32_t> labels_of(const KeysOnDevice& keys,
                                      std::span<const std::vector<float>> centroids) {
    const GpuKeys there = keys_();
    const std::int64_t d = there.layout.head_dim, n = keys.count(), clusters = std::ssize(centroids[0]) / d;
    reserve(rows_, n * d * kFloat);
    reserve(places_, clusters * d * kFloat);
    reserve(found_, n * kFloat);
    std::vector<std::int32_t> out;
    for (std::size_t h = 0; h < keys.heads.size(); ++h) {
      check_cancel();
      gather(there, keys, h, nullptr, n, rows_.as<float>());
      upload<float>(places_.as<void>(), centroids[h], stream_);
      cuda::assign(rows_.as<float>(), n, places_.as<float>(), clusters, static_cast<int>(d),
                   found_.as<std::int32_t>(), nullptr, stream_.get());
      const std::vector<std::int32_t> own = downloaded(found_.as<std::int32_t>(), n, stream_);
      out.insert(out.end(), own.begin(), own.end());
    }
    return out;
  }

  std::vector<KeyClusters> clusters_of(const KeysOnDevice& keys, const ClusterTask& task) {
    const GpuKeys there = keys_();
    const std::int64_t d = there.layout.head_dim, n = keys.count();
    std::vector<KeyClusters> out(keys.heads.size());
    const LloydTask head = {.width = static_cast<int>(d),
                            .count = n,
                            .clusters = task.clusters,
                            .by_distance = !task.metrics.empty(),
                            .rounds = kRounds};
    for_groups(keys, head, [&](std::size_t first, std::size_t some) {
      gather_all(there, keys, first, some);
      place(n, d, some, task.metrics.empty() ? task.metrics : task.metrics.subspan(first, some));
      LloydTask group = head;
      group.heads = static_cast<int>(some);
      group.seeds = task.seeds.subspan(first, some);
      lloyd_.run(places_.as<float>(), group, stream_.get());
      describe(group, std::span(out).subspan(first, some));
    });
    return out;
  }

  std::vector<double> sharpness_of(const KeysOnDevice& keys, std::span<const float> queries, int group,
                                   float scale) {
    const GpuKeys there = keys_();
    const std::int64_t d = there.layout.head_dim, heads = std::ssize(keys.heads), one = group * d,
                       tokens = std::ssize(queries) / (heads * one), own = tokens * group;
    std::vector<float> by_head(queries.size());  // [heads, tokens, group, d]
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h)
        std::copy_n(queries.begin() + (t * heads + h) * one, one, by_head.begin() + (h * tokens + t) * one);
    std::vector<double> out(static_cast<std::size_t>(tokens * heads * group));
    const LloydTask head = {.width = static_cast<int>(d), .count = keys.count(), .clusters = own};
    for_groups(keys, head, [&](std::size_t first, std::size_t some) {
      gather_all(there, keys, first, some);
      const std::vector<float> found =
          sharpness_of_group(std::span(by_head).subspan(first * static_cast<std::size_t>(own * d),
                                                        some * static_cast<std::size_t>(own * d)),
                             static_cast<int>(some), keys.count(), static_cast<int>(d), scale);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const std::int64_t h = static_cast<std::int64_t>(first) + static_cast<std::int64_t>(i) / own,
                           t = static_cast<std::int64_t>(i) % own / group,
                           g = static_cast<std::int64_t>(i) % group;
        out[static_cast<std::size_t>((t * heads + h) * group + g)] = found[i];
      }
    });
    return out;
  }

  /// Queries of tokens behind all keys, `at_once` of them at a time: body(first, queries, keys) enqueues what puts their
  /// states where take_states finds them.
  template <class Body>
  void attend_tokens(int layer, std::int64_t tokens, std::span<const float> queries, float scale,
                     std::int64_t at_once, const Body& body) {
    const GpuKeys there = keys_();
    const std::int64_t d = there.layout.head_dim, all = tokens * query_heads_;
    const std::vector<cuda::QueryToken> places(
        static_cast<std::size_t>(tokens),
        {.sequence = 0, .position = static_cast<std::int32_t>(there.tokens - 1)});
    reserve(rows_, all * d * kFloat);
    reserve(places_, all * d * kFloat);
    reserve(found_, all * kFloat);
    reserve(positions_, tokens * std::int64_t{sizeof(cuda::QueryToken)});
    reserve(base_, sizeof there.base);
    if (workspace_.bytes() == 0) {
      reserve(workspace_, cuda::decode_workspace_bytes(kMostSparseTokens, query_heads_, there.layout.kv_heads,
                                                       static_cast<int>(d)));
      cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
    }
    upload(rows_.as<void>(), queries, stream_);
    upload(positions_.as<void>(), std::span(places), stream_);
    cuda::copy(base_.as<void>(), &there.base, sizeof there.base, stream_.get());
    for (std::int64_t t = 0; t < tokens; t += at_once) {
      check_cancel();
      body(t,
           cuda::Queries{.tokens = positions_.as<cuda::QueryToken>() + t,
                         .bases = base_.as<const char*>(),
                         .layer_offset = layer * there.layout.layer_stride,
                         .layout = there.layout,
                         .count = static_cast<int>(std::min(at_once, tokens - t)),
                         .query_heads = query_heads_,
                         .scale = scale,
                         .q = rows_.as<float>() + t * query_heads_ * d,
                         .o = places_.as<float>() + t * query_heads_ * d,
                         .lse = found_.as<float>() + t * query_heads_},
           there.tokens);
    }
  }
  void take_states(std::span<float> outputs, std::span<float> lse) {
    cuda::copy(outputs.data(), places_.as<void>(), std::ssize(outputs) * kFloat, stream_.get());
    cuda::copy(lse.data(), found_.as<void>(), std::ssize(lse) * kFloat, stream_.get());
    stream_.synchronize();
  }

  /// Keys of one head as float32 rows: those at `positions`, or all of them.
  void gather(const GpuKeys& there, const KeysOnDevice& keys, std::size_t head, const std::int32_t* positions,
              std::int64_t count, float* to) {
    const Rope* const rope = keys.unrotate_by;
    if (rope != nullptr) {
      const std::span<const float> frequencies = rope->frequencies();
      reserve(frequencies_, std::ssize(frequencies) * kFloat);
      upload(frequencies_.as<void>(), frequencies, stream_);
    }
    cuda::gather_keys({.layer = there.base + keys.layer * there.layout.layer_stride,
                       .layout = there.layout,
                       .kv_head = keys.heads[head],
                       .begin = keys.begin,
                       .count = count,
                       .positions = positions,
                       .frequencies = rope != nullptr ? frequencies_.as<float>() : nullptr,
                       .rope_scale = rope != nullptr ? rope->attention_scaling() : 1.0f},
                      to, stream_.get());
  }
  void gather_all(const GpuKeys& there, const KeysOnDevice& keys, std::size_t first, std::size_t some) {
    const std::int64_t of_head = keys.count() * there.layout.head_dim;
    reserve(rows_, static_cast<std::int64_t>(some) * of_head * kFloat);
    for (std::size_t h = 0; h < some; ++h)
      gather(there, keys, first + h, nullptr, keys.count(),
             rows_.as<float>() + static_cast<std::int64_t>(h) * of_head);
  }

  /// Keys as they are compared: directions, or (k - mean k) L; there the keys lose their mean, which is kept.
  void place(std::int64_t n, std::int64_t d, std::size_t some, std::span<const std::vector<float>> metrics) {
    const auto heads = static_cast<std::int64_t>(some);
    reserve(places_, heads * n * d * kFloat);
    if (metrics.empty()) {
      cuda::directions(rows_.as<float>(), heads * n, static_cast<int>(d), places_.as<float>(), stream_.get());
      return;
    }
    reserve(middle_, heads * d * kFloat);
    reserve(metric_, d * d * kFloat);
    reserve(positions_, heads * (d * std::int64_t{sizeof(std::int64_t)} + 2 * kFloat));  // sums of all keys
    auto* const sums = positions_.as<std::int64_t>();
    auto* const counts = reinterpret_cast<std::int32_t*>(sums + heads * d);
    const cuda::LabelSums all = {.heads = static_cast<int>(heads),
                                 .width = static_cast<int>(d),
                                 .labels = 1,
                                 .count = n,
                                 .sums = sums,
                                 .counts = counts,
                                 .largest = reinterpret_cast<float*>(counts + heads)};
    cuda::sum_by_label(rows_.as<float>(), nullptr, all, stream_.get());
    cuda::means_by_label(all, nullptr, middle_.as<float>(), stream_.get());
    cuda::subtract(rows_.as<float>(), static_cast<int>(heads), n, static_cast<int>(d), middle_.as<float>(),
                   stream_.get());
    for (std::int64_t h = 0; h < heads; ++h) {
      upload<float>(metric_.as<void>(), metrics[static_cast<std::size_t>(h)], stream_);
      cuda::multiply_f32({.a = rows_.as<float>() + h * n * d,
                          .b = metric_.as<float>(),
                          .c = places_.as<float>() + h * n * d,
                          .m = n,
                          .n = d,
                          .k = d},
                         stream_.get());
    }
  }

  /// Labels of the last centroids, what keys are in their clusters, and groups of clusters.
  void describe(const LloydTask& task, std::span<KeyClusters> out) {
    const std::int64_t numbers = task.heads * task.clusters * task.width;
    reserve(means_, numbers * kFloat);
    reserve(found_, numbers * kFloat);
    auto *const means = means_.as<float>(), *const more = found_.as<float>();
    const auto take = [&](auto KeyClusters::*member, const auto* from, std::int64_t of_head) {
      for (std::size_t h = 0; h < out.size(); ++h)
        out[h].*member = downloaded(from + static_cast<std::int64_t>(h) * of_head, of_head, stream_);
    };
    const std::int64_t of_head = task.clusters * task.width;
    lloyd_.label(stream_.get());
    take(&KeyClusters::labels, lloyd_.labels(), task.count);
    lloyd_.means(rows_.as<float>(), nullptr, means, stream_.get());
    take(&KeyClusters::keys, lloyd_.counts(), task.clusters);
    lloyd_.variances(rows_.as<float>(), means, more, stream_.get());
    take(&KeyClusters::spreads, more, of_head);
    if (task.by_distance) lloyd_.means(rows_.as<float>(), middle_.as<float>(), means, stream_.get());
    take(&KeyClusters::means, means, of_head);
    lloyd_.means(places_.as<float>(), nullptr, more, stream_.get());
    take(&KeyClusters::places, more, of_head);
    LloydTask groups = task;
    groups.count = task.clusters;
    groups.clusters = static_cast<std::int64_t>(std::sqrt(static_cast<double>(task.clusters)));
    groups.rounds = kCellRounds;
    lloyd_.run(more, groups, stream_.get());
    lloyd_.label(stream_.get());
    take(&KeyClusters::cells, lloyd_.labels(), groups.count);
  }

  std::vector<float> sharpness_of_group(std::span<const float> queries, int heads, std::int64_t keys, int d,
                                        float scale) {
    const std::int64_t count = std::ssize(queries) / (std::int64_t{heads} * d),
                       width = cuda::half_width(d) * 2;
    const auto in_halves = [&](cuda::Buffer& halves, cuda::Buffer& factors, std::int64_t rows) {
      reserve(halves, heads * rows * width);
      reserve(factors, heads * rows * kFloat);
      return cuda::HalfRows{.heads = heads,
                            .width = d,
                            .count = rows,
                            .halves = halves.as<void>(),
                            .factors = factors.as<float>()};
    };
    const cuda::HalfRows of_keys = in_halves(halves_, factors_, keys),
                         of_queries = in_halves(places_, found_, count);
    cuda::halve(rows_.as<float>(), of_keys, stream_.get());
    reserve(rows_, heads * count * d * kFloat);
    upload(rows_.as<void>(), queries, stream_);
    cuda::halve(rows_.as<float>(), of_queries, stream_.get());
    reserve(means_, (cuda::sharpness_floats(heads, count) + heads * count) * kFloat);
    float* const sharpness = means_.as<float>() + cuda::sharpness_floats(heads, count);
    cuda::softmax_sharpness(of_queries, of_keys, scale, means_.as<float>(), sharpness, stream_.get());
    return downloaded(sharpness, heads * count, stream_);
  }

  std::function<GpuKeys()> keys_;
  int query_heads_;
  std::function<std::int64_t()> limit_;
  cuda::Stream stream_;
  Lloyd lloyd_;
  ClusterScorer scorer_;
  NearestRows nearest_;
  std::atomic<std::int64_t> helpers_ = 0;  ///< bytes that linkers and walks hold
  mutable std::mutex graphs_turn_;         ///< of threads that build graphs, which start on device 0
  int device_ = cuda::current_device();
  bool one_by_one_ = false;               ///< until memory is given back
  cuda::Buffer rows_, places_;            // [heads, n, d] keys, and as they are compared
  cuda::Buffer positions_, found_;        // of a sample; labels, results
  cuda::Buffer means_, middle_, metric_;  // [heads, C, d], [heads, d], [d, d]
  cuda::Buffer halves_, factors_;         // of keys that queries are multiplied with
  cuda::Buffer frequencies_, base_, workspace_;
};

}  // namespace

std::unique_ptr<DeviceKeys> make_device_keys(std::function<GpuKeys()> keys, int query_heads,
                                             std::function<std::int64_t()> limit) {
  return std::make_unique<KeysOfContext>(std::move(keys), query_heads, std::move(limit));
}

}  // namespace lode
