// SPDX-License-Identifier: Apache-2.0
// Methods whose keys the GPU chooses by itself, without a word from the host inside a step. One file a
// method, select_METHOD.cc; the step (gpu/context.cc) and the bench of one layer (gpu/attention_bench.cc) run
// the same objects.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gpu/backend.h"
#include "kernels/cuda/device/kv_range.h"
#include "kernels/cuda/select/select.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"

namespace lode {

/// Several GPUs, each of which has a range of a text's tokens, rising with their ranks, and the same query heads: how
/// their selectors choose together. All call the same in the same order.
class GpuRanges {
 public:
  virtual ~GpuRanges() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Where what this GPU tells the others is to be written, so many numbers at most, before gather.
  virtual std::int32_t* part(std::int64_t count) = 0;
  /// What all have told, [size(), count], device memory; there until the next call.
  virtual const std::int32_t* gather(std::int64_t count) = 0;
};

/// What stays fixed for a GPU selector's life.
struct GpuGeometry {
  int layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t max_tokens = 0;
  int most_queries = 0;  ///< query tokens that attend at once
  int most_tokens = 0;   ///< of one step, where tokens choose together
  int sequences = 1;
  /// Of each layer; empty: all have these heads. Layers of others have no far keys.
  std::vector<cuda::LayerRows> rows;
  std::int64_t key_row_bytes = 0;
  cuda::StreamHandle stream = nullptr;  ///< what is made at once is made on it
  int distinct_layers = 0;  ///< of the bench: layer l has the keys of layer l % distinct_layers; 0 = its own
  std::uint64_t seed = 0;   ///< LayerGeometry::seed
  int first_layer = 0;      ///< the number in the model of layer 0
  /// KV heads that the host's selectors cover, rising, layer by layer (LayerGeometry::covered); empty: all.
  /// What is chosen for the others is asked of nobody.
  std::vector<std::vector<int>> covered;
  /// Where several GPUs share a model: these heads are [first_head, first_head + kv_heads) of all_heads, which the
  /// host's selectors know. 0: there are no others.
  int first_head = 0, all_heads = 0;
  /// Where several GPUs have ranges of the text, of which this is one: positions are places in it, and sink and window
  /// of the spec what of them is in it. Null: this GPU has all of the text.
  GpuRanges* ranges = nullptr;
  ThreadPool* pool =
      nullptr;  ///< for work of the host, in calls that do not come from its own threads; null: this one does it

  /// The heads of a layer that the host's selector has, in its order, by their numbers here; those of other GPUs
  /// lie outside of [0, kv_heads).
  std::vector<int> covered_heads(int layer) const;
  /// body(first, count) for layers beside one another that may have far keys.
  void for_layers(const std::function<void(int first, int count)>& body) const;
};

/// The keys of one sequence on the device, all layers, as an index takes them in.
struct GpuKeys {
  int sequence = 0;
  const char* base = nullptr;
  cuda::KvLayout layout;
  std::int64_t tokens = 0;             ///< rows [0, tokens) of every layer hold keys
  const float* frequencies = nullptr;  // [d/2] of RoPE, device memory
  float rope_scale = 1.0f;             ///< by which RoPE has scaled the stored keys
};

/// What a step asks for. Host memory.
struct GpuStep {
  std::span<const cuda::QueryToken> queries;  ///< their own keys are written by the step itself
  Phase phase = Phase::generation;
  Position far_limit = QueryBlock::kNoLimit;  ///< keys from here on are never far (LocalWindow::from_context)
  /// Of an index that is chosen from as a whole (the same): keys from here on, of one block, are attended to from
  /// elsewhere and are not listed.
  Position listed_end = QueryBlock::kNoLimit;
  /// Far keys of each query in all ranges, where this GPU has one of several; empty: as their positions say.
  std::span<const std::int64_t> far = {};
};

/// A token of the last step, for counting what it has read.
struct CountedToken {
  const std::int32_t* counts = nullptr;  ///< as copy_counts has left them
  int layer = 0, kv_heads = 0;
  int token = 0;              ///< whose counts stand for it (counted_token)
  std::int64_t position = 0;  ///< its own
};

/// One method, all layers. Before a step the host calls prepare and begin; then, on the stream (perhaps in a
/// graph that is replayed later), upload, and select for each layer.
class GpuSelector {
 public:
  virtual ~GpuSelector() = default;

