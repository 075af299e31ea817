// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lode {

/// How GPUs that share a model add up what each of them computed: automatic = small sums by a kernel that reads
/// the others' memory and large ones by NCCL, as far as there are both.
enum class GpuSum : std::uint8_t { automatic, peers, nccl };

}  // namespace lode
