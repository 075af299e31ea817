// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::uint64_t kLengthBytes = 8, kMaxHeader = 100'000'000, kAlignment = 64;
constexpr std::int64_t kMaxDimension = std::int64_t{1} << 48;
constexpr std::size_t kMaxRank = 8;
// In the metadata of files of ours: of the tensors' bytes, and of all else in the header. Older files have the
// first alone.
constexpr const char* kChecksum = "lodestone_checksum";
constexpr const char* kHeaderChecksum = "lodestone_header_checksum";
constexpr std::string_view kHeaderMark =
    "xxh3 of this header ";  // before its digits: the value is known by a damaged name, too

constexpr std::array<std::pair<std::string_view, std::int64_t>, 16> kTypes = {{{"F64", 8},
                                                                               {"F32", 4},
                                                                               {"F16", 2},
                                                                               {"BF16", 2},
                                                                               {"I64", 8},
                                                                               {"I32", 4},
                                                                               {"I16", 2},
                                                                               {"I8", 1},
                                                                               {"U64", 8},
                                                                               {"U32", 4},
                                                                               {"U16", 2},
                                                                               {"U8", 1},
                                                                               {"BOOL", 1},
                                                                               {"F8_E4M3", 1},
                                                                               {"F8_E5M2", 1},
                                                                               {"C64", 8}}};

std::int64_t element_bytes(const std::string& type, const std::string& where) {
  for (const auto& [name, bytes] : kTypes) {
    if (name == type) return bytes;
  }
  throw InputError(where + ": expected a safetensors type such as F32, F16 or BF16, found '" + excerpt(type) +
                   "'");
}

std::int64_t times(std::int64_t a, std::int64_t b, const std::string& where) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw InputError(where + ": its shape is larger than any file");
  return product;
}

std::string_view header_of(std::span<const std::byte> file, std::string_view where) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.starts_with("version https://git-lfs")) {
    throw InputError(std::string(where) +
                     ": expected weights, found a Git LFS pointer: fetch the file itself (git lfs pull)");
  }
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02")) {
    throw InputError(std::string(where) +
                     ": expected safetensors, found a pickle file, which could run code when it is read");
  }
  if (file.size() < kLengthBytes) {
    throw InputError(
        fmt::format("{}: expected a safetensors file of at least 8 bytes, found {}", where, file.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > kMaxHeader || length > file.size() - kLengthBytes) {
    throw InputError(fmt::format(
        "{}: expected a header within the file's {} bytes (and at most {}), found a length of {}: "
        "the file is cut short or is no safetensors file",
        where, file.size(), kMaxHeader, length));
  }
  if (length == 0 || text[kLengthBytes] != '{') {
    throw InputError(std::string(where) + ": expected a JSON object as header, found something else");
  }
  return text.substr(kLengthBytes, length);
}

std::pair<std::int64_t, std::int64_t> offsets_of(const Json& entry, const std::string& where) {
  const auto at = entry.find("data_offsets");
  const bool pair = at != entry.end() && at->is_array() && at->size() == 2 && (*at)[0].is_number_unsigned() &&
                    (*at)[1].is_number_unsigned();
  if (!pair) throw InputError(where + ": expected two whole numbers 'data_offsets', found something else");
  const auto begin = (*at)[0].get<std::uint64_t>(), end = (*at)[1].get<std::uint64_t>();
  if (begin > end || end > static_cast<std::uint64_t>(INT64_MAX)) {
    throw InputError(fmt::format("{}: expected offsets that rise, found {} and {}", where, begin, end));
  }
  return {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)};
}

