// SPDX-License-Identifier: Apache-2.0
// Keys that a host's selector chose, in the form in which the GPU attends them.
#pragma once

#include "attend/parts.h"
#include "kernels/cuda/attend/attend.h"

namespace lode {

/// The lists of some consecutive query tokens of one block, on the host.
class HostLists {
 public:
  /// Takes tokens [begin, end) of the one block that the groups are of (group_sets).
  void assign(std::span<const SetGroup> groups, const QueryBlock& block, const LayerGeometry& geometry,
              std::int64_t begin, std::int64_t end);

  /// Rows of a list, in the order in which the device has the lists.
  std::int64_t listed(std::int64_t list) const { return std::ssize(rows_[static_cast<std::size_t>(list)]); }
  /// Rows [begin, end) behind those of every list.
  void add_to_all(Position begin, Position end);

  /// Copies everything to the device; the result points into `device`, which grows as needed. The stream must
  /// be idle: the copies leave from memory that the next assign overwrites.
  cuda::RowLists upload(cuda::Buffer& device, cuda::StreamHandle stream) const;

 private:
  void add_keys(const FarKeys& far, Position far_end, std::vector<Position>& rows,
                std::vector<float>& weights) const;

  int lists_per_head_ = 1;
  LocalWindow dense_;
  std::vector<std::vector<Position>> rows_;  // [lists] each rising
  std::vector<std::vector<float>> weights_;  // [lists] parallel to rows_
  bool weighted_ = false;
  std::vector<float> tail_output_, tail_lse_;  // [N, Hq, d], [N, Hq]; empty when no set has a tail
};

}  // namespace lode
