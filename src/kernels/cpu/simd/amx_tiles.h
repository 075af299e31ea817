// SPDX-License-Identifier: Apache-2.0
// The matrix unit's registers.
#pragma once

#include <cstdint>

#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/inline.h"

namespace lode {
namespace {

/// g++ 12 does not know that loading a tile reads memory: what was written before must be written by then.
LODE_INLINE void settle_memory() {
  asm volatile("" ::: "memory");
}
/// Of an object that a function has made for itself, too: tiles read and write it from now on.
LODE_INLINE void settle_memory_of(const void* object) {
  asm volatile("" : : "r"(object) : "memory");
}

struct TileShape {
  std::uint8_t rows = 16, bytes = 64;  // bytes of a row
};

/// Gives this thread eight tiles, for as long as it lives.
class Tiles {
 public:
  explicit Tiles(const TileShape (&shapes)[8]) {
    alignas(64) std::uint8_t config[64] = {1};  // palette 1
    for (int t = 0; t < 8; ++t) config[16 + 2 * t] = shapes[t].bytes, config[48 + t] = shapes[t].rows;
    settle_memory();
    _tile_loadconfig(config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

constexpr TileShape kWholeTiles[8] = {};

}  // namespace
}  // namespace lode
