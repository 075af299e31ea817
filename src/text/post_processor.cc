// SPDX-License-Identifier: Apache-2.0
#include "text/post_processor.h"

#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"
#include "text/bpe.h"

namespace lode {

namespace {

constexpr std::size_t kMaxPrefix = 64;

void require_short(std::size_t tokens, const std::string& where) {
  if (tokens <= kMaxPrefix) return;
  throw InputError(where + ": expected at most " + std::to_string(kMaxPrefix) +
                   " tokens in front of a text, found more");
}

void add_ids(const Json& json, const std::string& name, const std::string& where, std::vector<TokenId>& ids) {
  const Json& specials = json_member(json, "special_tokens");
  if (!json_member(json_member(specials, name), "ids").is_array()) {
    throw InputError(where + ": the token '" + excerpt(name) + "' has no ids in 'special_tokens'");
  }
  for (const Json& id : specials[name]["ids"]) {
    if (!id.is_number_integer() || id < 0 || id >= Bpe::kMaxTokens) {
      throw InputError(where + ": special_tokens: '" + excerpt(name) + "': expected ids from 0 to " +
                       std::to_string(Bpe::kMaxTokens - 1) + ", found " + id.type_name());
    }
    require_short(ids.size() + 1, where);
    ids.push_back(id.get<TokenId>());
  }
}

std::vector<TokenId> read_template(const Json& json, const std::string& where) {
  if (!json_has(json, "single") || !json["single"].is_array()) {
    throw InputError(where + ": expected an array 'single'");
  }
  std::vector<TokenId> ids;
  bool text_seen = false;
  for (const Json& piece : json["single"]) {
    if (json_has(piece, "Sequence")) {
      if (text_seen) throw InputError(where + ": 'single' has the text twice");
      text_seen = true;
    } else if (json_has(piece, "SpecialToken")) {
      const std::string name = json_string(piece["SpecialToken"], "id", where + ": single");
      if (text_seen)
        throw InputError(where + ": a token after the text, '" + excerpt(name) + "', is not supported");
      add_ids(json, name, where, ids);
    } else {
      throw InputError(where + ": single: expected Sequence or SpecialToken, found " +
                       excerpt(piece.dump(-1, ' ', false, Json::error_handler_t::replace)));
    }
  }
  return ids;
}

}  // namespace

std::vector<TokenId> read_prefix(const Json& json, const std::string& where) {
  if (json.is_null()) return {};
  const std::string type = json_string(json, "type", where);
  // ByteLevel only trims offsets, which nobody reads here.
  if (type == "ByteLevel") return {};
  if (type == "TemplateProcessing") return read_template(json, where + ": TemplateProcessing");
  if (type != "Sequence") {
    throw UnreadableError(where + ": expected Sequence, ByteLevel or TemplateProcessing, found '" +
                          excerpt(type) + "'");
  }
  if (!json_has(json, "processors") || !json["processors"].is_array()) {
    throw InputError(where + ": expected a Sequence to have an array 'processors'");
  }
  std::vector<TokenId> ids;
  for (const Json& part : json["processors"]) {
    const std::vector<TokenId> more = read_prefix(part, where);
    require_short(ids.size() + more.size(), where);
    ids.insert(ids.begin(), more.begin(), more.end());
  }
  return ids;
}

}  // namespace lode
