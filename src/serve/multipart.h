// SPDX-License-Identifier: Apache-2.0
// multipart/form-data (RFC 7578), as browsers and curl send files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lode::serve {

struct FormPart {
  std::string name, file_name;  ///< file_name is what the client calls it: a title, never a path
  bool has_file_name = false;
  std::string_view content;  ///< lies in the body
};

/// InputError on a missing boundary, a part without a name, an unfinished body, or more than 32 parts. `body`
/// outlives the result.
std::vector<FormPart> parse_multipart(std::string_view content_type, std::string_view body);

/// A parameter of a header's value, such as `boundary` of "multipart/form-data; boundary=x"; empty when there is none.
std::string header_parameter(std::string_view value, std::string_view name);
/// "application/json" of "Application/JSON; charset=utf-8".
std::string media_type(std::string_view content_type);

}  // namespace lode::serve
