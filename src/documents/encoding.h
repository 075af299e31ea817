// SPDX-License-Identifier: Apache-2.0
// Bytes of a text file in whatever encoding, as UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace lode {

/// The text as UTF-8: a byte order mark is obeyed and dropped, valid UTF-8 stays as it is, and what is left
/// is recognised by its letters. InputError when it is no text (zero bytes, too many control characters) or
/// its encoding cannot be told; `where` begins the message. `encoding` is set when it was no UTF-8.
std::string text_as_utf8(std::string_view bytes, std::string_view where, std::string* encoding = nullptr);

/// What `bytes`, which are no valid UTF-8, are encoded in by their letters; empty when that cannot be told.
std::string guess_encoding(std::string_view bytes, std::string_view where);

}  // namespace lode
