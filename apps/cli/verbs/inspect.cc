// SPDX-License-Identifier: Apache-2.0
// lodestone inspect: what a model folder, a context file, an artefact or a plan holds, and how much memory a
// model's use takes.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli.h"
#include "engine/context_file.h"
#include "engine/memory.h"
#include "engine/model.h"
#include "help.h"
#include "io/safetensors.h"
#include "lodestone/error.h"
#include "model/family.h"
#include "select/plan/file.h"

namespace lode::cli {

namespace {

struct InspectFlags {
  CommonFlags common;
  ModelFlags model;
  std::string path;
  std::vector<std::string> specs;
};

Json memory_json(const MemoryPlan& plan) {
  return {{"weights", plan.weights},
          {"kv", plan.kv},
          {"index", plan.index},
          {"scratch", plan.scratch},
          {"total", plan.total()}};
}

Json inspect_model(const InspectFlags& flags, const std::string& path) {
  const auto model = Model::load(path, flags.common.threads, /*check_finite=*/false);
  const ModelConfig& c = model->config();
  const auto room = static_cast<std::int64_t>(std::max(1.0, flags.model.rope_factor) *
                                              static_cast<double>(c.max_positions));
  const std::int64_t tokens = flags.model.context > 0 ? flags.model.context : room;
  if (tokens > room)
    throw InputError(
        fmt::format("--ctx-size: expected at most {} tokens, the model's context, found {}; --rope-factor {} "
                    "would stretch it",
                    room, tokens, (tokens + c.max_positions - 1) / c.max_positions));
  const DType kv_type = parse_dtype(flags.model.kv_type);
  const ModelWeights& weights = model->impl().weights;
  const std::string& chat = model->impl().chat_template;
  return {{"kind", "model"},
          {"family", std::string(family_of(c).name)},
          {"architecture", c.architecture},
          {"layers", c.layers},
          {"hidden", c.hidden},
          {"intermediate", c.intermediate},
          {"query_heads", c.query_heads},
          {"kv_heads", c.kv_heads},
          {"head_dim", c.head_dim},
          {"vocab", c.vocab},
          {"max_positions", c.max_positions},
          {"rope_theta", c.rope_theta},
          {"weight_type", std::string(name_of(weights.layers.front().q.type))},
          {"tensor_types", weights.types},
          {"chat_template", chat.empty() ? Json() : Json(chat)},
          {"weight_bytes", model->weight_bytes()},
          {"fingerprint", model->fingerprint()},
          {"tokens", tokens},
          {"kv_type", flags.model.kv_type},
          {"memory", memory_json(plan_memory(*model, kv_type, tokens, parse_specs(flags.specs)))}};
}

/// What the text was made from, where the file says it.
void put_files(Json& result, const ContainerReader& file, const std::string& path) {
  if (!file.has("sources")) return;
  const auto raw = file.bytes("sources");
  const std::string where = path + ": section 'sources'";
  const Json sources = parse_json({reinterpret_cast<const char*>(raw.data()), raw.size()}, where);
  result["files"] = Json::array();
  for (const Json& f : json_member(sources, "files"))
    result["files"].push_back({{"path", json_string(f, "path", where)},
                               {"kind", json_string(f, "kind", where)},
                               {"pages", json_int(f, "pages", where, 0, INT64_MAX)}});
  result["unread"] = Json::array();
  for (const Json& f : json_member(sources, "unread"))
    result["unread"].push_back(
        {{"path", json_string(f, "path", where)}, {"why", json_string(f, "why", where)}});
}

/// What the sections of a context's files take.
struct SectionSums {
  std::uint64_t kv = 0, index = 0, total = 0;
  std::size_t count = 0;
  Json found = Json::object();  ///< what methods say of their indexes; every layer says the same

