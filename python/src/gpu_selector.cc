// SPDX-License-Identifier: Apache-2.0
#include "gpu_selector.h"

#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "gpu/select/layer_selector.h"
#include "gpu_arrays.h"
#include "lodestone/error.h"

namespace lode::python {

struct SelectorOnGpu::Layer {
  LayerSelector selector;
};

namespace {

void check_aligned(const void* data, Name name) {
  constexpr std::uintptr_t kBytes = 16;
  if (reinterpret_cast<std::uintptr_t>(data) % kBytes != 0)
    throw nb::value_error(
        (std::string(name) +
         ": expected memory that begins at a multiple of 16 bytes, found another place; make a copy "
         "of the array")
            .c_str());
}

/// Keys and values of a call, and the arrays that hold them.
struct Rows {
  Array k, v;
  CallerRows rows;

  Rows(const SelectorOnGpu::Keys& keys, const LayerGeometry& geometry, const Caller& caller)
      : k(gpu_array<Array>(keys.k, "k", caller)), v(gpu_array<Array>(keys.v, "v", caller)) {
    const DType type = check_keys_and_values(k, v);
    if (std::cmp_not_equal(k.shape(0), geometry.kv_heads) ||
        std::cmp_not_equal(k.shape(2), geometry.head_dim))
      throw nb::value_error(("k: expected [" + std::to_string(geometry.kv_heads) + ", tokens, " +
                             std::to_string(geometry.head_dim) + "], found " + shape_text(k))
                                .c_str());
    if (keys.first < 0)
      throw InputError("first: expected a position of 0 or more, found " + std::to_string(keys.first));
    rows = {strided(k, v, type), type, keys.first};
  }
};

/// Query tokens of a call, and the array that holds them.
struct Tokens {
  Array q;
  CallerQueries queries;

  Tokens(const ArrayArgument& q_, std::int64_t begin, const LayerGeometry& geometry, const Caller& caller)
      : q(gpu_array<Array>(q_, "q", caller)) {
    const DType type = check_float_vectors(q, 3, "q");
    queries = {q.data(), begin, static_cast<std::int64_t>(q.shape(0)), type};
    if (q.shape(0) == 0 || std::cmp_not_equal(q.shape(1), geometry.query_heads) ||
        std::cmp_not_equal(q.shape(2), geometry.head_dim))
      throw nb::value_error(("q: expected [tokens, " + std::to_string(geometry.query_heads) + ", " +
                             std::to_string(geometry.head_dim) + "], found " + shape_text(q))
                                .c_str());
    if (begin < 0 || begin > std::numeric_limits<Position>::max() - queries.tokens)
      throw nb::value_error(
          ("begin: expected a position of 0 or more, found " + std::to_string(begin)).c_str());
    check_aligned(q.data(), "q");
  }
};

void check_rows(const Rows& rows, const CallerQueries& queries) {
  const std::int64_t needed = queries.begin + queries.tokens - rows.rows.first;
  if (rows.rows.kv.rows < needed)
    throw nb::value_error(("k: expected " + std::to_string(needed) + " tokens or more, found " +
                           std::to_string(rows.rows.kv.rows))
                              .c_str());
}

/// A set and a copy of its rows, those of its run behind the others.
struct Chosen {
  CallerSet set;
  cuda::StreamMemory rows, log_weights;

  std::int64_t count() const { return set.count + set.run_end - set.run_begin; }
};

/// Copies of `count` numbers and, behind them, of `more`.
template <class T>
cuda::StreamMemory copy_of(const T* numbers, std::int64_t count, const std::vector<T>& more,
                           const cuda::CallerStream& stream) {
  constexpr std::int64_t kBytes = sizeof(T);
  cuda::StreamMemory memory((count + std::ssize(more)) * kBytes, stream);
  if (count > 0) cuda::copy(memory.as<void>(), numbers, count * kBytes, stream.stream);
  if (!more.empty()) cuda::upload(memory.as<T>() + count, more.data(), std::ssize(more) * kBytes, stream);
  return memory;
}

Chosen copy_of(const CallerSet& set, const cuda::CallerStream& stream) {
  std::vector<std::int32_t> run(static_cast<std::size_t>(set.run_end - set.run_begin));
  std::iota(run.begin(), run.end(), static_cast<std::int32_t>(set.run_begin));
  Chosen chosen = {.set = set, .rows = copy_of(set.rows, set.count, run, stream), .log_weights = {}};
  if (set.log_weights != nullptr)
    chosen.log_weights = copy_of(set.log_weights, set.count, std::vector<float>(run.size()), stream);
  return chosen;
}

nb::object array_of_set(cuda::StreamMemory memory, std::int64_t count, nb::dlpack::dtype type,
                        const Caller& caller) {
  auto held = std::make_shared<CudaMemory>(std::move(memory), caller);
  held->record();
  return nb::cast(new_array(std::move(held), 0, {static_cast<std::size_t>(count)}, type));
}

nb::tuple tuple_of(Chosen chosen, const Caller& caller) {
  const CallerSet& set = chosen.set;
  nb::list heads;
  for (int head = 0; head < set.query_heads; ++head) heads.append(set.first_query_head + head);
  nb::object weights = nb::none();
  if (set.log_weights != nullptr)
    weights = array_of_set(std::move(chosen.log_weights), chosen.count(), nb::dtype<float>(), caller);
  return nb::make_tuple(
      set.kv_head, heads, set.token_begin, set.token_end,
      array_of_set(std::move(chosen.rows), chosen.count(), nb::dtype<std::int32_t>(), caller), weights);
}

}  // namespace

SelectorOnGpu::SelectorOnGpu(const Host& host) : host_(host) {}
SelectorOnGpu::~SelectorOnGpu() = default;

/// The layer on the caller's GPU, made where there is none. The mutex is taken.
struct SelectorOnGpu::Call {
  const cuda::OnDevice here;
  LayerSelector& layer;

