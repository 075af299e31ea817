// SPDX-License-Identifier: Apache-2.0
// plan: each KV head by the method that a plan file names for it. Heads of a layer with the same spec share
// one selector, which is told of no other head (LayerGeometry::covered); their choices are put together. A
// load that fails in one part leaves the parts before it loaded.
#include "select/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/text.h"
#include "io/container.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "select/device_keys.h"
#include "select/made_for_length.h"
#include "select/methods.h"
#include "select/shared/branches.h"
#include "select/trained_on.h"

namespace lode {

namespace {

/// The spec of a head with the dense parts of its plan's spec, and with the artefact that lies in that one's folder
/// where the method needs one and the head names none. Files lie where the plan lies, or where those of its spec do.
Spec head_spec(const std::string& text, const Spec& of_plan) {
  namespace fs = std::filesystem;
  std::vector<fs::path> folders = {fs::path(of_plan.file("file").value_or("")).parent_path()};
  folders.insert(folders.end(), of_plan.folders.begin(), of_plan.folders.end());
  Spec spec = parse_spec(text, folders);
  spec.dense = of_plan.dense;
  const MethodInfo& info = find_method(spec.name);
  if (const auto folder = of_plan.file("folder"); folder && info.trained && !spec.text("weights"))
    spec.given.emplace("weights", (fs::path(*folder) / (info.name + ".safetensors")).string());
  return spec;
}

LayerGeometry covering(const LayerGeometry& layer, const std::vector<int>& heads) {
  LayerGeometry part = layer;
  part.kv_heads = static_cast<int>(heads.size());
  part.query_heads = part.kv_heads * layer.group();
  part.covered = heads;
  return part;
}

/// Those heads and their selector.
struct Part : PlanHeads {
  const MethodInfo* info = nullptr;
  std::unique_ptr<Selector> selector;

