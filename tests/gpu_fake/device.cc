// SPDX-License-Identifier: Apache-2.0
// A GPU that the host plays, so that what the engine tells a GPU is tested where there is none: memory,
// streams and kernels of kernels/cuda as their headers promise them, slow and plain. It is stricter than a
// real one: work is done as late as a stream may do it, new memory holds NaNs, and rows without memory cannot
// be touched.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/out_of_memory.h"
#include "base/threads.h"
#include "gpu/select/saap/buckets.h"
#include "gpu_fake/play.h"
#include "kernels/cuda/attend/attend_beside.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/attend/attend_shared.h"
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/kv_range.cu"  // no CUDA is in it
#include "kernels/cuda/device/pages.h"
#include "kernels/cuda/device/place_rows.h"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/linear/layer_inputs.h"
#include "kernels/cuda/linear/narrow_linear.h"
#include "kernels/dequantise.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

struct CUstream_st {
  std::deque<std::function<void()>> work;
  std::vector<std::function<void()>>* recorded = nullptr;
  std::vector<CUstream_st*> joined;  ///< streams that a capture of this one has drawn in
};
struct CUevent_st {
  CUstream_st* stream = nullptr;
  std::shared_ptr<bool> passed = std::make_shared<bool>(true);
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

namespace lode::cuda {

void enqueue(StreamHandle stream, std::function<void()> work) {
  if (stream == nullptr) return work();
  if (stream->recorded != nullptr) return stream->recorded->push_back(std::move(work));
  stream->work.push_back(std::move(work));
}

std::vector<float> widened(const void* from, DType type, std::int64_t n) {
  std::vector<float> to(static_cast<std::size_t>(n));
  kernels().widen(from, type, n, to.data());
  return to;
}

namespace {

constexpr std::int64_t kPageBytes = 128 << 10;

/// Where the "device" and pinned memory lie: begin -> end. Threads of several GPUs ask at once.
std::mutex known_mutex;
std::map<const char*, const char*>& known(bool device) {
  static std::map<const char*, const char*> ranges[2];
  return ranges[device ? 1 : 0];
}
void know(const char* begin, std::int64_t bytes, bool device) {
  const std::lock_guard lock(known_mutex);
  known(device)[begin] = begin + bytes;
}
void forget(const char* begin, bool device) {
  const std::lock_guard lock(known_mutex);
  known(device).erase(begin);
}
bool is_in(const void* at, bool device) {
  const std::lock_guard lock(known_mutex);
  const auto* const p = static_cast<const char*>(at);
  auto next = known(device).upper_bound(p);
  return next != known(device).begin() && p < std::prev(next)->second;
}

std::atomic<std::int64_t> memory = kPlayedMemory, memory_used = 0;

bool take_memory(std::int64_t bytes) {
  if (memory_used.fetch_add(bytes) + bytes <= memory) return true;
  memory_used -= bytes;
  return false;
}

void drain(StreamHandle stream) {
  while (stream != nullptr && !stream->work.empty()) {
    const std::function<void()> next = std::move(stream->work.front());
    stream->work.pop_front();
    next();
  }
}

void* take(std::int64_t bytes, bool device) {
  char* const at = static_cast<char*>(std::malloc(static_cast<std::size_t>(bytes)));
  std::memset(at, 0xff, static_cast<std::size_t>(bytes));
  know(at, bytes, device);
  return at;
}
std::int64_t known_bytes(void* data) {
  const std::lock_guard lock(known_mutex);
  const auto* const begin = static_cast<const char*>(data);
  return known(true).at(begin) - begin;
}
void give(void* data, bool device) {
  if (data == nullptr) return;
  if (device) memory_used -= known_bytes(data);
  forget(static_cast<char*>(data), device);
  std::free(data);
}

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

/// The keys that one query attends, in the order of RowLists.
std::vector<std::int64_t> keys_of(std::int64_t position, const RowLists* lists, std::int64_t list) {
  std::vector<std::int64_t> keys;
  const std::int64_t all = position + 1, sink = lists == nullptr ? all : std::min(lists->sink, all);
  for (std::int64_t i = 0; i < sink; ++i) keys.push_back(i);
  if (lists == nullptr) return keys;
  for (int i = 0; i < lists->counts[list]; ++i) keys.push_back(lists->rows[list * lists->capacity + i]);
  for (std::int64_t i = std::max(sink, all - lists->window); i < all; ++i) keys.push_back(i);
  return keys;
}

void merge_into(float* o, float& lse, const float* other, float other_lse, std::int64_t d) {
  if (other_lse == -INFINITY) return;
  const float peak = std::fmax(lse, other_lse);
  const float a = lse == -INFINITY ? 0.0f : std::exp(lse - peak), b = std::exp(other_lse - peak);
  for (std::int64_t i = 0; i < d; ++i)
    o[i] = (a == 0.0f ? 0.0f : o[i] * a / (a + b)) + other[i] * b / (a + b);
  lse = peak + std::log(a + b);
}

/// The keys and values of one KV head, one behind the other as the host's kernels want them.
struct GatheredRows {
  std::vector<char> k, v;
  std::vector<Position> rows;
  KvRows view;

