// SPDX-License-Identifier: Apache-2.0
#include "io/gguf_writer.h"

#include <cstring>
#include <numeric>

#include "base/cancel.h"
#include "base/file.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kAlignment = 32;  // the format's, where a file does not say otherwise
// The format's numbers of types of values.
constexpr std::uint32_t kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kString = 8, kArray = 9;

template <class T>
void put(std::string& to, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  to.append(bytes, sizeof(T));
}
void put_text(std::string& to, std::string_view text) {
  put<std::uint64_t>(to, text.size());
  to += text;
}
template <class T>
void put_array(std::string& to, std::uint32_t type, std::span<const T> values) {
  put(to, type);
  put<std::uint64_t>(to, values.size());
  for (const T value : values) put(to, value);
}
std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void GgufWriter::begin(std::string_view key, std::uint32_t type) {
  put_text(metadata_, key);
  put(metadata_, type);
  ++keys_;
}
void GgufWriter::add(std::string_view key, std::string_view text) {
  begin(key, kString);
  put_text(metadata_, text);
}
void GgufWriter::add(std::string_view key, bool value) {
  begin(key, kBool);
  put<std::uint8_t>(metadata_, value ? 1 : 0);
}
void GgufWriter::add_u32(std::string_view key, std::uint32_t value) {
  begin(key, kU32);
  put(metadata_, value);
}
void GgufWriter::add_f32(std::string_view key, float value) {
  begin(key, kF32);
  put(metadata_, value);
}
void GgufWriter::add_texts(std::string_view key, std::span<const std::string> texts) {
  begin(key, kArray);
  put(metadata_, kString);
  put<std::uint64_t>(metadata_, texts.size());
  for (const std::string& text : texts) put_text(metadata_, text);
}
void GgufWriter::add_i32s(std::string_view key, std::span<const std::int32_t> values) {
  begin(key, kArray);
  put_array(metadata_, kI32, values);
}
void GgufWriter::add_f32s(std::string_view key, std::span<const float> values) {
  begin(key, kArray);
  put_array(metadata_, kF32, values);
}
void GgufWriter::add_bools(std::string_view key, const std::vector<bool>& values) {
  const std::vector<std::uint8_t> bytes(values.begin(), values.end());
  begin(key, kArray);
  put_array(metadata_, kBool, std::span<const std::uint8_t>(bytes));
}
void GgufWriter::add_raw(std::string_view key, std::uint32_t type, std::span<const std::byte> bytes) {
  begin(key, type);
  metadata_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void GgufWriter::add_tensor(std::string name, WeightType type, std::vector<std::int64_t> shape) {
  LODE_ASSERT(!shape.empty() && shape.back() % layout_of(type).block == 0);
  tensors_.push_back({std::move(name), type, std::move(shape)});
}

std::int64_t GgufWriter::Tensor::bytes() const {
  return bytes_of(type, std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
}

std::int64_t GgufWriter::tensor_bytes(std::int64_t tensor) const {
  return tensors_[static_cast<std::size_t>(tensor)].bytes();
}

std::string GgufWriter::head(std::span<const Tensor> tensors) const {
  std::string head = "GGUF";
  put(head, kVersion);
  put<std::uint64_t>(head, tensors.size());
  put(head, keys_);
  head += metadata_;
  std::uint64_t offset = 0;
  for (const Tensor& t : tensors) {
    put_text(head, t.name);
    put(head, static_cast<std::uint32_t>(t.shape.size()));
    for (auto dimension = t.shape.rbegin(); dimension != t.shape.rend(); ++dimension)
      put(head, static_cast<std::uint64_t>(*dimension));
    put(head, layout_of(t.type).gguf_type);
    put(head, offset);
    offset += aligned(static_cast<std::uint64_t>(t.bytes()));
  }
  head.resize(aligned(head.size()), '\0');
  return head;
}

std::string GgufWriter::metadata_alone() const {
  return head({});
}

void GgufWriter::write(const std::filesystem::path& path,
                       const std::function<void(std::int64_t, std::span<std::byte>)>& fill) const {
  const std::string start = head(tensors_);
  std::uint64_t whole = start.size();
  for (std::int64_t i = 0; i < tensors(); ++i) whole += aligned(static_cast<std::uint64_t>(tensor_bytes(i)));
  expect_room(path, whole);
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(start)));
  std::vector<std::byte> bytes;
  for (std::int64_t i = 0; i < tensors(); ++i) {
    check_cancel();
    const auto size = static_cast<std::size_t>(tensor_bytes(i));
    bytes.assign(aligned(size), std::byte{0});
    fill(i, std::span(bytes).first(size));
    file.write(bytes);
  }
  file.commit();
}

}  // namespace lode