  /// The layer's keys and values of these heads; `rows` keeps what the view points to.
  KvLayer keys_of(const KvLayer& layer, std::vector<KvRows>& rows) const {
    rows.clear();
    for (const int head : heads) rows.push_back(layer.heads[static_cast<std::size_t>(head)]);
    return {.heads = rows, .tokens = layer.tokens};
  }
};

/// Rows of some heads out of rows of all: all [T, H, d] -> out [T, heads * each, d], for `each` rows a head.
std::vector<float> pick(std::span<const float> all, std::int64_t tokens, const std::vector<int>& heads,
                        std::int64_t each, std::int64_t d) {
  std::vector<float> out;
  if (all.empty() || tokens == 0) return out;
  const std::int64_t width = std::ssize(all) / tokens;
  out.reserve(static_cast<std::size_t>(tokens * std::ssize(heads) * each * d));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (const int head : heads) {
      const float* from = all.data() + t * width + head * each * d;
      out.insert(out.end(), from, from + each * d);
    }
  }
  return out;
}

class PlanSelector final : public Selector,
                           public PlanLayer,
                           public Branches,
                           public BuiltByDevice,
                           public MadeForLength {
 public:
  PlanSelector(const LayerGeometry& geometry, std::vector<PlanHeads> by_spec, const TrainedOn& chosen_on,
               std::string_view fingerprint)
      : geometry_(geometry),
        longest_(chosen_on.longest),
        rope_remark_(chosen_on.rope_remark("a plan", "tune", geometry.rope)) {
    for (PlanHeads& heads : by_spec) {
      const MethodInfo& info = find_method(heads.spec.name);
      const LayerGeometry part = covering(geometry, heads.heads);
      auto selector = info.make ? info.make(heads.spec, part, fingerprint) : make_full_selector(part);
      parts_.push_back({std::move(heads), &info, std::move(selector)});
    }
  }

  const std::vector<lode::Part>& parts() const { return parts_; }
  std::vector<PlanLayer::Part> plan_parts() const override {
    std::vector<PlanLayer::Part> all;
    for (const auto& part : parts_) all.push_back({&part, part.selector.get()});
    return all;
  }

  bool per_sequence() const override {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const auto& p) { return is_per_sequence(p.selector.get()); });
  }
  void branch(std::int32_t id) override {
    branches_.insert(id);
    for (const auto& part : parts_) lode::branch(part.selector.get(), id);
  }
  void drop_branch(std::int32_t id) override {
    branches_.erase(id);
    for (const auto& part : parts_) lode::drop_branch(part.selector.get(), id);
  }
  bool grows_with_window() const override {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const auto& p) { return lode::grows_with_window(p.selector.get()); });
  }

  void build_by(DeviceKeys* device) override {
    for (const auto& part : parts_)
      if (auto* const built = dynamic_cast<BuiltByDevice*>(part.selector.get()); built != nullptr)
        built->build_by(device);
  }
  bool left_to_host() const override {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& p) {
      const auto* const built = dynamic_cast<const BuiltByDevice*>(p.selector.get());
      return built != nullptr && built->left_to_host();
    });
  }

  bool wants_writes() const override {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const auto& p) { return p.selector->wants_writes(); });
  }
  bool wants_mass() const override {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& p) { return p.selector->wants_mass(); });
  }
  /// The whole question when any head wants more than one token: each divides it for itself.
  std::int64_t joint_query_tokens() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto& p) { return p.selector->joint_query_tokens() == 1; })
               ? 1
               : 0;
  }

  void on_write(const KvWrite& write) override {
    for (const auto& part : parts_) {
      if (!part.selector->wants_writes()) continue;
      const auto queries = [&](std::span<const float> all) {
        return pick(all, write.tokens, part.heads, geometry_.group(), geometry_.head_dim);
      };
      const auto keys = [&](std::span<const float> all) {
        return pick(all, write.tokens, part.heads, 1, geometry_.head_dim);
      };
      const auto q_unrotated = queries(write.q_unrotated), q = queries(write.q),
                 k_unrotated = keys(write.k_unrotated), k = keys(write.k), v = keys(write.v);
      part.selector->on_write({.sequence = write.sequence,
                               .phase = write.phase,
                               .begin = write.begin,
                               .tokens = write.tokens,
                               .q_unrotated = q_unrotated,
                               .k_unrotated = k_unrotated,
                               .q = q,
                               .k = k,
                               .v = v});
    }
  }
  void build(std::int32_t sequence, KvLayer kv) override {
    std::vector<KvRows> rows;
    for (const auto& part : parts_) part.selector->build(sequence, part.keys_of(kv, rows));
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    std::vector<KvRows> rows;
    for (const auto& part : parts_) part.selector->append(sequence, part.keys_of(kv, rows), far_end);
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    for (const auto& part : parts_)
      if (!branches_.contains(sequence) || is_per_sequence(part.selector.get()))
        part.selector->roll_back(sequence, tokens);
  }

  void select(std::span<const QueryBlock> blocks, Selection& out) override {
    for (const auto& part : parts_) {
      std::vector<std::vector<float>> vectors;
      std::vector<std::vector<KvRows>> rows(blocks.size());
      std::vector<QueryBlock> own(blocks.begin(), blocks.end());
      vectors.reserve(2 * blocks.size());
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        const auto queries = [&](std::span<const float> all) -> std::span<const float> {
          vectors.push_back(pick(all, blocks[b].tokens, part.heads, geometry_.group(), geometry_.head_dim));
          return vectors.back();
        };
        own[b].q = queries(blocks[b].q);
        own[b].q_unrotated = queries(blocks[b].q_unrotated);
        own[b].kv = part.keys_of(blocks[b].kv, rows[b]);
        if (branches_.contains(own[b].sequence) && !is_per_sequence(part.selector.get())) own[b].sequence = 0;
      }
      chosen_.clear();
      part.selector->select(own, chosen_);
      out.append(chosen_, part.heads);
      const SelectWork work = part.selector->take_work();
      work_.bytes += work.bytes;
      work_.keys_scored += work.keys_scored;
    }
  }
  void observe(const AttentionMass& mass) override {
    for (const auto& part : parts_) {
      const auto at = std::find(part.heads.begin(), part.heads.end(), mass.kv_head);
      if (at == part.heads.end()) continue;
      AttentionMass own = mass;
      own.kv_head = static_cast<std::int32_t>(at - part.heads.begin());
      if (part.selector->wants_mass()) part.selector->observe(own);
    }
  }

  void save(std::int32_t sequence, SectionWriter& out) const override {
    const std::string text = specs();
    out.add("specs", std::as_bytes(std::span(text)));
    const std::array<std::int64_t, 2> dense = dense_parts();
    out.add("dense", std::as_bytes(std::span(dense)));
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      SectionWriter within = out.within(std::to_string(i));
      parts_[i].selector->save(sequence, within);
    }
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    const auto saved = in.values<char>("specs");
    if (const std::string_view found(saved.data(), saved.size()); found != specs()) {
      throw InputError(fmt::format("{}specs: expected the plan's '{}', found '{}'; the plan file has changed",
                                   in.prefix(), specs(), excerpt(found)));
    }
    // Files of earlier versions do not say them.
    if (const auto dense = dense_parts();
        in.has("dense") && !std::ranges::equal(in.values<std::int64_t>("dense"), dense))
      throw InputError(fmt::format(
          "{}dense: expected the plan's sink {} and window {}, found others; the plan file has changed",
          in.prefix(), dense[0], dense[1]));
    std::vector<KvRows> rows;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      SectionReader within = in.within(std::to_string(i));
      parts_[i].selector->load(sequence, within, parts_[i].keys_of(kv, rows));
    }
  }

  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& part : parts_) bytes += part.selector->index_bytes();
    return bytes;
  }
  std::string notice(std::int32_t sequence) const override {
    for (const auto& part : parts_) {
      if (std::string text = part.selector->notice(sequence); !text.empty()) return text;
    }
    return rope_remark_;
  }
  std::string remark_on_length(std::int64_t tokens) const override {
    if (longest_ > 0 && tokens > kBeyondReach * longest_)
      return fmt::format(
          "a context of {} tokens, and a plan that was chosen on texts of {} at most: heads may need other "
          "methods there "
          "(tune --tokens chooses for this length)",
          tokens, longest_);
    for (const auto& part : parts_)
      if (std::string text = lode::remark_on_length(part.selector.get(), tokens); !text.empty()) return text;
    return {};
  }

 private:
  std::array<std::int64_t, 2> dense_parts() const { return {geometry_.dense.sink, geometry_.dense.window}; }
  /// Which heads have which spec, as one line.
  std::string specs() const {
    std::string all;
    for (const auto& part : parts_) all += fmt::format("{} {}\n", part.text, fmt::join(part.heads, ","));
    return all;
  }

  const LayerGeometry geometry_;
  const std::int64_t longest_;     // tokens of the texts that the plan was chosen on; 0 = not said
  const std::string rope_remark_;  // of their RoPE
  std::vector<lode::Part> parts_;
  std::set<std::int32_t> branches_;  // ids
  Selection chosen_;
};

