// SPDX-License-Identifier: Apache-2.0
// magicpig: Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation" (2024), section 4 and
// algorithm 1; the LSH baseline of SAAP (appendix B). Keys are sampled by hash tables, and what was sampled
// is weighted so that the sum estimates full attention.
//
//   code of x in table l = the K signs of x . r_{l,1..K},  r ~ N(0, I)       (SimHash; keys less their mean
//   mu) sampled: keys that share the query's code in two of the L tables or more p = (1 - theta / pi)^K,
//   theta the angle of q and k - mu u = P(sampled) = 1 - (1 - p)^L - L p (1 - p)^(L - 1) = 1 - (1 - p)^(L -
//   1) (L p + 1 - p) output = sum of exp(s_i - log u_i) v_i over the sampled i, and the dense keys with u =
//   1, normalised
//
// The mean is that of the keys that build() was given; later keys are hashed less the same mean, so that
// appended equals rebuilt over the same context. Subtracting it from all keys adds the same number to all
// scores of a query and so changes nothing but the sampling. An index that was never built has mean 0. One
// set of tables a KV head; each query head draws its own sample from it. Differs from the authors' program:
// generated tokens join the tables (theirs stay in a buffer of 256), directions follow from the seed, and
// sink, window and dense layers are those of all methods here (theirs: 4, 64, every 16th layer).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>

#include "ann/hashing/lsh_tables.h"
#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/per_token.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kPiece = 64;    // keys of one thread's item
constexpr std::int64_t kBlock = 4096;  // keys of all heads hashed at a time
constexpr int kTogether = 8;           // vectors of one gemv

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Options {
  int bits = 10, tables = 150;  // K, L

  static Options of(const Spec& spec) {
    Options options;
    options.bits = static_cast<int>(spec.integer("K", options.bits, 1, 16));
    options.tables = static_cast<int>(spec.integer("L", options.tables, 2, 4096));
    return options;
  }
  std::int64_t functions() const { return std::int64_t{bits} * tables; }
};

/// -log u for a cosine; 0 <= u <= 1 is computed where it would vanish next to 1 as well.
float log_weight(double cosine, const Options& options) {
  const double theta = std::acos(std::clamp(cosine, -1.0, 1.0)), l = options.tables;
  const double p = std::pow(1.0 - theta / std::numbers::pi, options.bits);
  // Two terms of the series in p where the difference below would lose them.
  const double u = l * p < 1e-5 ? l * (l - 1) / 2 * p * p * (1 - (l - 2) * p * 2 / 3)
                                : -std::expm1((l - 1) * std::log1p(-p) + std::log1p((l - 1) * p));
  // An opposite key cannot be sampled but by a sign that rounding has turned.
  return static_cast<float>(-std::log(std::max(u, std::numeric_limits<double>::min())));
}

/// One KV head of one sequence.
struct HeadTables {
  std::vector<float> mean;   // [d]
  std::vector<float> norms;  // [n] of keys less the mean
  LshTables tables;
};

/// One sequence.
struct Indexed {
  Position begin = 0, end = 0;  // keys [begin, end) are in
  std::vector<HeadTables> heads;
};

class MagicPig final : public PerTokenSelector {
 public:
  MagicPig(const LayerGeometry& geometry, const Options& options);

