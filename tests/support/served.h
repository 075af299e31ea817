// SPDX-License-Identifier: Apache-2.0
// A server's backend over the pocket model, without HTTP, and crowds that ask it.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "serve/engine/engine_backend.h"

namespace lode::test {

/// How one question ended.
struct Told {
  serve::Answer answer;
  int status = 200;
  std::string error;
  int retry_seconds = 0;
};

/// Waits for the answers to questions that were asked at once.
class Crowd {
 public:
  explicit Crowd(serve::Backend& backend) : backend_(backend) {}
  /// Returns the question's number for cancel; its place in told() is how many were asked before.
  std::uint64_t ask(const std::string& context, const std::string& text, std::int64_t tokens,
                    const std::string& attention = "full") {
    const std::size_t i = told_.size();
    told_.push_back(std::make_unique<std::promise<Told>>());
    serve::Question question = {.context = context, .turns = {{"user", text}}, .attention = attention};
    question.max_new_tokens = tokens;
    std::promise<Told>& told = *told_[i];
    return backend_.ask(std::move(question), {.on_text = [](std::string_view) {},
                                              .on_answer =
                                                  [&told](const serve::Answer& answer) {
                                                    told.set_value({.answer = answer, .error = {}});
                                                  },
                                              .on_failure =
                                                  [&told](const serve::ApiError& error) {
                                                    told.set_value({.answer = {},
                                                                    .status = error.status,
                                                                    .error = error.what(),
                                                                    .retry_seconds = error.retry_seconds});
                                                  }});
  }
  std::vector<Told> told() {
    std::vector<Told> all;
    for (const auto& one : told_) all.push_back(one->get_future().get());
    return all;
  }

 private:
  serve::Backend& backend_;
  std::vector<std::unique_ptr<std::promise<Told>>> told_;
};

/// A folder of documents that goes with this.
class ContextsFolder {
 public:
  ContextsFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("lodestone-served-" + std::to_string(reinterpret_cast<std::uintptr_t>(this)))) {
    std::filesystem::create_directories(path_);
  }
  ~ContextsFolder() { std::filesystem::remove_all(path_); }
  ContextsFolder(const ContextsFolder&) = delete;
  ContextsFolder& operator=(const ContextsFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Uploads a text and waits until it can be asked; says what failed, if something did.
inline std::string store(serve::Backend& backend, const std::string& name, const std::string& text) {
  serve::NewContext context;
  context.name = name;
  context.text = text;
  context.attentions = {"kmeans"};
  backend.create(std::move(context));
  for (;;) {
    const serve::ContextInfo info = backend.context(name);
    if (info.state == serve::ContextState::ready) return {};
    if (info.state == serve::ContextState::failed) return info.error;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace lode::test
