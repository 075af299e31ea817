// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence.h"

#include <algorithm>

#include "gpu/layers/states_of.h"
#include "lodestone/error.h"
#include "select/of_layers.h"
#include "select/shared/branches.h"

namespace lode {

namespace {

KvShape tail_shape(const Document& document, std::int64_t room) {
  KvShape shape = document.impl().parts().kv.shape();
  shape.max_tokens = std::max<std::int64_t>(1, room);
  if (document.impl().parts().gpu != nullptr) shape.recurrent.clear();  // they lie beside the rows there
  return shape;
}

/// The most tokens of its own up to `own` that a branch can go back to.
std::int64_t reachable(const Sequence& branch, std::int64_t own) {
  if (!branch.on_gpu()) return branch.tail->tokens() < own ? own : branch.tail->reachable(own);
  return branch.gpu_tail != nullptr ? reachable_behind(*branch.gpu_tail, own) : own;
}

}  // namespace

Sequence::Sequence(std::shared_ptr<const Document> document, const Spec& attention, std::int64_t room_)
    : tail(tail_shape(*document, room_)),
      room(room_),
      document_(std::move(document)),
      context_(document_->impl().parts()),
      method_(document_->impl().method_of(attention)),
      begin_(document_->tokens()) {
  if (!on_gpu()) tail->recurrent().branch_from(context_.kv.recurrent());
  ids.reserve(static_cast<std::size_t>(room));  // that a token counts cannot fail
  if (method_ == nullptr) return;
  far_limit = far_limit_of(document_->tokens(), *method_);
  host_chooses_ = on_gpu() && !context_.gpu->chooses(method_->selectors);
  if (on_gpu() && !host_chooses_) return;  // a GPU's selectors know nothing of branches
  for (const Selector* selector : method_->selectors) by_id.push_back(is_per_sequence(selector) ? 1 : 0);
  if (std::find(by_id.begin(), by_id.end(), 1) == by_id.end()) return;
  id = ++this->document().last_branch;
  const std::lock_guard lock(this->document().choosing);
  for (Selector* selector : method_->selectors) branch(selector, id);
}

Sequence::Sequence(Context::Impl& context, MethodId method)
    : room(context.options.max_tokens - context.tokens()), context_(context), begin_(context.tokens()) {
  keep_states(context_.gpu.get(), context_.kv.recurrent());
  if (method == kDense) return;
  const AttachedMethod& attached = context.methods.at(static_cast<std::size_t>(method));
  if (!attached.dense()) method_ = &attached;
}

Sequence::~Sequence() {
  if (id == 0) return;
  const std::lock_guard lock(document().choosing);
  for (Selector* selector : method_->selectors) drop_branch(selector, id);
}

std::int64_t Sequence::joint_tokens() const {
  return method_ == nullptr ? 1 : joint_query_tokens(method_->selectors);
}

MethodId Sequence::method_id() const {
  return method_ == nullptr ? kDense : static_cast<MethodId>(method_ - context_.methods.data());
}

bool Sequence::chooses_by_prompt() const {
  if (method_ == nullptr || context_.share.divided()) return false;
  if (!in_place() && (on_gpu() || document().distributed != nullptr)) return false;
  return lode::chooses_by_prompt(*method_);
}

void Sequence::begin_prompt() {
  std::unique_lock<std::mutex> choosing;
  if (!in_place()) choosing = std::unique_lock(document().choosing);
  for (Selector* const selector : method_->selectors)
    if (Branches* const chooser = prompt_chooser(selector); chooser != nullptr)
      chooser->begin_prompt(id, static_cast<Position>(tokens()));
}

void Sequence::choose_by_prompt() {
  std::unique_lock<std::mutex> choosing;
  if (!in_place()) choosing = std::unique_lock(document().choosing);
  if (in_place()) context_.host_kv();
  for (std::size_t layer = 0; layer < method_->selectors.size(); ++layer) {
    Branches* const chooser = prompt_chooser(method_->selectors[layer]);
    if (chooser == nullptr) continue;
    const auto index = static_cast<int>(layer);
    if (in_place()) {
      chooser->choose_by_prompt(0, context_.kv.layer(index), {});
      continue;
    }
    const std::span<const KvRows> rows = document().rows;
    const auto most = rows.size() / method_->selectors.size();
    KvLayer kv;
    if (!rows.empty())
      kv = {.heads = rows.subspan(layer * most, static_cast<std::size_t>(context_.config.kv_heads_of(index))),
            .tokens = rows.front().rows};
    chooser->choose_by_prompt(id, kv, tail->layer(index));
  }
}

std::vector<std::vector<Selector*>> Sequence::prompt_listeners() const {
  std::vector<std::vector<Selector*>> listeners(method_->selectors.size());
  for (std::size_t layer = 0; layer < listeners.size(); ++layer)
    if (prompt_chooser(method_->selectors[layer]) != nullptr)
      listeners[layer].push_back(method_->selectors[layer]);
  return listeners;
}

void Sequence::roll_back(std::int64_t tokens) {
  if (in_place()) return context_.roll_back(tokens);
  const std::int64_t own = tokens - begin_;
  LODE_ASSERT(own >= 0 && own <= std::ssize(ids));
  if (reachable(*this, own) < own)
    throw RunError(
        "a sequence of a model with recurrent layers cannot go back to tokens whose state is gone");
  tail->roll_back(own);
  ids.resize(static_cast<std::size_t>(own));
  if (id == 0) return;
  const std::lock_guard lock(document().choosing);
  for (std::size_t layer = 0; layer < by_id.size(); ++layer)
    if (by_id[layer] != 0) method_->selectors[layer]->roll_back(id, tokens);
}

std::int64_t Sequence::keep_beginning(std::span<const TokenId> prompt) {
  LODE_ASSERT(!in_place() && !prompt.empty());
  const auto most = std::min(ids.size(), prompt.size() - 1);
  const auto differs =
      std::mismatch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), prompt.begin());
  const std::int64_t same = reachable(*this, differs.first - ids.begin());
  roll_back(begin_ + same);
  return same;
}

