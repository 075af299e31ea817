// SPDX-License-Identifier: Apache-2.0
// Block-quantised weights as the CPU's kernels read them: tiles of 16 rows from the first column to the last,
// in which the codes of 16 rows lie side by side, so that a register holds one column of codes for each row and
// memory is read in one line. Nothing is lost and next to nothing added: the codes and scales are the file's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "base/huge_arena.h"
#include "kernels/weight_type.h"

namespace lode {

class ThreadPool;

inline constexpr int kTileRows16 = 16;     ///< rows of a tile
inline constexpr int kTileColumns32 = 32;  ///< columns whose codes lie together

/// What a type's codes and scales mean. A number is scale * (code - offset) + minimum, or scale * table[code].
struct TileFormat {
  enum class Scale {
    half,   ///< f16 for each group
    brain,  ///< bf16 for each group
    nested  ///< int8 for each group, times an f16 for each 256 numbers, times `factor`
  };
  enum class Minimum {
    none,
    added,      ///< f16 for each group
    subtracted  ///< int8 for each group, times an f16 for each 256 numbers
  };
  int bits;          ///< of a code
  int offset_shift;  ///< the offset is 2 to its power; negative: 0
  int group;         ///< numbers that share a scale: 16 or 32
  Scale scale = Scale::half;
  Minimum minimum = Minimum::none;
  const std::int8_t* table = nullptr;  ///< [16]; its entries are offset too
  float factor = 1.0f;
};

inline constexpr std::int8_t kNonlinear4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};
/// Twice the numbers that MXFP4's four bits stand for.
inline constexpr std::int8_t kMicroFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr TileFormat tile_format(WeightType type) {
  using enum TileFormat::Scale;
  using enum TileFormat::Minimum;
  switch (type) {
    case WeightType::q8_0:
      return {8, 7, 32};
    case WeightType::q4_0:
      return {4, 3, 32};
    case WeightType::q4_1:
      return {4, -1, 32, half, added};
    case WeightType::q5_0:
      return {5, 4, 32};
    case WeightType::q5_1:
      return {5, -1, 32, half, added};
    case WeightType::q2_k:
      return {2, -1, 16, nested, subtracted};
    case WeightType::q3_k:
      return {3, 2, 16, nested};
    case WeightType::q4_k:
      return {4, -1, 32, nested, subtracted};
    case WeightType::q5_k:
      return {5, -1, 32, nested, subtracted};
    case WeightType::q6_k:
      return {6, 5, 16, nested};
    case WeightType::iq4_nl:
      return {4, 7, 32, half, none, kNonlinear4};
    case WeightType::iq4_xs:
      return {4, 7, 32, nested, none, kNonlinear4};
    case WeightType::iq3_s:
      return {5, 4, 32, nested};
    case WeightType::iq3_xxs:
      return {7, 6, 32, nested, none, nullptr, 0.25f};
    case WeightType::mxfp4:
      return {4, 4, 32, brain, none, kMicroFloat4};
    default:
      return {0, -1, 32};  // plain types have no tiles
  }
}

/// Where things lie in a tile. A unit is 32 columns, of nested scales 256: first the 16 rows' scales of two
/// bytes, then their minima's; then for each 32 columns, of nested scales, a byte per group and row, the same of
/// minima, and the codes.
struct TileLayout {
  TileFormat format;
  constexpr bool nested() const { return format.scale == TileFormat::Scale::nested; }
  constexpr bool has_minimum() const { return format.minimum != TileFormat::Minimum::none; }
  constexpr int unit_columns() const { return nested() ? 256 : kTileColumns32; }
  constexpr int head_bytes() const { return kTileRows16 * 2 * (has_minimum() ? 2 : 1); }
  constexpr int groups() const { return kTileColumns32 / format.group; }  // in 32 columns
  constexpr int scale_bytes() const {
    return nested() ? kTileRows16 * groups() * (has_minimum() ? 2 : 1) : 0;
  }
  /// Codes lie in planes: four bits (or all eight), then two, then one, as many as the code has. Byte 4 r + c of
  /// a line of 64 belongs to row r; with s = 0 to 7 counting fours of columns and c the column among the four,
  /// the plane of four bits has line s / 2 and takes its low half for even s; that of two has line s / 4 and bits
  /// 2 (s % 4); that of one has one line and bit s; eight bits have line s.
  constexpr int code_bytes() const { return kTileRows16 * kTileColumns32 / 8 * format.bits; }
  constexpr int unit_bytes() const {
    return head_bytes() + unit_columns() / kTileColumns32 * (scale_bytes() + code_bytes());
  }
  constexpr std::int64_t tile_bytes(std::int64_t columns) const {
    return columns / unit_columns() * unit_bytes();
  }
};

/// One weight matrix in tiles; rows that are missing to a whole tile are 0.
struct TiledWeight {
  WeightType type = WeightType::q8_0;
  std::int64_t rows = 0, cols = 0;
  std::span<const std::byte> bytes;  // [ceil(rows / 16), tile_bytes(cols)], in an arena
};

/// `blocks` holds rows as GGUF files do; not of a plain type. The tiles live as long as `arena`.
TiledWeight tile_weight(WeightType type, const std::byte* blocks, std::int64_t rows, std::int64_t cols,
                        HugeArena& arena, ThreadPool& pool);

/// Tiles that are made when first asked for: a model that runs on a GPU never needs them.
class LazyTiles {
 public:
  /// A model's weights share an arena: an expert's matrix alone is smaller than a huge page.
  explicit LazyTiles(std::shared_ptr<HugeArena> arena) : arena_(std::move(arena)) {}

  /// Whether get() will find them.
  bool made() const { return made_.load(std::memory_order_acquire); }
  /// The same arguments at each call; several threads may call.
  const TiledWeight& get(WeightType type, const std::byte* blocks, std::int64_t rows, std::int64_t cols,
                         ThreadPool& pool) {
    std::call_once(once_, [&] {
      tiles_ = tile_weight(type, blocks, rows, cols, *arena_, pool);
      made_.store(true, std::memory_order_release);
    });
    return tiles_;
  }

 private:
  std::shared_ptr<HugeArena> arena_;
  std::once_flag once_;
  std::atomic<bool> made_{false};
  TiledWeight tiles_;
};

}  // namespace lode
