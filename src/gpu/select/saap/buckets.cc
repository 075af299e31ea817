// SPDX-License-Identifier: Apache-2.0
// The label of a key depends on the key alone, so labels are made for whole stretches of keys as soon as they
// are written, long before they leave the window, and never inside of a step. Lists are made anew whenever
// the far keys have grown by kMostUnlisted; those in between are found by their labels. Where lists end, and
// with it the order in which rows are attended, is a function of the query's position, not of the steps
// before it.
#include "gpu/select/saap/buckets.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/baselines/kmeans.h"
#include "select/shared/synthetic_artefact.h"

namespace lode {

namespace {

constexpr std::int64_t kMostUnlisted = 2048;     // far keys that a step looks up by their labels, less one
constexpr std::int64_t kMostInputs = 256;        // of networks that the kernel is for
constexpr std::int64_t kSamplePerCentroid = 32;  // as on the CPU (select/shared/centroids.h)
constexpr int kIterations = 10;

std::vector<float> floats(const std::vector<std::byte>& from, DType type) {
  std::vector<float> to(from.size() / static_cast<std::size_t>(bytes_of(type)));
  kernels().widen(from.data(), type, std::ssize(to), to.data());
  return to;
}

/// Whether vectors go to the scores beside the hidden layer as well.
bool is_residual(const BucketNet& net) {
  return net.hidden > 0 && !net.linear_weight.empty();
}

bool same_shape(const BucketNet& a, const BucketNet& b) {
  return a.buckets == b.buckets && a.hidden == b.hidden && is_residual(a) == is_residual(b);
}

cuda::NetStretches stretches_of(const BucketChoice& choice) {
  cuda::NetStretches stretches = {.networks = static_cast<int>(choice.from.size())};
  std::copy(choice.from.begin(), choice.from.end(), stretches.from);
  return stretches;
}

}  // namespace

GpuBuckets::GpuBuckets(const Spec& spec, const GpuGeometry& geometry, std::vector<bool> layers, Source source,
                       Listener listener, Known known)
    : spec_(spec),
      geometry_(geometry),
      layers_(std::move(layers)),
      source_(std::move(source)),
      listener_(std::move(listener)),
      known_(std::move(known)),
      labeller_(geometry.head_dim),
      states_(static_cast<std::size_t>(geometry.sequences)) {
  const std::int64_t lists = std::int64_t{geometry.most_queries} * geometry.kv_heads;
  rows_ = cuda::Buffer(lists * geometry.max_tokens * 4, "the rows of chosen buckets");
  counts_ = cuda::Buffer(geometry.layers * lists * 4, "the counts of chosen buckets");
  cuda::fill(counts_.as<void>(), 0, counts_.bytes(), geometry.stream);
  listed_ = cuda::Buffer(geometry.sequences * std::int64_t{4}, "the states of bucket indexes");
}

bool GpuBuckets::supports(const BucketChoice& choice, int group) {
  if (!cuda::can_choose_buckets() || choice.keys.empty()) return false;
  if (choice.from.size() > cuda::NetStretches::kMost) return false;
  for (const BucketNet& keys : choice.keys) {
    if (!keys.is_centroids()) return false;
  }
  for (const BucketNet& queries : choice.queries) {
    if (!same_shape(queries, choice.queries[0])) return false;
  }
  const BucketNet& first = choice.queries[0];
  constexpr int kMostHeads = 16;  // of a group, in the kernel
  if (choice.softmax && group > kMostHeads) return false;
  if (choice.per_key != 0.0f && choice.per_key != 0.5f && choice.per_key != 1.0f) return false;
  if (first.buckets > kMostBucketsOfGpu || first.inputs > kMostInputs || first.inputs % 4 != 0) return false;
  const cuda::BucketChoiceTask task = {.net = {.inputs = static_cast<int>(first.inputs),
                                               .hidden = static_cast<int>(first.hidden),
                                               .buckets = static_cast<int>(first.buckets),
                                               .planes = 2,
                                               .residual = is_residual(first)},
                                       .softmax = choice.softmax,
                                       .probes = static_cast<int>(choice.probes)};
  return cuda::fits_bucket_choice(task, group);
}

void GpuBuckets::allocate(const BucketChoice& choice) {
  const BucketNet& first = choice.queries.front();
  const std::int64_t c = first.buckets, heads = geometry_.layers * lists_of_layer();
  net_ = {.inputs = geometry_.head_dim,
          .hidden = static_cast<int>(first.hidden),
          .buckets = static_cast<int>(c),
          .planes = geometry_.key_row_bytes == 4 * geometry_.head_dim ? 2 : 1,
          .residual = is_residual(first)};
  stretches_ = stretches_of(choice);
  probes_ = std::min(choice.probes, c);
  roped_ = choice.roped;
  softmax_ = choice.softmax;
  rank_ = choice.per_key == 0.0f   ? cuda::BucketRank::mass
          : choice.per_key == 1.0f ? cuda::BucketRank::per_key
                                   : cuda::BucketRank::per_root_of_keys;
  const char* const what = "an index of buckets";
  const auto fresh = [&](cuda::Buffer& buffer, std::int64_t bytes) {
    buffer = {};
    buffer = cuda::Buffer(bytes, what);
  };
  fresh(nets_, geometry_.layers * nets_of_layer() * net_.bytes());
  fresh(centroids_, std::int64_t{geometry_.layers} * geometry_.kv_heads * c * geometry_.head_dim * 4);
  fresh(labels_, heads * geometry_.max_tokens * 2);
  fresh(listed_rows_, heads * geometry_.max_tokens * 4);
  fresh(offsets_, heads * (c + 1) * 4);
  const std::int64_t lists = std::int64_t{geometry_.most_queries} * geometry_.kv_heads;
  fresh(runs_, lists * cuda::runs_of_choice(static_cast<int>(probes_), net_.buckets) *
                   std::int64_t{sizeof(cuda::RowRun)});
  fresh(more_, lists * cuda::kShares * kMostUnlisted * 4);
  fresh(workspace_, cuda::list_workspace_bytes(geometry_.kv_heads, net_.buckets, geometry_.max_tokens));
}

void GpuBuckets::take_network(int layer, const BucketChoice& choice, cuda::StreamHandle stream) {
  for (const BucketNet& queries : choice.queries) {
    if (queries.buckets != net_.buckets || queries.hidden != net_.hidden ||
        is_residual(queries) != net_.residual) {
      throw InputError(fmt::format(
          "attention spec '{}': expected as many buckets and hidden units in all layers on a GPU, "
          "found {} and {} beside {} and {}; the CPU takes any",
          spec_.str(), net_.buckets, net_.hidden, queries.buckets, queries.hidden));
    }
  }
  // Thousands of clusters a head take seconds where one thread packs them all.
  std::vector<std::vector<std::byte>> packed(static_cast<std::size_t>(nets_of_layer()));
  const auto pack = [&](std::int64_t item, int) {
    const BucketNet& queries = choice.queries[static_cast<std::size_t>(item)];
    packed[static_cast<std::size_t>(item)] = cuda::pack_net(
        net_, floats(queries.hidden_weight, queries.type), queries.hidden_bias,
        floats(net_.hidden > 0 ? queries.output_weight : queries.linear_weight, queries.type),
        net_.residual ? floats(queries.linear_weight, queries.type) : std::vector<float>{}, queries.bias);
  };
  if (geometry_.pool != nullptr)
    geometry_.pool->for_each(nets_of_layer(), pack);
  else
    for (std::int64_t item = 0; item < nets_of_layer(); ++item) pack(item, 0);
  // Pageable memory: the calls return once the bytes have left.
  for (std::int64_t item = 0; item < nets_of_layer(); ++item)
    cuda::copy(nets_.as<std::byte>() + (layer * nets_of_layer() + item) * net_.bytes(),
               packed[static_cast<std::size_t>(item)].data(), net_.bytes(), stream);
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    const std::vector<float> centroids = choice.keys[static_cast<std::size_t>(head)].centroids();
    const std::int64_t place = std::int64_t{layer} * geometry_.kv_heads + head;
    cuda::copy(centroids_.as<float>() + place * net_.buckets * geometry_.head_dim, centroids.data(),
               std::ssize(centroids) * 4, stream);
  }
}

