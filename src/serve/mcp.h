// SPDX-License-Identifier: Apache-2.0
// The Model Context Protocol (spec 2025-11-25) for agents: JSON-RPC 2.0, one message a line. Tools list the stored
// documents, ask one, and find its passages about something.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "base/json.h"
#include "serve/backend.h"

namespace lode::serve {

class McpServer {
 public:
  /// `send` gets each message, one line without its end; calls come one at a time.
  McpServer(Backend& backend, std::string version, std::function<void(std::string)> send);
  /// One line from the client. Answers may come later, from other threads.
  void receive(std::string_view line);
  /// No more lines come: waits for the answers that are under way.
  void finish();

 private:
  struct Call;
  void handle(const Json& message);
  void handle_request(const Json& id, const std::string& method, const Json& params);
  Json initialize(const Json& params) const;
  void call_tool(const Json& id, const Json& params);
  Json list_documents();
  void ask(const Json& id, const Json& arguments, bool passages_only);
  void cancel(const Json& params);
  void reply(const Json& id, Json result);
  void reply_error(const Json& id, int code, const std::string& sentence);
  void reply_failure(const Json& id, const std::string& sentence);
  void ended(const std::string& id);
  void emit(const Json& message);

  Backend& backend_;
  const std::string version_;
  std::function<void(std::string)> send_;
  std::mutex sending_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<std::string, std::uint64_t> running_;  // the backend's numbers by request id; 0 = being handed in
};

}  // namespace lode::serve
