// SPDX-License-Identifier: Apache-2.0
// Admission of documents to a device's memory, by counted bytes. The same rule holds on a GPU and on the host:
//
//   - Counted bytes never exceed the room. Bytes count from before a document is opened until after it is closed.
//   - A question about an open document goes on at once. One about another document waits, in the order in which
//     the documents were first asked.
//   - For the document in front, unused documents are closed, the least recently used first. Where that is not
//     enough and it has waited for long enough (`patience`), documents in use are closed to new questions, the one
//     that was opened first in front; each is closed when its last question has ended. Before it had its turn
//     (open for `patience`, or for as long as its opening took) no document is.
//
// So a document waits at most for those in front of it, and each of those for answers that are under way.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace lode::serve {

/// No threads, no clock and no documents: every call says what has happened, and when (in seconds that never fall).
class DocumentRoom {
 public:
  using Key = std::uint64_t;  ///< a document
  static constexpr double kPatience = 2;

  explicit DocumentRoom(std::int64_t bytes, double patience = kPatience)
      : bytes_(bytes), patience_(patience) {}

  // ---- What those say who ask. ----

  /// Whether a question about a document may go on: it then counts as a use until end_use.
  bool enter(Key key);
  void end_use(Key key);
  /// Somebody waits for a document that takes `need` bytes, at most bytes(). It keeps its place when it waits already.
  void wait(Key key, std::int64_t need, double now);
  /// The same, in front of all others: what has been opened in vain.
  void wait_in_front(Key key, std::int64_t need, double now);
  /// Nobody waits for it any longer.
  void leave(Key key);
  /// No more questions about it as it is now: it is closed when its last one has ended.
  void retire(Key key);

  // ---- What is to be done, and that it has been done. ----

  /// Documents to be closed now; each counts until closed().
  std::vector<Key> to_close(double now);
  /// The document to be opened now, which counts from now on, or that is open still and takes questions again
  /// (`open` says so).
  std::optional<Key> to_open(double now);
  /// It has been opened, and takes `bytes`: beyond what was counted for it only where that fits.
  void opened(Key key, std::int64_t bytes, double now);
  /// It has been closed, or could not be opened; returns what was counted for it.
  std::int64_t closed(Key key);

  bool open(Key key) const;
  bool in_use(Key key) const;
  bool holds(Key key) const { return held_.contains(key); }
  bool waits(Key key) const;
  std::int64_t bytes() const { return bytes_; }
  std::int64_t used() const { return used_; }  ///< counted; at most bytes()
  std::size_t documents() const { return held_.size(); }
  std::size_t waiting() const { return queue_.size(); }

 private:
  enum class State { opening, open, closing };
  struct Held {
    std::int64_t bytes = 0;
    State state = State::opening;
    int uses = 0;
    bool retired = false;   ///< for good
    bool yielding = false;  ///< to the document in front of the queue
    double since = 0;       ///< it has been opening, then open
    double turn = 0;        ///< seconds that it is open at least while others wait
    std::uint64_t used = 0;
  };
  struct Wait {
    Key key = 0;
    std::int64_t need = 0;
    double since = 0;
  };
  std::int64_t coming() const;
  void ask_to_yield(std::int64_t missing, double now);

  std::int64_t bytes_ = 0, used_ = 0;
  double patience_ = 0;
  std::map<Key, Held> held_;
  std::deque<Wait> queue_;
  std::uint64_t uses_ = 0;
};

}  // namespace lode::serve
