// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <numbers>

#include "base/cancel.h"
#include "base/hash.h"
#include "base/threads.h"
#include "engine/context.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "kernels/sgemm.h"
#include "kv/store.h"
#include "lab/train/hash/start.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kStartTokens = 2048;  // that the linear start is made from, about
constexpr std::int64_t kKeyBlock = 4096;     // keys widened and scored at a time

/// Queries of the tokens that one step takes, of one layer.
struct StepQueries {
  std::vector<Position> positions;       // [tokens], rising
  std::vector<float> roped, as_trained;  // [tokens, Hq, d]
};

/// Some of [begin, end), rising, all of them when they are no more than `count`.
std::vector<Position> sample(Position begin, Position end, std::int64_t count, Rng& rng) {
  const std::int64_t n = end - begin;
  std::vector<Position> rows;
  if (count >= n) {
    for (Position p = begin; p < end; ++p) rows.push_back(p);
    return rows;
  }
  while (std::ssize(rows) < count) {
    while (std::ssize(rows) < count)
      rows.push_back(begin + static_cast<Position>(rng.below(static_cast<std::uint64_t>(n))));
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  }
  return rows;
}

/// Turns the first d numbers of each row by as many positions as `angles` say.
void turn(std::span<float> rows /*[n, stride]*/, std::int64_t stride,
          std::span<const float> angles /*[d/2] radians*/) {
  const std::size_t half = angles.size();
  std::vector<float> turned(2 * half);  // cosines, then sines
  for (std::size_t i = 0; i < half; ++i)
    turned[i] = std::cos(angles[i]), turned[half + i] = std::sin(angles[i]);
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(stride)) {
    float* const x = rows.data() + at;
    for (std::size_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[half + i];
      x[i] = a * turned[i] - b * turned[half + i];
      x[half + i] = b * turned[i] + a * turned[half + i];
    }
  }
}

class HashTrainer {
 public:
  HashTrainer(const ModelConfig& config, const HashSettings& settings, Capture& capture, ThreadPool& pool);

  std::int64_t steps_of(const Prompt& prompt, std::int64_t chunk) const;
  void start(const Prompt& prompt);
  void start_from(const std::string& model_fingerprint);
  void learn(const Prompt& prompt, std::uint64_t number, std::int64_t all_steps,
             const std::function<void(std::int64_t)>& progress);

  void put(Checkpoint& checkpoint);
  void get(const Checkpoint& checkpoint, const std::string& where);
  HashResult result() const;

 private:
  /// Of one KV head in one layer.
  struct Learner {
    HashHead head;
    std::vector<float> log_norms;  // [keys] log |v| of the running prompt
    double loss = 0;               // running mean
  };
  /// The first position whose query has enough far keys to learn from.
  std::int64_t first_query() const {
    return settings_.dense.sink + 2 * settings_.top + settings_.dense.window;
  }
  bool by_prompt() const { return settings_.draw == HashSettings::Draw::prompt; }
  Learner& learner(std::int64_t layer, std::int64_t kv_head) {
    return learners_[static_cast<std::size_t>(layer * config_.kv_heads + kv_head)];
  }
  int group() const { return config_.query_heads / config_.kv_heads; }

  void draw(Position begin, Position end, std::uint64_t prompt);
  void take_queries(int layer, const KvWrite& chunk);
  void take_steps(Position keys_end, std::uint64_t prompt, std::int64_t all_steps);
  HashExamples examples(std::int64_t layer, std::int64_t kv_head, StepQueries queries, Position keys_end,
                        Rng& rng);
  std::vector<float> scores(const KvRows& kv, const Learner& own, std::int64_t kv_head,
                            const StepQueries& queries, Position keys_end) const;
  std::vector<float> angles_of(std::int64_t positions) const;
  void shift(HashExamples& seen, std::int64_t positions) const;

  const ModelConfig& config_;
  const HashSettings& settings_;
  Capture& capture_;
  ThreadPool& pool_;
  std::deque<Learner> learners_;                   // [L, Hkv]
  std::vector<std::vector<Position>> drawn_;       // [steps][tokens] of the running prompt or chunk, rising
  std::vector<std::vector<StepQueries>> queries_;  // [steps][L] of those
  std::int64_t steps_done_ = 0, tokens_ = 0;
};

