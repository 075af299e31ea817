// SPDX-License-Identifier: Apache-2.0
#include "engine/running_answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/row_order.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::int64_t RunningAnswer::room_of(const Request& request) {
  const std::int64_t room = request.document->max_tokens() - request.document->tokens(),
                     wanted = std::ssize(request.prompt) + request.options.max_new_tokens;
  return request.cache != nullptr ? room : std::min(wanted, room);
}

namespace {

/// The one that an earlier request left, or a new one.
std::unique_ptr<Sequence> sequence_for(const Request& request) {
  if (request.cache != nullptr) {
    SequenceCache::Impl& cache = request.cache->impl();
    const std::lock_guard lock(cache.mutex);
    std::unique_ptr<Sequence> kept = std::move(cache.sequence);
    const Document::Impl& document = request.document->impl();
    if (kept != nullptr && &kept->document() == &document &&
        kept->method() == document.method_of(request.attention))
      return kept;
  }
  return std::make_unique<Sequence>(request.document, request.attention, RunningAnswer::room_of(request));
}

/// In place a prompt may be what is new of it alone: the tokens between the document and that.
std::span<const TokenId> asked_before(const Sequence& sequence) {
  if (!sequence.in_place()) return {};
  const Context::Impl& context = sequence.context();
  return std::span(context.ids)
      .subspan(static_cast<std::size_t>(std::min(context.indexed, context.tokens())));
}

}  // namespace

RunningAnswer::RunningAnswer(Request request, std::unique_ptr<Sequence> sequence, std::int64_t chunk)
    : request_(std::move(request)),
      sequence_(std::move(sequence)),
      sampler_(request_.options.sampling),
      on_host_(sequence_->context().on_host.size()),
      start_(Clock::now()),
      prompted_(start_) {
  if (const auto& tokenizer = model().impl().tokenizer)
    text_.emplace(*tokenizer, request_.options,
                  Thoughts(*tokenizer, asked_before(*sequence_), request_.prompt));
  // States of recurrent layers cannot be cut back to the tokens that are accepted.
  drafting_helps_ = sequence_->context().kv.recurrent().empty();
  if (request_.audit > 0) start_audit();
  if (request_.want_sources) collect_sources();
  rereads_ = request_.want_sources && sequence_->context().rereads_for_sources();
  told_ = request_.options.sparse_prompt_tokens >= 0 && !exact() && sequence_->chooses_by_prompt();
  // Who chooses by a prompt hears it, and so reads it again. In place it would come to stand behind itself.
  LODE_ASSERT(!told_ || request_.read == nullptr || !sequence_->in_place());
  request_.read != nullptr && !told_ ? begin() : plan(chunk);
}

RunningAnswer::RunningAnswer(Request request, std::int64_t chunk)
    : RunningAnswer(request, sequence_for(request), chunk) {}

RunningAnswer::RunningAnswer(Request request, Context::Impl& context, MethodId method)
    : RunningAnswer(std::move(request), std::make_unique<Sequence>(context, method),
                    context.question_chunk()) {}

RunningAnswer::~RunningAnswer() {
  if (request_.cache == nullptr || sequence_ == nullptr) return;
  SequenceCache::Impl& cache = request_.cache->impl();
  const std::lock_guard lock(cache.mutex);
  cache.sequence = std::move(sequence_);
}

/// The first token of the answer to a prompt that was read before.
void RunningAnswer::begin() {
  LODE_ASSERT(exact() || request_.options.sparse_prompt_tokens == 0);
  sequence_->begin_with(*request_.read);
  answer_.generation.prompt_seconds = request_.read->seconds;
  std::vector<float> logits = request_.read->logits;
  complete_ = request_.options.max_new_tokens <= 0 || (take_next(logits) && !start_rereading());
  if (exact()) start_draft();
}

/// A sequence of a context alone is compared by the hook of one that has no document.
void RunningAnswer::start_audit() {
  const Context::Impl& context = sequence_->context();
  audit_.emplace(request_.audit, context.options.seed, context.config.layers);
  audit_->set_limit(request_.audit_limit);
  audit_hooks_ = audit_->hooks(nullptr, audited_);
  if (sequence_->in_place()) {
    hooks_.attended = audit_hooks_.attended;
    return;
  }
  audit_hooks_.attended = nullptr;
  hooks_.samples = audit_hooks_.samples;
  hooks_.compare = audit_hooks_.compare;
}

