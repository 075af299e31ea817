// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lode::cuda {

/// How many GPUs this program sees; 0 where there is no driver.
int device_count();

}  // namespace lode::cuda
