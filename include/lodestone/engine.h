// SPDX-License-Identifier: Apache-2.0
// The engine: a model, contexts that were prefilled once, and questions asked of them under any attention
// method.
//
//   auto model = lode::Model::load("models/pocket");
//   lode::Context context(model, {.kv_type = lode::DType::bf16, .max_tokens = 65536});
//   auto method = context.attach(lode::parse_spec("kmeans:probes=16"));
//   context.prefill(model->tokenizer().encode(text, lode::Tokenizer::Bos::as_template));
//   context.build_indexes();
//   lode::Generation g = context.generate(question_tokens, method, {.max_new_tokens = 32});
//   context.roll_back(context.indexed_tokens());
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lodestone/gpu_sum.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"
#include "lodestone/tokenizer.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;
struct ModelConfig;
struct AttendWork;

/// Where a context's tokens are computed.
enum class Device { cpu, cuda };
std::string_view name_of(Device device);

/// What there is of a GPU.
struct GpuInfo {
  bool ok = false;
  std::string why;   ///< one clause that says what is missing, when not ok
  std::string name;  ///< of the device
  std::int64_t total_bytes = 0, free_bytes = 0;
};
GpuInfo gpu_info();

/// Immutable: config, tokenizer, weights, threads. Shared by any number of contexts.
class Model {
 public:
  static std::shared_ptr<const Model> load(const std::filesystem::path& dir, int threads = 0,
                                           bool check_finite = true);
  /// Random weights of a named shape, without tokenizer; for benchmarks. Those for a GPU are made there, and
  /// this model then serves contexts on the GPU alone.
  static std::shared_ptr<const Model> random(std::string_view shape, int threads = 0, std::uint64_t seed = 1,
                                             Device device = Device::cpu);
  ~Model();

  const ModelConfig& config() const;
  const Tokenizer& tokenizer() const;  ///< RunError for a random model
  const std::filesystem::path& path() const;
  /// Of weights, config and RoPE: a context made by another model is refused.
  const std::string& fingerprint() const;
  std::int64_t weight_bytes() const;
  DType weight_type() const;  ///< of the layers' projections
  ThreadPool& pool() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  Model();
  std::unique_ptr<Impl> impl_;
};

/// Where a context on a GPU keeps its keys and values: there, or in host memory, which the CPU then searches
/// and attends while the GPU attends sink and window. automatic = on the GPU where they fit.
enum class KvTier { automatic, gpu, host };
KvTier parse_kv_tier(std::string_view text);  ///< auto, gpu or host; InputError otherwise

struct ContextOptions {
  DType kv_type = DType::f16;
  Device device = Device::cpu;
  std::int64_t gpu_memory = 0;  ///< bytes of GPU memory that may be taken, weights included; 0 = all there is
  KvTier kv_tier = KvTier::automatic;
  /// GPUs, by their numbers, that share the model by its KV heads, the text, or both; empty = one GPU. The number of
  /// them, divided by context_parallel, divides the model's KV heads. `gpu_memory` is of each.
  std::vector<int> gpus = {};
  /// Ranges of tokens that those GPUs cut a text into; divides their number, and the GPUs of each range share the model
  /// by its KV heads.
  int context_parallel = 1;
  GpuSum gpu_sum = GpuSum::automatic;  ///< how they add up what each computed
  /// With keys and values in host memory: bytes of GPU memory for those that a method's searches find token
  /// after token, which the GPU then attends beside sink and window; 0 = none.
  std::int64_t active_memory = 0;
  std::int64_t max_tokens = 0;  ///< context, question and answer; 0 = the model's own limit
  std::int64_t chunk = 0;       ///< tokens per prefill chunk; 0 = what suits the device
  std::uint64_t seed = 0;       ///< of the indexes
  /// Share of the sparse attention calls (one layer, one stretch of tokens) that are also computed exactly,
  /// to report the error; 0 = none.
  double audit = 0;
  /// Longer than the model's max_positions is an InputError unless RoPE scaling is asked for.
  std::optional<double> rope_factor;  ///< yarn by this factor
};

/// Which attached method new tokens attend by: an index from attach(), or dense.
using MethodId = int;
inline constexpr MethodId kDense = -1;

struct Sampling {
  double temperature = 0.0;  ///< 0: greedy
  int top_k = 0;             ///< 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  std::uint64_t seed = 0;
};

struct GenerateOptions {
  std::int64_t max_new_tokens = 128;
  /// Of thoughts: behind so many the model's own mark ends them, whatever the model would say. -1: no such bound.
  std::int64_t max_thought_tokens = -1;
  std::vector<std::string> stop;  ///< generation ends before the first of these; they may span tokens
  Sampling sampling;
  bool stop_at_eos = true;
  std::function<void(std::string_view)> on_text;  ///< text as it becomes final
  std::function<void(std::string_view)>
      on_thought;  ///< the same of what the model thinks before it answers (Generation::thoughts)
  /// How many of the prompt's last tokens attend by the method; the ones before attend densely. -1 = all of
  /// them (protocol context-dense), 0 = none (decode-sparse: the first generated token still comes from the
  /// dense prompt).
  std::int64_t sparse_prompt_tokens = -1;
};