  Call(SelectorOnGpu& of, const Caller& caller) : here(caller.at.device), layer(layer_of(of, caller)) {}

 private:
  static LayerSelector& layer_of(SelectorOnGpu& of, const Caller& caller) {
    if (of.layer_ != nullptr && of.device_ != caller.at.device)
      throw InputError("Selector: expected arrays on GPU " + std::to_string(*of.device_) +
                       ", where the index is, found them on GPU " + std::to_string(caller.at.device) +
                       "; call build() with keys there first");
    if (of.layer_ == nullptr)
      of.layer_ = std::unique_ptr<Layer>(
          new Layer{{of.host_.spec, of.host_.geometry, of.host_.selector, caller.at.device}});
    of.device_ = caller.at.device;
    return of.layer_->selector;
  }
};

std::int64_t SelectorOnGpu::bytes() const {
  return layer_ == nullptr ? 0 : layer_->selector.bytes();
}
void SelectorOnGpu::forget() {
  layer_.reset();
  device_.reset();
}
void SelectorOnGpu::roll_back(std::int64_t tokens) {
  if (layer_ != nullptr) layer_->selector.roll_back(tokens);
}

void SelectorOnGpu::build(const ArrayArgument& k, const ArrayArgument& v, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  const Rows rows({k, v}, host_.geometry, caller);
  const nb::gil_scoped_release release;
  const std::lock_guard lock(host_.mutex);
  if (device_ != caller.at.device) forget();
  const Call call(*this, caller);
  call.layer.build(rows.rows, caller.at);
}

nb::object SelectorOnGpu::attend(const ArrayArgument& q, std::int64_t begin, const Keys& keys,
                                 bool return_lse, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  const Tokens tokens(q, begin, host_.geometry, caller);
  const Rows rows(keys, host_.geometry, caller);
  check_rows(rows, tokens.queries);
  StateOut out = state_out(caller, {tokens.q.shape(0), tokens.q.shape(1)}, tokens.q.shape(2), return_lse,
                           options.out, tokens.queries.type);
  check_aligned(out.output, "out");
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(host_.mutex);
    const Call call(*this, caller);
    call.layer.attend(tokens.queries, rows.rows, {out.output, out.lse, out.type}, caller.at);
    out.record();
  }
  return out.result();
}

nb::object SelectorOnGpu::select(const ArrayArgument& q, std::int64_t begin, const Keys& keys,
                                 const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  const Tokens tokens(q, begin, host_.geometry, caller);
  const Rows rows(keys, host_.geometry, caller);
  check_rows(rows, tokens.queries);
  std::vector<Chosen> all;
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(host_.mutex);
    const Call call(*this, caller);
    call.layer.select(tokens.queries, rows.rows, caller.at,
                      [&](const CallerSet& set) { all.push_back(copy_of(set, caller.at)); });
  }
  const cuda::OnDevice here(caller.at.device);
  nb::list sets;
  for (Chosen& chosen : all) sets.append(tuple_of(std::move(chosen), caller));
  return sets;
}

std::pair<NumpyRows, NumpyRows> SelectorOnGpu::rows(nb::handle stream) {
  const auto handle = reinterpret_cast<cuda::StreamHandle>(stream_handle(stream));
  const LayerGeometry& geometry = host_.geometry;
  std::vector<char> k, v;
  std::int64_t tokens = 0;
  DType type = DType::f32;
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(host_.mutex);
    if (layer_ == nullptr) throw InputError(kNoRowsOnGpu);
    const LayerSelector& layer = layer_->selector;
    tokens = layer.tokens();
    type = layer.type();
    const std::int64_t bytes = geometry.kv_heads * tokens * geometry.head_dim * bytes_of(type);
    k.resize(static_cast<std::size_t>(bytes));
    v.resize(static_cast<std::size_t>(bytes));
    layer_->selector.download(k.data(), v.data(), {layer.device(), handle});
  }
  const std::vector<std::size_t> shape = {static_cast<std::size_t>(geometry.kv_heads),
                                          static_cast<std::size_t>(tokens),
                                          static_cast<std::size_t>(geometry.head_dim)};
  return {numpy_rows(std::move(k), shape, type), numpy_rows(std::move(v), shape, type)};
}

void SelectorOnGpu::observe(const ArrayArgument& q, std::int64_t begin, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  const Tokens tokens(q, begin, host_.geometry, caller);
  floats(tokens.q, 3, "q");
  const nb::gil_scoped_release release;
  const std::lock_guard lock(host_.mutex);
  const Call call(*this, caller);
  call.layer.observe(tokens.queries, caller.at);
}

void SelectorOnGpu::finish(std::span<SelectorOnGpu* const> layers, int device, std::uintptr_t stream,
                           const std::function<void(const std::function<KvLayer(int)>&)>& run) {
  std::vector<LayerSelector*> all;
  for (SelectorOnGpu* const layer : layers) all.push_back(&layer->layer_->selector);
  LayerSelector::finish(all, {device, reinterpret_cast<cuda::StreamHandle>(stream)}, run);
}

}  // namespace lode::python
