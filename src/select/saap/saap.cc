// SPDX-License-Identifier: Apache-2.0
// saap: Self-Attention with Asymmetric Partitions (Mazaré et al. 2025). Keys are in the bucket of their
// nearest centroid; which buckets a query attends is said by a classifier that was trained on where attention
// lies.
//
//   bucket(k) = argmax_c k . c                                             (section 4, spherical k-means)
//   probes(q) = top-l of sum over the group's heads of softmax(f_q(q)) / n^a      (section 5, group=batched)
//             = top-l of softmax(f_q(q)) / n^a, each head on its own   (appendix E.3, group=independent)
//
// with n = far keys of the bucket and a = 0 in the paper (rank=mass). Here a = 1/2 is the default: f_q
// predicts the share of attention of a whole bucket, and buckets are uneven, so ranking by it alone reads few
// large ones; at an equal share of keys the ranking by p / sqrt(n) captures more (docs/results/saap.md).
//
// An artefact may assign keys by a trained classifier instead (`train saap --keys trained`, section 6.5): the
// label is then the largest of its scores. A GPU labels by centroids alone, so such keys are labelled, and
// their buckets chosen, on the host.
//
// Keys and queries enter before RoPE (section 4, "Assigning with(out) RoPE"); stored keys are un-rotated, so
// the index is a function of the store alone. All keys of a chosen bucket are attended ("Beyond top-k").
// Centroids and classifier come from an artefact that `train saap` made (saap_artefact.h), nothing is learned
// from the context.
//
// Not in the paper: an artefact may hold several networks f_q over the same buckets, each trained for a
// stretch of context lengths; the one that chooses is named by the query's own position (saap_artefact.h).
// The classifier's weights are rounded to 8 bits, as on the GPU, unless keys are kept in float32 (int8_net.h;
// docs/results/saap.md has what that costs). Every query token chooses for itself, so that chunks change
// nothing. Keys join their bucket when they may first be asked for. Buckets without far keys are passed over.
// A text whose keys fall into the buckets much more unevenly than those of the training text did (the paper's
// Math.F, 48 % selectivity) raises the domain alarm: the output says so, and the layer attends by `fallback`
// if one is named. That is decided once, when the context is indexed, so that it depends on nothing but the
// text.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/threads.h"
#include "io/container.h"
#include "kernels/exponentials.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/made_for_length.h"
#include "select/methods.h"
#include "select/saap/artefact.h"
#include "select/saap/int8_net.h"
#include "select/shared/branches.h"
#include "select/shared/bucket_choice.h"
#include "select/shared/partition.h"
#include "select/shared/shares_index.h"
#include "select/trained_on.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxProbes = 1 << 20;
constexpr std::array<std::string_view, 2> kGroup = {"batched", "independent"};
constexpr std::array<std::string_view, 3> kRank = {"root", "mass", "key"};
constexpr std::int64_t kAlarmKeys = 1024;    // fewer keys say nothing of a text
constexpr std::int64_t kAlarmQueries = 256;  // fewer choices neither

struct Options {
  std::optional<std::int64_t> clusters;
  std::int64_t probes = 32;
  bool batched = true;
  float per_key = 0.5f;  ///< buckets are ranked by probability / keys^per_key
  std::optional<std::string> weights;
  std::optional<std::size_t> network;  ///< the only one that chooses; nothing: by position
  double alarm = 3.0;
  std::string fallback = "none";

  static Options of(const Spec& spec) {
    Options options;
    if (spec.text("clusters")) options.clusters = spec.integer("clusters", 0, 1, kMaxProbes);
    options.probes = spec.integer("probes", options.probes, 1, kMaxProbes);
    options.batched = spec.choice("group", kGroup[0], kGroup) == kGroup[0];
    const std::string rank = spec.choice("rank", kRank[0], kRank);
    options.per_key = rank == "mass" ? 0.0f : rank == "key" ? 1.0f : 0.5f;
    options.weights = spec.file("weights");
    if (spec.text("network").value_or("auto") != "auto")
      options.network = static_cast<std::size_t>(spec.integer("network", 1, 1, kMostSaapNetworks) - 1);
    options.alarm = spec.number("alarm", options.alarm, 1.0, 1e6);
    options.fallback = spec.text("fallback").value_or(options.fallback);
    if (options.fallback != "none") {
      const MethodInfo& other = find_method(options.fallback);
      if (other.trained || other.finish)
        throw InputError(
            "attention spec '" + spec.str() +
            "': key 'fallback': expected none or a method without an artefact or thresholds over all "
            "layers, found '" +
            options.fallback + "'");
    }
    return options;
  }
};