HashTrainer::HashTrainer(const ModelConfig& config, const HashSettings& settings, Capture& capture,
                         ThreadPool& pool)
    : config_(config), settings_(settings), capture_(capture), pool_(pool) {
  expect_like_layers(config, "train hash");
  for (int layer = 0; layer < config.layers; ++layer) {
    for (int head = 0; head < config.kv_heads; ++head) {
      learners_.push_back({HashHead({.group = group(),
                                     .head_dim = config.head_dim,
                                     .scheme = settings.scheme,
                                     .widths = settings.widths,
                                     .loss = settings.loss,
                                     .adam = {.rate = settings.rate},
                                     .seed = hash_seed(settings.seed, layer, head)}),
                           {},
                           0.0});
    }
  }
  queries_.assign(static_cast<std::size_t>(settings.steps),
                  std::vector<StepQueries>(static_cast<std::size_t>(config.layers)));
}

std::int64_t HashTrainer::steps_of(const Prompt& prompt, std::int64_t chunk) const {
  const std::int64_t tokens = std::ssize(prompt.tokens);
  if (by_prompt()) return tokens > first_query() ? settings_.steps : 0;
  std::int64_t steps = 0;
  for (std::int64_t begin = 0; begin < tokens; begin += chunk)
    steps += begin >= first_query() ? settings_.steps : 0;
  return steps;
}

/// Reads the prompt for the moments of its keys and queries, and sets all functions from them.
void HashTrainer::start(const Prompt& prompt) {
  const std::int64_t d = config_.head_dim, stride = std::ssize(prompt.tokens) / kStartTokens + 1;
  const Moments none(d);
  std::vector<Moments> keys(learners_.size(), none), queries(learners_.size(), none);
  capture_.read(prompt, [&](int layer, const KvWrite& chunk) {
    const auto& q = settings_.scheme.roped ? chunk.q : chunk.q_unrotated;
    const auto& k = settings_.scheme.roped ? chunk.k : chunk.k_unrotated;
    pool_.for_each(config_.kv_heads, [&](std::int64_t head, int) {
      const auto at = static_cast<std::size_t>(layer * config_.kv_heads + head);
      const auto row = [&](std::span<const float> all, std::int64_t index) {
        return all.subspan(static_cast<std::size_t>(index * d), static_cast<std::size_t>(d));
      };
      for (std::int64_t t = 0; t < chunk.tokens; t += stride) {
        keys[at].add(row(k, t * config_.kv_heads + head));
        for (int g = 0; g < group(); ++g)
          queries[at].add(row(q, t * config_.query_heads + head * group() + g));
      }
    });
  });
  const std::int64_t bits = settings_.scheme.bits, inputs = settings_.scheme.key_inputs(config_.head_dim);
  pool_.for_each(std::ssize(learners_), [&](std::int64_t item, int) {
    const auto at = static_cast<std::size_t>(item);
    Rng rng(hash_seed(settings_.seed, 1, item));
    LinearStart linear = linear_start(keys[at], queries[at], bits, settings_.gamma, rng);
    std::vector<float> wide(static_cast<std::size_t>(bits * inputs), 0.0f);  // [bits, inputs], 0 by values
    for (std::int64_t b = 0; b < bits; ++b)
      std::copy_n(linear.keys.data() + b * d, d, wide.data() + b * inputs);
    std::vector<float> centre = linear.centre;
    centre.resize(static_cast<std::size_t>(inputs), 0.0f);
    const std::vector<float> origin(static_cast<std::size_t>(d), 0.0f);
    for (HashFunction& f : learners_[at].head.keys()) f.start_linear({wide.data(), bits, inputs}, centre);
    for (HashFunction& f : learners_[at].head.queries())
      f.start_linear({linear.queries.data(), bits, d}, origin);
  });
}

/// Sets all functions from the file that the settings name.
void HashTrainer::start_from(const std::string& model_fingerprint) {
  for (int layer = 0; layer < config_.layers; ++layer) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = config_.query_heads,
                                    .kv_heads = config_.kv_heads,
                                    .head_dim = config_.head_dim};
    const HashWeights weights = read_hash_weights(settings_.from, geometry, model_fingerprint);
    bool fits = weights.scheme.roped == settings_.scheme.roped &&
                weights.scheme.values == settings_.scheme.values &&
                weights.scheme.activation == settings_.scheme.activation;
    auto query = weights.query.begin(), key = weights.key.begin();
    for (int head = 0; head < config_.kv_heads; ++head) {
      for (HashFunction& f : learner(layer, head).head.queries()) fits = fits && f.start_trained(*query++);
      for (HashFunction& f : learner(layer, head).head.keys())
        fits = fits && key != weights.key.end() && f.start_trained(*key++);
    }
    if (fits && key == weights.key.end()) continue;
    throw InputError(
        settings_.from.string() +
        ": expected functions as the flags name them (--bits, --widths, --keys, --rope, --values, "
        "--activation), found others");
  }
}

