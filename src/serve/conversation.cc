// SPDX-License-Identifier: Apache-2.0
#include "serve/conversation.h"

#include <fmt/format.h>

namespace lode::serve {

namespace {

/// Whether a document that was recognised cannot be asked: damaged, deleted meanwhile, or too large for the memory.
bool is_of_no_use(const ApiError& error) {
  return error.code == "context_failed" || error.code == "context_not_found" || error.code == "no_room";
}

/// The model that will answer, unless the question is refused.
std::string model_of(Backend& backend, const Question& question) {
  if (!question.model.empty()) return question.model;
  try {
    if (!question.context.empty()) return backend.context(question.context).model;
    const std::vector<ServedModel> models = backend.models();
    return models.empty() ? std::string() : models.front().id;
  } catch (const ApiError&) {  // no such context: who asks is told so
    return {};
  }
}

/// Lives until its last answer has ended.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(Backend& backend, Metrics& metrics, const Call& call, Conversation conversation,
           std::unique_ptr<Voice> voice)
      : backend_(backend),
        metrics_(metrics),
        call_(call),
        conversation_(std::move(conversation)),
        voice_(std::move(voice)) {}

  void start() {
    as_it_came_ = conversation_.question;
    reuse_ = find_document(backend_, conversation_.question);
    model_ = model_of(backend_, conversation_.question);
    answers_.resize(static_cast<std::size_t>(conversation_.choices));
    left_ = answers_.size();
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      try {
        ask(i);
      } catch (const ApiError& error) {
        if (asks_as_it_came(i, error)) continue;
        cancel();
        const std::lock_guard lock(mutex_);
        if (std::exchange(over_, true)) return;
        throw;
      }
    }
    call_.reply->on_gone([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->cancel();
    });
  }

 private:
  /// Where a document was recognised that turns out to be of no use, the request is read anew: nobody asked for the
  /// stored one by name.
  bool asks_as_it_came(std::size_t choice, const ApiError& error) {
    if (!is_of_no_use(error) || !as_it_came_.context.empty()) return false;
    const std::string model = model_of(backend_, as_it_came_);
    {
      const std::lock_guard lock(mutex_);
      if (over_ || open_ || cancelled_) return false;
      conversation_.question = as_it_came_;
      model_ = model;
      reuse_ = {.how = "none", .why = error.what()};
    }
    ask(choice);
    return true;
  }

  Question question() {
    const std::lock_guard lock(mutex_);
    return conversation_.question;
  }

  void ask(std::size_t choice) {
    Question question = this->question();
    question.sampling.seed += choice;
    const std::uint64_t id = backend_.ask(std::move(question), listener(choice));
    {
      const std::lock_guard lock(mutex_);
      ids_.push_back(id);
      if (!cancelled_) return;
    }
    backend_.cancel(id);  // its client has gone while it was asked
  }

  Listener listener(std::size_t choice) {
    return {.on_text = [self = shared_from_this(),
                        choice](std::string_view text) { self->on_text(choice, text, false); },
            .on_answer = [self = shared_from_this(), choice](const Answer& a) { self->on_answer(choice, a); },
            .on_failure = [self = shared_from_this(),
                           choice](const ApiError& error) { self->on_failure(choice, error); },
            .on_thought = [self = shared_from_this(),
                           choice](std::string_view text) { self->on_text(choice, text, true); },
            .on_prompt = [self = shared_from_this()](const Answer& known) { self->on_prompt(known); }};
  }

  /// The head waits for the first event: until then a refusal still has a status of its own.
  void open_stream() {
    if (std::exchange(open_, true)) return;
    HttpResponse head;
    head.content_type = "text/event-stream; charset=utf-8";
    head.headers = {{"Cache-Control", "no-store"}};
    call_.reply->begin(std::move(head));
    if (known_.model.empty()) known_.model = model_;
    call_.reply->write(voice_->opening(known_));
  }

  void on_prompt(const Answer& known) {
    const std::lock_guard lock(mutex_);
    known_ = known;
  }

  void on_text(std::size_t choice, std::string_view text, bool thought) {
    const std::lock_guard lock(mutex_);
    if (over_ || !conversation_.stream) return;
    open_stream();
    call_.reply->write(thought ? voice_->thought(choice, text) : voice_->piece(choice, text));
  }

  void on_answer(std::size_t choice, const Answer& answer) {
    metrics_.add_answer(answer);
    const std::lock_guard lock(mutex_);
    if (over_) return;
    answers_[choice] = answer;
    if (conversation_.stream) {
      open_stream();
      call_.reply->write(voice_->end_of(choice, answer, reuse_));
    }
    if (--left_ > 0) return;
    over_ = true;
    if (!conversation_.stream) return call_.reply->send(json_response(dump(voice_->whole(answers_, reuse_))));
    call_.reply->write(voice_->closing(answers_));
    call_.reply->finish();
  }

  void on_failure(std::size_t choice, const ApiError& error) {
    try {
      if (!asks_as_it_came(choice, error)) fail(error);
    } catch (const ApiError& again) {
      fail(again);
    } catch (const std::exception& again) {
      fail(ApiError(500, again.what()));
    }
  }

  void fail(const ApiError& error) {
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(over_, true)) return;
      if (open_) {
        call_.reply->write(voice_->failure(error));
        call_.reply->finish();
      } else {
        call_.reply->send(error_response(call_.request->path, error));
      }
    }
    cancel();
  }

  void cancel() {
    std::vector<std::uint64_t> ids;
    {
      const std::lock_guard lock(mutex_);
      cancelled_ = true;
      ids = ids_;
    }
    for (const std::uint64_t id : ids) backend_.cancel(id);
  }

  Backend& backend_;
  Metrics& metrics_;
  Call call_;
  Conversation conversation_;
  std::unique_ptr<Voice> voice_;
  Question as_it_came_;  ///< before a document was recognised in it
  std::mutex mutex_;     ///< of what follows, and of the question
  Reuse reuse_;
  std::string model_;  ///< that answers
  Answer known_;       ///< of it before its first token
  std::vector<std::uint64_t> ids_;
  std::vector<Answer> answers_;
  std::size_t left_ = 0;
  bool open_ = false, over_ = false, cancelled_ = false;
};

}  // namespace

void converse(Backend& backend, Metrics& metrics, const Call& call, Conversation conversation,
              std::unique_ptr<Voice> voice) {
  std::make_shared<Exchange>(backend, metrics, call, std::move(conversation), std::move(voice))->start();
}

std::string event_of(const Json& data, std::string_view name) {
  const std::string line = fmt::format("data: {}\n\n", dump(data));
  return name.empty() ? line : fmt::format("event: {}\n{}", name, line);
}

}  // namespace lode::serve
