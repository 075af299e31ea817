// SPDX-License-Identifier: Apache-2.0
// What is answered or read outside of a scheduler: at the end of a context that no document shares, and prompts that
// are read ahead.
#include "engine/running_answer.h"
#include "gpu/layers/states_of.h"
#include "lodestone/error.h"

namespace lode {

namespace {

void run_to_end(RunningAnswer& answering, const std::function<void(BatchRow&)>& run) {
  for (bool done = answering.complete(); !done;) {
    BatchRow row = answering.next();
    run(row);
    done = answering.take(row);
  }
}

}  // namespace

Answer answer_in_place(Context::Impl& context, MethodId method, Request request) {
  if (request.prompt.empty()) throw InputError("expected a question of at least one token, found none");
  if (request.exact)
    throw InputError(
        "an exact answer: expected a document on the CPU, whose branches can draft, found a context on " +
        std::string(name_of(context.options.device)));
  if (request.read == nullptr) context.require_room(std::ssize(request.prompt));
  request.attention =
      method == kDense ? parse_spec("full") : context.specs.at(static_cast<std::size_t>(method));
  RunningAnswer answering(std::move(request), context, method);
  run_to_end(answering, run_in_place);
  return answering.finish(answering.ending());
}

std::shared_ptr<const ReadPrompt> read_prompt(std::shared_ptr<const Document> document,
                                              std::vector<TokenId> prompt) {
  BatchRunner runner(document->model());
  RunningAnswer reading({.document = std::move(document),
                         .prompt = std::move(prompt),
                         .attention = parse_spec("full"),
                         .options = {.max_new_tokens = 0}},
                        kPromptChunk);
  run_to_end(reading, [&](BatchRow& row) { runner.run({&row, 1}); });
  return std::make_shared<ReadPrompt>(reading.release());
}

std::shared_ptr<const ReadPrompt> read_prompt(Context::Impl& context, std::vector<TokenId> prompt) {
  context.require_room(std::ssize(prompt));
  RunningAnswer reading(
      {.document = {}, .prompt = std::move(prompt), .attention = {}, .options = {.max_new_tokens = 0}},
      context, kDense);
  run_to_end(reading, run_in_place);
  keep_states(context.gpu.get(), context.kv.recurrent());
  return std::make_shared<ReadPrompt>(reading.release());
}

Generation Context::generate(std::span<const TokenId> prompt, MethodId method, const GenerateOptions& options,
                             SourceMass* sources) {
  if (method != kDense && !impl_->methods.at(static_cast<std::size_t>(method)).built) build_indexes();
  Request request = {.document = {},
                     .prompt = {prompt.begin(), prompt.end()},
                     .attention = {},
                     .options = options,
                     .want_sources = sources != nullptr,
                     .audit = impl_->options.audit,
                     .audit_limit = impl_->audit.limit()};
  if (sources != nullptr) request.sharpness = sources->sharpness;
  Answer answer = answer_in_place(*impl_, method, std::move(request));
  if (sources != nullptr) *sources = std::move(answer.sources);
  return std::move(answer.generation);
}

}  // namespace lode
