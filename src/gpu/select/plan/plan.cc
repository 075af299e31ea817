// SPDX-License-Identifier: Apache-2.0
// plan on the GPU: every spec of the plan is a selector of its own, which knows the layers and heads that it
// serves; it chooses for all KV heads of such a layer, and the lists of those it serves are put together.
// `full` has no selector: its lists are every far key. A layer of one spec is attended as that method does.
#include "select/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/select/join_lists.h"

namespace lode {

namespace {

/// One spec, all layers.
struct Member {
  std::string text;  ///< the spec as the plan writes it
  Spec spec;
  std::unique_ptr<GpuSelector> selector;  // null: full
  std::int64_t counts_at = 0;             ///< where its counts begin, counts of a layer
};

/// The heads of a layer that a member serves.
struct Share {
  int member = 0;
  std::vector<int> heads;
};

class GpuPlan final : public GpuSelector {
 public:
  /// `layers[l]` is empty where a layer is dense.
  GpuPlan(const LocalWindow& dense, const GpuGeometry& geometry, std::vector<Member> members,
          std::vector<std::vector<Share>> layers)
      : dense_(dense),
        geometry_(geometry),
        members_(std::move(members)),
        layers_(std::move(layers)),
        capacity_(std::max<std::int64_t>(1, far_keys(dense, geometry.max_tokens - 1))) {
    for (Member& member : members_) {
      member.counts_at = counts_per_layer_;
      if (member.selector != nullptr) counts_per_layer_ += member.selector->counts_per_layer();
    }
    std::vector<std::int32_t> of_head;
    for (const std::vector<Share>& shares : layers_) {
      std::vector<std::int32_t> own(static_cast<std::size_t>(geometry.kv_heads));
      for (std::size_t s = 0; s < shares.size(); ++s)
        for (const int head : shares[s].heads)
          own[static_cast<std::size_t>(head)] = static_cast<std::int32_t>(s);
      of_head.insert(of_head.end(), own.begin(), own.end());
    }
    of_head_ = cuda::Buffer(std::ssize(of_head) * 4, "which method serves a head");
    // Pageable memory: the call returns once the bytes have left.
    cuda::copy(of_head_.as<void>(), of_head.data(), of_head_.bytes(), geometry.stream);
    const std::int64_t lists = std::int64_t{geometry.most_queries} * geometry.kv_heads * lists_per_head();
    rows_ = cuda::Buffer(lists * capacity_ * 4, "the rows of a plan");
    counts_ = cuda::Buffer(lists * 4, "the counts of a plan");
  }

  bool chooses() const override {
    return all_of([](const GpuSelector& member) { return member.chooses(); });
  }
  bool needs_host_index() const override {
    return !all_of([](const GpuSelector& member) { return !member.needs_host_index(); });
  }
  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    for (const Member& member : members_)
      if (member.selector != nullptr) changed_ = member.selector->prepare(keys, stream) || changed_;
    return std::exchange(changed_, false);
  }
  void roll_back(int sequence, std::int64_t tokens) override {
    for (const Member& member : members_)
      if (member.selector != nullptr) member.selector->roll_back(sequence, tokens);
  }
  std::int64_t most_tokens(std::int64_t position, Phase phase) const override {
    std::int64_t most = kMostSparseTokens;
    for (const Member& member : members_)
      if (member.selector != nullptr) most = std::min(most, member.selector->most_tokens(position, phase));
    return most;
  }
  void begin(const GpuStep& step) override {
    for (const Member& member : members_)
      if (member.selector != nullptr) member.selector->begin(step);
  }
  void upload(cuda::StreamHandle stream) override {
    for (const Member& member : members_)
      if (member.selector != nullptr) member.selector->upload(stream);
  }

  cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                        cuda::StreamHandle stream) override {
    if (GpuSelector* const only = only_selector(layer); only != nullptr)
      return only->select(layer, queries, q_unrotated, stream);
    cuda::JoinTask task = {.of_head = of_head_.as<std::int32_t>() + layer * geometry_.kv_heads,
                           .rows = rows_.as<std::int32_t>(),
                           .counts = counts_.as<std::int32_t>(),
                           .capacity = capacity_,
                           .sink = dense_.sink,
                           .window = dense_.window};
    for (std::size_t s = 0; s < shares(layer).size(); ++s) {
      GpuSelector* const selector = member_of(shares(layer)[s]).selector.get();
      if (selector == nullptr) {
        task.source[s].from = dense_.sink;
        continue;
      }
      const cuda::RowLists lists = selector->select(layer, queries, q_unrotated, stream);
      task.source[s] = {.rows = lists.rows,
                        .counts = lists.counts,
                        .capacity = lists.capacity,
                        .lists_per_head = lists.lists_per_head};
      task.lists_per_head = std::max(task.lists_per_head, lists.lists_per_head);
    }
    cuda::join_lists(queries, task, stream);
    return task.lists();
  }
  bool attend(int layer, const cuda::Queries& queries, const float* q_unrotated, void* workspace,
              cuda::StreamHandle stream) override {
    if (shares(layer).size() > 1) return false;
    if (GpuSelector* const only = only_selector(layer); only != nullptr)
      return only->attend(layer, queries, q_unrotated, workspace, stream);
    attend_full_decode(queries, geometry_.max_tokens, workspace, stream);
    return true;
  }

  int lists_per_head() const override {
    int most = 1;
    for (const Member& member : members_)
      if (member.selector != nullptr) most = std::max(most, member.selector->lists_per_head());
    return most;
  }
  /// Member by member: [layers, its counts_per_layer()].
  std::int64_t counts_per_layer() const override { return counts_per_layer_; }
  void copy_counts(std::int32_t* to, int layers, cuda::StreamHandle stream) const override {
    for (const Member& member : members_)
      if (member.selector != nullptr)
        member.selector->copy_counts(to + member.counts_at * layers, layers, stream);
  }
  std::int64_t listed(const CountedToken& of, int head) const override {
    const Member& member =
        member_of(*std::find_if(shares(of.layer).begin(), shares(of.layer).end(), [head](const Share& share) {
          return std::find(share.heads.begin(), share.heads.end(), head) != share.heads.end();
        }));
    return member.selector == nullptr ? far_keys(dense_, of.position)
                                      : member.selector->listed(counted(of, member), head);
  }
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    std::int64_t bytes = 0;
    for (const Share& share : shares(of.layer)) {
      const Member& member = member_of(share);
      if (member.selector == nullptr) continue;
      std::vector<int> own;
      std::set_intersection(share.heads.begin(), share.heads.end(), heads.begin(), heads.end(),
                            std::back_inserter(own));
      const CountedToken counts = counted(of, member);
      std::int64_t chosen = 0;
      for (const int head : own) chosen += member.selector->listed(counts, head);
      bytes += member.selector->select_bytes(counts, own, chosen);
    }
    return bytes;
  }
  std::int64_t bytes() const override {
    std::int64_t bytes = of_head_.bytes() + rows_.bytes() + counts_.bytes();
    for (const Member& member : members_)
      if (member.selector != nullptr) bytes += member.selector->bytes();
    return bytes;
  }

 private:
  const std::int32_t* counts() const override { return nullptr; }
  template <class Test>
  bool all_of(const Test& test) const {
    return std::all_of(members_.begin(), members_.end(), [&](const Member& member) {
      return member.selector == nullptr || test(*member.selector);
    });
  }
  const std::vector<Share>& shares(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  const Member& member_of(const Share& share) const {
    return members_[static_cast<std::size_t>(share.member)];
  }
  /// Of a layer that it serves alone; null for full.
  GpuSelector* only_selector(int layer) const {
    return shares(layer).size() == 1 ? member_of(shares(layer).front()).selector.get() : nullptr;
  }
  CountedToken counted(CountedToken of, const Member& member) const {
    of.counts += member.counts_at * geometry_.layers;
    return of;
  }

  LocalWindow dense_;
  GpuGeometry geometry_;
  std::vector<Member> members_;
  std::vector<std::vector<Share>> layers_;  // [L]
  std::int64_t capacity_ = 1, counts_per_layer_ = 0;
  bool changed_ = false;  ///< a member, and no prepare has told of it yet: the next member failed
  cuda::Buffer of_head_;  // [L, Hkv]
  cuda::Buffer rows_;     // [most_queries, Hkv, lists_per_head, capacity]
  cuda::Buffer counts_;   // [most_queries, Hkv, lists_per_head]
};