const ForwardHooks* RunningAnswer::hooks(bool sources) const {
  return sources && request_.want_sources && !rereads_ ? &hooks_ : audit_ ? &audit_hooks_ : nullptr;
}

/// A dense part, then what attends by the method. Where sources are wanted the last token is a piece of its own,
/// so that the costly mass is computed for the answer alone, unless the prompt's tokens choose their keys together.
/// An exact answer's prompt is cut as that of `full`, and all of it is dense. What the sequence holds of the prompt is
/// not read again.
void RunningAnswer::plan(std::int64_t chunk) {
  const std::int64_t held = request_.cache != nullptr ? sequence_->keep_beginning(request_.prompt) : 0;
  if (held > 0) sequence_->tail->recurrent().keep();
  if (told_) sequence_->begin_prompt();
  const std::int64_t length = std::ssize(request_.prompt), asked = request_.options.sparse_prompt_tokens,
                     sparse = std::min(length - held, asked < 0 ? length : std::min(length, asked)),
                     joint = exact() ? 1 : sequence_->joint_tokens();
  add_pieces(held, length - sparse, false, chunk);
  const bool hooked = request_.want_sources && !rereads_, last_alone = hooked && joint == 1 && sparse > 0;
  const std::int64_t step = joint == 0 ? kMostTogether : std::max(joint, chunk / joint * joint);
  add_pieces(length - sparse, length - (last_alone ? 1 : 0), !exact(), step);
  if (last_alone) add_pieces(length - 1, length, !exact(), 1);
  pieces_.back().hooked = hooked;
}

void RunningAnswer::add_pieces(std::int64_t begin, std::int64_t end, bool sparse, std::int64_t chunk) {
  for (; begin < end; begin += chunk)
    pieces_.push_back({.begin = begin, .count = std::min(chunk, end - begin), .sparse = sparse});
}

void RunningAnswer::collect_sources() {
  const ModelConfig& config = model().config();
  const std::int64_t most_tokens = std::ssize(request_.prompt) + request_.options.max_new_tokens;
  attended_ = AnswerMass(static_cast<std::size_t>(std::min(max_tokens(), sequence_->begin() + most_tokens)));
  const auto first = static_cast<Position>(sequence_->begin() + std::ssize(request_.prompt) - 1);
  answer_.sources.sharpness = request_.sharpness;
  hooks_.least_mass = static_cast<float>(request_.sharpness);
  const int most = config.most_kv_heads();
  std::vector<RowOrder> orders(static_cast<std::size_t>(config.layers * most));  // [L, most_kv_heads]
  for (int layer = 0; layer < config.layers; ++layer)
    for (int head = 0; head < config.kv_heads_of(layer); ++head)
      orders[static_cast<std::size_t>(layer * most + head)] = row_order(sequence_->context(), layer, head);
  hooks_.mass = [this, first, most, orders = std::move(orders)](const LayerGeometry& geometry,
                                                                const AttentionMass& m) {
    if (m.query < first) return;
    const auto threshold = static_cast<float>(answer_.sources.sharpness * geometry.group());
    const RowOrder& order = orders[static_cast<std::size_t>(geometry.layer * most + m.kv_head)];
    for (std::size_t i = 0; i < m.rows.size(); ++i)
      if (m.mass[i] >= threshold) seen_.push_back({m.query, order.token_of(m.rows[i]), m.mass[i]});
  };
}

/// What the queries attended to that gave the answer's tokens so far counts as its sources. What thoughts attended to
/// counts where no answer has come.
void RunningAnswer::count_sources() {
  const auto first = static_cast<Position>(held() - generated()), end = static_cast<Position>(held());
  std::stable_sort(seen_.begin(), seen_.end(),
                   [](const Seen& a, const Seen& b) { return a.query < b.query; });
  for (const Seen& seen : seen_)
    if (seen.query < end && seen.query - first >= answer_from_)
      attended_.add(static_cast<std::size_t>(seen.query - first), static_cast<std::size_t>(seen.row),
                    seen.mass);
  seen_.clear();
}

std::int64_t RunningAnswer::held() const {
  return sequence_->begin() + std::ssize(request_.prompt) + generated() - 1;
}

