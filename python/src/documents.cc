// SPDX-License-Identifier: Apache-2.0
// Models, documents, and questions about them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "lodestone/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "lodestone/spec.h"
#include "module.h"

namespace lode::python {

namespace {

/// How a question is put to a model without a chat template; what the shipped model was trained on.
constexpr const char* kQuestionTemplate =
    "\n\nNow answer the questions about the text above.\n\nQuestion: {question}\nAnswer:";

std::string filled(const std::string& text, const std::string& question) {
  constexpr std::string_view kPlace = "{question}";
  const std::size_t at = text.find(kPlace);
  if (at == std::string::npos)
    throw InputError("template: expected a text with {question} in it, found none");
  return text.substr(0, at) + question + text.substr(at + kPlace.size());
}

/// A model and the scheduler that answers for it.
struct PyModel {
  std::shared_ptr<const Model> model;
  std::shared_ptr<Scheduler> scheduler;

  static std::shared_ptr<PyModel> load(const std::string& path, const std::string& device, int threads) {
    if (device != "cpu")
      throw InputError("Model: expected device 'cpu', found '" + device +
                       "'; the program has --device cuda, this package does not yet");
    const nb::gil_scoped_release release;
    auto loaded = std::make_shared<PyModel>();
    loaded->model = Model::load(path, threads);
    loaded->scheduler = std::make_shared<Scheduler>(loaded->model);
    return loaded;
  }
};

struct PyDocument {
  std::shared_ptr<PyModel> owner;
  std::shared_ptr<const Document> document;
};

/// Waits for a ticket with the GIL released; Ctrl-C cancels the job.
template <class Result>
Result wait_for(PyModel& owner, const Ticket<Result>& ticket) {
  for (;;) {
    {
      const nb::gil_scoped_release release;
      if (ticket.result.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) break;
    }
    if (PyErr_CheckSignals() != 0) {
      owner.scheduler->cancel(ticket.id);
      const nb::gil_scoped_release release;
      ticket.result.wait();
      const nb::gil_scoped_acquire acquire;
      throw nb::python_error();
    }
  }
  return ticket.result.get();
}

Spec attention_of(const Document& document, const std::string& attention) {
  if (attention != "auto") return parse_spec(attention);
  return document.methods().empty() ? parse_spec("full") : document.methods().front();
}

/// (tokens done, tokens, layers indexed, layers)
using Progress = nb::typed<nb::callable, void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

std::shared_ptr<PyDocument> read_document(std::shared_ptr<PyModel> model, const std::string& text,
                                          const std::vector<std::string>& specs, const std::string& kv_type,
                                          std::int64_t max_tokens, std::uint64_t seed,
                                          const std::optional<Progress>& progress) {
  DocumentOptions options = {.kv_type = parse_dtype(kv_type), .max_tokens = max_tokens, .seed = seed};
  for (const std::string& spec : specs) options.specs.push_back(parse_spec(spec));
  if (progress) {
    options.progress = [&](const ReadProgress& done) {
      const nb::gil_scoped_acquire acquire;
      (*progress)(done.tokens_done, done.tokens, done.layers_indexed, done.layers);
    };
  }
  const auto tokens = model->model->tokenizer().encode(text, Tokenizer::Bos::as_template);
  auto ticket = model->scheduler->read(tokens, text, std::move(options));
  auto document = wait_for(*model, ticket);
  return std::make_shared<PyDocument>(PyDocument{std::move(model), std::move(document)});
}

std::shared_ptr<PyDocument> load_document(const std::string& path, std::shared_ptr<PyModel> model,
                                          const std::vector<std::string>& specs) {
  DocumentOptions options;
  for (const std::string& spec : specs) options.specs.push_back(parse_spec(spec));
  const nb::gil_scoped_release release;
  auto document = Document::open(path, model->model, options);
  return std::make_shared<PyDocument>(PyDocument{std::move(model), std::move(document)});
}

/// An answer under way: iterating gives pieces of text as they become final.
class Stream {
 public:
  Stream(std::shared_ptr<PyDocument> document, const std::string& question, const std::string& attention,
         std::int64_t max_new_tokens, std::vector<std::string> stop, double temperature, std::uint64_t seed,
         const std::optional<std::string>& question_template)
      : document_(std::move(document)), shared_(std::make_shared<Shared>()) {
    Request request;
    request.document = document_->document;
    request.attention = attention_of(*document_->document, attention);
    const std::string prompt = filled(question_template.value_or(kQuestionTemplate), question);
    if (stop.empty() && !question_template) stop = {"\n"};
    request.prompt = document_->owner->model->tokenizer().encode(prompt, Tokenizer::Bos::none);
    request.options.max_new_tokens = max_new_tokens;
    request.options.stop = std::move(stop);
    request.options.sampling.temperature = temperature;
    request.options.sampling.seed = seed;
    request.options.on_text = [shared = shared_](std::string_view piece) {
      const std::lock_guard lock(shared->mutex);
      shared->pieces.emplace_back(piece);
      shared->wake.notify_all();
    };
    attention_ = request.attention.str();
    const nb::gil_scoped_release release;
    ticket_ = document_->owner->scheduler->submit(std::move(request));
  }
  ~Stream() { cancel(); }

  std::string next() {
    for (;;) {
      const bool ended = wait_briefly();
      {
        const std::lock_guard lock(shared_->mutex);
        if (!shared_->pieces.empty()) {
          std::string piece = std::move(shared_->pieces.front());
          shared_->pieces.pop_front();
          return piece;
        }
      }
      if (ended) {
        answer();  // rethrows what went wrong
        throw nb::stop_iteration();
      }
      if (PyErr_CheckSignals() != 0) {
        cancel();
        throw nb::python_error();
      }
    }
  }

