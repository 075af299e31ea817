// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/layer_selector.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "gpu/backend.h"
#include "gpu/index/device_keys.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/device/arrivals.h"
#include "kernels/rope.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 22;  // addresses are reserved for so many
constexpr std::int64_t kStep = 512;  // tokens that choose together, as in a chunk of the engine

std::int64_t rounded_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

/// Thrown where the device leaves to the host what it needs the rows for.
struct WantsHostRows {};

/// Whether a GPU that has the keys can build all of the index, so that no row is read on the host.
bool builds_on_device(const Spec& spec) {
  return spec.name == "kmeans" || (spec.name == "squeezed" && spec.text("levels").value_or("1") == "1" &&
                                   spec.text("tail").value_or("off") == "off");
}

/// Layers whose keys lie apart, as one device's; null: what the host does alone.
class KeysOfLayers final : public DeviceKeys {
 public:
  /// `strict`: what the device does not take throws WantsHostRows.
  KeysOfLayers(std::map<int, DeviceKeys*> layers, bool strict)
      : layers_(std::move(layers)), strict_(strict) {}

  bool takes(const KeysOnDevice& keys, std::int64_t clusters) const override {
    const DeviceKeys* const own = layers_.at(keys.layer);
    return checked(own != nullptr && own->takes(keys, clusters));
  }
  std::vector<std::vector<float>> centroids(const KeysOnDevice& keys,
                                            std::span<const std::vector<Position>> samples,
                                            std::int64_t clusters,
                                            std::span<const std::uint64_t> seeds) override {
    return of(keys.layer).centroids(keys, samples, clusters, seeds);
  }
  std::vector<std::int32_t> labels(const KeysOnDevice& keys,
                                   std::span<const std::vector<float>> centroids) override {
    return of(keys.layer).labels(keys, centroids);
  }
  std::vector<KeyClusters> clusters(const KeysOnDevice& keys, const ClusterTask& task) override {
    return of(keys.layer).clusters(keys, task);
  }
  std::vector<double> sharpness(const KeysOnDevice& keys, std::span<const float> queries, int group,
                                float scale) override {
    return of(keys.layer).sharpness(keys, queries, group, scale);
  }
  void attend(int layer, std::int64_t tokens, std::span<const float> queries, float scale,
              std::span<float> outputs, std::span<float> lse) override {
    of(layer).attend(layer, tokens, queries, scale, outputs, lse);
  }
  bool hold_clusters(int layer, const ScoredClusters& clusters, std::int64_t most_tokens) override {
    DeviceKeys* const own = layers_.at(layer);
    const bool held = checked(own != nullptr && own->hold_clusters(layer, clusters, most_tokens));
    held_ += held ? 1 : 0;
    return held;
  }
  void forget_clusters() override {
    for_each([](DeviceKeys& keys) { keys.forget_clusters(); });
  }
  void count_scores(const ScoringQueries& queries, const ScoreBins& bins) override {
    of(queries.layer).count_scores(queries, bins);
  }
  void attend_chosen(const ScoringQueries& queries, const ChosenAttention& chosen) override {
    of(queries.layer).attend_chosen(queries, chosen);
  }
  void release() override {
    for_each([](DeviceKeys& keys) { keys.release(); });
  }

  /// Whether every layer's clusters were on the device.
  bool held_all() const { return held_ == std::ssize(layers_); }

 private:
  DeviceKeys& of(int layer) const { return *layers_.at(layer); }
  void for_each(const std::function<void(DeviceKeys&)>& body) const {
    for (const auto& [layer, keys] : layers_)
      if (keys != nullptr) body(*keys);
  }
  bool checked(bool taken) const {
    if (strict_ && !taken) throw WantsHostRows();
    return taken;
  }
  std::map<int, DeviceKeys*> layers_;
  bool strict_ = false;
  std::int64_t held_ = 0;
};

/// While one lives, selectors of the host have a device.
class BuiltBy {
 public:
  BuiltBy(std::span<Selector* const> selectors, DeviceKeys& keys) : keys_(keys) {
    for (Selector* const selector : selectors)
      if (auto* const built = dynamic_cast<BuiltByDevice*>(selector); built != nullptr)
        built->build_by(&keys), built_.push_back(built);
  }
  ~BuiltBy() {
    keys_.release();
    for (BuiltByDevice* const built : built_) built->build_by(nullptr);
  }
  BuiltBy(const BuiltBy&) = delete;
  BuiltBy& operator=(const BuiltBy&) = delete;