  /// Whether it can choose now: the host does until it can.
  virtual bool chooses() const { return true; }
  /// Whether prepare reads the index that the host's selectors have built of the context.
  virtual bool needs_host_index() const { return false; }
  /// Brings the index of one sequence up to its keys; cheap when there is nothing to do. What the index holds
  /// of a key depends on that key alone, so keys may be taken in while they are still in the window: select
  /// leaves out what is not far. True when graphs that were captured before must not be replayed.
  virtual bool prepare(const GpuKeys&, cuda::StreamHandle) { return false; }
  /// The sequence has been cut to `tokens`.
  virtual void roll_back(int /*sequence*/, std::int64_t /*tokens*/) {}

  /// How many tokens from `position` on one step may hold: what lists hold of their bits must not depend on
  /// how a text was cut into steps.
  virtual std::int64_t most_tokens(std::int64_t /*position*/, Phase) const { return kMostSparseTokens; }
  virtual void begin(const GpuStep& step) = 0;
  /// Whether begin_joined takes `other`, of another document: it has the same functions, and lists of this
  /// selector hold what it chooses.
  virtual bool joins(const GpuSelector& /*other*/) const { return false; }
  /// In the place of begin: queries of several documents choose in one launch. A query's `sequence` is the
  /// number of its document's selector in `documents`; their indexes hold every key that is far for it.
  virtual void begin_joined(const GpuStep&, std::span<GpuSelector* const> /*documents*/) {
    LODE_ASSERT(false);
  }
  virtual void upload(cuda::StreamHandle stream) = 0;
  /// Whether begin has staged anything that upload has not brought yet, for who calls both before every step.
  virtual bool has_news() const { return true; }
  /// Whether it has select_together.
  virtual bool chooses_together() const { return false; }
  /// Tokens of a question that may choose together.
  virtual std::int64_t most_together() const { return kMostSparseTokens; }
  /// In the place of select where a step has more than kMostSparseTokens tokens: one list a KV head for all
  /// of them, as attend_rows_prefill takes them.
  virtual cuda::RowLists select_together(int /*layer*/, const cuda::Queries& /*all*/, cuda::StreamHandle) {
    LODE_ASSERT(false);
    return {};
  }
  /// The token of the step whose counts stand for those of token t.
  virtual int counted_token(int t) const { return t; }
  /// Far keys of the layer's queries; the lists stay until the next call for any layer.
  virtual cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                                cuda::StreamHandle stream) = 0;
  /// Chooses and attends sink, chosen keys and window without lists in between, into queries.o; the workspace
  /// is that of decode attention. False where it cannot for the shapes: then select and attention are called.
  virtual bool attend(int /*layer*/, const cuda::Queries& /*queries*/, const float* /*q_unrotated*/,
                      void* /*workspace*/, cuda::StreamHandle) {
    return false;
  }
  /// At most.
  virtual int lists_per_head() const = 0;
  virtual std::int64_t counts_per_layer() const = 0;
  /// Enqueues how many keys were chosen by each list in the last step: [layers, counts_per_layer()], all
  /// layers.
  virtual void copy_counts(std::int32_t* to, int layers, cuda::StreamHandle stream) const;
  /// Far keys in all lists of a KV head.
  virtual std::int64_t listed(const CountedToken& of, int head) const;
  /// Bytes of index and keys read to choose `chosen` keys in all for those KV heads.
  virtual std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads,
                                    std::int64_t chosen) const = 0;
  virtual std::int64_t bytes() const = 0;  ///< of GPU memory

 protected:
  /// Device memory, [layers, counts_per_layer()], a layer's lists ordered as RowLists has them.
  virtual const std::int32_t* counts() const = 0;
};

