// SPDX-License-Identifier: Apache-2.0
// One forward pass over rows of many sequences and documents.
//
//   generated tokens, up to kNarrowRows at a time ──▶ products together ──▶ keys to each row's tail
//   rows of one document and method side by side:  full: attend_shared reads the document once for all of them
//                                                  sparse: the document's GPU selector lists far keys
//   layers with a sliding window: what it reaches of the document, listed, and of the tail
//   each row's own tail, and the document's end where that is near ──▶ the states are merged
//
// A sparse row attends to keys from the last whole block in front of its window on, so that what is near is a
// plain range, and so is a tail: nothing in it is ever far. An index that ends with the document is chosen from as a
// whole (LocalWindow::from_context): near keys begin with the block behind its end, and keys between are listed. Where
// it ends in the document's last block, which tails begin with, keys of that block are taken out of the lists. A
// question's tokens choose kMostSparseTokens at a time, also by methods whose questions choose as a whole elsewhere.
//
// Methods that the GPU has no selector for are asked on the host, among the document's rows there, for the very keys that
// are far: each layer waits for its queries, and passes with such rows are not captured. Their questions choose kWideRows
// tokens at a time. What a method estimates of keys that it skips counts those of the document's last block twice where they
// have become far, since the tail attends to them.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>

#include "gpu/batch_backend.h"
#include "gpu/context.h"
#include "gpu/layers/delta_layers.h"
#include "gpu/layers/latent_layers.h"
#include "gpu/layers/layer_rows.h"
#include "gpu/select/host_choice.h"
#include "gpu/tail_pool.h"
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/linear/narrow_linear.h"

namespace lode {

class CudaBatch final : public GpuBatch {
 public:
  CudaBatch(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
            const GpuBatchOptions& options);

  std::unique_ptr<GpuTail> branch(GpuContext& document, std::int64_t room) override;
  void forward(std::span<const GpuBatchRow> rows, std::vector<float>& logits) override;

 private:
  using GpuMethodState = CudaContext::GpuMethodState;
  static constexpr int kWideRows = 256;  ///< of a question at a time
  static constexpr std::int64_t kMostGraphs = 64;

  /// A token of the pass.
  struct Token {
    const GpuBatchRow* row = nullptr;
    TokenId id = 0;
    std::int64_t position = 0, seam = 0;
    // Of a sparse token:
    std::int64_t far_end = 0;    ///< keys from here on are near, or in the tail
    std::int64_t index_end = 0;  ///< keys from here on are always attended to; at most far_end
    std::int64_t select_end =
        0;  ///< the selector chooses among keys in front of it; it lists none behind the seam
    CudaContext* document = nullptr;
    GpuMethodState* method = nullptr;  ///< null: full attention, or the host chooses
    bool host_chooses = false;
    float* logits = nullptr;     ///< where they go; null: none are wanted
    TokenId* largest = nullptr;  ///< where the token of the largest goes instead
    bool sparse() const { return method != nullptr || host_chooses; }
    /// Of a sparse token: the position that its selector is told, whose window begins at select_end.
    std::int64_t select_position() const { return select_end + row->dense.window - 1; }
  };
  /// A document, and who chooses its far keys: nobody for full attention.
  struct Asked {
    CudaContext* document = nullptr;
    GpuMethodState* method = nullptr;
    Selector* const* on_host = nullptr;  ///< [L] who choose on the host
    bool operator==(const Asked&) const = default;
  };
  /// Tokens side by side that attend in one way: to one document, or to several whose selectors choose in one
  /// launch. The selector whose lists have room for all leads.
  struct Group {
    std::vector<Asked> asked;
    std::size_t leading = 0;
    int first = 0, count = 0;
    int number = 0;  ///< of its first document among all of the pass
    const Asked& leader() const { return asked[leading]; }
    GpuMethodState* method() const { return leader().method; }
    Selector* const* on_host() const { return leader().on_host; }
  };
  /// What one pass runs on.
  struct Pass {
    std::span<const Token> tokens;
    std::vector<Group> groups;
    bool narrow = true, wants_logits = false, wants_largest = false;
    const Rope* rope = nullptr;
    std::int64_t longest_tail = 0, longest_near = 0;  ///< rounded up to powers of two
    std::vector<cuda::DeltaRows> states = {};  ///< of each sequence side by side, where layers are recurrent
    int count() const { return static_cast<int>(tokens.size()); }
    bool host_chooses() const {
      return std::ranges::any_of(groups, [](const Group& group) { return group.on_host() != nullptr; });
    }
    /// Of recurrent layers: whether each token is of a sequence of its own.
    bool single() const { return states.size() == tokens.size(); }
  };
  /// Of each kind of layers where the tails of tokens lie.
  using TailBases = std::array<std::array<const char*, kWideRows>, LayerKinds::kMost>;
  /// The host's part of what the GPU looks up, and its copy there: one array behind the other.
  struct Staged {
    std::array<TokenId, kWideRows> ids;
    std::array<cuda::QueryToken, kWideRows> absolute, in_tail, in_near, to_select, in_document;
    TailBases absolute_bases, tail_bases;
    std::array<cuda::DeltaRows, cuda::kNarrowRows> states;
  };

