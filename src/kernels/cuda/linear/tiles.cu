// SPDX-License-Identifier: Apache-2.0
// Blocks of a GGUF file to tiles, and tiles to numbers.
#include <algorithm>

#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/linear/tile_codec.cuh"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// ---- A row of blocks as the file has it. `code` is what is stored, in two's complement where values are
// signed.

struct Row {
  const std::uint8_t* at;
  __device__ unsigned byte(std::int64_t i) const { return at[i]; }
  /// Little-endian, at any address.
  __device__ std::uint16_t word(std::int64_t i) const {
    return static_cast<std::uint16_t>(at[i] | at[i + 1] << 8);
  }
};

/// Blocks of 32: scale, minimum where there is one, the fifth bits where there are any, codes.
template <int Bits, bool Minima>
struct SmallBlock {
  static constexpr int kColumns = 32, kFirstBits = Minima ? 4 : 2, kCodes = kFirstBits + (Bits == 5 ? 4 : 0);
  static constexpr int kBytes = kCodes + (Bits == 8 ? 32 : 16);
  static __device__ unsigned code(const Row& row, std::int64_t column) {
    const std::int64_t at = column / 32 * kBytes;
    const int j = static_cast<int>(column % 32);
    if constexpr (Bits == 8) return row.byte(at + kCodes + j);
    unsigned code = row.byte(at + kCodes + j % 16) >> (j < 16 ? 0 : 4) & 15;
    if constexpr (Bits == 5) code |= (row.byte(at + kFirstBits + j / 8) >> j % 8 & 1) << 4;
    return Minima ? code : code ^ 1u << (Bits - 1);
  }
  /// Puts the scales of a row of a tile.
  static __device__ void put_scales(const Row& row, std::int64_t column, std::int64_t end, int r,
                                    char* scales) {
    for (int block = 0; block < 8; ++block) {
      const bool inside = column + block * 32 < end;
      const std::int64_t at = (column / 32 + block) * kBytes;
      auto* const to = reinterpret_cast<std::uint16_t*>(scales) + r * 8 + block % 4 * 2 + block / 4;
      *to = inside ? row.word(at) : 0;
      if constexpr (Minima) to[kTileRows * 8] = inside ? row.word(at + 2) : 0;
    }
  }
};

/// Blocks of 256 under scales and minima of 6 bits.
template <int Bits>
struct KBlock {
  static constexpr int kColumns = 256, kCodes = 16 + (Bits == 5 ? 32 : 0), kBytes = kCodes + 128;
  static __device__ unsigned code(const Row& row, std::int64_t column) {
    const std::int64_t at = column / 256 * kBytes;
    const int c = static_cast<int>(column % 256), j = c % 64, block = c / 32;
    unsigned code = row.byte(at + kCodes + c / 64 * 32 + j % 32) >> (j < 32 ? 0 : 4) & 15;
    if constexpr (Bits == 5) code |= (row.byte(at + 16 + c % 32) >> block & 1) << 4;
    return code;
  }
  static __device__ void put_scales(const Row& row, std::int64_t column, std::int64_t, int r, char* scales) {
    const std::int64_t at = column / 256 * kBytes, six = at + 4;
    for (int j = 0; j < 8; ++j) {
      const unsigned scale =
          j < 4 ? row.byte(six + j) & 63 : (row.byte(six + j + 4) & 15) | row.byte(six + j - 4) >> 6 << 4;
      const unsigned minimum =
          j < 4 ? row.byte(six + j + 4) & 63 : row.byte(six + j + 4) >> 4 | row.byte(six + j) >> 6 << 4;
      char* const to = scales + r * 16 + j % 4 * 4 + j / 4;
      to[0] = static_cast<char>(scale);
      to[2] = static_cast<char>(minimum);
    }
    auto* const to = reinterpret_cast<std::uint16_t*>(scales + kTileRows * 16) + r * 2;
    to[0] = row.word(at);
    to[1] = row.word(at + 2);
  }
};

struct Q6KBlock {
  static constexpr int kColumns = 256, kBytes = 210;
  static __device__ unsigned code(const Row& row, std::int64_t column) {
    const std::int64_t at = column / 256 * kBytes;
    const int c = static_cast<int>(column % 256), n = c / 128, quarter = c % 128 / 32, l = c % 32;
    const unsigned low = row.byte(at + n * 64 + quarter % 2 * 32 + l) >> (quarter < 2 ? 0 : 4) & 15;
    const unsigned high = row.byte(at + 128 + n * 32 + l) >> 2 * quarter & 3;
    return (low | high << 4) ^ 32;
  }
  static __device__ void put_scales(const Row& row, std::int64_t column, std::int64_t, int r, char* scales) {
    const std::int64_t at = column / 256 * kBytes;
    for (int j = 0; j < 16; ++j)
      scales[r * 16 + j % 8 / 2 * 4 + j / 8 * 2 + j % 2] = static_cast<char>(row.byte(at + 192 + j) ^ 128);
    reinterpret_cast<std::uint16_t*>(scales + kTileRows * 16)[r] = row.word(at + 208);
  }
};

