// SPDX-License-Identifier: Apache-2.0
// Speed of the choice of buckets and of attention over them, one layer, beside full attention in the same
// run. Networks and labels are random, so that as many keys come as from trained ones, and others. Medians of
// replays of graphs over layers that rotate.
// usage: bench_buckets
#include <cmath>
#include <random>

#include "bench.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/saap/buckets.h"
#include "kernels/cuda/saap/probe.h"
#include "kernels/cuda/device/random.h"

namespace lode::cuda::bench {
namespace {

constexpr int kDim = 128, kBuckets = 1024, kHidden = 1024, kProbes = 45;
constexpr std::int64_t kSink = 1, kWindow = 2047, kListed = 2048;
constexpr int kRuns = kProbes + kShares;
constexpr std::int64_t kRotated = std::int64_t{4} << 30;

struct Shape {
  int kv_heads, query_heads;
  std::int64_t tokens;
  bool network;  ///< or centroids alone
};

template <class T>
Buffer upload(const std::vector<T>& from) {
  Buffer to(std::ssize(from) * static_cast<std::int64_t>(sizeof(T)), "a bench");
  LODE_CUDA(cudaMemcpy(to.as<void>(), from.data(), static_cast<std::size_t>(to.bytes()), cudaMemcpyDefault));
  LODE_CUDA(cudaDeviceSynchronize());  // the default stream, which no other stream waits for
  return to;
}

void run(const Shape& shape) {
  Stream stream;
  KvLayout layout = {shape.kv_heads, kDim, DType::bf16, 0};
  layout.layer_stride = layout.layer_bytes(shape.tokens);
  const int places = static_cast<int>(std::max<std::int64_t>(2, kRotated / layout.layer_stride)),
            heads = shape.kv_heads;
  const Buffer memory(layout.layer_stride * places, "keys and values");
  fill_uniform(memory.as<void>(), DType::bf16, memory.bytes() / 2, 0, 1.7f, 1, stream.get());
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto numbers = [&](std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& v : x) v = 0.1f * normal(random);
    return x;
  };
  const NetLayout net = {kDim, shape.network ? kHidden : 0, kBuckets, 1, false};
  const std::vector<std::byte> one =
      pack_net(net, numbers(shape.network ? kHidden * kDim : 0), numbers(shape.network ? kHidden : 0),
               numbers(std::int64_t{kBuckets} * (shape.network ? kHidden : kDim)), {}, numbers(kBuckets));
  const Buffer single = upload(one), nets(std::int64_t{places} * heads * net.bytes(), "networks");
  for (int i = 0; i < places * heads; ++i)
    copy(nets.as<std::byte>() + i * net.bytes(), single.as<void>(), net.bytes(), stream.get());
  // Labels of one layer, in lists up to a stretch of the newest.
  std::vector<std::uint16_t> labels(static_cast<std::size_t>(heads * shape.tokens));
  for (auto& label : labels) label = static_cast<std::uint16_t>(random() % kBuckets);
  const Buffer labels_there = upload(labels);
  const std::int64_t listed = (shape.tokens - kWindow) / kListed * kListed;
  const Buffer offsets(places * heads * (kBuckets + 1) * std::int64_t{4}, "offsets"),
      rows(places * heads * shape.tokens * 4, "rows"),
      workspace_of_lists(list_workspace_bytes(heads, kBuckets, shape.tokens), "lists");
  for (int place = 0; place < places; ++place)
    list_buckets({.labels = labels_there.as<std::uint16_t>(),
                  .kv_heads = heads,
                  .buckets = kBuckets,
                  .max_tokens = shape.tokens,
                  .begin = kSink,
                  .end = listed,
                  .offsets = offsets.as<std::int32_t>() + place * heads * (kBuckets + 1),
                  .rows = rows.as<std::int32_t>() + place * heads * shape.tokens,
                  .workspace = workspace_of_lists.as<void>()},
                 stream.get());
  const Buffer listed_there = upload(std::vector<std::int32_t>{static_cast<std::int32_t>(listed)}),
               bases = upload(std::vector<const char*>{memory.as<char>()}),
               tokens = upload(std::vector<QueryToken>{{0, static_cast<std::int32_t>(shape.tokens - 1)}}),
               q = upload(numbers(std::int64_t{shape.query_heads} * kDim)), o(q.bytes(), "o"),
               runs(heads * kRuns * std::int64_t{sizeof(RowRun)}, "runs"),
               more(heads * kShares * kListed * 4, "more"), counts(heads * 4, "counts"),
               workspace(decode_workspace_bytes(1, shape.query_heads, heads, kDim), "w");
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
  const auto task = [&](int i) {
    const int place = i % places;
    return BucketChoiceTask{.net = net,
                            .nets = nets.as<std::byte>() + place * heads * net.bytes(),
                            .softmax = shape.network,
                            .q = q.as<float>(),
                            .tables = {.labels = labels_there.as<std::uint16_t>(),
                                       .offsets = offsets.as<std::int32_t>() + place * heads * (kBuckets + 1),
                                       .rows = rows.as<std::int32_t>() + place * heads * shape.tokens,
                                       .listed = listed_there.as<std::int32_t>(),
                                       .max_tokens = shape.tokens},
                            .probes = kProbes,
                            .sink = kSink,
                            .window = kWindow,
                            .runs = runs.as<RowRun>(),
                            .more = more.as<std::int32_t>(),
                            .share = kListed};
  };
  const auto select = [&](int i) { choose_buckets(task(i), queries(i), stream.get()); };
  const auto attend = [&](int i) {
    attend_runs_decode(queries(i), runs_of(task(i), counts.as<std::int32_t>(), shape.tokens), shape.tokens,
                       workspace.as<void>(), stream.get());
  };
  select(0), attend(0);
  std::vector<std::int32_t> found(static_cast<std::size_t>(heads));
  copy(found.data(), counts.as<void>(), counts.bytes(), stream.get());
  stream.synchronize();
  const auto time = [&](const std::function<void(int)>& call) { return time_of(stream, call); };
  const double both = time([&](int i) { select(i), attend(i); });
  const double selecting = time(select), attending = time(attend);
  const double full =
      time([&](int i) { attend_full_decode(queries(i), shape.tokens, workspace.as<void>(), stream.get()); });
  std::printf("| %d/%d | %lldk | %s | %d | %.1f | %.1f | %.1f | %.1f | %.1fx |\n", heads, shape.query_heads,
              static_cast<long long>(shape.tokens >> 10), shape.network ? "network" : "centroids", found[0],
              both, selecting, attending, full, full / both);
  std::fflush(stdout);
}

}  // namespace
}  // namespace lode::cuda::bench

int main() {
  using lode::cuda::bench::Shape;
  std::printf(
      "| heads | keys | scored by | chosen | both us | select | attend | full | |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  const std::int64_t k = 1024;
  for (const Shape& shape :
       {Shape{8, 32, 128 * k, true}, Shape{8, 32, 512 * k, true}, Shape{8, 32, 1024 * k, true},
        Shape{8, 32, 128 * k, false}, Shape{1, 4, 171 * k, true}})
    run(shape);
}