void HashTrainer::learn(const Prompt& prompt, std::uint64_t number, std::int64_t all_steps,
                        const std::function<void(std::int64_t)>& progress) {
  for (Learner& own : learners_) own.log_norms.clear();
  const auto end = static_cast<Position>(prompt.tokens.size()), first = static_cast<Position>(first_query());
  if (by_prompt() && first < end) draw(first, end, number);
  capture_.read(
      prompt,
      [&](int layer, const KvWrite& chunk) {
        if (!by_prompt() && chunk.begin < first) return;
        if (!by_prompt() && layer == 0)
          draw(chunk.begin, static_cast<Position>(chunk.begin + chunk.tokens), number);
        take_queries(layer, chunk);
        if (!by_prompt() && layer + 1 == config_.layers) take_steps(chunk.begin, number, all_steps);
      },
      progress);
  if (by_prompt() && first < end) take_steps(end, number, all_steps);
  tokens_ += std::ssize(prompt.tokens);
}

/// The tokens of each step, the same for all layers, of [begin, end).
void HashTrainer::draw(Position begin, Position end, std::uint64_t prompt) {
  const auto late_begin = std::max(begin, static_cast<Position>(end - settings_.late_tokens));
  const auto late =
      static_cast<std::int64_t>(std::llround(settings_.late * static_cast<double>(settings_.queries)));
  drawn_.clear();
  for (std::int64_t step = 0; step < settings_.steps; ++step) {
    Rng rng(hash_seed(settings_.seed, 2, prompt, begin, step));
    std::vector<Position> rows = sample(begin, end, settings_.queries - late, rng);
    const std::vector<Position> last = sample(late_begin, end, late, rng);
    rows.insert(rows.end(), last.begin(), last.end());
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    drawn_.push_back(std::move(rows));
  }
  for (std::vector<StepQueries>& layers : queries_) layers.assign(layers.size(), {});
}

void HashTrainer::take_queries(int layer, const KvWrite& chunk) {
  const auto row = static_cast<std::size_t>(config_.query_heads * config_.head_dim);
  const auto& as_trained = settings_.scheme.roped ? chunk.q : chunk.q_unrotated;
  for (std::size_t step = 0; step < drawn_.size(); ++step) {
    StepQueries& own = queries_[step][static_cast<std::size_t>(layer)];
    for (const Position p : drawn_[step]) {
      if (p < chunk.begin || p >= chunk.begin + chunk.tokens) continue;
      const std::size_t at = static_cast<std::size_t>(p - chunk.begin) * row;
      const auto take = [&](std::span<const float> all, std::vector<float>& into) {
        into.insert(into.end(), all.begin() + static_cast<std::ptrdiff_t>(at),
                    all.begin() + static_cast<std::ptrdiff_t>(at + row));
      };
      own.positions.push_back(p);
      take(chunk.q, own.roped);
      take(as_trained, own.as_trained);
    }
  }
}

void HashTrainer::take_steps(Position keys_end, std::uint64_t prompt, std::int64_t all_steps) {
  const std::int64_t heads = config_.kv_heads;
  const double weight = settings_.alpha + settings_.beta * static_cast<double>(keys_end);
  for (std::size_t step = 0; step < queries_.size(); ++step) {
    const double rate = cosine_decay(steps_done_, all_steps, 0.03);
    pool_.for_each(std::ssize(learners_), [&](std::int64_t item, int) {
      check_cancel();
      const std::int64_t layer = item / heads, head = item % heads;
      Learner& own = learner(layer, head);
      Rng rng(hash_seed(settings_.seed, 3, prompt, keys_end, step, item));
      const HashExamples seen =
          examples(layer, head, queries_[step][static_cast<std::size_t>(layer)], keys_end, rng);
      const double loss = own.head.step(seen, weight, rate);
      const double share = std::max(1.0 / static_cast<double>(steps_done_ + 1),
                                    10.0 / static_cast<double>(std::max<std::int64_t>(10, all_steps)));
      own.loss += share * (loss - own.loss);
    });
    ++steps_done_;
  }
}

