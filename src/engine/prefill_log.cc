// SPDX-License-Identifier: Apache-2.0
#include "engine/prefill_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/cancel.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/hidden_name.h"
#include "engine/context.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::string_view kMagic = "LODEPART";
constexpr std::int64_t kHeader = 64;  // bytes: magic, identity in hex, time, zeros
constexpr std::size_t kIdentity = 32, kTimeAt = kMagic.size() + kIdentity;
// A method that has heard nothing of what the log holds hears so much of the text's end: `squeezed` calibrates on at most
// 512 queries.
constexpr std::int64_t kHeard = 2048;
constexpr auto kFirstSave = std::chrono::seconds(1);
constexpr std::int32_t kSequence = 0;  // a context's

struct BlockHeader {
  std::int64_t begin = 0, tokens = 0, bytes = 0;  // of what follows
  std::array<char, 32> checksum = {};             // XXH3-128 of what follows, in hex
};

/// Of the queries that a listener keeps of a block.
struct KeptHeader {
  std::array<char, 32> key = {};  // of the listener
  std::int64_t stride = 1, positions = 0, bytes = 0;
};

std::array<KvStore::Part, 4> all_parts() {
  return {KvStore::Part::k, KvStore::Part::v, KvStore::Part::k_scale, KvStore::Part::v_scale};
}

/// What keys depend on beside the tokens.
std::string identity_of(const Context::Impl& c) {
  return hash_hex(fmt::format("{} {} {} {} {} {}", c.model->fingerprint(), c.model->tokenizer().fingerprint(),
                              name_of(c.options.kv_type), c.rope_tokens, c.options.rope_factor.value_or(0.0),
                              c.options.chunk));
}

/// Calls visit(layer, head, part, bytes of a row) in the order of a block.
template <class Visit>
void each_part(const Context::Impl& c, const Visit& visit) {
  const std::size_t parts = c.options.kv_type == DType::q8 ? 4 : 2;
  for (int layer = 0; layer < c.config.layers; ++layer)
    for (int head = 0; head < c.kv.shape().heads(layer); ++head)
      for (std::size_t p = 0; p < parts; ++p)
        if (c.kv.shape().holds(layer, head, p % 2 == 0))
          visit(
              layer, head, all_parts()[p],
              p < 2 ? row_bytes_of(c.options.kv_type, c.kv.shape().dim(layer)) : std::int64_t{sizeof(float)});
}

std::int64_t block_bytes(const Context::Impl& c, std::int64_t tokens) {
  std::int64_t bytes = tokens * std::int64_t{sizeof(TokenId)};
  each_part(c, [&](int, int, KvStore::Part, std::int64_t row) { bytes += tokens * row; });
  return bytes + c.kv.recurrent().floats() * std::int64_t{sizeof(float)};  // the states at its end
}

[[noreturn]] void cannot_be_written(const std::filesystem::path& path) {
  throw RunError(write_failure(path, errno));
}

void write_all(int fd, std::span<const std::byte> bytes, std::int64_t offset,
               const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) cannot_be_written(path);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

bool read_all(int fd, std::span<std::byte> bytes, std::int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
  return true;
}

/// Whether positions rise within a block.
bool lie_within(std::span<const Position> positions, const BlockHeader& block) {
  for (std::size_t i = 0; i < positions.size(); ++i)
    if (positions[i] < (i == 0 ? block.begin : std::int64_t{positions[i - 1]} + 1)) return false;
  return positions.empty() || positions.back() < block.begin + block.tokens;
}

/// The queries of a block that `kept` has a place for, from `at` to `end`, which are in the file; false where they are not
/// whole.
bool read_kept(int fd, std::int64_t at, std::int64_t end, const BlockHeader& block, Hasher& hasher,
               std::map<std::string, std::vector<KeptQueries>>& kept) {
  const auto take = [&](std::span<std::byte> bytes) {
    if (std::ssize(bytes) > end - at || !read_all(fd, bytes, at)) return false;
    hasher.add(bytes);
    at += std::ssize(bytes);
    return true;
  };
  while (at < end) {
    KeptHeader header;
    if (!take(std::as_writable_bytes(std::span(&header, 1)))) return false;
    if (header.stride < 1 || header.positions < 0 || header.bytes < 0 || header.bytes > end - at ||
        header.positions > (end - at) / std::int64_t{sizeof(Position)})
      return false;
    KeptQueries own = {.stride = header.stride, .positions = {}, .rows = {}};
    own.positions.resize(static_cast<std::size_t>(header.positions));
    own.rows.resize(static_cast<std::size_t>(header.bytes));
    if (!take(std::as_writable_bytes(std::span(own.positions))) || !take(own.rows) ||
        !lie_within(own.positions, block))
      return false;
    const auto place = kept.find({header.key.begin(), header.key.end()});
    if (place != kept.end()) place->second.push_back(std::move(own));
  }
  return true;
}

