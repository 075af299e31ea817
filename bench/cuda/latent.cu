// SPDX-License-Identifier: Apache-2.0
// Attention over latent rows of 576 numbers: decode beside plain reads of as many bytes (a row is read once for up to 64
// heads), prefill as a share of the matrix rate, which counts both products of 576 numbers.
#include "bench.h"
#include "kernels/cuda/attend/attend.h"

namespace lode::cuda::bench {
namespace {

constexpr int kDim = 576;

/// Rows of some sequences of one length, all alike in their numbers but each in memory of its own; their last tokens.
struct Rows {
  Rows(int query_heads, int sequences, int tokens, int count)
      : layout{std::max(1, query_heads / 16), kDim, DType::bf16, 0, true},
        store(random_weights(sequences * layout.layer_bytes(tokens) / 2, 1.0f, 1)),
        q(random_floats(std::int64_t{sequences} * count * query_heads * kDim, 1.0f, 2)),
        o(q.bytes(), "outputs"),
        bases(sequences * std::int64_t{sizeof(char*)}, "bases"),
        places(sequences * std::int64_t{sizeof(QueryToken)}, "places"),
        workspace(decode_workspace_bytes(sequences, query_heads, layout.kv_heads, kDim), "workspace") {
    std::vector<const char*> at;
    std::vector<QueryToken> tokens_of;
    for (int s = 0; s < sequences; ++s) {
      at.push_back(store.as<char>() + s * layout.layer_bytes(tokens));
      tokens_of.push_back({s, tokens - count});
    }
    copy(bases.as<void>(), at.data(), bases.bytes(), nullptr);
    copy(places.as<void>(), tokens_of.data(), places.bytes(), nullptr);
    LODE_CUDA(cudaDeviceSynchronize());
    in = {.tokens = places.as<QueryToken>(),
          .bases = bases.as<const char*>(),
          .layout = layout,
          .count = sequences * count,
          .query_heads = query_heads,
          .scale = 0.07f,
          .q = q.as<float>(),
          .o = o.as<float>()};
  }
  KvLayout layout;
  Buffer store, q, o, bases, places, workspace;
  Queries in;
};

void report_decode(int query_heads, int sequences, int tokens) {
  const Stream stream;
  const Rows rows(query_heads, sequences, tokens, 1);
  const double us = time_of(stream, [&](int) {
    attend_full_decode(rows.in, tokens, rows.workspace.as<void>(), stream.get());
  });
  const double bytes = double{1} * sequences * tokens * kDim * 2;
  std::printf("decode, %d heads, %d x %d tokens: %.1f us, %.2f TB/s, %.0f TFLOP/s\n", query_heads, sequences, tokens,
              us, bytes / us / 1e6, 4.0 * sequences * tokens * query_heads * kDim / us / 1e6);
}

void report_prefill(int query_heads, int tokens, int count) {
  const Stream stream;
  const Rows rows(query_heads, 1, tokens, count);
  const double us =
      median_replay(stream, 5, [&] { attend_prefill(rows.in, tokens - count, stream.get()); });
  const double pairs = static_cast<double>(count) * (tokens - count) + 0.5 * count * (count + 1.0);
  std::printf("prefill, %d heads, %d queries on %d tokens: %.0f us, %.0f TFLOP/s\n", query_heads, count, tokens, us,
              4.0 * pairs * query_heads * kDim / us / 1e6);
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
    for (const int heads : {16, 128}) {
      for (const int tokens : {4096, 32768, 131072}) bench::report_decode(heads, 1, tokens);
      bench::report_decode(heads, 8, 32768);
    }
    bench::report_prefill(16, 4096, 4096);
    bench::report_prefill(16, 32768, 2048);
    bench::report_prefill(128, 8192, 1024);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