BatchRow RunningAnswer::next() {
  Audit* const audit = audit_ ? &*audit_ : nullptr;
  if (rereading_) return reread();
  if (!prompting() && exact()) return next_exact();
  if (!prompting())
    return {.sequence = sequence_.get(),
            .tokens = {&last_, 1},
            .rows = LogitRows::all,
            .hooks = hooks(true),
            .audit = audit,
            .again = forget_seen(),
            .largest = wants_largest()};
  const Piece& piece = pieces_[piece_];
  return {
      .sequence = sequence_.get(),
      .tokens = std::span(request_.prompt)
                    .subspan(static_cast<std::size_t>(piece.begin), static_cast<std::size_t>(piece.count)),
      .phase = Phase::question,
      .sparse = piece.sparse,
      .rows = piece_ + 1 == pieces_.size() ? LogitRows::last_of_each : LogitRows::none,
      .hooks = hooks(piece.hooked),
      .audit = audit,
      .again = forget_seen(),
      .told = told_};
}

/// What a step that failed midway has shown of sources will be shown again.
std::function<void()> RunningAnswer::forget_seen() {
  if (!request_.want_sources) return {};
  return [this] { seen_.clear(); };
}

/// Whether the next token is the one of the largest logit of all.
bool RunningAnswer::wants_largest() const {
  const Model& model = this->model();
  const auto& tokenizer = model.impl().tokenizer;
  return !request_.filter && request_.options.sampling.temperature == 0 &&
         (!tokenizer || (tokenizer->vocab() == model.config().vocab && tokenizer->gaps().empty()));
}

/// The next token of the draft, or the dense step over the token that was generated last and all of the draft.
BatchRow RunningAnswer::next_exact() {
  if (!draft_.complete())
    return {.sequence = sequence_.get(),
            .tokens = {draft_.tokens.empty() ? &last_ : &draft_.tokens.back(), 1},
            .rows = LogitRows::all};
  sequence_->roll_back(held());
  to_verify_.assign(1, last_);
  to_verify_.insert(to_verify_.end(), draft_.tokens.begin(), draft_.tokens.end());
  return {.sequence = sequence_.get(),
          .tokens = to_verify_,
          .sparse = false,
          .rows = LogitRows::all,
          .hooks = request_.want_sources && !rereads_ ? &hooks_ : nullptr,
          .again = forget_seen()};
}

/// True when the answer, which is complete, is to be read once more.
bool RunningAnswer::start_rereading() {
  rereading_ = rereads_ && generated() > 0;
  if (!rereading_) return false;
  reread_ = {request_.prompt.back()};
  reread_.insert(reread_.end(), answer_.generation.tokens.begin(), answer_.generation.tokens.end() - 1);
  return true;
}

BatchRow RunningAnswer::reread() {
  sequence_->roll_back(sequence_->begin() + std::ssize(request_.prompt) - 1);
  return {.sequence = sequence_.get(),
          .tokens = reread_,
          .phase = Phase::question,
          .sparse = false,
          .rows = LogitRows::none,
          .hooks = &hooks_,
          .again = forget_seen()};
}

/// The answer, which is complete, goes without its sources.
void RunningAnswer::leave_sources(const std::exception_ptr& error) {
  seen_.clear();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    sources_failed_ = fmt::format("the answer's sources could not be found: {}", e.what());
  }
}

bool RunningAnswer::take(BatchRow& row) {
  if (rereading_ && row.error) return leave_sources(row.error), true;
  if (row.error) std::rethrow_exception(row.error);
  if (!rereading_) return take_step(row) && !start_rereading();
  count_sources();
  return true;
}

bool RunningAnswer::take_step(BatchRow& row) {
  if (!prompting() && exact()) return take_exact(row);
  if (!prompting() || pieces_[piece_].sparse || exact()) report(row);
  if (prompting()) {
    if (++piece_ < pieces_.size()) return false;
    if (told_) sequence_->choose_by_prompt();
    prompted_ = Clock::now();
    answer_.generation.prompt_seconds = answer_.first_token_seconds = seconds(prompted_ - start_);
  }
  if (request_.options.max_new_tokens <= 0) {
    logits_.assign(row.logits.begin(), row.logits.end());
    return true;
  }
  const TokenId closes = forced();
  const bool done = closes >= 0 ? add(closes) : row.token >= 0 ? add(row.token) : take_next(row.logits);
  count_sources();
  if (exact()) start_draft();
  return done;
}