namespace {

/// The rows of all layers and heads, and the states of recurrent layers.
void copy_tokens(const KvStore& from, KvStore& to) {
  using Part = KvStore::Part;
  const KvShape& shape = from.shape();
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      for (const Part part : {Part::k, Part::v, Part::k_scale, Part::v_scale}) {
        const bool scale = part == Part::k_scale || part == Part::v_scale;
        if (!shape.holds(layer, head, part == Part::k || part == Part::k_scale) ||
            (scale && shape.type != DType::q8))
          continue;
        std::ranges::copy(from.rows(layer, head, part), to.rows_to_write(layer, head, part, from.tokens()));
      }
    }
    if (from.recurrent().has(layer))
      std::ranges::copy(from.recurrent().before(layer), to.recurrent().after(layer).begin());
  }
  to.commit(from.tokens());
}

}  // namespace

void Sequence::begin_with(const ReadPrompt& read) {
  const Sequence& other = *read.sequence;
  LODE_ASSERT(&context_ == &other.context_ && in_place() == other.in_place() && (in_place() || !on_gpu()));
  if (in_place()) {
    if (tokens() > read.end) roll_back(read.end);
    begin_ = other.begin_;
    return;
  }
  copy_tokens(*other.tail, *tail);
  ids = other.ids;
}

SequenceCache::SequenceCache() : impl_(std::make_unique<Impl>()) {}
SequenceCache::~SequenceCache() = default;
void SequenceCache::clear() {
  const std::lock_guard lock(impl_->mutex);
  impl_->sequence.reset();
}

std::int64_t Sequence::bytes(const Document& document, std::int64_t room) {
  const Context::Impl& context = document.impl().parts();
  const std::int64_t tokens = context.gpu != nullptr ? gpu_tail_tokens(document.tokens(), room) : room;
  std::int64_t states = 0;  // a GPU has two of a sequence
  for (const std::int64_t floats : context.kv.shape().recurrent)
    states += context.gpu != nullptr ? 2 * floats * std::int64_t{sizeof(float)} : 0;
  return tokens * context.kv.shape().token_bytes() + states;
}

}  // namespace lode