int open_to_read(const std::filesystem::path& path) {
  return ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
}

std::string header_of(const std::string& identity, std::int64_t now) {
  std::string header = std::string(kMagic) + identity;
  header.resize(static_cast<std::size_t>(kHeader), '\0');
  std::memcpy(header.data() + kTimeAt, &now, sizeof now);
  return header;
}

}  // namespace

std::filesystem::path PrefillLog::beside(const std::filesystem::path& output) {
  return hidden_beside(output, "partial");
}

std::optional<std::time_t> PrefillLog::time_of(const std::filesystem::path& path) {
  const int fd = open_to_read(path);
  if (fd < 0) return std::nullopt;
  std::string header(static_cast<std::size_t>(kHeader), '\0');
  const bool whole = read_all(fd, std::as_writable_bytes(std::span(header)), 0);
  ::close(fd);
  std::int64_t now = 0;
  std::memcpy(&now, header.data() + kTimeAt, sizeof now);
  const bool said = whole && header.starts_with(kMagic) && now > 0 && now < std::int64_t{1} << 40;
  return said ? std::optional<std::time_t>(now) : std::nullopt;
}

bool PrefillLog::begins(const std::filesystem::path& path, std::span<const TokenId> tokens) {
  const int fd = open_to_read(path);
  if (fd < 0) return false;
  BlockHeader block;
  std::vector<TokenId> ids;
  bool whole = read_all(fd, std::as_writable_bytes(std::span(&block, 1)), kHeader) && block.begin >= 0 &&
               block.tokens > 0 && block.begin < std::ssize(tokens) &&
               block.tokens <= std::ssize(tokens) - block.begin;
  if (whole) ids.resize(static_cast<std::size_t>(block.tokens));
  whole = whole && read_all(fd, std::as_writable_bytes(std::span(ids)), kHeader + std::int64_t{sizeof block});
  ::close(fd);
  return whole && std::equal(ids.begin(), ids.end(), tokens.begin() + block.begin);
}

PrefillLog::PrefillLog(const std::filesystem::path& path, const Context& context, std::time_t now)
    : path_(path),
      identity_(identity_of(context.impl())),
      now_(now),
      tokens_(context.tokens()),
      next_(std::chrono::steady_clock::now() + kFirstSave) {
  for (const AttachedMethod& method : context.impl().methods) {
    for (std::size_t layer = 0; layer < method.selectors.size(); ++layer) {
      Selector* const selector = method.selectors[layer];
      if (selector == nullptr || !selector->wants_writes()) continue;
      auto* const queries = dynamic_cast<HearsQueries*>(selector);
      usable_ = usable_ && queries != nullptr && !queries->kept_queries(kSequence, 0, 0).empty();
      listeners_.push_back({hash_hex(fmt::format("{} {}", method.spec.str(), layer)), selector, queries});
    }
  }
}

PrefillLog::~PrefillLog() {
  if (fd_ >= 0) ::close(fd_);
}

void PrefillLog::open() {
  if (fd_ >= 0) return;
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
  struct stat info = {};
  if (fd_ < 0) throw RunError(fmt::format("{}: cannot be opened: {}", path_.string(), std::strerror(errno)));
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode))
    throw InputError(
        fmt::format("{}: expected a file or nothing there, found a device, pipe or socket", path_.string()));
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(std::exchange(fd_, -1));
  throw InputError(fmt::format(
      "{}: expected a reading of this process alone, found another process that makes the same file: wait "
      "for it, or name another file",
      path_.string()));
}

