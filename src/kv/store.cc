// SPDX-License-Identifier: Apache-2.0
#include "kv/store.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/file.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/q4_rows.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
/// Rolling back a question and its answer keeps their pages; more than this many tokens go back to the
/// system.
constexpr std::int64_t kKeptTokens = 8192;
constexpr int kParts = 4;

std::int64_t page_size() {
  static const std::int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

std::int64_t round_up(std::int64_t x, std::int64_t to) {
  return (x + to - 1) / to * to;
}

/// Address space whose pages appear as they are touched.
class Reservation {
 public:
  explicit Reservation(std::int64_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      throw RunError(fmt::format(
          "cannot reserve {} bytes of address space for the KV cache: {}; a smaller context needs less",
          bytes, std::strerror(errno)));
    }
    data_ = static_cast<std::byte*>(at);
  }
  ~Reservation() { munmap(data_, static_cast<std::size_t>(bytes_)); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// One row as int8 codes: x = code * scale, scale = max|x| / 127. A row with a NaN or an infinity gets the
/// scale NaN.
float narrow_q8(std::span<const float> x, std::int8_t* codes) {
  float peak = 0.0f;
  bool finite = true;
  for (const float value : x) {
    peak = std::max(peak, std::fabs(value));
    finite = finite && std::isfinite(value);
  }
  if (!finite) {
    std::fill_n(codes, x.size(), std::int8_t{1});
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = peak / 127.0f;
  if (!std::isnormal(scale)) {  // all zero, or so near that no float32 scale holds it
    std::fill_n(codes, x.size(), std::int8_t{0});
    return 0.0f;
  }
  const float inverse = 1.0f / scale;
  for (std::size_t i = 0; i < x.size(); ++i) {
    codes[i] = static_cast<std::int8_t>(std::lrintf(std::clamp(x[i] * inverse, -127.0f, 127.0f)));
  }
  return scale;
}

}  // namespace

std::int64_t KvShape::token_bytes() const {
  std::int64_t bytes = 0;
  for (int layer = 0; layer < layers; ++layer)
    if (has_rows(layer))
      bytes += (shared_rows ? 1 : 2 * std::int64_t{heads(layer)}) *
               (row_bytes_of(type, dim(layer)) + (type == DType::q8 ? 4 : 0));
  return bytes;
}

bool KvShape::layers_share_rows() const {
  for (int layer = 0; layer < layers; ++layer)
    if (rows_of(layer) != layer) return true;
  return false;
}

struct KvStore::Impl {
  /// The rows of one layer, head and part: `written` of them hold numbers.
  struct Range {
    std::byte* data = nullptr;
    std::int64_t written = 0;
    std::int64_t mapped =
        0;  ///< bytes from its beginning that a file is mapped on; 0 once rows were replaced
  };

  KvShape shape;
  std::int64_t tokens = 0;
  std::int64_t touched = 0;   ///< most rows that ever held numbers since their memory was last given back
  std::int64_t expected = 0;  ///< rows below it were announced by expect()
  std::unique_ptr<Reservation> memory;
  std::vector<Range> ranges;          // [L, Hkv, kParts]
  std::span<std::byte> short_ranges;  ///< where all ranges lie, if each is shorter than a huge page
  mutable std::vector<KvRows> views;  // [L, Hkv]
  RecurrentStates recurrent;

  explicit Impl(const KvShape& s) : shape(s), recurrent(s.recurrent) {
    LODE_ASSERT(s.layers > 0 && s.kv_heads > 0 && s.head_dim > 0 && s.max_tokens > 0);
    const std::int64_t heads = std::int64_t{s.layers} * s.kv_heads;
    std::int64_t bytes_of_all = kHugePage;
    for (int layer = 0; layer < s.layers; ++layer)
      for (int part = 0; part < kParts; ++part) bytes_of_all += s.kv_heads * range_bytes(layer, part);
    memory = std::make_unique<Reservation>(bytes_of_all);
    // Long ranges start at huge pages (address space costs nothing), so that full ones can be huge from their
    // first row. Those of a short tail lie close together: a system that gives huge pages unasked would fill one
    // for each.
    auto* at =
        reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::intptr_t>(memory->data()), kHugePage));
    std::byte* const begin = at;
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto layer = static_cast<int>(head / s.kv_heads), in_layer = static_cast<int>(head % s.kv_heads);
      for (int part = 0; part < kParts; ++part) {
        const std::int64_t bytes = s.holds(layer, in_layer, part % 2 == 0) ? range_bytes(layer, part) : 0;
        ranges.push_back({bytes > 0 ? at : nullptr, 0});
        at += bytes;
      }
      const std::int64_t held_by =
          std::int64_t{s.rows_of(layer)} * s.kv_heads + (s.shared_rows ? 0 : in_layer);
      const Range* const r = &ranges[static_cast<std::size_t>(held_by * kParts)];
      const int values = s.shared_rows ? 0 : 1;
      views.push_back({.type = s.type,
                       .k = r[0].data,
                       .v = r[values].data,
                       .k_scale = reinterpret_cast<const float*>(r[2].data),
                       .v_scale = reinterpret_cast<const float*>(r[2 + values].data),
                       .rows = 0,
                       .d = s.dim(layer)});
    }
    bool all_short = true;
    for (int layer = 0; layer < s.layers; ++layer) all_short = all_short && range_bytes(layer, 0) < kHugePage;
    if (all_short) short_ranges = {begin, at};
  }

  /// Bytes of one row of a part; 0 for the scales of types that have none.
  std::int64_t row_bytes(int layer, int part) const {
    if (part >= 2) return shape.type == DType::q8 ? std::int64_t{sizeof(float)} : 0;
    return row_bytes_of(shape.type, shape.dim(layer));
  }
  std::int64_t range_bytes(int layer, int part) const {
    const std::int64_t bytes = row_bytes(layer, part) * shape.max_tokens;
    return round_up(bytes, bytes < kHugePage ? page_size() : kHugePage);
  }

  Range& range(int layer, int head, int part) {
    LODE_ASSERT(layer >= 0 && layer < shape.layers && head >= 0 && head < shape.heads(layer) &&
                row_bytes(layer, part) > 0);
    return ranges[static_cast<std::size_t>((std::int64_t{layer} * shape.kv_heads + head) * kParts + part)];
  }

  /// Views are of the committed rows whenever these change, so that who only reads finds them right.
  void show_rows() {
    for (KvRows& view : views) view.rows = tokens;
  }

  void for_ranges(const auto& body /*(Range&, row_bytes)*/) {
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto layer = static_cast<int>(i / kParts / static_cast<std::size_t>(shape.kv_heads));
      if (const std::int64_t bytes = row_bytes(layer, static_cast<int>(i % kParts));
          bytes > 0 && ranges[i].data != nullptr)
        body(ranges[i], bytes);
    }
  }

  void require_room(std::int64_t more) const {
    if (tokens + more <= shape.max_tokens) return;
    throw InputError(fmt::format("expected at most {} tokens in the KV cache, found {} there and {} to add",
                                 shape.max_tokens, tokens, more));
  }

  void write_head(int layer, int head, std::int64_t count, const float* x /*[T, Hkv, d]*/, int part) {
    const std::int64_t d = shape.dim(layer), stride = d * shape.heads(layer), bytes = row_bytes(layer, part);
    Range& rows = range(layer, head, part);
    std::byte* to = rows.data + tokens * bytes;
    const float* from = x + head * d;
    if (shape.type == DType::q8) {
      Range& scales = range(layer, head, part + 2);
      auto* scale = reinterpret_cast<float*>(scales.data) + tokens;
      for (std::int64_t t = 0; t < count; ++t) {
        scale[t] = narrow_q8({from + t * stride, static_cast<std::size_t>(d)},
                             reinterpret_cast<std::int8_t*>(to + t * bytes));
      }
      scales.written = tokens + count;
    } else if (shape.type == DType::q4) {
      for (std::int64_t t = 0; t < count; ++t) narrow_q4(from + t * stride, shape.dim(layer), to + t * bytes);
    } else {
      for (std::int64_t t = 0; t < count; ++t)
        kernels().narrow(from + t * stride, d, shape.type, to + t * bytes);
    }
    rows.written = tokens + count;
  }
};

