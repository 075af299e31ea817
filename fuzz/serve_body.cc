// SPDX-License-Identifier: Apache-2.0
// A request's body, behind a line with its path and one with its content type: refused with a sentence, or understood.
#include "fuzz/target.h"
#include "serve/service.h"
#include "support/no_backend.h"

namespace {

using namespace lode::serve;

/// Has one context and answers nothing.
class OneContext : public lode::test::NoBackend {
 public:
  std::optional<Recognised> recognise(std::string_view text, const std::string&) override {
    const std::size_t at = text.find("document");
    if (at == std::string_view::npos) return std::nullopt;
    return Recognised{"known", at, at + 8};
  }
  std::uint64_t ask(Question question, Listener listener) override {
    LODE_ASSERT(!question.turns.empty() && question.turns.back().role == "user");
    listener.on_text("a");
    listener.on_answer({.text = "a", .ending = "stop"});
    return 1;
  }
};

class NoReply : public HttpReply {
 public:
  void send(HttpResponse response) override { LODE_ASSERT(response.status >= 200 && !response.body.empty()); }
  void begin(HttpResponse) override {}
  void write(std::string) override {}
  void finish() override {}
  void on_gone(std::function<void()>) override {}
};

std::string take_line(std::string_view& input) {
  const std::size_t end = std::min(input.find('\n'), input.size());
  std::string line(input.substr(0, end));
  input.remove_prefix(std::min(end + 1, input.size()));
  return line;
}

}  // namespace

LODE_FUZZ_TARGET(serve_body) {
  OneContext backend;
  Service service(backend, Guard({}, {}), {.log = false});
  auto request = std::make_shared<HttpRequest>();
  request->id = "req_0";
  request->method = "POST";
  request->path = take_line(input);
  request->headers = {{"host", "localhost"}, {"content-type", take_line(input)}};
  request->body = std::string(input);
  const Admission admission = service.admit(*request);
  if (admission.admitted) service.handle(request, std::make_shared<NoReply>());
}
