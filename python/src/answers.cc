// SPDX-License-Identifier: Apache-2.0
// Answers: they stream while they are generated, and say what they read and what they rest on.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <optional>

#include "engine/document.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "model.h"
#include "text/blanks.h"

namespace lode::python {

namespace {

/// A question that asks for nothing in particular, and tokens of its answer.
constexpr const char* kNeutralQuestion = "What does the text say?";
constexpr std::int64_t kNeutralTokens = 8;

/// What `ask` is told beside its question.
struct Asked {
  std::optional<std::string> attention;
  std::int64_t max_new_tokens = 0;
  std::vector<std::string> stop;
  Sampling sampling;
  std::optional<std::string> question_template;
  bool exact = false, sources = false;
  std::optional<std::int64_t> max_thought_tokens;
  std::optional<bool> chat;
  std::optional<std::string> think;
};

/// As `lodestone ask` puts questions, but that an own template's answers end at `stop` alone.
PromptOptions prompt_options(const Asked& asked) {
  PromptOptions options = {.chat = chat_use(asked.chat),
                           .think = asked.think.value_or(""),
                           .most_thoughts = asked.max_thought_tokens,
                           .question_template = asked.question_template,
                           .names = kArguments};
  if (!asked.stop.empty() || asked.question_template) options.stop.emplace();
  for (const std::string& stop : asked.stop)
    if (!stop.empty()) options.stop->push_back(stop);
  return options;
}

/// An answer under way: iterating gives pieces of text as they become final.
class Stream {
 public:
  /// `after`: the answer that the question goes on from, with what was asked before; null: a new conversation.
  Stream(std::shared_ptr<PyDocument> document, const std::string& question, const Asked& asked, Stream* after)
      : document_(std::move(document)),
        shared_(std::make_shared<Shared>()),
        prompting_(prompt_options(asked)) {
    if (asked.max_new_tokens < 1)
      throw InputError("ask: expected max_new_tokens of 1 or more, found " +
                       std::to_string(asked.max_new_tokens));
    if (without_blanks(question).empty())
      throw InputError("ask: expected a question, found " +
                       std::string(question.empty() ? "an empty one" : "blanks alone"));
    document_->here();
    InCallback::check_outside();
    if (after != nullptr && after->document_->here().fingerprint() != document_->here().fingerprint())
      throw InputError("ask: expected an answer about this document to go on from, found one about another");
    if (after != nullptr) turns_ = after->conversation();
    turns_.emplace_back(without_blanks(question));
    Request request;
    request.document = document_->document;
    request.attention = attention_of(*document_->document, asked.attention);
    request.exact = asked.exact;
    {
      const nb::gil_scoped_release release;  // a template renders the whole text
      const Prompts prompts(prompting_, *document_->document, "ask");
      request.prompt = prompts.of(turns_);
      prompts.set_ends(request.options);
      remark_ = prompts.remark();
    }
    request.options.max_new_tokens = asked.max_new_tokens;
    request.options.sampling = asked.sampling;
    request.want_sources = asked.sources;
    if (asked.sources)
      ask_nothing(request);
    else
      without_sources_ = request;
    request.options.on_text = [shared = shared_](std::string_view piece) {
      const std::lock_guard lock(shared->mutex);
      std::string ready = shared->trimmer.push(piece);
      if (ready.empty()) return;
      shared->pieces.push_back(std::move(ready));
      shared->wake.notify_all();
    };
    attention_ = request.attention.str();
    ticket_ = submit(std::move(request));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cancel(); }