  const Answer& answer() {
    if (!answer_) answer_ = wait_for(*document_->owner, ticket_);
    return *answer_;
  }
  void cancel() { document_->owner->scheduler->cancel(ticket_.id); }
  const std::string& attention() const { return attention_; }

 private:
  /// Pieces that the scheduler's thread has handed over; outlives either side.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::string> pieces;
  };

  /// Whether the answer has ended, after at most a twentieth of a second, sooner when a piece comes.
  bool wait_briefly() {
    const nb::gil_scoped_release release;
    std::unique_lock lock(shared_->mutex);
    shared_->wake.wait_for(lock, std::chrono::milliseconds(20), [&] { return !shared_->pieces.empty(); });
    return ticket_.result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  std::shared_ptr<PyDocument> document_;
  std::shared_ptr<Shared> shared_;
  Ticket<Answer> ticket_;
  std::optional<Answer> answer_;
  std::string attention_;
};

void bind_work(nb::module_& m) {
  nb::class_<WorkReport>(m, "Work", "What the sparse part of an answer read, counted as if decoded alone.")
      .def_ro("kv_bytes", &WorkReport::kv_bytes)
      .def_ro("selector_bytes", &WorkReport::selector_bytes)
      .def_ro("full_bytes", &WorkReport::full_bytes, "What full attention would have read.")
      .def_ro("far_keys", &WorkReport::far_keys)
      .def_ro("far_total", &WorkReport::far_total)
      .def_ro("tokens", &WorkReport::tokens)
      .def_ro("sparse_tokens", &WorkReport::sparse_tokens,
              "Tokens times layers that went through a selector.")
      .def_prop_ro("density", &WorkReport::density, "Bytes read over full attention's.")
      .def_prop_ro("selectivity", &WorkReport::selectivity, "Far keys attended over all far keys.");
}

void bind_stream(nb::module_& m) {
  nb::class_<Stream>(m, "Stream", "An answer under way; iterating gives its text piece by piece.")
      .def(nb::init<std::shared_ptr<PyDocument>, const std::string&, const std::string&, std::int64_t,
                    std::vector<std::string>, double, std::uint64_t, const std::optional<std::string>&>(),
           nb::arg("document"), nb::arg("question"), nb::arg("attention"), nb::arg("max_new_tokens"),
           nb::arg("stop"), nb::arg("temperature"), nb::arg("seed"), nb::arg("template"))
      .def(
          "__iter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[str]"))
      .def("__next__", &Stream::next)
      .def("cancel", &Stream::cancel, "Ends the answer at the next token.")
      .def_prop_ro("attention", &Stream::attention, "The spec that the answer attends by.")
      .def_prop_ro(
          "text", [](Stream& s) { return s.answer().generation.text; }, "The whole text; waits.")
      .def_prop_ro("tokens", [](Stream& s) { return s.answer().generation.tokens; })
      .def_prop_ro("work", [](Stream& s) { return s.answer().generation.work; })
      .def_prop_ro(
          "ending", [](Stream& s) { return std::string(name_of(s.answer().ending)); },
          "stop, length, room or cancelled")
      .def_prop_ro("seconds", [](Stream& s) {
        const Generation& g = s.answer().generation;
        return g.prompt_seconds + g.decode_seconds;
      });
}

}  // namespace

void bind_documents(nb::module_& m) {
  bind_work(m);
  nb::class_<PyModel>(m, "_Model")
      .def_static("load", &PyModel::load, nb::arg("path"), nb::arg("device"), nb::arg("threads"))
      .def(
          "encode",
          [](const PyModel& self, const std::string& text, bool bos) {
            return self.model->tokenizer().encode(text,
                                                  bos ? Tokenizer::Bos::as_template : Tokenizer::Bos::none);
          },
          nb::arg("text"), nb::arg("bos"))
      .def(
          "decode",
          [](const PyModel& self, const std::vector<TokenId>& tokens) {
            return self.model->tokenizer().decode(tokens);
          },
          nb::arg("tokens"))
      .def_prop_ro("fingerprint", [](const PyModel& self) { return self.model->fingerprint(); })
      .def_prop_ro("weight_bytes", [](const PyModel& self) { return self.model->weight_bytes(); });
  nb::class_<PyDocument>(m, "_Document")
      .def_static("read", &read_document, nb::arg("model"), nb::arg("text"), nb::arg("specs"),
                  nb::arg("kv_type"), nb::arg("max_tokens"), nb::arg("seed"), nb::arg("progress"))
      .def_static("load", &load_document, nb::arg("path"), nb::arg("model"), nb::arg("specs"))
      .def(
          "save",
          [](const PyDocument& self, const std::string& path) {
            const nb::gil_scoped_release release;
            self.document->save(path);
          },
          nb::arg("path"))
      .def_prop_ro("tokens", [](const PyDocument& self) { return self.document->tokens(); })
      .def_prop_ro("text", [](const PyDocument& self) { return self.document->text(); })
      .def_prop_ro("kv_bytes", [](const PyDocument& self) { return self.document->kv_bytes(); })
      .def_prop_ro("index_bytes", [](const PyDocument& self) { return self.document->index_bytes(); })
      .def_prop_ro("methods", [](const PyDocument& self) {
        std::vector<std::string> specs;
        for (const Spec& spec : self.document->methods()) specs.push_back(spec.str());
        return specs;
      });
  bind_stream(m);
  m.def(
      "methods",
      [] {
        std::vector<std::string> names;
        for (const MethodInfo& info : methods()) names.push_back(info.name);
        return names;
      },
      "The names of all attention methods.");
}

}  // namespace lode::python
