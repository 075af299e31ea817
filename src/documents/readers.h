// SPDX-License-Identifier: Apache-2.0
// One function a kind of document: bytes to text with places. All throw InputError with one sentence, which
// `where` begins, and none trusts a byte.
#pragma once

#include <map>
#include <set>
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

/// A link of an archive's page `from` as a name in the archive: beside it, with its "..", but never out of the archive.
std::string name_in_archive(const std::string& from, const std::string& link);

/// The notes that pages refer to.
struct PageNotes {
  std::string page;  ///< the name of the one that is read in its archive; empty: it stands alone
  std::map<std::string, std::string>
      labels;                      ///< "chapter1.xhtml#n3": "3"; a page that stands alone finds its own
  std::set<std::string> searched;  ///< the archive's pages in front of this one
};
/// Adds those of a page of an archive.
void find_notes(std::string_view bytes, std::string_view where, PageNotes& notes);

/// Puts what an HTML document says at the end of `out`. With `lines`, every piece stands on the line of its element,
/// and the document's title heads it.
void put_html(std::string_view bytes, std::string_view where, bool lines, const PageNotes& notes,
              TextBuilder& out);

}  // namespace lode
