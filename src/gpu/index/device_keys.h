// SPDX-License-Identifier: Apache-2.0
// The keys of one context on the GPU as index building asks for them (select/device_keys.h).
#pragma once

#include <functional>
#include <memory>

#include "gpu/select/selectors.h"
#include "select/device_keys.h"

namespace lode {

/// `keys` says where a context's keys are now, `limit` how many bytes of the GPU's memory are left to this program
/// beside what is held here.
std::unique_ptr<DeviceKeys> make_device_keys(std::function<GpuKeys()> keys, int query_heads,
                                             std::function<std::int64_t()> limit);

}  // namespace lode
