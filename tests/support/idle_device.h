// SPDX-License-Identifier: Apache-2.0
// A device that holds keys and computes nothing: tests give it what they are about.
#pragma once

#include <vector>

#include "select/device_keys.h"

namespace lode::test {

class IdleDevice : public DeviceKeys {
 public:
  bool takes(const KeysOnDevice&, std::int64_t) const override { return false; }
  std::vector<std::vector<float>> centroids(const KeysOnDevice&, std::span<const std::vector<Position>>,
                                            std::int64_t, std::span<const std::uint64_t>) override {
    return {};
  }
  std::vector<std::int32_t> labels(const KeysOnDevice&, std::span<const std::vector<float>>) override {
    return {};
  }
  std::vector<KeyClusters> clusters(const KeysOnDevice&, const ClusterTask&) override { return {}; }
  std::vector<double> sharpness(const KeysOnDevice&, std::span<const float>, int, float) override {
    return {};
  }
  void attend(int, std::int64_t, std::span<const float>, float, std::span<float>, std::span<float>) override {
  }
  void release() override {}
};

}  // namespace lode::test