/// Blocks of 32: an exponent, then codes. A negative zero becomes a zero.
struct Mxfp4Block {
  static constexpr int kColumns = 32, kBytes = 17;
  static __device__ unsigned code(const Row& row, std::int64_t column) {
    const int j = static_cast<int>(column % 32);
    const unsigned code = row.byte(column / 32 * kBytes + 1 + j % 16) >> (j < 16 ? 0 : 4) & 15;
    return code == 8 ? 0 : code;
  }
  static __device__ void put_scales(const Row& row, std::int64_t column, std::int64_t end, int r,
                                    char* scales) {
    for (int block = 0; block < 8; ++block)
      if (column + block * 32 < end)
        scales[r * 8 + block % 4 * 2 + block / 4] =
            static_cast<char>(row.byte((column / 32 + block) * kBytes));
  }
};

template <TileFormat F>
struct BlockOf;
template <>
struct BlockOf<TileFormat::q4_0> {
  using Type = SmallBlock<4, false>;
};
template <>
struct BlockOf<TileFormat::q4_1> {
  using Type = SmallBlock<4, true>;
};
template <>
struct BlockOf<TileFormat::q5_0> {
  using Type = SmallBlock<5, false>;
};
template <>
struct BlockOf<TileFormat::q5_1> {
  using Type = SmallBlock<5, true>;
};
template <>
struct BlockOf<TileFormat::q8_0> {
  using Type = SmallBlock<8, false>;
};
template <>
struct BlockOf<TileFormat::q4_k> {
  using Type = KBlock<4>;
};
template <>
struct BlockOf<TileFormat::q5_k> {
  using Type = KBlock<5>;
};
template <>
struct BlockOf<TileFormat::q6_k> {
  using Type = Q6KBlock;
};
template <>
struct BlockOf<TileFormat::mxfp4> {
  using Type = Mxfp4Block;
};

// ---- Packing: a warp makes one tile, word by word.

struct PackInput {
  const std::uint8_t* blocks;
  std::int64_t rows, cols, row_bytes;
};

template <class Block>
struct Packer {
  const PackInput& in;
  std::int64_t row0, column0;
  char* tile;

  /// The code, zero outside of the matrix.
  __device__ unsigned code(int row, int column) const {
    if (row0 + row >= in.rows || column0 + column >= in.cols) return 0;
    return Block::code({in.blocks + (row0 + row) * in.row_bytes}, column0 + column);
  }
  /// The first of the four columns of a word.
  static __device__ int first_column(int lane, int part, int i, int word) {
    return part * 128 + lane % 4 * 32 + i * 8 + word * 4;
  }
  /// A word of 4-bit codes of both parts; `halves`: they have a half each, not a nibble of each byte.
  __device__ unsigned nibbles(int lane, int i, int word, bool halves) const {
    unsigned all = 0;
    for (int b = 0; b < 4; ++b) {
      const unsigned a = code(lane / 4, first_column(lane, 0, i, word) + b) & 15,
                     other = code(lane / 4, first_column(lane, 1, i, word) + b) & 15;
      all |= halves ? a << 4 * b | other << (16 + 4 * b) : (a | other << 4) << 8 * b;
    }
    return all;
  }
  __device__ unsigned bytes(int lane, int part, int i, int word) const {
    unsigned all = 0;
    for (int b = 0; b < 4; ++b) all |= code(lane / 4, first_column(lane, part, i, word) + b) << 8 * b;
    return all;
  }
  /// Bits 4 and above of a word's codes, at `place` of each byte.
  __device__ unsigned upper_bits(int lane, int part, int i, int word, unsigned mask, int place) const {
    unsigned all = 0;
    for (int b = 0; b < 4; ++b)
      all |= (code(lane / 4, first_column(lane, part, i, word) + b) >> 4 & mask) << (8 * b + place);
    return all;
  }
};