/// All layers' networks, or one bucket for all keys while there are none.
void GpuBuckets::take_networks(const GpuKeys& keys, cuda::StreamHandle stream) {
  bool allocated = false, ready = true;
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    if (!layers_[static_cast<std::size_t>(layer)]) continue;
    std::optional<BucketChoice> choice = source_(layer, keys, stream);
    ready = ready && choice.has_value();
    if (!choice) {
      const std::vector<float> zero(static_cast<std::size_t>(geometry_.head_dim), 0.0f);
      const BucketNet single(
          geometry_.head_dim, 1,
          {.hidden_weight = {}, .hidden_bias = {}, .output_weight = {}, .linear_weight = zero, .bias = {}},
          DType::f32);
      choice = {.keys = std::vector<BucketNet>(static_cast<std::size_t>(geometry_.kv_heads), single),
                .queries = {},
                .probes = 1,
                .softmax = false};
      choice->queries = choice->keys;
    }
    if (!supports(*choice, geometry_.query_heads / geometry_.kv_heads)) {
      throw InputError(
          fmt::format("attention spec '{}': expected at most {} buckets on a GPU, found "
                      "{}; index it again, or ask on the CPU, which takes any",
                      spec_.str(), kMostBucketsOfGpu, choice->queries.front().buckets));
    }
    if (!allocated) allocate(*choice);
    allocated = true;
    LODE_ASSERT(stretches_.networks == static_cast<int>(choice->from.size()));  // of one file
    take_network(layer, *choice, stream);
  }
  for (State& state : states_) state = {};
  known_end_ = std::numeric_limits<std::int64_t>::max();
  ready_ = ready;  // only now: a failure above must not leave half of it in use
}