Tensor tensor_of(const Json& entry, std::span<const std::byte> data, const std::string& where) {
  Tensor tensor;
  tensor.type = json_string(entry, "dtype", where);
  std::int64_t bytes = element_bytes(tensor.type, where);
  if (!entry.contains("shape") || !entry["shape"].is_array() || entry["shape"].size() > kMaxRank) {
    throw InputError(where + ": expected a list 'shape' of at most 8 numbers, found something else");
  }
  for (const Json& dimension : entry["shape"]) {
    const std::int64_t n = json_int({{"dimension", dimension}}, "dimension", where, 0, kMaxDimension);
    tensor.shape.push_back(n);
    bytes = times(bytes, n, where);
  }
  const auto [begin, end] = offsets_of(entry, where);
  if (end > static_cast<std::int64_t>(data.size())) {
    throw InputError(
        fmt::format("{}: expected data within the file's {} bytes, found an end at {}: the file is cut short",
                    where, data.size(), end));
  }
  if (end - begin != bytes) {
    throw InputError(
        fmt::format("{}: expected {} bytes for its shape and type, found {}", where, bytes, end - begin));
  }
  tensor.bytes = data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(bytes));
  return tensor;
}

void read_metadata(const Json& entry, std::string_view where, std::map<std::string, std::string>* metadata) {
  if (!entry.is_object())
    throw InputError(std::string(where) + ": expected an object '__metadata__', found another type");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string())
      throw InputError(std::string(where) + ": expected strings in '__metadata__', found another type");
    if (metadata != nullptr && key != kChecksum && key != kHeaderChecksum)
      (*metadata)[key] = value.get<std::string>();
  }
}

/// The data must be covered exactly once.
void check_layout(const std::map<std::string, Tensor>& tensors, std::span<const std::byte> data,
                  std::string_view where) {
  std::vector<std::pair<std::span<const std::byte>, std::string_view>> ranges;
  for (const auto& [name, tensor] : tensors) ranges.emplace_back(tensor.bytes, name);
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.data(), a.first.size()) < std::pair(b.first.data(), b.first.size());
  });
  const std::byte* at = data.data();
  for (const auto& [bytes, name] : ranges) {
    if (bytes.data() != at) {
      throw InputError(
          fmt::format("{}: tensor '{}': expected its data at offset {}, found {}: a hole or an overlap",
                      where, excerpt(name), at - data.data(), bytes.data() - data.data()));
    }
    at += bytes.size();
  }
  if (at != data.data() + data.size()) {
    throw InputError(
        fmt::format("{}: expected {} bytes of data, found {}", where, at - data.data(), data.size()));
  }
}

std::string_view name_in_file(DType type) {
  return type == DType::f32 ? "F32" : type == DType::f16 ? "F16" : type == DType::bf16 ? "BF16" : "I8";
}

/// Files of ours say what their tensors' bytes hash to; nothing else would notice a flipped bit of a number.
void check_data(const Json& expected, std::span<const std::byte> data, std::string_view where) {
  if (expected.is_null()) return;
  if (const std::string found = hash_hex(data); expected != found)
    throw InputError(fmt::format("{}: expected tensors with the checksum {}, found {}: the file is damaged",
                                 where, excerpt(expected.get<std::string>()), found));
}

/// As it is written: the header, and blanks up to where the tensors are aligned.
std::string header_text(const Json& header) {
  std::string text = header.dump();
  text.resize((text.size() + kLengthBytes + kAlignment - 1) / kAlignment * kAlignment - kLengthBytes, ' ');
  return text;
}

/// Of a header without its own checksum.
std::string header_checksum(const Json& header) {
  return std::string(kHeaderMark) + hash_hex(header.dump());
}

/// Every byte of a header with a checksum is what we wrote: blanks and the checksum's own name, too.
void check_header(Json header, std::string_view text, std::string_view where) {
  const Json metadata = json_member(header, "__metadata__");
  if (!metadata.is_object()) return;
  const bool ours = std::any_of(metadata.begin(), metadata.end(), [](const Json& value) {
    return value.is_string() && value.get_ref<const std::string&>().starts_with(kHeaderMark);
  });
  if (!ours && !metadata.contains(kHeaderChecksum)) return;
  const bool as_written = text == header_text(header);
  header["__metadata__"].erase(kHeaderChecksum);
  if (!as_written || json_member(metadata, kHeaderChecksum) != header_checksum(header))
    throw InputError(
        fmt::format("{}: expected the header that its checksum is of, found another: the file is "
                    "damaged",
                    where));
}