class Saap final : public PartitionSelector,
                   public BucketChooser,
                   public SharesIndex,
                   public Branches,
                   public MadeForLength {
 public:
  Saap(const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint)
      : PartitionSelector(geometry),
        options_(Options::of(spec)),
        scratch_(static_cast<std::size_t>(workers())) {
    if (!options_.weights) {
      throw InputError("attention spec '" + spec.str() +
                       "': expected weights=FILE, or saap.safetensors beside the model (lodestone train saap "
                       "makes one), found none of this model");
    }
    layer_ = read_saap(*options_.weights, geometry, fingerprint);
    rope_remark_ = TrainedOn::parse(layer_.stretches.front().training)
                       .rope_remark("an artefact of saap", "train saap", geometry.rope);
    if (options_.clusters.value_or(layer_.buckets()) != layer_.buckets()) {
      throw InputError(fmt::format("attention spec '{}': key 'clusters': expected {} as in {}, found {}",
                                   spec.str(), layer_.buckets(), *options_.weights, *options_.clusters));
    }
    if (options_.network.value_or(0) >= layer_.stretches.size()) {
      throw InputError(
          fmt::format("attention spec '{}': key 'network': expected auto or 1 to {} as in {}, "
                      "found {}",
                      spec.str(), layer_.stretches.size(), *options_.weights, *options_.network + 1));
    }
    const MethodInfo* info = options_.fallback == "none" ? nullptr : &find_method(options_.fallback);
    if (info != nullptr) {
      Spec other = parse_spec(options_.fallback);
      other.dense = geometry.dense;
      fallback_ = info->make ? info->make(other, geometry, fingerprint) : make_full_selector(geometry);
    }
  }

  // The fallback's alone: without it a choice depends on the query and the index.
  bool per_sequence() const override { return fallen_back(0) && is_per_sequence(fallback_.get()); }
  void branch(std::int32_t id) override {
    alarms_[id] = alarms_.at(0);
    lode::branch(fallback_.get(), id);
  }
  void drop_branch(std::int32_t id) override {
    alarms_.erase(id);
    lode::drop_branch(fallback_.get(), id);
  }
  bool grows_with_window() const override { return lode::grows_with_window(fallback_.get()); }

  bool wants_writes() const override { return fallback_ != nullptr && fallback_->wants_writes(); }
  bool wants_mass() const override { return fallback_ != nullptr && fallback_->wants_mass(); }
  void on_write(const KvWrite& write) override { fallback_->on_write(write); }
  void observe(const AttentionMass& mass) override {
    if (fallen_back(mass.sequence)) fallback_->observe(mass);
  }

  void build(std::int32_t sequence, KvLayer kv) override {
    BucketIndex index = empty_index();
    extend_to_context(index, kv);
    set_index(sequence, std::move(index));
    alarms_[sequence] = imbalance_against_training(bucket_sizes(sequence));
    lengths_[sequence] = length_of(kv);
    if (fallen_back(sequence)) fallback_->build(sequence, kv);
  }
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const Saap*>(&other);
    if (same == nullptr || fallback_ != nullptr || same->layer_.fingerprint != layer_.fingerprint ||
        !same->alarms_.contains(sequence) || !copy_index(sequence, *same))
      return false;
    alarms_[sequence] = same->alarms_.at(sequence);
    lengths_[sequence] = same->lengths_.at(sequence);
    return true;
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    PartitionSelector::append(sequence, kv, far_end);
    lengths_[sequence] = std::max(lengths_[sequence], kv.tokens);
    if (fallen_back(sequence)) fallback_->append(sequence, kv, far_end);
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    PartitionSelector::roll_back(sequence, tokens);
    if (const auto found = lengths_.find(sequence); found != lengths_.end())
      found->second = std::min(found->second, tokens);
    if (tokens == 0) alarms_.erase(sequence);
    live_.erase(sequence);  // of a question that is not asked any more
    if (fallback_ != nullptr) fallback_->roll_back(sequence, tokens);  // which may have heard what is gone
  }
  void select(std::span<const QueryBlock> blocks, Selection& out) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override {
    return PartitionSelector::index_bytes() + (fallback_ != nullptr ? fallback_->index_bytes() : 0);
  }
  std::string notice(std::int32_t sequence) const override;
  std::string remark_on_length(std::int64_t tokens) const override;
  std::optional<BucketChoice> bucket_choice() const override {
    const auto near_only = [](const SaapHead& head) { return head.near_only; };
    if (!options_.batched || fallback_ != nullptr) return std::nullopt;
    if (std::any_of(layer_.heads.begin(), layer_.heads.end(), near_only)) return std::nullopt;
    BucketChoice choice = {.keys = {}, .queries = {}, .probes = options_.probes, .per_key = options_.per_key};
    for (const SaapHead& head : layer_.heads) choice.keys.push_back(head.keys);
    choice.from.clear();
    for (std::size_t k = options_.network.value_or(0); k < layer_.stretches.size(); ++k) {
      choice.from.push_back(layer_.stretches[k].from);
      for (const SaapHead& head : layer_.heads) choice.queries.push_back(head.networks[k].queries);
      if (options_.network) break;
    }
    choice.from.front() = 0;
    return choice;
  }
  /// Where a layer has fallen back, the other method names tokens.
  RowOrder row_order(std::int32_t sequence, int head, Position end) const override {
    return fallback_ != nullptr ? RowOrder{} : PartitionSelector::row_order(sequence, head, end);
  }
  void take_bucket_sizes(std::span<const std::int64_t> sizes) override {
    alarms_.try_emplace(0, imbalance_against_training(sizes));  // not where a file has said it
    const auto first = sizes.first(static_cast<std::size_t>(layer_.buckets()));
    lengths_[0] = std::accumulate(first.begin(), first.end(), geometry_.dense.sink);
  }

 private:
  struct Scratch {
    Int8Net::Scratch net;
    std::vector<float> hidden, scores, sum;  // the network's, [G, C], [C]
    std::vector<std::int64_t> keys;          // [C] of each bucket
  };

  /// A layer that falls back attends by another method, which needs all keys.
  bool divides() const override { return fallback_ == nullptr; }
  std::int64_t length_of(KvLayer kv) const { return share().divided() ? share().tokens : kv.tokens; }

  BucketIndex empty_index() const override {
    return {static_cast<Position>(geometry_.dense.sink), geometry_.kv_heads, layer_.buckets()};
  }
  void label(const BucketIndex&, int head, Matrix<const float> keys,
             std::span<std::int32_t> labels) const override {
    layer_.heads[static_cast<std::size_t>(head)].keys.label(keys, labels);
  }
  bool labels_by_centroids() const override {
    return std::ranges::all_of(layer_.heads, [](const SaapHead& head) { return head.keys.is_centroids(); });
  }
  std::vector<float> label_centroids(const BucketIndex&, int head) const override {
    return layer_.heads[static_cast<std::size_t>(head)].keys.centroids();
  }
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  /// The network that chooses for the query at a position.
  std::size_t network_for(Position query) const {
    return options_.network.value_or(layer_.network_for(query));
  }
  /// How many tokens the network that answers at the end of a context is good for; 0 = the file does not say.
  std::int64_t good_for(std::int64_t tokens) const;
  /// s.scores := of every bucket for the group's heads; returns the bytes read.
  std::int64_t score(const SelectUnit& unit, Scratch& s) const;
  /// Divides by the buckets' sizes what add_best_buckets ranks: probabilities, or their logarithms.
  void rank_by_size(const SelectUnit& unit, Scratch& s, std::span<float> scores, bool logarithms) const;
  double imbalance_against_training(std::span<const std::int64_t> sizes /*[Hkv, C]*/) const;
  bool fallen_back(std::int32_t sequence) const {
    const auto found = alarms_.find(sequence);
    return fallback_ != nullptr && found != alarms_.end() && found->second >= options_.alarm;
  }

  Options options_;
  SaapLayer layer_;
  std::string rope_remark_;
  std::vector<Int8Net> rounded_;                  // [K, Hkv], from the first choice on: a device has its own
  std::unique_ptr<Selector> fallback_;            // null: none
  std::map<std::int32_t, double> alarms_;         // imbalance of the context in units of the training text's
  std::map<std::int32_t, std::int64_t> lengths_;  // tokens of the context
  std::vector<Scratch> scratch_;                  // [workers]
  /// Of all choices of a network since the last rollback.
  struct Live {
    std::atomic<std::int64_t> far_keys = 0, far_total = 0, choices = 0;
  };
  std::map<std::int32_t, std::array<Live, kMostSaapNetworks>> live_;  // by sequence: [K]
};