  void build(std::int32_t sequence, KvLayer kv) override {
    Indexed index = empty_index();
    for_each(geometry_.kv_heads, [&](std::int64_t head, int) {
      index.heads[at(head)].mean = mean_of(kv.heads[at(head)], index.begin, kv.tokens);
    });
    extend(index, kv, static_cast<Position>(kv.tokens));
    indexes_.insert_or_assign(sequence, std::move(index));
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    const auto [place, fresh] = indexes_.try_emplace(sequence);
    if (fresh) place->second = empty_index();
    extend(place->second, kv, far_end);
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;

 private:
  struct Scratch {
    std::vector<float> products;       // [<= 8, L K]
    std::vector<std::uint16_t> codes;  // [G, L]
    std::vector<float> scores, mean_scores;
    std::vector<std::int32_t> found;
    std::vector<Position> rows;
    LshTables::Scratch tables;
  };

  Indexed empty_index() const;
  std::vector<float> mean_of(const KvRows& kv, Position begin, std::int64_t end) const;
  void extend(Indexed& index, KvLayer kv, Position end) const;
  void extend_block(Indexed& index, KvLayer kv, Position end) const;
  /// Keys [begin, begin + n) of a head less its mean, [n, d], and their norms.
  void read_centred(const HeadTables& head, const KvRows& kv, Position begin, std::int64_t n, float* keys,
                    float* norms) const;
  void hash(int kv_head, const float* x /*[n, d]*/, std::int64_t n, std::uint16_t* codes /*[n, L]*/,
            std::vector<float>& products) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;
  void weigh(const SelectUnit& unit, const Indexed& index, std::span<const float> q, Scratch& s,
             Selection& out) const;

  Options options_;
  std::vector<std::vector<float>> directions_;  // [Hkv][L K, d]
  std::map<std::int32_t, Indexed> indexes_;     // by sequence
  std::vector<Scratch> scratch_;                // [workers]
};

MagicPig::MagicPig(const LayerGeometry& geometry, const Options& options)
    : PerTokenSelector(geometry), options_(options), scratch_(at(workers())) {
  for (int head = 0; head < geometry.kv_heads; ++head) {
    Rng rng(hash_seed(geometry.seed, geometry.layer, geometry.kv_head_in_layer(head)));
    std::vector<float>& own = directions_.emplace_back(at(options.functions() * geometry.head_dim));
    for (float& x : own) x = static_cast<float>(rng.normal());
  }
}

Indexed MagicPig::empty_index() const {
  const auto sink = static_cast<Position>(geometry_.dense.sink);
  const HeadTables empty = {.mean = std::vector<float>(at(geometry_.head_dim), 0.0f),
                            .norms = {},
                            .tables = LshTables(options_.tables, options_.bits)};
  return {.begin = sink, .end = sink, .heads = std::vector<HeadTables>(at(geometry_.kv_heads), empty)};
}

std::vector<float> MagicPig::mean_of(const KvRows& kv, Position begin, std::int64_t end) const {
  std::vector<float> key(at(geometry_.head_dim)), mean(key.size(), 0.0f);
  std::vector<double> sum(key.size(), 0.0);
  for (std::int64_t row = begin; row < end; ++row) {
    read_stored_keys({&kv, 1}, static_cast<Position>(row), nullptr, key);
    for (std::size_t i = 0; i < key.size(); ++i) sum[i] += key[i];
  }
  if (end <= begin) return mean;
  for (std::size_t i = 0; i < key.size(); ++i)
    mean[i] = static_cast<float>(sum[i] / static_cast<double>(end - begin));
  return mean;
}

void MagicPig::read_centred(const HeadTables& head, const KvRows& kv, Position begin, std::int64_t n,
                            float* keys, float* norms) const {
  const std::int64_t d = geometry_.head_dim;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::span<float> key(keys + i * d, at(d));
    read_stored_keys({&kv, 1}, begin + static_cast<Position>(i), nullptr, key);
    double square = 0.0;
    for (std::size_t j = 0; j < key.size(); ++j) {
      key[j] -= head.mean[j];
      square += static_cast<double>(key[j]) * key[j];
    }
    norms[i] = static_cast<float>(std::min<double>(std::sqrt(square), std::numeric_limits<float>::max()));
  }
}

/// The K signs of a table make a number, the first one its lowest bit; a product of 0 or NaN is no sign.
void MagicPig::hash(int kv_head, const float* x, std::int64_t n, std::uint16_t* codes,
                    std::vector<float>& products) const {
  const std::int64_t functions = options_.functions(), d = geometry_.head_dim;
  products.resize(at(kTogether * functions));
  for (std::int64_t first = 0; first < n; first += kTogether) {
    const auto some = static_cast<int>(std::min<std::int64_t>(kTogether, n - first));
    kernels().gemv(x + first * d, some, directions_[at(kv_head)].data(), DType::f32, d, 0, functions,
                   products.data(), functions);
    for (std::int64_t i = 0; i < some * std::int64_t{options_.tables}; ++i) {
      unsigned code = 0;
      for (int bit = 0; bit < options_.bits; ++bit)
        code |= static_cast<unsigned>(products[at(i * options_.bits + bit)] > 0.0f) << bit;
      codes[first * options_.tables + i] = static_cast<std::uint16_t>(code);
    }
  }
}

void MagicPig::extend(Indexed& index, KvLayer kv, Position end) const {
  while (index.end < end) {
    check_cancel();
    extend_block(index, kv, static_cast<Position>(std::min<std::int64_t>(end, index.end + kBlock)));
  }
}

