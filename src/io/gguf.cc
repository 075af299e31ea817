// SPDX-License-Identifier: Apache-2.0
// The layout is ggml's: magic, version, counts; then metadata (key, type, value); then for each tensor its
// name, dimensions (fastest first), type and offset; then, aligned, the data.
#include "io/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint64_t kMaxKeys = 1 << 16, kMaxTensors = 1 << 18;
constexpr std::uint64_t kMaxName = 255, kMaxAlignment = 1 << 20, kDefaultAlignment = 32, kMaxDimensions = 4;
constexpr std::uint64_t kMaxDimension = std::uint64_t{1} << 40;
constexpr int kMaxDepth = 3;  // of arrays in arrays

std::uint64_t scalar_bytes(GgufType type) {
  constexpr std::array<std::uint64_t, 13> kBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return kBytes[static_cast<std::size_t>(type)];
}

std::string_view name_of(GgufType type) {
  constexpr std::array<std::string_view, 13> kNames = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                       "bool", "string", "array", "u64", "i64", "f64"};
  return kNames[static_cast<std::size_t>(type)];
}

/// The ggml types that we do not read, by number, so that a message can name them.
std::string gguf_type_name(std::uint32_t type) {
  constexpr std::array<std::pair<std::uint32_t, std::string_view>, 17> kOthers = {{{9, "Q8_1"},
                                                                                   {15, "Q8_K"},
                                                                                   {16, "IQ2_XXS"},
                                                                                   {17, "IQ2_XS"},
                                                                                   {19, "IQ1_S"},
                                                                                   {22, "IQ2_S"},
                                                                                   {24, "I8"},
                                                                                   {25, "I16"},
                                                                                   {26, "I32"},
                                                                                   {27, "I64"},
                                                                                   {28, "F64"},
                                                                                   {29, "IQ1_M"},
                                                                                   {34, "TQ1_0"},
                                                                                   {35, "TQ2_0"},
                                                                                   {40, "NVFP4"},
                                                                                   {4, "Q4_2"},
                                                                                   {5, "Q4_3"}}};
  for (const auto& [number, name] : kOthers) {
    if (number == type) return fmt::format("{} (type {})", name, type);
  }
  return fmt::format("type {}", type);
}

