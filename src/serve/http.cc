// SPDX-License-Identifier: Apache-2.0
#include "serve/http.h"

#include <algorithm>

namespace lode::serve {

std::string_view HttpRequest::header(std::string_view lower_case_name) const {
  for (const auto& [name, value] : headers)
    if (name == lower_case_name) return value;
  return {};
}

int HttpRequest::count(std::string_view lower_case_name) const {
  return static_cast<int>(std::count_if(headers.begin(), headers.end(),
                                        [&](const auto& header) { return header.first == lower_case_name; }));
}

}  // namespace lode::serve
