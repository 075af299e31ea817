// SPDX-License-Identifier: Apache-2.0
// Speed of the choice of clusters by a threshold and of attention over them, one layer, beside full attention
// in the same run. Centroids are random, clusters of 20 keys at random places; the threshold keeps a tenth of
// the keys. Medians of replays of graphs over layers that rotate.
// usage: bench_clusters
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/squeezed/clusters.h"
#include "kernels/cuda/device/random.h"

namespace lode::cuda::bench {
namespace {

constexpr int kDim = 128, kKeys = 20;  // of a cluster
constexpr std::int64_t kSink = 128, kWindow = 128;
constexpr double kKept = 0.1;
constexpr std::int64_t kRotated = std::int64_t{4} << 30;

struct Shape {
  int kv_heads, query_heads;
  std::int64_t tokens;
};

template <class T>
Buffer upload(const std::vector<T>& from) {
  Buffer to(std::ssize(from) * static_cast<std::int64_t>(sizeof(T)), "a bench");
  LODE_CUDA(cudaMemcpy(to.as<void>(), from.data(), static_cast<std::size_t>(to.bytes()), cudaMemcpyDefault));
  LODE_CUDA(cudaDeviceSynchronize());  // the default stream, which no other stream waits for
  return to;
}
template <class T>
std::vector<T> times(const std::vector<T>& from, int count) {
  std::vector<T> all;
  for (int i = 0; i < count; ++i) all.insert(all.end(), from.begin(), from.end());
  return all;
}

void run(const Shape& shape) {
  Stream stream;
  KvLayout layout = {shape.kv_heads, kDim, DType::bf16, 0};
  layout.layer_stride = layout.layer_bytes(shape.tokens);
  const int places = static_cast<int>(std::max<std::int64_t>(2, kRotated / layout.layer_stride)),
            heads = shape.kv_heads;
  const Buffer memory(layout.layer_stride * places, "keys and values");
  fill_uniform(memory.as<void>(), DType::bf16, memory.bytes() / 2, 0, 1.7f, 1, stream.get());
  const int nodes = static_cast<int>((shape.tokens - kSink - kWindow) / kKeys), keys = nodes * kKeys;
  const std::int64_t of_head = centroid_bytes(nodes, kDim, CentroidKind::f16);
  const Buffer centroids(places * heads * of_head, "centroids");
  fill_uniform(centroids.as<void>(), DType::f16, centroids.bytes() / 2, 0, 0.5f, 2, stream.get());
  std::mt19937 random(3);
  std::vector<std::int32_t> first(static_cast<std::size_t>(nodes) + 1), rows(static_cast<std::size_t>(keys));
  for (std::size_t i = 0; i < first.size(); ++i) first[i] = static_cast<std::int32_t>(i) * kKeys;
  std::iota(rows.begin(), rows.end(), static_cast<std::int32_t>(kSink));
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<float> numbers(static_cast<std::size_t>(shape.query_heads * kDim));
  std::normal_distribution<float> normal;
  for (float& x : numbers) x = normal(random);
  const Buffer first_there = upload(times(first, heads)), rows_there = upload(times(rows, heads)),
               nodes_there = upload(times(std::vector<std::int32_t>{0, nodes}, heads)),
               scales = upload(std::vector<float>(static_cast<std::size_t>(heads), 1.0f)),
               bases = upload(std::vector<const char*>{memory.as<char>()}), q = upload(numbers),
               tokens = upload(std::vector<QueryToken>{{0, static_cast<std::int32_t>(shape.tokens - 1)}}),
               o(q.bytes(), "o"), chosen(heads * shape.tokens * 4, "chosen"), counts(heads * 4, "counts"),
               workspace(decode_workspace_bytes(1, shape.query_heads, heads, kDim), "w");
  const Buffer step(sizeof(ClusterStep), "a step");
  fill(workspace.as<void>(), 0, workspace.bytes(), stream.get());
  stream.synchronize();
  const auto queries = [&](int i) {
    return Queries{.tokens = tokens.as<QueryToken>(),
                   .bases = bases.as<const char*>(),
                   .layer_offset = i % places * layout.layer_stride,
                   .layout = layout,
                   .count = 1,
                   .query_heads = shape.query_heads,
                   .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                   .q = q.as<float>(),
                   .o = o.as<float>()};
  };
  const auto select = [&](int i) {
    choose_clusters({.tables = {.centroids = centroids.as<std::byte>() + i % places * heads * of_head,
                                .scales = scales.as<float>(),
                                .first = first_there.as<std::int32_t>(),
                                .rows = rows_there.as<std::int32_t>(),
                                .nodes = nodes_there.as<std::int32_t>(),
                                .most_keys = keys,
                                .most_nodes = nodes,
                                .most_parts = 1},
                     .step = step.as<ClusterStep>(),
                     .window = kWindow,
                     .rows = chosen.as<std::int32_t>(),
                     .counts = counts.as<std::int32_t>(),
                     .capacity = shape.tokens},
                    queries(i), stream.get());
  };
  const auto share = [&] {
    std::vector<std::int32_t> found(static_cast<std::size_t>(heads));
    copy(found.data(), counts.as<void>(), counts.bytes(), stream.get());
    stream.synchronize();
    return std::accumulate(found.begin(), found.end(), 0.0) / heads / keys;
  };
  double low = 0.0, high = 20.0;
  for (int i = 0; i < 24; ++i) {
    const ClusterStep now = {(low + high) / 2, 1, static_cast<std::int32_t>(kSink),
                             static_cast<std::int32_t>(kSink) + keys};
    LODE_CUDA(cudaMemcpy(step.as<void>(), &now, sizeof now, cudaMemcpyDefault));
    select(0);
    (share() > kKept ? low : high) = now.threshold;
  }
  const double kept = share();
  const RowLists lists = {.rows = chosen.as<std::int32_t>(),
                          .counts = counts.as<std::int32_t>(),
                          .capacity = shape.tokens,
                          .sink = kSink,
                          .window = kWindow};
  const auto attend = [&](int i) {
    attend_rows_decode(queries(i), lists, shape.tokens, workspace.as<void>(), stream.get());
  };
  const auto time = [&](const std::function<void(int)>& call) { return time_of(stream, call); };
  const double both = time([&](int i) { select(i), attend(i); });
  const double selecting = time(select), attending = time(attend);
  const double full =
      time([&](int i) { attend_full_decode(queries(i), shape.tokens, workspace.as<void>(), stream.get()); });
  std::printf("| %d/%d | %lldk | %d | %.1f %% | %.1f | %.1f | %.1f | %.1f | %.1fx |\n", heads,
              shape.query_heads, static_cast<long long>(shape.tokens >> 10), nodes, 100 * kept, both,
              selecting, attending, full, full / both);
  std::fflush(stdout);
}

}  // namespace
}  // namespace lode::cuda::bench

int main() {
  using lode::cuda::bench::Shape;
  std::printf(
      "| heads | keys | clusters | kept | both us | select | attend | full | |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  const std::int64_t k = 1024;
  for (const Shape& shape :
       {Shape{8, 32, 128 * k}, Shape{8, 32, 512 * k}, Shape{32, 32, 128 * k}, Shape{32, 32, 512 * k}})
    run(shape);
}
