// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lode::cuda {

/// Multiprocessors of the current device.
int processors();

}  // namespace lode::cuda
