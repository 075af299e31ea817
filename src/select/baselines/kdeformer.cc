// SPDX-License-Identifier: Apache-2.0
// kdeformer: the partition of KDEFormer (Zandieh et al. 2023, section 3.2: angular LSH), as SAAP's appendix B
// takes it for decoding. One hash table of r bits; keys sorted by the place of their code in the Gray
// sequence, so that neighbours in the order differ by one bit; the order cut into equal bins; a query visits
// the bin that its own code falls into.
//
//   B(x) = sum_i 2^i [x . pi_i > 0],  pi_i ~ N(0, I)         (SAAP, equation 2)
//   place(x) = g such that g xor (g >> 1) = B(x)             (inverse Gray code)
//
// Where the keys of the query's code fill several bins it visits the one that holds the middle of them; where
// there are none, the one into which they would fall. Differs from the authors' program: that sorts by the
// Gray code of B(x), not by the place of B(x) in the Gray sequence, whereby neighbours differ by more bits
// than one; it adds keys sampled for all queries together by the norms of their values, which SAAP leaves
// out; it draws the directions anew in every call, here they follow from the seed. Keys and queries are
// hashed after RoPE.
#include "select/baselines/sorted_bins.h"
#include "select/methods.h"

namespace lode {

namespace {

struct Options {
  int bits = 7;              // num_projs
  Amount bin = {64, false};  // bucket_size

  static Options of(const Spec& spec) {
    Options options;
    options.bits = static_cast<int>(spec.integer("num_projs", options.bits, 1, 32));
    options.bin = spec.amount("bucket_size", options.bin);
    return options;
  }
};

class KdeFormer final : public SortedBinsSelector {
 public:
  KdeFormer(const LayerGeometry& geometry, const Options& options)
      : SortedBinsSelector(geometry, options.bin, 1), bits_(options.bits) {}

 private:
  std::int64_t codes_for(std::int64_t) const override { return std::int64_t{1} << bits_; }
  bool gives_codes(std::int64_t codes) const override { return codes == codes_for(0); }
  std::int64_t directions_for(std::int64_t) const override { return bits_; }
  std::uint32_t code_of(std::span<const float> products) const override {
    std::uint32_t code = 0;
    for (std::size_t i = 0; i < products.size(); ++i)
      code |= static_cast<std::uint32_t>(products[i] > 0.0f) << i;
    for (int shift = 1; shift < 32; shift *= 2) code ^= code >> shift;
    return code;
  }
  std::pair<std::int64_t, std::int64_t> visited(const Bins& bins, std::int64_t begin,
                                                std::int64_t end) const override {
    const std::int64_t middle = end > begin ? begin + (end - begin) / 2 : std::min(begin, bins.keys - 1);
    const std::int64_t bin = bins.bin_of(middle);
    return {bin, bin + 1};
  }

  int bits_;
};

}  // namespace

MethodInfo kdeformer_method() {
  return {.name = "kdeformer",
          .aliases = {},
          .source = "KDEFormer (Zandieh et al. 2023): one hash table, Gray order, equal bins",
          .keys = {{"num_projs", "random directions, and bits of a code, 1 to 32", "7"},
                   {"bucket_size", "keys of a bin, a count or a share of the far keys", "64"}},
          .dense = {},
          .dense_layers = 0,
          .make = make_of<KdeFormer, Options>,
          .index_bytes =
              [](const Spec&, const LayerGeometry& geometry, std::int64_t tokens) {
                // A code and a place in the order, in lists that grow by doubling.
                return geometry.kv_heads * tokens * std::int64_t{8} * 3 / 2;
              },
          .validate = check_of<Options>};
}

}  // namespace lode
