// SPDX-License-Identifier: Apache-2.0
#include "engine/chat/indexed_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>

#include "base/file.h"
#include "base/json.h"
#include "model/config.h"

namespace lode {

namespace {

bool has_bos(const Model& model, std::span<const TokenId> tokens) {
  const std::vector<TokenId>& bos = model.config().bos;
  return !tokens.empty() && std::find(bos.begin(), bos.end(), tokens.front()) != bos.end();
}

/// Whether a folder's tokenizer_config.json asks for a BOS; nothing when it does not say.
std::optional<bool> asks_for_bos(const std::filesystem::path& model) {
  const auto path = model / "tokenizer_config.json";
  std::error_code failed;
  if (!std::filesystem::exists(path, failed)) return std::nullopt;
  const Json config = parse_json(read_file(path, 256 << 20), path.string());
  const Json& asked = json_member(config, "add_bos_token");
  return asked.is_boolean() ? std::optional(asked.get<bool>()) : std::nullopt;
}

}  // namespace

DocumentChat document_chat(const Model& model, DocumentChat::Settings settings, const std::string& where) {
  const ModelConfig& config = model.config();
  return {std::move(settings), ChatTokens::of(model.tokenizer(), config.bos, config.eos), where};
}

IndexedText plain_text(const Model& model, const std::string& text) {
  IndexedText result;
  result.tokens = model.tokenizer().encode(text, Tokenizer::Bos::as_template);
  result.first_token = std::ssize(model.tokenizer().prefix());
  const std::vector<TokenId>& bos = model.config().bos;
  if (result.first_token > 0 || bos.empty()) return result;
  const std::optional<bool> asked = asks_for_bos(model.path());
  if (asked && *asked) {
    result.tokens.insert(result.tokens.begin(), bos.front());
    result.first_token = 1;
  } else if (!asked) {
    result.remarks.push_back(fmt::format(
        "no BOS token stands before the text: config.json names one ({}), but neither tokenizer.json nor "
        "tokenizer_config.json (add_bos_token) asks for it; if answers make no sense, set add_bos_token to "
        "true",
        bos.front()));
  }
  return result;
}

IndexedText text_in_chat(const Model& model, const DocumentChat& chat, const std::string& text) {
  const DocumentChat::Head head = chat.head(text);
  const PartEncoder encoder(model.tokenizer());
  IndexedText result;
  result.tokens = encoder.encode(head.parts);
  result.first_token = std::ssize(encoder.encode(head.in_front));
  result.attachments[DocumentChat::kAttachment] = {.text = chat.to_json(), .required = true};
  if (!model.tokenizer().prefix().empty() && !has_bos(model, result.tokens))
    result.remarks.emplace_back(
        "no BOS token stands before the text: the chat template writes none, though the tokenizer puts one "
        "before "
        "plain texts");
  return result;
}

}  // namespace lode
