// SPDX-License-Identifier: Apache-2.0
// pqcache: keys are product-quantised when the text is indexed, and chosen by the scores of what their codes
// stand for (PQCache: Product Quantization-based KVCache for Long Context LLM Inference, Zhang et al. 2024,
// sections 3.2 to 3.4: m = 2 sub-spaces, b = 6 bits).
//
//   code_j(k)  = nearest of 2^b centroids to part j of k            k-means over the context's keys, per head
//   score(q,k) = sum_j q_j . centroid_j(code_j(k))                  a table of m 2^b products, then look-ups
//
// The heads of a group choose together by the sum of their softmax weights, as the authors' program does;
// per=query-head lets each choose alone. Keys that come later get the nearest codes; the codebooks stay. The
// paper adapts the iterations of k-means to the time of prefill, here they are a number; k-means starts from
// random keys, and sees at most 256 keys a centroid, spread evenly. Keys with a NaN or an infinity count as
// 0. An index that was built over no keys attends everything.
#include "select/baselines/pqcache.h"

#include <array>
#include <map>

#include "base/rng.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/estimated_keys.h"
#include "select/shared/per_token.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr std::array<std::string_view, 2> kPer = {"kv-head", "query-head"};

class PqCache final : public PerTokenSelector, public SharesIndex, public KeyCoder {
 public:
  PqCache(const LayerGeometry& geometry, const PqCacheOptions& options)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {}

  void build(std::int32_t sequence, KvLayer kv) override {
    ProductCodes index(shape());
    index.train(
        kv,
        [&](int head) {
          return hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(head));
        },
        all());
    index.extend(kv, static_cast<Position>(kv.tokens), all());
    indexes_.insert_or_assign(sequence, std::move(index));
    ++version_;
  }
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const PqCache*>(&other);
    if (same == nullptr || !same->indexes_.contains(sequence) || same->options_.m != options_.m ||
        same->options_.bits != options_.bits || same->options_.iterations != options_.iterations ||
        same->geometry_.dense.sink != geometry_.dense.sink)
      return false;
    indexes_.insert_or_assign(sequence, same->indexes_.at(sequence));
    ++version_;
    return true;
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    indexes_.try_emplace(sequence, shape()).first->second.extend(kv, far_end, all());
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.roll_back(tokens);
  }
  void save(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexes_.find(sequence);
    (found == indexes_.end() ? ProductCodes(shape()) : found->second).save(out);
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    indexes_.insert_or_assign(sequence, ProductCodes::load(shape(), in, kv.tokens));
    ++version_;
  }
  Codebooks codebooks() const override {
    const auto found = indexes_.find(0);
    return {version_, found != indexes_.end() && found->second.ready() ? &found->second : nullptr};
  }
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, index] : indexes_) bytes += index.bytes();
    return bytes;
  }

 private:
  struct Scratch {
    std::vector<float> q, tables, scores;  // [G, d], [G, m, entries], [G, padded keys]
    std::vector<Position> rows;
  };

  ProductShape shape() const {
    return {.begin = static_cast<Position>(geometry_.dense.sink),
            .heads = geometry_.kv_heads,
            .d = geometry_.head_dim,
            .parts = options_.m,
            .bits = options_.bits,
            .iterations = options_.iterations};
  }
  ProductCodes::ForEach all() const {
    return [this](std::int64_t items, const auto& body) { for_each(items, body); };
  }
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  PqCacheOptions options_;
  std::map<std::int32_t, ProductCodes> indexes_;
  std::int64_t version_ = 0;      // of codebooks
  std::vector<Scratch> scratch_;  // [workers]
};

void PqCache::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const ProductCodes& index = indexes_.at(unit.block->sequence);
  const std::int64_t n = unit.far_keys(), budget = options_.budget.of(n);
  if (!index.ready() || budget >= n) return add_all_keys(unit, geometry_, out);
  LODE_ASSERT(unit.far_begin == geometry_.dense.sink && index.end() >= unit.far_end);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  scale_queries(unit, geometry_, s.q);
  const std::int64_t stride = ProductCodes::padded(n);
  s.scores.resize(static_cast<std::size_t>(geometry_.group() * stride));
  index.score(unit.kv_head, {s.q.data(), geometry_.group(), geometry_.head_dim}, n, s.scores.data(), stride,
              s.tables);
  work.bytes += n * index.code_bytes() + index.codebook_bytes();
  work.keys_scored += n;
  add_best_keys(unit, geometry_, {s.scores.data(), geometry_.group(), n, stride}, options_.per_kv_head,
                budget, s.rows, out);
}

std::unique_ptr<Selector> make_pqcache(const Spec& spec, const LayerGeometry& geometry, std::string_view) {
  const PqCacheOptions options = PqCacheOptions::of(spec);
  if (geometry.head_dim % options.m != 0) {
    throw InputError("attention spec '" + spec.str() + "': expected m to divide the " +
                     std::to_string(geometry.head_dim) + " channels of the model's heads, found " +
                     std::to_string(options.m));
  }
  return std::make_unique<PqCache>(geometry, options);
}

}  // namespace

PqCacheOptions PqCacheOptions::of(const Spec& spec) {
  PqCacheOptions options;
  options.m = static_cast<int>(spec.integer("m", options.m, 1, 128));
  options.bits = static_cast<int>(spec.integer("bits", options.bits, 1, 8));
  options.iterations = static_cast<int>(spec.integer("iterations", options.iterations, 1, 300));
  options.budget = spec.amount("budget", options.budget);
  options.per_kv_head = spec.choice("per", kPer[0], kPer) == kPer[0];
  return options;
}

MethodInfo pqcache_method() {
  return {.name = "pqcache",
          .aliases = {},
          .source = "product-quantised keys (PQCache)",
          .keys = {{"m", "sub-spaces of a key, 1 to 128, a divisor of the head's channels", "2"},
                   {"bits", "of a sub-space's code, 1 to 8", "6"},
                   {"iterations", "of k-means at most, 1 to 300", "10"},
                   {"budget", "keys that a choice takes, a count or a share of the far keys", "1/20"},
                   {"per", "who chooses: kv-head (the group, by its summed softmax weights) or query-head",
                    "kv-head"}},
          .dense = {},
          .dense_layers = 0,
          .make = make_pqcache,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                const PqCacheOptions options = PqCacheOptions::of(spec);
                const std::int64_t codes = options.bits <= 4 ? (options.m + 1) / 2 : options.m;
                const std::int64_t levels = std::min<std::int64_t>(tokens, std::int64_t{1} << options.bits);
                return geometry.kv_heads *
                       (tokens * codes + levels * geometry.head_dim * std::int64_t{sizeof(float)});
              },
          .validate = check_of<PqCacheOptions>};
}

}  // namespace lode