/// Logits of [G][tokens][keys of [sink, keys_end)], with log |v| added for targets by value.
std::vector<float> HashTrainer::scores(const KvRows& kv, const Learner& own, std::int64_t kv_head,
                                       const StepQueries& queries, Position keys_end) const {
  const std::int64_t d = config_.head_dim, sink = settings_.dense.sink, n = keys_end - sink,
                     tokens = std::ssize(queries.positions), rows = group() * tokens;
  std::vector<float> q(static_cast<std::size_t>(rows * d));  // [G, tokens, d], scaled
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int g = 0; g < group(); ++g) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* from = queries.roped.data() + (t * config_.query_heads + kv_head * group() + g) * d;
      for (std::int64_t i = 0; i < d; ++i)
        q[static_cast<std::size_t>((g * tokens + t) * d + i)] = scale * from[i];
    }
  }
  std::vector<float> scores(static_cast<std::size_t>(rows * n)),
      keys(static_cast<std::size_t>(kKeyBlock * d));
  for (std::int64_t first = 0; first < n; first += kKeyBlock) {
    const std::int64_t count = std::min(kKeyBlock, n - first);
    for (std::int64_t i = 0; i < count; ++i) {
      read_stored_keys({&kv, 1}, static_cast<Position>(sink + first + i), nullptr,
                       std::span(keys).subspan(static_cast<std::size_t>(i * d), static_cast<std::size_t>(d)));
    }
    sgemm(rows, count, d, {q.data(), d}, {keys.data(), d, true}, 0.0f, scores.data() + first, n);
  }
  if (settings_.by_value) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < n; ++i)
        scores[static_cast<std::size_t>(row * n + i)] += own.log_norms[static_cast<std::size_t>(i)];
    }
  }
  return scores;
}

HashExamples HashTrainer::examples(std::int64_t layer, std::int64_t kv_head, StepQueries queries,
                                   Position keys_end, Rng& rng) {
  const auto up_to = [&](std::int64_t most) {
    return static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(most) + 1));
  };
  std::int64_t shifted = 0;  // by how much the keys are turned
  if (settings_.further > 0) {
    shifted = up_to(settings_.shift);
    const std::int64_t further =
        rng.uniform() < settings_.apart ? up_to(std::min(settings_.further, shifted)) : 0;
    shifted -= further;
    const std::vector<float> angles = angles_of(further);
    turn(queries.roped, config_.head_dim, angles);
    if (settings_.scheme.roped) turn(queries.as_trained, config_.head_dim, angles);
  }
  const KvRows& kv = capture_.kv().layer(static_cast<int>(layer)).heads[static_cast<std::size_t>(kv_head)];
  Learner& own = learner(layer, kv_head);
  const auto sink = static_cast<Position>(settings_.dense.sink);
  const std::int64_t d = config_.head_dim, n = keys_end - sink, tokens = std::ssize(queries.positions);
  std::vector<float> value(static_cast<std::size_t>(d));
  while (std::ssize(own.log_norms) < n) {
    read_stored_values({&kv, 1}, static_cast<Position>(sink + std::ssize(own.log_norms)), value);
    own.log_norms.push_back(0.5f * std::log(std::max(kernels().dot(value.data(), value.data(), d), 1e-30f)));
  }
  const std::vector<float> all = scores(kv, own, kv_head, queries, keys_end);
  const auto far_end = [&](std::int64_t t) {
    return std::min<std::int64_t>(
        keys_end, queries.positions[static_cast<std::size_t>(t)] + 1 - settings_.dense.window);
  };
  std::vector<std::vector<Position>> pivotal(static_cast<std::size_t>(group() * tokens));
  std::vector<Position> rows = sample(sink, keys_end, settings_.others > 0 ? settings_.others : n, rng);
  for (std::size_t i = 0; i < pivotal.size(); ++i) {
    const std::int64_t far = far_end(static_cast<std::int64_t>(i) % tokens) - sink;
    top_k(std::span(all).subspan(i * static_cast<std::size_t>(n), static_cast<std::size_t>(far)),
          settings_.top, sink, pivotal[i]);
    rows.insert(rows.end(), pivotal[i].begin(), pivotal[i].end());
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());

  HashExamples seen = {
      .tokens = tokens, .keys = std::ssize(rows), .queries = {}, .key_inputs = {}, .labels = {}};
  const std::int64_t inputs = settings_.scheme.key_inputs(config_.head_dim);
  seen.key_inputs.resize(static_cast<std::size_t>(seen.keys * inputs));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    read_key_inputs(settings_.scheme, {&kv, 1}, rows[i], &capture_.rope(),
                    seen.key_inputs.data() + static_cast<std::int64_t>(i) * inputs, inputs);
  }
  for (int g = 0; g < group(); ++g) {
    std::vector<float>& q = seen.queries.emplace_back();
    std::vector<std::uint8_t>& labels = seen.labels.emplace_back();
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* from = queries.as_trained.data() + (t * config_.query_heads + kv_head * group() + g) * d;
      q.insert(q.end(), from, from + d);
      const std::vector<Position>& own_pivotal = pivotal[static_cast<std::size_t>(g * tokens + t)];
      for (const Position row : rows) {
        labels.push_back(row >= far_end(t) ? HashExamples::kLeftOut
                         : std::binary_search(own_pivotal.begin(), own_pivotal.end(), row)
                             ? HashExamples::kPivotal
                             : HashExamples::kOther);
      }
    }
  }
  if (settings_.further == 0 && settings_.shift > 0) shifted = up_to(settings_.shift);
  if (settings_.scheme.roped && shifted > 0) shift(seen, shifted);
  return seen;
}

