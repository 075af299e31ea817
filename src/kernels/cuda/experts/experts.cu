// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/tile_linear.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256;

std::int64_t rounded_up(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}
unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

/// Products of gate and up of slots.
struct GateUpSlots {
  const float *gate = nullptr, *up = nullptr;            // [slots, width]
  const float *gate_bias = nullptr, *up_bias = nullptr;  // [E, width]
  std::int64_t slots = 0, width = 0;
};

__global__ __launch_bounds__(kThreads) void activate_kernel(const GateUpSlots in, const int* slot_expert,
                                                            const Activation activation, void* act,
                                                            DType type) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= in.slots * in.width) return;
  const std::int64_t slot = i / in.width, column = i % in.width,
                     of_bias = slot_expert[slot] * in.width + column;
  float gate = in.gate[i], up = in.up[i];
  if (in.gate_bias != nullptr) gate += in.gate_bias[of_bias];
  if (in.up_bias != nullptr) up += in.up_bias[of_bias];
  store_as(act, type, i, activate(activation, gate, up));
}

/// What experts gave for the slots of each token, in their order, and what all tokens went through.
struct Sum {
  const float* out = nullptr;          // [n * used, D]
  const float* bias = nullptr;         // [E, D] still to be added; or null
  const float* shared = nullptr;       // [n, D]; or null
  const float* shared_gate = nullptr;  // [n] its logits; or null
  std::int64_t hidden = 0;
  float multiplier = 1.0f;
  bool adds = true;  ///< to what is there
};

__global__ __launch_bounds__(kThreads) void sum_kernel(const Sum in, const Routing routing, float* to) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, token = blockIdx.y;
  release_successor();
  wait_for_predecessor();
  if (column >= in.hidden) return;
  float sum = 0.0f;
  if (in.shared != nullptr) sum = in.shared[token * in.hidden + column];
  if (in.shared_gate != nullptr) sum *= 1.0f / (1.0f + expf(-in.shared_gate[token]));
  for (int j = 0; j < routing.used; ++j) {
    const std::int64_t slot = token * routing.used + j;
    float own = in.out[slot * in.hidden + column];
    if (in.bias != nullptr) own += in.bias[routing.slot_expert[slot] * in.hidden + column];
    sum = fmaf(routing.slot_weight[slot], own, sum);
  }
  float& x = to[token * in.hidden + column];
  x = in.adds ? x + in.multiplier * sum : sum;
}

/// mixed = norm(mixed) + norm(dense), each with gains of its own; a block a row.
__global__ __launch_bounds__(kThreads) void join_kernel(const float* dense, const Vector dense_gain,
                                                        const Vector mixed_gain, float eps,
                                                        std::int64_t hidden, float* mixed) {
  __shared__ double2 partial[kThreads / 32];
  const std::int64_t begin = std::int64_t{blockIdx.x} * hidden;
  double2 sums = {};
  for (std::int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    const double a = double{dense[begin + i]}, b = double{mixed[begin + i]};
    sums.x += a * a, sums.y += b * b;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sums.x += __shfl_xor_sync(~0u, sums.x, offset);
    sums.y += __shfl_xor_sync(~0u, sums.y, offset);
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = {};
  for (const double2 p : partial) sums.x += p.x, sums.y += p.y;
  const auto inverse = [&](double sum) {
    return static_cast<float>(1.0 / sqrt(sum / static_cast<double>(hidden) + static_cast<double>(eps)));
  };
  const float of_dense = inverse(sums.x), of_mixed = inverse(sums.y);
  for (std::int64_t i = threadIdx.x; i < hidden; i += kThreads)
    mixed[begin + i] =
        dense[begin + i] * of_dense * dense_gain[i] + mixed[begin + i] * of_mixed * mixed_gain[i];
}

DType operand_type(const DeviceWeight& w, Precision precision) {
  return precision == Precision::exact || w.type == DType::f32 ? DType::f32 : w.type;
}

}  // namespace

Experts::Experts(Linear& linear, StreamHandle stream, Precision precision)
    : linear_(linear), stream_(stream), precision_(precision) {}