bool GpuBuckets::prepare(const GpuKeys& keys, cuda::StreamHandle stream) {
  if (!ready_) {
    changed_ = true;
    take_networks(keys, stream);
  }
  State& state = states_[static_cast<std::size_t>(keys.sequence)];
  const std::int64_t sink = spec_.dense.sink;
  const std::int64_t needed =
      std::min(keys.tokens, keys.tokens + geometry_.most_queries - spec_.dense.window);
  const std::int64_t listed = end_of_lists(keys.tokens);
  if (!state.stale && state.labelled >= needed && state.listed == listed)
    return std::exchange(changed_, false);
  state.labelled = std::max(state.labelled, sink);
  const std::int64_t end = std::max(state.labelled, keys.tokens);
  const bool relist = state.stale || state.listed != listed;
  state.listed = listed;
  state.stale = true;  // until every layer has its lists
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    if (!layers_[static_cast<std::size_t>(layer)]) continue;
    check_cancel();
    label(keys, layer, state.labelled, end, stream);
    if (changed_ && listener_) {
      list(keys, layer, end, stream);  // of all keys, for their sizes
      report_sizes(layer, layer * lists_of_layer() + std::int64_t{keys.sequence} * geometry_.kv_heads,
                   stream);
    }
    if (relist) list(keys, layer, listed, stream);
  }
  const auto there = static_cast<std::int32_t>(listed);
  cuda::copy(listed_.as<std::int32_t>() + keys.sequence, &there, 4, stream);
  state.labelled = end;
  state.stale = false;
  return std::exchange(changed_, false);
}

std::int64_t GpuBuckets::end_of_lists(std::int64_t position) const {
  const std::int64_t far_end = std::max<std::int64_t>(0, position + 1 - spec_.dense.window);
  return std::max(spec_.dense.sink, far_end / kMostUnlisted * kMostUnlisted);
}

/// A step ends where lists grow.
std::int64_t GpuBuckets::most_tokens(std::int64_t position, Phase) const {
  const std::int64_t far_end = position + 1 - spec_.dense.window;
  return std::min<std::int64_t>(geometry_.most_queries,
                                kMostUnlisted - (far_end % kMostUnlisted + kMostUnlisted) % kMostUnlisted);
}

void GpuBuckets::list(const GpuKeys& keys, int layer, std::int64_t end, cuda::StreamHandle stream) {
  const std::int64_t place = layer * lists_of_layer() + std::int64_t{keys.sequence} * geometry_.kv_heads;
  cuda::list_buckets({.labels = labels_.as<std::uint16_t>() + place * geometry_.max_tokens,
                      .kv_heads = geometry_.kv_heads,
                      .buckets = net_.buckets,
                      .max_tokens = geometry_.max_tokens,
                      .begin = spec_.dense.sink,
                      .end = end,
                      .offsets = offsets_.as<std::int32_t>() + place * (net_.buckets + 1),
                      .rows = listed_rows_.as<std::int32_t>() + place * geometry_.max_tokens,
                      .workspace = workspace_.as<void>()},
                     stream);
}

