// SPDX-License-Identifier: Apache-2.0
// One request that asks: its answers, whole or as they come, in the shapes of a protocol.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "serve/prompt.h"
#include "serve/service.h"

namespace lode::serve {

/// What a protocol makes of answers. Calls come one at a time.
class Voice {
 public:
  virtual ~Voice() = default;
  virtual Json whole(const std::vector<Answer>& answers, const Reuse& reuse) = 0;
  // The events of a stream, as text that is sent as it is.
  virtual std::string opening(const Answer& known) = 0;  ///< of the first: its model and its prompt's tokens
  virtual std::string piece(std::size_t choice, std::string_view text) = 0;
  virtual std::string thought(std::size_t choice,
                              std::string_view text) = 0;  ///< in front of the answer's pieces
  virtual std::string end_of(std::size_t choice, const Answer& answer, const Reuse& reuse) = 0;
  virtual std::string closing(const std::vector<Answer>& answers) = 0;
  virtual std::string failure(const ApiError& error) = 0;
};

struct Conversation {
  Question question;
  int choices = 1;  ///< answers to the same question; each has a seed of its own
  bool stream = false;
};

/// Asks, and sends what comes. ApiError when the backend refuses; the answers end when the client goes.
void converse(Backend& backend, Metrics& metrics, const Call& call, Conversation conversation,
              std::unique_ptr<Voice> voice);

/// "event: NAME\ndata: JSON\n\n"; without a name, data alone.
std::string event_of(const Json& data, std::string_view name = {});

}  // namespace lode::serve