std::vector<float> HashTrainer::angles_of(std::int64_t positions) const {
  std::vector<float> angles;  // [d/2]
  for (const float frequency : capture_.rope().frequencies())
    angles.push_back(
        static_cast<float>(std::fmod(static_cast<double>(positions) * frequency, 2.0 * std::numbers::pi)));
  return angles;
}

void HashTrainer::shift(HashExamples& seen, std::int64_t positions) const {
  const std::vector<float> angles = angles_of(positions);
  turn(seen.key_inputs, settings_.scheme.key_inputs(config_.head_dim), angles);
  for (std::vector<float>& queries : seen.queries) turn(queries, config_.head_dim, angles);
}

std::string prefix_of(std::size_t learner) {
  return fmt::format("head.{}.", learner);
}

void HashTrainer::put(Checkpoint& checkpoint) {
  checkpoint.arrays["losses"].clear();
  for (std::size_t i = 0; i < learners_.size(); ++i) {
    learners_[i].head.put(checkpoint, prefix_of(i));
    checkpoint.arrays["losses"].push_back(static_cast<float>(learners_[i].loss));
  }
  checkpoint.notes["steps_done"] = std::to_string(steps_done_);
  checkpoint.notes["tokens"] = std::to_string(tokens_);
}

void HashTrainer::get(const Checkpoint& checkpoint, const std::string& where) {
  const auto losses = checkpoint.arrays.find("losses");
  if (losses == checkpoint.arrays.end() || losses->second.size() != learners_.size())
    throw InputError(where + ": expected a loss for each head, found otherwise");
  for (std::size_t i = 0; i < learners_.size(); ++i) {
    learners_[i].head.get(checkpoint, prefix_of(i), where);
    learners_[i].loss = losses->second[i];
  }
  steps_done_ = checkpoint.number("steps_done", where);
  tokens_ = checkpoint.number("tokens", where);
}

HashResult HashTrainer::result() const {
  HashResult result = {.layers = {}, .heads = {}, .steps = steps_done_, .tokens = tokens_};
  for (std::size_t i = 0; i < learners_.size(); ++i) {
    const int layer = static_cast<int>(i) / config_.kv_heads, head = static_cast<int>(i) % config_.kv_heads;
    if (head == 0) result.layers.push_back({.scheme = settings_.scheme, .query = {}, .key = {}});
    HashWeights& weights = result.layers.back();
    for (const HashFunction& f : learners_[i].head.queries())
      weights.query.push_back(f.finished(settings_.type));
    for (const HashFunction& f : learners_[i].head.keys()) weights.key.push_back(f.finished(settings_.type));
    result.heads.push_back({.layer = layer, .kv_head = head, .loss = learners_[i].loss});
  }
  return result;
}

