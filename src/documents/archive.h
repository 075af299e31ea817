// SPDX-License-Identifier: Apache-2.0
// The parts of a document that is a ZIP archive, bounded.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace lode {

/// What kind of document an archive is: the content of its first entry `mimetype` (EPUB, ODT), "docx", "xlsx"
/// or "pptx", or nothing.
std::string zip_document_type(std::string_view bytes, std::string_view where);

/// Those entries that `wanted` takes, by name. InputError when the archive is damaged or encrypted, has more
/// than 100,000 entries, or those wanted are larger than `limit` bytes in all: however small the archive.
std::map<std::string, std::string> read_zip(std::string_view bytes, std::string_view where, std::size_t limit,
                                            const std::function<bool(std::string_view)>& wanted);

}  // namespace lode