/// Files whose tensors were found intact, by identity, size and times.
class IntactFiles {
 public:
  explicit IntactFiles(const MappedFile& file) {
    struct stat s = {};
    if (::fstat(file.descriptor(), &s) == 0)
      id_ = {s.st_dev, s.st_ino, static_cast<std::uint64_t>(s.st_size), as_number(s.st_mtim),
             as_number(s.st_ctim)};
  }
  bool known() const {
    const std::lock_guard lock(mutex());
    return id_[1] != 0 && set().contains(id_);
  }
  void add() const {
    const std::lock_guard lock(mutex());
    if (id_[1] != 0) set().insert(id_);
  }

 private:
  using Id = std::array<std::uint64_t, 5>;
  static std::uint64_t as_number(const timespec& t) {
    return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::set<Id>& set() {
    static std::set<Id> all;
    return all;
  }
  Id id_ = {};
};

std::map<std::string, Tensor> parse(std::span<const std::byte> file, std::string_view where,
                                    std::map<std::string, std::string>* metadata, bool known_intact) {
  const std::string_view header = header_of(file, where);
  const Json json = parse_json(header, where);
  const auto data = file.subspan(kLengthBytes + header.size());
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      read_metadata(entry, where, metadata);
      continue;
    }
    const std::string at = fmt::format("{}: tensor '{}'", where, excerpt(name));
    if (!entry.is_object()) throw InputError(at + ": expected an object, found another type");
    tensors.emplace(name, tensor_of(entry, data, at));
  }
  check_layout(tensors, data, where);
  check_header(json, header, where);
  if (!known_intact) check_data(json_member(json_member(json, "__metadata__"), kChecksum), data, where);
  return tensors;
}

}  // namespace

bool has_checksum(std::span<const std::byte> file, std::string_view where) {
  return json_has(json_member(parse_json(header_of(file, where), where), "__metadata__"), kChecksum);
}

std::int64_t Tensor::elements() const {
  std::int64_t n = 1;
  for (const std::int64_t dimension : shape) n *= dimension;
  return n;
}

bool is_safetensors(std::span<const std::byte> file) {
  std::uint64_t length = 0;
  if (file.size() <= kLengthBytes) return false;
  std::memcpy(&length, file.data(), kLengthBytes);
  return length > 0 && length <= std::min<std::uint64_t>(kMaxHeader, file.size() - kLengthBytes) &&
         file[kLengthBytes] == std::byte{'{'};
}

std::map<std::string, Tensor> parse_safetensors(std::span<const std::byte> file, std::string_view where,
                                                std::map<std::string, std::string>* metadata) {
  return parse(file, where, metadata, false);
}

std::map<std::string, Tensor> parse_safetensors(const MappedFile& file,
                                                std::map<std::string, std::string>* metadata) {
  const IntactFiles identity(file);
  auto tensors = parse(file.bytes(), file.path().string(), metadata, identity.known());
  identity.add();
  return tensors;
}

DType float_type(const Tensor& tensor, std::string_view name, std::string_view where) {
  if (tensor.type == "F32") return DType::f32;
  if (tensor.type == "F16") return DType::f16;
  if (tensor.type == "BF16") return DType::bf16;
  throw InputError(fmt::format("{}: tensor '{}': expected weights in F32, F16 or BF16, found {}", where,
                               excerpt(name), tensor.type));
}

void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  header["__metadata__"] = metadata;
  Hasher hasher;
  for (const TensorToWrite& t : tensors) hasher.add(t.bytes);
  header["__metadata__"][kChecksum] = hasher.hex();
  std::uint64_t at = 0;
  for (const TensorToWrite& t : tensors) {
    header[t.name] = {
        {"dtype", name_in_file(t.type)}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes.size()}}};
    at += t.bytes.size();
  }
  header["__metadata__"][kHeaderChecksum] = header_checksum(header);
  const std::string text = header_text(header);
  const std::uint64_t length = text.size();
  AtomicFile out(path);
  out.write(std::as_bytes(std::span(&length, 1)));
  out.write(std::as_bytes(std::span(text)));
  for (const TensorToWrite& t : tensors) out.write(t.bytes);
  out.commit();
}

}  // namespace lode