template <TileFormat F>
__global__ __launch_bounds__(kThreads) void pack_kernel(const PackInput in, std::int64_t tiles,
                                                        std::int64_t groups, char* to) {
  using Codes = typename Codec<F>::Codes;
  using Block = typename BlockOf<F>::Type;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < tiles;
       i += std::int64_t{gridDim.x} * kWarps) {
    const Packer<Block> packer = {in, i / groups * kTileRows, i % groups * kTileColumns,
                                  to + i * Codec<F>::kBytes};
    auto* const words = reinterpret_cast<unsigned*>(packer.tile);
    unsigned* const more = words + kCodeBytes4 / 4;
    if constexpr (Codes::kBits == 5) more[lane * 2] = more[lane * 2 + 1] = 0;
    if constexpr (Codes::kBits == 6) {
      for (int i = 0; i < 4; ++i) more[lane * 4 + i] = 0;
    }
    for (int i = 0; i < 4; ++i) {
      for (int word = 0; word < 2; ++word) {
        unsigned* const to = words + i / 2 * 128 + lane * 4 + i % 2 * 2 + word;
        if constexpr (Codes::kBits < 8) *to = packer.nibbles(lane, i, word, Codes::kHalves);
        for (int part = 0; part < 2; ++part) {
          if constexpr (Codes::kBits == 8) to[part * 256] = packer.bytes(lane, part, i, word);
          if constexpr (Codes::kBits == 5)
            more[lane * 2 + i / 2] |=
                packer.upper_bits(lane, part, i, word, 1, 2 * (i % 2 * 2 + word) + part);
          if constexpr (Codes::kBits == 6)
            more[lane * 4 + i] |= packer.upper_bits(lane, part, i, word, 3, 2 * (2 * word + part));
        }
      }
    }
    char* const scales = packer.tile + Codes::kBytes;
    for (int b = lane; b < Codec<F>::kBytes - Codes::kBytes; b += 32) scales[b] = 0;
    __syncwarp();
    if (lane < kTileRows && packer.row0 + lane < in.rows)
      Block::put_scales({in.blocks + (packer.row0 + lane) * in.row_bytes}, packer.column0, in.cols, lane,
                        scales);
  }
}

// ---- Unpacking.

/// Four bytes of codes to numbers.
template <class C>
__device__ __forceinline__ float4 values(unsigned bytes, int factor, float scale, float minimum) {
  if constexpr (C::Codes::kSigned) bytes ^= 0x80808080u;
  const float f = 1.0f / static_cast<float>(factor),
              zero = -(8388608.0f + (C::Codes::kSigned ? 128.0f : 0.0f) + C::Codes::kBias);
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fmaf(scale, (byte_above_2_23(bytes, i) + zero) * f, -minimum);
  return {x[0], x[1], x[2], x[3]};
}

/// Calls body(column, four values) for all that lane 4 g + t has of a tile.
template <class C, class Body>
__device__ __forceinline__ void for_lane(const char* tile, int lane, const Body& body) {
  C scales;
  scales.load(tile, lane);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    typename C::Codes codes;
    codes.load(tile, lane, u);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float scale = scales.common() * scales.scale(C::kColumns == 16 ? 2 * part + u : part, 1);
      float minimum = 0.0f;
      if constexpr (C::kMinima) minimum = scales.minimum(part);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        body(part * 128 + lane % 4 * 32 + u * 16 + i * 4,
             values<C>(codes.bytes(i / 2, part, i % 2), C::Codes::factor(part), scale, minimum));
      }
    }
  }
}

__device__ __forceinline__ void put_four(float* to, const float4& x) {
  *reinterpret_cast<float4*>(to) = x;
}
__device__ __forceinline__ void put_four(__nv_bfloat16* to, const float4& x) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) = {*reinterpret_cast<const unsigned*>(&low),
                                   *reinterpret_cast<const unsigned*>(&high)};
}
__device__ __forceinline__ void put_four(__half* to, const float4& x) {
  const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(to) = {*reinterpret_cast<const unsigned*>(&low),
                                   *reinterpret_cast<const unsigned*>(&high)};
}

/// A warp has a tile at a time, whose rows leave shared memory whole. Columns are a multiple of 32.
template <TileFormat F, class T>
__global__ __launch_bounds__(kThreads) void unpack_kernel(const char* tiles, std::int64_t count,
                                                          std::int64_t groups, std::int64_t rows,
                                                          std::int64_t cols, T* to) {
  constexpr int kRow = kTileColumns + kPack<T>;  // rows start in other banks
  __shared__ __align__(16) T shared[sizeof(T) == 4 ? 1 : kWarps][kTileRows][kRow];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + warp; i < count;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t row0 = i / groups * kTileRows, first = i % groups * kTileColumns;
    const char* const tile = tiles + i * Codec<F>::kBytes;
    if constexpr (sizeof(T) == 4) {
      for_lane<Codec<F>>(tile, lane, [&](int column, const float4& x) {
        if (first + column < cols && row0 + lane / 4 < rows)
          put_four(to + (row0 + lane / 4) * cols + first + column, x);
      });
    } else {
      for_lane<Codec<F>>(tile, lane,
                         [&](int column, const float4& x) { put_four(&shared[warp][lane / 4][column], x); });
      __syncwarp();
      const int column = lane * kPack<T>;
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        if (first + column < cols && row0 + r < rows)
          *reinterpret_cast<uint4*>(to + (row0 + r) * cols + first + column) =
              *reinterpret_cast<const uint4*>(&shared[warp][r][column]);
      }
      __syncwarp();
    }
  }
}

