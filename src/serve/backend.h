// SPDX-License-Identifier: Apache-2.0
// The narrow place between the protocols (HTTP, MCP) and the engine: named contexts, and questions about them. A
// backend knows no JSON, a protocol knows no model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/engine.h"

namespace lode::serve {

/// A request that is refused, with HTTP's status and one sentence for the client.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status_, const std::string& sentence, std::string code_ = {})
      : std::runtime_error(sentence), status(status_), code(std::move(code_)) {}
  int status;
  std::string code;       ///< a word for programs, such as "context_not_found"; may be empty
  int retry_seconds = 0;  ///< of 429 and 503: when to try again
};

/// Of a context that has failed.
inline ApiError unusable_context(const std::string& name, const std::string& why) {
  return {409, "the context '" + name + "' cannot be used: " + why, "context_failed"};
}

enum class ContextState { reading, ready, failed };
std::string_view name_of(ContextState state);

/// What is known of a stored context, whether or not it is in memory.
struct ContextInfo {
  std::string name;
  ContextState state = ContextState::reading;
  std::int64_t tokens = 0, tokens_done = 0;  ///< done = read so far, indexes apart
  std::int64_t bytes = 0;                    ///< of its file; 0 until there is one
  std::int64_t text_bytes = 0;
  std::string model;                      ///< the id of the model that it belongs to
  std::string error;                      ///< why it failed, one sentence
  std::vector<std::string> attentions;    ///< specs that it is indexed for, besides `full`
  std::string step;                       ///< while reading: "waiting", "tokens", "indexes" or "writing"
  double seconds = 0, seconds_left = -1;  ///< of reading; left = an estimate, below 0 when there is none yet
  std::int64_t created = 0, expires = 0;  ///< seconds since 1970; expires 0 = never
  bool in_memory = false;
};

struct NewContext {
  std::string name, text;
  /// The client gave no name: where it is taken, the next free one with a number is.
  bool any_name = false;
  bool is_file = false;                 ///< `text` is a file's bytes (PDF, EPUB, text of any encoding ...)
  std::string model;                    ///< an id; empty = the first
  std::string title;                    ///< what people call it (a file's name); empty = the name
  std::vector<std::string> attentions;  ///< specs to index for; empty = the server's own
  std::int64_t ttl_seconds = 0;         ///< 0 = for ever
  /// Called once, when it is ready or has failed, from a thread of the backend; may be empty.
  std::function<void(const ContextInfo&)> on_read;
};

struct ServedModel {
  std::string id;
  std::int64_t context = 0;  ///< tokens that it takes
  std::int64_t created = 0;
};

/// One message of a conversation.
struct Turn {
  std::string role;  ///< system, user or assistant
  std::string text;
};

/// What is asked: the turns follow the context's document.
struct Question {
  std::string model;    ///< an id; empty = the context's, or the first
  std::string context;  ///< empty = of the model alone
  std::vector<Turn> turns;
  std::string attention;  ///< empty: as usual (usual_attention)
  bool exact = false;     ///< greedy tokens equal to full attention's
  Sampling sampling;
  std::int64_t max_new_tokens = 0;  ///< 0 = as many as fit
  std::vector<std::string> stop;
  bool want_sources = false;
  std::string schema;  ///< JSON schema that the answer has to meet; empty = none
  std::optional<bool>
      think;           ///< whether the chat template lets the model think first; none: as it does by itself
  std::string effort;  ///< of thinking: low, medium or high; empty: as the template has it
  std::int64_t max_thought_tokens = -1;  ///< then thoughts are ended; -1: no such bound
  std::string notice;                    ///< what of the request was left aside; Answer::notice says it, too
};

/// A passage of the document that the answer attended to.
struct Source {
  double weight = 0;  ///< share of the sharp attention, 0 to 1
  std::int64_t token_begin = 0, token_end = 0;
  std::string title;                          ///< of its file; empty = not known
  std::int64_t char_begin = 0, char_end = 0;  ///< characters (code points) of the file's text
  std::int64_t text_begin = 0, text_end = 0;  ///< the same of the whole document's text
  std::int64_t page_begin = 0, page_end = 0;  ///< from 1, [begin, end); both 0: it has no pages
  std::int64_t line = 0;                      ///< from 1; of the page, where there are pages
  std::string text;
};

struct Answer {
  std::string text;
  std::string thoughts;  ///< what came before it; empty: none
  std::string ending;    ///< stop, length, room or cancelled
  std::string model, context, attention;
  std::string stop_string;  ///< of the request, when one of them ended it
  std::string why;          ///< why this attention, or why all was dense; may be empty
  std::string notice;       ///< what the method says of this text; may be empty
  std::int64_t prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
  std::int64_t thought_tokens = 0;                          ///< of the answer's
  std::int64_t drafted = 0, accepted = 0, dense_steps = 0;  ///< of an exact answer
  double density = 1, draft_density = 0;                    ///< drafts of an exact answer are apart
  double queued_seconds = 0, first_token_seconds = 0, seconds = 0;
  std::int64_t read_bytes = 0,
               full_bytes = 0;  ///< of keys, values and indexes: read, and what full attention reads
  std::vector<Source> sources;
};

/// Called from the backend's threads, one after another: thoughts and text as they become final, then on_answer or
/// on_failure.
struct Listener {
  std::function<void(std::string_view)> on_text;
  std::function<void(const Answer&)> on_answer;
  std::function<void(const ApiError&)> on_failure;
  std::function<void(std::string_view)> on_thought = {};  ///< may be empty
  /// Before all others: the model and the tokens of the prompt; may be empty.
  std::function<void(const Answer&)> on_prompt = {};
};

/// A stored document that stands in a text: its bytes [begin, end).
struct Recognised {
  std::string context;
  std::size_t begin = 0, end = 0;
};

struct BackendStats {
  int queued = 0, running = 0, reading = 0;
  std::int64_t memory = 0, memory_used = 0;  ///< bytes of keys and values of sequences
  std::int64_t documents = 0, documents_in_memory = 0;
  std::int64_t document_room = 0, document_bytes = 0;  ///< for open documents, and what they take
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::vector<ServedModel> models() = 0;

  virtual std::vector<ContextInfo> contexts() = 0;           ///< by name
  virtual ContextInfo context(const std::string& name) = 0;  ///< ApiError 404
  virtual std::string text_of(const std::string& name) = 0;  ///< ApiError 404, or 409 while it is being read
  /// Answers at once; the document is read in the background. ApiError 400, 409 (the name is taken), 429.
  virtual ContextInfo create(NewContext context) = 0;
  virtual void remove(const std::string& name) = 0;  ///< ApiError 404

  /// The longest stored document that stands in the text as it was stored, leading and trailing blanks apart.
  virtual std::optional<Recognised> recognise(std::string_view text, const std::string& model) = 0;

  /// ApiError when it is refused; else the listener hears how it ends. The number is for cancel().
  virtual std::uint64_t ask(Question question, Listener listener) = 0;
  virtual void cancel(std::uint64_t id) = 0;

  virtual BackendStats stats() = 0;
};

}  // namespace lode::serve