void MagicPig::extend_block(Indexed& index, KvLayer kv, Position end) const {
  LODE_ASSERT(end <= kv.tokens);
  const std::int64_t count = end - index.end, held = index.end - index.begin, d = geometry_.head_dim,
                     tables = options_.tables, pieces = (count + kPiece - 1) / kPiece;
  std::vector<std::uint16_t> codes(at(geometry_.kv_heads * count * tables));  // [Hkv, count, L]
  for (HeadTables& head : index.heads) head.norms.resize(at(held + count));
  for_each(geometry_.kv_heads * pieces, [&](std::int64_t item, int) {
    const std::int64_t h = item / pieces, first = item % pieces * kPiece,
                       some = std::min(kPiece, count - first);
    std::vector<float> keys(at(some * d)), products;
    read_centred(index.heads[at(h)], kv.heads[at(h)], index.end + static_cast<Position>(first), some,
                 keys.data(), index.heads[at(h)].norms.data() + held + first);
    hash(static_cast<int>(h), keys.data(), some, codes.data() + (h * count + first) * tables, products);
  });
  for_each(geometry_.kv_heads, [&](std::int64_t h, int) {
    index.heads[at(h)].tables.append(std::span(codes).subspan(at(h * count * tables), at(count * tables)),
                                     count);
  });
  index.end = end;
}

void MagicPig::roll_back(std::int32_t sequence, std::int64_t tokens) {
  const auto found = indexes_.find(sequence);
  if (found == indexes_.end() || found->second.end <= tokens) return;
  Indexed& index = found->second;
  index.end = std::max(index.begin, static_cast<Position>(tokens));
  for (HeadTables& head : index.heads) {
    head.norms.resize(at(index.end - index.begin));
    head.tables.cut(index.end - index.begin);
  }
}

void MagicPig::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const Indexed& index = indexes_.at(unit.block->sequence);
  LODE_ASSERT(index.begin == unit.far_begin && index.end >= unit.far_end);
  Scratch& s = scratch_[at(worker)];
  const HeadTables& head = index.heads[at(unit.kv_head)];
  const std::int64_t d = geometry_.head_dim, group = geometry_.group();
  const std::span<const float> q = unit.group_of(unit.block->q, geometry_);  // [G, d]
  s.codes.resize(at(group * options_.tables));
  hash(unit.kv_head, q.data(), group, s.codes.data(), s.products);
  work.bytes += options_.functions() * d * std::int64_t{sizeof(float)};
  for (std::int64_t g = 0; g < group; ++g) {
    out.add_set(unit.set(1u << g));
    work.bytes +=
        head.tables.meet_twice(std::span(s.codes).subspan(at(g * options_.tables), at(options_.tables)),
                               unit.far_keys(), s.tables, s.found);
    weigh(unit, index, q.subspan(at(g * d), at(d)), s, out);
    work.bytes += std::ssize(s.found) * (unit.kv().token_bytes() / 2 + std::int64_t{sizeof(float)});
    work.keys_scored += std::ssize(s.found);
  }
}

/// Adds the keys in s.found with their weights: the angle follows from the score of the key as it is stored,
/// q . (k - mu) = q . k - q . mu.
void MagicPig::weigh(const SelectUnit& unit, const Indexed& index, std::span<const float> q, Scratch& s,
                     Selection& out) const {
  const HeadTables& head = index.heads[at(unit.kv_head)];
  const std::int64_t count = std::ssize(s.found);
  s.rows.clear();
  for (const std::int32_t found : s.found) s.rows.push_back(index.begin + found);
  s.scores.resize(at(count));
  kernels().score_rows(q.data(), 1, unit.kv(), s.rows.data(), count, s.scores.data(), count);
  double of_mean = 0.0, square = 0.0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    of_mean += static_cast<double>(q[i]) * head.mean[i];
    square += static_cast<double>(q[i]) * q[i];
  }
  const double norm = std::sqrt(square);
  for (std::int64_t i = 0; i < count; ++i) {
    const double cosine = (s.scores[at(i)] - of_mean) / (norm * head.norms[at(s.found[at(i)])]);
    // A vector without a direction, or a key that is not finite: as good as at a right angle.
    out.add_row(s.rows[at(i)], log_weight(std::isfinite(cosine) ? cosine : 0.0, options_));
  }
}