/// Labels that the host knows, of keys from `begin` on; returns where they end. Those of a large file take seconds to make.
std::int64_t GpuBuckets::take_labels(const GpuKeys& keys, int layer, std::int64_t begin, std::int64_t end,
                                     cuda::StreamHandle stream) {
  const BucketIndex* const index = known_ != nullptr && keys.sequence == 0 ? known_(layer) : nullptr;
  if (index == nullptr || index->heads() != geometry_.kv_heads || index->buckets() != net_.buckets ||
      index->begin() > begin)
    return begin;
  const std::int64_t known = std::min({std::int64_t{index->end()}, known_end_, end});
  for (int head = 0; head < geometry_.kv_heads && begin < known; ++head) {
    const std::vector<std::uint16_t> labels =
        index->labels(head, static_cast<Position>(begin), static_cast<Position>(known));
    const std::int64_t place = layer * lists_of_layer() + head;
    // Pageable memory: the call returns once the bytes have left.
    cuda::copy(labels_.as<std::uint16_t>() + place * geometry_.max_tokens + begin, labels.data(),
               std::ssize(labels) * 2, stream);
  }
  return std::max(begin, known);
}

void GpuBuckets::label(const GpuKeys& keys, int layer, std::int64_t begin, std::int64_t end,
                       cuda::StreamHandle stream) {
  begin = take_labels(keys, layer, begin, end, stream);
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    const std::int64_t net = std::int64_t{layer} * geometry_.kv_heads + head;
    const std::int64_t place =
        layer * lists_of_layer() + std::int64_t{keys.sequence} * geometry_.kv_heads + head;
    labeller_.make(keys,
                   {.layer = layer,
                    .kv_head = head,
                    .roped = roped_,
                    .centroids = centroids_.as<float>() + net * net_.buckets * geometry_.head_dim,
                    .buckets = net_.buckets},
                   begin, end, labels_.as<std::uint16_t>() + place * geometry_.max_tokens, stream);
  }
}

void GpuBuckets::report_sizes(int layer, std::int64_t place, cuda::StreamHandle stream) const {
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(geometry_.kv_heads * (net_.buckets + 1)));
  // Pageable memory: the call returns once the bytes are here.
  cuda::copy(offsets.data(), offsets_.as<std::int32_t>() + place * (net_.buckets + 1),
             std::ssize(offsets) * 4, stream);
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (i % static_cast<std::size_t>(net_.buckets + 1) > 0) sizes.push_back(offsets[i] - offsets[i - 1]);
  }
  listener_(layer, sizes);
}

void GpuBuckets::roll_back(int sequence, std::int64_t tokens) {
  if (tokens == 0) {  // what the host built, and what is told of sizes, was of that text
    ready_ = ready_ && known_ == nullptr;
    changed_ = true;
  }
  if (sequence == 0) known_end_ = std::min(known_end_, tokens);
  State& state = states_[static_cast<std::size_t>(sequence)];
  if (tokens >= state.labelled) return;
  state.labelled = tokens;
  state.stale = true;
}

cuda::BucketTables GpuBuckets::tables(int layer) const {
  const std::int64_t place = layer * lists_of_layer();
  return {.labels = labels_.as<std::uint16_t>() + place * geometry_.max_tokens,
          .offsets = offsets_.as<std::int32_t>() + place * (net_.buckets + 1),
          .rows = listed_rows_.as<std::int32_t>() + place * geometry_.max_tokens,
          .listed = listed_.as<std::int32_t>(),
          .max_tokens = geometry_.max_tokens};
}

cuda::RowRuns GpuBuckets::choose(int layer, const cuda::Queries& queries, const float* q_unrotated,
                                 cuda::StreamHandle stream) {
  const cuda::BucketChoiceTask task = {.net = net_,
                                       .nets = nets_.as<std::byte>() + layer * nets_of_layer() * net_.bytes(),
                                       .stretches = stretches_,
                                       .softmax = softmax_,
                                       .rank = rank_,
                                       .q = roped_ ? queries.q : q_unrotated,
                                       .tables = tables(layer),
                                       .probes = static_cast<int>(probes_),
                                       .sink = spec_.dense.sink,
                                       .window = spec_.dense.window,
                                       .runs = runs_.as<cuda::RowRun>(),
                                       .more = more_.as<std::int32_t>(),
                                       .share = kMostUnlisted};
  cuda::choose_buckets(task, queries, stream);
  return cuda::runs_of(task, counts_.as<std::int32_t>() + layer * counts_per_layer(), geometry_.max_tokens);
}