/// One block behind the context's tokens, if there is a whole one that goes on as `tokens` does.
bool PrefillLog::restore_block(Context::Impl& c, std::span<const TokenId> tokens) {
  BlockHeader block;
  if (!read_all(fd_, std::as_writable_bytes(std::span(&block, 1)), end_)) return false;
  struct stat info = {};
  if (block.begin != tokens_ || block.tokens <= 0 || block.tokens > std::ssize(tokens) - tokens_ ||
      block.bytes < block_bytes(c, block.tokens) || ::fstat(fd_, &info) != 0 ||
      block.bytes > std::int64_t{info.st_size} - end_ - std::int64_t{sizeof block})
    return false;
  std::vector<TokenId> ids(static_cast<std::size_t>(block.tokens));
  const auto id_bytes = std::as_writable_bytes(std::span(ids));
  std::int64_t at = end_ + std::int64_t{sizeof block};
  if (!read_all(fd_, id_bytes, at) || !std::equal(ids.begin(), ids.end(), tokens.begin() + tokens_))
    return false;
  Hasher hasher;
  hasher.add(id_bytes);
  at += std::ssize(id_bytes);
  bool whole = true;
  each_part(c, [&](int layer, int head, KvStore::Part part, std::int64_t row) {
    std::byte* const rows = c.kv.rows_to_write(layer, head, part, block.tokens);
    const std::span<std::byte> bytes(rows, static_cast<std::size_t>(block.tokens * row));
    whole = whole && read_all(fd_, bytes, at);
    if (whole) hasher.add(bytes);
    at += block.tokens * row;
  });
  std::vector<float> states(static_cast<std::size_t>(c.kv.recurrent().floats()));
  const auto state_bytes = std::as_writable_bytes(std::span(states));
  whole = whole && read_all(fd_, state_bytes, at);
  hasher.add(state_bytes);
  at += std::ssize(state_bytes);
  std::map<std::string, std::vector<KeptQueries>> kept;
  for (const Listener& listener : listeners_) kept[listener.key];
  const std::int64_t end = end_ + std::int64_t{sizeof block} + block.bytes;
  whole = whole && read_kept(fd_, at, end, block, hasher, kept);
  if (!whole || hasher.hex() != std::string_view(block.checksum.data(), block.checksum.size())) return false;
  if (!states.empty()) c.kv.recurrent().restore(tokens_ + block.tokens, states);
  c.kv.commit(block.tokens);
  c.ids.insert(c.ids.end(), ids.begin(), ids.end());
  for (Listener& listener : listeners_)
    listener.knows_all = listener.knows_all && listener.queries->take_back(kSequence, kept[listener.key]);
  tokens_ += block.tokens;
  end_ = end;
  return true;
}

/// Whether any tokens are kept, whatever they are. Of a damaged block nothing is.
bool PrefillLog::has_whole_block() const {
  BlockHeader block;
  std::int64_t at = kHeader;
  if (!read_all(fd_, std::as_writable_bytes(std::span(&block, 1)), at) || block.tokens <= 0) return false;
  at += std::int64_t{sizeof block};
  Hasher hasher;
  std::vector<std::byte> piece(std::size_t{1} << 20);
  for (std::int64_t left = block.bytes; left > 0;) {
    check_cancel();
    const auto bytes = std::span(piece).first(std::min(piece.size(), static_cast<std::size_t>(left)));
    if (!read_all(fd_, bytes, at)) return false;
    hasher.add(bytes);
    at += std::ssize(bytes);
    left -= std::ssize(bytes);
  }
  return hasher.hex() == std::string_view(block.checksum.data(), block.checksum.size());
}

/// How many of the restored tokens can stay, so that every listener still hears what it needs of a text of so many tokens.
/// Listeners that lack queries of what was restored forget the rest of it.
std::int64_t PrefillLog::heard_up_to(Context::Impl& c, std::int64_t before, std::int64_t text) {
  const auto chunks_before = [&](std::int64_t last) {
    return std::max<std::int64_t>(0, text - last) / c.options.chunk * c.options.chunk;
  };
  std::int64_t end = tokens_;
  for (const Listener& listener : listeners_) {
    if (!listener.knows_all) listener.selector->roll_back(kSequence, before);  // a part is worse than nothing
    if (!listener.knows_all && !listener.queries->learns_from_the_end()) return before;
    const std::int64_t heard = listener.knows_all ? listener.queries->unkept_end() : kHeard;
    if (heard > 0) end = std::min(end, chunks_before(heard));
  }
  // From a state of recurrent layers on: what lies between would be read again as a question, which nobody hears.
  return c.kv.recurrent().empty() ? end : c.kv.recurrent().reachable(end);
}