void MagicPig::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = indexes_.find(sequence);
  const Indexed& index = found == indexes_.end() ? empty_index() : found->second;
  const std::array<std::int64_t, 7> shape = {geometry_.kv_heads,
                                             options_.bits,
                                             options_.tables,
                                             geometry_.head_dim,
                                             index.begin,
                                             index.end,
                                             static_cast<std::int64_t>(geometry_.seed)};
  std::vector<float> means;
  std::vector<std::uint16_t> codes;
  for (const HeadTables& head : index.heads) {
    means.insert(means.end(), head.mean.begin(), head.mean.end());
    for (int table = 0; table < options_.tables; ++table) {
      const std::span<const std::uint16_t> own = head.tables.codes(table);
      codes.insert(codes.end(), own.begin(), own.end());
    }
  }
  out.add<std::int64_t>("shape", shape);
  out.add<float>("means", means);
  out.add<std::uint16_t>("codes", codes);
}

void MagicPig::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  Indexed index = empty_index();
  const auto shape = in.values<std::int64_t>("shape");
  const std::int64_t heads = geometry_.kv_heads, d = geometry_.head_dim, tables = options_.tables;
  require(shape.size() == 7 && shape[0] == heads && shape[1] == options_.bits && shape[2] == tables &&
              shape[3] == d,
          "the model's KV heads and head dimension, and the spec's K and L");
  require(shape[6] == static_cast<std::int64_t>(geometry_.seed),
          "tables of the same seed: index the text again");
  require(shape[4] == index.begin && shape[5] >= index.begin &&
              shape[5] <= std::max<std::int64_t>(index.begin, kv.tokens),
          "keys behind the sink and within the context");
  const std::int64_t count = shape[5] - index.begin;
  const auto means = in.values<float>("means");
  const auto codes = in.values<std::uint16_t>("codes");
  require(std::ssize(means) == heads * d && std::ssize(codes) == heads * tables * count,
          "sections of the sizes that 'shape' gives");
  require(std::all_of(means.begin(), means.end(), [](float x) { return std::isfinite(x); }), "finite means");
  require(std::all_of(codes.begin(), codes.end(), [&](unsigned code) { return code >> options_.bits == 0; }),
          "codes of K bits");
  for_each(heads, [&](std::int64_t h, int) {
    HeadTables& head = index.heads[at(h)];
    const std::span<const float> mean = means.subspan(at(h * d), at(d));
    head.mean.assign(mean.begin(), mean.end());
    head.norms.resize(at(count));
    std::vector<float> keys(at(kPiece * d));
    std::vector<std::uint16_t> rows(at(count * tables));  // [count, L]
    for (std::int64_t i = 0; i < count; i += kPiece) {
      read_centred(head, kv.heads[at(h)], index.begin + static_cast<Position>(i), std::min(kPiece, count - i),
                   keys.data(), head.norms.data() + i);
    }
    for (std::int64_t table = 0; table < tables; ++table) {
      for (std::int64_t i = 0; i < count; ++i)
        rows[at(i * tables + table)] = codes[at((h * tables + table) * count + i)];
    }
    head.tables.append(rows, count);
  });
  index.end = static_cast<Position>(shape[5]);
  indexes_.insert_or_assign(sequence, std::move(index));
}

std::int64_t MagicPig::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, index] : indexes_) {
    for (const HeadTables& head : index.heads) {
      bytes += head.tables.bytes() +
               static_cast<std::int64_t>((head.mean.capacity() + head.norms.capacity()) * sizeof(float));
    }
  }
  return bytes;
}

}  // namespace

MethodInfo magicpig_method() {
  return {.name = "magicpig",
          .aliases = {},
          .source = "MagicPIG (Chen et al. 2024): keys sampled by hash tables, weighted by 1/probability",
          .keys = {{"K", "signs of random directions that make a table's code, 1 to 16", "10"},
                   {"L", "hash tables, of which a key must meet the query in two, 2 to 4096", "150"}},
          .dense = {},
          .dense_layers = 0,
          .make = make_of<MagicPig, Options>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                // Per key and table a code, in lists that grow by doubling, and a place in a bucket; a norm.
                const Options options = Options::of(spec);
                const std::int64_t starts = options.tables * ((std::int64_t{1} << options.bits) + 1) * 4;
                return geometry.kv_heads *
                       (starts + tokens * (options.tables * std::int64_t{2 * 3 / 2 + 4} + 4));
              },
          .validate = check_of<Options>};
}

}  // namespace lode