 private:
  DeviceKeys& keys_;
  std::vector<BuiltByDevice*> built_;
};

}  // namespace

/// A layer's rows in the host's memory: a copy of them, or addresses alone, where nobody is to read them.
class LayerSelector::HostRows {
 public:
  HostRows(const LayerSelector& of, bool copied, const cuda::CallerStream& stream)
      : bytes_(static_cast<std::size_t>(
            std::max<std::int64_t>(1, 2 * of.layout_.kv_heads * of.taken_ * of.layout_.row_bytes()))),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0)) {
    if (data_ == MAP_FAILED)
      throw RunError(fmt::format("out of memory: expected {} bytes for a layer's keys and values", bytes_));
    auto* at = static_cast<std::byte*>(data_);
    for (int head = 0; head < of.layout_.kv_heads; ++head) {
      KvRows rows = {.type = of.layout_.type, .rows = of.taken_, .d = of.layout_.head_dim};
      for (const auto part : {cuda::KvRange::Part::k, cuda::KvRange::Part::v}) {
        (part == cuda::KvRange::Part::k ? rows.k : rows.v) = at;
        if (copied && of.taken_ > 0) of.range_->to_host(0, head, part, 0, of.taken_, at, stream.stream);
        at += of.taken_ * of.layout_.row_bytes();
      }
      heads_.push_back(rows);
    }
  }
  ~HostRows() { munmap(data_, bytes_); }
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;
  KvLayer layer() const { return {.heads = heads_, .tokens = heads_.front().rows}; }

 private:
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
  std::vector<KvRows> heads_;  // [Hkv]
};

/// A call's numbers as kernels have them: float32 [tokens, Hq, d] each, device memory.
struct LayerSelector::Numbers {
  const float *q = nullptr, *q_unrotated = nullptr;
  float *widened = nullptr, *plain = nullptr;  ///< where the two above are still to be written; else null
  float* o = nullptr;                          ///< null where the output is float32 itself
  cuda::StreamMemory memory;                   ///< of several tokens; one token has the layer's own
};

/// Query tokens that go through the method at once.
struct LayerSelector::Piece {
  cuda::Queries queries;
  const float* q_unrotated = nullptr;  // as queries.q
  void* narrowed = nullptr;            // queries.o in the caller's type; null: float32 is that
  DType narrowed_type = DType::f32;
  std::int64_t first = 0;     ///< of the call's tokens
  std::int64_t position = 0;  ///< of the first
};

LayerSelector::LayerSelector(const Spec& spec, const LayerGeometry& geometry, Selector& host, int device)
    : spec_(spec), geometry_(geometry), host_(host), device_(device) {
  if (spec.name == "plan")
    throw InputError(
        "Selector: expected a method of one layer on a GPU, found 'plan'; make a selector of the plan's "
        "method "
        "for this layer");
  frequencies_ = cuda::Buffer(geometry.head_dim / 2 * std::int64_t{sizeof(float)}, "RoPE's frequencies");
  cuda::copy_and_wait(frequencies_.as<void>(), geometry.rope->frequencies().data(), frequencies_.bytes(),
                      {device, nullptr});
  bases_ = cuda::Buffer(sizeof(const char*), "where a layer's keys lie");
}

LayerSelector::~LayerSelector() {
  try {
    const cuda::OnDevice here(device_);
    record_last();
    used_.wait();  // pages are unmapped at once
  } catch (
      const std::exception&) {  // the GPU failed, or the driver is gone; else kernels may still be at work
    static_cast<void>(chooser_.release());
    static_cast<void>(range_.release());
    static_cast<void>(graphs_.release());
  }
}

std::int64_t LayerSelector::bytes() const {
  return (range_ != nullptr ? range_->backed_bytes() : 0) + (chooser_ != nullptr ? chooser_->bytes() : 0) +
         (device_keys_ != nullptr ? device_keys_->bytes() : 0) + numbers_.bytes() + parts_.bytes();
}