std::string known_types() {
  std::vector<std::string_view> names;
  for (const WeightLayout& layout : weight_layouts()) names.push_back(layout.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Reads from front to back and never beyond the end.
class Reader {
 public:
  Reader(std::span<const std::byte> file, std::string_view where) : file_(file), where_(where) {}

  const std::string& where() const { return where_; }
  std::size_t at() const { return at_; }
  std::uint64_t left() const { return file_.size() - at_; }

  std::span<const std::byte> take(std::uint64_t bytes, std::string_view what) {
    if (bytes > left()) {
      throw InputError(
          fmt::format("{}: {}: expected {} bytes at offset {}, found the end of the file after {}: the file "
                      "is cut short or damaged",
                      where_, what, bytes, at_, left()));
    }
    const auto part = file_.subspan(at_, bytes);
    at_ += bytes;
    return part;
  }
  template <class T>
  T number(std::string_view what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }
  std::string_view text(std::string_view what) {
    const auto bytes = take(number<std::uint64_t>(what), what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  GgufType type(std::string_view what) {
    const auto type = number<std::uint32_t>(what);
    if (type > static_cast<std::uint32_t>(GgufType::f64)) {
      throw InputError(
          fmt::format("{}: {}: expected a metadata type from 0 to 12, found {}", where_, what, type));
    }
    return static_cast<GgufType>(type);
  }
  /// A count of things that take at least `least` bytes each.
  std::uint64_t count(std::uint64_t least, std::uint64_t limit, std::string_view what) {
    const auto n = number<std::uint64_t>(what);
    if (n > limit || n > left() / least) {
      throw InputError(
          fmt::format("{}: {}: expected a count of at most {}, as many as fit the file, found {}: the file "
                      "is cut short or damaged",
                      where_, what, std::min(limit, left() / least), n));
    }
    return n;
  }

 private:
  std::span<const std::byte> file_;
  std::string where_;
  std::size_t at_ = 0;
};

GgufValue read_value(Reader& reader, GgufType type, const std::string& what, int depth);

GgufValue read_array(Reader& reader, const std::string& what, int depth) {
  GgufValue value;
  value.type = GgufType::array;
  value.element = reader.type(what);
  const bool text = value.element == GgufType::string, nested = value.element == GgufType::array;
  const std::uint64_t least = text ? 8 : nested ? 12 : scalar_bytes(value.element);
  value.count = reader.count(least, UINT64_MAX, what);
  if (nested && depth >= kMaxDepth)
    throw InputError(
        fmt::format("{}: {}: expected arrays at most {} deep, found more", reader.where(), what, kMaxDepth));
  if (text) {
    value.strings.reserve(value.count);
    for (std::uint64_t i = 0; i < value.count; ++i) value.strings.push_back(reader.text(what));
  } else if (nested) {
    for (std::uint64_t i = 0; i < value.count; ++i)
      value.arrays.push_back(read_value(reader, GgufType::array, what, depth + 1));
  } else {
    value.bytes = reader.take(value.count * least, what);
  }
  return value;
}

GgufValue read_value(Reader& reader, GgufType type, const std::string& what, int depth) {
  if (type == GgufType::array) return read_array(reader, what, depth);
  GgufValue value;
  value.type = type;
  if (type == GgufType::string) {
    const std::string_view text = reader.text(what);
    value.bytes = std::as_bytes(std::span(text));
  } else {
    value.bytes = reader.take(scalar_bytes(type), what);
  }
  return value;
}

void expect_name(std::string_view name, std::string_view where, std::string_view what) {
  if (!name.empty() && name.size() <= kMaxName && name.find('\0') == std::string_view::npos &&
      invalid_utf8(name) == std::string_view::npos)
    return;
  throw InputError(
      fmt::format("{}: {}: expected a name of 1 to {} bytes of UTF-8 without NUL, found '{}' of {} bytes",
                  where, what, kMaxName, excerpt(name), name.size()));
}

std::uint32_t expect_header(Reader& reader, std::span<const std::byte> file, const std::string& where) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.starts_with("version https://git-lfs"))
    throw InputError(where +
                     ": expected a GGUF file, found a Git LFS pointer: fetch the file itself (git lfs pull)");
  if (text.starts_with("FUGG"))
    throw InputError(where + ": expected a little-endian GGUF file, found a big-endian one");
  if (!text.starts_with(kMagic))
    throw InputError(fmt::format("{}: expected a GGUF file, which begins with 'GGUF', found {}", where,
                                 text.empty() ? "an empty file"
                                              : fmt::format("{} bytes that begin with '{}'", text.size(),
                                                            excerpt(text.substr(0, 4)))));
  reader.take(kMagic.size(), "magic");
  const auto version = reader.number<std::uint32_t>("version");
  if (version != 0 && (version & 0xffffu) == 0)
    throw InputError(where + ": expected a little-endian GGUF file, found a big-endian one");
  if (version != 2 && version != 3)
    throw UnreadableError(fmt::format("{}: expected GGUF version 2 or 3, found {}", where, version));
  return version;
}

std::uint64_t alignment_of(const GgufMetadata& metadata) {
  if (!metadata.has("general.alignment")) return kDefaultAlignment;
  const auto alignment =
      static_cast<std::uint64_t>(metadata.integer("general.alignment", 1, std::int64_t{kMaxAlignment}));
  if (!std::has_single_bit(alignment) || alignment < 8)
    throw InputError(fmt::format("{}: 'general.alignment': expected a power of two of 8 or more, found {}",
                                 metadata.where(), alignment));
  return alignment;
}

/// A row of the tensor table; the data is not looked at yet.
struct Entry {
  GgufTensor tensor;
  std::uint64_t offset = 0, bytes = 0;
};

/// Bytes of the tensor's data; InputError when its shape does not fit its type or any file.
std::uint64_t data_bytes(const GgufTensor& tensor, const std::string& what) {
  const WeightLayout& layout = layout_of(tensor.type);
  const std::int64_t row = tensor.shape.back();
  if (row % layout.block != 0) {
    throw InputError(
        fmt::format("{}: expected rows of a multiple of {} numbers, as {} has in a block, found {}", what,
                    layout.block, layout.name, row));
  }
  auto bytes = static_cast<std::uint64_t>(layout.block_bytes);
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    const auto n = static_cast<std::uint64_t>(tensor.shape[i]);
    const std::uint64_t units =
        i + 1 == tensor.shape.size() ? n / static_cast<std::uint64_t>(layout.block) : n;
    if (__builtin_mul_overflow(bytes, units, &bytes) || bytes > static_cast<std::uint64_t>(INT64_MAX))
      throw InputError(what + ": its shape is larger than any file");
  }
  return bytes;
}

Entry read_entry(Reader& reader, const std::string& what) {
  Entry entry;
  const auto dimensions = reader.number<std::uint32_t>(what);
  if (dimensions < 1 || dimensions > kMaxDimensions)
    throw InputError(
        fmt::format("{}: expected 1 to {} dimensions, found {}", what, kMaxDimensions, dimensions));
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    const auto n = reader.number<std::uint64_t>(what);
    if (n < 1 || n > kMaxDimension)
      throw InputError(fmt::format("{}: expected dimensions from 1 to {}, found {}", what, kMaxDimension, n));
    entry.tensor.shape.insert(entry.tensor.shape.begin(), static_cast<std::int64_t>(n));
  }
  const auto number = reader.number<std::uint32_t>(what);
  const auto type = find_gguf_type(number);
  if (!type)
    throw UnreadableError(fmt::format("{}: expected one of the types {}, found {}", what, known_types(),
                                      gguf_type_name(number)));
  entry.tensor.type = *type;
  entry.offset = reader.number<std::uint64_t>(what);
  entry.bytes = data_bytes(entry.tensor, what);
  return entry;
}