/// A plan by member, as it is being put together.
struct Draft {
  std::vector<Member> members;
  std::vector<std::vector<Share>> layers;

  /// The member's number.
  int add(int layer, const PlanHeads& heads) {
    const auto found = std::find_if(members.begin(), members.end(),
                                    [&](const Member& member) { return member.text == heads.text; });
    const int member = static_cast<int>(found - members.begin());
    if (found == members.end()) members.push_back({heads.text, heads.spec, {}});
    layers[static_cast<std::size_t>(layer)].push_back({member, heads.heads});
    return member;
  }
};

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_plan(const Spec& spec, const GpuGeometry& geometry,
                                           std::span<Selector* const> selectors) {
  const auto layers = static_cast<std::size_t>(geometry.layers);
  Draft draft = {.members = {}, .layers = std::vector<std::vector<Share>>(layers)};
  std::map<int, std::vector<Selector*>> parts;  // by member: [L]
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto* const plan = dynamic_cast<const PlanLayer*>(selectors[layer]);
    if (plan == nullptr) continue;
    for (const PlanLayer::Part& part : plan->plan_parts()) {
      std::vector<Selector*>& own = parts[draft.add(static_cast<int>(layer), *part.heads)];
      own.resize(layers);
      own[layer] = part.selector;
    }
    if (draft.layers[layer].size() > cuda::JoinTask::kMost) return nullptr;
  }
  for (std::size_t m = 0; m < draft.members.size(); ++m) {
    Member& member = draft.members[m];
    if (member.spec.name == "full") continue;
    GpuGeometry own = geometry;
    own.covered.resize(layers);
    for (std::size_t layer = 0; layer < layers; ++layer)
      for (const Share& share : draft.layers[layer])
        if (share.member == static_cast<int>(m)) own.covered[layer] = share.heads;
    member.selector = make_gpu_selector(member.spec, own, parts[static_cast<int>(m)]);
    if (member.selector == nullptr) return nullptr;
  }
  return std::make_unique<GpuPlan>(spec.dense, geometry, std::move(draft.members), std::move(draft.layers));
}

std::unique_ptr<GpuSelector> make_gpu_plan_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                     std::uint64_t seed, double largest) {
  const std::string file = spec.file("file").value_or("");
  const Plan plan = read_plan(file);
  if (std::ssize(plan.heads.front()) != geometry.kv_heads) {
    throw InputError(fmt::format("{}: expected a plan for layers of {} KV heads, found {}", file,
                                 geometry.kv_heads, plan.heads.front().size()));
  }
  Draft draft = {.members = {}, .layers = {}};
  for (int layer = 0; layer < geometry.layers; ++layer) {
    draft.layers.emplace_back();
    const int of_plan = layer % static_cast<int>(plan.heads.size());
    for (const PlanHeads& heads : heads_by_spec(plan, of_plan, spec)) draft.add(layer, heads);
    if (draft.layers.back().size() > cuda::JoinTask::kMost) return nullptr;
  }
  for (Member& member : draft.members) {
    if (member.spec.name == "full") continue;
    member.selector = make_gpu_selector_for_bench(member.spec, geometry, seed, largest);
    if (member.selector == nullptr) return nullptr;
  }
  return std::make_unique<GpuPlan>(spec.dense, geometry, std::move(draft.members), std::move(draft.layers));
}

}  // namespace lode
