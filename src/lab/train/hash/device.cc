// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/cancel.h"
#include "base/text.h"
#include "base/threads.h"
#include "gpu/backend.h"
#include "gpu/train/hash.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "kernels/sgemm.h"
#include "kv/store.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kKeyBlock = 4096;  // keys widened and scored at a time

/// What both devices read: keys and values of the prompt, and queries by head.
class Reader {
 public:
  explicit Reader(const HashWork& work) : work_(work) {}

  int group() const { return work_.config.query_heads / work_.config.kv_heads; }
  std::int64_t dim() const { return work_.config.head_dim; }
  std::int64_t layer_of(std::int64_t head) const { return head / work_.config.kv_heads; }
  const KvRows& rows(std::int64_t head) const {
    return work_.kv.layer(static_cast<int>(layer_of(head)))
        .heads[static_cast<std::size_t>(head % work_.config.kv_heads)];
  }
  const StepQueries& queries(const HashSeries& series, std::int64_t step, std::int64_t head) const {
    return (*series.queries)[static_cast<std::size_t>(step)][static_cast<std::size_t>(layer_of(head))];
  }

  /// The query of head g of a group, of all its layer's.
  std::span<const float> query(const std::vector<float>& all, std::int64_t token, std::int64_t head,
                               int g) const {
    const std::int64_t at = token * work_.config.query_heads + head % work_.config.kv_heads * group() + g;
    return std::span(all).subspan(static_cast<std::size_t>(at * dim()), static_cast<std::size_t>(dim()));
  }

  /// As attention sees them, times its scale: [G, tokens, d].
  void scored_queries(const StepQueries& queries, std::int64_t head, std::int64_t further,
                      std::span<float> out) const {
    gather(queries.roped, std::ssize(queries.positions), head, out);
    if (further > 0) turn(out, dim(), angles_of(work_.rope, further));
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim()));
    for (float& x : out) x *= scale;
  }
  /// As functions see them: [G, tokens, d].
  void query_inputs(const StepQueries& queries, std::int64_t head, const HashDraw& draw,
                    std::span<float> out) const {
    gather(queries.as_trained, std::ssize(queries.positions), head, out);
    if (!work_.settings.scheme.roped) return;
    if (draw.further > 0) turn(out, dim(), angles_of(work_.rope, draw.further));
    if (draw.shifted > 0) turn(out, dim(), angles_of(work_.rope, draw.shifted));
  }

  void key(std::int64_t head, Position position, std::span<float> out) const {
    read_stored_keys({&rows(head), 1}, position, nullptr, out);
  }
  void key_inputs(std::int64_t head, Position position, float* out) const {
    read_key_inputs(work_.settings.scheme, {&rows(head), 1}, position, &work_.rope, out,
                    work_.settings.scheme.key_inputs(work_.config.head_dim));
  }
  /// log |v|; `value` [d] is what is read.
  float log_norm(std::int64_t head, Position position, std::span<float> value) const {
    read_stored_values({&rows(head), 1}, position, value);
    return 0.5f * std::log(std::max(kernels().dot(value.data(), value.data(), dim()), 1e-30f));
  }

 private:
  void gather(const std::vector<float>& all, std::int64_t tokens, std::int64_t head,
              std::span<float> out) const {
    auto to = out.begin();
    for (int g = 0; g < group(); ++g) {
      for (std::int64_t t = 0; t < tokens; ++t) to = std::ranges::copy(query(all, t, head, g), to).out;
    }
  }

  const HashWork& work_;
};

// ---- On the CPU ------------------------------------------------------------------------------------------

class OnCpu final : public HashDevice {
 public:
  explicit OnCpu(const HashWork& work) : work_(work), log_norms_(work.heads.size()) {}

  void begin_prompt() override {
    for (std::vector<float>& norms : log_norms_) norms.clear();
  }

  std::vector<double> take(const HashSeries& series) override {
    const std::int64_t heads = std::ssize(work_.heads);
    std::vector<double> losses;
    for (std::int64_t step = 0; step < std::ssize(*series.queries); ++step) {
      const std::size_t first = losses.size();
      losses.resize(first + work_.heads.size());
      work_.pool.for_each(heads, [&](std::int64_t head, int) {
        check_cancel();
        Rng rng = series.rng(step, head);
        const HashExamples seen = examples(series, step, head, rng);
        losses[first + static_cast<std::size_t>(head)] = work_.heads[static_cast<std::size_t>(head)].step(
            seen, series.class1_weight, series.rate_scale(step));
      });
    }
    return losses;
  }