/// Adds softmax(scores) to `sum` and leaves its numerators in their place; scores with a NaN, or without a
/// finite maximum, have no say.
void add_softmax(std::span<float> scores, std::vector<float>& sum) {
  if (!std::isfinite(*std::max_element(scores.begin(), scores.end()))) return;
  const double total = exponential_kernels().weigh(scores.data(), nullptr, std::ssize(scores));
  if (total <= 0.0) return;
  const auto inverse = static_cast<float>(1.0 / total);
  for (std::size_t i = 0; i < scores.size(); ++i) sum[i] += scores[i] * inverse;
}

void Saap::select(std::span<const QueryBlock> blocks, Selection& out) {
  std::vector<QueryBlock> own, others;
  for (const QueryBlock& block : blocks) (fallen_back(block.sequence) ? others : own).push_back(block);
  if (rounded_.empty()) {
    const std::size_t heads = layer_.heads.size();
    std::vector<Int8Net> rounded(layer_.stretches.size() * heads);
    for_each(std::ssize(rounded), [&](std::int64_t item, int) {
      const auto at = static_cast<std::size_t>(item);
      rounded[at] = Int8Net(layer_.heads[at % heads].networks[at / heads].queries);
    });
    rounded_ = std::move(rounded);  // all or none, should memory run out
  }
  for (const QueryBlock& block : own) live_.try_emplace(block.sequence);
  if (!own.empty()) PartitionSelector::select(own, out);
  if (others.empty()) return;
  fallback_->select(others, out);
  const SelectWork work = fallback_->take_work();
  work_.bytes += work.bytes;
  work_.keys_scored += work.keys_scored;
}

