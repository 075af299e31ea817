// SPDX-License-Identifier: Apache-2.0
// double-sparsity: of every key a few channels are kept apart, those that matter most to q . k, in few bits;
// keys are chosen by the products over these channels alone (Post-Training Sparse Attention with Double
// Sparsity, Yang et al. 2024, sections 3.1 to 3.3 and algorithm 1; "DS" of HashAttention).
//
//   heavy channels = top `channels` of mean_t |q_t,c k_t,c|    offline; same token t, summed over the group
//   label(k)       = quantised (k_c), c heavy                  the label cache
//   score(q, k)    = sum_c heavy q_c label(k)_c                the best `budget` keys are attended
//
// Channels are chosen when the text is indexed, on a sample of the prefill's own queries and keys, one set
// for each KV head; without queries (a bench), by mean |k_c|, the authors' choice "k". The authors' program
// keeps the statistics of its last calibration text alone, since a condition never holds; ours are of all.
// Labels have levels for each channel and head that the context's keys span, so that 8 channels of 4 bits are
// 32 bits a token; the authors' have a scale and an offset for each token beside these. Keys of later tokens
// beyond the span get its ends. per=kv-head chooses for the group by its summed softmax weights.
#include "select/baselines/double_sparsity.h"

#include <array>
#include <cmath>
#include <map>

#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/captured_queries.h"
#include "select/shared/estimated_keys.h"
#include "select/shared/per_token.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kCalibrationTokens = 512;
constexpr int kChannelShare = 8;  // one of so many channels is heavy, the authors' "group factor"
constexpr std::array<std::string_view, 3> kBits = {"4", "2", "16"};
constexpr std::array<std::string_view, 2> kPer = {"query-head", "kv-head"};

class DoubleSparsity final : public PerTokenSelector, public KeyLabeller {
 public:
  DoubleSparsity(const LayerGeometry& geometry, const DoubleSparsityOptions& options)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {}

  static CapturedQueries capture_for(const LayerGeometry& geometry) {
    return CapturedQueries(geometry.query_heads, geometry.head_dim, kCalibrationTokens);
  }

  bool wants_writes() const override { return true; }
  void on_write(const KvWrite& write) override {
    if (write.phase == Phase::context) of(write.sequence).captured.take(write);
  }
  void build(std::int32_t sequence, KvLayer kv) override {
    Indexed& indexed = of(sequence);
    indexed.captured.cut(kv.tokens);
    indexed.labels.calibrate(magnitudes(indexed.captured, kv), kv, all());
    indexed.labels.extend(kv, static_cast<Position>(kv.tokens), all());
    ++version_;
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    of(sequence).labels.extend(kv, far_end, all());
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    const auto found = indexed_.find(sequence);
    if (found == indexed_.end()) return;
    found->second.labels.roll_back(tokens);
    found->second.captured.cut(tokens);
  }
  void save(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexed_.find(sequence);
    (found == indexed_.end() ? LabelCache(shape()) : found->second.labels).save(out);
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    LabelCache labels = LabelCache::load(shape(), in, kv);
    of(sequence).labels = std::move(labels);
    ++version_;
  }
  Labels key_labels() const override {
    const auto found = indexed_.find(0);
    return {version_,
            found != indexed_.end() && found->second.labels.ready() ? &found->second.labels : nullptr};
  }
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, indexed] : indexed_)
      bytes += indexed.labels.bytes() + indexed.captured.bytes();
    return bytes;
  }

 private:
  struct Indexed {
    CapturedQueries captured;
    LabelCache labels;
  };
  struct Scratch {
    LabelCache::Scratch labels;
    std::vector<float> q, scores;  // [G, d], [G, padded keys]
    std::vector<Position> rows;
  };

  LabelShape shape() const {
    return {.begin = static_cast<Position>(geometry_.dense.sink),
            .heads = geometry_.kv_heads,
            .d = geometry_.head_dim,
            .channels = options_.channels_for(geometry_.head_dim),
            .bits = options_.bits};
  }
  Indexed& of(std::int32_t sequence) {
    return indexed_.try_emplace(sequence, Indexed{capture_for(geometry_), LabelCache(shape())}).first->second;
  }
  LabelCache::ForEach all() const {
    return [this](std::int64_t items, const auto& body) { for_each(items, body); };
  }
  std::vector<std::vector<float>> magnitudes(const CapturedQueries& captured, KvLayer kv) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  DoubleSparsityOptions options_;
  std::map<std::int32_t, Indexed> indexed_;
  std::int64_t version_ = 0;      // of channels and levels
  std::vector<Scratch> scratch_;  // [workers]
};