cuda::RowLists GpuBuckets::select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                                  cuda::StreamHandle stream) {
  const cuda::RowRuns runs = choose(layer, queries, q_unrotated, stream);
  cuda::list_runs(queries, runs, rows_.as<std::int32_t>(), stream);
  return {.rows = rows_.as<std::int32_t>(),
          .counts = runs.counts,
          .capacity = runs.capacity,
          .lists_per_head = 1,
          .sink = runs.sink,
          .window = runs.window};
}

bool GpuBuckets::attend(int layer, const cuda::Queries& queries, const float* q_unrotated, void* workspace,
                        cuda::StreamHandle stream) {
  const int group = geometry_.query_heads / geometry_.kv_heads;
  if (!cuda::can_attend_runs(queries.layout, group) ||
      cuda::runs_of_choice(static_cast<int>(probes_), net_.buckets) > cuda::RowRuns::kMost)
    return false;
  cuda::attend_runs_decode(queries, choose(layer, queries, q_unrotated, stream), geometry_.max_tokens,
                           workspace, stream);
  return true;
}

/// Networks, where each bucket's list begins, labels of the keys behind the lists, and what is read of
/// them.
std::int64_t GpuBuckets::select_bytes(const CountedToken& of, std::span<const int> heads,
                                      std::int64_t chosen) const {
  const std::int64_t unlisted =
      std::max<std::int64_t>(0, of.position + 1 - spec_.dense.window - end_of_lists(of.position));
  return std::ssize(heads) * (net_.bytes() + (net_.buckets + 1) * std::int64_t{4} + unlisted * 2) +
         chosen * 4;
}

std::int64_t GpuBuckets::bytes() const {
  std::int64_t sum = labeller_.bytes();
  for (const cuda::Buffer* b : {&nets_, &centroids_, &labels_, &offsets_, &listed_rows_, &workspace_, &runs_,
                                &more_, &rows_, &counts_})
    sum += b->bytes();
  return sum;
}

namespace {

/// About `most` of a head's keys behind the sink, evenly spread, as stored or un-rotated: [count, d].
cuda::Buffer even_sample(const GpuKeys& keys, int layer, int kv_head, std::int64_t sink, std::int64_t most,
                         bool roped, cuda::StreamHandle stream) {
  const std::int64_t n = keys.tokens - sink, step = std::max<std::int64_t>(1, n / most), count = n / step;
  cuda::Buffer points(count * keys.layout.head_dim * 4, "a sample of keys");
  cuda::gather_keys({.layer = keys.base + layer * keys.layout.layer_stride,
                     .layout = keys.layout,
                     .kv_head = kv_head,
                     .begin = sink,
                     .step = step,
                     .count = count,
                     .frequencies = roped ? nullptr : keys.frequencies,
                     .rope_scale = keys.rope_scale},
                    points.as<float>(), stream);
  return points;
}

}  // namespace

std::vector<float> train_centroids_on_gpu(const GpuKeys& keys, int layer, int kv_head, std::int64_t sink,
                                          bool roped, std::int64_t clusters, cuda::StreamHandle stream) {
  const std::int64_t d = keys.layout.head_dim;
  const cuda::Buffer points =
      even_sample(keys, layer, kv_head, sink, clusters * kSamplePerCentroid, roped, stream);
  const std::int64_t count = points.bytes() / (d * 4);
  cuda::Buffer labels(count * 4, "their labels"), centroids(clusters * d * 4, "centroids");
  // As start: every so-and-so-many-th point.
  for (std::int64_t c = 0; c < clusters; ++c)
    cuda::copy(centroids.as<float>() + c * d, points.as<float>() + c * count / clusters * d, d * 4, stream);
  for (int i = 0; i < kIterations; ++i) {
    check_cancel();
    cuda::assign(points.as<float>(), count, centroids.as<float>(), clusters, static_cast<int>(d),
                 labels.as<std::int32_t>(), nullptr, stream);
    cuda::move_centroids(points.as<float>(), count, labels.as<std::int32_t>(), static_cast<int>(clusters),
                         static_cast<int>(d), centroids.as<float>(), stream);
  }
  std::vector<float> result(static_cast<std::size_t>(clusters * d));
  cuda::copy(result.data(), centroids.as<float>(), std::ssize(result) * 4, stream);
  return result;
}