KvStore::KvStore(const KvShape& shape) : impl_(std::make_unique<Impl>(shape)) {}
KvStore::~KvStore() = default;
KvStore::KvStore(KvStore&&) noexcept = default;
KvStore& KvStore::operator=(KvStore&&) noexcept = default;

const KvShape& KvStore::shape() const {
  return impl_->shape;
}
std::int64_t KvStore::tokens() const {
  return impl_->tokens;
}

void KvStore::expect(std::int64_t tokens) {
  Impl& s = *impl_;
  tokens = std::min(tokens, s.shape.max_tokens);
  if (tokens <= s.expected) return;
  // Short ranges lie one behind the other: where nearly all of each will be full, huge pages may reach over several.
  if (tokens >= s.shape.max_tokens - s.shape.max_tokens / 8 && std::ssize(s.short_ranges) >= kHugePage) {
    const std::int64_t whole = std::ssize(s.short_ranges) / kHugePage * kHugePage;
    madvise(s.short_ranges.data(), static_cast<std::size_t>(whole), MADV_HUGEPAGE);
  }
  s.for_ranges([&](Impl::Range& range, std::int64_t row_bytes) {
    // Only huge pages that will be full, so that memory stays what the type says.
    const std::int64_t begin = s.expected * row_bytes / kHugePage * kHugePage;
    const std::int64_t end = tokens * row_bytes / kHugePage * kHugePage;
    if (end > begin) madvise(range.data + begin, static_cast<std::size_t>(end - begin), MADV_HUGEPAGE);
  });
  s.expected = tokens;
}

