// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/text.h"

#include <algorithm>

namespace lode::jinja {

Text::Text(std::string bytes, Origin origin) : bytes_(std::move(bytes)) {
  if (origin != 0 && !bytes_.empty()) runs_.push_back({0, bytes_.size(), origin});
}

void Text::append_part(const Text& other, std::size_t begin, std::size_t end) {
  const std::size_t at = bytes_.size();
  bytes_.append(other.bytes_, begin, end - begin);
  auto run = std::partition_point(other.runs_.begin(), other.runs_.end(),
                                  [&](const Run& r) { return r.end <= begin; });
  for (; run != other.runs_.end() && run->begin < end; ++run) {
    const std::size_t from = at + std::max(run->begin, begin) - begin;
    const std::size_t to = at + std::min(run->end, end) - begin;
    if (!runs_.empty() && runs_.back().end == from && runs_.back().origin == run->origin)
      runs_.back().end = to;
    else
      runs_.push_back({from, to, run->origin});
  }
}

Text Text::part(std::size_t begin, std::size_t end) const {
  Text result;
  if (begin < end) result.append_part(*this, begin, end);
  return result;
}

Text Text::rewritten(std::string bytes) const {
  return {std::move(bytes), first_origin()};
}

}  // namespace lode::jinja
