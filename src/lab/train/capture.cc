// SPDX-License-Identifier: Apache-2.0
#include "lab/train/capture.h"

#include <algorithm>

#include "base/cancel.h"
#include "engine/context.h"
#include "lodestone/tokenizer.h"

namespace lode {

/// Stands where a method would listen to a layer, and selects nothing.
class Capture::Listener final : public Selector {
 public:
  Listener(int layer, const Sink* const& sink) : layer_(layer), sink_(sink) {}
  bool wants_writes() const override { return true; }
  void on_write(const KvWrite& chunk) override {
    if (sink_ != nullptr && *sink_) (*sink_)(layer_, chunk);
  }
  void build(std::int32_t, KvLayer) override {}
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void select(std::span<const QueryBlock>, Selection&) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t, SectionReader&, KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  int layer_;
  const Sink* const& sink_;
};

std::vector<Prompt> cut_into_prompts(const Model& model, const std::string& source, std::string_view text,
                                     std::int64_t tokens) {
  const std::vector<TokenId> plain = model.tokenizer().encode(text, Tokenizer::Bos::none);
  const std::span<const TokenId> front = model.tokenizer().prefix();
  const std::int64_t step = std::max<std::int64_t>(1, tokens - std::ssize(front));
  std::vector<Prompt> prompts;
  for (std::int64_t at = 0; at < std::ssize(plain); at += step) {
    const std::int64_t end = std::min(std::ssize(plain), at + step);
    if (end - at < step / 2 && !prompts.empty()) break;
    prompts.push_back({source, {front.begin(), front.end()}});
    prompts.back().tokens.insert(prompts.back().tokens.end(), plain.begin() + at, plain.begin() + end);
  }
  return prompts;
}

Capture::Capture(std::shared_ptr<const Model> model, const ContextOptions& options)
    : context_(std::move(model), options) {
  Context::Impl& context = context_.impl();
  for (std::size_t layer = 0; layer < context.listeners.size(); ++layer) {
    listeners_.push_back(std::make_unique<Listener>(static_cast<int>(layer), sink_));
    context.listeners[layer].push_back(listeners_.back().get());
  }
}

Capture::~Capture() = default;

void Capture::read(const Prompt& prompt, const Sink& sink,
                   const std::function<void(std::int64_t)>& progress) {
  context_.roll_back(0);
  sink_ = &sink;
  struct Reset {
    const Sink*& sink;
    ~Reset() { sink = nullptr; }
  } reset{sink_};
  context_.prefill(prompt.tokens, progress);
}

const KvStore& Capture::kv() const {
  return context_.impl().kv;
}

const Rope& Capture::rope() const {
  return context_.impl().rope;
}

}  // namespace lode
