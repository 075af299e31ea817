// SPDX-License-Identifier: Apache-2.0
// What the files of the played GPU share.
#pragma once

#include <functional>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/linear.h"
#include "lodestone/types.h"

namespace lode::cuda {

/// Work to be done as late as the stream may do it.
void enqueue(StreamHandle stream, std::function<void()> work);
/// So many bytes of "device" memory; more is refused as a GPU refuses it. Says how many are in use.
std::int64_t play_memory(std::int64_t bytes);
inline constexpr std::int64_t kPlayedMemory = std::int64_t{1} << 34;  ///< unless play_memory says otherwise
/// The next flush of what a chain holds back (launch_chain.h) fails.
void fail_next_flush();
/// Index building of contexts that are made from now on holds so many bytes; of the last of them, how many are left to
/// it.
void play_held_clusters(std::int64_t bytes);
std::int64_t left_to_index();
std::vector<float> widened(const void* from, DType type, std::int64_t n);
/// x w^T + bias, [n, w.rows].
std::vector<float> product(const float* x, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias);
/// rms_norm(x) with a gain, [n, weight.cols].
std::vector<float> normed(const float* x, std::int64_t n, const DeviceWeight& weight, float eps);
float activated(const Activation& activation, float gate, float up);
/// What is added of a feed-forward of every token, [n, D].
std::vector<float> fed_forward(const Linear::MlpArguments& a, std::int64_t n, const float* x);

}  // namespace lode::cuda
