// SPDX-License-Identifier: Apache-2.0
// One sequence on the GPU: its keys and values, and the forward pass over them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "gpu/active_tier.h"
#include "gpu/host_tier.h"
#include "gpu/index/context_keys.h"
#include "gpu/index/device_keys.h"
#include "gpu/layers/delta_layers.h"
#include "gpu/layers/gpu_states.h"
#include "gpu/layers/latent_layers.h"
#include "gpu/layers/layer_inputs.h"
#include "gpu/layers/layer_turns.h"
#include "gpu/lists.h"
#include "gpu/mass_finder.h"
#include "gpu/model.h"
#include "gpu/range_talk.h"
#include "gpu/select/selectors.h"
#include "gpu/text_range.h"
#include "kernels/cuda/device/kv_range.h"
#include "kernels/cuda/reduce/group_exchange.h"
#include "kv/placement.h"

namespace lode {

class CudaContext final : public GpuContext {
 public:
  /// GPUs that meet at the same places of a step.
  struct Group {
    cuda::GroupExchange* exchange = nullptr;
    int rank = 0, size = 1;
    explicit operator bool() const { return exchange != nullptr; }
  };
  /// One of several GPUs that share a model or a text: what of it is here, and how it meets the others.
  struct Share {
    bool leads = true;                        ///< it tells the host what all GPUs have alike
    int first_kv_head = 0, all_kv_heads = 0;  ///< of the whole model; 0: all are here
    Group heads;   ///< they have other heads of the model for the same tokens, and sum; none: all are here
    Group ranges;  ///< they have other tokens for the same heads, and merge; none: all are here
    bool alone() const { return !heads && !ranges; }
    /// Called when nothing that one GPU alone may lack can go wrong any more, before it waits for the others.
    std::function<void()> meet = {};
    /// Takes what this GPU's heads have of a layer that the host hears of, when all others bring theirs.
    std::function<void(int layer, const Step& step, const KvWrite& own)> tell = {};
  };

  CudaContext(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
              const GpuContextOptions& options, const Placement& place, Share share);
  /// Of options as this GPU's memory allows. InputError for those that a GPU does not have.
  static std::unique_ptr<CudaContext> make(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
                                           const GpuContextOptions& options, Share share);
  ~CudaContext() override;

  std::int64_t tokens() const override { return tokens_; }
  std::int64_t bytes() const override;
  bool keys_on_host() const override { return tier_ != nullptr; }
  bool finds_masses() const override {
    return tier_ == nullptr && share_.alone() && states_.empty() &&
           MassFinder::takes(config_.query_heads, config_.kv_heads, config_.head_dim);
  }
  std::string placement() const override { return place_.sentence; }
  TierWork take_tier_work() override { return std::exchange(tier_work_, {}); }
  /// Of an empty context whose text several GPUs share by ranges: which this one has.
  void take_range(const TextRange& range);
  void roll_back(std::int64_t tokens) override;
  void bring_states(RecurrentStates& states);
  void restore_states(const RecurrentStates& states);
  void upload(const KvStore& store) override;
  void download(KvStore& store) override;
  /// download without a commit.
  void copy_rows_to(KvStore& store) const;
  /// The same, a layer at a time; calls done(layer) behind each.
  void copy_rows_to(KvStore& store, const std::function<void(int layer)>& done) const;
  void fill_random(std::int64_t tokens, std::uint64_t seed) override;
  ChosenBy attach(const Spec& spec, std::span<Selector* const> selectors) override;
  bool chooses(std::span<Selector* const> selectors) const override;
  std::int64_t most_together(std::span<Selector* const> selectors) const override;
  void index(std::span<Selector* const> selectors, const Rope& rope) override;
  bool writes_to_host(const Step& step) const;
  DeviceKeys* device_keys() const { return device_keys_.get(); }
  ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows,
                      std::vector<float>& logits) override;
  double sum_microseconds() override;

