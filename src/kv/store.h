// SPDX-License-Identifier: Apache-2.0
// Where keys and values live: one contiguous, growing range of rows per sequence, layer and KV head.
//
// A range is reserved address space for the longest context; memory is taken as rows are written. A saved
// context is mapped privately over the front of the range, so that many processes share its pages and new
// tokens follow behind without a copy. Kernels therefore always see plain rows [0, tokens).
#pragma once

#include <memory>
#include <vector>

#include "kv/recurrent.h"
#include "lodestone/kv_view.h"

namespace lode {

class MappedFile;
class ThreadPool;

/// A layer whose heads are others than those of the shape.
struct KvLayerShape {
  int kv_heads = 0, head_dim = 0;
  int rows_of = 0;  ///< its own number, or that of an earlier layer whose rows are its own
  bool operator==(const KvLayerShape&) const = default;
};

struct KvShape {
  int layers = 0, kv_heads = 0, head_dim = 0;  ///< kv_heads: at least as many as any layer has
  DType type = DType::f16;
  std::int64_t max_tokens = 0;
  std::vector<std::int64_t> recurrent =
      {};  ///< [L] floats of states of layers that have no rows; empty: none
  /// Whether it is written rows of its own.
  bool has_rows(int layer) const {
    return (recurrent.empty() || recurrent[static_cast<std::size_t>(layer)] == 0) && rows_of(layer) == layer;
  }
  bool shared_rows =
      false;  ///< a layer's heads have the same rows, and keys are values: latent rows, held once
  std::vector<KvLayerShape> by_layer = {};  ///< [L]; empty: all layers are alike
  int heads(int layer) const { return by_layer.empty() ? kv_heads : of(layer).kv_heads; }
  int dim(int layer) const { return by_layer.empty() ? head_dim : of(layer).head_dim; }
  int rows_of(int layer) const { return by_layer.empty() ? layer : of(layer).rows_of; }
  /// Whether a part of a head lies here by itself.
  bool holds(int layer, int head, bool keys) const {
    return has_rows(layer) && head < heads(layer) && (!shared_rows || (head == 0 && keys));
  }
  /// Whether some layers attend to an earlier one's rows.
  bool layers_share_rows() const;
  const KvLayerShape& of(int layer) const { return by_layer[static_cast<std::size_t>(layer)]; }
  /// Bytes of one token over all layers and heads, scales included.
  std::int64_t token_bytes() const;
};

/// The KV cache of one sequence. Not for concurrent writers. Numbers pass through as they are: infinities and
/// NaN stay what they are in f32, f16 and bf16 (beyond f16's range a number becomes infinite); a q8 or q4
/// row that holds one becomes all NaN.
class KvStore {
 public:
  /// Reserves the address space; RunError when the system has not so much.
  explicit KvStore(const KvShape& shape);
  ~KvStore();
  KvStore(KvStore&&) noexcept;
  KvStore& operator=(KvStore&&) noexcept;

  enum class Part { k, v, k_scale, v_scale };

  const KvShape& shape() const;
  std::int64_t tokens() const;

  /// Says that the store will grow to so many tokens: memory that will be full then is taken in huge pages,
  /// where the system has them. Only speed depends on it.
  void expect(std::int64_t tokens);
  /// Writes rows [tokens, tokens + T) of one layer that has rows, rounded to the store's type; every layer must be given
  /// the same T before commit. Writing a layer again replaces its rows. With a pool all threads take part, unless the tokens are few.
  /// InputError with both numbers when max_tokens would be passed.
  void write(int layer, std::int64_t count, std::span<const float> k /*[T, Hkv, d]*/,
             std::span<const float> v, ThreadPool* pool = nullptr);
  /// Layers from `layers` on are written what the first `layers` were since the last commit, in turn. For
  /// measurements.
  void repeat(int layers, std::int64_t count, ThreadPool& pool);
  /// Layers from `layers` on read and write the memory of the first `layers` instead of their own, in turn.
  /// For measurements of contexts that memory would not hold; before anything is written.
  void share(int layers);
  /// The tokens written to all layers now count.
  void commit(std::int64_t count);
  /// Cuts to that many tokens, pending ones included; rows that a GPU is ahead with are not missed. Their memory stays
  /// for reuse, unless it is many tokens'. Where layers are recurrent the tokens must be reachable.
  void roll_back(std::int64_t tokens);
  /// States of the layers that have no rows; commit and roll_back take them along.
  RecurrentStates& recurrent();
  const RecurrentStates& recurrent() const;
  /// The most tokens up to `tokens` that roll_back can go to: all, but for recurrent layers.
  std::int64_t reachable(std::int64_t tokens) const { return recurrent().reachable(tokens); }

  /// `pending` rows beyond tokens() that were written but not committed are included. The view holds until
  /// the next call that changes this store or asks for another count of this layer; its rows stay where they
  /// are for the store's life. Any number of threads may ask for the committed rows of a store that nobody changes.
  KvLayer layer(int layer, std::int64_t pending = 0) const;

  /// Where `count` rows behind the committed ones are to be written by the caller, in the store's type, all
  /// heads and all parts (of q8 the scales, too) before commit. InputError when max_tokens would be passed.
  std::byte* rows_to_write(int layer, int head, Part part, std::int64_t count);

  /// Where rows [begin, end) of the committed ones lie, for a caller that writes every one of them anew: what
  /// they held may be gone. Those that a file is mapped on become memory of the store, huge pages where they
  /// fill them.
  std::byte* rows_to_replace(int layer, int head, Part part, std::int64_t begin, std::int64_t end) noexcept;

  /// For saving: the bytes of one head's K (or V, or scales) rows [0, tokens).
  std::span<const std::byte> rows(int layer, int head, Part part) const;
  /// For loading: maps `bytes` of the file at a page-aligned offset as rows of that part, from row `first` on, which
  /// rises from call to call; commit counts them once every part is there. Pages stay shared with other processes
  /// until a row is written on them; rows that do not begin at a page's beginning are copied. InputError when the
  /// section lies outside the file, holds no whole rows, or ends beyond max_tokens.
  void map(int layer, int head, Part part, const MappedFile& file, std::uint64_t offset, std::uint64_t bytes,
           std::int64_t first = 0);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