 private:
  HashExamples examples(const HashSeries& series, std::int64_t step, std::int64_t head, Rng& rng);
  std::vector<float> scores(const HashSeries& series, const StepQueries& queries, std::int64_t head,
                            std::int64_t further);

  HashWork work_;
  Reader reader_{work_};
  std::vector<std::vector<float>> log_norms_;  // [heads][keys] log |v| of the running prompt
};

/// Logits of [G][tokens][keys of [sink, keys_end)], with log |v| added for targets by value.
std::vector<float> OnCpu::scores(const HashSeries& series, const StepQueries& queries, std::int64_t head,
                                 std::int64_t further) {
  const std::int64_t d = reader_.dim(), sink = work_.settings.dense.sink, n = series.keys_end - sink,
                     rows = reader_.group() * std::ssize(queries.positions);
  std::vector<float> q(static_cast<std::size_t>(rows * d));
  reader_.scored_queries(queries, head, further, q);
  std::vector<float> scores(static_cast<std::size_t>(rows * n)),
      keys(static_cast<std::size_t>(kKeyBlock * d));
  for (std::int64_t first = 0; first < n; first += kKeyBlock) {
    const std::int64_t count = std::min(kKeyBlock, n - first);
    for (std::int64_t i = 0; i < count; ++i)
      reader_.key(head, static_cast<Position>(sink + first + i),
                  std::span(keys).subspan(static_cast<std::size_t>(i * d), static_cast<std::size_t>(d)));
    sgemm(rows, count, d, {q.data(), d}, {keys.data(), d, true}, 0.0f, scores.data() + first, n);
  }
  if (!work_.settings.by_value) return scores;
  std::vector<float>& norms = log_norms_[static_cast<std::size_t>(head)];
  std::vector<float> value(static_cast<std::size_t>(d));
  while (std::ssize(norms) < n)
    norms.push_back(reader_.log_norm(head, static_cast<Position>(sink + std::ssize(norms)), value));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < n; ++i)
      scores[static_cast<std::size_t>(row * n + i)] += norms[static_cast<std::size_t>(i)];
  }
  return scores;
}

HashExamples OnCpu::examples(const HashSeries& series, std::int64_t step, std::int64_t head, Rng& rng) {
  const HashSettings& settings = work_.settings;
  const StepQueries& queries = reader_.queries(series, step, head);
  const HashDraw draw = draw_step(settings, series.keys_end, rng);
  const std::vector<float> all = scores(series, queries, head, draw.further);
  const auto sink = static_cast<Position>(settings.dense.sink);
  const std::int64_t d = reader_.dim(), n = series.keys_end - sink, tokens = std::ssize(queries.positions);
  const auto end_of = [&](std::int64_t t) {
    return far_end(settings, queries.positions[static_cast<std::size_t>(t)], series.keys_end);
  };
  std::vector<std::vector<Position>> pivotal(static_cast<std::size_t>(reader_.group() * tokens));
  std::vector<Position> rows = draw.others;
  for (std::size_t i = 0; i < pivotal.size(); ++i) {
    const std::int64_t far = end_of(static_cast<std::int64_t>(i) % tokens) - sink;
    top_k(std::span(all).subspan(i * static_cast<std::size_t>(n), static_cast<std::size_t>(far)),
          settings.top, sink, pivotal[i]);
    rows.insert(rows.end(), pivotal[i].begin(), pivotal[i].end());
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());

  HashExamples seen = {
      .tokens = tokens, .keys = std::ssize(rows), .queries = {}, .key_inputs = {}, .labels = {}};
  const std::int64_t inputs = settings.scheme.key_inputs(work_.config.head_dim);
  seen.key_inputs.resize(static_cast<std::size_t>(seen.keys * inputs));
  for (std::size_t i = 0; i < rows.size(); ++i)
    reader_.key_inputs(head, rows[i], seen.key_inputs.data() + static_cast<std::int64_t>(i) * inputs);
  if (settings.scheme.roped && draw.shifted > 0)
    turn(seen.key_inputs, inputs, angles_of(work_.rope, draw.shifted));
  std::vector<float> of_group(static_cast<std::size_t>(reader_.group() * tokens * d));
  reader_.query_inputs(queries, head, draw, of_group);
  for (int g = 0; g < reader_.group(); ++g) {
    const auto own = of_group.begin() + g * tokens * d;
    seen.queries.emplace_back(own, own + tokens * d);
    std::vector<std::uint8_t>& labels = seen.labels.emplace_back();
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::vector<Position>& own_pivotal = pivotal[static_cast<std::size_t>(g * tokens + t)];
      for (const Position row : rows) {
        labels.push_back(row >= end_of(t) ? HashExamples::kLeftOut
                         : std::binary_search(own_pivotal.begin(), own_pivotal.end(), row)
                             ? HashExamples::kPivotal
                             : HashExamples::kOther);
      }
    }
  }
  return seen;
}

