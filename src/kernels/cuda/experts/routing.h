// SPDX-License-Identifier: Apache-2.0
// Which experts each token goes through, found on the device, and the rows of each expert side by side. A slot is
// one choice of one token: slot t * used + j is the j-th best of token t.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// Device memory. Experts are listed in ascending order.
struct Routing {
  int* slot_expert = nullptr;    // [n * used]
  float* slot_weight = nullptr;  // [n * used]
  int* order = nullptr;          // [n * used] slots, those of an expert side by side, ascending
  int* groups = nullptr;         // [1] how many experts are listed
  int* expert = nullptr;         // [groups]
  int* begin = nullptr;          // [groups + 1] of its slots in `order`
  unsigned* arrived = nullptr;   // [1] zero before a call and behind it
  int used = 0;                  ///< slots of a token
};

/// A router, as ExpertPlan of layer_plan.h says of each.
struct RouterPlan {
  int count = 0, used = 0;  ///< E; experts of a token
  bool sigmoid = false;     ///< scores, not a softmax
  bool score_chosen = false, normalise = false;
  float scale = 1.0f;
  int groups = 1, groups_used = 1, group_best = 1;
};

/// Logits of the router and what is added to them; null where there is none.
struct RouterInput {
  float* logits = nullptr;             // [n, E]
  const float* bias = nullptr;         // [E] of the logits
  const float* choice_bias = nullptr;  // [E] of scores, for the choice alone
  const float* factors = nullptr;      // [E] of weights
};

/// Up to so many rows are few, as long as there are no more than kFewExperts and a token has no more than kFewSlots /
/// kFewRows of them.
inline constexpr int kFewRows = 8, kFewSlots = 256, kFewExperts = 512;
inline bool are_few(std::int64_t rows, const RouterPlan& plan) {
  return rows <= kFewRows && plan.count <= kFewExperts && plan.used <= kFewSlots / kFewRows;
}

/// The stream before a router, through its norm, and the router. Logits are made on the way.
struct RouterRows {
  const float* x = nullptr;  // [n, D]
  DeviceWeight norm;         // [1, D]
  float eps = 1e-5f;
  const float* w = nullptr;  // [E, D]
  RouterInput input;         ///< whose logits [n, E] are written
  /// What else is made of the same rows: the logit that weighs the feed-forward of every token; null: none.
  const float* shared_gate = nullptr;  // [D]
  float* shared_logits = nullptr;      // [n]
};

/// Memory of a routing of up to so many rows, which begins as zeros.
std::int64_t routing_bytes(std::int64_t rows, const RouterPlan& plan);
/// The routing that lies in such memory, of n rows.
Routing routing_in(void* memory, std::int64_t rows, const RouterPlan& plan);
/// Fills it for n rows, and lists all experts. Equal scores: the lower number first; NaN is behind all others.
void route(const RouterPlan& plan, const RouterInput& input, std::int64_t n, const Routing& to,
           StreamHandle stream);
/// The same for few rows, from the stream on, in one launch; lists the experts that somebody chose.
void route_few(const RouterPlan& plan, const RouterRows& rows, std::int64_t n, const Routing& to,
               StreamHandle stream);

}  // namespace lode::cuda
