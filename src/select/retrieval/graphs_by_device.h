// SPDX-License-Identifier: Apache-2.0
// What a GPU does of graphs' building, where there is one that takes them, else the host's cores.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "ann/graph/graph_device.h"
#include "ann/nearest.h"
#include "base/out_of_memory.h"
#include "select/device_keys.h"

namespace lode {

class GraphsByDevice final : public GraphDevice {
 public:
  /// `device` may be null.
  GraphsByDevice(DeviceKeys* device, ThreadPool& pool) : device_(device), pool_(pool) {}

  std::vector<Node> nearest(Matrix<const float> queries, Matrix<const float> keys, std::int64_t k) override {
    if (device_ == nullptr || !device_->takes_nearest(queries.rows, keys.rows, keys.cols, k))
      return nearest_keys(queries, keys, k, pool_);
    try {
      std::vector<Node> found = device_->nearest_keys(queries, keys, k);
      find_again(queries, keys, k, found);
      return found;
    } catch (const OutOfDeviceMemory&) {  // others have taken it
      return nearest_keys(queries, keys, k, pool_);
    }
  }
  std::unique_ptr<GraphLinker> linker(Matrix<const float> keys, std::span<const Node> nearest,
                                      std::int64_t each, int degree) override {
    return device_ != nullptr ? device_->linker(keys, nearest, each, degree) : nullptr;
  }
  std::unique_ptr<QueryWalks> walks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like) override {
    return device_ != nullptr ? device_->walks(of, keys, like) : nullptr;
  }

 private:
  /// Lists that the device does not know.
  void find_again(Matrix<const float> queries, Matrix<const float> keys, std::int64_t k,
                  std::vector<Node>& found) {
    std::vector<std::int64_t> unknown;
    std::vector<float> rows;
    for (std::int64_t q = 0; q < queries.rows; ++q) {
      if (found[static_cast<std::size_t>(q * k)] >= 0) continue;
      unknown.push_back(q);
      rows.insert(rows.end(), queries[q].begin(), queries[q].end());
    }
    const std::vector<Node> again =
        nearest_keys({rows.data(), std::ssize(unknown), queries.cols}, keys, k, pool_);
    for (std::size_t i = 0; i < unknown.size(); ++i)
      std::copy_n(again.begin() + static_cast<std::ptrdiff_t>(i) * k, k, found.begin() + unknown[i] * k);
  }

  DeviceKeys* device_;
  ThreadPool& pool_;
};

}  // namespace lode
