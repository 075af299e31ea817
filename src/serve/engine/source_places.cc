// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/source_places.h"

#include <algorithm>
#include <numeric>

#include "engine/document.h"

namespace lode::serve {

namespace {

bool starts_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
}

std::int64_t characters_in(std::string_view text) {
  return std::count_if(text.begin(), text.end(), starts_character);
}

/// Shares of a neutral question's attention by token of the document.
std::vector<double> shares_of(const SourceMass* neutral, std::int64_t tokens) {
  if (neutral == nullptr || std::ssize(neutral->mass) < tokens) return {};
  const double total = std::max(1e-30, std::accumulate(neutral->mass.begin(), neutral->mass.end(), 0.0));
  std::vector<double> shares(neutral->mass.begin(), neutral->mass.begin() + tokens);
  for (double& share : shares) share /= total;
  return shares;
}

/// The byte at which a passage stands in the whole text: from about its first token on.
std::size_t byte_of(const Citation& citation, const std::string& text,
                    const std::vector<std::size_t>& offsets) {
  const std::size_t about = offsets[static_cast<std::size_t>(citation.token_begin)];
  const std::size_t from = about - std::min(about, citation.cited_text.size());
  const std::size_t found = text.find(citation.cited_text, from);
  return found == std::string::npos ? about : found;
}

}  // namespace

SourceText plain_source(std::string text, const std::string& title) {
  SourceText source;
  source.files = {{.path = title, .kind = "text", .checksum = {}, .begin = 0, .end = text.size()}};
  source.marks = {{.begin = 0, .page = 0, .line = 1}};
  source.text = std::move(text);
  return source;
}

void keep_source(const Document& document, SourceText source, std::int64_t first_token) {
  Context::Impl& parts = document.impl().parts();
  parts.source = std::make_shared<const SourceText>(std::move(source));
  parts.first_token = first_token;
}

std::vector<Source> sources_of(const Document& document, const SourceMass& mass, const SourceMass* neutral,
                               std::size_t count) {
  const Context& context = document.impl().context;
  const std::string& text = source_of(context).text;
  const std::vector<std::size_t> offsets = token_offsets(context);
  std::vector<Source> sources;
  for (const Citation& c : cite(context, mass, shares_of(neutral, document.tokens()), count)) {
    const std::size_t begin = byte_of(c, text, offsets);
    Source source;
    source.weight = c.weight;
    source.token_begin = c.token_begin;
    source.token_end = c.token_end;
    source.title = c.document_title;
    source.char_begin = c.start_char;
    source.char_end = c.end_char;
    source.text_begin = characters_in(std::string_view(text).substr(0, begin));
    source.text_end = source.text_begin + characters_in(c.cited_text);
    source.page_begin = c.start_page;
    source.page_end = c.end_page;
    source.line = c.line;
    source.text = c.cited_text;
    sources.push_back(std::move(source));
  }
  return sources;
}

}  // namespace lode::serve
