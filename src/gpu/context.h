// SPDX-License-Identifier: Apache-2.0
// One sequence on the GPU: its keys and values, and the forward pass over them.
#pragma once

#include <map>
#include <vector>

#include "gpu/lists.h"
#include "gpu/model.h"
#include "gpu/selectors.h"
#include "kernels/cuda/kv_range.h"

namespace lode {

class CudaContext final : public GpuContext {
 public:
  CudaContext(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
              const GpuContextOptions& options);
  ~CudaContext() override;

  std::int64_t tokens() const override { return tokens_; }
  std::int64_t bytes() const override;
  void roll_back(std::int64_t tokens) override;
  void upload(const KvStore& store) override;
  void download(KvStore& store) override;
  void fill_random(std::int64_t tokens, std::uint64_t seed) override;
  ChosenBy attach(const Spec& spec, std::span<Selector* const> selectors) override;
  ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows,
                      std::vector<float>& logits) override;

 private:
  /// A method whose keys the GPU chooses, known by the selectors that would choose on the host.
  struct Native {
    std::unique_ptr<GpuSelector> selector;
    DenseParts dense;
    std::vector<bool> layers;   // [L] false: dense
    cuda::PinnedBuffer counts;  // [L, counts_per_layer] of the last step
    cuda::Graph graph;          ///< of one decode step; none before the first
  };
  /// What one forward call runs on.
  struct Run {
    const Step& step;
    const Rope& rope;
    int count = 0;             // N query tokens
    Native* native = nullptr;  ///< who chooses, when it is the GPU
    LogitRows rows = LogitRows::none;
    bool sparse(int layer) const;
    /// A step that is captured once and replayed.
    bool is_graph() const { return count == 1 && !host_takes_part(); }
    bool dense() const { return native == nullptr && step.selectors.empty(); }
    /// Whether selectors of the host must be told or asked, so that the host needs the vectors of each layer.
    bool host_takes_part() const;
  };

  void set_frequencies(const Rope& rope);
  ForwardWork forward_some(const Step& step, const Rope& rope, LogitRows rows, std::vector<float>& logits);
  void begin(const Run& run);
  void enqueue_inputs(const Run& run);
  void enqueue_layer(int layer, const Run& run, ForwardWork& work);
  void attend(int layer, const Run& run, ForwardWork& work);
  void attend_chosen_by_host(int layer, const Run& run, ForwardWork& work);
  void enqueue_head(std::int64_t row, std::int64_t rows);
  void take_logits(const Run& run, std::vector<float>& logits);
  void run_step(const Run& run, ForwardWork& work);
  void tell_listeners(int layer, const Run& run);
  void count_work(const Run& run, ForwardWork& work);
  cuda::Queries queries(int layer, int count) const;
  cuda::Precision precision() const {
    return options_.kv_type == DType::f32 ? cuda::Precision::exact : cuda::Precision::fast;
  }
  LayerGeometry geometry(int layer, const Run& run) const;
  std::vector<float> frequencies_set_;  ///< what frequencies_ holds

  const ModelConfig& config_;
  std::shared_ptr<const CudaModel> model_;
  GpuContextOptions options_;
  std::int64_t tokens_ = 0;

  cuda::Stream stream_;
  cuda::KvRange range_;
  cuda::Linear linear_;
  cuda::Buffer ids_;                          // [chunk] int32
  cuda::Buffer places_;                       // [chunk] QueryToken
  cuda::Buffer bases_;                        // [1] const char*
  cuda::Buffer frequencies_;                  // [d/2]
  cuda::Buffer x_;                            // [chunk, D]
  cuda::Buffer q_, q_unrotated_, attention_;  // [chunk, Hq, d]
  cuda::Buffer k_, k_unrotated_, v_;          // [chunk, Hkv, d]
  cuda::Buffer logits_;                       // [kLogitRows, V]
  cuda::Buffer workspace_;                    ///< of decode attention
  cuda::Buffer lists_memory_;
  cuda::PinnedBuffer staged_ids_, staged_places_;  // [chunk]
  cuda::PinnedBuffer staged_logits_;               // [kLogitRows, V]
  float rope_scale_ = 1.0f;
  std::vector<float> host_q_, host_q_unrotated_, host_k_, host_k_unrotated_, host_v_;  // [N, heads, d]
  HostLists lists_;
  std::map<const void*, Native> natives_;  ///< by the address of the step's selectors
  cuda::Graph dense_graph_;                ///< of one decode step with full attention
};

}  // namespace lode