// ---- On a GPU --------------------------------------------------------------------------------------------

GpuHashShape shape_of(const HashWork& work) {
  const HashSettings& settings = work.settings;
  const int group = work.config.query_heads / work.config.kv_heads;
  const AdamOptions adam;
  return {.heads = std::ssize(work.heads),
          .group = group,
          .key_functions = settings.scheme.per_query_head ? group : 1,
          .head_dim = work.config.head_dim,
          .key_inputs = settings.scheme.key_inputs(work.config.head_dim),
          .bits = settings.scheme.bits,
          .widths = settings.widths,
          .silu = settings.scheme.activation == HashNet::Activation::silu,
          .softmax = settings.loss == PivotalLoss::softmax,
          .by_value = settings.by_value,
          .own_inputs = !settings.scheme.roped || settings.scheme.values != HashScheme::Values::off,
          .top = settings.top,
          .beta1 = adam.beta1,
          .beta2 = adam.beta2};
}

GpuHashSizes sizes_of(const HashWork& work) {
  const std::int64_t keys = std::max<std::int64_t>(1, work.most_tokens - work.settings.dense.sink);
  return {.tokens = std::min(work.settings.queries, work.most_tokens),
          .keys = keys,
          .others = work.settings.others > 0 ? std::min(work.settings.others, keys) : keys};
}

class OnGpu final : public HashDevice {
 public:
  OnGpu(const HashWork& work, std::int64_t memory)
      : work_(work), gpu_(make_gpu_hash_training(shape_of(work), sizes_of(work), memory)) {}

  std::vector<double> take(const HashSeries& series) override {
    if (!loaded_) {
      each_function([&](std::int64_t head, std::int64_t index, const GpuHashFunction& function) {
        gpu_->put(head, index, function);
      });
      loaded_ = true;
    }
    const std::int64_t heads = std::ssize(work_.heads), steps = std::ssize(*series.queries);
    std::vector<double> losses(static_cast<std::size_t>(steps * heads));
    for (std::int64_t first = 0; first < heads; first += gpu_->heads_at_once()) {
      const std::int64_t some = std::min(gpu_->heads_at_once(), heads - first);
      const std::vector<double> own = take_some(series, first, some);
      for (std::int64_t step = 0; step < steps; ++step)
        std::copy_n(own.begin() + step * some, some, losses.begin() + step * heads + first);
    }
    for (const double loss : losses) expect_number(loss);
    return losses;
  }

  void store() override {
    if (!loaded_) return;
    each_function([&](std::int64_t head, std::int64_t index, const GpuHashFunction& function) {
      gpu_->get(head, index, function);
    });
  }

 private:
  /// Steps of heads [first, first + some).
  std::vector<double> take_some(const HashSeries& series, std::int64_t first, std::int64_t some) {
    const std::int64_t steps = std::ssize(*series.queries), n = series.keys_end - work_.settings.dense.sink;
    gpu_->begin(first, some, n, steps,
                [&](std::int64_t begin, std::int64_t end, std::span<const GpuHashKeys> keys) {
                  work_.pool.for_each(end - begin, [&](std::int64_t i, int) {
                    check_cancel();
                    write_keys(first + begin + i, n, keys[static_cast<std::size_t>(i)]);
                  });
                });
    for (std::int64_t step = 0; step < steps; ++step) {
      check_cancel();
      const std::vector<Position>& positions = reader_.queries(series, step, first).positions;
      const std::vector<GpuHashDraw> draws = gpu_->draw(std::ssize(positions));
      work_.pool.for_each(some, [&](std::int64_t i, int) {
        write_draw(series, step, first + i, draws[static_cast<std::size_t>(i)]);
      });
      std::vector<std::int32_t> far_ends;
      for (const Position position : positions)
        far_ends.push_back(far_end(work_.settings, position, series.keys_end) -
                           static_cast<Position>(work_.settings.dense.sink));
      const Adam::Update update = count_step(first, some, series.rate_scale(step));
      gpu_->take({.far_ends = far_ends,
                  .class1_weight = static_cast<float>(series.class1_weight),
                  .rate = update.rate,
                  .keep = update.keep,
                  .epsilon = update.epsilon});
    }
    return gpu_->finish();
  }