/// Null when the GPU has no selector for this spec: the host's chooses then. `selectors` are the host's, one
/// a layer, null for dense layers; they outlive the result.
std::unique_ptr<GpuSelector> make_gpu_selector(const Spec& spec, const GpuGeometry& geometry,
                                               std::span<Selector* const> selectors);

/// The same for the bench, where no host selectors are: artefacts that the spec does not name are made up.
/// `largest` above 0: one bucket of saap holds this share of the keys, and every query attends it.
std::unique_ptr<GpuSelector> make_gpu_selector_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                         std::uint64_t seed, double largest);

/// The layers' host selectors as what a GPU's selector asks of them; null where one is nothing of the kind.
template <class Part>
std::vector<const Part*> parts_of(std::span<Selector* const> selectors) {
  std::vector<const Part*> parts;
  for (const Selector* const selector : selectors) parts.push_back(dynamic_cast<const Part*>(selector));
  return parts;
}

/// 0, 1, ...
std::vector<int> all_kv_heads(int kv_heads);

/// Far keys of a query at `position`.
std::int64_t far_keys(const LocalWindow& dense, std::int64_t position);

/// plan; null where a member is left to the host.
std::unique_ptr<GpuSelector> make_gpu_plan(const Spec& spec, const GpuGeometry& geometry,
                                           std::span<Selector* const> selectors);
/// Layer l of the bench is layer l % L of the plan.
std::unique_ptr<GpuSelector> make_gpu_plan_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                     std::uint64_t seed, double largest);
std::unique_ptr<GpuSelector> make_gpu_streaming(const Spec& spec, const GpuGeometry& geometry);
std::unique_ptr<GpuSelector> make_gpu_random(const Spec& spec, const GpuGeometry& geometry);
/// ivf; without selectors its centroids are trained on the GPU.
std::unique_ptr<GpuSelector> make_gpu_ivf(const Spec& spec, const GpuGeometry& geometry,
                                          std::span<Selector* const> selectors);
/// snapkv; without selectors its keys are evenly spread.
std::unique_ptr<GpuSelector> make_gpu_snapkv(const Spec& spec, const GpuGeometry& geometry,
                                             std::span<Selector* const> selectors);
std::unique_ptr<GpuSelector> make_gpu_topk(const Spec& spec, const GpuGeometry& geometry);
/// quest; without selectors its coded bounds have levels for numbers of variance 1.
std::unique_ptr<GpuSelector> make_gpu_quest(const Spec& spec, const GpuGeometry& geometry,
                                            std::span<Selector* const> selectors);
/// double-sparsity; without selectors its labels have channels and levels that are made up.
std::unique_ptr<GpuSelector> make_gpu_double_sparsity(const Spec& spec, const GpuGeometry& geometry,
                                                      std::span<Selector* const> selectors);
/// pqcache; without selectors its centroids are made up.
std::unique_ptr<GpuSelector> make_gpu_pqcache(const Spec& spec, const GpuGeometry& geometry,
                                              std::span<Selector* const> selectors);
/// squeezed.
std::unique_ptr<GpuSelector> make_gpu_clusters(const Spec& spec, const GpuGeometry& geometry,
                                               std::span<Selector* const> selectors);
std::unique_ptr<GpuSelector> make_gpu_clusters_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                         std::uint64_t seed);
std::unique_ptr<GpuSelector> make_gpu_buckets(const Spec& spec, const GpuGeometry& geometry,
                                              std::span<Selector* const> selectors);
std::unique_ptr<GpuSelector> make_gpu_buckets_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                        std::uint64_t seed, double largest);
/// hash and hyperplanes; without selectors their functions are random, of the widths that `train hash` has.
std::unique_ptr<GpuSelector> make_gpu_signatures(const Spec& spec, const GpuGeometry& geometry,
                                                 std::span<Selector* const> selectors);
std::unique_ptr<GpuSelector> make_gpu_signatures_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                           std::uint64_t seed);

}  // namespace lode
