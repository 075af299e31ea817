// SPDX-License-Identifier: Apache-2.0
// Prefill attention: the last 4096 tokens of a prompt against all of it, and whole prompts; share of the
// matrix rate.
#include "bench.h"
#include "kernels/cuda/attend/attend.h"

namespace lode::cuda::bench {
namespace {

void report(int query_heads, int kv_heads, int d, int tokens, int count) {
  const Stream stream;
  KvLayout layout{kv_heads, d, DType::bf16, 0};
  layout.layer_stride = layout.layer_bytes(tokens);
  const Buffer store = random_weights(layout.layer_stride / 2, 1.0f, 1),
               q = random_floats(std::int64_t{count} * query_heads * d, 1.0f, 2);
  Buffer o(q.bytes(), "outputs"), bases(8, "bases"), places(8, "places");
  const char* base = store.as<char>();
  const QueryToken first{0, tokens - count};
  copy(bases.as<void>(), &base, 8, nullptr);
  copy(places.as<void>(), &first, 8, nullptr);
  LODE_CUDA(cudaDeviceSynchronize());
  Queries in;
  in.tokens = places.as<QueryToken>();
  in.bases = bases.as<const char*>();
  in.layout = layout;
  in.count = count;
  in.query_heads = query_heads;
  in.scale = 0.088f;
  in.q = q.as<float>();
  in.o = o.as<float>();
  const double us = median_replay(stream, 5, [&] { attend_prefill(in, tokens - count, stream.get()); });
  const double pairs = static_cast<double>(count) * (tokens - count) + 0.5 * count * (count + 1.0);
  std::printf("%d/%d heads of %d, %d queries on %d tokens: %.0f us, %.0f TFLOP/s\n", query_heads, kv_heads, d,
              count, tokens, us, 4.0 * pairs * query_heads * d / us / 1e6);
}

}  // namespace
}  // namespace lode::cuda::bench

int main() {
  using namespace lode::cuda;
  const Availability gpu = availability();
  if (!gpu.ok) {
    std::printf("skipped: %s\n", gpu.why.c_str());
    return 77;
  }
  try {
    bench::report(32, 8, 128, 32768, 4096);
    bench::report(32, 8, 128, 32768, 32768);
    bench::report(32, 8, 128, 4096, 4096);
    bench::report(32, 32, 128, 16384, 16384);
    bench::report(32, 8, 64, 32768, 4096);
    bench::report(16, 8, 256, 16384, 4096);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
