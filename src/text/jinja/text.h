// SPDX-License-Identifier: Apache-2.0
// A string that knows which of its bytes came from the template's inputs (messages) and which from the template
// itself, through all that a template does with it. Only the template's own bytes may become special tokens.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lode::jinja {

/// Which input some bytes came from; 0: the template's own.
using Origin = int;

/// A stretch of bytes from one input.
struct Run {
  std::size_t begin, end;
  Origin origin;
};

class Text {
 public:
  Text() = default;
  explicit Text(std::string bytes) : bytes_(std::move(bytes)) {}
  Text(std::string bytes, Origin origin);

  const std::string& bytes() const { return bytes_; }
  std::string_view view() const { return bytes_; }
  std::size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  const std::vector<Run>& runs() const { return runs_; }  ///< rising, apart, never empty

  void append(std::string_view own) { bytes_ += own; }
  void append(const Text& other) { append_part(other, 0, other.size()); }
  void append_part(const Text& other, std::size_t begin, std::size_t end);
  Text part(std::size_t begin, std::size_t end) const;
  /// `bytes` made from all of these: if any was input, all of it is.
  Text rewritten(std::string bytes) const;
  Origin first_origin() const { return runs_.empty() ? 0 : runs_.front().origin; }

 private:
  std::string bytes_;
  std::vector<Run> runs_;
};

}  // namespace lode::jinja