/// The token that comes whatever the logits say, since thoughts have had their tokens; -1: none does.
TokenId RunningAnswer::forced() {
  const std::int64_t most = request_.options.max_thought_tokens;
  if (most < 0 || !text_) return -1;
  if (closing_.empty() && thought_tokens_ >= most) {
    closing_ = text_->thoughts().closing();
    std::reverse(closing_.begin(), closing_.end());
  }
  if (closing_.empty()) return -1;
  const TokenId token = closing_.back();
  closing_.pop_back();
  return token;
}

/// The token that the logits [V] say; true when it is the last.
bool RunningAnswer::take_next(std::span<float> logits) {
  return !filtered(logits, {}) || add(next_token(model(), sampler_, logits));
}

void RunningAnswer::report(const BatchRow& row) {
  WorkReport& work = answer_.generation.work;
  work += report_of(row.work, std::ssize(row.tokens));
  work.tiers += row.tiers;
  const AttachedMethod* const method = sequence_->method();
  if (method == nullptr || exact()) return;
  if (work.far_total == 0 && (!audit_ || audit_->fallen_back().empty()))
    work.dense_reason = fmt::format("the {} tokens fit into sink + window ({} + {})", sequence_->tokens(),
                                    method->spec.dense.sink, method->spec.dense.window);
}

/// Leaves the logits [V] of tokens that may follow the answer and a draft behind it; false: nothing may. Thoughts may be
/// anything, and they may come before the answer has begun.
bool RunningAnswer::filtered(std::span<float> logits, std::span<const TokenId> draft) {
  if (!request_.filter) return true;
  std::vector<TokenId> said = said_;
  TokenId opening = -1;
  if (text_) {
    Thoughts thoughts = text_->thoughts();
    for (const TokenId token : draft)
      if (thoughts.push(token) == Thoughts::Part::answer) said.push_back(token);
    if (!thoughts.answering()) return true;
    if (said.empty()) opening = thoughts.opening();
  } else {
    said.insert(said.end(), draft.begin(), draft.end());
  }
  float* const may_open = opening >= 0 ? &logits[static_cast<std::size_t>(opening)] : nullptr;
  const float before = may_open != nullptr ? *may_open : 0;
  const bool more = request_.filter->apply(said, logits);
  if (may_open != nullptr) *may_open = before;
  if (!more && draft.empty()) {
    answer_.generation.stopped = true;
    ending_ = Ending::stop;
  }
  return more;
}

/// A token of the answer; true when it is the last.
bool RunningAnswer::add(TokenId token) {
  Generation& g = answer_.generation;
  const GenerateOptions& options = request_.options;
  last_ = token;
  g.tokens.push_back(last_);
  g.stopped = (options.stop_at_eos && is_eos(sequence_->context().config, last_)) || add_text(token);
  ending_ = g.stopped ? Ending::stop : Ending::length;
  if (request_.want_sources) attended_.follow(text_ ? text_->text() : std::string_view());
  if (g.stopped || std::ssize(g.tokens) == options.max_new_tokens) return true;
  if (held() < max_tokens()) return false;
  ending_ = Ending::room;
  return true;
}

/// True when a stop string ends the answer. Blanks in front of thoughts count as theirs.
bool RunningAnswer::add_text(TokenId token) {
  Generation& g = answer_.generation;
  const bool thinking = text_ && !text_->answers();
  const bool stopped = text_ && text_->push(token);
  const bool answers = !text_ || text_->answers();
  if (text_ && text_->thinks()) ++thought_tokens_;
  if (!answers && text_->text().empty()) {
    g.thought_tokens = std::ssize(g.tokens);
    said_.clear();
  } else if (!answers) {
    ++g.thought_tokens;
  }
  if (answers && request_.filter) said_.push_back(token);
  if (answers && thinking) {  // it begins
    answer_from_ = std::ssize(g.tokens) - 1;
    attended_.restart();
  }
  return stopped;
}

/// No more tokens than the answer may have, and none where the method attends to everything.
void RunningAnswer::start_draft() {
  const std::int64_t left =
      std::min(request_.options.max_new_tokens - generated(), max_tokens() - held()) - 1;
  draft_.restart(drafting_helps_ ? std::clamp<std::int64_t>(left, 0, draft_length_.next()) : 0);
}