  std::string next() {
    document_->here();
    InCallback::check_outside();
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
    document_->here();
    if (!answer_) answer_ = wait_for(*document_->owner, ticket_);
    return *answer_;
  }
  /// Question, answer, ..., this answer, as `lodestone chat` remembers them; waits.
  std::vector<std::string> conversation() {
    std::vector<std::string> turns = turns_;
    turns.push_back(answer().generation.text);
    return turns;
  }
  void cancel() {
    document_->owner->cancel(ticket_.id);
    if (neutral_) document_->owner->cancel(neutral_->id);
  }
  /// What the user should know of how the question is put; may be empty.
  const std::string& remark() const { return remark_; }
  /// The passages that the answer rests on; waits.
  std::vector<Citation> sources(std::size_t count) {
    answer();
    if (without_sources_) find_sources();
    const Answer given = answer(), nothing = wait_for(*document_->owner, *neutral_);
    std::vector<double> shares(nothing.sources.mass);
    const double total = std::max(1e-30, std::accumulate(shares.begin(), shares.end(), 0.0));
    for (double& share : shares) share /= total;
    shares.resize(static_cast<std::size_t>(document_->document->tokens()));
    const nb::gil_scoped_release release;
    return cite(document_->document->impl().context, given.sources, shares, count);
  }
  const std::string& attention() const { return attention_; }

 private:
  /// Pieces that the scheduler's thread has handed over; outlives either side.
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::string> pieces;
    BlankTrimmer trimmer;  ///< as `lodestone ask` prints an answer
  };

  /// Sources of an answer that came without them: it is given again. Equal requests give equal answers, whatever else
  /// is asked.
  void find_sources() {
    Request again = *without_sources_;
    again.want_sources = true;
    if (answer_->ending == Ending::cancelled)  // no further than it came
      again.options.max_new_tokens = std::max<std::int64_t>(1, std::ssize(answer_->generation.tokens));
    if (!neutral_) ask_nothing(again);
    answer_->sources = wait_for(*document_->owner, submit(std::move(again))).sources;
    without_sources_.reset();
  }

  /// What every question attends to says nothing about this one, and is taken off.
  void ask_nothing(const Request& like) {
    Request request;
    request.document = like.document;
    request.attention = like.attention;
    request.want_sources = true;
    {
      const nb::gil_scoped_release release;
      request.prompt = Prompts(prompting_, *like.document, "ask").of(kNeutralQuestion);
    }
    request.options.max_new_tokens = kNeutralTokens;
    neutral_ = submit(std::move(request));
  }

  Ticket<Answer> submit(Request request) const {
    return document_->owner->asked(
        [&](Scheduler& scheduler) { return scheduler.submit(std::move(request)); });
  }

