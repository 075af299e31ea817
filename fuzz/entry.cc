// SPDX-License-Identifier: Apache-2.0
// Hands libFuzzer's bytes to the one target of this program.
#include <cstddef>
#include <cstdint>

#include "fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const lode::fuzz::Target target = lode::fuzz::targets().begin()->second;
  lode::fuzz::run(target, {reinterpret_cast<const char*>(data), size});
  return 0;
}
