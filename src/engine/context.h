// SPDX-License-Identifier: Apache-2.0
// What a Context holds, and the hook by which measurements look inside.
#pragma once

#include <memory>
#include <vector>

#include "engine/audit.h"
#include "engine/model.h"
#include "kernels/rope.h"
#include "kv/store.h"
#include "lodestone/documents.h"
#include "lodestone/engine.h"
#include "model/llama.h"
#include "select/rank_choice.h"

namespace lode {

/// Tokens of a prefill chunk: enough that products of matrices are efficient.
inline constexpr std::int64_t kCpuChunk = 512, kGpuChunk = 2048;
/// Tokens of a prefill chunk under these options.
inline std::int64_t prefill_chunk(const ContextOptions& options) {
  if (options.chunk > 0) return options.chunk;
  // Rows of q4 are read as they are before they are coded within a chunk (Llama::take_uncoded): in the longer one, less is lost.
  return options.device == Device::cuda || options.kv_type == DType::q4 ? kGpuChunk : kCpuChunk;
}
/// Tokens of a question that choose their keys together, where a method has all of them do so: longer questions
/// choose by pieces, on every device.
inline constexpr std::int64_t kMostTogether = 2048;

/// An attached attention method.
struct AttachedMethod {
  Spec spec;
  std::vector<std::unique_ptr<Selector>> owned;  // [L], null where the layer is dense
  std::vector<Selector*> selectors;              // [L], views of `owned`
  bool built = false;                            ///< can be used
  ChosenBy chosen_by = ChosenBy::host;           ///< the selectors here serve wherever the host must choose
  bool built_on_host = false;
  std::int64_t built_over = -1;  ///< tokens of the context when it was built on the host
  bool divided = false;          ///< its selectors cover this rank's keys alone
  bool dense() const { return spec.name == "full"; }
};

struct Context::Impl {
  Impl(std::shared_ptr<const Model> model, const ContextOptions& options);

  std::shared_ptr<const Model> model;
  ContextOptions options;
  ModelConfig config;        ///< the model's, with the RoPE scaling that the user asked for
  std::int64_t rope_tokens;  ///< the length that RoPE's frequencies were made for
  Rope rope;
  KvStore kv;  ///< of a context on the GPU it may be behind; host_kv brings it up
  Llama llama;
  std::unique_ptr<GpuContext> gpu;  ///< null: everything happens on the CPU
  std::vector<TokenId> ids;         // [tokens]
  KeyShare share;  ///< of a context whose keys lie on several ranks; set before methods are attached
  /// Of such a context: makes the keys of all ranks readable here, for methods that need them; empty: they are not to
  /// be had.
  std::function<void()> read_all_rows;
  std::int64_t indexed = 0;  ///< tokens that the indexes were built over
  std::shared_ptr<const SourceText> source = std::make_shared<SourceText>();  ///< never null
  std::int64_t first_token = 0;                                               ///< of the source's text
  std::vector<AttachedMethod> methods;
  std::vector<Spec> specs;                        ///< of `methods`, in order
  std::vector<std::vector<Selector*>> listeners;  // [L] selectors that want on_write
  /// The same behind the context: without those in whose place the GPU chooses.
  std::vector<std::vector<Selector*>> later_listeners;  // [L]
  std::vector<float> logits;                            // rows of the last run
  Audit audit;                                          ///< of run()
  const ForwardHooks* hooks = nullptr;                  ///< for probe and audit; not owned
  QueryOverride given;                                  ///< of every step, for benches; not owned
  std::vector<std::string> on_host;  ///< what ran on the host though a GPU was asked for, each thing once