Experts::Scratch Experts::layout(const ExpertSizes& sizes, std::int64_t rows, Precision precision) {
  constexpr std::int64_t kMostPanel = std::int64_t{128} << 20;
  const std::int64_t n = std::min(rows, kMostRows), slots = n * sizes.plan.used,
                     number = precision == Precision::exact ? 4 : 2,
                     matrix = sizes.panel_rows * sizes.panel_cols * number;
  Scratch s;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t& place, std::int64_t bytes) {
    place = end;
    end += rounded_up(bytes);
  };
  take(s.routing, routing_bytes(n, sizes.plan));
  take(s.logits, n * sizes.plan.count * 4);
  take(s.shared, n * sizes.hidden * 4);
  take(s.shared_gate, n * 4);
  take(s.normed, n * sizes.hidden * 4);
  take(s.operand, n * sizes.hidden * 4);
  take(s.gate, slots * sizes.width * 4);
  take(s.up, slots * sizes.width * 4);
  take(s.act, slots * sizes.width * 4);
  take(s.out, slots * sizes.hidden * 4);
  take(s.panel, std::max(std::min(matrix * sizes.plan.count, kMostPanel), matrix));
  s.end = end;
  return s;
}

std::int64_t Experts::scratch_bytes(const ExpertSizes& sizes, std::int64_t rows, Precision precision) {
  return sizes.plan.count == 0 ? 0 : layout(sizes, rows, precision).end;
}
void Experts::reserve(const ExpertSizes& sizes, std::int64_t rows) {
  if (sizes.plan.count == 0) return;
  places_ = layout(sizes, rows, precision_);
  reserved_rows_ = std::min(rows, kMostRows);
  panel_bytes_ = places_.end - places_.panel;
  scratch_ = Buffer(places_.end, "the experts' scratch");
  fill(at<void>(places_.routing), 0, places_.logits - places_.routing, stream_);
}

void Experts::add(const ExpertArguments& a, std::int64_t n, float* x) {
  const std::int64_t most = are_streamed(a, n) ? streamed_at_once(a) : reserved_rows_;
  for (std::int64_t first = 0; first < n; first += most)
    add_some(a, std::min(most, n - first), x + first * a.norm.cols);
}

/// Whether rows go through the experts few at a time, so that weights of those alone that they chose are read.
bool Experts::are_streamed(const ExpertArguments& a, std::int64_t n) const {
  const bool tiled = a.gate.all.tiled() || a.up.all.tiled() || a.down.all.tiled();
  if (n > (tiled ? kTiledRows : kFusedRows) || (tiled && precision_ == Precision::exact)) return false;
  return are_few(1, a.plan) && streamed_at_once(a) > 0;
}
std::int64_t Experts::streamed_at_once(const ExpertArguments& a) const {
  std::int64_t rows = std::min<std::int64_t>(kFewRows, reserved_rows_);
  for (const ExpertMatrices* m : {&a.gate, &a.up, &a.down})
    if (m->all.tiled()) rows = std::min(rows, tile_expert_rows_at_once(m->all));
  return rows;
}

void Experts::add_some(const ExpertArguments& a, std::int64_t n, float* x) {
  if (n > reserved_rows_) throw RunError("expected scratch of experts for more rows than were reserved");
  const Routing routing = routing_in(at<void>(places_.routing), n, a.plan);
  const bool few = n <= kFewRows && are_streamed(a, n);
  find_routing(a, n, x, few, routing);
  if (few)
    stream(a, n, x, routing);
  else
    multiply(a, n, x, routing);
  add_shared(a, n, few, x);
  add_sum(a, n, few && a.down.all.tiled(), routing, x);
}

/// `streamed`: what the experts put out has its bias.
void Experts::add_sum(const ExpertArguments& a, std::int64_t n, bool streamed, const Routing& routing,
                      float* x) {
  const bool apart = a.post_norm.data != nullptr,
             adds = !apart && a.addition.norm.data == nullptr && a.addition.factor == 1.0f;
  const Sum sum = {.out = at(places_.out),
                   .bias = streamed ? nullptr : a.down.bias,
                   .shared = apart || a.shared.gate.data == nullptr ? nullptr : at(places_.shared),
                   .shared_gate = a.shared_gate.data == nullptr ? nullptr : at(places_.shared_gate),
                   .hidden = a.norm.cols,
                   .multiplier = a.addition.multiplier,
                   .adds = adds};
  const dim3 grid(blocks_for(a.norm.cols), static_cast<unsigned>(n));
  float* const mixed = at(places_.normed);  // whose rows have been through the experts
  EarlyLaunch(grid, kThreads, 0, 1, stream_)(sum_kernel, sum, routing, adds ? x : mixed);
  if (apart) {
    Launch(static_cast<unsigned>(n), kThreads, 0, stream_)(join_kernel, at(places_.shared),
                                                           vector_of(a.shared_post_norm),
                                                           vector_of(a.post_norm), a.eps, a.norm.cols, mixed);
  }
  if (!adds) add_scaled(mixed, n, a.norm.cols, a.addition, x, stream_);
}

