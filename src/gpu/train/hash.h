// SPDX-License-Identifier: Apache-2.0
// Training steps of HashAttention's functions on the GPU, those of many heads side by side: the exact scores
// of a step's queries and their pivotal keys, both networks forward and backward, and Adam. The host draws
// what a step sees and turns the queries; a prompt's keys stay on the device for all its steps. Everything is
// float32, and sums have a fixed order: a run gives the same bits twice, however many heads are in a series.
// One thread at a time. RunError says what the GPU lacks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace lode {

/// The functions of a model's KV heads: `group` for the queries of each, and one for its keys, or as many.
struct GpuHashShape {
  std::int64_t heads = 0;  ///< of all layers
  std::int64_t group = 1, key_functions = 1;
  std::int64_t head_dim = 0, key_inputs = 0, bits = 32;
  std::vector<std::int64_t> widths;  ///< of hidden layers
  bool silu = true;                  ///< else relu
  bool softmax = false;              ///< else binary cross-entropy
  bool by_value = true;              ///< pivotal by score + log norm
  bool own_inputs = false;           ///< key functions see something else than the keys that are scored
  std::int64_t top = 32;
  double beta1 = 0.9, beta2 = 0.999;  ///< of Adam
};

/// The most that a step has.
struct GpuHashSizes {
  std::int64_t tokens = 0, keys = 0, others = 0;
};

/// Bytes of GPU memory that all functions take, and that the steps of one head take besides.
struct GpuHashBytes {
  std::int64_t functions = 0, head = 0;
};
GpuHashBytes gpu_hash_bytes(const GpuHashShape& shape, const GpuHashSizes& most);

/// A trained array with what Adam keeps of it.
struct GpuHashArray {
  std::span<float> value, first, second;
};
/// A function: weight and bias of each layer in turn.
using GpuHashFunction = std::vector<GpuHashArray>;

/// Where the keys of a head are to be written.
struct GpuHashKeys {
  std::span<float> scored;     // [keys, d] as attention sees them
  std::span<float> inputs;     // [keys, key_inputs]; empty unless own_inputs
  std::span<float> log_norms;  // [keys]; empty unless by_value
};

/// Where a head's part of a step is to be written.
struct GpuHashDraw {
  std::span<float> scored;         // [group, tokens, d] queries as attention sees them, times its scale
  std::span<float> inputs;         // [group, tokens, d] as functions see them
  std::span<float> turn;           // [d] cosines, then sines of the angles that key inputs turn by
  std::span<std::int32_t> others;  // [most others]
  std::int32_t* others_count = nullptr;
};

/// One step of the optimiser: of its tokens, how many of the prompt's keys are far; and Adam's numbers with
/// their corrections.
struct GpuHashStep {
  std::span<const std::int32_t> far_ends;  // [tokens], each 1 or more
  float class1_weight = 1;
  float rate = 0, keep = 1, epsilon = 0;
};

class GpuHashTraining {
 public:
  virtual ~GpuHashTraining() = default;
  /// How many heads a series has at most.
  virtual std::int64_t heads_at_once() const = 0;
  /// Function `index` of a head: its queries' first, then its keys'. Copied when the call returns.
  virtual void put(std::int64_t head, std::int64_t index, const GpuHashFunction& function) = 0;
  virtual void get(std::int64_t head, std::int64_t index, const GpuHashFunction& function) = 0;

  /// Begins a series of steps of heads [first, first + heads) over so many keys. `write(begin, end, keys)`
  /// writes those of heads [begin, end) of the series, keys[0] is the first one's.
  using WriteKeys =
      std::function<void(std::int64_t begin, std::int64_t end, std::span<const GpuHashKeys> keys)>;
  virtual void begin(std::int64_t first, std::int64_t heads, std::int64_t keys, std::int64_t steps,
                     const WriteKeys& write) = 0;
  /// Where the next step of so many tokens is to be written, by head of the series; then take() enqueues it.
  virtual std::vector<GpuHashDraw> draw(std::int64_t tokens) = 0;
  virtual void take(const GpuHashStep& step) = 0;
  /// Waits for the series: losses [steps, heads].
  virtual std::vector<double> finish() = 0;
};

/// `memory`: what it may take of the GPU, enough for the functions and one head. RunError when there is no
/// GPU.
std::unique_ptr<GpuHashTraining> make_gpu_hash_training(const GpuHashShape& shape, const GpuHashSizes& most,
                                                        std::int64_t memory);

}  // namespace lode