  GatheredRows(const std::vector<std::int64_t>& keys, const KvLayout& layout, int kv_head, const char* base)
      : rows(keys.size()) {
    const auto row = static_cast<std::size_t>(layout.row_bytes());
    k.resize(keys.size() * row);
    v.resize(keys.size() * row);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const char* const key = base + layout.key_offset(kv_head, keys[i]);
      std::memcpy(k.data() + i * row, key, row);
      std::memcpy(v.data() + i * row, key + layout.value_offset(), row);
      rows[i] = static_cast<Position>(i);
    }
    view = {.type = layout.type,
            .k = reinterpret_cast<const std::byte*>(k.data()),
            .v = reinterpret_cast<const std::byte*>(v.data()),
            .rows = std::ssize(keys),
            .d = static_cast<int>(layout.head_dim)};
  }
};

/// Query heads [head, head + heads) of one token, which attend to the same keys of one KV head.
void attend_heads(const Queries& in, const RowLists* lists, std::int64_t n, std::int64_t head, int heads,
                  std::int32_t position, const char* base) {
  const std::int64_t d = in.layout.head_dim, group = in.query_heads / in.layout.kv_heads,
                     row = n * in.query_heads + head;
  const int kv_head = static_cast<int>(head / group);
  std::int64_t list = 0;
  if (lists != nullptr)
    list = (n * in.layout.kv_heads + kv_head) * lists->lists_per_head +
           (lists->lists_per_head > 1 ? head % group : 0);
  const std::vector<std::int64_t> keys = keys_of(position, lists, list);
  const GatheredRows gathered(keys, in.layout, kv_head, base);
  std::vector<float> log_weights(keys.size(), 0.0f);
  if (lists != nullptr && lists->log_weights != nullptr)
    std::copy_n(lists->log_weights + list * lists->capacity, lists->counts[list],
                log_weights.begin() + std::min<std::int64_t>(lists->sink, position + 1));
  std::vector<float> q(in.q + row * d, in.q + (row + heads) * d),
      m(static_cast<std::size_t>(heads), -INFINITY), l(static_cast<std::size_t>(heads), 0.0f);
  for (float& x : q) x *= in.scale;
  float* const o = in.o + row * d;
  std::fill_n(o, heads * d, 0.0f);
  kernels().attend_rows(q.data(), heads, gathered.view, gathered.rows.data(), log_weights.data(),
                        std::ssize(keys), {o, m.data(), l.data()});
  for (int h = 0; h < heads; ++h) {
    const auto at = static_cast<std::size_t>(h);
    float lse = keys.empty() ? -INFINITY : m[at] + std::log(l[at]);
    for (std::int64_t i = 0; i < d; ++i) o[h * d + i] = l[at] > 0 ? o[h * d + i] / l[at] : 0.0f;
    if (lists != nullptr && lists->tail_lse != nullptr)
      merge_into(o + h * d, lse, lists->tail_output + (row + h) * d, lists->tail_lse[row + h], d);
    if (in.lse != nullptr) in.lse[row + h] = lse;
  }
}

/// `position_of(token)`: of the last key that it may attend to.
void attend_all(const Queries& in, const RowLists* lists,
                const std::function<std::int32_t(const QueryToken&)>& position_of,
                const std::function<const char*(const QueryToken&)>& base_of) {
  const bool apart = lists != nullptr && lists->lists_per_head > 1;
  const int heads = apart ? 1 : static_cast<int>(in.query_heads / in.layout.kv_heads);
  const std::int64_t parts = in.query_heads / heads;
  pool().for_each(std::int64_t{in.count} * parts, [&](std::int64_t item, int) {
    const QueryToken& token = in.tokens[item / parts];
    attend_heads(in, lists, item / parts, item % parts * heads, heads, position_of(token), base_of(token));
  });
}
void attend_all(const Queries& in, const RowLists* lists) {
  attend_all(
      in, lists, [](const QueryToken& token) { return token.position; },
      [&](const QueryToken& token) { return in.bases[token.sequence] + in.layer_offset; });
}

}  // namespace

Availability availability(bool) {
  return {.ok = true,
          .why = {},
          .name = "the host",
          .total_bytes = memory,
          .free_bytes = std::max<std::int64_t>(0, memory - memory_used)};
}

std::int64_t play_memory(std::int64_t bytes) {
  memory = bytes;
  return memory_used;
}

Stream::Stream() : stream_(new CUstream_st) {}
Stream::~Stream() {
  delete stream_;
}
void Stream::synchronize() const {
  drain(stream_);
}

void free_device(void* data) noexcept {
  give(data, true);
}
void free_pinned(void* data) noexcept {
  give(data, false);
}
Buffer::Buffer(std::int64_t bytes, std::string_view) {
  bytes_ = bytes;
  if (bytes > 0 && !take_memory(bytes)) throw OutOfDeviceMemory("out of GPU memory");
  if (bytes > 0) data_ = take(bytes, true);
}
PinnedBuffer::PinnedBuffer(std::int64_t bytes) {
  bytes_ = bytes;
  if (bytes > 0) data_ = take(bytes, false);
}

void copy(void* to, const void* from, std::int64_t bytes, StreamHandle stream) {
  if (bytes > 0) copy_apart(to, bytes, from, bytes, bytes, 1, stream);
}
void copy_apart(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                std::int64_t width, std::int64_t rows, StreamHandle stream) {
  const auto move = [=](const void* source) {
    for (std::int64_t i = 0; i < rows; ++i)
      std::memcpy(static_cast<char*>(to) + i * to_stride, static_cast<const char*>(source) + i * from_stride,
                  static_cast<std::size_t>(width));
  };
  if (is_in(from, true) || is_in(from, false)) {
    enqueue(stream, [=] { move(from); });
  } else {  // pageable memory has been read when the call returns
    const auto* const first = static_cast<const char*>(from);
    const auto bytes = std::make_shared<std::vector<char>>(first, first + (rows - 1) * from_stride + width);
    enqueue(stream, [=] { move(bytes->data()); });
  }
  if (!is_in(to, true) && !is_in(to, false)) drain(stream);
}
void fill(void* at, int byte, std::int64_t bytes, StreamHandle stream) {
  enqueue(stream, [=] { std::memset(at, byte, static_cast<std::size_t>(bytes)); });
}

void copy_numbers(void* to, const PinnedBuffer& from, std::int64_t bytes, StreamHandle stream) {
  copy(to, from.as<void>(), bytes, stream);
}

BesideNoCapture::BesideNoCapture() = default;  // nothing here fails beside a capture
BesideNoCapture::~BesideNoCapture() = default;

Graph::~Graph() {
  delete exec_;
}
void Graph::begin(StreamHandle stream) {
  stream->recorded = new std::vector<std::function<void()>>;
}
Graph Graph::end(StreamHandle stream) {
  Graph graph;
  graph.exec_ = new CUgraphExec_st{std::move(*stream->recorded)};
  abandon(stream);
  return graph;
}
void Graph::abandon(StreamHandle stream) noexcept {
  for (CUstream_st* const other : std::exchange(stream->joined, {})) other->recorded = nullptr;
  delete std::exchange(stream->recorded, nullptr);
}
void Graph::launch(StreamHandle stream) const {
  for (const auto& work : exec_->work) stream->work.push_back(work);
}

Event::Event() : event_(new CUevent_st) {}
Event::~Event() {
  delete event_;
}
void Event::record(StreamHandle stream) {
  event_->stream = stream;
  event_->passed = std::make_shared<bool>(false);
  enqueue(stream, [passed = event_->passed] { *passed = true; });
}
void Event::wait() const {
  while (!*event_->passed) {
    const std::function<void()> next = std::move(event_->stream->work.front());
    event_->stream->work.pop_front();
    next();
  }
}
void Event::hold_up(StreamHandle stream) const {
  CUstream_st* const from = event_->stream;
  if (from == nullptr || from->recorded == nullptr) return wait();
  if (stream->recorded != nullptr) return;  // in one capture things stand in the order in which they came
  stream->recorded = from->recorded;
  from->joined.push_back(stream);
}

std::int64_t page_bytes() {
  return kPageBytes;
}
char* reserve_addresses(std::int64_t bytes) {
  void* const at = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw RunError("no addresses");
  know(static_cast<char*>(at), bytes, true);
  return static_cast<char*>(at);
}
void free_addresses(char* at, std::int64_t bytes) noexcept {
  forget(at, true);
  munmap(at, static_cast<std::size_t>(bytes));
}
namespace {

/// What is mapped lies in one file, each mapping at a place of its own, so that memory can be shown twice.
struct Pages {
  int file = memfd_create("pages of a played GPU", 0);
  std::atomic<std::int64_t> end = kPageBytes;  ///< no mapping's place is 0
};
Pages& pages() {
  static Pages all;
  return all;
}
void show(char* at, std::int64_t bytes, std::int64_t place) {
  if (mmap(at, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages().file,
           place) == MAP_FAILED)
    throw RunError("no pages");
}

}  // namespace

unsigned long long map_pages(char* at, std::int64_t bytes) {
  if (!take_memory(bytes)) return 0;
  const std::int64_t place = pages().end.fetch_add(bytes);
  static std::mutex growing;
  const std::lock_guard lock(growing);
  if (ftruncate(pages().file, pages().end) != 0) throw RunError("no pages");
  show(at, bytes, place);
  return static_cast<unsigned long long>(place);
}
void unmap_pages(char* at, std::int64_t bytes, unsigned long long handle) noexcept {
  memory_used -= bytes;
  unmap_again(at, bytes);
  static_cast<void>(
      fallocate(pages().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle), bytes));
}
void map_again(char* at, std::int64_t bytes, unsigned long long handle) {
  show(at, bytes, static_cast<std::int64_t>(handle));
}
void unmap_again(char* at, std::int64_t bytes) noexcept {
  mmap(at, static_cast<std::size_t>(bytes), PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
void synchronize_device() {}
DeviceMemory device_memory() {
  return {};
}

void fill_uniform(void*, DType, std::int64_t, float, float, std::uint64_t, StreamHandle) {
  throw RunError("the host plays no random numbers");
}

std::int64_t decode_workspace_bytes(int, int, int, int) {
  return 64;
}
void attend_full_decode(const Queries& queries, std::int64_t, void*, StreamHandle stream) {
  enqueue(stream, [=] { attend_all(queries, nullptr); });
}
void attend_full_beside(const Queries& queries, std::int64_t most, void* workspace, StreamHandle stream) {
  attend_full_decode(queries, most, workspace, stream);
}
void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t, void*,
                        StreamHandle stream) {
  enqueue(stream, [=] { attend_all(queries, &lists); });
}
void attend_prefill(const Queries& queries, std::int32_t, StreamHandle stream, Precision) {
  enqueue(stream, [=] { attend_all(queries, nullptr); });
}
void attend_window_prefill(const Queries& queries, std::int32_t, std::int64_t window, StreamHandle stream,
                           Precision) {
  enqueue(stream, [=] {
    const std::vector<std::int32_t> counts(
        static_cast<std::size_t>(queries.count) * static_cast<std::size_t>(queries.layout.kv_heads), 0);
    const RowLists none = {.counts = counts.data(), .window = window};
    attend_all(queries, &none);
  });
}
bool may_wait_for_room(StreamHandle) {
  return true;
}
std::int64_t shared_workspace_bytes(int queries, int query_heads, int head_dim) {
  return std::int64_t{queries} * query_heads * (head_dim + 1) * std::int64_t{sizeof(float)};
}
StatePlanes attend_shared(const Queries& queries, std::int64_t keys, void* workspace, StreamHandle stream,
                          Precision) {
  Queries whole = queries;
  whole.o = static_cast<float*>(workspace);
  whole.lse = whole.o + std::int64_t{queries.count} * queries.query_heads * queries.layout.head_dim;
  enqueue(stream, [=] {
    const char* const base = whole.bases[whole.tokens[0].sequence] + whole.layer_offset;
    attend_all(
        whole, nullptr, [=](const QueryToken&) { return static_cast<std::int32_t>(keys - 1); },
        [=](const QueryToken&) { return base; });
  });
  return {whole.o, whole.lse, 1};
}
std::int64_t rows_prefill_workspace_bytes(int) {
  return 64;
}
void attend_rows_prefill(const Queries&, std::int32_t, const RowLists&, void*, StreamHandle, Precision) {
  throw RunError("no method of the played GPU chooses for many tokens together");
}
void place_rows(char* base, const KvLayout& layout, const std::int64_t* places, const char* rows,
                std::int64_t count, StreamHandle stream) {
  enqueue(stream, [=] {
    const auto row = static_cast<std::size_t>(layout.row_bytes());
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(base + places[i], rows + 2 * i * layout.row_bytes(), row);
      std::memcpy(base + places[i] + layout.value_offset(), rows + (2 * i + 1) * layout.row_bytes(), row);
    }
  });
}
void merge_states(float* output, const float* lse, const float* other, const float* other_lse,
                  std::int64_t rows, int d, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t row = 0; row < rows; ++row) {
      float mine = lse[row];
      merge_into(output + row * d, mine, other + row * d, other_lse[row], d);
    }
  });
}