std::int64_t Saap::score(const SelectUnit& unit, Scratch& s) const {
  const float* const q = unit.group_of(unit.block->q_unrotated, geometry_).data();
  const auto head = static_cast<std::size_t>(unit.kv_head);
  const std::size_t network = network_for(unit.position());
  s.scores.resize(static_cast<std::size_t>(geometry_.group() * layer_.buckets()));
  if (unit.kv().type == DType::f32) {
    const BucketNet& exact = layer_.heads[head].networks[network].queries;
    exact.scores(q, geometry_.group(), s.hidden, s.scores.data());
    return exact.bytes();
  }
  const Int8Net& net = rounded_[network * layer_.heads.size() + head];
  net.scores(q, geometry_.group(), s.net, s.scores.data());
  return net.bytes();
}

void Saap::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const std::int64_t buckets = layer_.buckets();
  const int group = geometry_.group();
  if (layer_.heads[static_cast<std::size_t>(unit.kv_head)].near_only)
    return out.add_set(unit.set(all_heads(group)));
  if (options_.probes >= buckets) {
    out.add_set(unit.set(all_heads(group)));
    return out.add_run(unit.far_begin, unit.far_end);
  }
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  work.bytes += score(unit, s);
  const auto of_head = [&](int g) {
    return std::span(s.scores).subspan(static_cast<std::size_t>(g * buckets),
                                       static_cast<std::size_t>(buckets));
  };
  std::int64_t visited = 0;
  if (options_.batched) {
    s.sum.assign(static_cast<std::size_t>(buckets), 0.0f);
    for (int g = 0; g < group; ++g) add_softmax(of_head(g), s.sum);
    rank_by_size(unit, s, s.sum, false);
    out.add_set(unit.set(all_heads(group)));
    visited = add_best_buckets(unit, worker, s.sum, options_.probes, out, work);
  } else {
    for (int g = 0; g < group; ++g) {
      rank_by_size(unit, s, of_head(g), true);
      out.add_set(unit.set(1u << g));
      visited += add_best_buckets(unit, worker, of_head(g), options_.probes, out, work);
    }
  }
  work.keys_scored += group * buckets;
  const std::int64_t sets = options_.batched ? 1 : group;
  if (unit.far_keys() < 4 * buckets) return;  // most buckets are empty: nothing to compare with
  Live& live = live_.at(unit.block->sequence)[network_for(unit.position())];
  live.far_keys.fetch_add(visited, std::memory_order_relaxed);
  live.far_total.fetch_add(sets * unit.far_keys(), std::memory_order_relaxed);
  live.choices.fetch_add(1, std::memory_order_relaxed);
}

