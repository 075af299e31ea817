// SPDX-License-Identifier: Apache-2.0
// A server's backend that has no documents and does nothing.
#pragma once

#include "serve/backend.h"

namespace lode::test {

class NoBackend : public serve::Backend {
 public:
  std::vector<serve::ServedModel> models() override { return {}; }
  std::vector<serve::ContextInfo> contexts() override { return {}; }
  serve::ContextInfo context(const std::string&) override { return {}; }
  std::string text_of(const std::string&) override { return {}; }
  serve::ContextInfo create(serve::NewContext) override { return {}; }
  void remove(const std::string&) override {}
  std::optional<serve::Recognised> recognise(std::string_view, const std::string&) override {
    return std::nullopt;
  }
  std::uint64_t ask(serve::Question, serve::Listener) override { return 0; }
  void cancel(std::uint64_t) override {}
  serve::BackendStats stats() override { return {}; }
};

}  // namespace lode::test