/// The router is computed in float32 whatever its rows go through: near scores choose other experts.
void Experts::find_routing(const ExpertArguments& a, std::int64_t n, const float* x, bool few,
                           const Routing& routing) {
  float* const logits = at(places_.logits);
  const RouterInput input = {logits, a.router_bias, a.choice_bias, a.factors};
  const DeviceWeight& norm = a.router_norm.data != nullptr ? a.router_norm : a.norm;
  if (few) {
    const bool gated = gate_is_routed(a, few);
    return route_few(a.plan,
                     {.x = x,
                      .norm = norm,
                      .eps = a.eps,
                      .w = static_cast<const float*>(a.router.data),
                      .input = input,
                      .shared_gate = gated ? static_cast<const float*>(a.shared_gate.data) : nullptr,
                      .shared_logits = at(places_.shared_gate)},
                     n, routing, stream_);
  }
  norm_rows({x, vector_of(norm), a.eps, n, norm.cols}, at<void>(places_.normed), DType::f32, stream_);
  gemm_f32({at(places_.normed), DType::f32, n, a.norm.cols},
           {a.router.data, a.router.type, a.router.rows, a.router.cols}, {}, false, logits, stream_);
  route(a.plan, input, n, routing, stream_);
}

/// Whether the router's launch makes the logits of the shared gate, too: it sees the same rows.
bool Experts::gate_is_routed(const ExpertArguments& a, bool few) {
  return few && a.shared_gate.data != nullptr && a.router_norm.data == nullptr &&
         a.shared_gate.type == DType::f32;
}

/// The feed-forward of every token, to be added with the experts'.
void Experts::add_shared(const ExpertArguments& a, std::int64_t n, bool few, float* x) {
  if (a.shared.gate.data == nullptr) return;
  Linear::MlpArguments mlp = a.shared;
  mlp.to = at(places_.shared);
  linear_.mlp(mlp, n, x);
  if (a.shared_gate.data != nullptr && !gate_is_routed(a, few))
    linear_.head(x, n, a.norm, a.eps, a.shared_gate, at(places_.shared_gate));
}

// ---- Few rows.

void Experts::stream(const ExpertArguments& a, std::int64_t n, const float* x, const Routing& routing) {
  const std::int64_t slots = n * a.plan.used, width = a.gate.rows();
  const int most_groups = static_cast<int>(std::min<std::int64_t>(a.plan.count, slots));
  stream_gate_and_up(a, n, x, routing);
  const StepInput act = {at(places_.act), {}, 0.0f, n, width};
  if (a.down.all.tiled()) {
    const bool known = a.gate.all.tiled() && a.gate.all.format == a.up.all.format;
    stream_expert_product(a.down.all, a.down.count, {a.down.bias, DType::f32}, act, at(places_.out),
                          {.routing = routing, .most_groups = most_groups, .by_slot = true, .known = known},
                          stream_);
    return;
  }
  multiply_few_grouped({.routing = routing,
                        .slots = slots,
                        .x = act.x,
                        .by_slot = true,
                        .w = a.down.all.data,
                        .w_type = a.down.all.type,
                        .rows = a.down.rows(),
                        .cols = width,
                        .experts = a.down.count,
                        .y = at(places_.out)},
                       most_groups, stream_);
}

