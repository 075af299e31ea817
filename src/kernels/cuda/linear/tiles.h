// SPDX-License-Identifier: Apache-2.0
// Block-quantised weights on the GPU. A GGUF tensor stores each row as blocks of 32 or 256 columns whose size
// is no multiple of 16 bytes. At upload they are repacked, without a change to any value, into tiles of 8 rows
// x 256 columns: codes in the order in which the lanes of a warp feed the matrix unit, then the scales. Each
// lane then reads 16 bytes at a time, and a tile is one contiguous read (tile_codec.cuh has the layout).
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"
#include "lodestone/types.h"

namespace lode::cuda {

/// Named as GGUF names the types; none: the weight is not quantised.
enum class TileFormat : std::uint8_t { none, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, mxfp4 };

inline constexpr int kTileRows = 8, kTileColumns = 256;

/// Columns and bytes of a block as the file has it.
int block_columns(TileFormat format);
int block_bytes(TileFormat format);
/// Bytes of one tile, a multiple of 16.
int tile_bytes(TileFormat format);
/// Bytes of a matrix in tiles: rows and columns are filled up with zeros.
std::int64_t tiled_bytes(TileFormat format, std::int64_t rows, std::int64_t cols);

/// Repacks the blocks of a file, `cols` a multiple of a block's.
void pack_tiles(const void* blocks, TileFormat format, std::int64_t rows, std::int64_t cols, void* tiles,
                StreamHandle stream);

/// A matrix in tiles.
struct TileMatrix {
  const void* tiles = nullptr;
  TileFormat format = TileFormat::none;
  std::int64_t rows = 0, cols = 0;
};
/// to[rows, cols] = the values of rows [first, first + rows), exact where the type is f32 and rounded to nearest
/// even where it is f16 or bf16. `first` is a multiple of kTileRows.
void unpack_tiles(const TileMatrix& w, std::int64_t first, std::int64_t rows, void* to, DType type,
                  StreamHandle stream);
/// x[n, cols] = row token[n]; NaN for an id outside of the table.
void embed_tiles(const std::int32_t* tokens, std::int64_t n, const TileMatrix& table, float* x,
                 StreamHandle stream);

}  // namespace lode::cuda