void KvStore::write(int layer, std::int64_t count, std::span<const float> k, std::span<const float> v,
                    ThreadPool* pool) {
  Impl& s = *impl_;
  const int heads = s.shape.heads(layer);
  const std::int64_t numbers = count * heads * s.shape.dim(layer);
  LODE_ASSERT(count >= 0 && std::ssize(k) == numbers && std::ssize(v) == numbers);
  s.require_room(count);
  const auto write_part = [&](std::int64_t item, int) {
    const bool values = item % 2 == 1;
    s.write_head(layer, static_cast<int>(item / 2), count, values ? v.data() : k.data(), values ? 1 : 0);
  };
  s.touched = std::max(s.touched, s.tokens + count);
  const std::int64_t items = s.shape.shared_rows ? 1 : 2 * std::int64_t{heads};
  constexpr std::int64_t kFew = 16;  // tokens: threads that are woken for them come too late
  if (pool != nullptr && count > kFew) return pool->for_each(items, write_part);
  for (std::int64_t item = 0; item < items; ++item) write_part(item, 0);
}

void KvStore::repeat(int layers, std::int64_t count, ThreadPool& pool) {
  Impl& s = *impl_;
  LODE_ASSERT(layers > 0 && s.shape.by_layer.empty());
  const auto own = static_cast<std::int64_t>(layers) * s.shape.kv_heads * kParts;
  pool.for_each(std::ssize(s.ranges) - own, [&](std::int64_t item, int) {
    const auto to = static_cast<std::size_t>(own + item), from = static_cast<std::size_t>((own + item) % own);
    const std::int64_t bytes = s.row_bytes(0, static_cast<int>(item % kParts));
    if (bytes == 0) return;
    if (s.ranges[to].data != s.ranges[from].data)
      std::memcpy(s.ranges[to].data + s.tokens * bytes, s.ranges[from].data + s.tokens * bytes,
                  static_cast<std::size_t>(count * bytes));
    s.ranges[to].written = s.tokens + count;
  });
}

void KvStore::share(int layers) {
  Impl& s = *impl_;
  LODE_ASSERT(layers > 0 && s.touched == 0 && s.shape.by_layer.empty());
  const std::size_t heads = static_cast<std::size_t>(layers) * static_cast<std::size_t>(s.shape.kv_heads);
  for (std::size_t i = heads * kParts; i < s.ranges.size(); ++i) s.ranges[i] = s.ranges[i % (heads * kParts)];
  for (std::size_t i = heads; i < s.views.size(); ++i) s.views[i] = s.views[i % heads];
}

std::byte* KvStore::rows_to_write(int layer, int head, Part part, std::int64_t count) {
  Impl& s = *impl_;
  LODE_ASSERT(count >= 0);
  s.require_room(count);
  const int p = static_cast<int>(part);
  Impl::Range& range = s.range(layer, head, p);
  range.written = s.tokens + count;
  s.touched = std::max(s.touched, range.written);
  return range.data + s.tokens * s.row_bytes(layer, p);
}