  std::vector<Token> tokens_of(const GpuBatchRow& row, float* logits) const;
  void run_narrow(std::span<Token> tokens);
  void run_wide(std::span<const Token> tokens);
  void run(Pass& pass);
  void enqueue_or_replay(const Pass& pass);
  Pass make_pass(std::span<const Token> tokens, bool narrow);
  static const Group& group_of(const Pass& pass, int token);
  static std::int32_t document_of(const Pass& pass, int token);
  void stage(Pass& pass);
  void stage_documents(const Pass& pass);
  void stage_states(Pass& pass);
  static void commit_states(const Pass& pass);
  void prepare(const Pass& pass);
  std::vector<std::uint64_t> key_of(const Pass& pass) const;
  void enqueue(const Pass& pass);
  void enqueue_experts(const CudaModel::Layer& w, const Pass& pass);
  void enqueue_layer(int layer, const Pass& pass);
  void enqueue_inputs(int layer, const Pass& pass, const cuda::DeviceWeight& next);
  LayerInputs::Product product_of_stream(const Pass& pass);
  void enqueue_mixer(int layer, const Pass& pass);
  void project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv, const cuda::Queries& where,
               bool narrow);
  DeltaLayers::Product product_of(const CudaModel::Layer& w, const Pass& pass);
  void enqueue_head(const Pass& pass);
  void finish_logits(std::int64_t count);
  std::vector<cuda::StatePlanes> attend_plain(int layer, const Pass& pass);
  void attend(int layer, const Pass& pass);
  void attend_window(int layer, const Pass& pass);
  void attend_window_of_documents(int layer, const Pass& pass, std::int64_t window);
  void make_window_lists(std::int64_t longest);
  std::int64_t longest_document(const Pass& pass) const;
  void add_sinks(int layer, const Pass& pass);
  void report_masses(int layer, const Pass& pass);
  static Asked asked_by(const Token& token);
  static void find_far_keys(std::int64_t behind, bool as_a_whole, Token& token);
  static bool joins(Group& group, const Asked& asked);
  bool attends_all(const Group& group, int layer) const;
  bool all_choose(int layer, const Pass& pass) const;
  cuda::StatePlanes read_document(int layer, const Pass& pass, const Group& group, cuda::StreamHandle stream);
  int attend_chosen(int layer, const Pass& pass, const Group& group, cuda::StatePart (&states)[3]);
  static std::vector<HostChoice::Part> parts_on_host(int layer, std::span<const Token> tokens);
  void attend_chosen_on_host(int layer, const Pass& pass, const Group& group, const cuda::Queries& far);
  void attend_near(int layer, const Pass& pass, const Group& group);
  void take_logits(const Pass& pass);
  void count_work(const Pass& pass) const;
  void count_sparse(const Pass& pass, const Group& group, int layer) const;
  cuda::Queries queries(const Pass& pass, int layer, const cuda::QueryToken* tokens,
                        const TailBases& bases) const;
  cuda::Queries of_group(const Group& group, int layer, float* o, float* lse) const;
  cuda::Queries near_of(int layer, const Group& group) const;
  static std::int64_t longest_near(const Pass& pass);
  template <class T>
  const T* there(const T& staged) const;
  cuda::Precision precision() const {
    return options_.kv_type == DType::f32 ? cuda::Precision::exact : cuda::Precision::fast;
  }

  const ModelConfig& config_;
  std::shared_ptr<const CudaModel> model_;
  GpuBatchOptions options_;
  /// beside_: documents are read while tails are attended to, or tails while keys are chosen.
  cuda::Stream stream_, beside_;
  cuda::Event forked_, joined_;
  std::shared_ptr<TailPool> pool_;
  cuda::Linear linear_;
  cuda::NarrowLinear narrow_;
  cuda::Experts experts_;
  DeltaLayers recurrent_;
  LatentLayers latent_;
  LayerInputs inputs_;
  LayerKinds kinds_;
  cuda::Buffer staged_there_;
  cuda::PinnedBuffer staged_;
  // Where each layer of the pass's documents begins, [L, kMostSparseTokens]; then where the first near key of
  // each sparse token lies, [L, kWideRows].
  cuda::PinnedBuffer layer_bases_;
  cuda::Buffer layer_bases_there_;
  LayerTurns turns_;
  cuda::Buffer frequencies_;                               // [d/2] usual, then those of Turn::local
  cuda::Buffer x_;                                         // [kWideRows, D]
  cuda::Buffer q_, q_unrotated_, attention_, far_, near_;  // [kWideRows, Hq, d]
  cuda::Buffer tail_lse_, far_lse_, near_lse_;             // [kWideRows, Hq]
  cuda::Buffer logits_;                                    // [kNarrowRows, V]
  cuda::PinnedBuffer staged_logits_;
  cuda::Buffer largest_;  // [kNarrowRows] tokens
  cuda::PinnedBuffer staged_largest_;
  cuda::Buffer workspace_;                          ///< of stream_
  cuda::Buffer tail_workspace_, shared_workspace_;  ///< of beside_: for tails, for documents
  // Of layers with a window, for so many tokens at a time as a list may be of; the first is of no rows at all:
  cuda::Buffer no_rows_, window_rows_,
      window_counts_;  // [kMostSparseTokens, Hkv], with [capacity] for the second
  std::int64_t window_capacity_ = 0;
  MassFinder masses_;
  HostChoice host_choice_;
  std::vector<float> frequencies_set_;
  float rope_scale_ = 1.0f;
  std::map<std::vector<std::uint64_t>, cuda::Graph> graphs_;  ///< empty ones: seen once
};

}  // namespace lode