/// Changes with the model, the settings and every token.
std::string run_of(const Model& model, const HashSettings& settings, const std::vector<Prompt>& prompts,
                   const ContextOptions& options) {
  Hasher hasher;
  const std::string text = fmt::format("{} {} {} {}", model.fingerprint(), settings.json().dump(),
                                       options.chunk, name_of(options.kv_type));
  hasher.add(std::as_bytes(std::span(text)));
  // Keys and queries of a GPU have other last bits; without its name, checkpoints of before stay good.
  if (options.device == Device::cuda) hasher.add(std::as_bytes(std::span(std::string_view("cuda"))));
  if (const double factor = options.rope_factor.value_or(1.0); factor != 1.0)
    hasher.add(std::as_bytes(std::span(&factor, 1)));
  for (const Prompt& prompt : prompts) hasher.add(std::as_bytes(std::span(prompt.tokens)));
  return hasher.hex();
}

}  // namespace

Json HashSettings::json() const {
  constexpr std::array<const char*, 3> kValues = {"off", "norm", "vector"};
  return {{"bits", scheme.bits},
          {"rope", scheme.roped ? "on" : "off"},
          {"keys", scheme.per_query_head ? "query-head" : "kv-head"},
          {"values", kValues[static_cast<std::size_t>(scheme.values)]},
          {"activation", scheme.activation == HashNet::Activation::silu ? "silu" : "relu"},
          {"widths", widths},
          {"loss", loss == PivotalLoss::bce ? "bce" : "softmax"},
          {"target", by_value ? "value" : "logits"},
          {"top", top},
          {"sink", dense.sink},
          {"window", dense.window},
          {"alpha", alpha},
          {"beta", beta},
          {"draw", draw == Draw::prompt ? "prompt" : "chunk"},
          {"steps", steps},
          {"queries", queries},
          {"late", late},
          {"late_tokens", late_tokens},
          {"shift", shift},
          {"further", further},
          {"apart", apart},
          {"from", from.string()},
          {"others", others},
          {"rate", rate},
          {"linear_start", linear_start},
          {"gamma", gamma},
          {"type", std::string(name_of(type))},
          {"seed", seed}};
}

HashResult train_hash(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                      const HashSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode mode) {
  LODE_ASSERT(options.chunk > 0);
  Capture capture(model, options);
  HashTrainer trainer(model->config(), settings, capture, model->pool());
  std::int64_t steps = 0, tokens = 0, read = 0;
  for (const Prompt& prompt : prompts) {
    steps += trainer.steps_of(prompt, options.chunk);
    tokens += std::ssize(prompt.tokens);
  }
  if (steps == 0) {
    throw InputError(
        fmt::format("expected a text of more than {} tokens, so that queries have keys beyond sink "
                    "and window, found {} in all",
                    settings.dense.sink + settings.dense.window + 2 * settings.top, tokens));
  }
  const std::string run = run_of(*model, settings, prompts, options);
  std::int64_t done = 0;
  if (!checkpoint.empty() && std::filesystem::exists(checkpoint)) {
    const Checkpoint state = Checkpoint::read(checkpoint);
    const auto found = state.notes.find("run");
    if (found == state.notes.end() || found->second != run) {
      throw InputError(checkpoint.string() +
                       ": expected the checkpoint of this model, these settings and texts, found another's: "
                       "remove it to start anew");
    }
    trainer.get(state, checkpoint.string());
    done = std::min(state.number("prompts_done", checkpoint.string()), std::ssize(prompts));
  } else if (!settings.from.empty()) {
    trainer.start_from(model->fingerprint());
  } else if (settings.linear_start) {
    trainer.start(prompts.front());
  }
  Progress progress("train hash", tokens, "tokens", mode);
  for (std::int64_t i = 0; i < std::ssize(prompts); ++i) {
    const Prompt& prompt = prompts[static_cast<std::size_t>(i)];
    if (i >= done) {
      trainer.learn(prompt, static_cast<std::uint64_t>(i), steps,
                    [&](std::int64_t at) { progress.at(read + at); });
      if (!checkpoint.empty()) {
        Checkpoint state;
        trainer.put(state);
        state.notes["run"] = run;
        state.notes["prompts_done"] = std::to_string(i + 1);
        state.write(checkpoint);
      }
    }
    if (i < done) progress.skip(std::ssize(prompt.tokens));
    read += std::ssize(prompt.tokens);
  }
  return trainer.result();
}

}  // namespace lode
