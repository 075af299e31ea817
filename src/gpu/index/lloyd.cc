// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/lloyd.h"

#include <numeric>
#include <vector>

#include "base/cancel.h"
#include "base/rng.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float), kHalf = 2, kSum = sizeof(std::int64_t);

/// The front of a shuffled list, as ann/kmeans.cc has it.
void initial_points(std::int64_t count, std::span<std::int32_t> picks, std::uint64_t seed) {
  Rng rng(hash_seed(seed, std::ssize(picks)));
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t c = 0; c < picks.size(); ++c) {
    const std::size_t pick = c + static_cast<std::size_t>(rng.below(order.size() - c));
    std::swap(order[c], order[pick]);
    picks[c] = order[c];
  }
}

}  // namespace

void reserve(cuda::Buffer& buffer, std::int64_t bytes) {
  if (buffer.bytes() >= bytes) return;
  buffer = cuda::Buffer();
  buffer = cuda::Buffer(bytes, "clusters of keys");
}

std::int64_t Lloyd::bytes_for(const LloydTask& head) {
  const std::int64_t halves = cuda::half_width(head.width) * kHalf;
  return head.count * (halves + 2 * kFloat) +
         head.clusters * (halves + 3 * kFloat + head.width * (kFloat + kSum));
}

void Lloyd::allocate() {
  const std::int64_t points = task_.heads * task_.count, clusters = task_.heads * task_.clusters,
                     halves = cuda::half_width(task_.width) * kHalf;
  reserve(halves_, points * halves);
  reserve(factors_, points * kFloat);
  reserve(labels_, points * kFloat);
  reserve(centroids_, clusters * task_.width * kFloat);
  reserve(centroid_halves_, clusters * halves);
  reserve(centroid_factors_, clusters * kFloat);
  reserve(biases_, clusters * kFloat);
  reserve(sums_, clusters * task_.width * kSum);
  reserve(counts_, clusters * kFloat);
  reserve(largest_, task_.heads * kFloat);
  reserve(seeds_, task_.heads * kSum);
}

void Lloyd::release() {
  for_buffers(*this, [](cuda::Buffer& buffer) { buffer = cuda::Buffer(); });
}

std::int64_t Lloyd::bytes() const {
  std::int64_t sum = 0;
  for_buffers(*this, [&](const cuda::Buffer& buffer) { sum += buffer.bytes(); });
  return sum;
}

cuda::HalfRows Lloyd::points_in_halves() const {
  return {.heads = task_.heads,
          .width = task_.width,
          .count = task_.count,
          .halves = halves_.as<void>(),
          .factors = factors_.as<float>()};
}

cuda::Clusters Lloyd::clusters() const {
  return {.centroids = {.heads = task_.heads,
                        .width = task_.width,
                        .count = task_.clusters,
                        .halves = centroid_halves_.as<void>(),
                        .factors = centroid_factors_.as<float>()},
          .rows = centroids_.as<float>(),
          .biases = biases_.as<float>(),
          .by_distance = task_.by_distance};
}

cuda::LabelSums Lloyd::sums() const {
  return {.heads = task_.heads,
          .width = task_.width,
          .labels = task_.clusters,
          .count = task_.count,
          .sums = sums_.as<std::int64_t>(),
          .counts = counts_.as<std::int32_t>(),
          .largest = largest_.as<float>()};
}

void Lloyd::start(const float* points, cuda::StreamHandle stream) {
  const auto clusters = static_cast<std::size_t>(task_.clusters);
  std::vector<std::int32_t> picks(static_cast<std::size_t>(task_.heads) * clusters);
  for (std::size_t head = 0; head < task_.seeds.size(); ++head)
    initial_points(task_.count, std::span(picks).subspan(head * clusters, clusters), task_.seeds[head]);
  // The labels are not in use yet. Pageable memory: the call returns once the bytes have left.
  cuda::copy(labels_.as<void>(), picks.data(), std::ssize(picks) * kFloat, stream);
  cuda::start_clusters(points, task_.count, labels_.as<std::int32_t>(), this->clusters(), stream);
}

void Lloyd::send_seeds(int round, cuda::StreamHandle stream) {
  std::vector<std::uint64_t> seeds;
  for (const std::uint64_t seed : task_.seeds) seeds.push_back(hash_seed(seed, task_.clusters, round));
  cuda::copy(seeds_.as<void>(), seeds.data(), std::ssize(seeds) * kSum, stream);
}

void Lloyd::run(float* points, const LloydTask& task, cuda::StreamHandle stream) {
  LODE_ASSERT(task.clusters >= 1 && task.clusters <= task.count && task.width <= cuda::kMostWidth &&
              std::ssize(task.seeds) == task.heads);
  task_ = task;
  allocate();
  cuda::halve(points, points_in_halves(), stream);
  start(points, stream);
  for (int round = 0; round < task.rounds; ++round) {
    check_cancel();
    label(stream);
    cuda::sum_by_label(points, labels(), sums(), stream);
    send_seeds(round, stream);
    cuda::move_clusters(points, labels(), sums(), seeds_.as<std::uint64_t>(), clusters(), stream);
  }
}

void Lloyd::label(cuda::StreamHandle stream) {
  cuda::nearest(points_in_halves(), clusters(), labels_.as<std::int32_t>(), stream);
}

void Lloyd::means(const float* rows, const float* plus, float* to, cuda::StreamHandle stream) {
  cuda::sum_by_label(rows, labels(), sums(), stream);
  cuda::means_by_label(sums(), plus, to, stream);
}

void Lloyd::variances(const float* rows, const float* means, float* to, cuda::StreamHandle stream) {
  cuda::sum_squares_by_label(rows, labels(), means, sums(), stream);
  cuda::squares_by_label(sums(), to, stream);
}

}  // namespace lode