  void add(const ContainerReader& file) {
    count += file.sections().size();
    for (const SectionInfo& s : file.sections()) {
      const std::uint64_t own = s.shared ? 0 : s.bytes;
      total += own;
      if (s.name.starts_with("kv/")) kv += own;
      if (s.name.starts_with("select/")) index += own;
      if (!s.name.starts_with("select/") || !s.name.ends_with("/summary")) continue;
      const auto text = file.bytes(s.name);
      const std::string spec = s.name.substr(7, s.name.find('/', 7) - 7);
      found[spec] = excerpt({reinterpret_cast<const char*>(text.data()), text.size()}, 400);
    }
  }
};

Json inspect_context(const InspectFlags& flags) {
  expect_context(flags.path);
  const ContainerReader file(flags.path);
  const ContextMeta meta = read_context_meta(file, flags.path);
  SectionSums sums;
  sums.add(file);
  Json shards = Json::array();
  for (std::size_t i = 0; i < meta.shards.shards.size(); ++i) {
    const Shard& shard = meta.shards.shards[i];
    sums.add(open_shard(flags.path, meta.shards, i));
    shards.push_back({{"file", shard.file}, {"begin", shard.tokens.begin}, {"end", shard.tokens.end}});
  }
  Json result = {{"kind", "context"},
                 {"tokens", meta.tokens},
                 {"kv_type", std::string(name_of(meta.kv_type))},
                 {"layers", meta.layers},
                 {"kv_heads", meta.kv_heads},
                 {"head_dim", meta.head_dim},
                 {"methods", meta.methods},
                 {"found", sums.found},
                 {"model", meta.model_path},
                 {"model_fingerprint", meta.model_fingerprint},
                 {"tokenizer_fingerprint", meta.tokenizer_fingerprint},
                 {"rope_factor", std::max(meta.rope_factor, 1.0)},
                 {"kv_bytes", sums.kv},
                 {"index_bytes", sums.index},
                 {"section_bytes", sums.total},
                 {"sections", sums.count}};
  if (!shards.empty()) result["shards"] = shards;
  put_files(result, file, flags.path);
  return result;
}

/// Tensors, of what `train` wrote or others: metadata as it stands there, JSON in it as such.
Json inspect_tensors(const InspectFlags& flags) {
  const MappedFile file(flags.path);
  std::map<std::string, std::string> metadata;
  const auto tensors = parse_safetensors(file.bytes(), flags.path, &metadata);
  Json result = {{"kind", metadata.contains("model_fingerprint") ? "selector" : "tensors"},
                 {"tensors", tensors.size()},
                 {"file_bytes", file.bytes().size()}};
  for (const auto& [key, value] : metadata) {
    const bool json = value.starts_with('{');
    result["metadata"][key] = json ? parse_json(value, flags.path + ": metadata '" + key + "'") : Json(value);
  }
  return result;
}

Json inspect_plan(const InspectFlags& flags) {
  const Plan plan = read_plan(flags.path);
  Json specs = Json::object();
  for (const auto& layer : plan.heads)
    for (const std::string& spec : layer) specs[spec] = specs.value(spec, 0) + 1;
  return {{"kind", "plan"},
          {"note", plan.note},
          {"model_fingerprint", plan.model_fingerprint},
          {"sink", plan.dense.sink},
          {"window", plan.dense.window},
          {"layers", plan.heads.size()},
          {"kv_heads", plan.heads.front().size()},
          {"specs", specs},
          {"heads", plan.heads}};
}

/// "a", "b", ..., "z", "aa", ...: a short name for each spec.
std::string letters(std::size_t index) {
  const std::string last(1, static_cast<char>('a' + index % 26));
  return index < 26 ? last : letters(index / 26 - 1) + last;
}

/// Which spec each head of each layer has, by letters, so that it fits a terminal.
std::string heads_of_plan(const Json& plan) {
  std::map<std::string, std::string> letter_of;
  std::vector<std::vector<std::string>> legend = {{"spec", "KV heads", "letter"}};
  for (const auto& [spec, count] : plan.at("specs").items()) {
    letter_of[spec] = letters(letter_of.size());
    legend.push_back({spec, count.dump(), letter_of[spec]});
  }
  const std::size_t width = letters(letter_of.size() - 1).size() + 1;
  std::string text = "\n" + text_table(legend) + "\nlayer  KV heads in their order\n";
  std::size_t layer = 0;
  for (const Json& specs : plan.at("heads")) {
    std::string line = fmt::format("{:>5} ", layer++);
    for (const Json& spec : specs) {
      if (line.size() + width > 80) text += line + "\n", line = "      ";
      line += fmt::format("{:>{}}", letter_of.at(spec.get<std::string>()), width);
    }
    text += line + "\n";
  }
  return text;
}

/// With line breaks that can be seen, on one line.
std::string on_a_line(const std::string& text) {
  std::string line;
  for (const char c : text) line += c == '\n' ? "\\n" : c == '\t' ? "\\t" : std::string(1, c);
  return line;
}

/// A chat template may be pages long; files stand a line each.
Json for_people(Json found) {
  for (const char* list : {"files", "unread"}) {
    if (!found.contains(list)) continue;
    Json lines = Json::object();
    for (const Json& f : found[list]) {
      const bool read = f.contains("kind");
      std::string what = f[read ? "kind" : "why"].get<std::string>();
      if (read && f["pages"] > 0) what += ", " + counted(f["pages"].get<std::int64_t>(), "page");
      lines[f["path"].get<std::string>()] = what;
    }
    found[list] = lines;
  }
  if (Json& chat = found["chat_template"]; chat.is_string())
    chat = excerpt(on_a_line(chat.get<std::string>()), 200);
  if (found["chat_template"].is_null()) found.erase("chat_template");
  return found;
}

/// "name: value" lines, byte counts for people.
std::string as_text(const Json& object, const std::string& indent = "", bool sizes = false) {
  std::string text;
  for (const auto& [key, value] : object.items()) {
    const bool bytes = sizes || key.ends_with("bytes");
    if (value.is_object() && value.empty()) continue;
    if (value.is_object()) {
      text += fmt::format("{}{}:\n{}", indent, key, as_text(value, indent + "  ", key == "memory"));
    } else {
      const std::string shown = value.is_string() ? value.get<std::string>()
                                : bytes           ? human_bytes(value.get<std::int64_t>())
                                                  : value.dump();
      text += fmt::format("{}{}: {}\n", indent, key, shown);
    }
  }
  return text;
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* verb = app.add_subcommand("inspect",
                                      "What a model, a .lode file, an artefact of `train` or a plan "
                                      "of `tune` holds, and the memory that a "
                                      "model will take");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, false);
  verb->add_option(
      "file", flags->path,
      "a model folder or .gguf file, a .lode file, a .safetensors file that `train` wrote or a plan that "
      "`tune` wrote");
  add_attention_flag(*verb, flags->specs, false);
  verb->callback([flags, verb] {
    if (flags->path.empty() == flags->model.model.empty())
      throw InputError("inspect: expected FILE, or a model with -m, found " +
                       std::string(flags->path.empty() ? "neither" : "both"));
    const std::string& path = flags->path.empty() ? flags->model.model : flags->path;
    const bool model = !flags->model.model.empty() || is_model(path);
    expect_use(*verb, {"--attention", "--ctx-size", "--kv-type", "--rope-factor"}, model,
               "expected a model, whose memory it is to foretell, found '" + path + "'");
    say_unaudited(flags->common, flags->model, "nothing is attended");
    const Json found = model               ? inspect_model(*flags, path)
                       : is_artefact(path) ? inspect_tensors(*flags)
                       : is_plan(path)     ? inspect_plan(*flags)
                                           : inspect_context(*flags);
    if (flags->common.json) return print_json(found);
    if (found.at("kind") != "plan") return print_text(as_text(for_people(found)));
    Json head = found;
    for (const char* shown_below : {"note", "specs", "heads"}) head.erase(shown_below);
    print_text(as_text(head) + wrapped("note: " + found.at("note").get<std::string>(), 2) + "\n" +
               heads_of_plan(found));
  });
}

}  // namespace lode::cli