/// [Hkv][d]: sum_t sum_g |q_t,g,c k_t,c| over the captured tokens, or sum_t |k_t,c| over evenly spread ones.
std::vector<std::vector<float>> DoubleSparsity::magnitudes(const CapturedQueries& captured,
                                                           KvLayer kv) const {
  const auto d = static_cast<std::size_t>(geometry_.head_dim);
  const std::int64_t group = geometry_.group(), asked = captured.tokens();
  const std::int64_t stride = std::max<std::int64_t>(1, kv.tokens / kCalibrationTokens);
  const std::int64_t samples = asked > 0 ? asked : (kv.tokens + stride - 1) / stride;
  std::vector<std::vector<float>> magnitude;
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    const std::vector<float> q = captured.of_heads(head * static_cast<int>(group), static_cast<int>(group));
    std::vector<double> sum(d, 0.0);
    std::vector<float> key(d);
    for (std::int64_t i = 0; i < samples; ++i) {
      const Position at =
          asked > 0 ? captured.positions()[static_cast<std::size_t>(i)] : static_cast<Position>(i * stride);
      read_stored_keys({&kv.heads[static_cast<std::size_t>(head)], 1}, at, nullptr, key);
      for (std::size_t c = 0; c < d; ++c) {
        double weight = asked > 0 ? 0.0 : 1.0;
        for (std::int64_t g = 0; g < group && asked > 0; ++g)
          weight += std::abs(static_cast<double>(q[static_cast<std::size_t>(i * group + g) * d + c]));
        sum[c] += weight * std::abs(static_cast<double>(key[c]));
      }
    }
    magnitude.emplace_back(sum.begin(), sum.end());
  }
  return magnitude;
}

void DoubleSparsity::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const LabelCache& labels = indexed_.at(unit.block->sequence).labels;
  const std::int64_t n = unit.far_keys(), budget = options_.budget.of(n);
  if (!labels.ready() || budget >= n) return add_all_keys(unit, geometry_, out);
  LODE_ASSERT(unit.far_begin == geometry_.dense.sink && labels.end() >= unit.far_end);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  scale_queries(unit, geometry_, s.q);
  const std::int64_t stride = LabelCache::padded(n);
  s.scores.resize(static_cast<std::size_t>(geometry_.group() * stride));
  labels.score(unit.kv_head, {s.q.data(), geometry_.group(), geometry_.head_dim}, n, s.scores.data(), stride,
               s.labels);
  work.bytes += n * labels.label_bytes();
  work.keys_scored += n;
  add_best_keys(unit, geometry_, {s.scores.data(), geometry_.group(), n, stride}, options_.per_kv_head,
                budget, s.rows, out);
}

}  // namespace

DoubleSparsityOptions DoubleSparsityOptions::of(const Spec& spec) {
  DoubleSparsityOptions options;
  options.channels = spec.integer("channels", options.channels, 1, 512);
  options.bits = std::stoi(spec.choice("bits", kBits[0], kBits));
  options.budget = spec.amount("budget", options.budget);
  options.per_kv_head = spec.choice("per", kPer[0], kPer) == "kv-head";
  return options;
}

int DoubleSparsityOptions::channels_for(int head_dim) const {
  return static_cast<int>(channels > 0 ? channels : std::max(1, head_dim / kChannelShare));
}

MethodInfo double_sparsity_method() {
  return {
      .name = "double-sparsity",
      .aliases = {},
      .source = "a few heavy channels of every key (Double Sparsity)",
      .keys = {{"channels", "heavy channels of a key, 1 to 512 and to the head's", "d/8"},
               {"bits", "of a channel: 4, 2 or 16 (as the keys are stored)", "4"},
               {"budget", "keys that a choice takes, a count or a share of the far keys", "1/16"},
               {"per", "who chooses: query-head (each its own keys) or kv-head (the group together)",
                "query-head"}},
      .dense = {},
      .dense_layers = 0,
      .make =
          [](const Spec& spec, const LayerGeometry& geometry, std::string_view) {
            const DoubleSparsityOptions options = DoubleSparsityOptions::of(spec);
            if (options.channels > geometry.head_dim) {
              throw InputError("attention spec '" + spec.str() + "': expected at most the " +
                               std::to_string(geometry.head_dim) + " channels of the model's heads, found " +
                               std::to_string(options.channels));
            }
            return std::make_unique<DoubleSparsity>(geometry, options);
          },
      .index_bytes =
          [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
            // Labels as the keys are stored count as 16 bits, the type that caches have unless told.
            const DoubleSparsityOptions options = DoubleSparsityOptions::of(spec);
            return geometry.kv_heads * tokens * options.channels_for(geometry.head_dim) * options.bits / 8 +
                   DoubleSparsity::capture_for(geometry).bytes_for(tokens);
          },
      .validate = check_of<DoubleSparsityOptions>};
}

}  // namespace lode
