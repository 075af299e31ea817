// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "gpu/batch_backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/read.h"

namespace lode {

/// More bytes than caches hold are read from a buffer of at most 4 GiB, again and again.
double gpu_read_microseconds(std::int64_t bytes) {
  constexpr std::int64_t kMost = std::int64_t{4} << 30;
  constexpr int kTimes = 9, kBlocks = 528;  // blocks: four on each of an H200's SMs
  const std::int64_t some = std::max<std::int64_t>(std::min(bytes, kMost) / 16 * 16, 16);
  const cuda::Stream stream;
  const cuda::Buffer buffer(some, "bytes to read"), sink(16, "bytes to read");
  cuda::fill(buffer.as<void>(), 1, some, stream.get());
  cuda::Timer timer;
  std::vector<double> times;
  for (int i = 0; i < kTimes; ++i) {
    timer.start(stream.get());
    cuda::read_only(buffer.as<void>(), some, kBlocks, sink.as<void>(), stream.get());
    timer.stop(stream.get());
    times.push_back(timer.microseconds());
  }
  std::nth_element(times.begin(), times.begin() + kTimes / 2, times.end());
  return times[kTimes / 2] * static_cast<double>(bytes) / static_cast<double>(some);
}

}  // namespace lode