/// Work of this call comes behind that of the last one, and what comes next behind what was enqueued, also where the call
/// fails.
class LayerSelector::Call {
 public:
  Call(LayerSelector& of, const cuda::CallerStream& stream) : of_(of), stream_(stream) {
    cuda::check_not_captured(stream);
    if (of.graphs_->has_lost())
      throw RunError(
          "expected a complete index, found one that a failed call on the GPU has left incomplete; call "
          "build() again");
    if (stream.stream != of.last_) {
      of.record_last();
      of.used_.hold_up(stream.stream);
    }
    of.last_ = stream.stream;
  }
  ~Call() {
    of_.is_recorded_ = false;
    if (stream_.stream == nullptr) return;
    try {
      of_.record_last();               // a caller's stream may be gone when it is wanted
    } catch (const std::exception&) {  // whoever wants it tries again, and says why not
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  LayerSelector& of_;
  const cuda::CallerStream& stream_;
};

/// Notes how far the last call's stream is, where that is not noted yet. The default stream is there for ever: what a call
/// has told it is noted when somebody is to wait for it.
void LayerSelector::record_last() {
  if (is_recorded_) return;
  used_.record(last_);
  is_recorded_ = true;
}

/// Waits for what the stream has been told: memory may go then.
void LayerSelector::wait(const cuda::CallerStream& stream) {
  used_.record(stream.stream);
  used_.wait();
}

void LayerSelector::build(const CallerRows& rows, const cuda::CallerStream& stream) {
  const cuda::OnDevice here(device_);
  if (graphs_->has_lost()) {  // rows and index lack what the lost kernels were to write
    cuda::check_not_captured(stream);
    record_last();
    used_.wait();
    chooser_.reset();
    taken_ = built_ = 0;
    graphs_ = std::make_unique<cuda::LaunchGraphs>();
  }
  const Call call(*this, stream);
  wait(stream);
  chooser_.reset();
  taken_ = built_ = 0;
  cuda::arrive(take(rows, 0, rows.kv.rows, stream), {}, stream.stream);
  taken_ = built_ = rows.kv.rows;
  make_room(built_, 1, stream);
  if (chooser_->needs_host_index()) build_on_host(stream);
  chooser_->prepare(keys(built_), stream.stream);
}

void LayerSelector::build_on_host(const cuda::CallerStream& stream) {
  LayerSelector* const self = this;
  with_host(
      {&self, 1}, stream, [&](const auto& rows) { host_.build(0, rows(geometry_.layer)); }, false);
}

/// Runs what the host does of an index: with the device's help, and with addresses in the place of rows where the device
/// does all that rows are needed for. Else once more, with rows. `holds`: clusters of all layers must be on the device.
void LayerSelector::with_host(std::span<LayerSelector* const> layers, const cuda::CallerStream& stream,
                              const Finish& run, bool holds) {
  std::map<int, DeviceKeys*> device_keys;
  std::vector<Selector*> hosts;
  bool on_device = builds_on_device(layers.front()->spec_);
  for (LayerSelector* const layer : layers) {
    device_keys[layer->geometry_.layer] = layer->device_keys_.get();
    on_device = on_device && layer->device_keys_ != nullptr;
    hosts.push_back(&layer->host_);
  }
  const auto run_with = [&](bool strict) {
    std::map<int, std::unique_ptr<HostRows>> there;
    for (LayerSelector* const layer : layers)
      there[layer->geometry_.layer] = std::make_unique<HostRows>(*layer, !strict, stream);
    layers.front()->wait(stream);  // for rows, and since device keys are read in a stream of their own
    KeysOfLayers device(device_keys, strict);
    const BuiltBy by(hosts, device);
    run([&](int layer) { return there.at(layer)->layer(); });
    return !holds || device.held_all();
  };
  if (on_device) {
    try {
      if (run_with(true)) return;
    } catch (const WantsHostRows&) {  // few keys, wide heads, or a GPU that is full
    }
  }
  run_with(false);
}

void LayerSelector::finish(std::span<LayerSelector* const> layers, const cuda::CallerStream& stream,
                           const Finish& run) {
  const cuda::OnDevice here(stream.device);
  std::vector<std::unique_ptr<Call>> calls;
  for (LayerSelector* const layer : layers) calls.push_back(std::make_unique<Call>(*layer, stream));
  with_host(layers, stream, run, true);
}

void LayerSelector::roll_back(std::int64_t tokens) {
  const cuda::OnDevice here(device_);
  taken_ = std::min(taken_, tokens);
  built_ = std::min(built_, tokens);
  if (chooser_ != nullptr) chooser_->roll_back(0, tokens);
}

void LayerSelector::download(char* k, char* v, const cuda::CallerStream& stream) {
  const cuda::OnDevice here(device_);
  const Call call(*this, stream);
  const std::int64_t head_bytes = taken_ * layout_.row_bytes();
  for (int head = 0; head < geometry_.kv_heads && taken_ > 0; ++head) {
    range_->to_host(0, head, cuda::KvRange::Part::k, 0, taken_, k + head * head_bytes, stream.stream);
    range_->to_host(0, head, cuda::KvRange::Part::v, 0, taken_, v + head * head_bytes, stream.stream);
  }
  wait(stream);
}

/// Room for rows [begin, end) in the layer's own blocks, and where they go; for `arrive`, behind which they are there.
cuda::TakenRows LayerSelector::take(const CallerRows& rows, std::int64_t begin, std::int64_t end,
                                    const cuda::CallerStream& stream) {
  if (end > kMostTokens)
    throw InputError(
        fmt::format("Selector: expected at most {} tokens on a GPU, found {}", kMostTokens, end));
  if (range_ != nullptr && layout_.type != rows.type && begin > 0)
    throw InputError("k: expected the type of number that the index was built with, found another");
  if (range_ == nullptr || layout_.type != rows.type) {
    const cuda::KvLayout layout = {geometry_.kv_heads, geometry_.head_dim, rows.type, 0};
    wait(stream);
    chooser_.reset();
    range_.reset();
    auto range = std::make_unique<cuda::KvRange>(layout, 1, kMostTokens);
    const char* const base = range->base();
    cuda::upload(bases_.as<void>(), &base, sizeof base, stream);
    range_ = std::move(range);
    layout_ = layout;  // of stride 0
  }
  range_->back(end);
  return {.from = rows.kv,
          .layout = layout_,
          .layer = range_->base(),
          .begin = begin,
          .end = end,
          .first = rows.first};
}

LayerSelector::Numbers LayerSelector::numbers(const CallerQueries& queries, DType output,
                                              const cuda::CallerStream& stream) {
  constexpr std::int64_t kMost = 3;  // arrays
  const std::int64_t count = queries.tokens * geometry_.query_heads * geometry_.head_dim,
                     bytes = count * std::int64_t{sizeof(float)};
  const bool widens = queries.type != DType::f32, turns = geometry_.rope->turning_pairs() > 0,
             narrows = output != DType::f32;
  Numbers made;
  const std::int64_t arrays = widens + turns + narrows;
  if (queries.tokens == 1 && arrays > 0 && numbers_.bytes() == 0)
    numbers_ = cuda::Buffer(kMost * bytes, "a token's numbers");
  if (queries.tokens > 1 && arrays > 0) made.memory = cuda::StreamMemory(arrays * bytes, stream);
  float* next = queries.tokens == 1 ? numbers_.as<float>() : made.memory.as<float>();
  const auto take_array = [&](bool wanted) { return wanted ? std::exchange(next, next + count) : nullptr; };
  made.widened = take_array(widens);
  made.plain = take_array(turns);
  made.o = take_array(narrows);
  made.q = widens ? made.widened : static_cast<const float*>(queries.q);
  made.q_unrotated = turns ? made.plain : made.q;
  return made;
}

/// Brings what the queries see that is not here, and the rows that they stand on; the queries' numbers and their places.
LayerSelector::Numbers LayerSelector::take_call(const CallerQueries& queries, const CallerRows& rows,
                                                DType output, const cuda::CallerStream& stream) {
  const std::int64_t end = queries.begin + queries.tokens;
  const bool anew = queries.begin >= built_ && queries.begin < taken_;
  const std::int64_t begin = std::min(anew ? queries.begin : taken_, end);
  if (begin < end && begin < rows.first)
    throw InputError(
        fmt::format("k: expected rows from token {} on, which no call has brought, found them from {} on",
                    begin, rows.first));
  if (anew) {
    taken_ = queries.begin;
    if (chooser_ != nullptr) chooser_->roll_back(0, taken_);
  }
  const cuda::TakenRows arriving = take(rows, begin, end, stream);
  make_room(end, queries.tokens, stream);
  Numbers made = numbers(queries, output, stream);
  cuda::arrive(arriving,
               {.q = queries.q,
                .type = queries.type,
                .frequencies = frequencies_.as<float>(),
                .begin = queries.begin,
                .tokens = queries.tokens,
                .heads = geometry_.query_heads,
                .d = geometry_.head_dim,
                .turning = static_cast<int>(geometry_.rope->turning_pairs()),
                .attention_scaling = geometry_.rope->attention_scaling(),
                .widened = made.widened,
                .plain = made.plain,
                .places = places_.as<cuda::QueryToken>()},
               stream.stream);
  taken_ = std::max(taken_, end);
  return made;
}

std::unique_ptr<GpuSelector> LayerSelector::made(const Room& room, const cuda::CallerStream& stream) const {
  const GpuGeometry geometry = {.layers = 1,
                                .query_heads = geometry_.query_heads,
                                .kv_heads = geometry_.kv_heads,
                                .head_dim = geometry_.head_dim,
                                .max_tokens = room.tokens,
                                .most_queries = room.queries,
                                .most_tokens = room.step,
                                .key_row_bytes = layout_.row_bytes(),
                                .stream = stream.stream,
                                .seed = geometry_.seed,
                                .first_layer = geometry_.layer};
  Selector* const host = &host_;
  auto chooser = make_gpu_selector(spec_, geometry, {&host, 1});
  if (chooser == nullptr && spec_.name == "squeezed" && !spec_.dense.from_context)
    throw InputError(
        fmt::format("Selector: on a GPU squeezed has no window that slides, found '{}'; leave window= out, "
                    "or copy keys and "
                    "queries to the CPU",
                    spec_.str()));
  if (chooser == nullptr)
    throw InputError(
        fmt::format("Selector: expected a method whose keys a GPU chooses, found '{}'; copy keys and queries "
                    "to the CPU, or "
                    "take another method (topk, kmeans, hash, squeezed and streaming have one)",
                    spec_.str()));
  return chooser;
}

/// A selector for a sequence of so many tokens and calls of so many queries.
void LayerSelector::make_room(std::int64_t tokens, std::int64_t queries, const cuda::CallerStream& stream) {
  constexpr std::int64_t kGrowth = 4096;
  Room room = room_;
  if (chooser_ == nullptr)
    room = {.step = static_cast<int>(std::min(kStep, spec_.integer("block", 0, 0, 1 << 20)))};
  if (tokens > room.tokens)
    room.tokens =
        std::min(kMostTokens, rounded_up(tokens + std::max(kGrowth, tokens / 8), cuda::kBlockTokens));
  if (queries > 1)  // keys must be taken in before they leave the window
    room.queries = static_cast<int>(
        std::clamp<std::int64_t>(geometry_.dense.window, 1, std::int64_t{kMostSparseTokens}));
  room.step = static_cast<int>(
      std::max<std::int64_t>({room.step, room.queries, queries > 1 ? rounded_up(queries, kStep) : 1}));
  if (chooser_ != nullptr && room.tokens == room_.tokens && room.queries == room_.queries &&
      room.step == room_.step)
    return;
  wait(stream);
  chooser_.reset();  // made last: while there is one, room_ counts and its memory is there
  places_ = cuda::Buffer(room.step * std::int64_t{sizeof(cuda::QueryToken)}, "the places of queries");
  room_ = room;
  chooser_ = made(room, stream);
  if (device_keys_ == nullptr && chooser_->needs_host_index())
    device_keys_ = make_device_keys([this] { return keys(taken_); }, geometry_.query_heads,
                                    [] { return gpu_info().free_bytes; });
}

GpuKeys LayerSelector::keys(std::int64_t tokens) const {
  return {.base = range_->base(),
          .layout = layout_,
          .tokens = tokens,
          .frequencies = frequencies_.as<float>(),
          .rope_scale = geometry_.rope->attention_scaling()};
}

/// As in CudaContext::most_tokens.
std::int64_t LayerSelector::most_at_once(std::int64_t position, Phase phase) const {
  const std::int64_t most = std::min<std::int64_t>(chooser_->most_tokens(position, phase), room_.step);
  return most > room_.queries && !chooser_->chooses_together() ? room_.queries : most;
}

/// Copies what begin has staged to the GPU and records an event behind the copy: at once, or, where the copy is held back,
/// when this goes out of scope.
class LayerSelector::Staged {
 public:
  Staged(LayerSelector& of, const cuda::CallerStream& stream) : of_(of), stream_(stream) {
    if (!of.chooser_->has_news()) return;
    of.is_staged_ = true;
    try {
      of.chooser_->upload(stream.stream);
    } catch (...) {
      record();
      throw;
    }
    is_late_ = cuda::holds_back(stream.stream);
    if (!is_late_) of.staged_.record(stream.stream);
  }
  ~Staged() {
    if (is_late_) record();
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;

 private:
  void record() noexcept {
    try {
      of_.staged_.record(stream_.stream);
    } catch (const std::exception&) {  // the GPU failed, and says so again
    }
  }
  LayerSelector& of_;
  const cuda::CallerStream& stream_;
  bool is_late_ = false;  ///< whether the copy is held back
};

/// Until the pinned memory that begin writes has been read.
void LayerSelector::wait_for_staged() {
  if (std::exchange(is_staged_, false)) staged_.wait();
}

/// Calls body for pieces that may go through the method at once, in order.
void LayerSelector::for_pieces(const CallerQueries& queries, const Numbers& numbers,
                               const cuda::CallerStream& stream,
                               const std::function<void(const Piece&)>& body) {
  if (!chooser_->chooses())
    throw InputError(
        fmt::format("Selector: expected an index that is ready on the GPU, found none of '{}'; call build(), "
                    "and where the method "
                    "needs it observe() before and finish() behind it",
                    spec_.str()));
  const Phase phase = queries.tokens > 1 ? Phase::question : Phase::generation;
  const Position limit =
      geometry_.dense.from_context
          ? static_cast<Position>(std::max<std::int64_t>(0, built_ - geometry_.dense.window))
          : QueryBlock::kNoLimit;
  const std::int64_t row = std::int64_t{geometry_.query_heads} * geometry_.head_dim;
  std::vector<cuda::QueryToken> places;
  for (std::int64_t first = 0, count = 0; first < queries.tokens; first += count) {
    const std::int64_t position = queries.begin + first;
    count = std::min(queries.tokens - first, most_at_once(position, phase));
    places.clear();
    for (std::int64_t t = 0; t < count; ++t) places.push_back({0, static_cast<std::int32_t>(position + t)});
    chooser_->prepare(keys(position), stream.stream);
    wait_for_staged();
    chooser_->begin({.queries = places, .phase = phase, .far_limit = limit});
    const Staged staged(*this, stream);
    body({.queries = {.tokens = places_.as<cuda::QueryToken>() + first,
                      .bases = bases_.as<const char*>(),
                      .layout = layout_,
                      .count = static_cast<int>(count),
                      .query_heads = geometry_.query_heads,
                      .scale = geometry_.scale,
                      .q = numbers.q + first * row},
          .q_unrotated = numbers.q_unrotated + first * row,
          .first = first,
          .position = position});
  }
}

void LayerSelector::attend(const CallerQueries& queries, const CallerRows& rows, const CallerOutput& output,
                           const cuda::CallerStream& stream) {
  const cuda::OnDevice here(device_);
  const Call call(*this, stream);
  wait_for_staged();                       // else it would end the chain
  std::optional<cuda::LaunchChain> chain;  // a step of another engine's is many calls of one token
  if (queries.tokens == 1) chain.emplace(*graphs_, stream.stream);
  const Numbers numbers = take_call(queries, rows, output.type, stream);
  float* const o = numbers.o != nullptr ? numbers.o : static_cast<float*>(output.o);
  const std::int64_t heads = geometry_.query_heads, row = heads * geometry_.head_dim;
  for_pieces(queries, numbers, stream, [&](const Piece& piece) {
    Piece own = piece;
    own.queries.o = o + piece.first * row;
    own.queries.lse = output.lse == nullptr ? nullptr : output.lse + piece.first * heads;
    if (numbers.o != nullptr)
      own.narrowed = static_cast<char*>(output.o) + piece.first * row * bytes_of(output.type);
    own.narrowed_type = output.type;
    attend_piece(own, stream);
  });
}

/// As CudaContext::attend_chosen_by_gpu.
void LayerSelector::attend_piece(const Piece& piece, const cuda::CallerStream& stream) {
  const cuda::Queries& queries = piece.queries;
  if (queries.count > kMostSparseTokens) {
    if (parts_.bytes() == 0)
      parts_ = cuda::Buffer(cuda::rows_prefill_workspace_bytes(geometry_.head_dim),
                            "partial results of attention");
    const cuda::RowLists lists = chooser_->select_together(0, queries, stream.stream);
    attend_rows_prefill(queries, static_cast<std::int32_t>(piece.position), lists, parts_.as<void>(),
                        stream.stream, precision());
    return narrow(piece, stream);
  }
  const cuda::Workspace workspace(cuda::decode_workspace_bytes(queries.count, geometry_.query_heads,
                                                               geometry_.kv_heads, geometry_.head_dim),
                                  stream);
  if (!chooser_->attend(0, queries, piece.q_unrotated, workspace.data(), stream.stream)) {
    const cuda::RowLists lists = chooser_->select(0, queries, piece.q_unrotated, stream.stream);
    attend_rows_decode(queries, lists, room_.tokens, workspace.data(), stream.stream);
  }
  narrow(piece, stream);
  cuda::flush_launches();
}

void LayerSelector::narrow(const Piece& piece, const cuda::CallerStream& stream) const {
  const std::int64_t row = std::int64_t{geometry_.query_heads} * geometry_.head_dim;
  if (piece.narrowed != nullptr)
    cuda::depart(piece.queries.o, piece.queries.count * row, piece.narrowed, piece.narrowed_type,
                 stream.stream);
}

void LayerSelector::select(const CallerQueries& queries, const CallerRows& rows,
                           const cuda::CallerStream& stream,
                           const std::function<void(const CallerSet&)>& take) {
  const cuda::OnDevice here(device_);
  const Call call(*this, stream);
  const Numbers numbers = take_call(queries, rows, DType::f32, stream);
  for_pieces(queries, numbers, stream, [&](const Piece& piece) {
    const std::int64_t tokens = piece.queries.count;
    const bool together = tokens > kMostSparseTokens;
    const cuda::RowLists lists = together
                                     ? chooser_->select_together(0, piece.queries, stream.stream)
                                     : chooser_->select(0, piece.queries, piece.q_unrotated, stream.stream);
    const std::int64_t per_token = std::int64_t{geometry_.kv_heads} * lists.lists_per_head,
                       all = together ? per_token : tokens * per_token;
    std::vector<std::int32_t> counts(static_cast<std::size_t>(all));
    cuda::copy_and_wait(counts.data(), lists.counts, all * 4, stream);
    // Tokens that choose together attend to all from the first one's window on.
    const std::int64_t behind = std::max(lists.sink, piece.position + 1 - lists.window),
                       last = std::max(behind, piece.position + tokens - lists.window);
    for (std::int64_t list = 0; list < all; ++list) {
      const int kv_head = static_cast<int>(list % per_token) / lists.lists_per_head,
                heads = geometry_.group() / lists.lists_per_head;
      const std::int64_t token = piece.first + list / per_token;
      take({.kv_head = kv_head,
            .first_query_head = static_cast<int>(list % per_token) * heads,
            .query_heads = heads,
            .token_begin = token,
            .token_end = token + (together ? tokens : 1),
            .rows = lists.rows + list * lists.capacity,
            .log_weights = lists.log_weights == nullptr ? nullptr : lists.log_weights + list * lists.capacity,
            .count = counts[static_cast<std::size_t>(list)],
            .run_begin = behind,
            .run_end = together ? last : behind});
    }
  });
}

void LayerSelector::observe(const CallerQueries& queries, const cuda::CallerStream& stream) {
  auto& listener = dynamic_cast<HearsQueries&>(host_);
  const auto begin = static_cast<Position>(queries.begin);
  const std::vector<Position> positions = listener.wanted_queries(0, begin, queries.tokens);
  if (positions.empty()) return;
  const std::int64_t row = std::int64_t{geometry_.query_heads} * geometry_.head_dim;
  std::vector<float> heard(positions.size() * static_cast<std::size_t>(row));
  const auto* const q = static_cast<const float*>(queries.q);
  for_runs(positions, [&](std::int64_t first, std::int64_t count) {
    cuda::copy_and_wait(heard.data() + first * row,
                        q + (positions[static_cast<std::size_t>(first)] - queries.begin) * row,
                        count * row * std::int64_t{sizeof(float)}, stream);
  });
  for (std::size_t i = 0; i < positions.size() && !listener.hears_rotated(); ++i)
    geometry_.rope->unrotate(
        std::span(heard).subspan(i * static_cast<std::size_t>(row), static_cast<std::size_t>(row)),
        positions[i]);
  listener.on_queries(
      {.sequence = 0, .begin = begin, .tokens = queries.tokens, .positions = positions, .q = heard});
}

}  // namespace lode
