// SPDX-License-Identifier: Apache-2.0
// The blanks around questions and answers: nobody asks for them, and models begin answers with one.
#pragma once

#include <string>
#include <string_view>

namespace lode {

/// Without the blanks at both ends.
std::string_view without_blanks(std::string_view text);

/// Passes text on without the blanks at its beginning and end, as they come.
class BlankTrimmer {
 public:
  std::string push(std::string_view text);

 private:
  std::string held_;
  bool begun_ = false;
};

}  // namespace lode