void Experts::stream_gate_and_up(const ExpertArguments& a, std::int64_t n, const float* x,
                                 const Routing& routing) {
  const std::int64_t slots = n * a.plan.used, width = a.gate.rows(), hidden = a.norm.cols;
  ExpertTiles tiles = {.routing = routing,
                       .most_groups = static_cast<int>(std::min<std::int64_t>(a.plan.count, slots))};
  const StepInput input = {x, vector_of(a.norm), a.eps, n, hidden};
  const DeviceWeight &gate = a.gate.all, &up = a.up.all;
  if (gate.tiled() && gate.format == up.format) {
    GateUpStep<float> step;
    step.rows = width;
    step.cols = hidden;
    step.gate_bias = {a.gate.bias, DType::f32};
    step.up_bias = {a.up.bias, DType::f32};
    step.act = at<void>(places_.act);
    step.activation = a.activation;
    return stream_expert_gate_up(step, gate, up, a.gate.count, input, tiles, stream_);
  }
  float* const normed = at(places_.normed);
  norm_rows(input, normed, DType::f32, stream_);
  const auto one = [&](const ExpertMatrices& m, float* to) {
    if (m.all.tiled())
      return stream_expert_product(m.all, m.count, {}, {normed, {}, 0.0f, n, hidden}, to, tiles, stream_);
    multiply_few_grouped({.routing = routing,
                          .slots = slots,
                          .x = normed,
                          .w = m.all.data,
                          .w_type = m.all.type,
                          .rows = width,
                          .cols = hidden,
                          .experts = m.count,
                          .y = to},
                         tiles.most_groups, stream_);
  };
  one(a.gate, at(places_.gate));
  one(a.up, at(places_.up));
  activate_slots(a, slots, routing, at(places_.gate), at(places_.up), DType::f32);
}

// ---- Many rows.

void Experts::multiply(const ExpertArguments& a, std::int64_t n, const float* x, const Routing& routing) {
  const std::int64_t slots = n * a.plan.used, hidden = a.norm.cols;
  const auto product = [&](const ExpertMatrices& m, const void* input, DType type, bool by_slot, float* y) {
    multiply_panels(m, {.routing = routing,
                        .slots = slots,
                        .x = input,
                        .x_type = type,
                        .by_slot = by_slot,
                        .w = m.all.data,
                        .w_type = m.all.type,
                        .rows = m.rows(),
                        .cols = m.all.cols,
                        .y = y});
  };
  const DType of_gate = operand_type(a.gate.all, precision_), of_up = operand_type(a.up.all, precision_),
              type = operand_type(a.down.all, precision_);
  const StepInput input = {x, vector_of(a.norm), a.eps, n, hidden};
  norm_rows(input, at<void>(places_.operand), of_gate, stream_);
  product(a.gate, at<void>(places_.operand), of_gate, false, at(places_.gate));
  if (of_up != of_gate) norm_rows(input, at<void>(places_.operand), of_up, stream_);
  product(a.up, at<void>(places_.operand), of_up, false, at(places_.up));
  activate_slots(a, slots, routing, at(places_.gate), at(places_.up), type);
  product(a.down, at<void>(places_.act), type, true, at(places_.out));
}

/// Of as many experts at a time as a panel holds; those of 16 or 32 bits lie as they are multiplied.
void Experts::multiply_panels(const ExpertMatrices& m, GroupedProduct p) {
  if (!m.all.tiled()) {
    p.experts = m.count;
    return multiply_grouped(p, stream_);
  }
  const std::int64_t matrix = p.rows * p.cols * bytes_of(p.x_type);
  const int most = static_cast<int>(panel_bytes_ / matrix);
  LODE_ASSERT(most > 0);
  p.w = at<void>(places_.panel);
  p.w_type = p.x_type;
  for (p.first_expert = 0; p.first_expert < m.count; p.first_expert += most) {
    p.experts = std::min(most, m.count - p.first_expert);
    unpack_tiles(m.all.tiles(), p.first_expert * p.rows, p.experts * p.rows, at<void>(places_.panel),
                 p.x_type, stream_);
    multiply_grouped(p, stream_);
  }
}

void Experts::activate_slots(const ExpertArguments& a, std::int64_t slots, const Routing& routing,
                             const float* gate, const float* up, DType type) {
  const GateUpSlots in = {gate, up, a.gate.bias, a.up.bias, slots, a.gate.rows()};
  Launch(blocks_for(slots * in.width), kThreads, 0, stream_)(activate_kernel, in, routing.slot_expert,
                                                             a.activation, at<void>(places_.act), type);
}

}  // namespace lode::cuda