  std::int64_t tokens() const { return std::ssize(ids); }
  /// What the host needs to choose a method's keys of a context on the GPU: the rows, and an index where that is made.
  void prepare_to_choose(MethodId method);
  KvStore& host_kv();  ///< with the keys and values of all tokens
  /// Tokens of a step behind the context: those of a long chunk for q4 would choose too many keys at once.
  std::int64_t question_chunk() const {
    const bool is_long = options.device == Device::cpu && options.kv_type == DType::q4;
    return is_long ? std::min(options.chunk, kCpuChunk) : options.chunk;
  }
  MethodId find(const Spec& spec) const;  ///< -2 when it is not attached
  /// One forward pass of tokens under a method, chunked by options.chunk; logits of the last token unless
  /// `all`.
  WorkReport run(std::span<const TokenId> tokens, MethodId method, Phase phase, LogitRows rows,
                 const std::function<void(std::int64_t)>& progress = {});
  /// How the tokens of one step attend, and who looks.
  struct StepOptions {
    MethodId method = kDense;
    Phase phase = Phase::question;
    LogitRows rows = LogitRows::none;
    const ForwardHooks* hooks = nullptr;
    Audit* audit = nullptr;  ///< layers that fell back attend fully
    MethodId told =
        kDense;  ///< whose selectors choose by these tokens, a prompt's (Branches::chooses_by_prompt)
  };
  /// One forward pass of all these tokens at once. On any exception the context is as it was.
  ForwardWork step(std::span<const TokenId> tokens, const StepOptions& options);
  std::vector<std::vector<Selector*>> listeners_with(MethodId method) const;
  ForwardWork forward(const Step& step, const AttachedMethod* method, LogitRows rows);
  /// Whether the sources of an answer are found by a GPU that reads it once more when it is complete.
  bool rereads_for_sources() const { return gpu != nullptr && gpu->finds_masses() && kv.recurrent().empty(); }
  bool gpu_finds_masses(const Step& step) const;
  std::string why_on_host(const Step& step, const AttachedMethod* method) const;
  std::string remark_on_host(std::size_t known) const;
  std::int64_t joint_query_tokens(MethodId method) const;  ///< Selector::joint_query_tokens of its layers
  Position far_limit_of(const AttachedMethod* method) const;
  void build(AttachedMethod& method, const std::function<void()>& layer_done);
  /// Fills in the method's `owned` and `selectors`; `complete` is its spec with the model's artefact.
  void make_selectors(const MethodInfo& info, const Spec& complete, AttachedMethod& method);
  void build_on_host(AttachedMethod& method, const std::function<void()>& layer_done);
  bool take_index(const AttachedMethod& method, std::size_t layer);  ///< of a method that was built alike
  /// Divides a method's selectors, where ranks share the keys; InputError when it can have neither a share nor all.
  void divide(AttachedMethod& method);
  /// Rows of a layer that a method's selectors index.
  class IndexedRows;
  void finish(AttachedMethod& method);  ///< MethodInfo::finish, over the indexed context
  /// Back to so many tokens. Where layers are recurrent and no state of there was kept, the tokens behind the last one
  /// that was are read again, densely.
  void roll_back(std::int64_t tokens);
  void cut(std::int64_t tokens);  ///< the same, where that can be gone back to
  void require_room(std::int64_t more) const;
};

/// Where ranks share the keys they end with this rank's share.
class Context::Impl::IndexedRows {
 public:
  IndexedRows(const Context::Impl& context, const AttachedMethod& method, int layer);
  KvLayer view() const { return {.heads = heads_, .tokens = tokens_}; }

 private:
  std::vector<KvRows> heads_;
  std::int64_t tokens_ = 0;
};

WorkReport report_of(const ForwardWork& work, std::int64_t tokens);
/// The GPUs that a context is asked for, and how they share a model and a text.
GpuGroup gpu_group(const ContextOptions& options);
/// Whether keys are chosen by a prompt that is known before its answer (Branches).
bool chooses_by_prompt(const AttachedMethod& method);
/// What the host does for a context on the GPU where it chooses a method's keys.
std::string choice_on_host(const Spec& spec);
/// Says what the host did in a GPU's place; empty for nothing.
std::string remark_on_host(std::span<const std::string> what);
/// What the selectors of a method say of a context of so many tokens: the first that says something, and how many others
/// do.
std::string notice_of(const AttachedMethod& method, std::int64_t tokens);

/// InputError where it shows without a text that one which has been read cannot be indexed for a method: it does not
/// fit the model, lacks its artefact, or learns from the prefill itself.
void expect_index_without_reading(const std::shared_ptr<const Model>& model, const Spec& spec);

/// Which clusters of keys the host's cores have made of a context on the GPU, and why, for people; empty: none.
std::string clusters_left_to_host(const Context& context);

}  // namespace lode