/// What the layers of one spec decide together, spec by spec.
void finish(std::span<Selector* const> layers, std::int32_t sequence,
            const std::function<KvLayer(int layer)>& kv) {
  std::map<std::string, std::vector<const Part*>> by_spec;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (layers[l] == nullptr) continue;
    for (const Part& part : static_cast<const PlanSelector*>(layers[l])->parts()) {
      if (!part.info->finish) continue;
      auto& all = by_spec[part.text];
      all.resize(layers.size(), nullptr);
      all[l] = &part;
    }
  }
  for (const auto& [spec, parts] : by_spec) {
    std::vector<Selector*> selectors;
    std::vector<std::vector<KvRows>> rows(parts.size());
    const MethodInfo* info = nullptr;
    for (const Part* part : parts) {
      selectors.push_back(part == nullptr ? nullptr : part->selector.get());
      if (part != nullptr) info = part->info;
    }
    info->finish(selectors, sequence, [&, &of = parts](int layer) {  // clang 14 captures no part of a pair
      const auto l = static_cast<std::size_t>(layer);
      return of[l]->keys_of(kv(layer), rows[l]);
    });
  }
}

std::filesystem::path file_of(const Spec& spec) {
  const auto file = spec.file("file");
  if (!file)
    throw InputError(fmt::format("attention spec '{}': expected plan:FILE, found no file", spec.str()));
  return *file;
}

std::unique_ptr<Selector> make_plan(const Spec& spec, const LayerGeometry& geometry,
                                    std::string_view fingerprint) {
  const Plan plan = read_plan(file_of(spec));
  const std::string where = file_of(spec).string();
  if (plan.model_fingerprint != fingerprint) {
    throw InputError(fmt::format("{}: expected a plan for the model {}, found one for {}", where, fingerprint,
                                 plan.model_fingerprint));
  }
  if (geometry.layer >= std::ssize(plan.heads) ||
      geometry.kv_heads != std::ssize(plan.heads[static_cast<std::size_t>(geometry.layer)])) {
    throw InputError(fmt::format("{}: expected a layer {} of {} KV heads, found {} layers of {}", where,
                                 geometry.layer, geometry.kv_heads, plan.heads.size(),
                                 plan.heads.front().size()));
  }
  return std::make_unique<PlanSelector>(geometry, heads_by_spec(plan, geometry.layer, spec),
                                        TrainedOn::parse(plan.chosen_on), fingerprint);
}

std::int64_t plan_index_bytes(const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
  const Plan plan = read_plan(file_of(spec));
  const int layer = std::min(geometry.layer, static_cast<int>(plan.heads.size()) - 1);
  std::int64_t bytes = 0;
  for (const PlanHeads& part : heads_by_spec(plan, layer, spec)) {
    const MethodInfo& info = find_method(part.spec.name);
    if (info.index_bytes) bytes += info.index_bytes(part.spec, covering(geometry, part.heads), tokens);
  }
  return bytes;
}

}  // namespace

std::vector<PlanHeads> heads_by_spec(const Plan& plan, int layer, const Spec& of_plan) {
  const std::vector<std::string>& heads = plan.heads[static_cast<std::size_t>(layer)];
  std::map<std::string, std::vector<int>> by_text;
  for (std::size_t h = 0; h < heads.size(); ++h) by_text[heads[h]].push_back(static_cast<int>(h));
  std::vector<PlanHeads> all;
  for (const auto& [text, own] : by_text) all.push_back({text, head_spec(text, of_plan), own});
  return all;
}

MethodInfo plan_method() {
  return {.name = "plan",
          .aliases = {},
          .source = "each KV head by the method that a file of `lodestone tune` names for it",
          .keys = {{"file", "the plan file; plan:FILE means the same", ""},
                   {"folder", "where artefacts of trained methods lie", "where the model lies"}},
          .dense = {},
          .dense_layers = 0,
          .plain_key = "file",
          .make = make_plan,
          .index_bytes = plan_index_bytes,
          .validate = [](const Spec& spec) { read_plan(file_of(spec)); },
          .dense_of = [](const Spec& spec) { return read_plan(file_of(spec)).dense; },
          .finish = finish};
}

}  // namespace lode