namespace {

std::vector<bool> sparse_layers(std::span<Selector* const> selectors) {
  std::vector<bool> layers;
  for (const Selector* selector : selectors) layers.push_back(selector != nullptr);
  return layers;
}

/// An even sample of a layer's un-rotated keys behind the sink, [n, d].
std::vector<float> sample_keys(const GpuKeys& keys, int layer, int kv_head, std::int64_t sink,
                               cuda::StreamHandle stream) {
  constexpr std::int64_t kSample = 1 << 14;
  const cuda::Buffer points = even_sample(keys, layer, kv_head, sink, kSample, false, stream);
  std::vector<float> sample(static_cast<std::size_t>(points.bytes() / 4));
  cuda::copy(sample.data(), points.as<float>(), std::ssize(sample) * 4, stream);
  return sample;
}

/// A layer's networks made up for the bench: centroids of its keys, of kmeans as many as it has of so many; for saap a
/// classifier of random weights.
BucketChoice made_up(const Spec& spec, const GpuGeometry& geometry, const GpuKeys& keys, int layer,
                     std::uint64_t seed, double largest, cuda::StreamHandle stream) {
  constexpr std::int64_t kClusters = 1024, kProbes = 32;  // SAAP, appendix C
  const bool deep = spec.name == "saap", roped = spec.text("rope").value_or("off") == "on";
  const std::string rank = spec.text("rank").value_or("root");
  const std::int64_t d = geometry.head_dim,
                     clusters = deep ? spec.integer("clusters", kClusters, 1, kMostBucketsOfGpu)
                                     : kmeans_buckets(
                                           spec, std::max<std::int64_t>(0, keys.tokens - spec.dense.sink));
  if (clusters > kMostBucketsOfGpu)
    throw InputError(fmt::format("attention spec '{}': expected at most {} clusters on a GPU, found {}",
                                 spec.str(), kMostBucketsOfGpu, clusters));
  BucketChoice choice = {
      .keys = {},
      .queries = {},
      .probes = deep ? spec.integer("probes", kProbes, 1, 1 << 20) : kmeans_probes(spec, clusters),
      .roped = roped,
      .softmax = deep,
      .per_key = !deep || rank == "mass" ? 0.0f
                 : rank == "key"         ? 1.0f
                                         : 0.5f};
  for (int head = 0; head < geometry.kv_heads; ++head) {
    const std::vector<float> centroids =
        train_centroids_on_gpu(keys, layer, head, spec.dense.sink, roped, clusters, stream);
    choice.keys.emplace_back(d, clusters,
                             BucketNet::Weights{.hidden_weight = {},
                                                .hidden_bias = {},
                                                .output_weight = {},
                                                .linear_weight = centroids,
                                                .bias = {}},
                             DType::f32);
    if (!deep) continue;
    Rng rng(hash_seed(seed, layer, head));
    choice.queries.push_back(made_up_classifier(d, clusters, DType::f32, rng));
    if (largest == 0.0) continue;
    const std::vector<float> sample = sample_keys(keys, layer, head, spec.dense.sink, stream);
    enlarge_first_bucket(choice.keys.back(), choice.queries.back(),
                         {sample.data(), std::ssize(sample) / d, d}, largest);
  }
  if (!deep) choice.queries = choice.keys;
  return choice;
}

/// Networks of all heads: those that the host's selector does not cover have the first one's.
BucketChoice of_all_heads(BucketChoice choice, const std::vector<int>& covered, int kv_heads) {
  const std::size_t own = covered.size();
  const auto spread = [&](const std::vector<BucketNet>& nets) {  // [K, own] -> [K, Hkv]
    std::vector<BucketNet> all;
    for (std::size_t first = 0; first < nets.size(); first += own) {
      for (int head = 0; head < kv_heads; ++head) {
        const auto at = std::find(covered.begin(), covered.end(), head) - covered.begin();
        all.push_back(nets[first + static_cast<std::size_t>(at) % own]);
      }
    }
    return all;
  };
  choice.keys = spread(choice.keys);
  choice.queries = spread(choice.queries);
  return choice;
}

/// Sizes of the buckets of those heads alone.
std::vector<std::int64_t> sizes_of(std::span<const std::int64_t> all /*[Hkv, C]*/,
                                   const std::vector<int>& covered, int kv_heads) {
  const std::size_t buckets = all.size() / static_cast<std::size_t>(kv_heads);
  std::vector<std::int64_t> own;
  for (const int head : covered) {
    const auto sizes = all.subspan(static_cast<std::size_t>(head) * buckets, buckets);
    own.insert(own.end(), sizes.begin(), sizes.end());
  }
  return own;
}

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_buckets(const Spec& spec, const GpuGeometry& geometry,
                                              std::span<Selector* const> selectors) {
  // Keys must be written before the step in which they become far.
  if (spec.dense.window < geometry.most_queries || !cuda::can_choose_buckets()) return nullptr;
  const bool trained = spec.name == "saap";
  // Of kmeans, whose index may come later, the width is that of the keys.
  if (!trained && (geometry.head_dim > kMostInputs || geometry.head_dim % 4 != 0)) return nullptr;
  std::vector<BucketChooser*> choosers;
  std::optional<BucketNet> shape;
  for (Selector* selector : selectors) {
    choosers.push_back(dynamic_cast<BucketChooser*>(selector));
    if (selector == nullptr || !trained) continue;
    const auto choice = choosers.back() != nullptr ? choosers.back()->bucket_choice() : std::nullopt;
    if (!choice || !GpuBuckets::supports(*choice, geometry.query_heads / geometry.kv_heads)) return nullptr;
    if (!shape) shape = choice->queries.front();
    if (!same_shape(*shape, choice->queries.front())) return nullptr;
  }
  if (spec.text("clusters") && spec.amount("clusters", {}).of(geometry.max_tokens) > kMostBucketsOfGpu)
    return nullptr;
  GpuBuckets::Listener listener;
  if (trained && geometry.all_heads == 0) {  // one GPU of several has not seen all of a layer's buckets
    listener = [choosers, geometry](int layer, std::span<const std::int64_t> sizes) {
      choosers[static_cast<std::size_t>(layer)]->take_bucket_sizes(
          sizes_of(sizes, geometry.covered_heads(layer), geometry.kv_heads));
    };
  }
  GpuBuckets::Known known;
  if (!trained) {
    known = [choosers,
             all = geometry.all_heads == 0 && geometry.ranges == nullptr](int layer) -> const BucketIndex* {
      return all ? choosers[static_cast<std::size_t>(layer)]->buckets() : nullptr;
    };
  }
  return std::make_unique<GpuBuckets>(
      spec, geometry, sparse_layers(selectors),
      [choosers, geometry](int layer, const GpuKeys&, cuda::StreamHandle) -> std::optional<BucketChoice> {
        std::optional<BucketChoice> choice = choosers[static_cast<std::size_t>(layer)]->bucket_choice();
        if (!choice) return std::nullopt;
        return of_all_heads(std::move(*choice), geometry.covered_heads(layer), geometry.kv_heads);
      },
      std::move(listener), std::move(known));
}

std::unique_ptr<GpuSelector> make_gpu_buckets_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                        std::uint64_t seed, double largest) {
  if (!cuda::can_choose_buckets()) return nullptr;
  // Layers of the same keys have the same networks.
  const auto made = std::make_shared<std::vector<std::optional<BucketChoice>>>(
      static_cast<std::size_t>(geometry.distinct_layers > 0 ? geometry.distinct_layers : geometry.layers));
  return std::make_unique<GpuBuckets>(
      spec, geometry, std::vector<bool>(static_cast<std::size_t>(geometry.layers), true),
      [spec, geometry, seed, largest, made](int layer, const GpuKeys& keys, cuda::StreamHandle stream) {
        std::optional<BucketChoice>& choice = (*made)[static_cast<std::size_t>(layer) % made->size()];
        if (!choice) choice = made_up(spec, geometry, keys, layer, seed, largest, stream);
        return choice;
      },
      nullptr);
}

}  // namespace lode
