// SPDX-License-Identifier: Apache-2.0
// Binary signatures on the GPU (HashAttention): keys are signed once, when their rows are in the store; one
// kernel signs a step's queries, measures all far keys and chooses. Same keys as select/shared/signature_selector.cc
// for the same signatures. Deterministic, no word from the host inside a step.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

inline constexpr int kSignLayers = 4;

/// Networks of one shape, one after the other: y = W x + b in each layer, SiLU or ReLU between layers, and
/// bit j of the signature says whether the last layer's output j is above 0. Device memory.
struct SignNets {
  const void* weights = nullptr;  // [nets][layer by layer: out, in] of `type`
  const float* biases = nullptr;  // [nets][layer by layer: out]
  DType type = DType::f32;        ///< f32 or f16
  int depth = 1;                  ///< layers, at most kSignLayers
  int widths[kSignLayers + 1] =
      {};  ///< inputs, then each layer's outputs; multiples of 8, the last 32 to 128
  bool relu = false;

  LODE_HD int bits() const { return widths[depth]; }
  LODE_HD std::int64_t weights_of_net() const {
    std::int64_t sum = 0;
    for (int i = 0; i < depth; ++i) sum += std::int64_t{widths[i]} * widths[i + 1];
    return sum;
  }
  LODE_HD std::int64_t biases_of_net() const {
    std::int64_t sum = 0;
    for (int i = 0; i < depth; ++i) sum += widths[i + 1];
    return sum;
  }
  LODE_HD int widest() const {
    int most = 0;
    for (int i = 0; i <= depth; ++i) most = widths[i] > most ? widths[i] : most;
    return most;
  }
};

/// Where one document's signatures begin, those of its first layer in front.
struct SignatureSets {
  const std::uint32_t* codes = nullptr;  // [sets of all layers, capacity, words], 16 bytes aligned
  std::int64_t capacity = 0;             ///< positions of a set, a multiple of kSignatureUnit
};

/// Signatures of one model layer's keys, indexed by position; bit i of a signature is bit i % 32 of its word
/// i / 32. With a set for each query head keys have as many signatures; else heads of a group share theirs.
struct Signatures {
  std::uint32_t* codes = nullptr;    // [sets, capacity, words], 16 bytes aligned
  std::int64_t sequence_stride = 0;  ///< words from one sequence's codes to the next one's
  std::int64_t capacity = 0;         ///< positions of a set, a multiple of kSignatureUnit
  int words = 1;                     ///< 1, 2 or 4
  bool per_query_head = false;
  /// Documents whose signatures lie apart, in the place of `codes`, `sequence_stride` and `capacity`.
  const SignatureSets* apart = nullptr;  // [sequences] device
  std::int64_t first_set = 0;            ///< of this layer in each of them
  /// Some may have been written by the launch just before: they are not read ahead of its end.
  bool fresh = false;

  /// This layer's, of one sequence.
  LODE_HD SignatureSets of(std::int64_t sequence) const {
    if (apart == nullptr) return {codes + sequence * sequence_stride, capacity};
    const SignatureSets all = apart[sequence];
    return {all.codes + first_set * all.capacity * words, all.capacity};
  }
};
inline constexpr std::int64_t kSignatureUnit = 256;

/// What phi_kv sees of a key besides the key: nothing, the length of its value, or its value.
enum class SignedValues { off, norm, vector };

/// How wide a network may be whose activations a block of sign_keys has room for on the current GPU.
int widest_signed();

/// Signs keys [begin, end) of `layers` consecutive layers; layer i's signatures lie i * sets * capacity *
/// words behind signatures.codes, its networks i * sets behind the first. The first width of the networks is
/// what phi_kv sees, rounded up to a multiple of 8 (the weights of what is not there are not read as numbers:
/// they must be 0). A key's signature does not depend on which others share the call.
void sign_keys(const char* base /* of the first layer */, const KvLayout& layout, int layers, int query_heads,
               std::int64_t begin, std::int64_t end, const SignNets& nets, SignedValues values,
               const Signatures& signatures, StreamHandle stream);

/// Which keys are near enough (ann/hashing/counting_select.h).
struct SignatureRule {
  enum class Mode { count, depth, combined };
  Mode mode = Mode::count;
  const std::int32_t* budget = nullptr;  // [N] device; not used by depth
  int depth = 0;                         ///< mismatches beyond the nearest key's, summed over the heads
  bool all_ties = false;
  bool per_query_head = false;        ///< who chooses: every query head, or the group by its heads' sum
  std::int64_t sink = 0, window = 0;  ///< the far keys of a query lie in [sink, position + 1 - window)
};
/// Distances are in [0, levels).
int signature_levels(const SignatureRule& rule, const Signatures& signatures, int group);

/// Where several GPUs, each of which has a range of the keys, choose together what one GPU would: each first tells how
/// many of its keys are at each level, and then lists its own of the nearest. The budget is of all of them.
struct SignatureRanks {
  std::int32_t* own = nullptr;        // [lists, levels] to be written, and nothing else is done
  const std::int32_t* all = nullptr;  // [ranks, lists, levels] what all have told; ranges rise with the ranks
  int rank = 0, ranks = 1;
};

/// Signs the queries' heads, `q` as the networks want it, and chooses among far keys. `nets` has one network
/// per query head. `given`, where not null, holds the queries' signatures instead [N, Hq, words]. Rows come
/// out rising; those beyond `capacity` are lost. max_tokens bounds position + 1 over the life of a graph.
void select_by_signature(const Queries& queries, const float* q /*[N, Hq, d]*/, const SignNets& nets,
                         const std::uint32_t* given, const Signatures& signatures, const SignatureRule& rule,
                         std::int64_t max_tokens, std::int32_t* rows /*[lists, capacity]*/,
                         std::int64_t capacity, std::int32_t* counts /*[lists]*/, StreamHandle stream,
                         const SignatureRanks& ranks = {});

/// The same where the shapes are those of hamming_topk_attend.cu; false, and nothing done, elsewhere.
bool select_in_cluster(const Queries& queries, const float* q, const SignNets& nets,
                       const Signatures& signatures, const SignatureRule& rule, std::int64_t max_tokens,
                       std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, StreamHandle stream);

/// Choice and attention over it, sink and window into queries.o: in one launch, where no list is written, or,
/// for one token with long lists, by two, of which the second attends what the first has listed so far
/// (`arriving`, with the rule's budgets, sink and window), as arrives_by_signature says. False, and nothing
/// done, where the shapes are not those that this is for, which can_attend_by_signature knows, or the GPU has
/// no room: then selection and attention must be called.
bool arrives_by_signature(const Queries& queries, const SignNets& nets, const Signatures& signatures,
                          const SignatureRule& rule, const ArrivingRows& arriving);
bool can_attend_by_signature(const Queries& queries, const SignNets& nets, const Signatures& signatures,
                             const SignatureRule& rule, const ArrivingRows& arriving);
bool attend_by_signature(const Queries& queries, const float* q /*[N, Hq, d]*/, const SignNets& nets,
                         const Signatures& signatures, const SignatureRule& rule, std::int64_t max_tokens,
                         const ArrivingRows& arriving, std::int32_t* counts /*[lists]*/, void* workspace,
                         StreamHandle stream);

}  // namespace lode::cuda
