// SPDX-License-Identifier: Apache-2.0
#include "base/link_speed.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "lodestone/error.h"

namespace lode {

namespace {

/// Seconds of an exchange in which each rank sends `bytes` to each of its next `others`: the median of some.
double seconds_of(Communicator& ranks, std::size_t bytes, int others, int repeats) {
  const int size = ranks.size();
  std::vector<std::byte> out(bytes), in(bytes * static_cast<std::size_t>(size));
  std::vector<std::span<const std::byte>> to(static_cast<std::size_t>(size));
  std::vector<std::span<std::byte>> from(to.size());
  for (int step = 1; step <= others; ++step) {
    const auto next = static_cast<std::size_t>((ranks.rank() + step) % size);
    const auto before = static_cast<std::size_t>((ranks.rank() + size - step) % size);
    to[next] = out;
    from[before] = std::span(in).subspan(before * bytes, bytes);
  }
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    ranks.barrier();
    const auto start = std::chrono::steady_clock::now();
    ranks.exchange(to, from);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[static_cast<std::size_t>(repeats / 2)];
}

/// The largest of all ranks' figures.
double slowest(Communicator& ranks, double own) {
  std::vector<double> all(static_cast<std::size_t>(ranks.size()));
  all[static_cast<std::size_t>(ranks.rank())] = own;
  std::vector<std::span<std::byte>> parts;
  for (double& one : all) parts.push_back(std::as_writable_bytes(std::span(&one, 1)));
  ranks.all_gather(parts);
  return *std::ranges::max_element(all);
}

}  // namespace

LinkSpeed measure_link(Communicator& ranks) {
  constexpr std::size_t kSmall = 64, kLarge = std::size_t{1} << 22;
  constexpr int kSmallRepeats = 301, kLargeRepeats = 15;
  LODE_ASSERT(ranks.size() > 1);
  const int others = ranks.size() - 1;
  seconds_of(ranks, kLarge, others, 2);  // connections are made
  LinkSpeed speed;
  speed.latency = slowest(ranks, seconds_of(ranks, kSmall, 1, kSmallRepeats));
  const double all = slowest(ranks, seconds_of(ranks, kSmall, others, kSmallRepeats));
  speed.message = others > 1 ? std::max(0.0, all - speed.latency) / (others - 1) : speed.latency / 10;
  const double large = slowest(ranks, seconds_of(ranks, kLarge, others, kLargeRepeats));
  speed.bytes_per_second = static_cast<double>(kLarge) * others / std::max(1e-9, large - all);
  return speed;
}

}  // namespace lode