 private:
  friend class CudaBatch;
  /// A method whose keys the GPU chooses, known by the selectors that would choose on the host.
  struct GpuMethodState {
    std::unique_ptr<GpuSelector> selector;
    LocalWindow dense;
    std::vector<bool> layers;   // [L] false: dense
    cuda::PinnedBuffer counts;  // [L, counts_per_layer] of the last step
    cuda::Graph graph;          ///< of one decode step; none before the first
    std::uint64_t number = 0;   ///< no other has it; another one once captured steps must not be replayed
  };
  /// How a step gets at keys and values.
  enum class Reach {
    all,     ///< they are on the GPU
    staged,  ///< in host memory: each layer's are brought before it runs
    split,   ///< in host memory, where the host attends them; the GPU attends sink and window
  };
  /// What one forward call runs on.
  struct Run {
    const Step& step;
    const Rope& rope;
    const ModelPlan& plan;
    int count = 0;                     // N query tokens
    GpuMethodState* native = nullptr;  ///< who chooses, when it is the GPU
    LogitRows rows = LogitRows::none;
    Reach reach = Reach::all;
    std::int64_t begin = 0;        ///< position of the first token
    bool tells_some = false;       ///< somebody listens
    bool tells_all = false;        ///< and to whole writes, not to some queries
    bool sparse(int layer) const;  ///< never with a sliding window
    std::int64_t window(int layer) const { return plan.layer(layer).window; }
    /// A step that is captured once and replayed.
    bool is_graph() const {
      return count == 1 && !host_takes_part() && !tells_some && !audits_some() && !is_watched();
    }
    /// Whether somebody wants to know what is attended to.
    bool is_watched() const { return step.hooks != nullptr && step.hooks->mass; }
    /// Whether a layer's outputs are compared with full attention's.
    bool audits(int layer) const {
      return step.hooks != nullptr && step.hooks->compare && sparse(layer) &&
             step.hooks->samples(layer, static_cast<Position>(begin));
    }
    bool audits_some() const;
    bool dense() const { return native == nullptr && step.selectors.empty(); }
    /// Whether selectors of the host must be told or asked, so that the host needs the vectors of each layer.
    bool host_takes_part() const;
    bool host_chooses() const {
      return reach == Reach::split || (native == nullptr && !step.selectors.empty());
    }
  };

  /// Up to so many query tokens, dense attention splits the keys; above, the queries.
  static constexpr int kDecodeTokens = 8;

  /// Rows [begin, end) of one layer and head, on their way from the host's store.
  struct HostRows {
    int layer = 0, head = 0;
    cuda::KvRange::Part part = cuda::KvRange::Part::k;
    std::int64_t begin = 0, end = 0;
  };
  std::vector<HostRows> pieces_to_upload(std::int64_t begin, std::int64_t end) const;
  std::span<const std::byte> rows_of(const KvStore& store, const HostRows& piece) const;
  void send(const HostRows& piece, const std::byte* rows, cuda::StreamHandle stream);
  void upload_pinned(const KvStore& store, std::span<const HostRows> pieces);