void check_overlaps(const GgufTensors& tensors, const std::string& where) {
  std::vector<std::pair<std::span<const std::byte>, std::string_view>> ranges;
  for (const auto& [name, tensor] : tensors) ranges.emplace_back(tensor.bytes, name);
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.first.data() < b.first.data(); });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i - 1].first.data() + ranges[i - 1].first.size() <= ranges[i].first.data()) continue;
    throw InputError(fmt::format("{}: tensors '{}' and '{}': expected data apart, found an overlap", where,
                                 excerpt(ranges[i - 1].second), excerpt(ranges[i].second)));
  }
}

void read_metadata(Reader& reader, std::uint64_t count, GgufMetadata& metadata) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view key = reader.text("a metadata key");
    expect_name(key, metadata.where(), "a metadata key");
    const std::string what = fmt::format("metadata '{}'", excerpt(key));
    const GgufType type = reader.type(what);
    metadata.add(key, read_value(reader, type, what, 1));
  }
}

void read_tensors(Reader& reader, std::uint64_t count, std::span<const std::byte> bytes, GgufFile& file) {
  const std::string& where = file.metadata.where();
  std::vector<std::pair<std::string_view, Entry>> entries;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view name = reader.text("a tensor's name");
    expect_name(name, where, "a tensor's name");
    entries.emplace_back(name, read_entry(reader, fmt::format("{}: tensor '{}'", where, excerpt(name))));
  }
  const std::uint64_t alignment = alignment_of(file.metadata);
  const std::uint64_t begin = (reader.at() + alignment - 1) / alignment * alignment;
  const std::uint64_t size = bytes.size() > begin ? bytes.size() - begin : 0;
  for (auto& [name, entry] : entries) {
    const std::string what = fmt::format("{}: tensor '{}'", where, excerpt(name));
    if (entry.offset % alignment != 0)
      throw InputError(fmt::format("{}: expected an offset that is a multiple of {}, found {}", what,
                                   alignment, entry.offset));
    if (entry.offset > size || entry.bytes > size - entry.offset)
      throw InputError(
          fmt::format("{}: expected {} bytes of data at offset {}, found {} bytes of data in all: "
                      "the file is cut short or damaged",
                      what, entry.bytes, entry.offset, size));
    entry.tensor.bytes = bytes.subspan(begin + entry.offset, entry.bytes);
    entry.tensor.where = where;
    if (!file.tensors.emplace(name, std::move(entry.tensor)).second)
      throw InputError(what + ": expected names that differ, found it twice");
  }
  check_overlaps(file.tensors, where);
}

template <class T>
T as(std::span<const std::byte> bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

/// A number of any type; whole ones beyond 2^63 become infinite, so that no range holds them.
double any_number(GgufType type, std::span<const std::byte> bytes) {
  switch (type) {
    case GgufType::f32:
      return as<float>(bytes);
    case GgufType::f64:
      return as<double>(bytes);
    case GgufType::u64:
      return static_cast<double>(as<std::uint64_t>(bytes));
    case GgufType::i64:
      return static_cast<double>(as<std::int64_t>(bytes));
    case GgufType::u32:
      return as<std::uint32_t>(bytes);
    case GgufType::i32:
      return as<std::int32_t>(bytes);
    case GgufType::u16:
      return as<std::uint16_t>(bytes);
    case GgufType::i16:
      return as<std::int16_t>(bytes);
    case GgufType::i8:
      return as<std::int8_t>(bytes);
    case GgufType::u8:
    case GgufType::boolean:
      return as<std::uint8_t>(bytes);
    default:
      return NAN;
  }
}

bool is_whole(GgufType type) {
  return scalar_bytes(type) != 0 && type != GgufType::f32 && type != GgufType::f64;
}

/// A whole number within [low, high], of which at most 53 bits count: no setting of a model is larger.
std::int64_t whole(GgufType type, std::span<const std::byte> bytes, std::int64_t low, std::int64_t high,
                   const std::string& what) {
  if (!is_whole(type))
    throw InputError(
        fmt::format("{}: expected a whole number, found a value of type {}", what, name_of(type)));
  const double value = any_number(type, bytes);
  if (!(value >= static_cast<double>(low) && value <= static_cast<double>(high)))
    throw InputError(
        fmt::format("{}: expected a whole number from {} to {}, found {}", what, low, high, value));
  return static_cast<std::int64_t>(value);
}

}  // namespace