void list_window(const WindowRows& in, int count, std::int32_t* rows, std::int32_t* counts,
                 StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t list = 0; list < std::int64_t{count} * in.kv_heads; ++list) {
      const std::int64_t token = list / in.kv_heads, position = in.absolute[token].position,
                         seam = position - in.in_tail[token].position;
      counts[list] = 0;
      for (std::int64_t row = std::max<std::int64_t>(0, position + 1 - in.window); row < seam; ++row)
        rows[list * in.capacity + counts[list]++] = static_cast<std::int32_t>(row);
    }
  });
}
void merge_sinks(float* output, float* lse, const float* sinks, std::int64_t rows, int heads, int d,
                 StreamHandle stream) {
  enqueue(stream, [=] {
    const std::vector<float> nothing(static_cast<std::size_t>(d), 0.0f);
    for (std::int64_t row = 0; row < rows; ++row)
      merge_into(output + row * d, lse[row], nothing.data(), sinks[row % heads], d);
  });
}
void merge_parts(const float* outputs, const float* lse, int parts, std::int64_t rows, int d, float* to,
                 float* to_lse, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t row = 0; row < rows; ++row) {
      std::vector<float> sum(static_cast<std::size_t>(d), 0.0f);
      float all = -INFINITY;
      for (std::int64_t p = 0; p < parts; ++p)
        merge_into(sum.data(), all, outputs + (p * rows + row) * d, lse[p * rows + row], d);
      std::copy(sum.begin(), sum.end(), to + row * d);
      if (to_lse != nullptr) to_lse[row] = all;
    }
  });
}
void merge_planes(const StatePlanes& planes, const StatePart (&parts)[3], int count, std::int64_t rows, int d,
                  float* to, const SplitResult&, StreamHandle stream) {
  std::vector<StatePart> all;
  for (int p = 0; p < planes.count; ++p)
    all.push_back({planes.outputs + p * rows * d, planes.lse + p * rows});
  all.insert(all.end(), parts, parts + count);
  enqueue(stream, [=] {
    for (std::int64_t row = 0; row < rows; ++row) {
      std::vector<float> sum(static_cast<std::size_t>(d), 0.0f);
      float lse = -INFINITY;
      for (const StatePart& part : all) merge_into(sum.data(), lse, part.output + row * d, part.lse[row], d);
      std::copy(sum.begin(), sum.end(), to + row * d);
    }
  });
}

