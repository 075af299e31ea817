// SPDX-License-Identifier: Apache-2.0
#include "base/communicator.h"

#include <algorithm>
#include <cstring>

#include "lodestone/error.h"

namespace lode {

namespace {

using Out = std::vector<std::span<const std::byte>>;
using In = std::vector<std::span<std::byte>>;

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

template <class T>
std::span<std::byte> bytes_of_value(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

void Communicator::exchange(std::span<const std::span<const std::byte>> out,
                            std::span<const std::span<std::byte>> in) {
  LODE_ASSERT(out.size() == at(size()) && in.size() == at(size()));
  Out others(out.begin(), out.end());
  In into(in.begin(), in.end());
  const std::span<const std::byte> own = out[at(rank())];
  LODE_ASSERT(own.size() == in[at(rank())].size());
  if (!own.empty()) std::memmove(in[at(rank())].data(), own.data(), own.size());
  others[at(rank())] = {};
  into[at(rank())] = {};
  for (const auto& message : others) {
    if (message.empty()) continue;
    ++sent_.messages;
    sent_.bytes += std::ssize(message);
  }
  transfer(others, into);
  if (!abandoned_.empty()) throw Abandoned();
}

void Communicator::note_abandoned(int rank) {
  abandoned_.resize(at(size()));
  abandoned_[at(rank)] = true;
}

bool Communicator::has_abandoned(int rank) const {
  return !abandoned_.empty() && abandoned_[at(rank)];
}

void Communicator::abandon() {
  drop_messages();
  abandoned_.clear();
}

void Communicator::all_gather(std::span<const std::span<std::byte>> parts) {
  LODE_ASSERT(parts.size() == at(size()));
  exchange(Out(parts.size(), parts[at(rank())]), parts);
}

void Communicator::broadcast(std::span<std::byte> bytes, int root) {
  In parts(at(size()));
  parts[at(root)] = bytes;
  all_gather(parts);
}

std::string Communicator::broadcast(std::string text, int root) {
  std::uint64_t length = text.size();
  broadcast(bytes_of_value(length), root);
  text.resize(length);
  broadcast(std::as_writable_bytes(std::span(text)), root);
  return text;
}

std::vector<std::string> Communicator::all_strings(const std::string& own) {
  std::vector<std::uint64_t> lengths(at(size()));
  lengths[at(rank())] = own.size();
  In parts;
  for (std::uint64_t& length : lengths) parts.push_back(bytes_of_value(length));
  all_gather(parts);
  std::vector<std::string> all;
  for (const std::uint64_t length : lengths) all.emplace_back(length, '\0');
  all[at(rank())] = own;
  for (std::size_t r = 0; r < all.size(); ++r) parts[r] = std::as_writable_bytes(std::span(all[r]));
  all_gather(parts);
  return all;
}

void Communicator::sum(std::span<std::int64_t> values) {
  std::vector<std::vector<std::int64_t>> all(at(size()), std::vector<std::int64_t>(values.size()));
  std::copy(values.begin(), values.end(), all[at(rank())].begin());
  In parts;
  for (auto& part : all) parts.push_back(std::as_writable_bytes(std::span(part)));
  all_gather(parts);
  std::fill(values.begin(), values.end(), 0);
  for (const auto& part : all)
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += part[i];
}

void Communicator::barrier() {
  std::int64_t none = 0;
  sum({&none, 1});
}

Share share_of(std::int64_t count, int rank, int size) {
  LODE_ASSERT(rank >= 0 && rank < size && count >= 0);
  const auto begin = [&](std::int64_t r) { return count / size * r + std::min(r, count % size); };
  return {begin(rank), begin(rank + 1)};
}

Share token_share(std::int64_t tokens, int rank, int size) {
  constexpr std::int64_t kBlock = 1024, kLong = 4 * kBlock;
  if (tokens < size * kLong) return share_of(tokens, rank, size);
  const Share blocks = share_of((tokens + kBlock - 1) / kBlock, rank, size);
  return {blocks.begin * kBlock, std::min(tokens, blocks.end * kBlock)};
}

}  // namespace lode
