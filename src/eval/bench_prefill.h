// SPDX-License-Identifier: Apache-2.0
// Speed of prefill: attention of a chunk of tokens over a long context and the product with weights, beside
// the rate of oneDNN's bf16 GEMM on packed weights in the same run.
#pragma once

#include <string>
#include <vector>

#include "lodestone/types.h"
#include "model/config.h"

namespace lode {

class ThreadPool;

struct PrefillBenchOptions {
  ModelConfig shape;
  std::int64_t context = 8192;  ///< keys, the chunk's own included
  std::int64_t tokens = 512;    ///< T: query tokens of the chunk
  DType kv_type = DType::f16;
  DType weight_type = DType::bf16;
  int repeats = 7;
};

struct PrefillBenchRow {
  std::string what;  ///< "attention", "gemm", "onednn bf16 gemm"
  double median_ms = 0;
  double gflops = 0;     ///< 10^9 multiplications and additions per second
  double of_onednn = 0;  ///< gflops / those of oneDNN's bf16 GEMM
};

/// Attention counts 4 d multiplications and additions per query head and visible key; the GEMM is [T, D] by
/// [D, D].
std::vector<PrefillBenchRow> bench_prefill(const PrefillBenchOptions& options, ThreadPool& pool);

}  // namespace lode
