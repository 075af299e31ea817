// SPDX-License-Identifier: Apache-2.0
// The loop from a prompt to an answer.
#include <algorithm>
#include <chrono>

#include "engine/context.h"
#include "engine/next_token.h"
#include "engine/row_order.h"
#include "lodestone/error.h"
#include "model/sampler.h"

namespace lode {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Hooks that add the sharp attention of queries from `first_query` on to `sources`.
ForwardHooks source_hooks(const Context::Impl& context, Position first_query, SourceMass& sources) {
  const auto threshold = static_cast<float>(sources.sharpness * context.config.group());
  std::vector<RowOrder> orders;  // [L, Hkv]
  for (int layer = 0; layer < context.config.layers; ++layer)
    for (int head = 0; head < context.config.kv_heads; ++head)
      orders.push_back(row_order(context, layer, head));
  return {.attended = {},
          .mass = [&sources, first_query, threshold, orders = std::move(orders)](
                      const LayerGeometry& geometry, const AttentionMass& m) {
            if (m.query < first_query) return;
            const RowOrder& order =
                orders[static_cast<std::size_t>(geometry.layer * geometry.kv_heads + m.kv_head)];
            for (std::size_t i = 0; i < m.rows.size(); ++i) {
              if (m.mass[i] >= threshold)
                sources.mass[static_cast<std::size_t>(order.token_of(m.rows[i]))] += m.mass[i];
            }
          }};
}

/// Puts the context's hooks back when a generation that set its own ends, however it ends.
class HooksScope {
 public:
  explicit HooksScope(Context::Impl& context) : context_(context), before_(context.hooks) {}
  ~HooksScope() { context_.hooks = before_; }

 private:
  Context::Impl& context_;
  const ForwardHooks* before_;
};

}  // namespace

void Context::Impl::decode(MethodId method, const GenerateOptions& wanted, Generation& result) {
  Sampler sampler(wanted.sampling);
  TextCollector text(model->tokenizer(), wanted);
  const auto decode_start = std::chrono::steady_clock::now();
  while (static_cast<std::int64_t>(result.tokens.size()) < wanted.max_new_tokens) {
    const TokenId next = next_token(*model, sampler, logits);
    result.tokens.push_back(next);
    result.stopped = (wanted.stop_at_eos && is_eos(config, next)) || text.push(next);
    const bool room = tokens() < options.max_tokens;
    if (result.stopped || !room || static_cast<std::int64_t>(result.tokens.size()) == wanted.max_new_tokens)
      break;
    result.work += run({&next, 1}, method, Phase::generation, LogitRows::last_of_each);
  }
  result.decode_seconds = seconds_since(decode_start);
  result.text = text.finish();
}

ReadPrompt::ReadPrompt(Context::Impl& context, std::span<const TokenId> prompt) : context_(context) {
  if (prompt.empty()) throw InputError("expected a question of at least one token, found none");
  const auto start = std::chrono::steady_clock::now();
  context_.run(prompt, kDense, Phase::question, LogitRows::last_of_each);
  seconds_ = seconds_since(start);
  end_ = context_.tokens();
  logits_ = context_.logits;
}

Generation ReadPrompt::answer(MethodId method, const GenerateOptions& options) {
  if (context_.tokens() > end_) context_.roll_back(end_);
  context_.audit.forget();
  context_.logits = logits_;
  Generation result = {.prompt_seconds = seconds_};
  context_.decode(method, options, result);
  if (!context_.audit.fallen_back().empty()) result.work.notice = context_.audit.notice();
  return result;
}

Generation Context::generate(std::span<const TokenId> prompt, MethodId method, const GenerateOptions& options,
                             SourceMass* sources) {
  Impl& c = *impl_;
  if (prompt.empty()) throw InputError("expected a question of at least one token, found none");
  c.require_room(static_cast<std::int64_t>(prompt.size()));
  if (method != kDense && !c.methods.at(static_cast<std::size_t>(method)).built) build_indexes();
  c.audit.forget();
  Generation result;
  HooksScope scope(c);
  ForwardHooks own_hooks;
  const auto start = std::chrono::steady_clock::now();

  // The prompt: a dense part, then the part that attends by the method. The last token goes alone when
  // sources are wanted, so that the costly mass is computed for the answer only, unless the prompt's tokens
  // choose their keys together.
  const auto length = static_cast<std::int64_t>(prompt.size());
  const std::int64_t sparse =
      options.sparse_prompt_tokens < 0 ? length : std::min(length, options.sparse_prompt_tokens);
  const auto dense_part = prompt.first(static_cast<std::size_t>(length - sparse));
  auto sparse_part = prompt.last(static_cast<std::size_t>(sparse));
  if (!dense_part.empty()) c.run(dense_part, kDense, Phase::question, LogitRows::last_of_each);
  if (sources != nullptr) {
    sources->mass.assign(static_cast<std::size_t>(c.options.max_tokens), 0.0);
    own_hooks = source_hooks(c, static_cast<Position>(c.tokens() + sparse - 1), *sources);
    if (sparse > 1 && c.joint_query_tokens(method) == 1) {
      result.work +=
          c.run(sparse_part.first(sparse_part.size() - 1), method, Phase::question, LogitRows::none);
      sparse_part = sparse_part.last(1);
    }
    c.hooks = &own_hooks;
  }
  if (!sparse_part.empty())
    result.work += c.run(sparse_part, method, Phase::question, LogitRows::last_of_each);
  result.prompt_seconds = seconds_since(start);

  c.decode(method, options, result);
  if (!c.audit.fallen_back().empty()) result.work.notice = c.audit.notice();  // all of them, not the first
  if (sources != nullptr) sources->mass.resize(static_cast<std::size_t>(c.tokens()));
  return result;
}

}  // namespace lode
