// SPDX-License-Identifier: Apache-2.0
// The feed-forward of a layer with a mixture of experts, on the GPU: a router chooses, each expert's rows go through its
// matrices together, and what they give is added up. Nothing of it needs the host. Up to kTiledRows rows over
// matrices in tiles read the chosen experts' weights alone, eight rows at a time; rows of other matrices do so up to
// kFusedRows. More go through one product an expert, whose tiles are unpacked before, as many as a panel holds.
#pragma once

#include "kernels/cuda/experts/grouped_product.h"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// The matrices of all experts of a layer behind one another: [count * rows, cols], each in rows of its own.
struct ExpertMatrices {
  DeviceWeight all;  ///< in tiles only where the rows of each are a multiple of kTileRows
  int count = 0;
  const float* bias = nullptr;  // [count, rows]; null when the plan has none
  std::int64_t rows() const { return all.rows / count; }
};

struct ExpertArguments {
  DeviceWeight norm;         // [1, D] before the experts
  DeviceWeight router_norm;  // [1, D] before the router; none: the experts'
  float eps = 1e-5f;
  RouterPlan plan;
  DeviceWeight router;                 // [E, D] of 32 bits
  const float* router_bias = nullptr;  // [E]; null when there is none, as the next
  const float* choice_bias = nullptr;  // [E]
  const float* factors = nullptr;      // [E] of weights
  ExpertMatrices gate, up, down;       // of [F, D] twice, [D, F]
  Activation activation;
  /// The feed-forward of every token, with a norm of its own before it, whose gate has no data where there is none, and
  /// what weighs its output by sigmoid(h . shared_gate).
  Linear::MlpArguments shared;
  DeviceWeight shared_gate;  // [1, D], not in tiles; or none
  DeviceWeight post_norm,
      shared_post_norm;  ///< [1, D] of what experts and feed-forward put out; none, or both
  Addition addition;     ///< of the two together
};

/// Sizes of a model's layers that decide how much scratch they need.
struct ExpertSizes {
  std::int64_t hidden = 0, width = 0;  ///< D, F
  RouterPlan plan;
  std::int64_t panel_rows = 0;  ///< of an expert's largest matrix in tiles; 0: none is in tiles
  std::int64_t panel_cols = 0;
};

class Experts {
 public:
  /// `linear` is of the same stream and precision and outlives this.
  Experts(Linear& linear, StreamHandle stream, Precision precision);

  /// Rows that go through the experts at a time; scratch is for no more.
  static constexpr std::int64_t kMostRows = 2048;
  static std::int64_t scratch_bytes(const ExpertSizes& sizes, std::int64_t rows, Precision precision);
  /// Allocates it for calls of up to so many rows. Must come before capture.
  void reserve(const ExpertSizes& sizes, std::int64_t rows);

  /// Adds experts(norm(x)) + shared feed-forward(norm(x)), as the addition says.
  void add(const ExpertArguments& arguments, std::int64_t n, float* x /*[n, D]*/);

 private:
  struct Scratch {
    std::int64_t routing = 0, logits = 0, shared = 0, shared_gate = 0, normed = 0, operand = 0, gate = 0,
                 up = 0, act = 0, out = 0, panel = 0, end = 0;  ///< bytes from its beginning
  };
  static Scratch layout(const ExpertSizes& sizes, std::int64_t rows, Precision precision);
  void add_some(const ExpertArguments& a, std::int64_t n, float* x);
  bool are_streamed(const ExpertArguments& a, std::int64_t n) const;
  std::int64_t streamed_at_once(const ExpertArguments& a) const;
  void find_routing(const ExpertArguments& a, std::int64_t n, const float* x, bool few,
                    const Routing& routing);
  static bool gate_is_routed(const ExpertArguments& a, bool few);
  void add_shared(const ExpertArguments& a, std::int64_t n, bool few, float* x);
  void add_sum(const ExpertArguments& a, std::int64_t n, bool streamed, const Routing& routing, float* x);
  void stream(const ExpertArguments& a, std::int64_t n, const float* x, const Routing& routing);
  void stream_gate_and_up(const ExpertArguments& a, std::int64_t n, const float* x, const Routing& routing);
  void multiply(const ExpertArguments& a, std::int64_t n, const float* x, const Routing& routing);
  void multiply_panels(const ExpertMatrices& m, GroupedProduct product);
  void activate_slots(const ExpertArguments& a, std::int64_t slots, const Routing& routing, const float* gate,
                      const float* up, DType type);
  template <class T = float>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(scratch_.as<char>() + offset);
  }

  Linear& linear_;
  StreamHandle stream_;
  Precision precision_;
  Buffer scratch_;
  Scratch places_;
  std::int64_t reserved_rows_ = 0;
  std::int64_t panel_bytes_ = 0;
};

}  // namespace lode::cuda