  void write_keys(std::int64_t head, std::int64_t n, const GpuHashKeys& keys) const {
    const auto d = static_cast<std::size_t>(reader_.dim());
    const std::int64_t inputs = work_.settings.scheme.key_inputs(work_.config.head_dim);
    std::vector<float> value(d);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto position = static_cast<Position>(work_.settings.dense.sink + i);
      reader_.key(head, position, keys.scored.subspan(static_cast<std::size_t>(i) * d, d));
      if (!keys.inputs.empty()) reader_.key_inputs(head, position, keys.inputs.data() + i * inputs);
      if (!keys.log_norms.empty())
        keys.log_norms[static_cast<std::size_t>(i)] = reader_.log_norm(head, position, value);
    }
  }

  void write_draw(const HashSeries& series, std::int64_t step, std::int64_t head,
                  const GpuHashDraw& to) const {
    Rng rng = series.rng(step, head);
    const HashDraw draw = draw_step(work_.settings, series.keys_end, rng);
    const StepQueries& queries = reader_.queries(series, step, head);
    reader_.scored_queries(queries, head, draw.further, to.scored);
    reader_.query_inputs(queries, head, draw, to.inputs);
    const std::int64_t shifted = work_.settings.scheme.roped ? draw.shifted : 0;
    std::ranges::copy(cosines_and_sines(angles_of(work_.rope, shifted)), to.turn.begin());
    std::ranges::transform(draw.others, to.others.begin(), [&](Position position) {
      return position - static_cast<Position>(work_.settings.dense.sink);
    });
    *to.others_count = static_cast<std::int32_t>(draw.others.size());
  }

  /// All functions have taken as many steps.
  Adam::Update count_step(std::int64_t first, std::int64_t some, double rate_scale) const {
    Adam::Update update;
    for (std::int64_t i = first; i < first + some; ++i) {
      HashHead& head = work_.heads[static_cast<std::size_t>(i)];
      for (auto* functions : {&head.queries(), &head.keys()})
        for (HashFunction& function : *functions) update = function.adam().count_step(rate_scale);
    }
    return update;
  }

  template <class Body>
  void each_function(const Body& body) const {
    for (std::size_t i = 0; i < work_.heads.size(); ++i) {
      std::int64_t index = 0;
      for (auto* functions : {&work_.heads[i].queries(), &work_.heads[i].keys()}) {
        for (HashFunction& function : *functions) {
          GpuHashFunction arrays;
          for (Adam::Moments& m : function.adam().moments())
            arrays.push_back({.value = m.parameter->value, .first = m.first, .second = m.second});
          body(static_cast<std::int64_t>(i), index++, arrays);
        }
      }
    }
  }

  HashWork work_;
  Reader reader_{work_};
  std::unique_ptr<GpuHashTraining> gpu_;
  bool loaded_ = false;
};

/// The rest is for the prefill.
std::int64_t memory_for_steps(const HashWork& work) {
  return (gpu_info().free_bytes - work.kv.shape().token_bytes() * work.most_tokens) / 2;
}

}  // namespace

std::unique_ptr<HashDevice> make_hash_device(Device device, const HashWork& work, std::string& why_host,
                                             std::int64_t memory) {
  if (device != Device::cuda) return std::make_unique<OnCpu>(work);
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) throw RunError("no GPU to use: " + gpu.why);
  if (memory == 0) memory = memory_for_steps(work);
  const GpuHashBytes bytes = gpu_hash_bytes(shape_of(work), sizes_of(work));
  if (bytes.functions + bytes.head <= memory) return std::make_unique<OnGpu>(work, memory);
  why_host = fmt::format(
      "the GPU reads the prompts, and the host takes the steps: those of one head would take {} of GPU "
      "memory "
      "beside {} for all functions, and {} of it are left; fewer --queries, --others or --tokens take less",
      human_bytes(bytes.head), human_bytes(bytes.functions), human_bytes(std::max<std::int64_t>(0, memory)));
  return std::make_unique<OnCpu>(work);
}

}  // namespace lode
