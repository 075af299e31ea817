// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <future>
#include <optional>

#include "base/hash.h"
#include "base/threads.h"
#include "engine/context.h"
#include "lab/train/hash/device.h"
#include "lab/train/hash/start.h"
#include "lab/train/hash/steps.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

constexpr std::int64_t kStartTokens = 2048;  // that the linear start is made from, about

class HashTrainer {
 public:
  /// `device` takes the steps of prompts of at most so many tokens.
  HashTrainer(const ModelConfig& config, const HashSettings& settings, Capture& capture, ThreadPool& pool,
              Device device, std::int64_t most_tokens);

  /// Whether a GPU takes the steps; where one should and cannot, why_host() says why.
  bool on_gpu() const { return device_asked_ == Device::cuda && why_host_.empty(); }
  const std::string& why_host() const { return why_host_; }

  std::int64_t steps_of(const Prompt& prompt, std::int64_t chunk) const;
  void start(const Prompt& prompt);
  void start_from(const std::string& model_fingerprint);
  void learn(const Prompt& prompt, std::uint64_t number, std::int64_t all_steps,
             const std::function<void(std::int64_t)>& progress);

  void put(Checkpoint& checkpoint);
  void get(const Checkpoint& checkpoint, const std::string& where);
  HashResult result();

 private:
  /// The first position whose query has enough far keys to learn from.
  std::int64_t first_query() const {
    return settings_.dense.sink + 2 * settings_.top + settings_.dense.window;
  }
  bool by_prompt() const { return settings_.draw == HashSettings::Draw::prompt; }
  HashHead& head(std::int64_t layer, std::int64_t kv_head) {
    return heads_[static_cast<std::size_t>(layer * config_.kv_heads + kv_head)];
  }
  int group() const { return config_.query_heads / config_.kv_heads; }

  void draw(Position begin, Position end, std::uint64_t prompt);
  void take_queries(int layer, const KvWrite& chunk);
  void take_steps(Position keys_end, std::uint64_t prompt, std::int64_t all_steps);

  const ModelConfig& config_;
  const HashSettings& settings_;
  Capture& capture_;
  ThreadPool& pool_;
  std::deque<HashHead> heads_;                     // [L, Hkv]
  std::vector<double> losses_;                     // [L, Hkv] running means
  std::vector<std::vector<Position>> drawn_;       // [steps][tokens] of the running prompt or chunk, rising
  std::vector<std::vector<StepQueries>> queries_;  // [steps][L] of those
  std::int64_t steps_done_ = 0, tokens_ = 0;
  Device device_asked_;
  std::string why_host_;
  std::unique_ptr<HashDevice> device_;
};