/// Four lanes have a group of a row.
template <TileFormat F>
__global__ __launch_bounds__(kThreads) void embed_kernel(const std::int32_t* tokens, const char* tiles,
                                                         std::int64_t groups, std::int64_t rows,
                                                         std::int64_t cols, float* x) {
  const std::int64_t n = blockIdx.x, id = tokens[n];
  if (id < 0 || id >= rows) {
    for (std::int64_t i = threadIdx.x; i < cols; i += kThreads) x[n * cols + i] = __int_as_float(0x7fffffff);
    return;
  }
  const int lane = static_cast<int>(id % kTileRows) * 4 + static_cast<int>(threadIdx.x) % 4;
  for (std::int64_t group = threadIdx.x / 4; group < groups; group += kThreads / 4) {
    const char* const tile = tiles + (id / kTileRows * groups + group) * Codec<F>::kBytes;
    for_lane<Codec<F>>(tile, lane, [&](int column, const float4& four) {
      const std::int64_t at = group * kTileColumns + column;
      if (at < cols) *reinterpret_cast<float4*>(x + n * cols + at) = four;
    });
  }
}

std::int64_t groups_of(std::int64_t cols) {
  return (cols + kTileColumns - 1) / kTileColumns;
}
std::int64_t row_tiles(std::int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}
unsigned blocks_for(std::int64_t tiles) {
  return static_cast<unsigned>(std::min<std::int64_t>((tiles + kWarps - 1) / kWarps, 1 << 16));
}

template <TileFormat F>
void unpack(const TileMatrix& w, std::int64_t first, std::int64_t rows, void* to, DType type,
            StreamHandle stream) {
  const std::int64_t groups = groups_of(w.cols), count = row_tiles(rows) * groups;
  const char* const from = static_cast<const char*>(w.tiles) + first / kTileRows * groups * Codec<F>::kBytes;
  const auto launch = [&]<class T>(T* numbers) {
    Launch(blocks_for(count), kThreads, 0, stream)(unpack_kernel<F, T>, from, count, groups, rows, w.cols,
                                                   numbers);
  };
  if (type == DType::bf16)
    launch(static_cast<__nv_bfloat16*>(to));
  else if (type == DType::f16)
    launch(static_cast<__half*>(to));
  else
    launch(static_cast<float*>(to));
}

}  // namespace

int block_columns(TileFormat format) {
  int columns = 1;
  with_format(format, [&](auto f) { columns = BlockOf<f()>::Type::kColumns; });
  return columns;
}
int block_bytes(TileFormat format) {
  int bytes = 0;
  with_format(format, [&](auto f) { bytes = BlockOf<f()>::Type::kBytes; });
  return bytes;
}
int tile_bytes(TileFormat format) {
  int bytes = 0;
  with_format(format, [&](auto f) {
    static_assert(Codec<f()>::kBytes % 16 == 0);
    bytes = Codec<f()>::kBytes;
  });
  return bytes;
}
std::int64_t tiled_bytes(TileFormat format, std::int64_t rows, std::int64_t cols) {
  return row_tiles(rows) * groups_of(cols) * tile_bytes(format);
}

void pack_tiles(const void* blocks, TileFormat format, std::int64_t rows, std::int64_t cols, void* tiles,
                StreamHandle stream) {
  if (rows == 0 || cols == 0) return;
  LODE_ASSERT(cols % block_columns(format) == 0);
  const std::int64_t groups = groups_of(cols), count = row_tiles(rows) * groups;
  const PackInput in = {static_cast<const std::uint8_t*>(blocks), rows, cols,
                        cols / block_columns(format) * block_bytes(format)};
  with_format(format, [&](auto f) {
    Launch(blocks_for(count), kThreads, 0, stream)(pack_kernel<f()>, in, count, groups,
                                                   static_cast<char*>(tiles));
  });
}

void unpack_tiles(const TileMatrix& w, std::int64_t first, std::int64_t rows, void* to, DType type,
                  StreamHandle stream) {
  if (rows == 0 || w.cols == 0) return;
  LODE_ASSERT(first % kTileRows == 0 && first + rows <= w.rows);
  with_format(w.format, [&](auto f) { unpack<f()>(w, first, rows, to, type, stream); });
}

void embed_tiles(const std::int32_t* tokens, std::int64_t n, const TileMatrix& table, float* x,
                 StreamHandle stream) {
  if (n == 0) return;
  with_format(table.format, [&](auto f) {
    Launch(static_cast<unsigned>(n), kThreads, 0, stream)(embed_kernel<f()>, tokens,
                                                          static_cast<const char*>(table.tiles),
                                                          groups_of(table.cols), table.rows, table.cols, x);
  });
}

}  // namespace lode::cuda