  static std::uint64_t next_number();
  Reach reach_of(const Step& step) const;
  GpuMethodState* method_of(std::span<Selector* const> selectors) const;  ///< null: the host chooses
  std::int64_t most_tokens(const Step& step) const;
  void set_frequencies(const Rope& rope);
  bool turns_alike() const;
  void prepare(GpuMethodState& native);
  DeltaLayers::Product product_of(const CudaModel::Layer& w, std::int64_t count);
  ForwardWork forward_some(const Step& step, const Rope& rope, LogitRows rows, std::vector<float>& logits);
  void begin(const Run& run);
  void stage_given(const QueryOverride& given);
  void enqueue_inputs(const Run& run);
  void enqueue_given(int layer, const Run& run);
  void enqueue_layer(int layer, const Run& run, ForwardWork& work);
  void project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv, const cuda::Queries& where);
  void enqueue_recurrence(int layer, const CudaModel::Layer& w, std::int64_t count);
  void enqueue_output(const CudaModel::Layer& w, std::int64_t count);
  LayerInputs::Product product_of_stream(std::int64_t count);
  void enqueue_mlp(int layer, const CudaModel::Layer& w, std::int64_t count);
  void enqueue_feed_forward(const CudaModel::Layer& w, std::int64_t count);
  float* own_part(int slot) const;
  void make_range_buffers();
  std::int64_t rows_here() const { return held_.count(tokens_); }
  LocalWindow dense_here(const LocalWindow& dense) const;
  std::int64_t visible(int token) const;
  void stage_range(const Run& run);
  void attend_over_ranges(int layer, const Run& run);
  void attend_range(const cuda::Queries& own);
  void aim_at_part(cuda::Queries& own) const;
  void meet_others() const;
  void stop_exchanges() const noexcept;
  void expect_whole() const;
  void add_sum(int slot, std::int64_t count, const cuda::Addition& addition);
  void sum_parts(int slot, std::int64_t numbers, float* to, bool add);
  void attend(int layer, const Run& run, ForwardWork& work);
  void attend_keys(int layer, const Run& run, ForwardWork& work);
  void add_sinks(int layer, std::int64_t count, float* output, float* lse) const;
  void attend_chosen_by_gpu(int layer, const Run& run);
  void attend_chosen_by_host(int layer, const Run& run, ForwardWork& work);
  void attend_split(int layer, const Run& run, ForwardWork& work);
  void attend_window(int layer, const Run& run);
  void attend_window_on_host(int layer, const Run& run);
  void audit(int layer, const Run& run);
  void report_masses(int layer, const Run& run);
  QueryBlock places_of(const Run& run) const;
  QueryBlock block_of(int layer, const Run& run) const;
  void choose(int layer, const Run& run, const QueryBlock& block, Selection& selection, ForwardWork& work);
  bool uses_active(const Run& run) const;
  void leave_active(int layer, const Run& run, const QueryBlock& block, Selection& selection,
                    AttendWork& attended, ForwardWork& work);
  void make_room(const Run& run);
  void list_near_keys(const Run& run);
  void enqueue_head(std::int64_t row, std::int64_t rows);
  void take_logits(const Run& run, std::vector<float>& logits);
  void run_step(const Run& run, ForwardWork& work);
  cuda::Graph captured(const std::function<void()>& enqueue);
  void tell_listeners(int layer, const Run& run);
  KvWrite write_of(int layer, const Run& run) const;
  /// Numbers of a layer's queries, and of its keys or values, in a step.
  std::int64_t query_floats(int layer, const Run& run) const {
    return std::int64_t{run.count} * config_.query_heads * config_.head_dim_of(layer);
  }
  std::int64_t kv_floats(int layer, const Run& run) const {
    return std::int64_t{run.count} * config_.kv_heads_of(layer) * config_.head_dim_of(layer);
  }
  void tell_queries(int layer, const Run& run);
  GpuKeys stored_keys() const;
  std::int64_t free_bytes() const;
  void count_work(const Run& run, ForwardWork& work);
  cuda::Queries queries(int layer, const Run& run) const;
  cuda::Precision precision() const {
    return options_.kv_type == DType::f32 ? cuda::Precision::exact : cuda::Precision::fast;
  }
  LayerGeometry geometry(int layer, const Run& run) const;
  std::vector<float> frequencies_set_;  ///< what frequencies_ holds
  LayerTurns turns_;

  const std::uint64_t number_ = next_number();  ///< no other context has it
  const ModelConfig& config_;
  std::shared_ptr<const CudaModel> model_;
  GpuContextOptions options_;
  Placement place_;
  Share share_;
  ActiveTier::Room active_room_;
  std::int64_t tokens_ = 0;
  std::int64_t forward_begin_ = 0;  ///< tokens before the forward call that runs
  TextRange held_;                  ///< the tokens whose keys and values are here

  cuda::Stream stream_;
  cuda::KvRange range_;
  cuda::Linear linear_;
  cuda::Experts experts_;
  DeltaLayers recurrent_;
  LatentLayers latent_;
  LayerInputs inputs_;
  GpuStates states_;
  cuda::DeltaRows state_rows_;                // of the step that runs
  cuda::Buffer state_rows_there_;             // [1] DeltaRows
  cuda::PinnedBuffer staged_state_rows_;      // the same
  cuda::Buffer ids_;                          // [chunk] int32
  cuda::Buffer places_;                       // [chunk] QueryToken
  cuda::Buffer bases_;                        // [1] const char*
  cuda::Buffer frequencies_;                  // [d/2] usual, then those of Turn::local
  cuda::Buffer no_rows_;                      // [kDecodeTokens, Hkv] counts of 0, for layers with a window
  cuda::Buffer x_;                            // [chunk, D]
  cuda::Buffer summed_;                       // [chunk, D]; where sums over GPUs are normed or scaled
  cuda::Buffer q_, q_unrotated_, attention_;  // [chunk, Hq, d], with room for any layer's heads
  cuda::Buffer k_, k_unrotated_, v_;          // [chunk, Hkv, d], the same
  cuda::Buffer lse_;                          // [chunk, Hq] of models with attention sinks
  cuda::Buffer logits_;                       // [kLogitRows, V]
  cuda::Buffer given_;                        // [2, L, Hq, d]: QueryOverride; made when first needed
  cuda::Buffer workspace_;                    ///< of decode attention
  cuda::Buffer parts_;                        ///< of many tokens that choose together
  cuda::Buffer lists_memory_;
  cuda::PinnedBuffer staged_ids_, staged_places_;  // [chunk]
  cuda::PinnedBuffer staged_logits_;               // [kLogitRows, V]
  cuda::PinnedBuffer staged_given_;                // as given_
  MassFinder masses_;
  // Of a layer that is audited; made when first needed:
  cuda::Buffer exact_;                            // [N, Hq, d] by full attention
  cuda::PinnedBuffer host_outputs_, host_exact_;  // [N, Hq, d]
  float rope_scale_ = 1.0f;
  cuda::PinnedBuffer host_q_, host_q_unrotated_;           // [chunk, Hq, d]; made when first needed
  cuda::PinnedBuffer host_k_, host_k_unrotated_, host_v_;  // [chunk, Hkv, d]
  /// What layers made of a step whose rows later ones attend to.
  struct ShownRows {
    std::vector<float> k_unrotated, k, v;  // [T, Hkv, d]
  };
  std::map<int, ShownRows> shown_rows_;
  HostLists lists_;
  mutable std::map<const void*, GpuMethodState> methods_state_;  ///< by the address of the step's selectors
  cuda::Graph dense_graph_;                                      ///< of one decode step with full attention
  bool recording_ = false;                                       ///< a graph, which is not launched yet

  // With a range of the text:
  std::unique_ptr<RangeTalk> talk_;
  cuda::Buffer near_places_;               // [chunk] QueryToken: what a query sees of the range
  cuda::Buffer write_bases_;               // [1] const char*: where rows of the step's positions go
  cuda::Buffer shared_workspace_;          ///< of many tokens that attend all keys here
  cuda::PinnedBuffer staged_near_places_;  // as near_places_
  cuda::PinnedBuffer staged_write_bases_;  // as write_bases_
  std::vector<std::int64_t> far_of_step_;  // [N] in all ranges

  // With keys and values in host memory:
  std::unique_ptr<HostTier> tier_;
  std::unique_ptr<ActiveTier> active_;  ///< null: no memory is given to it
  // For kMostSparseTokens, or the longest question so far whose tokens choose together:
  cuda::Buffer near_lse_;        // [N, Hq] of what the GPU attended
  cuda::Buffer far_;             // [N, Hq, d], then [N, Hq]: what the host attended
  cuda::PinnedBuffer host_far_;  // the same
  HostLists hits_;               ///< what the step's queries attend on the GPU
  cuda::Buffer near_memory_;
  cuda::RowLists near_lists_;
  TierWork tier_work_;
  std::unique_ptr<DeviceKeys> device_keys_;  ///< null: keys lie in host memory, or on several GPUs
};

}  // namespace lode