  /// Whether the answer has ended, after at most a twentieth of a second, sooner when a piece comes.
  bool wait_briefly() {
    const nb::gil_scoped_release release;
    std::unique_lock lock(shared_->mutex);
    shared_->wake.wait_for(lock, std::chrono::milliseconds(20), [&] { return !shared_->pieces.empty(); });
    return ticket_.result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  std::shared_ptr<PyDocument> document_;
  std::shared_ptr<Shared> shared_;
  PromptOptions prompting_;
  std::vector<std::string> turns_;  ///< up to the question
  Ticket<Answer> ticket_;
  std::optional<Ticket<Answer>> neutral_;   ///< where sources are wanted
  std::optional<Request> without_sources_;  ///< what was asked, where sources may still be wanted
  std::optional<Answer> answer_;
  std::string attention_, remark_;
};

void bind_work(nb::module_& m) {
  nb::class_<WorkReport>(m, "Work", "What the sparse part of an answer read, counted as if decoded alone.")
      .def_ro("kv_bytes", &WorkReport::kv_bytes, "Bytes of keys and values read.")
      .def_ro("selector_bytes", &WorkReport::selector_bytes, "Bytes of indexes and keys read to choose.")
      .def_ro("full_bytes", &WorkReport::full_bytes,
              "Bytes of keys and values that full attention would have read.")
      .def_ro("far_keys", &WorkReport::far_keys, "Keys outside of sink and window that were attended to.")
      .def_ro("far_total", &WorkReport::far_total, "Keys outside of sink and window.")
      .def_ro("tokens", &WorkReport::tokens, "Tokens of the question and of the answer.")
      .def_ro("sparse_tokens", &WorkReport::sparse_tokens,
              "Tokens times layers that went through a selector.")
      .def_prop_ro("density", &WorkReport::density,
                   "(kv_bytes + selector_bytes) / full_bytes; 1 when nothing was read.")
      .def_prop_ro("selectivity", &WorkReport::selectivity,
                   "far_keys / far_total; 1 when there are no far keys.");
}

void bind_citation(nb::module_& m) {
  nb::class_<Citation>(m, "Citation", "A passage of the text, and its place.")
      .def_ro("cited_text", &Citation::cited_text, "Whole sentences, as they stand in the text.")
      .def_ro("document_title", &Citation::document_title, "Its file's path; empty: not known.")
      .def_ro("start_page_number", &Citation::start_page, "From 1; 0: the file has no pages.")
      .def_ro("end_page_number", &Citation::end_page, "From 1; 0: the file has no pages.")
      .def_ro("start_char_index", &Citation::start_char, "Characters of the file's text before it.")
      .def_ro("end_char_index", &Citation::end_char, "Characters of the file's text up to its end.")
      .def_ro("line", &Citation::line, "Where it begins, from 1; of the page, if there are pages.")
      .def_ro("weight", &Citation::weight, "Share of the sharp attention that the question explains, 0 to 1.")
      .def_ro("token_begin", &Citation::token_begin, "Its first token in the document, from 0.")
      .def_ro("token_end", &Citation::token_end, "One past its last token.")
      .def("__repr__", [](const Citation& c) { return "Citation(" + c.cited_text + ")"; });
}

void bind_stream(nb::module_& m) {
  nb::class_<Stream>(m, "Stream", "An answer under way; iterating gives its text piece by piece.")
      .def(
          "__init__",
          [](Stream* self, std::shared_ptr<PyDocument> document, const std::string& question,
             std::optional<std::string> attention, std::int64_t max_new_tokens, std::vector<std::string> stop,
             double temperature, int top_k, double top_p, std::uint64_t seed,
             std::optional<std::string> question_template, bool exact, bool sources,
             std::optional<std::int64_t> max_thought_tokens, std::optional<bool> chat,
             std::optional<std::string> think, Stream* after) {
            new (self) Stream(
                std::move(document), question,
                {.attention = std::move(attention),
                 .max_new_tokens = max_new_tokens,
                 .stop = std::move(stop),
                 .sampling = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = seed},
                 .question_template = std::move(question_template),
                 .exact = exact,
                 .sources = sources,
                 .max_thought_tokens = max_thought_tokens,
                 .chat = chat,
                 .think = std::move(think)},
                after);
          },
          nb::arg("document"), nb::arg("question"), nb::arg("attention").none(), nb::arg("max_new_tokens"),
          nb::arg("stop"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"),
          nb::arg("template").none(), nb::arg("exact"), nb::arg("sources"),
          nb::arg("max_thought_tokens").none(), nb::arg("chat").none(), nb::arg("think").none(),
          nb::arg("after").none())
      .def(
          "__iter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[str]"))
      .def("__next__", &Stream::next)
      .def("cancel", &Stream::cancel, "Ends the answer at the next token.")
      .def_prop_ro("remark", &Stream::remark,
                   "What the user should know of how the question was put; may be empty.")
      .def_prop_ro("attention", &Stream::attention, "The spec that the answer attends by.")
      .def_prop_ro(
          "text", [](Stream& s) { return std::string(without_blanks(s.answer().generation.text)); },
          "The whole text without the blanks around it; waits.")
      .def_prop_ro(
          "thoughts", [](Stream& s) { return s.answer().generation.thoughts; },
          "What the model thought before it answered; empty: nothing. Waits.")
      .def("sources", &Stream::sources, nb::arg("count"), "The passages that the answer rests on; waits.")
      .def_prop_ro(
          "accepted", [](Stream& s) { return s.answer().exact.accepted_share(); },
          "Of an exact answer: the share of drafted tokens that full attention accepted.")
      .def_prop_ro(
          "first_token_seconds", [](Stream& s) { return s.answer().first_token_seconds; },
          "Seconds from the first step to the first token.")
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

void bind_answers(nb::module_& m) {
  bind_work(m);
  bind_citation(m);
  bind_stream(m);
}

}  // namespace lode::python
