// SPDX-License-Identifier: Apache-2.0
#include "engine/answering.h"

#include <fmt/format.h>

#include <algorithm>

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::int64_t Answering::room_of(const Request& request) {
  const std::int64_t wanted = std::ssize(request.prompt) + request.options.max_new_tokens;
  return std::min(wanted, request.document->max_tokens() - request.document->tokens());
}

Answering::Answering(Request request, std::int64_t chunk)
    : request_(std::move(request)),
      sequence_(request_.document, request_.attention, room_of(request_)),
      sampler_(request_.options.sampling),
      start_(Clock::now()),
      prompted_(start_) {
  if (const auto& tokenizer = request_.document->model()->impl().tokenizer)
    text_.emplace(*tokenizer, request_.options);
  plan(chunk);
  if (request_.want_sources) collect_sources();
}

/// A dense part, then what attends by the method. Where sources are wanted the last token is a piece of its own,
/// so that the costly mass is computed for the answer alone, unless the prompt's tokens choose their keys together.
void Answering::plan(std::int64_t chunk) {
  const std::int64_t length = std::ssize(request_.prompt), asked = request_.options.sparse_prompt_tokens;
  const std::int64_t sparse = asked < 0 ? length : std::min(length, asked), joint = sequence_.joint_tokens();
  add_pieces(0, length - sparse, false, chunk);
  const bool last_alone = request_.want_sources && joint == 1 && sparse > 0;
  const std::int64_t step =
      joint == 0 ? std::max<std::int64_t>(1, sparse) : std::max(joint, chunk / joint * joint);
  add_pieces(length - sparse, length - (last_alone ? 1 : 0), true, step);
  if (last_alone) add_pieces(length - 1, length, true, 1);
  pieces_.back().hooked = request_.want_sources;
}

void Answering::add_pieces(std::int64_t begin, std::int64_t end, bool sparse, std::int64_t chunk) {
  for (; begin < end; begin += chunk)
    pieces_.push_back({.begin = begin, .count = std::min(chunk, end - begin), .sparse = sparse});
}

void Answering::collect_sources() {
  const ModelConfig& config = request_.document->model()->config();
  answer_.sources.mass.assign(static_cast<std::size_t>(request_.document->tokens() + room_of(request_)), 0.0);
  const auto first = static_cast<Position>(request_.document->tokens() + std::ssize(request_.prompt) - 1);
  const auto threshold = static_cast<float>(answer_.sources.sharpness * config.group());
  hooks_.mass = [this, first, threshold](const LayerGeometry&, const AttentionMass& m) {
    if (m.query < first) return;
    for (std::size_t i = 0; i < m.rows.size(); ++i)
      if (m.mass[i] >= threshold) answer_.sources.mass[static_cast<std::size_t>(m.rows[i])] += m.mass[i];
  };
}

BatchRow Answering::next() {
  const ForwardHooks* const hooks = request_.want_sources ? &hooks_ : nullptr;
  if (!prompting()) return {.sequence = &sequence_, .tokens = {&last_, 1}, .hooks = hooks};
  const Piece& piece = pieces_[piece_];
  return {
      .sequence = &sequence_,
      .tokens = std::span(request_.prompt)
                    .subspan(static_cast<std::size_t>(piece.begin), static_cast<std::size_t>(piece.count)),
      .phase = Phase::question,
      .sparse = piece.sparse,
      .rows = piece_ + 1 == pieces_.size() ? LogitRows::last_of_each : LogitRows::none,
      .hooks = piece.hooked ? hooks : nullptr};
}

bool Answering::take(BatchRow& row) {
  if (row.error) std::rethrow_exception(row.error);
  if (!prompting() || pieces_[piece_].sparse) report(row);
  if (prompting()) {
    if (++piece_ < pieces_.size()) return false;
    prompted_ = Clock::now();
    answer_.generation.prompt_seconds = answer_.first_token_seconds = seconds(prompted_ - start_);
  }
  return generate(row.logits);
}

void Answering::report(const BatchRow& row) {
  WorkReport& work = answer_.generation.work;
  work += report_of(row.work, std::ssize(row.tokens));
  const AttachedMethod* const method = sequence_.method();
  if (method == nullptr) return;
  if (work.far_total == 0)
    work.dense_reason = fmt::format("the {} tokens fit into sink + window ({} + {})", sequence_.tokens(),
                                    method->spec.dense.sink, method->spec.dense.window);
}

bool Answering::generate(std::span<float> logits) {
  Generation& g = answer_.generation;
  const GenerateOptions& options = request_.options;
  if (options.max_new_tokens <= 0) return true;
  last_ = next_token(*request_.document->model(), sampler_, logits);
  g.tokens.push_back(last_);
  g.stopped = (options.stop_at_eos && is_eos(request_.document->model()->config(), last_)) ||
              (text_ && text_->push(last_));
  ending_ = g.stopped ? Ending::stop : Ending::length;
  if (g.stopped || std::ssize(g.tokens) == options.max_new_tokens) return true;
  if (sequence_.tokens() < request_.document->max_tokens()) return false;
  ending_ = Ending::room;
  return true;
}

Answer Answering::finish(Ending ending) {
  answer_.ending = ending;
  Generation& g = answer_.generation;
  g.decode_seconds = seconds(Clock::now() - prompted_);
  if (text_) g.text = text_->finish();
  if (sequence_.method() != nullptr) g.work.notice = notice_of(*sequence_.method());
  answer_.sources.mass.resize(request_.want_sources ? static_cast<std::size_t>(sequence_.tokens()) : 0);
  return std::move(answer_);
}

}  // namespace lode
