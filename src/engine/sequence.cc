// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence.h"

#include <algorithm>

#include "lodestone/error.h"
#include "select/shared/branches.h"

namespace lode {

namespace {

KvShape tail_shape(const Document& document, std::int64_t room) {
  KvShape shape = document.impl().parts().kv.shape();
  shape.max_tokens = std::max<std::int64_t>(1, room);
  return shape;
}

}  // namespace

Sequence::Sequence(std::shared_ptr<const Document> document, const Spec& attention, std::int64_t room_)
    : tail(tail_shape(*document, room_)),
      room(room_),
      document_(std::move(document)),
      method_(document_->impl().method_of(attention)) {
  tail.recurrent().branch_from(this->document().parts().kv.recurrent());
  if (method_ == nullptr) return;
  far_limit = far_limit_of(document_->tokens(), *method_);
  if (on_gpu()) return;  // its selectors know nothing of branches
  for (const Selector* selector : method_->selectors) by_id.push_back(is_per_sequence(selector) ? 1 : 0);
  if (std::find(by_id.begin(), by_id.end(), 1) == by_id.end()) return;
  id = ++this->document().last_branch;
  const std::lock_guard lock(this->document().choosing);
  for (Selector* selector : method_->selectors) branch(selector, id);
}

Sequence::~Sequence() {
  if (id == 0) return;
  const std::lock_guard lock(document().choosing);
  for (Selector* selector : method_->selectors) drop_branch(selector, id);
}

std::int64_t Sequence::joint_tokens() const {
  if (method_ == nullptr) return 1;
  for (const Selector* selector : method_->selectors)
    if (selector != nullptr) return selector->joint_query_tokens();
  return 1;
}

void Sequence::roll_back(std::int64_t tokens) {
  const std::int64_t own = tokens - document_->tokens();
  LODE_ASSERT(own >= 0 && own <= std::ssize(ids));
  if (tail.reachable(std::min(own, tail.tokens())) < std::min(own, tail.tokens()))
    throw RunError(
        "a sequence of a model with recurrent layers cannot go back to tokens whose state is gone");
  tail.roll_back(std::min(own, tail.tokens()));
  ids.resize(static_cast<std::size_t>(own));
  if (id == 0) return;
  const std::lock_guard lock(document().choosing);
  for (std::size_t layer = 0; layer < by_id.size(); ++layer)
    if (by_id[layer] != 0) method_->selectors[layer]->roll_back(id, tokens);
}

std::int64_t Sequence::bytes(const Document& document, std::int64_t room) {
  return room * document.impl().parts().kv.shape().token_bytes();
}

}  // namespace lode