// ---- The rest of a layer.
// -----------------------------------------------------------------------------------------

struct Linear::Impl {
  StreamHandle stream;
};
Linear::Linear(StreamHandle stream, Precision) : impl_(new Impl{stream}) {}
Linear::~Linear() {
  delete impl_;
}
void Linear::reserve(std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}
std::int64_t Linear::panel_bytes(std::int64_t, std::int64_t, Precision) {
  return 0;
}
void Linear::reserve_panel(std::int64_t) {}
// "Tiles" are the numbers that blocks stand for, as float32.
std::int64_t tiled_bytes(TileFormat, std::int64_t rows, std::int64_t cols) {
  return rows * cols * std::int64_t{sizeof(float)};
}
void pack_tiles(const void* blocks, TileFormat format, std::int64_t rows, std::int64_t cols, void* tiles,
                StreamHandle stream) {
  enqueue(stream, [=] {
    constexpr WeightType kTypes[] = {WeightType::f32,  WeightType::q4_0, WeightType::q4_1, WeightType::q5_0,
                                     WeightType::q5_1, WeightType::q8_0, WeightType::q4_k, WeightType::q5_k,
                                     WeightType::q6_k, WeightType::mxfp4};
    dequantise(kTypes[static_cast<int>(format)], static_cast<const std::byte*>(blocks), rows * cols,
               static_cast<float*>(tiles));
  });
}
std::int64_t Linear::scratch_bytes(std::int64_t rows, std::int64_t, std::int64_t, std::int64_t,
                                   std::int64_t) {
  return rows * 4;
}

