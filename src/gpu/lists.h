// SPDX-License-Identifier: Apache-2.0
// Keys that a host's selector chose, in the form in which the GPU attends them.
#pragma once

#include <optional>

#include "attend/parts.h"
#include "kernels/cuda/attend/attend.h"

namespace lode {

/// A block of query tokens whose keys are listed.
struct ListedBlock {
  const QueryBlock* block = nullptr;
  std::int64_t first =
      0;  ///< number of its first token among all that are listed; those below 0 are left out
  /// Of a branch: keys from here on are attended to from elsewhere, and so are those from the first whole block behind far
  /// keys on. What lies between is listed, and the kernel attends to no window. None: the window slides, and the kernel
  /// attends to it.
  std::optional<Position> seam = std::nullopt;
};

/// The lists of some query tokens, on the host.
class HostLists {
 public:
  /// Takes `tokens` tokens of the blocks, which the groups are of (group_sets).
  void assign(std::span<const SetGroup> groups, std::span<const ListedBlock> blocks,
              const LayerGeometry& geometry, std::int64_t tokens);

  /// Rows of a list, in the order in which the device has the lists.
  std::int64_t listed(std::int64_t list) const { return std::ssize(rows_[static_cast<std::size_t>(list)]); }
  /// Rows [begin, end) behind those of every list.
  void add_to_all(Position begin, Position end);

  /// Copies everything to the device; the result points into `device`, which grows as needed. The stream must
  /// be idle: the copies leave from memory that the next assign overwrites.
  cuda::RowLists upload(cuda::Buffer& device, cuda::StreamHandle stream) const;

 private:
  void add_set(const SetGroup& group, std::size_t set, const ListedBlock& block, std::int64_t token,
               const LayerGeometry& geometry);

  int lists_per_head_ = 1;
  LocalWindow dense_;
  std::vector<std::vector<Position>> rows_;  // [lists] each rising
  std::vector<std::vector<float>> weights_;  // [lists] parallel to rows_
  bool weighted_ = false;
  std::vector<float> tail_output_, tail_lse_;  // [N, Hq, d], [N, Hq]; empty when no set has a tail
};

/// Query tokens [first, first + count) of these.
cuda::Queries part_of(const cuda::Queries& queries, int first, int count);

/// Attends to lists of any number of query tokens, as many at a time as the workspace of decode attention has room for.
void attend_lists(const cuda::Queries& queries, const cuda::RowLists& lists, std::int64_t max_tokens,
                  void* workspace, cuda::StreamHandle stream);

}  // namespace lode