void GgufMetadata::add(std::string_view key, GgufValue value) {
  if (!values_.emplace(key, std::move(value)).second)
    throw InputError(
        fmt::format("{}: metadata '{}': expected keys that differ, found it twice", where_, excerpt(key)));
}

const GgufValue& GgufMetadata::find(std::string_view key) const {
  const auto at = values_.find(key);
  if (at == values_.end())
    throw InputError(fmt::format("{}: expected metadata '{}', found none", where_, key));
  return at->second;
}

bool GgufMetadata::is_array(std::string_view key) const {
  return has(key) && find(key).type == GgufType::array;
}

std::int64_t GgufMetadata::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  const GgufValue& value = find(key);
  return whole(value.type, value.bytes, low, high, fmt::format("{}: metadata '{}'", where_, key));
}

double GgufMetadata::number(std::string_view key, double low, double high) const {
  const GgufValue& value = find(key);
  const double x = any_number(value.type, value.bytes);
  if (scalar_bytes(value.type) == 0 || !(x >= low && x <= high))
    throw InputError(
        fmt::format("{}: metadata '{}': expected a number from {} to {}, found {}", where_, key, low, high,
                    scalar_bytes(value.type) == 0 ? std::string(name_of(value.type)) : fmt::format("{}", x)));
  return x;
}

bool GgufMetadata::boolean(std::string_view key) const {
  return integer(key, 0, 1) != 0;
}

std::string_view GgufMetadata::text(std::string_view key) const {
  const GgufValue& value = find(key);
  const std::string_view text(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
  if (value.type != GgufType::string)
    throw InputError(fmt::format("{}: metadata '{}': expected a string, found a value of type {}", where_,
                                 key, name_of(value.type)));
  if (invalid_utf8(text) != std::string_view::npos)
    throw InputError(
        fmt::format("{}: metadata '{}': expected UTF-8, found '{}'", where_, key, excerpt(text)));
  return text;
}

std::vector<std::string_view> GgufMetadata::texts(std::string_view key) const {
  const GgufValue& value = find(key);
  if (value.type != GgufType::array || value.element != GgufType::string)
    throw InputError(fmt::format("{}: metadata '{}': expected an array of strings, found {}", where_, key,
                                 name_of(value.type == GgufType::array ? value.element : value.type)));
  return value.strings;
}

std::vector<std::int64_t> GgufMetadata::integers(std::string_view key, std::int64_t low,
                                                 std::int64_t high) const {
  const GgufValue& value = find(key);
  if (value.type != GgufType::array) return {integer(key, low, high)};
  const std::string what = fmt::format("{}: metadata '{}'", where_, key);
  std::vector<std::int64_t> numbers;
  const std::uint64_t bytes = scalar_bytes(value.element);
  if (bytes == 0)
    throw InputError(fmt::format("{}: expected an array of whole numbers, found one of type {}", what,
                                 name_of(value.element)));
  for (std::uint64_t i = 0; i < value.count; ++i)
    numbers.push_back(whole(value.element, value.bytes.subspan(i * bytes, bytes), low, high, what));
  return numbers;
}

std::vector<float> GgufMetadata::numbers(std::string_view key) const {
  const GgufValue& value = find(key);
  if (value.type != GgufType::array || value.element != GgufType::f32)
    throw InputError(fmt::format("{}: metadata '{}': expected an array of f32, found {}", where_, key,
                                 name_of(value.type == GgufType::array ? value.element : value.type)));
  std::vector<float> numbers(value.count);
  if (!numbers.empty()) std::memcpy(numbers.data(), value.bytes.data(), value.bytes.size());
  return numbers;
}

bool is_gguf(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() && std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

GgufFile parse_gguf(std::span<const std::byte> bytes, std::string_view where) {
  GgufFile file{.metadata = GgufMetadata(std::string(where)), .tensors = {}};
  Reader reader(bytes, where);
  expect_header(reader, bytes, file.metadata.where());
  constexpr std::uint64_t kLeastTensor = 8 + 1 + 4 + 8 + 4 + 8, kLeastKey = 8 + 1 + 4 + 1;
  const std::uint64_t tensors = reader.count(kLeastTensor, kMaxTensors, "the number of tensors");
  const std::uint64_t keys = reader.count(kLeastKey, kMaxKeys, "the number of metadata keys");
  read_metadata(reader, keys, file.metadata);
  read_tensors(reader, tensors, bytes, file);
  return file;
}

}  // namespace lode
