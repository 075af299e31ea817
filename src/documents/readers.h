// SPDX-License-Identifier: Apache-2.0
// One function a kind of document: bytes to text with places. All throw InputError with one sentence, which
// `where` begins, and none trusts a byte.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "documents/page_layout.h"
#include "documents/text_builder.h"
#include "lodestone/documents.h"

namespace lode {

enum class DocumentKind { text, html, pdf, epub, docx, odt };
const char* name_of(DocumentKind kind);

/// What the bytes are, whatever the file is called; InputError for what is known to be no document.
DocumentKind recognise(std::string_view bytes, std::string_view where);

/// What a file says.
struct DocumentText {
  std::string text;
  std::vector<PlaceMark> marks;
  std::int64_t pages = 0;
  std::vector<std::string> remarks;
};

DocumentText read_plain_text(std::string_view bytes, std::string_view where, const ReadOptions& options);
DocumentText read_pdf(std::string_view bytes, std::string_view where, const ReadOptions& options);
DocumentText read_html(std::string_view bytes, std::string_view where, const ReadOptions& options);
DocumentText read_epub(std::string_view bytes, std::string_view where, const ReadOptions& options);
DocumentText read_docx(std::string_view bytes, std::string_view where, const ReadOptions& options);
DocumentText read_odt(std::string_view bytes, std::string_view where, const ReadOptions& options);

/// Pages of a PDF as text that flows: running headers and footers go, lines of a paragraph and words that a
/// line breaks are joined, footnotes follow the paragraph that their page ends in.
void put_pages(const std::vector<PageLines>& pages, TextBuilder& out);

/// Puts what an HTML document says at the end of `out`; every piece stands on `page` and, with `lines`, on
/// the line of its element. `title` (may be null) gets the document's.
void put_html(std::string_view bytes, std::string_view where, bool lines, TextBuilder& out);

}  // namespace lode
