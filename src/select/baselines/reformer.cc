// SPDX-License-Identifier: Apache-2.0
// reformer: the partition of Reformer (Kitaev et al. 2020, section 2: LSH attention), as SAAP's appendix B
// takes it for decoding. Queries and keys share buckets; keys sorted by bucket, inside by position, are cut
// into chunks of equal size; a query attends its chunk and the one before it.
//
//   h(x) = argmax [x R; -x R],  R [d, b/2] ~ N(0, I)    (Reformer, section 2; SAAP, equation 3)
//   with several hashes (n_hashes), the union of what each of them gives (Reformer, equation 6)
//
// A query comes after all its keys, so it stands behind the last key of its bucket: its chunk is the one that
// holds that key, or, for an empty bucket, the place between its neighbours. The number of buckets is the
// context's number of chunks rounded to a power of two, 2 at least, and stays when the context grows. Differs
// from the paper: keys hash by themselves, not by the query of their token, since a frozen model does not
// share the two; keys of neighbouring buckets that lie in the chunk are attended as well, as in the authors'
// equations (their program can mask them); the first chunk has none before it instead of the last one. Keys
// and queries are hashed after RoPE.
#include <algorithm>
#include <bit>
#include <cmath>

#include "lodestone/error.h"
#include "select/baselines/sorted_bins.h"
#include "select/methods.h"

namespace lode {

namespace {

constexpr std::int64_t kMostAutomatic = 8192;

struct Options {
  std::int64_t buckets = 0;  // num_buckets; 0: follows from the context
  Amount chunk = {64, false};
  int hashes = 1, before = 1;

  static Options of(const Spec& spec) {
    Options options;
    options.buckets = spec.integer("num_buckets", 0, 2, 1 << 16);
    if (options.buckets % 2 != 0)
      throw InputError(
          "attention spec '" + spec.str() +
          "': expected an even num_buckets, for buckets are pairs of opposite directions, found " +
          std::to_string(options.buckets));
    options.chunk = spec.amount("bucket_size", options.chunk);
    options.hashes = static_cast<int>(spec.integer("n_hashes", options.hashes, 1, 64));
    options.before = static_cast<int>(spec.integer("chunks_before", options.before, 0, 1 << 16));
    return options;
  }
};

class Reformer final : public SortedBinsSelector {
 public:
  Reformer(const LayerGeometry& geometry, const Options& options)
      : SortedBinsSelector(geometry, options.chunk, options.hashes), options_(options) {}

 private:
  std::int64_t codes_for(std::int64_t keys) const override {
    if (options_.buckets > 0) return options_.buckets;
    const std::int64_t chunks = keys / std::max<std::int64_t>(1, options_.chunk.of(keys));
    return std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(chunks))), 2, kMostAutomatic);
  }
  bool gives_codes(std::int64_t codes) const override {
    if (options_.buckets > 0) return codes == options_.buckets;
    return codes >= 2 && codes <= kMostAutomatic && std::has_single_bit(static_cast<std::uint64_t>(codes));
  }
  std::int64_t directions_for(std::int64_t codes) const override { return codes / 2; }
  /// The first of the largest of [products; -products]; what is not a number is passed over.
  std::uint32_t code_of(std::span<const float> products) const override {
    std::size_t high = 0, low = 0;
    for (std::size_t i = 1; i < products.size(); ++i) {
      if (products[i] > products[high] || std::isnan(products[high])) high = i;
      if (products[i] < products[low] || std::isnan(products[low])) low = i;
    }
    return static_cast<std::uint32_t>(-products[low] > products[high] ? products.size() + low : high);
  }
  std::pair<std::int64_t, std::int64_t> visited(const Bins& bins, std::int64_t begin,
                                                std::int64_t end) const override {
    const std::int64_t place = end > begin ? end - 1 : std::min(begin, bins.keys - 1);
    const std::int64_t bin = bins.bin_of(place);
    return {std::max<std::int64_t>(0, bin - options_.before), bin + 1};
  }

  Options options_;
};

}  // namespace

MethodInfo reformer_method() {
  return {.name = "reformer",
          .aliases = {},
          .source = "Reformer (Kitaev et al. 2020): largest of random directions, sorted, equal chunks",
          .keys = {{"num_buckets", "buckets of a hash, an even number from 2 to 65536",
                    "keys/bucket_size, rounded up to a power of two, at most 8192"},
                   {"bucket_size", "keys of a chunk, a count or a share of the far keys", "64"},
                   {"n_hashes", "hashes of a key, each with its own order, 1 to 64", "1"},
                   {"chunks_before", "chunks that are attended before a query's own, 0 to 65536", "1"}},
          .dense = {},
          .dense_layers = 0,
          .make = make_of<Reformer, Options>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                // A code and a place in the order, in lists that grow by doubling.
                return geometry.kv_heads * Options::of(spec).hashes * tokens * std::int64_t{8} * 3 / 2;
              },
          .validate = check_of<Options>};
}

}  // namespace lode
