// SPDX-License-Identifier: Apache-2.0
// A branch of a document that is fed token by token and gives logits.
#include "engine/sequence.h"

#include <mutex>

#include "arrays.h"
#include "base/threads.h"
#include "engine/batch.h"
#include "lodestone/error.h"
#include "model.h"
#include "model/config.h"

namespace lode::python {

namespace {

/// Calls take turns; the GIL is given up before the mutex is taken.
class PySequence {
 public:
  PySequence(std::shared_ptr<PyDocument> document, const std::optional<std::string>& attention,
             std::int64_t max_tokens)
      : document_(std::move(document)), spec_(attention_of(document_->here(), attention)) {
    const std::int64_t room = document_->document->max_tokens() - document_->document->tokens();
    if (max_tokens < 0 || room <= 0)
      throw InputError("Sequence: expected room behind the document's " +
                       std::to_string(document_->document->tokens()) +
                       " tokens, found none; read it with more max_tokens");
    room_ = max_tokens == 0 ? room : std::min(room, max_tokens);
    const nb::gil_scoped_release release;
    runner_ = std::make_unique<BatchRunner>(document_->owner->model);
    sequence_ = std::make_unique<Sequence>(document_->document, spec_, room_);
  }
  PySequence(const PySequence&) = delete;
  PySequence& operator=(const PySequence&) = delete;
  ~PySequence() {
    if (!document_->owner->process.here()) {
      static_cast<void>(sequence_.release());
      return;
    }
    const nb::gil_scoped_release release;
    sequence_.reset();
  }

  nb::ndarray<nb::numpy, float> forward(const std::vector<TokenId>& tokens) {
    document_->here();
    const std::int64_t vocab = document_->owner->model->config().vocab;
    if (tokens.empty()) throw InputError("forward: expected at least one token, found none");
    for (const TokenId token : tokens)
      if (token < 0 || token >= vocab)
        throw InputError("forward: expected token ids below " + std::to_string(vocab) + ", found " +
                         std::to_string(token));
    std::vector<float> logits;
    {
      const nb::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      logits = run(tokens);
    }
    return numpy(std::move(logits), {tokens.size(), static_cast<std::size_t>(vocab)});
  }

  void roll_back(std::int64_t tokens) {
    const std::int64_t document = document_->here().tokens();
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    if (tokens < document || tokens > sequence_->tokens())
      throw InputError("roll_back: expected a number from the document's " + std::to_string(document) +
                       " tokens to the sequence's " + std::to_string(sequence_->tokens()) + ", found " +
                       std::to_string(tokens));
    sequence_->roll_back(tokens);
  }

  std::int64_t tokens() {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return sequence_->tokens();
  }
  std::vector<TokenId> own() {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return sequence_->ids;
  }
  std::string attention() const { return spec_.str(); }

 private:
  std::vector<float> run(const std::vector<TokenId>& tokens) {
    if (std::ssize(sequence_->ids) + std::ssize(tokens) > room_)
      throw InputError("forward: expected at most " + std::to_string(room_) +
                       " tokens behind the document, found " + std::to_string(sequence_->ids.size()) +
                       " and " + std::to_string(tokens.size()) + " more");
    BatchRow row = {.sequence = sequence_.get(),
                    .tokens = tokens,
                    .phase = tokens.size() > 1 ? Phase::question : Phase::generation,
                    .rows = LogitRows::all};
    const ThreadPool::Urgent urgent(document_->owner->model->pool());
    runner_->run({&row, 1});
    if (row.error) std::rethrow_exception(row.error);
    return {row.logits.begin(), row.logits.end()};
  }

  std::shared_ptr<PyDocument> document_;
  Spec spec_;
  std::int64_t room_ = 0;
  std::unique_ptr<BatchRunner> runner_;
  std::unique_ptr<Sequence> sequence_;
  std::mutex mutex_;
};

}  // namespace

void bind_sequence(nb::module_& m) {
  nb::class_<PySequence>(m, "_Sequence")
      .def(nb::init<std::shared_ptr<PyDocument>, const std::optional<std::string>&, std::int64_t>(),
           nb::arg("document"), nb::arg("attention").none(), nb::arg("max_tokens"))
      .def("forward", &PySequence::forward, nb::arg("tokens"))
      .def("roll_back", &PySequence::roll_back, nb::arg("tokens"))
      .def_prop_ro("tokens", &PySequence::tokens)
      .def_prop_ro("own_tokens", &PySequence::own)
      .def_prop_ro("attention", &PySequence::attention);
}

}  // namespace lode::python