bool RunningAnswer::take_exact(BatchRow& row) {
  if (!draft_.complete()) {
    take_drafted(row);
    return false;
  }
  ExactWork& work = answer_.exact;
  answer_.generation.work += report_of(row.work, std::ssize(row.tokens));
  ++work.dense_steps;
  const std::int64_t before = work.accepted, drafted = std::ssize(draft_.tokens);
  const bool done = verify(row.logits);
  work.drafted += drafted;
  count_sources();
  sequence_->roll_back(held());
  if (drafted > 0) draft_length_.learn(work.accepted - before, drafted);
  if (!done) start_draft();
  return done;
}

/// The draft ends early where the answer would.
void RunningAnswer::take_drafted(BatchRow& row) {
  answer_.exact.drafts += report_of(row.work, 1);
  const Model& model = this->model();
  drafting_helps_ = answer_.exact.drafts.far_total > 0;
  if (!filtered(row.logits, draft_.tokens)) {
    draft_.wanted = std::ssize(draft_.tokens);
    return;
  }
  draft_.drawn_from.push_back(sampler_.probabilities(token_logits(model, row.logits)));
  draft_.tokens.push_back(sampler_.draw(draft_.drawn_from.back()));
  if (!drafting_helps_ || (request_.options.stop_at_eos && is_eos(model.config(), draft_.tokens.back())))
    draft_.wanted = std::ssize(draft_.tokens);
}

/// Adds what the dense step's logits [1 + draft, V] accept of the draft, and the token that follows; true when the
/// answer is complete.
bool RunningAnswer::verify(std::span<float> logits) {
  const Model& model = this->model();
  const std::size_t drafted = draft_.tokens.size(), vocab = logits.size() / (drafted + 1);
  for (std::size_t i = 0; i <= drafted; ++i) {
    const std::span<float> row = logits.subspan(i * vocab, vocab);
    const TokenId closes = forced();
    if (closes < 0 && !filtered(row, {})) return true;
    const auto wanted = sampler_.probabilities(token_logits(model, row));
    const TokenId token = closes >= 0    ? closes
                          : i == drafted ? sampler_.draw(wanted)
                                         : sampler_.correct(draft_.tokens[i], draft_.drawn_from[i], wanted);
    const bool accepted = i < drafted && token == draft_.tokens[i];
    if (accepted) ++answer_.exact.accepted;
    if (add(token)) return true;
    if (!accepted) break;
  }
  return false;
}

Answer RunningAnswer::finish(Ending ending) {
  answer_.ending = ending;
  answer_.attention = request_.attention.str();
  Generation& g = answer_.generation;
  g.decode_seconds = seconds(Clock::now() - prompted_);
  if (text_) {
    g.text = text_->finish();
    g.thoughts = text_->finish_thoughts();
    if (g.stopped) g.stop = text_->stop();
  }
  if (sequence_->method() != nullptr) g.work.notice = notice_of(*sequence_->method(), sequence_->tokens());
  if (audit_) {
    g.work += audited_;
    answer_.full_layers = audit_->fallen_back();
    if (!answer_.full_layers.empty()) g.work.notice = audit_->notice();
  }
  if (const std::string remark = remark_on_host(); !remark.empty())
    g.work.notice += (g.work.notice.empty() ? "" : "; ") + remark;
  if (!sources_failed_.empty()) g.work.notice += (g.work.notice.empty() ? "" : "; ") + sources_failed_;
  const std::int64_t tokens = generated() > 0 ? held() : sequence_->tokens();
  answer_.sources.mass = attended_.finish();
  answer_.sources.mass.resize(request_.want_sources ? static_cast<std::size_t>(tokens) : 0);
  return std::move(answer_);
}

/// What the host did in a GPU's place. In place the context has written down what was new.
std::string RunningAnswer::remark_on_host() const {
  if (sequence_->in_place()) return sequence_->context().remark_on_host(on_host_);
  if (!sequence_->host_chooses()) return {};
  const std::string choice = choice_on_host(sequence_->method()->spec);
  return lode::remark_on_host({&choice, 1});
}

ReadPrompt RunningAnswer::release() {
  const std::int64_t end = sequence_->tokens();
  return {.sequence = std::move(sequence_),
          .end = end,
          .logits = std::move(logits_),
          .seconds = answer_.generation.prompt_seconds};
}

}  // namespace lode