void Saap::rank_by_size(const SelectUnit& unit, Scratch& s, std::span<float> scores, bool logarithms) const {
  if (options_.per_key == 0.0f) return;
  s.keys.resize(scores.size());
  count_far_keys(unit, s.keys);
  for (std::size_t c = 0; c < scores.size(); ++c) {
    const auto n = static_cast<float>(std::max<std::int64_t>(s.keys[c], 1));
    const float size = options_.per_key == 0.5f ? std::sqrt(n) : n;
    scores[c] = logarithms ? scores[c] - std::log(size) : scores[c] / size;
  }
}

double Saap::imbalance_against_training(std::span<const std::int64_t> sizes) const {
  const auto buckets = static_cast<std::size_t>(layer_.buckets());
  const std::span<const std::int64_t> first = sizes.first(buckets);
  if (std::accumulate(first.begin(), first.end(), std::int64_t{0}) < kAlarmKeys) return 0.0;
  double sum = 0.0;
  for (std::size_t head = 0; head < layer_.heads.size(); ++head) {
    const double trained = layer_.heads[head].imbalance;
    sum += imbalance_of(sizes.subspan(head * buckets, buckets)) / std::max(0.01, trained);
  }
  return sum / static_cast<double>(layer_.heads.size());
}

std::int64_t Saap::good_for(std::int64_t tokens) const {
  const std::size_t network = network_for(static_cast<Position>(tokens));
  const std::int64_t reach = kBeyondReach * layer_.stretches[network].reach();
  if (reach == 0 || options_.network || network + 1 == layer_.stretches.size()) return reach;
  return std::max<std::int64_t>(reach, layer_.stretches[network + 1].from);  // as far as the file gives it
}

std::string Saap::remark_on_length(std::int64_t tokens) const {
  const std::int64_t most = good_for(tokens);
  if (most == 0 || tokens <= most) return {};
  return fmt::format(
      "a context of {} tokens, and saap's artefact was trained for {}: expect it to miss what is far (train "
      "with longer "
      "prompts, or another network with --add-network --shift, or take another method)",
      tokens, layer_.stretches[network_for(static_cast<Position>(tokens))].reach());
}