std::byte* KvStore::rows_to_replace(int layer, int head, Part part, std::int64_t begin,
                                    std::int64_t end) noexcept {
  Impl& s = *impl_;
  const int p = static_cast<int>(part);
  Impl::Range& range = s.range(layer, head, p);
  LODE_ASSERT(begin >= 0 && begin <= end && end <= s.tokens);
  const std::int64_t row_bytes = s.row_bytes(layer, p), first = round_up(begin * row_bytes, kHugePage),
                     last = std::min(end * row_bytes, range.mapped) / kHugePage * kHugePage;
  // Written through the file's mapping each page would be copied first, and stay small. Where the system
  // refuses, that is what happens.
  if (first < last) {
    const auto bytes = static_cast<std::size_t>(last - first);
    if (mmap(range.data + first, bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED)
      madvise(range.data + first, bytes, MADV_HUGEPAGE);
    range.mapped = 0;
  }
  return range.data + begin * row_bytes;
}

void KvStore::commit(std::int64_t count) {
  Impl& s = *impl_;
  s.for_ranges(
      [&](const Impl::Range& range, std::int64_t) { LODE_ASSERT(range.written == s.tokens + count); });
  s.tokens += count;
  s.show_rows();
  s.touched = std::max(s.touched, s.tokens);
  s.recurrent.commit(s.tokens);
}

RecurrentStates& KvStore::recurrent() {
  return impl_->recurrent;
}
const RecurrentStates& KvStore::recurrent() const {
  return impl_->recurrent;
}

void KvStore::roll_back(std::int64_t tokens) {
  Impl& s = *impl_;
  LODE_ASSERT(tokens >= 0);
  s.recurrent.roll_back(tokens);
  tokens = std::min(tokens, s.tokens);
  const bool release = s.touched - tokens > kKeptTokens;
  s.for_ranges([&](Impl::Range& range, std::int64_t row_bytes) {
    range.written = tokens;
    if (!release) return;
    const std::int64_t begin = round_up(tokens * row_bytes, page_size()),
                       end = round_up(s.touched * row_bytes, page_size());
    if (end > begin) madvise(range.data + begin, static_cast<std::size_t>(end - begin), MADV_DONTNEED);
  });
  s.tokens = tokens;
  s.show_rows();
  if (release) s.touched = tokens;
}

KvLayer KvStore::layer(int layer, std::int64_t pending) const {
  const Impl& s = *impl_;
  LODE_ASSERT(pending >= 0 && pending <= s.shape.max_tokens - s.tokens);
  const std::span views =
      std::span(s.views).subspan(static_cast<std::size_t>(layer) * static_cast<std::size_t>(s.shape.kv_heads),
                                 static_cast<std::size_t>(s.shape.heads(layer)));
  for (KvRows& view : views)  // readers of a document that does not change write nothing
    if (view.rows != s.tokens + pending) view.rows = s.tokens + pending;
  return {.heads = views, .tokens = s.tokens + pending};
}

std::span<const std::byte> KvStore::rows(int layer, int head, Part part) const {
  const Impl& s = *impl_;
  const int p = static_cast<int>(part);
  return {impl_->range(layer, head, p).data, static_cast<std::size_t>(s.tokens * s.row_bytes(layer, p))};
}

void KvStore::map(int layer, int head, Part part, const MappedFile& file, std::uint64_t offset,
                  std::uint64_t bytes, std::int64_t first) {
  Impl& s = *impl_;
  const int p = static_cast<int>(part);
  Impl::Range& range = s.range(layer, head, p);
  const auto row_bytes = static_cast<std::uint64_t>(s.row_bytes(layer, p));
  LODE_ASSERT(first >= 0 && first <= s.shape.max_tokens);
  const std::uint64_t limit = row_bytes * static_cast<std::uint64_t>(s.shape.max_tokens - first);
  if (offset > file.bytes().size() || bytes > file.bytes().size() - offset) {
    throw InputError(fmt::format("{}: expected KV rows inside the file's {} bytes, found {} bytes at {}",
                                 file.path().string(), file.bytes().size(), bytes, offset));
  }
  if (bytes % row_bytes != 0 || bytes > limit) {
    throw InputError(fmt::format("{}: expected whole KV rows of {} bytes, at most {} of them, found {} bytes",
                                 file.path().string(), row_bytes, s.shape.max_tokens - first, bytes));
  }
  range.written = std::max(range.written, first + static_cast<std::int64_t>(bytes / row_bytes));
  if (bytes == 0) return;
  std::byte* const to = range.data + first * static_cast<std::int64_t>(row_bytes);
  // Short shards, or a system whose pages are larger than the file's alignment.
  if (offset % static_cast<std::uint64_t>(page_size()) != 0 || (to - range.data) % page_size() != 0) {
    std::memcpy(to, file.bytes().data() + offset, bytes);
    return;
  }
  void* at = mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                  file.descriptor(), static_cast<off_t>(offset));
  if (at == MAP_FAILED) {
    throw RunError(fmt::format("{}: cannot map {} bytes at {}: {}", file.path().string(), bytes, offset,
                               std::strerror(errno)));
  }
  range.mapped = std::max(range.mapped, to - range.data + static_cast<std::int64_t>(bytes));
}

}  // namespace lode
