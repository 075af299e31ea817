// SPDX-License-Identifier: Apache-2.0
// Documents in memory, and questions that wait for one: opens and closes documents as DocumentRoom says, a device's
// documents in a room of their own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lodestone/document.h"
#include "serve/backend.h"
#include "serve/engine/document_room.h"
#include "serve/handler_pool.h"

namespace lode::serve {

/// Whoever waits for a document to be opened. One of the two is called, once, from a thread of OpenDocuments.
struct DocumentWaiter {
  std::uint64_t id = 0;  ///< of no other waiter
  Spec spec;             ///< that it is to be indexed for
  std::function<void(std::shared_ptr<const Document>)> ready;
  std::function<void(const ApiError&)> refused;
};

/// How a document is opened.
struct DocumentSource {
  std::string name;  ///< for messages
  Device device = Device::cpu;
  /// Bytes of the device's memory that it takes, indexed for these.
  std::function<std::int64_t(const std::vector<Spec>&)> need;
  /// ApiError where it shows without opening it that it cannot be indexed for this.
  std::function<void(const Spec&)> check;
  /// Opens it, indexed for these. ApiError; OutOfDeviceMemory or bad_alloc: less must be open beside it.
  std::function<std::shared_ptr<const Document>(const std::vector<Spec>&)> load;
};

/// A document that can be opened.
class Openable {
 public:
  Openable(DocumentSource source, DocumentRoom::Key key) : source_(std::move(source)), key_(key) {}

 private:
  friend class OpenDocuments;
  struct Refusal {
    ApiError why;
    double at;  ///< seconds, as DocumentRoom's
  };
  void refuse(const Spec& spec, const ApiError& why, double now);
  void expect_not_refused(const Spec& spec, double now) const;

  const DocumentSource source_;
  const DocumentRoom::Key key_;
  // Of OpenDocuments, under its lock:
  std::shared_ptr<const Document> document_;  ///< null: it is not open
  std::int64_t bytes_ = 0;                    ///< of the document
  std::vector<Spec> methods_;                 ///< that it was indexed for when it was last open
  std::deque<DocumentWaiter> waiters_;
  std::optional<ApiError> forgotten_;       ///< why it cannot be asked any more
  std::map<std::string, Refusal> refused_;  ///< specs that it could not be indexed for, of late
};

class OpenDocuments {
 public:
  /// Bytes for the documents of each device. On the host, where keys and values are mapped from files, a document
  /// that is larger is opened all the same, alone.
  struct Rooms {
    std::int64_t host = 0, gpu = 0;
    double patience = DocumentRoom::kPatience;
  };
  explicit OpenDocuments(const Rooms& rooms);
  ~OpenDocuments();  ///< after stop()
  OpenDocuments(const OpenDocuments&) = delete;
  OpenDocuments& operator=(const OpenDocuments&) = delete;

  std::shared_ptr<Openable> add(DocumentSource source);
  /// The document, where it is open, indexed for the waiter's spec and takes questions: it is in use for as long as
  /// somebody holds the result. Null: the waiter will hear of it. ApiError 503 where it can never fit, with both
  /// numbers.
  std::shared_ptr<const Document> get(const std::shared_ptr<Openable>& document, DocumentWaiter waiter);
  /// True when this waiter waited, and now hears nothing.
  bool stop_waiting(std::uint64_t id);
  /// It will not be asked any more: its waiters are refused, and it is closed when its last question has ended.
  void forget(const std::shared_ptr<Openable>& document, const ApiError& why);

  bool is_open(const Openable& document) const;
  std::optional<std::string> text_of(const Openable& document) const;  ///< none when it is not open
  void count(BackendStats& stats) const;

  /// Room for a document that is being read, in its turn among those that are asked; given back with the claim.
  class Claim;
  /// Waits for it; calls `poll` now and then, which may throw. InputError where it can never fit.
  std::shared_ptr<Claim> claim(Device device, std::int64_t bytes, const std::function<void()>& poll);

  /// Opens and closes nothing any more; returns once what was being opened is there. Who waits hears nothing.
  void stop();

 private:
  struct Shared;
  using Lease = std::shared_ptr<const Document>;
  using Served = std::vector<std::pair<DocumentWaiter, Lease>>;

  void expect_index(const std::shared_ptr<Openable>& document, const Spec& spec);
  std::int64_t counted(const Openable& document, const std::vector<Spec>& specs) const;
  std::vector<Spec> specs_for(const Openable& document, const Spec& wanted) const;
  Lease lease(const Openable& document);
  void wait_for(const Openable& document);
  Served admit(Openable& document, std::uint64_t always);
  std::deque<DocumentWaiter> take_waiters(Openable& document, const std::optional<Spec>& of);
  void run();
  void turn_over(Device device);
  void close(DocumentRoom::Key key);
  void close_large();
  void grant(DocumentRoom::Key key);
  void open(const std::shared_ptr<Openable>& document);
  void failed(const std::shared_ptr<Openable>& document, const ApiError& why, const std::optional<Spec>& of);
  void opened_in_vain(const std::shared_ptr<Openable>& document, const std::string& why);

  std::shared_ptr<Shared> shared_;
  HandlerPool openers_{4};
  std::thread thread_;
};

}  // namespace lode::serve