std::string Saap::notice(std::int32_t sequence) const {
  const auto found = alarms_.find(sequence);
  if (found != alarms_.end() && found->second >= options_.alarm) {
    return fmt::format(
        "a text unlike the training text of saap: its keys fill the buckets of layer {} {:.1f} times as "
        "unevenly; {}",
        geometry_.layer, found->second,
        fallback_ != nullptr ? "the layer attends by " + options_.fallback
                             : "expect to read more than usual (fallback=full would attend exactly)");
  }
  const auto length = lengths_.find(sequence);
  const std::string too_long = length == lengths_.end() ? std::string() : remark_on_length(length->second);
  if (!too_long.empty()) return too_long;
  const auto asked = live_.find(sequence);
  for (std::size_t k = 0; asked != live_.end() && k < layer_.stretches.size(); ++k) {
    const Live& live = asked->second[k];
    if (live.choices < kAlarmQueries) continue;
    double expected = 0.0;
    for (const SaapHead& head : layer_.heads)
      expected += head.networks[k].expected_selectivity(options_.probes);
    expected /= static_cast<double>(layer_.heads.size());
    const double share = static_cast<double>(live.far_keys) / static_cast<double>(live.far_total);
    if (share < options_.alarm * expected) continue;
    return fmt::format(
        "questions unlike the training text of saap: layer {} attends {:.1f} % of the far keys, {:.1f} % "
        "were "
        "expected",
        geometry_.layer, 100 * share, 100 * expected);
  }
  return rope_remark_;
}

// Sections: those of the buckets; "artefact", the fingerprint of the layer's networks; "alarm", float64.
void Saap::save(std::int32_t sequence, SectionWriter& out) const {
  PartitionSelector::save(sequence, out);
  out.add("artefact", std::as_bytes(std::span(layer_.fingerprint)));
  const auto found = alarms_.find(sequence);
  const double alarm = found == alarms_.end() ? 0.0 : found->second;
  out.add<double>("alarm", {&alarm, 1});
  if (!fallen_back(sequence)) return;
  SectionWriter inner = out.within("fallback");
  fallback_->save(sequence, inner);
}

void Saap::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const std::string& what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto artefact = in.values<char>("artefact");
  require(std::string_view(artefact.data(), artefact.size()) == layer_.fingerprint,
          "one made with the artefact " + *options_.weights);
  BucketIndex index = read_index(in, kv);
  require(index.buckets() == layer_.buckets(), "as many buckets as the artefact has");
  const auto alarm = in.values<double>("alarm");
  require(alarm.size() == 1 && std::isfinite(alarm[0]) && alarm[0] >= 0.0, "one number from 0 on as 'alarm'");
  if (fallback_ != nullptr && alarm[0] >= options_.alarm) {
    SectionReader inner = in.within("fallback");
    fallback_->load(sequence, inner, kv);
  }
  alarms_[sequence] = alarm[0];
  lengths_[sequence] = length_of(kv);
  set_index(sequence, std::move(index));
}

}  // namespace

MethodInfo saap_method() {
  return {
      .name = "saap",
      .aliases = {},
      .source = "SAAP: trained partition of the keys, trained choice of buckets (Mazaré et al. 2025)",
      .keys =
          {{"clusters", "buckets of the artefact, to check it: another number is an error", "as trained"},
           {"probes", "buckets that a query attends, 1 to 1048576", "32"},
           {"group", "whether the heads of a group choose together: batched or independent", "batched"},
           {"rank",
            "what buckets are ranked by: root (probability / sqrt(keys)), mass (probability, the paper's) or "
            "key (probability / keys)",
            "root"},
           {"weights", "file that `train saap` made", "MODEL/saap.safetensors"},
           {"network",
            "which of the artefact's networks chooses: auto (the one for the query's position) or 1 to 4",
            "auto"},
           {"alarm",
            "how many times as unevenly as those of the training text keys may fill the buckets before "
            "it is said, 1 to 1000000",
            "3"},
           {"fallback", "method of layers for which the alarm rises: none, full, topk, kmeans, ...", "none"}},
      .dense = {},
      .dense_layers = 1,
      .trained = true,
      .make =
          [](const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint) {
            return std::make_unique<Saap>(spec, geometry, fingerprint);
          },
      .index_bytes =
          [](const Spec&, const LayerGeometry& geometry, std::int64_t tokens) {
            // One row id per key in lists that grow by doubling, so half as much again.
            return geometry.kv_heads * tokens * std::int64_t{sizeof(Position)} * 3 / 2;
          },
      .validate = check_of<Options>};
}

}  // namespace lode