std::vector<float> product(const float* x, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias) {
  std::vector<float> y(static_cast<std::size_t>(n * w.rows));
  matmul({x, n, w.cols}, w.data, w.tiled() ? DType::f32 : w.type, w.rows, {y.data(), n, w.rows}, pool());
  if (bias.data == nullptr) return y;
  const auto b = widened(bias.data, bias.type, w.rows);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += b[i % b.size()];
  return y;
}

std::vector<float> normed(const float* x, std::int64_t n, const DeviceWeight& weight, float eps) {
  const std::int64_t d = weight.cols;
  const auto gain = widened(weight.data, weight.type, d);
  std::vector<float> y(static_cast<std::size_t>(n * d));
  for (std::int64_t t = 0; t < n; ++t) {
    const double square = kernels().dot(x + t * d, x + t * d, d) / static_cast<double>(d);
    const auto inverse = static_cast<float>(1.0 / std::sqrt(square + static_cast<double>(eps)));
    for (std::int64_t i = 0; i < d; ++i)
      y[static_cast<std::size_t>(t * d + i)] = x[t * d + i] * inverse * gain[static_cast<std::size_t>(i)];
  }
  return y;
}

namespace {

void add_now(std::vector<float> y, std::int64_t n, const Addition& addition, float* x) {
  if (addition.norm.data != nullptr) y = normed(y.data(), n, addition.norm, addition.eps);
  for (std::size_t i = 0; i < y.size(); ++i) x[i] = (x[i] + y[i] * addition.multiplier) * addition.factor;
}

float gelu_tanh_of(float x) {
  return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

}  // namespace

float activated(const Activation& a, float gate, float up) {
  if (a.gelu) return gelu_tanh_of(gate) * up;
  const float g = std::min(gate, a.limit), u = std::clamp(up, -a.limit, a.limit);
  return g / (1.0f + std::exp(-a.slope * g)) * (u + a.offset);
}

std::vector<float> fed_forward(const Linear::MlpArguments& a, std::int64_t n, const float* x) {
  const auto h = normed(x, n, a.norm, a.eps);
  auto gate = product(h.data(), n, a.gate, a.gate_bias);
  const auto up = product(h.data(), n, a.up, a.up_bias);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = activated(a.activation, gate[i], up[i]);
  return product(gate.data(), n, a.down, a.down_bias);
}

namespace {

void rotate(float* x, std::int64_t d, std::int32_t position, const Linear::QkvArguments& a) {
  const float scale = a.rope_scale;
  for (std::int64_t i = 0; i < (a.turning < 0 ? d / 2 : a.turning); ++i) {
    const float angle = static_cast<float>(position) * a.frequencies[i], c = std::cos(angle),
                s = std::sin(angle);
    const float left = x[i], right = x[i + d / 2];
    x[i] = (left * c - right * s) * scale;
    x[i + d / 2] = (right * c + left * s) * scale;
  }
}

void qkv_now(const Linear::QkvArguments& a, const Queries& where) {
  const std::int64_t n = where.count, d = where.layout.head_dim,
                     kv_heads = a.k.data == nullptr ? 0 : where.layout.kv_heads;
  const auto h = normed(a.x, n, a.norm, a.eps);
  auto q = product(h.data(), n, a.q, a.q_bias);
  auto k = kv_heads == 0 ? std::vector<float>() : product(h.data(), n, a.k, a.k_bias);
  auto v = kv_heads == 0 || a.v.data == nullptr ? k : product(h.data(), n, a.v, a.v_bias);
  const std::vector<float> ones(static_cast<std::size_t>(d), 1.0f);
  if (a.v_norm) v = normed(v.data(), n * kv_heads, {ones.data(), DType::f32, 1, d}, a.eps);
  if (a.q_norm.data != nullptr) q = normed(q.data(), n * where.query_heads, a.q_norm, a.eps);
  if (a.k_norm.data != nullptr && kv_heads > 0) k = normed(k.data(), n * kv_heads, a.k_norm, a.eps);
  for (std::size_t i = 0; a.growth.factor != 0 && i < q.size(); ++i)
    q[i] *=
        1 + a.growth.factor * std::log1p(static_cast<float>(
                                  where.tokens[i / static_cast<std::size_t>(where.query_heads * d)].position /
                                  a.growth.start));
  if (a.q_unrotated != nullptr) std::copy(q.begin(), q.end(), a.q_unrotated);
  if (a.k_unrotated != nullptr) std::copy(k.begin(), k.end(), a.k_unrotated);
  for (std::int64_t t = 0; t < n; ++t) {
    const QueryToken& token = where.tokens[t];
    for (std::int64_t head = 0; head < where.query_heads; ++head)
      rotate(q.data() + (t * where.query_heads + head) * d, d, token.position, a);
    char* const base = const_cast<char*>(where.bases[token.sequence]) + where.layer_offset;
    for (std::int64_t head = 0; head < kv_heads; ++head) {
      float* const key = k.data() + (t * kv_heads + head) * d;
      rotate(key, d, token.position, a);
      char* const row = base + where.layout.key_offset(static_cast<int>(head), token.position);
      kernels().narrow(key, d, where.layout.type, row);
      kernels().narrow(v.data() + (t * kv_heads + head) * d, d, where.layout.type,
                       row + where.layout.value_offset());
    }
  }
  std::copy(q.begin(), q.end(), a.q_out);
  if (a.k_out != nullptr) std::copy(k.begin(), k.end(), a.k_out);
  if (a.v_out != nullptr) std::copy(v.begin(), v.end(), a.v_out);
}

}  // namespace

void Linear::qkv(const QkvArguments& a, const Queries& where) {
  enqueue(impl_->stream, [=] { qkv_now(a, where); });
}
void Linear::project_out(const float* attention, std::int64_t n, const DeviceWeight& w,
                         const DeviceWeight& bias, float* x, const Addition& addition) {
  enqueue(impl_->stream, [=] { add_now(product(attention, n, w, bias), n, addition, x); });
}
void Linear::multiply(const float* x, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias,
                      float* y, bool add) {
  enqueue(impl_->stream, [=] {
    const auto sums = product(x, n, w, bias);
    for (std::size_t i = 0; i < sums.size(); ++i) y[i] = add ? y[i] + sums[i] : sums[i];
  });
}
void Linear::add(const float* y, std::int64_t n, std::int64_t hidden, const Addition& addition, float* x) {
  enqueue(impl_->stream, [=] { add_now({y, y + n * hidden}, n, addition, x); });
}
void Linear::mlp(const MlpArguments& a, std::int64_t n, float* x) {
  enqueue(impl_->stream, [=] {
    auto y = fed_forward(a, n, x);
    if (a.to != nullptr)
      std::copy(y.begin(), y.end(), a.to);
    else
      add_now(std::move(y), n, a.addition, x);
  });
}
void Linear::head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps,
                  const DeviceWeight& output, float* logits) {
  enqueue(impl_->stream, [=] {
    const auto y = product(normed(x, n, norm, eps).data(), n, output, {});
    std::copy(y.begin(), y.end(), logits);
  });
}
struct NarrowLinear::Impl {
  Linear& linear;
};
NarrowLinear::NarrowLinear(Linear& linear, StreamHandle, Precision) : impl_(new Impl{linear}) {}
NarrowLinear::~NarrowLinear() = default;
void NarrowLinear::reserve(const Sizes&) {}
void NarrowLinear::qkv(const Linear::QkvArguments& a, const Queries& where) {
  for (int t = 0; t < where.count; ++t) {  // row by row: products of the host differ with their number
    Linear::QkvArguments one = a;
    Queries of = where;
    one.x += t * a.q.cols;
    for (float** to : {&one.q_out, &one.q_unrotated})
      if (*to != nullptr) *to += t * a.q.rows;
    of.tokens += t;
    of.count = 1;
    impl_->linear.qkv(one, of);
  }
}
void NarrowLinear::project_out(const float* attention, std::int64_t n, const DeviceWeight& w,
                               const DeviceWeight& bias, float* x, const Addition& addition,
                               const DeviceWeight&) {
  for (std::int64_t t = 0; t < n; ++t)
    impl_->linear.project_out(attention + t * w.cols, 1, w, bias, x + t * w.rows, addition);
}
void Linear::multiply_stream(const float* x, std::int64_t n, const DeviceWeight& w, float* y) {
  multiply(x, n, w, {}, y, false);
}

