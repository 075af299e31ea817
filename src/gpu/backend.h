// SPDX-License-Identifier: Apache-2.0
// The GPU as the engine sees it: a model's weights there, and a context's keys, values and forward pass. A
// program without CUDA has the same functions (no_cuda.cc), which say so.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kv/store.h"
#include "lodestone/engine.h"
#include "lodestone/gpu_sum.h"
#include "model/llama.h"

namespace lode {

/// gpu_info without bytes: whether there is a GPU, before anything is started there.
GpuInfo gpu_present();
/// Starts the GPU's driver, for a thread of its own while the program reads files; whoever needs the GPU meanwhile
/// waits. Nothing where there is no GPU.
void start_gpu() noexcept;

/// A model's weights in GPU memory, shared by all contexts.
class GpuModel {
 public:
  virtual ~GpuModel() = default;
  virtual std::int64_t bytes() const = 0;  ///< of all GPUs together
  virtual int gpus() const { return 1; }
  virtual int ranges() const { return 1; }  ///< of a text that its GPUs have
};
/// GPUs of one host that share a model by its KV heads, a text by ranges of tokens, or both (gpu/sharded.h).
struct GpuGroup {
  std::vector<int> devices =
      {};          ///< by their numbers; for tests also one of them several times; empty: the first alone
  int ranges = 1;  ///< of the text: divides the number of GPUs
  GpuSum sum = GpuSum::automatic;
  bool shares() const { return devices.size() > 1; }
};

/// Copies the weights; those without data (ModelWeights::shapes) are filled with random numbers there.
/// RunError when there is no GPU or not enough memory; `limit` bounds what this program may take of each GPU (0 =
/// all there is). InputError where a model cannot be cut for so many GPUs. The threads of `pool`, where there is one,
/// bring the weights.
std::shared_ptr<const GpuModel> make_gpu_model(const ModelConfig& config, const ModelWeights& weights,
                                               std::int64_t limit, const GpuGroup& group = {},
                                               ThreadPool* pool = nullptr);

/// Query tokens that attend chosen keys at once; GpuContext::forward cuts longer steps, but for tokens that
/// choose together.
inline constexpr int kMostSparseTokens = 32;

struct GpuContextOptions {
  ThreadPool* pool = nullptr;  ///< outlives the context; null where no selector of the host takes part
  DType kv_type = DType::f16;
  std::int64_t max_tokens = 0;
  std::int64_t chunk = 512;       ///< most tokens of one forward call
  std::int64_t memory_limit = 0;  ///< bytes of GPU memory for everything, weights included; 0 = all there is
  KvTier tier = KvTier::automatic;
  std::int64_t active_memory = 0;  ///< as in ContextOptions
  std::uint64_t seed = 0;          ///< the same
};

/// Who chooses a method's keys.
enum class ChosenBy {
  host,  ///< the selectors, layer by layer, and the GPU attends: the host's store must be up to date
  gpu,   ///< the GPU by itself
  gpu_by_host_index,  ///< the GPU, once the selectors have indexed the context; see GpuContext::chooses
};

/// One sequence on the GPU. Its tokens and the host's KvStore are two copies of one cache, each of which may
/// be behind: upload and download bring one up to the other.
class GpuContext {
 public:
  virtual ~GpuContext() = default;

  virtual std::int64_t tokens() const = 0;  ///< whose keys and values are there
  virtual std::int64_t bytes() const = 0;   ///< of GPU memory held, without the weights
  /// Whether keys and values lie in the host's store, which every step then reads and writes.
  virtual bool keys_on_host() const = 0;
  /// Whether dense steps call ForwardHooks::mass, of what lies above a least_mass beyond 0.
  virtual bool finds_masses() const = 0;
  virtual std::string placement() const = 0;  ///< where they lie and what fits, in a sentence
  virtual TierWork take_tier_work() = 0;      ///< since it was last taken
  virtual void roll_back(std::int64_t tokens) = 0;
  /// Appends the host's rows [tokens(), store.tokens()), and takes its states of recurrent layers.
  virtual void upload(const KvStore& store) = 0;
  /// Appends this context's rows [store.tokens(), tokens()) to the store, which gets the states, too.
  virtual void download(KvStore& store) = 0;
  /// Fills rows with random keys and values up to so many tokens, for benchmarks without a prefill.
  virtual void fill_random(std::int64_t tokens, std::uint64_t seed) = 0;

  /// Says that a method's selectors will be used, and asks who chooses.
  virtual ChosenBy attach(const Spec& spec, std::span<Selector* const> selectors) = 0;

  /// Whether the GPU chooses these selectors' keys by itself now.
  virtual bool chooses(std::span<Selector* const> selectors) const = 0;
  /// How many tokens of a question may choose together here.
  virtual std::int64_t most_together(std::span<Selector* const> selectors) const = 0;
  /// The tokens there are the context: brings the GPU's own index of a method up to them, where it has one.
  virtual void index(std::span<Selector* const> selectors, const Rope& rope) = 0;

  /// Microseconds that a generated token's sums over several GPUs take, one behind the other and nothing else
  /// beside them; 0 on one GPU.
  virtual double sum_microseconds() { return 0; }

  /// Llama::forward on the GPU, for one sequence whose earlier tokens are all there; its `kv` is written and
  /// committed too when a selector of the step needs it (see attach). Of the hooks, those of an audit are called, and what finds_masses() says.
  virtual ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows,
                              std::vector<float>& logits) = 0;
};
std::unique_ptr<GpuContext> make_gpu_context(const ModelConfig& config, std::shared_ptr<const GpuModel> model,
                                             const GpuContextOptions& options);

/// Operations per second of cuBLASLt's product of two [n, n] matrices of bf16 with float32 sums, the best of
/// ten; 0 without that library. The yardstick of a prefill.
double gpu_matrix_rate(std::int64_t n);

}  // namespace lode
