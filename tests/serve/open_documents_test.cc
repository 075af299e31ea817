// SPDX-License-Identifier: Apache-2.0
// Documents that are opened for questions, over sources that fail as real ones do.
#include "serve/engine/open_documents.h"

#include <gtest/gtest.h>

#include <future>

#include "base/out_of_memory.h"
#include "support/asking.h"

namespace lode::serve {
namespace {

using Lease = std::shared_ptr<const Document>;

constexpr std::int64_t kRoom = std::int64_t{1} << 30;

/// A document of few tokens, indexed for these.
Lease document_with(const std::vector<Spec>& specs) {
  std::vector<std::string> methods;
  for (const Spec& spec : specs) methods.push_back(spec.str());
  return test::read(test::pocket(), test::lisbon_text(0, 8), methods);
}

/// How a question's wait for its document ended.
struct Heard {
  Lease document;
  std::optional<ApiError> error;
};

/// One document of a "GPU" of kRoom bytes, which it need not be for the rule by which its documents are opened.
class Opening {
 public:
  explicit Opening(std::function<std::int64_t(const std::vector<Spec>&)> need) {
    source_.name = "book";
    source_.device = Device::cuda;
    source_.need = std::move(need);
    source_.check = [this](const Spec& spec) {
      if (check) check(spec);
    };
    source_.load = [this](const std::vector<Spec>& specs) {
      ++loads;
      if (load) load(specs);
      return document_with(specs);
    };
  }
  ~Opening() { documents.stop(); }
  Opening(const Opening&) = delete;
  Opening& operator=(const Opening&) = delete;

  Heard ask(const std::string& spec) {
    if (document_ == nullptr) document_ = documents.add(source_);
    const auto heard = std::make_shared<std::promise<Heard>>();
    try {
      const Lease there = documents.get(
          document_,
          {.id = ++last_id_,
           .spec = parse_spec(spec),
           .ready = [heard](const Lease& lease) { heard->set_value({.document = lease, .error = {}}); },
           .refused =
               [heard](const ApiError& why) { heard->set_value({.document = nullptr, .error = why}); }});
      if (there != nullptr) return {.document = there, .error = {}};
    } catch (const ApiError& error) {
      return {.document = nullptr, .error = error};
    }
    return heard->get_future().get();
  }
  bool is_open() const { return documents.is_open(*document_); }

  std::function<void(const Spec&)> check;              ///< of the source; null: nothing is wrong
  std::function<void(const std::vector<Spec>&)> load;  ///< the same
  std::atomic<int> loads = 0;
  OpenDocuments documents{{.host = kRoom, .gpu = kRoom, .patience = 0.05}};

 private:
  DocumentSource source_;
  std::shared_ptr<Openable> document_;
  std::uint64_t last_id_ = 0;
};

/// That a document is alone in its room says nothing of memory that others than the server have taken and may give back.
TEST(OpenDocuments, ADocumentIsRefusedOnlyWhenAllTheRoomIsCountedForIt) {
  Opening opening([](const auto&) { return kRoom * 4 / 10; });
  int lacking = 3;
  opening.load = [&](const auto&) {
    if (lacking-- > 0) throw OutOfDeviceMemory("others have it");
  };
  const Heard heard = opening.ask("full");
  EXPECT_NE(heard.document, nullptr) << heard.error->what();
  EXPECT_EQ(opening.loads, 4);

  Opening never([](const auto&) { return kRoom * 4 / 10; });
  never.load = [](const auto&) { throw OutOfDeviceMemory("others have it"); };
  const Heard refused = never.ask("full");
  ASSERT_TRUE(refused.error.has_value());
  EXPECT_EQ(refused.error->status, 503);
  EXPECT_EQ(refused.error->code, "no_room");
  EXPECT_GT(refused.error->retry_seconds, 0);
}

/// Indexes that were made for earlier questions are not what a later one needs room for.
TEST(OpenDocuments, IndexesThatOthersAskedForMakeRoom) {
  Opening opening([](const std::vector<Spec>& specs) { return kRoom * 4 / 10 * (1 + std::ssize(specs)); });
  for (const char* spec : {"topk:k=8,window=16", "quest:window=16", "full", "topk:k=8,window=16"}) {
    const Heard heard = opening.ask(spec);
    ASSERT_NE(heard.document, nullptr) << spec << ": " << heard.error->what();
    EXPECT_TRUE(heard.document->answers(parse_spec(spec)));
  }
}

/// What was once opened for a spec that cannot be had any more is opened for others all the same.
TEST(OpenDocuments, ASpecThatOthersAskedForIsNotThisQuestionsFault) {
  Opening opening([](const auto&) { return kRoom / 4; });
  const Spec gone = parse_spec("topk:k=8,window=16");
  EXPECT_NE(opening.ask(gone.str()).document, nullptr);
  opening.load = [&](const std::vector<Spec>& specs) {
    for (const Spec& spec : specs)
      if (spec.str() == gone.str()) throw ApiError(400, "its artefact is gone");
  };
  const Heard heard = opening.ask("quest:window=16");
  EXPECT_NE(heard.document, nullptr) << heard.error->what();
}

/// A spec that cannot be had closes the document for nobody, the first time neither, and is not tried again.
TEST(OpenDocuments, ASpecThatCannotBeHadClosesNothing) {
  Opening opening([](const auto&) { return kRoom / 4; });
  EXPECT_NE(opening.ask("full").document, nullptr);
  int checks = 0;
  opening.check = [&](const Spec&) {
    ++checks;
    throw ApiError(400, "it learns from the prefill");
  };
  for (int i = 0; i < 3; ++i) {
    const Heard heard = opening.ask("h2o:window=16");
    ASSERT_TRUE(heard.error.has_value());
    EXPECT_EQ(heard.error->status, 400);
    EXPECT_TRUE(opening.is_open());
  }
  EXPECT_EQ(opening.loads, 1);
  EXPECT_EQ(checks, 1);
}

}  // namespace
}  // namespace lode::serve