std::int64_t PrefillLog::restore(Context& context, std::span<const TokenId> tokens) {
  Context::Impl& c = context.impl();
  LODE_ASSERT(c.tokens() == tokens_);
  const std::int64_t before = tokens_;
  struct stat info = {};
  if (!usable_ || ::lstat(path_.c_str(), &info) != 0) return 0;
  open();
  std::string header(static_cast<std::size_t>(kHeader), '\0');
  const bool known = read_all(fd_, std::as_writable_bytes(std::span(header)), 0) &&
                     header.starts_with(std::string(kMagic) + identity_);
  if (known) end_ = kHeader;
  while (known && restore_block(c, tokens)) check_cancel();
  another_ = end_ <= kHeader && has_whole_block();
  if (!known) return 0;
  c.kv.roll_back(tokens_);  // rows of a block that was not whole
  const std::int64_t kept = std::max(before, heard_up_to(c, before, std::ssize(tokens)));
  if (kept == before && kept < tokens_) {  // is begun anew
    another_ = std::ranges::any_of(listeners_, [](const Listener& listener) {
      return !listener.knows_all && !listener.queries->learns_from_the_end();
    });
    tokens_ = before, end_ = 0;
  }
  if (kept < c.tokens()) context.roll_back(kept);
  for (const Listener& listener :
       listeners_)  // as coarse as they were before they were cut: the text goes on as it did
    if (listener.knows_all)
      listener.queries->take_back(kSequence, listener.queries->kept_queries(kSequence, 0, 0));
  return kept - before;
}

std::int64_t PrefillLog::room(const Context& context, std::int64_t tokens) const {
  if (!usable_ || tokens <= tokens_) return 0;
  struct stat info = {};
  const std::int64_t there = fd_ >= 0 && ::fstat(fd_, &info) == 0 ? std::int64_t{info.st_size} : 0;
  std::int64_t block = std::int64_t{sizeof(BlockHeader)} + block_bytes(context.impl(), tokens - tokens_);
  const std::int64_t chunk = context.impl().options.chunk, blocks = (tokens - tokens_ + chunk - 1) / chunk;
  for (const Listener& listener : listeners_)
    block += blocks * std::int64_t{sizeof(KeptHeader)} + listener.queries->kept_query_bytes(tokens - tokens_);
  return std::max<std::int64_t>(0, std::max(end_, kHeader) + block - there);
}

void PrefillLog::save(const Context& context) {
  Context::Impl& c = context.impl();
  if (!usable_ || c.tokens() <= tokens_) return;
  open();
  c.host_kv();
  if (end_ == 0) {
    if (::ftruncate(fd_, 0) != 0) cannot_be_written(path_);
    const std::string header = header_of(identity_, now_);
    write_all(fd_, std::as_bytes(std::span(header)), 0, path_);
    end_ = kHeader;
  }
  const std::int64_t count = c.tokens() - tokens_;
  BlockHeader block = {.begin = tokens_, .tokens = count};
  std::int64_t at = end_ + std::int64_t{sizeof block};
  Hasher hasher;
  const auto put = [&](std::span<const std::byte> bytes) {
    hasher.add(bytes);
    write_all(fd_, bytes, at, path_);
    at += std::ssize(bytes);
  };
  put(std::as_bytes(std::span(c.ids).last(static_cast<std::size_t>(count))));
  each_part(c, [&](int layer, int head, KvStore::Part part, std::int64_t row) {
    put(c.kv.rows(layer, head, part).last(static_cast<std::size_t>(count * row)));
  });
  if (!c.kv.recurrent().empty()) put(std::as_bytes(c.kv.recurrent().at(c.tokens())));
  for (const Listener& listener : listeners_) {
    for (const KeptQueries& kept : listener.queries->kept_queries(kSequence, static_cast<Position>(tokens_),
                                                                  static_cast<Position>(c.tokens()))) {
      KeptHeader header = {
          .stride = kept.stride, .positions = std::ssize(kept.positions), .bytes = std::ssize(kept.rows)};
      std::ranges::copy(listener.key, header.key.begin());
      put(std::as_bytes(std::span(&header, 1)));
      put(std::as_bytes(std::span(kept.positions)));
      put(kept.rows);
    }
  }
  block.bytes = at - end_ - std::int64_t{sizeof block};
  const std::string checksum = hasher.hex();
  std::copy(checksum.begin(), checksum.end(), block.checksum.begin());
  write_all(fd_, std::as_bytes(std::span(&block, 1)), end_, path_);
  if (::ftruncate(fd_, at) != 0 || ::fdatasync(fd_) != 0) cannot_be_written(path_);
  end_ = at;
  tokens_ = c.tokens();
}

void PrefillLog::save_at_times(const Context& context) {
  const auto start = std::chrono::steady_clock::now();
  if (start < next_) return;
  save(context);
  const auto end = std::chrono::steady_clock::now();
  next_ = end + std::max<std::chrono::steady_clock::duration>(kFirstSave, 9 * (end - start));
}

void PrefillLog::remove() {
  std::error_code none;
  std::filesystem::remove(path_, none);
}

}  // namespace lode