HashTrainer::HashTrainer(const ModelConfig& config, const HashSettings& settings, Capture& capture,
                         ThreadPool& pool, Device device, std::int64_t most_tokens)
    : config_(config), settings_(settings), capture_(capture), pool_(pool), device_asked_(device) {
  expect_like_layers(config, "train hash");
  for (int layer = 0; layer < config.layers; ++layer) {
    for (int head = 0; head < config.kv_heads; ++head) {
      heads_.emplace_back(HashHead::Shape{.group = group(),
                                          .head_dim = config.head_dim,
                                          .scheme = settings.scheme,
                                          .widths = settings.widths,
                                          .loss = settings.loss,
                                          .adam = {.rate = settings.rate},
                                          .seed = hash_seed(settings.seed, layer, head)});
    }
  }
  losses_.assign(heads_.size(), 0.0);
  queries_.assign(static_cast<std::size_t>(settings.steps),
                  std::vector<StepQueries>(static_cast<std::size_t>(config.layers)));
  device_ = make_hash_device(device,
                             {.config = config,
                              .settings = settings,
                              .kv = capture.kv(),
                              .rope = capture.rope(),
                              .pool = pool,
                              .heads = heads_,
                              .most_tokens = most_tokens},
                             why_host_);
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
  std::vector<Moments> keys(heads_.size(), none), queries(heads_.size(), none);
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
  pool_.for_each(std::ssize(heads_), [&](std::int64_t item, int) {
    const auto at = static_cast<std::size_t>(item);
    Rng rng(hash_seed(settings_.seed, 1, item));
    LinearStart linear = linear_start(keys[at], queries[at], bits, settings_.gamma, rng);
    std::vector<float> wide(static_cast<std::size_t>(bits * inputs), 0.0f);  // [bits, inputs], 0 by values
    for (std::int64_t b = 0; b < bits; ++b)
      std::copy_n(linear.keys.data() + b * d, d, wide.data() + b * inputs);
    std::vector<float> centre = linear.centre;
    centre.resize(static_cast<std::size_t>(inputs), 0.0f);
    const std::vector<float> origin(static_cast<std::size_t>(d), 0.0f);
    for (HashFunction& f : heads_[at].keys()) f.start_linear({wide.data(), bits, inputs}, centre);
    for (HashFunction& f : heads_[at].queries()) f.start_linear({linear.queries.data(), bits, d}, origin);
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
    for (int kv_head = 0; kv_head < config_.kv_heads; ++kv_head) {
      for (HashFunction& f : head(layer, kv_head).queries()) fits = fits && f.start_trained(*query++);
      for (HashFunction& f : head(layer, kv_head).keys())
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
  device_->begin_prompt();
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
  const HashSeries series = {
      .keys_end = keys_end,
      .class1_weight = settings_.alpha + settings_.beta * static_cast<double>(keys_end),
      .rate_scale = [&](std::int64_t step) { return cosine_decay(steps_done_ + step, all_steps, 0.03); },
      .queries = &queries_,
      .rng =
          [&](std::int64_t step, std::int64_t head) {
            return Rng(hash_seed(settings_.seed, 3, prompt, keys_end, step, head));
          }};
  const std::vector<double> losses = device_->take(series);
  for (std::size_t i = 0; i < losses.size(); ++i) {
    double& mean = losses_[i % losses_.size()];
    if (i > 0 && i % losses_.size() == 0) ++steps_done_;
    const double share = std::max(1.0 / static_cast<double>(steps_done_ + 1),
                                  10.0 / static_cast<double>(std::max<std::int64_t>(10, all_steps)));
    mean += share * (losses[i] - mean);
  }
  ++steps_done_;
}

std::string prefix_of(std::size_t head) {
  return fmt::format("head.{}.", head);
}

void HashTrainer::put(Checkpoint& checkpoint) {
  device_->store();
  for (std::size_t i = 0; i < heads_.size(); ++i) heads_[i].put(checkpoint, prefix_of(i));
  checkpoint.arrays["losses"] = {losses_.begin(), losses_.end()};
  checkpoint.notes["steps_done"] = std::to_string(steps_done_);
  checkpoint.notes["tokens"] = std::to_string(tokens_);
}

void HashTrainer::get(const Checkpoint& checkpoint, const std::string& where) {
  const auto losses = checkpoint.arrays.find("losses");
  if (losses == checkpoint.arrays.end() || losses->second.size() != heads_.size())
    throw InputError(where + ": expected a loss for each head, found otherwise");
  for (std::size_t i = 0; i < heads_.size(); ++i) heads_[i].get(checkpoint, prefix_of(i), where);
  losses_.assign(losses->second.begin(), losses->second.end());
  steps_done_ = checkpoint.number("steps_done", where);
  tokens_ = checkpoint.number("tokens", where);
}

HashResult HashTrainer::result() {
  device_->store();
  HashResult result = {
      .layers = {}, .heads = {}, .steps = steps_done_, .tokens = tokens_, .steps_on_gpu = on_gpu()};
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    const int layer = static_cast<int>(i) / config_.kv_heads, head = static_cast<int>(i) % config_.kv_heads;
    if (head == 0) result.layers.push_back({.scheme = settings_.scheme, .query = {}, .key = {}});
    HashWeights& weights = result.layers.back();
    for (const HashFunction& f : heads_[i].queries()) weights.query.push_back(f.finished(settings_.type));
    for (const HashFunction& f : heads_[i].keys()) weights.key.push_back(f.finished(settings_.type));
    result.heads.push_back({.layer = layer, .kv_head = head, .loss = losses_[i]});
  }
  return result;
}

/// Changes with the model, the settings and every token.
std::string run_of(const Model& model, const HashSettings& settings, const std::vector<Prompt>& prompts,
                   const ContextOptions& options, bool steps_on_gpu) {
  Hasher hasher;
  const std::string text = fmt::format("{} {} {} {}", model.fingerprint(), settings.json().dump(),
                                       options.chunk, name_of(options.kv_type));
  hasher.add(std::as_bytes(std::span(text)));
  // Keys, queries and steps of a GPU have other last bits; without its name, checkpoints of before stay good.
  const std::string_view device = options.device != Device::cuda ? "" : steps_on_gpu ? "cuda steps" : "cuda";
  hasher.add(std::as_bytes(std::span(device)));
  if (const double factor = options.rope_factor.value_or(1.0); factor != 1.0)
    hasher.add(std::as_bytes(std::span(&factor, 1)));
  for (const Prompt& prompt : prompts) hasher.add(std::as_bytes(std::span(prompt.tokens)));
  return hasher.hex();
}

/// Writes one state after the other while the caller goes on.
class CheckpointWriter {
 public:
  explicit CheckpointWriter(const std::filesystem::path& path) : path_(path) {}
  void write(Checkpoint state) {
    wait();
    written_ = std::async(std::launch::async, [this, state = std::move(state)] { state.write(path_); });
  }
  /// Throws what writing threw.
  void wait() {
    if (written_.valid()) written_.get();
  }

 private:
  const std::filesystem::path& path_;
  std::future<void> written_;
};

/// A window's layer has no far keys, and nobody hears its queries.
void expect_far_keys_everywhere(const ModelConfig& config) {
  for (int layer = 0; layer < config.layers; ++layer) {
    if (config.plan.layer(layer).chooses()) continue;
    throw InputError(fmt::format(
        "train hash: expected a model whose layers all attend to the whole text, found layer {} with {}",
        layer, config.plan.layer(layer).window > 0 ? "a sliding window" : "a recurrent state"));
  }
}

/// What is left of an earlier run, and on which device it took its steps.
struct EarlierRun {
  std::optional<Checkpoint> state;
  bool steps_on_gpu = false;
};

/// InputError when it is another run's: `on_host` and `on_gpu` name this one.
EarlierRun find_earlier(const std::filesystem::path& checkpoint, const std::string& on_host,
                        const std::string& on_gpu) {
  if (checkpoint.empty() || !std::filesystem::exists(checkpoint)) return {};
  EarlierRun earlier = {.state = Checkpoint::read(checkpoint)};
  const std::string& run = earlier.state->notes["run"];
  earlier.steps_on_gpu = run == on_gpu && on_gpu != on_host;
  if (run == on_host || run == on_gpu) return earlier;
  throw InputError(
      checkpoint.string() +
      ": expected the checkpoint of this model, these settings, texts and this --device, found another's: "
      "remove it to start anew");
}

}  // namespace

HashResult train_hash(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                      const HashSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode mode,
                      const std::function<void(const std::string&)>& say) {
  LODE_ASSERT(options.chunk > 0);
  expect_far_keys_everywhere(model->config());
  std::int64_t steps = 0, tokens = 0, read = 0, longest = 0;
  for (const Prompt& prompt : prompts) {
    tokens += std::ssize(prompt.tokens);
    longest = std::max(longest, std::ssize(prompt.tokens));
  }
  Capture capture(model, options);
  const std::string on_host = run_of(*model, settings, prompts, options, false),
                    on_gpu = run_of(*model, settings, prompts, options, true);
  const EarlierRun earlier = find_earlier(checkpoint, on_host, on_gpu);
  const bool began_on_host = earlier.state && !earlier.steps_on_gpu;
  HashTrainer trainer(model->config(), settings, capture, model->pool(),
                      began_on_host ? Device::cpu : options.device, longest);
  for (const Prompt& prompt : prompts) steps += trainer.steps_of(prompt, options.chunk);
  if (steps == 0) {
    throw InputError(
        fmt::format("expected a text of more than {} tokens, so that queries have keys beyond sink "
                    "and window, found {} in all",
                    settings.dense.sink + settings.dense.window + 2 * settings.top, tokens));
  }
  if (!trainer.why_host().empty() && say) say(trainer.why_host());
  if (trainer.on_gpu() && options.gpu_memory > 0 && say)
    say("--gpu-memory bounds weights, keys and values while texts are read, and not what the steps take");
  if (began_on_host && options.device == Device::cuda && say)
    say("the host takes the steps, as it did before the interruption");
  if (earlier.steps_on_gpu && !trainer.on_gpu())
    throw RunError(
        fmt::format("{}: expected room on the GPU for its steps, which began there: {}. Free GPU memory and "
                    "give the command again",
                    checkpoint.string(), trainer.why_host()));
  const std::string& run = trainer.on_gpu() ? on_gpu : on_host;
  std::int64_t done = 0;
  if (earlier.state) {
    trainer.get(*earlier.state, checkpoint.string());
    done = std::min(earlier.state->number("prompts_done", checkpoint.string()), std::ssize(prompts));
  } else if (!settings.from.empty()) {
    trainer.start_from(model->fingerprint());
  } else if (settings.linear_start) {
    trainer.start(prompts.front());
  }
  Progress progress("train hash", tokens, "tokens", mode);
  CheckpointWriter writer(checkpoint);
  try {
    for (std::int64_t i = 0; i < std::ssize(prompts); ++i) {
      const Prompt& prompt = prompts[static_cast<std::size_t>(i)];
      if (i >= done) {
        trainer.learn(prompt, static_cast<std::uint64_t>(i), steps,
                      [&](std::int64_t at) { progress.at(read + at); });
        if (!checkpoint.empty()) {
          writer.wait();  // so that no third copy of all functions is made
          Checkpoint state;
          trainer.put(state);
          state.notes["run"] = run;
          state.notes["prompts_done"] = std::to_string(i + 1);
          writer.write(std::move(state));
        }
      }
      if (i < done) progress.skip(std::ssize(prompt.tokens));
      read += std::ssize(prompt.tokens);
    }
  } catch (const Interrupted&) {
    writer.wait();  // who interrupts is told if that fails
    throw;
  }
  writer.wait();
  return trainer.result();
}

}  // namespace lode
