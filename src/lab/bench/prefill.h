// SPDX-License-Identifier: Apache-2.0
// Speed of prefill, beside the rate of a library's bf16 GEMM in the same run (oneDNN's on packed weights on a
// CPU, cuBLASLt's on a GPU): attention of a chunk of tokens over a long context and the product with weights,
// or a whole model.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/engine.h"
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
  std::string
      what;  ///< "attention", "gemm", "delta rule" (of a hybrid's shape) or "model"; last the yardstick: "onednn bf16 gemm" ("f32" on CPUs without bf16 products) or "cublaslt bf16 gemm"
  double median_ms = 0;
  double gflops = 0;             ///< 10^9 multiplications and additions per second
  double of_gemm = 0;            ///< gflops / those of the last row; 0 when there is no such library
  double tokens_per_second = 0;  ///< of "model"
};

/// Attention counts 4 d multiplications and additions per query head and visible key; the GEMM is [T, D] by
/// [D, D]. A hybrid's shape has a row for the delta rule of one recurrent layer, which is not its products.
std::vector<PrefillBenchRow> bench_prefill(const PrefillBenchOptions& options, ThreadPool& pool);

/// Full attention's prefill of `tokens` random tokens by a whole model. Counted are the products with the
/// layers' weights, and attention as above; the logits are those of one token. Before it is timed, a beginning of
/// the text is read.
std::vector<PrefillBenchRow> bench_model_prefill(const std::shared_ptr<const Model>& model,
                                                 const ContextOptions& options, std::int64_t tokens,
                                                 int repeats,
                                                 const std::function<void(std::string_view)>& note);

}  // namespace lode
