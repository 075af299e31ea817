// SPDX-License-Identifier: Apache-2.0
#include "lab/train/checkpoint.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>

#include "base/file.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "lodestone/error.h"

namespace lode {

namespace {

template <class Map>
void erase_prefix(Map& map, const std::string& prefix) {
  for (auto at = map.lower_bound(prefix); at != map.end() && at->first.starts_with(prefix);)
    at = map.erase(at);
}

/// A whole number from 0 on, or -1.
std::int64_t count_in(const std::map<std::string, std::string>& notes, const std::string& name) {
  const auto found = notes.find(name);
  if (found == notes.end()) return -1;
  const char* const end = found->second.data() + found->second.size();
  std::int64_t count = -1;
  const auto [stop, error] = std::from_chars(found->second.data(), end, count);
  return error == std::errc{} && stop == end ? count : -1;
}

}  // namespace

void Checkpoint::put(const std::string& prefix, Module& module, Adam* adam) {
  module.visit(prefix, [&](const std::string& name, Parameter& p) { arrays[name] = p.value; });
  if (adam == nullptr) return;
  for (const Adam::Moments& m : adam->moments()) {
    arrays[prefix + m.name + ".first"] = m.first;
    arrays[prefix + m.name + ".second"] = m.second;
  }
  notes[prefix + "steps"] = std::to_string(adam->steps());
}

void Checkpoint::get(const std::string& prefix, Module& module, Adam* adam, const std::string& where) const {
  const auto copy = [&](const std::string& name, std::vector<float>& to) {
    to = array(name, std::ssize(to), where);
  };
  module.visit(prefix, [&](const std::string& name, Parameter& p) { copy(name, p.value); });
  if (adam == nullptr) return;
  for (Adam::Moments& m : adam->moments()) {
    copy(prefix + m.name + ".first", m.first);
    copy(prefix + m.name + ".second", m.second);
  }
  adam->set_steps(number(prefix + "steps", where));
}

const std::vector<float>& Checkpoint::array(const std::string& name, std::int64_t numbers,
                                            const std::string& where) const {
  const auto found = arrays.find(name);
  if (found != arrays.end() && std::ssize(found->second) == numbers) return found->second;
  throw InputError(fmt::format("{}: expected an array '{}' of {} numbers, found {}", where, name, numbers,
                               found == arrays.end() ? "none" : std::to_string(found->second.size())));
}

std::int64_t Checkpoint::number(const std::string& note, const std::string& where) const {
  const std::int64_t count = count_in(notes, note);
  if (count < 0) throw InputError(fmt::format("{}: expected a number '{}', found none", where, note));
  return count;
}

void Checkpoint::erase(const std::string& prefix) {
  erase_prefix(arrays, prefix);
  erase_prefix(notes, prefix);
}

void Checkpoint::write(const std::filesystem::path& path) const {
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, values] : arrays)
    tensors.push_back({name, DType::f32, {std::ssize(values)}, std::as_bytes(std::span(values))});
  write_safetensors(path, tensors, notes);
}

Checkpoint Checkpoint::read(const std::filesystem::path& path) {
  const MappedFile file(path);
  const std::string where = path.string();
  Checkpoint checkpoint;
  for (const auto& [name, tensor] : parse_safetensors(file.bytes(), where, &checkpoint.notes)) {
    if (tensor.type != "F32")
      throw InputError(
          fmt::format("{}: array '{}': expected the type F32, found {}", where, excerpt(name), tensor.type));
    std::vector<float>& values = checkpoint.arrays[name];
    values.resize(tensor.bytes.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  }
  return checkpoint;
}

}  // namespace lode
