// SPDX-License-Identifier: Apache-2.0
// What quads_*.h have in common where the build has no products of bytes (VNNI): bytes become words of 16 bits, even and odd
// ones apart, and pairs of words are multiplied. Included once Bytes,
// even_words, odd_words, load_for_each, four_bytes, store_bytes and add_products are there.
#pragma once

namespace lode {
namespace {

constexpr int kPreparedSize = 2;         ///< bytes that `prepare` makes of one
constexpr bool kPreparesAll = true;      ///< whether load_piece reads prepared keys alone
constexpr std::uint32_t kKeyOffset = 0;  ///< what add_scores adds to each number of a key
constexpr int kMostWeight = 32767;       ///< the largest weight
constexpr int kWordBlock = 32;  ///< keys of one softmax step, for which the largest weight is the same
constexpr int kQuadRows[4] = {0, 2, 1, 3};  ///< where `interleave` wants each of four rows
constexpr int kBytesSize = static_cast<int>(sizeof(Bytes));

/// Sums in the lanes.
struct Sum {
  Bytes x;
};
LODE_INLINE Sum sum_from(Int32s start) {
  return {start.x};
}
LODE_INLINE Int32s total(Sum sum) {
  return {sum.x};
}

/// A register of a key as load_piece reads it.
LODE_INLINE void prepare(Bytes bytes, std::byte* to) {
  store_bytes(to, even_words(bytes));
  store_bytes(to + kBytesSize, odd_words(bytes));
}
/// A G-th of a register of a key, once for each of G queries.
struct KeyPiece {
  Bytes even, odd;
};
template <int G>
constexpr std::int64_t piece_at(int piece) {
  return piece / G * (2 * kBytesSize) + piece % G * (kBytesSize / G);
}
template <int G>
LODE_INLINE KeyPiece load_piece(const std::byte* piece) {
  return {load_for_each<G>(piece), load_for_each<G>(piece + kBytesSize)};
}
LODE_INLINE void add_scores(Sum& sum, KeyPiece key, QueryPiece q) {
  sum.x = add_products(sum.x, key.even, q.first, key.odd, q.second);
}

/// Four rows byte by byte.
struct Quads {
  Bytes even, odd;
};
LODE_INLINE Quads quads_of(Bytes bytes) {
  return {even_words(bytes), odd_words(bytes)};
}
template <int G>
struct QuadWeights;
/// The weights of four keys, from `at` on.
struct WeightPair {
  Bytes first, second;
};
template <int G>
LODE_INLINE WeightPair weights_of(const QuadWeights<G>& w, int at) {
  return {four_bytes(w.words + 2 * at), four_bytes(w.words + 2 * at + 4)};
}
LODE_INLINE void add_values(Sum& sum, Quads values, WeightPair w) {
  sum.x = add_products(sum.x, values.even, w.first, values.odd, w.second);
}

}  // namespace
}  // namespace lode
