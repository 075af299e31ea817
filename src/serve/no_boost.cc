// SPDX-License-Identifier: Apache-2.0
// What a program that was built without Boost says of its server.
#include "lodestone/error.h"
#include "serve/http.h"

namespace lode::serve {

struct HttpServer::Impl {};

HttpServer::HttpServer(HttpApp&, const HttpOptions&) {
  throw RunError(
      "serve: expected a program built with Boost.Beast, found one without: install libboost1.81-dev and "
      "build it again");
}
HttpServer::~HttpServer() = default;
int HttpServer::port() const {
  return 0;
}
int HttpServer::open_connections() const {
  return 0;
}
void HttpServer::stop(double) {}

}  // namespace lode::serve
