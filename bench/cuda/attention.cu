// SPDX-License-Identifier: Apache-2.0
// Speed of decode attention and top-k on one GPU, beside plain reads of as many bytes in the same run.
// usage: bench_attention [PART OF A NAME]
//
// A figure is the median of the replays of a graph that holds enough calls for 3 ms or more, on keys
// that rotate over buffers of kRotated bytes or more; the gap between two nodes of a graph is in it. A shape
// is KV heads / query heads.
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "bench.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/select/select.h"

namespace lode::cuda::bench {
namespace {

constexpr std::int64_t kRotated = std::int64_t{1200} << 20;
constexpr std::int64_t kListed = std::int64_t{400} << 20;  // of different rows in all sets of lists
constexpr int kDim = 128;

std::string only;

template <class T>
Buffer copy_of(const std::vector<T>& host) {
  Buffer buffer(static_cast<std::int64_t>(host.size() * sizeof(T)), "numbers of a bench");
  LODE_CUDA(cudaMemcpy(buffer.as<void>(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

constexpr int kGatherThreads = 512;

/// Reads listed rows and their values, eight at a time by each warp: what attention over lists is held against.
__global__ void __launch_bounds__(kGatherThreads)
    gather_all(const char* base, KvLayout layout, const std::int32_t* rows, std::int64_t of_list,
               std::int64_t all, unsigned* out) {
  constexpr int kAtOnce = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * kGatherThreads / 32,
                     warp = (std::int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32,
                     from = all * warp / warps, to = all * (warp + 1) / warps;
  unsigned sum = 0;
  for (std::int64_t i = from; i < to; i += kAtOnce) {
    const int mine = i + lane % kAtOnce < to ? rows[i + lane % kAtOnce] : 0;
    uint4 v[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int row = __shfl_sync(~0u, mine, u);
      const char* const at = base + layout.key_offset(static_cast<int>((i + u) / of_list), row) +
                             lane / 16 * layout.value_offset() + lane % 16 * 16;
      if (i + u < to) v[u] = __ldcs(reinterpret_cast<const uint4*>(at));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x12345678u) *out = sum;  // never, but the compiler cannot know
}

struct Shape {
  const char* name;
  int kv_heads, query_heads;
  std::int64_t context;
};

class Bench {
 public:
  explicit Bench(const Shape& shape) : shape_(shape), layout_{shape.kv_heads, kDim, DType::bf16, 0} {
    const std::int64_t each = layout_.layer_bytes(shape.context);
    places_ = static_cast<int>(std::max<std::int64_t>(1, (kRotated + each - 1) / each));
    memory_ = Buffer(each * places_, "keys and values");
    fill_uniform(memory_.as<void>(), DType::bf16, memory_.bytes() / 2, 0, 1.7f, 1, stream_.get());
    std::vector<const char*> bases;
    for (int i = 0; i < places_; ++i) bases.push_back(memory_.as<char>() + i * each);
    std::vector<QueryToken> tokens;
    for (int i = 0; i < places_; ++i) tokens.push_back({i, static_cast<std::int32_t>(shape.context - 1)});
    bases_ = copy_of(bases), tokens_ = copy_of(tokens);
    q_ = Buffer(shape.query_heads * kDim * 4, "q");
    o_ = Buffer(q_.bytes(), "o");
    fill_uniform(q_.as<void>(), DType::f32, shape.query_heads * kDim, 0, 1.7f, 2, stream_.get());
    workspace_ = Buffer(decode_workspace_bytes(1, shape.query_heads, shape.kv_heads, kDim), "workspace");
    fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
    stream_.synchronize();
  }

  Queries queries(int i) const {
    return {.tokens = tokens_.as<QueryToken>() + i % places_,
            .bases = bases_.as<const char*>(),
            .layer_offset = 0,
            .layout = layout_,
            .count = 1,
            .query_heads = shape_.query_heads,
            .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
            .q = q_.as<float>(),
            .o = o_.as<float>()};
  }

  void full() {
    const std::int64_t bytes = shape_.context * shape_.kv_heads * kDim * 4;
    const double us = time_of(stream_, [&](int i) {
      attend_full_decode(queries(i), shape_.context, workspace_.as<void>(), stream_.get());
    });
    row("full", 1.0, bytes, us);
  }

  /// Rows at random, a list per KV head; as many sets of lists as it takes for all rows together to be far
  /// beyond the second-level cache, one after the other.
  void rows(double share) {
    const auto count = static_cast<std::int64_t>(static_cast<double>(shape_.context) * share);
    const std::int64_t bytes = count * shape_.kv_heads * kDim * 4;
    const auto sets = static_cast<int>((kListed + bytes * places_ - 1) / (bytes * places_));
    std::vector<std::int32_t> rows;
    std::uint64_t state = 7;
    for (int list = 0; list < sets * shape_.kv_heads; ++list) draw(count, state, rows);
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(shape_.kv_heads),
                                           static_cast<std::int32_t>(count));
    const Buffer device_rows = copy_of(rows), device_counts = copy_of(counts);
    const auto rows_of = [&](int i) {
      return device_rows.as<std::int32_t>() + i / places_ % sets * shape_.kv_heads * count;
    };
    const double us = time_of(stream_, [&](int i) {
      attend_rows_decode(queries(i),
                         {.rows = rows_of(i),
                          .counts = device_counts.as<std::int32_t>(),
                          .capacity = count,
                          .lists_per_head = 1},
                         shape_.context, workspace_.as<void>(), stream_.get());
    });
    row("rows", share, bytes, us);
    const Buffer out(4, "what a read gives");
    double best = 1e30;
    for (const int blocks : {132, 264, 528}) {
      best = std::min(best, time_of(stream_, [&](int i) {
                        Launch(blocks, kGatherThreads, 0, stream_.get())(
                            gather_all, memory_.as<char>() + i % places_ * layout_.layer_bytes(shape_.context), layout_,
                            rows_of(i), count, count * shape_.kv_heads, out.as<unsigned>());
                      }));
    }
    std::printf("%58s %9.2f us, a plain read of these rows\n", "", best);
  }

 private:
  /// So many different rows, ascending.
  void draw(std::int64_t count, std::uint64_t& state, std::vector<std::int32_t>& rows) const {
    std::vector<char> chosen(static_cast<std::size_t>(shape_.context), 0);
    for (std::int64_t i = 0; i < count;) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      char& at =
          chosen[static_cast<std::size_t>((state >> 33) % static_cast<std::uint64_t>(shape_.context))];
      i += at == 0;
      at = 1;
    }
    for (std::int64_t i = 0; i < shape_.context; ++i) {
      if (chosen[static_cast<std::size_t>(i)]) rows.push_back(static_cast<std::int32_t>(i));
    }
  }
  void row(const char* what, double share, std::int64_t bytes, double us) {
    const double floor = read_floor(stream_, memory_, bytes);
    std::printf("%-10s %3d/%-3d %9lld %-5s %8.4f %9.1f MB %9.2f us  read %9.2f us  x%.3f\n", shape_.name,
                shape_.kv_heads, shape_.query_heads, static_cast<long long>(shape_.context), what, share,
                static_cast<double>(bytes) / 1e6, us, floor, us / floor);
    std::fflush(stdout);
  }

  Shape shape_;
  KvLayout layout_;
  int places_ = 1;
  Stream stream_;
  Buffer memory_, bases_, tokens_, q_, o_, workspace_;
};

struct ListCase {
  const char* name;
  int batch, kv_heads, group;
  std::int64_t context, chosen, sink, window;
  bool per_head;
};

/// Lists of each query head, or of several sequences; rows one in each of as many stretches of the far keys.
class ListBench {
 public:
  explicit ListBench(const ListCase& c) : c_(c), layout_{c.kv_heads, kDim, DType::bf16, 0} {
    layout_.layer_stride = layout_.layer_bytes(c.context);
    const std::int64_t each = layout_.layer_stride * c.batch;
    places_ = static_cast<int>(std::max<std::int64_t>(2, (kRotated + each - 1) / each));
    memory_ = Buffer(each * places_, "keys and values");
    fill_uniform(memory_.as<void>(), DType::bf16, memory_.bytes() / 2, 0, 1.7f, 1, stream_.get());
    std::vector<const char*> bases;
    std::vector<QueryToken> tokens;
    for (int b = 0; b < c.batch; ++b) {
      bases.push_back(memory_.as<char>() + b * places_ * layout_.layer_stride);
      tokens.push_back({b, static_cast<std::int32_t>(c.context - 1)});
    }
    bases_ = copy_of(bases), tokens_ = copy_of(tokens);
    const std::int64_t rows = c.batch * c.kv_heads * c.group;
    q_ = Buffer(rows * kDim * 4, "q"), o_ = Buffer(rows * kDim * 4, "o");
    fill_uniform(q_.as<void>(), DType::f32, rows * kDim, 0, 1.7f, 2, stream_.get());
    workspace_ = Buffer(decode_workspace_bytes(c.batch, c.kv_heads * c.group, c.kv_heads, kDim), "workspace");
    fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
    const std::int64_t far = c.context - c.sink - c.window;
    std::uint64_t state = 7;
    for (std::int64_t list = 0; list < lists(); ++list) {
      for (std::int64_t i = 0; i < c.chosen; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const std::int64_t from = far * i / c.chosen, to = far * (i + 1) / c.chosen;
        chosen_.push_back(
            static_cast<std::int32_t>(c.sink + from + static_cast<std::int64_t>(state >> 33) % (to - from)));
      }
    }
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(lists()),
                                           static_cast<std::int32_t>(c.chosen));
    rows_ = copy_of(chosen_), counts_ = copy_of(counts);
    stream_.synchronize();
  }

  std::int64_t lists() const { return c_.batch * c_.kv_heads * (c_.per_head ? c_.group : 1); }
  void attend(int i) const {
    const Queries queries = {.tokens = tokens_.as<QueryToken>(),
                             .bases = bases_.as<const char*>(),
                             .layer_offset = i % places_ * layout_.layer_stride,
                             .layout = layout_,
                             .count = c_.batch,
                             .query_heads = c_.kv_heads * c_.group,
                             .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                             .q = q_.as<float>(),
                             .o = o_.as<float>()};
    attend_rows_decode(queries,
                       {.rows = rows_.as<std::int32_t>(),
                        .counts = counts_.as<std::int32_t>(),
                        .capacity = c_.chosen,
                        .lists_per_head = c_.per_head ? c_.group : 1,
                        .sink = c_.sink,
                        .window = c_.window},
                       c_.context, workspace_.as<void>(), stream_.get());
  }
  void run() {
    const std::int64_t bytes = lists() * (c_.sink + c_.chosen + c_.window) * kDim * 4;
    const double floor = read_floor(stream_, memory_, bytes),
                 us = time_of(stream_, [&](int i) { attend(i); });
    std::printf("%-16s %3lld lists %5lld + %4lld rows %9.1f MB %9.2f us  read %9.2f us  x%.3f\n", c_.name,
                static_cast<long long>(lists()), static_cast<long long>(c_.chosen),
                static_cast<long long>(c_.sink + c_.window), static_cast<double>(bytes) / 1e6, us, floor,
                us / floor);
    std::fflush(stdout);
  }

 private:
  ListCase c_;
  KvLayout layout_;
  int places_ = 1;
  Stream stream_;
  std::vector<std::int32_t> chosen_;
  Buffer memory_, bases_, tokens_, q_, o_, workspace_, rows_, counts_;
};

void bench_top_k(std::int64_t lists, std::int64_t n, std::int32_t k, bool normal) {
  const Stream stream;
  Buffer scores(lists * n * 4, "scores"), rows(lists * k * 4, "rows"), counts(lists * 4, "counts"),
      wanted(lists * 4, "k");
  if (normal) {
    std::mt19937 engine(3);
    std::normal_distribution<float> draw;
    std::vector<float> numbers(static_cast<std::size_t>(lists * n));
    for (float& x : numbers) x = draw(engine);
    LODE_CUDA(cudaMemcpy(scores.as<void>(), numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice));
  } else {
    fill_uniform(scores.as<void>(), DType::f32, lists * n, 0, 4.0f, 3, stream.get());
  }
  const std::vector<std::int32_t> ks(static_cast<std::size_t>(lists), k);
  LODE_CUDA(cudaMemcpy(wanted.as<void>(), ks.data(), ks.size() * 4, cudaMemcpyHostToDevice));
  stream.synchronize();
  const double us = time_of(stream, [&](int) {
    top_k(scores.as<float>(), lists, n, nullptr, wanted.as<std::int32_t>(), rows.as<std::int32_t>(), k,
          counts.as<std::int32_t>(), nullptr, stream.get());
  });
  std::printf("top_k %lld x %lld %s, k = %d: %.2f us\n", static_cast<long long>(lists),
              static_cast<long long>(n), normal ? "normal" : "uniform", k, us);
}

void bench_counting(std::int64_t lists, std::int64_t n, std::int32_t k) {
  const Stream stream;
  std::vector<std::uint16_t> levels(static_cast<std::size_t>(lists * n));
  std::uint64_t state = 9;
  for (std::uint16_t& x : levels) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    x = static_cast<std::uint16_t>(__builtin_popcountll(state >> 1));  // of random codes
  }
  const std::vector<std::int32_t> ks(static_cast<std::size_t>(lists), k);
  Buffer scores(lists * n * 2, "levels"), rows(lists * k * 4, "rows"), counts(lists * 4, "counts"),
      wanted(lists * 4, "k");
  LODE_CUDA(cudaMemcpy(scores.as<void>(), levels.data(), levels.size() * 2, cudaMemcpyHostToDevice));
  LODE_CUDA(cudaMemcpy(wanted.as<void>(), ks.data(), ks.size() * 4, cudaMemcpyHostToDevice));
  const double us = time_of(stream, [&](int) {
    counting_select(scores.as<std::uint16_t>(), 64, false, lists, n, nullptr, wanted.as<std::int32_t>(),
                    rows.as<std::int32_t>(), k, counts.as<std::int32_t>(), nullptr, stream.get());
  });
  std::printf("counting_select %lld x %lld, k = %d: %.2f us\n", static_cast<long long>(lists),
              static_cast<long long>(n), k, us);
}

bool wanted(const char* name) {
  return only.empty() || std::strstr(name, only.c_str()) != nullptr;
}

}  // namespace

int run() {
  const Availability gpu = availability();
  if (!gpu.ok) {
    std::printf("skipped: %s\n", gpu.why.c_str());
    return 77;
  }
  std::printf("%s\n", gpu.name.c_str());
  constexpr std::int64_t k = 1024, M = k * k;
  for (const Shape& shape : {Shape{"small-2k", 1, 4, 2 * k},
                             {"small-8k", 1, 4, 8 * k},
                             {"small8-2k", 8, 32, 2 * k},
                             {"small8-8k", 8, 32, 8 * k},
                             {"B1-171k", 1, 4, 171000},
                             {"B2-32k", 8, 32, 32 * k},
                             {"B2-128k", 8, 32, 128 * k},
                             {"B2-512k", 8, 32, 512 * k},
                             {"B2-1M", 8, 32, M},
                             {"B3-128k", 32, 32, 128 * k},
                             {"B3-512k", 32, 32, 512 * k}}) {
    if (!wanted(shape.name)) continue;
    Bench bench(shape);
    bench.full();
    if (std::strcmp(shape.name, "B1-171k") == 0) bench.rows(0.044);
    if (std::strcmp(shape.name, "B2-128k") == 0) {
      for (const double share : {1.0 / 8, 1.0 / 16, 1.0 / 32, 1.0 / 64}) bench.rows(share);
    }
    if (std::strcmp(shape.name, "B3-512k") == 0) bench.rows(0.1);
  }
  for (const ListCase& c : {ListCase{"lists-32", 1, 8, 4, 128 * k, 4096, 0, 0, true},
                            ListCase{"lists-hash", 1, 8, 4, 128 * k, 4088, 128, 128, true},
                            ListCase{"lists-quest", 1, 8, 4, 128 * k, 1024, 128, 1920, true},
                            ListCase{"lists-topk4096", 1, 8, 4, 128 * k, 4096, 128, 1920, true},
                            ListCase{"lists-64", 8, 8, 4, 128 * k, 4096, 0, 0, false},
                            ListCase{"lists-24", 3, 8, 4, 128 * k, 4096, 128, 128, false},
                            ListCase{"lists-16", 2, 8, 4, 128 * k, 4096, 128, 128, false},
                            ListCase{"lists-batch-2k", 8, 8, 4, 2 * k, 1024, 0, 0, false},
                            ListCase{"lists-batch-8k", 8, 8, 4, 8 * k, 1024, 0, 0, false}}) {
    if (!wanted(c.name)) continue;
    ListBench(c).run();
  }
  if (wanted("top_k")) {
    for (const bool normal : {false, true}) {
      for (const std::int32_t kk : {100, 2048, 4096, 8192}) bench_top_k(8, 128 * k, kk, normal);
      bench_top_k(32, 128 * k, 4096, normal);
      bench_top_k(8, M, 32768, normal);
    }
    bench_top_k(8, M, 4096, false);
    bench_counting(8, 128 * k, 4096);
  }
  return 0;
}

}  // namespace lode::cuda::bench

int main(int argc, char** argv) {
  if (argc > 1) lode::cuda::bench::only = argv[1];
  return lode::cuda::bench::run();
}
