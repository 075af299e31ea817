// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_prefill.h"

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <oneapi/dnnl/dnnl.hpp>
#include <thread>

#include "base/cancel.h"
#include "base/threads.h"
#include "eval/bench_common.h"
#include "kernels/kernels.h"

namespace lode {
namespace {

/// oneDNN's own threads, for the yardstick only: the rest of the program calls it on one thread at a time.
void set_openmp_threads(int threads) {
  using SetThreads = void (*)(int);
  if (const auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(threads);
}

/// y [m, n] = x [m, k] w [k, n], all bf16 with float32 sums, weights in the layout that oneDNN likes best.
class OnednnGemm {
 public:
  OnednnGemm(std::int64_t m, std::int64_t n, std::int64_t k, int threads)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using dnnl::memory;
    set_openmp_threads(threads);
    const memory::desc x({m, k}, memory::data_type::bf16, memory::format_tag::ab);
    const memory::desc w({k, n}, memory::data_type::bf16, memory::format_tag::any);
    const memory::desc y({m, n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(x, w, y), engine_);
    x_ = memory(x, engine_), w_ = memory(plan.weights_desc(), engine_), y_ = memory(y, engine_);
    // 0x3f80 is 1.0; oneDNN leaves fresh memory as it is.
    std::fill_n(static_cast<std::uint16_t*>(x_.get_data_handle()), x.get_size() / 2, std::uint16_t{0x3f80});
    std::fill_n(static_cast<std::uint16_t*>(w_.get_data_handle()), plan.weights_desc().get_size() / 2,
                std::uint16_t{0x3f80});
    matmul_ = dnnl::matmul(plan);
  }
  void run() {
    matmul_.execute(stream_, {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, w_}, {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::memory x_, w_, y_;
  dnnl::matmul matmul_;
};

PrefillBenchRow row_of(std::string what, double flops, const std::vector<double>& us) {
  const double time = median(us);
  return {.what = std::move(what), .median_ms = 1e-3 * time, .gflops = 1e-3 * flops / time};
}

std::vector<float> random_numbers(std::int64_t n) {
  Rng rng(7);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = static_cast<float>(rng.uniform()) - 0.5f;
  return x;
}

}  // namespace

std::vector<PrefillBenchRow> bench_prefill(const PrefillBenchOptions& options, ThreadPool& pool) {
  const ModelConfig& c = options.shape;
  const std::int64_t tokens = options.tokens, keys = options.context, d = c.head_dim, hidden = c.hidden;
  const std::vector<float> q = random_numbers(tokens * c.query_heads * d);
  const std::vector<float> numbers = random_numbers(keys * d), w32 = random_numbers(hidden * hidden);
  const std::int64_t kv_bytes = keys * d * bytes_of(options.kv_type);
  std::vector<std::byte> stored(static_cast<std::size_t>(2 * c.kv_heads * kv_bytes));
  const std::vector<float> scales(static_cast<std::size_t>(keys), 0.01f);
  std::vector<KvRows> kv;
  for (int part = 0; part < 2 * c.kv_heads; ++part)
    kernels().narrow(numbers.data(), keys * d, options.kv_type, stored.data() + part * kv_bytes);
  for (int h = 0; h < c.kv_heads; ++h)
    kv.push_back({options.kv_type, stored.data() + 2 * h * kv_bytes, stored.data() + (2 * h + 1) * kv_bytes,
                  scales.data(), scales.data(), keys, static_cast<int>(d)});
  std::vector<std::byte> w(static_cast<std::size_t>(hidden * hidden * bytes_of(options.weight_type)));
  kernels().narrow(w32.data(), hidden * hidden, options.weight_type, w.data());
  std::vector<float> o(q.size()), x = random_numbers(tokens * hidden), y(x.size());
  OnednnGemm yardstick(tokens, hidden, hidden, pool.size());

  std::vector<double> attention, gemm, onednn;
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {  // the first warms up and is dropped
    check_cancel();
    const double a = microseconds([&] {
      attend_prefill(q, tokens, c.query_heads, kv, 1.0f / std::sqrt(static_cast<float>(d)), o.data(), nullptr,
                     pool);
    });
    const double g = microseconds([&] {
      matmul({x.data(), tokens, hidden}, w.data(), options.weight_type, hidden, {y.data(), tokens, hidden},
             pool);
    });
    set_openmp_threads(pool.size());
    const double r = microseconds([&] { yardstick.run(); });
    std::this_thread::sleep_for(
        std::chrono::milliseconds(50));  // OpenMP's threads spin for a while after their work
    if (repeat == 0) continue;
    attention.push_back(a), gemm.push_back(g), onednn.push_back(r);
  }
  const double seen = 0.5 * static_cast<double>(tokens) * static_cast<double>(2 * keys - tokens + 1);
  const double gemm_flops = 2.0 * static_cast<double>(tokens * hidden) * static_cast<double>(hidden);
  std::vector<PrefillBenchRow> rows = {
      row_of("attention", 4.0 * static_cast<double>(d * c.query_heads) * seen, attention),
      row_of("gemm", gemm_flops, gemm), row_of("onednn bf16 gemm", gemm_flops, onednn)};
  for (PrefillBenchRow& row : rows) row.of_onednn = row.gflops / rows.back().gflops;
  return rows;
}

}  // namespace lode
