// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/prefill.h"

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <oneapi/dnnl/dnnl.hpp>
#include <thread>

#include "base/cancel.h"
#include "base/hold_signals.h"
#include "base/threads.h"
#include "gpu/backend.h"
#include "kernels/delta_rule.h"
#include "kernels/kernels.h"
#include "kernels/q4_rows.h"
#include "lab/bench/common.h"
#include "model/linear.h"

namespace lode {
namespace {

/// oneDNN's own threads, for the yardstick only: the rest of the program calls it on one thread at a time.
void set_openmp_threads(int threads) {
  using SetThreads = void (*)(int);
  if (const auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(threads);
}

/// y [m, n] = x [m, k] w [k, n] with float32 sums, weights in the layout that oneDNN likes best. All are bf16 where oneDNN
/// multiplies those on this CPU (it needs AVX-512), else float32.
class OnednnGemm {
 public:
  OnednnGemm(std::int64_t m, std::int64_t n, std::int64_t k, int threads)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    set_openmp_threads(threads);
    try {
      prepare(m, n, k, dnnl::memory::data_type::bf16);
    } catch (const dnnl::error& error) {
      if (error.status != dnnl_unimplemented) throw;
      prepare(m, n, k, dnnl::memory::data_type::f32);
    }
  }
  std::string name() const {
    return type_ == dnnl::memory::data_type::bf16 ? "onednn bf16 gemm" : "onednn f32 gemm";
  }
  void run() {
    const HoldSignals held;
    matmul_.execute(stream_, {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, w_}, {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  void prepare(std::int64_t m, std::int64_t n, std::int64_t k, dnnl::memory::data_type type) {
    using dnnl::memory;
    const memory::desc x({m, k}, type, memory::format_tag::ab);
    const memory::desc w({k, n}, type, memory::format_tag::any);
    const memory::desc y({m, n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(x, w, y), engine_);
    type_ = type;
    x_ = memory(x, engine_), w_ = memory(plan.weights_desc(), engine_), y_ = memory(y, engine_);
    fill(x_), fill(w_);
    matmul_ = dnnl::matmul(plan);
  }
  /// Ones, or with float32 numbers near one: oneDNN leaves fresh memory as it is.
  static void fill(dnnl::memory& to) {
    std::fill_n(static_cast<std::uint16_t*>(to.get_data_handle()), to.get_desc().get_size() / 2,
                std::uint16_t{0x3f80});
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::memory::data_type type_{};
  dnnl::memory x_, w_, y_;
  dnnl::matmul matmul_;
};

PrefillBenchRow row_of(std::string what, double flops, const std::vector<double>& us) {
  const double time = median(us);
  return {.what = std::move(what), .median_ms = 1e-3 * time, .gflops = 1e-3 * flops / time};
}

/// Operations of a prefill of so many tokens: layers' weights, and each query with the keys up to its own.
double model_flops(const ModelConfig& c, std::int64_t tokens) {
  const auto n = static_cast<double>(tokens);
  const std::int64_t heads = 2 * c.query_heads + 2 * c.kv_heads;  // of Q and O, K and V
  const auto weights = static_cast<double>(c.hidden * (heads * c.head_dim + 3 * c.intermediate));
  return c.layers * (2 * n * weights + 4.0 * c.query_heads * c.head_dim * n * (n + 1) / 2);
}

/// oneDNN's product of [m, n] by [n, n].
PrefillBenchRow onednn_rate(std::int64_t m, std::int64_t n, int threads, int repeats) {
  OnednnGemm yardstick(m, n, n, threads);
  std::vector<double> times;
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    const double us = microseconds([&] { yardstick.run(); });
    if (repeat > 0) times.push_back(us);
  }
  return row_of(yardstick.name(), 2.0 * static_cast<double>(m * n) * static_cast<double>(n), times);
}

std::vector<float> random_numbers(std::int64_t n) {
  Rng rng(7);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = static_cast<float>(rng.uniform()) - 0.5f;
  return x;
}

void write_row(const float* x, int d, DType type, std::byte* to) {
  if (type == DType::q4) return narrow_q4(x, d, to);
  kernels().narrow(x, d, type, to);
}

/// The delta rule of a recurrent layer, whose products are apart: 7 operations a token and number of its states.
PrefillBenchRow delta_rule_row(const DeltaPlan& d, std::int64_t tokens, int repeats, ThreadPool& pool) {
  const std::int64_t channels = d.channels(), numbers = d.key_dim * d.values(),
                     slices = (d.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  std::vector<float> qkv = random_numbers(tokens * channels), beta = random_numbers(tokens * d.value_heads);
  for (float& x : qkv) x *= 3.5f / std::sqrt(static_cast<float>(d.key_dim));  // keys of about length 1
  for (float& x : beta) x += 0.5f;
  const std::vector<float> decay(beta.size(), 0.97f), before(static_cast<std::size_t>(numbers));
  std::vector<float> after(before.size()), o(static_cast<std::size_t>(tokens * d.values()));
  const auto run = [&](std::int64_t item, int) {
    const std::int64_t head = item / slices, first = item % slices * kDeltaColumns,
                       key = head * d.key_heads / d.value_heads * d.key_dim,
                       value = head * d.value_dim + first, state = head * d.key_dim * d.value_dim + first;
    delta_kernels().delta_rule({.q = qkv.data() + key,
                                .k = qkv.data() + d.keys() + key,
                                .v = qkv.data() + 2 * d.keys() + value,
                                .stride = channels,
                                .decay = decay.data() + head,
                                .beta = beta.data() + head,
                                .gate_stride = d.value_heads,
                                .tokens = tokens,
                                .before = before.data() + state,
                                .after = after.data() + state,
                                .state_stride = d.value_dim,
                                .key_dim = d.key_dim,
                                .columns = std::min(kDeltaColumns, d.value_dim - first),
                                .o = o.data() + value,
                                .o_stride = d.values()});
  };
  std::vector<double> times;
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    const double us = microseconds([&] { pool.for_each(d.value_heads * slices, run); });
    if (repeat > 0) times.push_back(us);
  }
  return row_of("delta rule", 7.0 * static_cast<double>(tokens * numbers), times);
}

}  // namespace

std::vector<PrefillBenchRow> bench_prefill(const PrefillBenchOptions& options, ThreadPool& pool) {
  const ModelConfig& c = options.shape;
  const std::int64_t tokens = options.tokens, keys = options.context, d = c.head_dim, hidden = c.hidden;
  const std::vector<float> q = random_numbers(tokens * c.query_heads * d);
  const std::vector<float> numbers = random_numbers(keys * d), w32 = random_numbers(hidden * hidden);
  const std::int64_t row_bytes = row_bytes_of(options.kv_type, d), kv_bytes = keys * row_bytes;
  std::vector<std::byte> stored(static_cast<std::size_t>(2 * c.kv_heads * kv_bytes));
  const std::vector<float> scales(static_cast<std::size_t>(keys), 0.01f);
  std::vector<KvRows> kv;
  for (int part = 0; part < 2 * c.kv_heads; ++part)
    for (std::int64_t i = 0; i < keys; ++i)
      write_row(numbers.data() + i * d, static_cast<int>(d), options.kv_type,
                stored.data() + part * kv_bytes + i * row_bytes);
  for (int h = 0; h < c.kv_heads; ++h)
    kv.push_back({options.kv_type, stored.data() + 2 * h * kv_bytes, stored.data() + (2 * h + 1) * kv_bytes,
                  scales.data(), scales.data(), keys, static_cast<int>(d)});
  std::vector<std::byte> w(static_cast<std::size_t>(hidden * hidden * bytes_of(options.weight_type)));
  kernels().narrow(w32.data(), hidden * hidden, options.weight_type, w.data());
  const Weight weight = {
      .data = w.data(), .type = weight_type_of(options.weight_type), .rows = hidden, .cols = hidden};
  LinearLayers linear(pool);
  linear.add_rows(tokens, false, options.kv_type == DType::f32);
  std::vector<float> o(q.size()), x = random_numbers(tokens * hidden), y(x.size());
  OnednnGemm yardstick(tokens, hidden, hidden, pool.size());

  std::vector<double> attention, gemm, onednn;
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {  // the first warms up and is dropped
    check_cancel();
    const double a = microseconds([&] {
      attend_prefill(q, tokens, c.query_heads, kv, 1.0f / std::sqrt(static_cast<float>(d)), o.data(), nullptr,
                     pool);
    });
    const double g = microseconds([&] { linear(x, {{&weight, nullptr, &y}}); });
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
      row_of("gemm", gemm_flops, gemm)};
  if (!c.plan.recurrent_floats().empty())
    rows.push_back(delta_rule_row(c.plan.delta, tokens, options.repeats, pool));
  rows.push_back(row_of(yardstick.name(), gemm_flops, onednn));
  for (PrefillBenchRow& row : rows) row.of_gemm = row.gflops / rows.back().gflops;
  return rows;
}

std::vector<PrefillBenchRow> bench_model_prefill(const std::shared_ptr<const Model>& model,
                                                 const ContextOptions& options, std::int64_t tokens,
                                                 int repeats,
                                                 const std::function<void(std::string_view)>& note) {
  constexpr std::int64_t kWarmUp = 8192;  // tokens
  const ModelConfig& c = model->config();
  Context context(model, with_room(*model, options, std::max(options.max_tokens, tokens), note));
  Rng rng(7);
  std::vector<TokenId> text(static_cast<std::size_t>(tokens));
  for (TokenId& t : text) t = static_cast<TokenId>(rng.below(static_cast<std::uint64_t>(c.vocab)));
  std::vector<double> times;
  context.prefill(std::span(text).first(static_cast<std::size_t>(std::min(tokens, kWarmUp))));
  for (int repeat = 0; repeat < repeats; ++repeat) {
    context.roll_back(0);
    times.push_back(microseconds([&] { context.prefill(text); }));
  }
  PrefillBenchRow whole = row_of("model", model_flops(c, tokens), times);
  whole.tokens_per_second = 1e3 * static_cast<double>(tokens) / whole.median_ms;
  std::vector<PrefillBenchRow> rows = {whole};
  if (options.device == Device::cuda) {
    constexpr std::int64_t kSide = 8192;
    const double rate = gpu_matrix_rate(kSide);
    if (rate == 0) return rows;
    rows.push_back({.what = "cublaslt bf16 gemm",
                    .median_ms = 1e3 * 2 * std::pow(static_cast<double>(kSide), 3) / rate,
                    .gflops = 1e-9 * rate});
  } else {
    rows.push_back(onednn_rate(2048, std::max<std::int64_t>(1024, c.hidden), model->pool().size(), repeats));
  }
  for (PrefillBenchRow& row : rows) row.of_gemm = row.gflops / rows.back().gflops;
  return rows;
}

}  // namespace lode