void NarrowLinear::multiply(const float* x, std::int64_t n, const DeviceWeight& w, float* y) {
  for (std::int64_t t = 0; t < n; ++t)
    impl_->linear.multiply(x + t * w.cols, 1, w, {}, y + t * w.rows, false);
}
void* NarrowLinear::halves_for(const DeviceWeight&) {
  return nullptr;
}
void NarrowLinear::mlp(const Linear::MlpArguments& a, std::int64_t n, float* x, const DeviceWeight&) {
  for (std::int64_t t = 0; t < n; ++t) impl_->linear.mlp(a, 1, x + t * a.gate.cols);
}
void NarrowLinear::head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps,
                        const DeviceWeight& output, float* logits) {
  for (std::int64_t t = 0; t < n; ++t)
    impl_->linear.head(x + t * output.cols, 1, norm, eps, output, logits + t * output.rows);
}
void argmax(const float* logits, std::int64_t n, std::int64_t vocab, std::int32_t* token,
            StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < n; ++i) {
      const float* const row = logits + i * vocab;
      token[i] = static_cast<std::int32_t>(std::max_element(row, row + vocab) - row);
    }
  });
}

void embed(const std::int32_t* tokens, std::int64_t n, const DeviceWeight& embedding, float* x,
           StreamHandle stream, float multiplier) {
  enqueue(stream, [=] {
    const std::int64_t d = embedding.cols;
    const DType type = embedding.tiled() ? DType::f32 : embedding.type;
    for (std::int64_t t = 0; t < n; ++t)
      kernels().widen(static_cast<const char*>(embedding.data) + tokens[t] * d * bytes_of(type), type, d,
                      x + t * d);
  });
  scale_and_cap(x, n * embedding.cols, multiplier, 0.0f, stream);
}
void join_inputs(const LayerInputs& sizes, float scale, const DeviceWeight& gain, float eps,
                 const float* embedded, float* made, StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t rows = sizes.tokens * sizes.layers;
    for (std::int64_t i = 0; i < sizes.numbers(); ++i) made[i] *= scale;
    const auto y = normed(made, rows, gain, eps);
    for (std::int64_t i = 0; i < sizes.numbers(); ++i)
      made[i] = (y[static_cast<std::size_t>(i)] + embedded[i]) * static_cast<float>(std::sqrt(0.5));
  });
}
void weigh_inputs(const LayerInputs& sizes, const float* made, std::int64_t layer,
                  const Activation& activation, float* gates, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t t = 0; t < sizes.tokens; ++t)
      for (std::int64_t i = 0; i < sizes.width; ++i) {
        float& gate = gates[t * sizes.width + i];
        gate = activated(activation, gate, made[(t * sizes.layers + layer) * sizes.width + i]);
      }
  });
}
void scale_and_cap(float* x, std::int64_t count, float factor, float cap, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < count; ++i)
      x[i] = cap > 0 ? cap * std::tanh(x[i] * factor / cap) : x[i] * factor;
  });
}

}  // namespace lode::cuda

namespace lode {

// Methods that the host does not play choose on the host.
std::unique_ptr<GpuSelector> make_gpu_topk(const Spec&, const GpuGeometry&) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_buckets(const Spec&, const GpuGeometry&, std::span<Selector* const>) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_clusters(const Spec&, const GpuGeometry&, std::span<Selector* const>) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_signatures(const Spec&, const GpuGeometry&,
                                                 std::span<Selector* const>) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_buckets_for_bench(const Spec&, const GpuGeometry&, std::uint64_t,
                                                        double) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_clusters_for_bench(const Spec&, const GpuGeometry&, std::uint64_t) {
  return nullptr;
}
std::unique_ptr<GpuSelector> make_gpu_signatures_for_bench(const Spec&, const GpuGeometry&, std::uint64_t) {
  return nullptr;
}
std::vector<float> train_centroids_on_gpu(const GpuKeys&, int, int, std::int64_t, bool, std::int64_t,
                                          cuda::StreamHandle) {
  throw RunError("the host plays no bench");
}
}  // namespace lode