/// What the host and the GPU did of a stretch of tokens when keys and values lie in host memory; zeros
/// otherwise.
struct TierWork {
  std::int64_t bytes_to_host = 0, bytes_to_gpu = 0;  ///< that crossed between the two
  std::int64_t host_keys = 0, gpu_keys = 0;  ///< attended there, summed over tokens, layers and KV heads
  std::int64_t active_keys = 0;   ///< of gpu_keys those that are kept there since searches keep finding them
  std::int64_t active_hits = 0;   ///< found by a search and active: rows that the host need not read
  std::int64_t active_bytes = 0;  ///< of bytes_to_gpu those of keys and values that became active
  double wait_seconds = 0;        ///< that the host waited for the GPU
  double search_seconds = 0;      ///< in which keys were chosen
  double attend_seconds = 0;      ///< in which the host attended them
  TierWork& operator+=(const TierWork&);
};

/// Work of a stretch of tokens, summed over layers and KV heads, counted as if each query token came alone.
struct WorkReport {
  std::int64_t kv_bytes = 0, selector_bytes = 0, full_bytes = 0;
  std::int64_t far_keys = 0, far_total = 0;
  std::int64_t tokens = 0;
  std::int64_t sparse_tokens = 0;  ///< tokens times layers that really went through a selector
  TierWork tiers;
  double density() const;      ///< (kv + selector bytes) / full bytes; 1 when nothing was attended
  double selectivity() const;  ///< far keys attended / far keys; 1 when there were none
  /// Of the audited calls: relative output error |o - exact| / |exact| per (token, query head).
  std::int64_t audited = 0;  ///< (token, query head) pairs
  double audit_error_sum = 0, audit_error_max = 0;
  std::string
      dense_reason;    ///< why nothing was sparse, when nothing was ("the text is shorter than the window")
  std::string notice;  ///< what the method says of this text (unlike its training text); usually empty
  WorkReport& operator+=(const WorkReport&);
};

struct Generation {
  std::vector<TokenId> tokens;  ///< generated, the stop's own tokens included
  std::string text;             ///< the answer, without thoughts and without the stop string
  /// What a model wrote between its marks for thoughts: "<think>" and "</think>", or harmony's channels but for "final".
  /// Empty for models that do not think.
  std::string thoughts;
  std::int64_t thought_tokens = 0;  ///< of `tokens`: thoughts and the marks around them
  bool stopped = false;             ///< by a stop string or EOS, not by the limit
  std::string stop;                 ///< the stop string that ended the answer; empty: none has
  WorkReport work;                  ///< of the sparse part: prompt's sparse tokens and generation
  double prompt_seconds = 0, decode_seconds = 0;
};

/// Attention of an answer to each position: each of its sentences shares out one vote over layers, heads and
/// tokens, half of the sentence before it. Only keys that got at least `sharpness` of a head's attention count:
/// the flat background of thousands of keys says nothing about sources.
struct SourceMass {
  double sharpness = 0.02;
  std::vector<double> mass;  // [tokens]
};

/// One sequence: its tokens, KV and the indexes of all attached methods.
class Context {
 public:
  Context(std::shared_ptr<const Model> model, const ContextOptions& options);
  ~Context();
  Context(Context&&) noexcept;

  const Model& model() const;
  /// A method to be indexed along. `full` needs no index. Attaching an equal spec again gives the same id. A
  /// method that needs the prefill's own vectors must be attached before prefill (InputError otherwise).
  MethodId attach(const Spec& spec);
  const std::vector<Spec>& methods() const;

  /// Appends tokens with dense attention, in chunks; progress gets the number done.
  void prefill(std::span<const TokenId> tokens, const std::function<void(std::int64_t)>& progress = {});
  /// Declares what was prefilled so far the indexed context and builds the indexes over it that are not built
  /// yet; built ones take in what has been prefilled since. Progress counts layers times methods built.
  void build_indexes(const std::function<void(std::int64_t layers_done)>& progress = {});

  std::int64_t tokens() const;
  std::int64_t indexed_tokens() const;
  std::span<const TokenId> token_ids() const;
  /// Back to so many tokens; indexes keep what they have of these. Back to none, they are not built.
  void roll_back(std::int64_t tokens);

  /// Feeds the prompt (at least one token), then generates. The context keeps prompt and answer, but for the
  /// last generated token, until rolled back. InputError with both numbers when the prompt does not fit;
  /// generation ends where the room ends.
  Generation generate(std::span<const TokenId> prompt, MethodId method, const GenerateOptions& options,
                      SourceMass* sources = nullptr);
  /// Logits of every given token under a method (teacher forcing), [T, V]; the tokens are appended.
  std::vector<float> forward(std::span<const TokenId> tokens, MethodId method, WorkReport* work = nullptr);

  const ContextOptions& options() const;
  std::int64_t kv_bytes() const;  ///< of tokens() tokens
  /// Where keys and values lie and how many tokens would fit, in a sentence; empty on the CPU.
  std::string placement() const;
  std::int64_t index_bytes() const;

  /// The whole context as one `.lode` file; text is what the tokens were made from (may be empty).
  void save(const std::filesystem::path& path, std::string_view text) const;
  /// InputError says why a file does not fit (other model, tokenizer, RoPE, damaged, truncated).
  static Context load(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                      const ContextOptions& options);

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  explicit Context(std::unique_ptr<Impl>);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
