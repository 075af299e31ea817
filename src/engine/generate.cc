// SPDX-License-Identifier: Apache-2.0
// The loop from a prompt to an answer.
#include <algorithm>
#include <chrono>
#include <limits>

#include "engine/context.h"
#include "engine/row_order.h"
#include "lodestone/error.h"
#include "model/sampler.h"

namespace lode {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Collects the answer's text, finds stop strings that span tokens, and releases text only once it cannot be
/// part of one.
class TextCollector {
 public:
  TextCollector(const Tokenizer& tokenizer, const GenerateOptions& options)
      : decoder_(tokenizer), options_(options) {}

  /// True when the text now holds a stop string; it is cut there.
  bool push(TokenId token) { return take(decoder_.push(token)); }

  /// With what is there of a character that the answer ends inside of.
  std::string finish() {
    if (!cut_) take(decoder_.finish());
    release(text_.size());
    return std::move(text_);
  }

 private:
  bool take(const std::string& piece) {
    text_ += piece;
    std::size_t cut = std::string::npos;
    for (const std::string& stop : options_.stop) {
      if (!stop.empty()) cut = std::min(cut, text_.find(stop));
    }
    if (cut != std::string::npos) {
      text_.resize(cut);
      return cut_ = true;
    }
    release(text_.size() - held());
    return false;
  }

  /// Bytes at the end that may be the beginning of a stop string.
  std::size_t held() const {
    std::size_t longest = 0;
    for (const std::string& stop : options_.stop) {
      for (std::size_t n = std::min(stop.size(), text_.size()); n > longest; --n) {
        if (text_.compare(text_.size() - n, n, stop, 0, n) == 0) longest = n;
      }
    }
    return longest;
  }

  void release(std::size_t end) {
    if (options_.on_text && end > released_)
      options_.on_text(std::string_view(text_).substr(released_, end - released_));
    released_ = std::max(released_, end);
  }

  StreamDecoder decoder_;
  const GenerateOptions& options_;
  std::string text_;
  std::size_t released_ = 0;
  bool cut_ = false;  ///< at a stop string
};

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
  const auto is_eos = [&](TokenId id) {
    return std::find(config.eos.begin(), config.eos.end(), id) != config.eos.end();
  };
  // A vocabulary may be padded behind the tokenizer's ids, or have gaps: there is no text for such.
  const auto choices = static_cast<std::size_t>(std::min(config.vocab, model->tokenizer().vocab()));
  const auto next_token = [&] {
    for (const TokenId gap : model->tokenizer().gaps())
      logits[static_cast<std::size_t>(gap)] = -std::numeric_limits<float>::infinity();
    return sampler.next(std::span(logits).first(choices));
  };
  while (static_cast<std::int64_t>(result.tokens.size()) < wanted.max_new_tokens) {
    const TokenId next = next_token();
    result.tokens.push_back(next);
    result.stopped = (wanted.stop_at_eos && is_eos(next)) || text.push(next);
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
    if (sparse > 1 && c.question_stretch(method) == 1) {
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
