// SPDX-License-Identifier: Apache-2.0
// Contexts on disk. Sections: meta (JSON), tokens [tokens] int32, text, sources (JSON) and places,
// attached/NAME, kv/LAYER/HEAD/{k,v,k_scale,v_scale}, and select/SPEC/LAYER/... as each selector writes them. The
// last two lie in shards where there are any: containers with a section shard (JSON), which says whose they are.
#include "engine/context_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>

#include "base/cancel.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "base/threads.h"
#include "base/timed_parts.h"
#include "engine/context.h"
#include "engine/row_order.h"
#include "engine/source_sections.h"
#include "kernels/q4_rows.h"
#include "lodestone/error.h"
#include "model/kv_shape.h"
#include "select/artefacts.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

/// Version 2: there are attachments that answers depend on, which readers of version 1 would ignore. Version 3: layers
/// are recurrent, and have states in place of rows; or rows are latent, and held once. Version 4: rows lie in shards.
/// Version 5: layers have heads of different sizes, or the rows of earlier ones.
constexpr int kMetaVersion = 1, kRequiresAttachments = 2, kHasStates = 3, kHasShards = 4, kLayersDiffer = 5;
constexpr int kShardVersion = 1;
constexpr std::int64_t kMostShards = 4096;
constexpr std::size_t kShardId = 16;  // letters
constexpr std::int64_t kMostStates = 64;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30, kMaxKvBytes = std::int64_t{1} << 50;

struct PartName {
  KvStore::Part part;
  const char* name;
};
constexpr std::array<PartName, 4> kParts = {{{KvStore::Part::k, "k"},
                                             {KvStore::Part::v, "v"},
                                             {KvStore::Part::k_scale, "k_scale"},
                                             {KvStore::Part::v_scale, "v_scale"}}};

bool is_key(KvStore::Part part) {
  return part == KvStore::Part::k || part == KvStore::Part::k_scale;
}

std::span<const PartName> parts_of(DType type) {
  return std::span(kParts).first(type == DType::q8 ? 4 : 2);
}

/// Numbers whose exponent is all ones are infinite or none.
template <class Bits>
bool all_finite_bits(std::span<const std::byte> row, Bits exponent) {
  bool finite = true;
  for (std::size_t at = 0; at + sizeof(Bits) <= row.size(); at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, row.data() + at, sizeof bits);
    finite &= (bits & exponent) != exponent;
  }
  return finite;
}
bool all_finite(std::span<const std::byte> row, DType type, int d) {
  if (type == DType::q4) return is_finite_q4(row.data(), d);
  if (type == DType::f32) return all_finite_bits<std::uint32_t>(row, 0x7f80'0000);
  return all_finite_bits<std::uint16_t>(row, type == DType::f16 ? 0x7c00 : 0x7f80);
}

/// Where a spec has its artefact, when nothing is there; else empty.
std::filesystem::path missing_artefact(const Spec& spec, const std::filesystem::path& model) {
  const auto named = spec.file("weights");
  if (!named && !find_method(spec.name).trained) return {};
  const auto path =
      named ? std::filesystem::path(*named) : artefact_folder(model) / (spec.name + ".safetensors");
  std::error_code unreadable;  // counts as missing
  return std::filesystem::exists(path, unreadable) ? std::filesystem::path()
                                                   : std::filesystem::absolute(path);
}

/// Since a file was written its artefact may have gone, and what specs may say may have changed.
void attach_stored(Context& context, const std::string& text, const ContextMeta& meta,
                   const std::filesystem::path& path) {
  std::string why;
  try {
    const Spec spec = parse_spec(text, meta.folders);
    const auto missing = missing_artefact(spec, context.model().path());
    if (missing.empty()) return static_cast<void>(context.attach(spec));
    why = fmt::format("expected its artefact at '{}', found no file there", missing.string());
  } catch (const InputError& error) {
    why = error.what();
  }
  throw InputError(
      fmt::format("{}: its index of '{}' cannot be used: {}; put back what it was made with, ask with -a "
                  "full, or index the text again",
                  path.string(), text, why));
}

std::string kv_section(int layer, int head, const char* part) {
  return fmt::format("kv/{}/{}/{}", layer, head, part);
}
std::string selector_prefix(const Spec& spec, std::size_t layer) {
  return fmt::format("select/{}/{}/", spec.str(), layer);
}

Json context_meta(const Context::Impl& c, const Json& methods) {
  return {{"version", kMetaVersion},
          {"model", std::filesystem::absolute(c.model->path()).string()},
          {"model_fingerprint", c.model->fingerprint()},
          {"tokenizer_fingerprint", c.model->tokenizer().fingerprint()},
          {"layers", c.config.layers},
          {"kv_heads", c.kv.shape().kv_heads},
          {"head_dim", c.config.head_dim},
          {"kv_type", std::string(name_of(c.options.kv_type))},
          {"tokens", c.tokens()},
          {"rope_tokens", c.rope_tokens},
          {"rope_factor", c.options.rope_factor.value_or(0.0)},
          {"max_positions", c.model->config().max_positions},
          {"seed", c.options.seed},
          {"methods", methods}};
}

std::string attachment_section(std::string_view name) {
  return fmt::format("attached/{}", name);
}

Json json_of(const ShardSet& set) {
  Json shards = Json::array();
  for (const Shard& shard : set.shards)
    shards.push_back({{"file", shard.file}, {"begin", shard.tokens.begin}, {"end", shard.tokens.end}});
  return {{"id", set.id}, {"files", shards}};
}

/// Where the files of the specs may be, each folder once; those whose names are no UTF-8 cannot be said.
std::set<std::string> folders_of(const std::vector<Spec>& specs) {
  std::set<std::string> folders;
  for (const Spec& spec : specs)
    for (const std::filesystem::path& folder : starts_of_files(spec))
      if (const std::string name = folder.string(); invalid_utf8(name) == std::string::npos)
        folders.insert(name);
  return folders;
}

Json meta_of(const Context::Impl& c, const Attachments& attachments, const ShardSet& shards) {
  Json methods = Json::array();
  for (const Spec& spec : c.specs) methods.push_back(spec.str());
  Json names = Json::array(), required = Json::array();
  for (const auto& [name, attachment] : attachments) {
    names.push_back(name);
    if (attachment.required) required.push_back(name);
  }
  Json meta = context_meta(c, methods);
  if (const auto folders = folders_of(c.specs); !folders.empty()) meta["folders"] = folders;
  if (!names.empty()) meta["attachments"] = names;
  if (!required.empty()) {
    meta["version"] = kRequiresAttachments;
    meta["required"] = required;
  }
  if (c.kv.shape().shared_rows) {
    meta["version"] = kHasStates;
    meta["shared_rows"] = true;
  }
  if (!c.kv.recurrent().empty()) {
    meta["version"] = kHasStates;
    meta["recurrent"] = c.kv.shape().recurrent;
    meta["states"] = c.kv.recurrent().kept();
  }
  if (!shards.empty()) {
    meta["version"] = kHasShards;
    meta["shards"] = json_of(shards);
  }
  if (!c.kv.shape().by_layer.empty()) {
    meta["version"] = kLayersDiffer;
    Json layers = Json::array();
    for (const KvLayerShape& layer : c.kv.shape().by_layer)
      layers.push_back({layer.kv_heads, layer.head_dim, layer.rows_of});
    meta["layer_rows"] = std::move(layers);
  }
  return meta;
}

/// Shards lie beside the file and cover its tokens in order.
ShardSet read_shards(const Json& json, std::int64_t tokens, const std::string& where) {
  ShardSet set;
  if (!json_has(json, "shards")) return set;
  const Json& said = json_member(json, "shards");
  set.id = json_string(said, "id", where);
  const Json& files = json_member(said, "files");
  if (!files.is_array() || files.empty() || std::ssize(files) > kMostShards)
    throw InputError(fmt::format("{}: expected a list of 1 to {} shards, found another", where, kMostShards));
  std::int64_t at = 0;
  for (const Json& one : files) {
    Shard shard = {.file = json_string(one, "file", where), .tokens = {}};
    shard.tokens = {json_int(one, "begin", where, 0, tokens), json_int(one, "end", where, 0, tokens)};
    if (shard.tokens.begin != at || shard.tokens.end <= at ||
        std::filesystem::path(shard.file).filename() != shard.file)
      throw InputError(fmt::format(
          "{}: expected shards in one folder that follow each other up to token {}, found '{}' of tokens "
          "{} to {} behind token {}",
          where, tokens, excerpt(shard.file), shard.tokens.begin, shard.tokens.end, at));
    at = shard.tokens.end;
    set.shards.push_back(std::move(shard));
  }
  if (at != tokens)
    throw InputError(fmt::format("{}: expected shards of {} tokens, found {}", where, tokens, at));
  return set;
}

std::string state_section(std::int64_t tokens) {
  return fmt::format("state/{}", tokens);
}

/// Whole numbers of a list; none where there is no such field.
std::vector<std::int64_t> read_numbers(const Json& json, const char* field, const std::string& where,
                                       std::int64_t high) {
  std::vector<std::int64_t> numbers;
  if (!json_has(json, field)) return numbers;
  if (!json[field].is_array())
    throw InputError(fmt::format("{}: '{}': expected a list of numbers", where, field));
  for (const Json& x : json[field]) numbers.push_back(json_int({{field, x}}, field, where, 0, high));
  return numbers;
}

/// Heads, their numbers, and the layer whose rows they are, of layers that differ.
std::vector<KvLayerShape> read_layer_rows(const Json& json, const ContextMeta& meta,
                                          const std::string& where) {
  std::vector<KvLayerShape> layers;
  if (!json_has(json, "layer_rows")) return layers;
  const Json& list = json["layer_rows"];
  if (!list.is_array() || std::ssize(list) != meta.layers)
    throw InputError(fmt::format("{}: 'layer_rows': expected a list of {} layers", where, meta.layers));
  for (int i = 0; i < meta.layers; ++i) {
    const Json& layer = list[static_cast<std::size_t>(i)];
    if (!layer.is_array() || layer.size() != 3)
      throw InputError(fmt::format("{}: 'layer_rows': expected three numbers of layer {}", where, i));
    const auto read = [&](std::size_t at, std::int64_t low, std::int64_t high) {
      return static_cast<int>(json_int({{"layer_rows", layer[at]}}, "layer_rows", where, low, high));
    };
    layers.push_back(
        {.kv_heads = read(0, 1, meta.kv_heads), .head_dim = read(1, 2, 1024), .rows_of = read(2, 0, i)});
  }
  for (const KvLayerShape& layer : layers) {
    const KvLayerShape& source = layers[static_cast<std::size_t>(layer.rows_of)];
    if (layer != KvLayerShape{source.kv_heads, source.head_dim, layer.rows_of} ||
        source.rows_of != layer.rows_of)
      throw InputError(fmt::format(
          "{}: 'layer_rows': expected layers that share rows to have the same heads, found others", where));
  }
  return layers;
}

/// The layers that have no rows, and the tokens of the states that stand for them.
void read_states(const Json& json, ContextMeta& meta, const std::string& where) {
  constexpr std::int64_t kMostFloats = std::int64_t{1} << 32;
  meta.recurrent = read_numbers(json, "recurrent", where, kMostFloats);
  meta.states = read_numbers(json, "states", where, meta.tokens);
  if (meta.recurrent.empty() && meta.states.empty()) return;
  const bool rising =
      std::adjacent_find(meta.states.begin(), meta.states.end(), std::greater_equal<>()) == meta.states.end();
  if (std::ssize(meta.recurrent) != meta.layers || meta.states.empty() || !rising ||
      meta.states.back() != meta.tokens || std::ssize(meta.states) > kMostStates)
    throw InputError(
        fmt::format("{}: expected sizes of states of {} layers, and at most {} rising counts of tokens "
                    "up to {}, found {} and {}",
                    where, meta.layers, kMostStates, meta.tokens, meta.recurrent.size(), meta.states.size()));
}

/// States are copied: a step writes as much as it reads of them.
void restore_states(Context::Impl& c, const ContainerReader& file, const ContextMeta& meta) {
  RecurrentStates& states = c.kv.recurrent();
  for (const std::int64_t tokens : meta.states) {
    const auto stored = SectionReader(file, "").values<float>(state_section(tokens));
    if (std::ssize(stored) != states.floats())
      throw InputError(fmt::format("{}: section '{}': expected {} numbers, found {}",
                                   file.file().path().string(), state_section(tokens), states.floats(),
                                   stored.size()));
    if (!all_finite(std::as_bytes(stored), DType::f32, 1))
      throw InputError(fmt::format("{}: section '{}': expected finite numbers, found others",
                                   file.file().path().string(), state_section(tokens)));
    states.restore(tokens, stored);
  }
}

/// Any number of 64 bits.
std::uint64_t read_seed(const Json& json, const std::string& where) {
  const Json& seed = json_member(json, "seed");
  if (!seed.is_number_unsigned())
    throw InputError(where + ": field 'seed': expected a whole number of 64 bits, found " +
                     excerpt(seed.dump()));
  return seed.get<std::uint64_t>();
}

std::vector<std::string> read_names(const Json& json, const char* field, const std::string& where) {
  std::vector<std::string> names;
  if (!json_has(json, field)) return names;
  if (!json[field].is_array())
    throw InputError(fmt::format("{}: expected a list '{}', found another type", where, field));
  for (const Json& name : json[field]) {
    if (!name.is_string())
      throw InputError(fmt::format("{}: expected strings in '{}', found another type", where, field));
    names.push_back(name.get<std::string>());
  }
  return names;
}

void expect_same(const std::filesystem::path& path, const char* what, const std::string& expected,
                 const std::string& found) {
  if (expected == found) return;
  throw InputError(
      fmt::format("{}: this context was made with another {} (expected {}, found {}): index the text again "
                  "or give the right model with it",
                  path.string(), what, expected, found));
}

void expect_same_model(const std::filesystem::path& path, const ContextMeta& meta, const Model& model) {
  const bool same_weights = meta.model_fingerprint == model.fingerprint();
  if (same_weights && meta.tokenizer_fingerprint == model.tokenizer().fingerprint()) return;
  const std::string found = model.path().string();
  const bool same_place = found == meta.model_path;
  throw InputError(
      fmt::format("{}: expected the model that the text was indexed with{}, found another {}{} '{}': name "
                  "the right one with "
                  "-m, or index the text again",
                  path.string(), same_place ? "" : fmt::format(", '{}'", meta.model_path),
                  same_weights ? "tokenizer" : "model", same_place ? " there now," : ",", found));
}

void check_fits(const std::filesystem::path& path, const ContextMeta& meta, const Model& model) {
  const ModelConfig& config = model.config();
  expect_same_model(path, meta, model);
  const KvShape shape = kv_shape(config, meta.kv_type, 1);
  expect_same(path, "shape",
              fmt::format("{} layers, {} KV heads of {}", meta.layers, meta.kv_heads, meta.head_dim),
              fmt::format("{} layers, {} KV heads of {}", shape.layers, shape.kv_heads, shape.head_dim));
  if (meta.by_layer != shape.by_layer) expect_same(path, "shape", "heads of its layers", "others");
  if (meta.rope_factor == 1.0 && meta.max_positions == 0 &&
      config.rope_scaling.kind != RopeScaling::Kind::none)
    throw InputError(path.string() +
                     ": its keys were stored without the model's RoPE scaling: index the text again");
  if (meta.rope_factor > 0 && meta.max_positions > 0)  // what the factor stretches
    expect_same(path, "context length", fmt::format("{} tokens", meta.max_positions),
                fmt::format("{} tokens", config.max_positions));
}

/// A file with keys and values, and whose they are.
struct RowFile {
  std::shared_ptr<const ContainerReader> file;
  Share tokens;
};

/// What a name such as "book.lode.0123456789abcdef-2of4" says: shard `index` of `count` of a writing of "book.lode".
struct ShardName {
  std::string_view text, id, index, count;
};

std::optional<ShardName> parse_shard_name(std::string_view name) {
  const auto made_of = [](std::string_view part, std::string_view letters) {
    return !part.empty() && part.find_first_not_of(letters) == std::string_view::npos;
  };
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view rest = name.substr(dot + 1);
  if (rest.size() <= kShardId || rest[kShardId] != '-') return std::nullopt;
  const std::string_view numbers = rest.substr(kShardId + 1);
  const std::size_t of = numbers.find("of");
  if (of == std::string_view::npos) return std::nullopt;
  const ShardName found = {.text = name.substr(0, dot),
                           .id = rest.substr(0, kShardId),
                           .index = numbers.substr(0, of),
                           .count = numbers.substr(of + 2)};
  if (!is_shard_id(found.id) || !made_of(found.index, kDigits) || !made_of(found.count, kDigits))
    return std::nullopt;
  return found;
}

/// Somebody has named a shard where its text was wanted.
[[noreturn]] void refuse_shard(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  if (const auto known = parse_shard_name(name))
    throw InputError(fmt::format(
        "{}: expected an indexed text, found shard {} of {} of it: name '{}' instead, which lists "
        "all shards",
        path.string(), known->index, known->count, (path.parent_path() / known->text).string()));
  throw InputError(
      fmt::format("{}: expected an indexed text, found one shard of it: name the file that lists all shards",
                  path.string()));
}

/// InputError unless the file is the shard that a text lists.
void expect_shard(const ContainerReader& file, const ShardSet& set, const Shard& shard) {
  const std::string where = file.file().path().string() + ": section 'shard'";
  const auto raw = file.bytes("shard");
  const Json json = parse_json({reinterpret_cast<const char*>(raw.data()), raw.size()}, where);
  json_int(json, "version", where, kShardVersion, kShardVersion);
  const std::string id = json_string(json, "id", where);
  const Share tokens = {json_int(json, "begin", where, 0, kMaxTokens),
                        json_int(json, "end", where, 0, kMaxTokens)};
  if (id != set.id || !(tokens == shard.tokens))
    throw InputError(fmt::format(
        "{}: expected tokens {} to {} of the text '{}', found {} to {} of '{}': put the shards back that "
        "were written with it, or index the text again",
        where, shard.tokens.begin, shard.tokens.end, set.id, tokens.begin, tokens.end, excerpt(id)));
}

std::vector<RowFile> row_files(std::shared_ptr<const ContainerReader> file, const std::filesystem::path& path,
                               const ContextMeta& meta) {
  if (meta.shards.empty()) return {{std::move(file), {0, meta.tokens}}};
  std::vector<RowFile> files;
  for (std::size_t i = 0; i < meta.shards.shards.size(); ++i) {
    const Shard& shard = meta.shards.shards[i];
    auto opened = std::make_shared<const ContainerReader>(open_shard(path, meta.shards, i));
    expect_shard(*opened, meta.shards, shard);
    files.push_back({std::move(opened), shard.tokens});
  }
  return files;
}

/// Checks size and checksum of every KV section, all threads at once.
void check_rows(const Context::Impl& c, const RowFile& rows, const ContextMeta& meta) {
  const TimedPart timed("keys checked");
  const ContainerReader& file = *rows.file;
  const auto parts = parts_of(meta.kv_type);
  const auto per_head = static_cast<std::int64_t>(parts.size());
  c.model->pool().for_each(per_head * meta.layers * meta.kv_heads, [&](std::int64_t item, int) {
    check_cancel();
    const PartName& part = parts[static_cast<std::size_t>(item % per_head)];
    const int head = static_cast<int>(item / per_head % meta.kv_heads);
    const int layer = static_cast<int>(item / per_head / meta.kv_heads);
    if (!c.kv.shape().holds(layer, head, is_key(part.part))) return;
    const std::string name = kv_section(layer, head, part.name);
    const bool scale = part.part == KvStore::Part::k_scale || part.part == KvStore::Part::v_scale;
    const std::int64_t expected =
        rows.tokens.count() *
        (scale ? std::int64_t{sizeof(float)} : row_bytes_of(meta.kv_type, c.kv.shape().dim(layer)));
    if (static_cast<std::int64_t>(file.bytes(name).size()) != expected) {
      throw InputError(fmt::format("{}: section '{}': expected {} bytes for {} tokens, found {}",
                                   file.file().path().string(), name, expected, rows.tokens.count(),
                                   file.bytes(name).size()));
    }
  });
}

/// Those of a process that has a share of the keys are checked as far as that goes.
void map_kv(Context::Impl& c, const std::vector<RowFile>& files, const ContextMeta& meta) {
  for (const RowFile& rows : files) {
    const Share own = c.share.divided() ? c.share.own : Share{0, meta.tokens};
    if (rows.tokens.begin < own.end && own.begin < rows.tokens.end) check_rows(c, rows, meta);
    for (int layer = 0; layer < meta.layers; ++layer) {
      for (int head = 0; head < meta.kv_heads; ++head) {
        for (const PartName& part : parts_of(meta.kv_type)) {
          if (!c.kv.shape().holds(layer, head, is_key(part.part))) continue;
          const SectionInfo& info = rows.file->info(kv_section(layer, head, part.name));
          c.kv.map(layer, head, part.part, rows.file->file(), info.offset, info.bytes, rows.tokens.begin);
        }
      }
    }
  }
  c.kv.commit(meta.tokens);
}

std::vector<TokenId> read_tokens(const ContainerReader& file, const ContextMeta& meta, std::int64_t vocab) {
  const auto stored = SectionReader(file, "").values<TokenId>("tokens");
  const std::string where = file.file().path().string();
  if (static_cast<std::int64_t>(stored.size()) != meta.tokens) {
    throw InputError(
        fmt::format("{}: section 'tokens': expected {} ids, found {}", where, meta.tokens, stored.size()));
  }
  for (const TokenId id : stored) {
    if (id < 0 || id >= vocab) {
      throw InputError(
          fmt::format("{}: section 'tokens': expected ids from 0 to {}, found {}", where, vocab - 1, id));
    }
  }
  return {stored.begin(), stored.end()};
}

void load_indexes(const Context::Impl& c, AttachedMethod& method, const ContainerReader& file) {
  for (std::size_t layer = 0; layer < method.selectors.size(); ++layer) {
    SectionReader sections(file, selector_prefix(method.spec, layer));
    Selector* const selector = method.selectors[layer];
    if (selector == nullptr) continue;
    selector->load(0, sections, Context::Impl::IndexedRows(c, method, static_cast<int>(layer)).view());
    auto* const sharer = dynamic_cast<SharesIndex*>(selector);
    for (const AttachedMethod& before : c.methods) {
      if (&before == &method) break;
      if (sharer != nullptr && before.spec.name == method.spec.name && before.selectors[layer] != nullptr)
        sharer->share_index(0, *before.selectors[layer]);
    }
  }
  method.built = method.built_on_host = true;
  method.built_over = c.tokens();  // specs that search otherwise alone take it
}

/// The file that holds a method's index as this process needs it; null: it is to be built.
const ContainerReader* index_file(const Context::Impl& c, const AttachedMethod& method,
                                  const std::vector<RowFile>& files, const ContextMeta& meta) {
  if (meta.shards.empty()) return files.front().file.get();
  if (!method.divided || std::ssize(files) != c.share.ranks->size()) return nullptr;
  for (std::size_t r = 0; r < files.size(); ++r)
    if (!(files[r].tokens == token_share(meta.tokens, static_cast<int>(r), c.share.ranks->size())))
      return nullptr;
  return files[static_cast<std::size_t>(c.share.ranks->rank())].file.get();
}

/// Where a number is infinite or none, all that attends to it is: a file of it answers nothing.
void expect_finite_rows(const Context::Impl& c, const Share& tokens) {
  if (c.options.kv_type == DType::q8) return;  // refused when they were quantised
  const int most = c.kv.shape().kv_heads;
  c.model->pool().for_each(2 * std::int64_t{c.config.layers} * most, [&](std::int64_t item, int) {
    check_cancel();
    const int layer = static_cast<int>(item / 2 / most);
    const int head = static_cast<int>(item / 2 % most);
    const auto part = item % 2 == 0 ? KvStore::Part::k : KvStore::Part::v;
    if (!c.kv.shape().holds(layer, head, is_key(part))) return;
    const auto rows = c.kv.rows(layer, head, part);
    const std::size_t row = rows.size() / std::max<std::size_t>(1, c.ids.size());
    for (std::size_t at = static_cast<std::size_t>(tokens.begin) * row;
         at < static_cast<std::size_t>(tokens.end) * row; at += row)
      if (!all_finite(rows.subspan(at, row), c.options.kv_type, c.kv.shape().dim(layer)))
        throw InputError(
            fmt::format("layer {} KV head {}: expected finite {}, found others at token {}: {}", layer, head,
                        item % 2 == 0 ? "keys" : "values", at / row,
                        c.options.kv_type == DType::f16 || c.options.kv_type == DType::q4
                            ? "beyond the range of f16 (keys and values in bf16 hold them), or the "
                              "model's weights are damaged"
                            : "the model's weights are damaged"));
  });
}

}  // namespace

std::int64_t ContextMeta::token_bytes() const {
  const KvShape shape = {.layers = layers,
                         .kv_heads = kv_heads,
                         .head_dim = head_dim,
                         .type = kv_type,
                         .max_tokens = tokens,
                         .recurrent = recurrent,
                         .shared_rows = shared_rows,
                         .by_layer = by_layer};
  return shape.token_bytes();
}

ContextMeta read_context_meta(const ContainerReader& file, const std::filesystem::path& path) {
  const std::string where = path.string() + ": section 'meta'";
  if (file.has("shard") && !file.has("meta")) refuse_shard(path);
  const auto raw = file.bytes("meta");
  const Json json = parse_json({reinterpret_cast<const char*>(raw.data()), raw.size()}, where);
  json_int(json, "version", where, kMetaVersion, kLayersDiffer);
  ContextMeta meta;
  meta.model_path = json_string(json, "model", where);
  meta.model_fingerprint = json_string(json, "model_fingerprint", where);
  meta.tokenizer_fingerprint = json_string(json, "tokenizer_fingerprint", where);
  meta.layers = static_cast<int>(json_int(json, "layers", where, 1, 1024));
  meta.kv_heads = static_cast<int>(json_int(json, "kv_heads", where, 1, 1024));
  meta.head_dim = static_cast<int>(json_int(json, "head_dim", where, 2, 1024));
  meta.kv_type = parse_dtype(json_string(json, "kv_type", where));
  meta.tokens = json_int(json, "tokens", where, 1, kMaxTokens);
  meta.shared_rows = json_has(json, "shared_rows") && json_bool(json, "shared_rows", where);
  meta.by_layer = read_layer_rows(json, meta, where);
  read_states(json, meta, where);
  if (meta.tokens > kMaxKvBytes / std::max<std::int64_t>(1, meta.token_bytes())) {
    throw InputError(fmt::format("{}: expected KV of at most {}, found {} tokens of {} bytes", where,
                                 human_bytes(kMaxKvBytes), meta.tokens, meta.token_bytes()));
  }
  meta.rope_tokens =
      json_int(json, "rope_tokens", where, 1, kMaxTokens);  // fewer: loaded with more room, grown
  meta.rope_factor = json_number(json, "rope_factor", where, 0.0, kMostRopeFactor);
  if (meta.rope_factor > 0 && meta.rope_factor < 1)
    throw InputError(
        fmt::format("{}: 'rope_factor': expected 0 or 1 and more, found {:g}", where, meta.rope_factor));
  meta.max_positions =
      json_has(json, "max_positions") ? json_int(json, "max_positions", where, 1, kMaxTokens) : 0;
  meta.seed = read_seed(json, where);
  if (!json_has(json, "methods")) throw InputError(where + ": expected a list 'methods', found none");
  meta.methods = read_names(json, "methods", where);
  for (const std::string& folder : read_names(json, "folders", where)) meta.folders.emplace_back(folder);
  meta.folders.push_back(std::filesystem::absolute(path).parent_path());
  meta.attachments = read_names(json, "attachments", where);
  meta.required = read_names(json, "required", where);
  meta.shards = read_shards(json, meta.tokens, where);
  return meta;
}

Attachments read_attachments(const ContainerReader& file, const std::filesystem::path& path) {
  const ContextMeta meta = read_context_meta(file, path);
  Attachments attachments;
  for (const std::string& name : meta.attachments) {
    const auto bytes = file.bytes(attachment_section(name));
    const bool required = std::find(meta.required.begin(), meta.required.end(), name) != meta.required.end();
    attachments[name] = {.text = {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                         .required = required};
  }
  return attachments;
}

void Context::save(const std::filesystem::path& path, std::string_view text) const {
  save_context(*this, path, text, {});
}

namespace {

void add_rows(const Context::Impl& c, const Share& tokens, ContainerWriter& out) {
  for (int layer = 0; layer < c.config.layers; ++layer) {
    check_cancel();
    for (int head = 0; head < c.kv.shape().kv_heads; ++head) {
      for (const PartName& part : parts_of(c.options.kv_type)) {
        if (!c.kv.shape().holds(layer, head, is_key(part.part))) continue;
        const auto rows = c.kv.rows(layer, head, part.part);
        const std::size_t row = rows.size() / c.ids.size();
        out.add(kv_section(layer, head, part.name),
                rows.subspan(static_cast<std::size_t>(tokens.begin) * row,
                             static_cast<std::size_t>(tokens.count()) * row));
      }
    }
  }
}

void add_indexes(const Context::Impl& c, ContainerWriter& out) {
  for (const AttachedMethod& method : c.methods) {
    for (std::size_t layer = 0; layer < method.selectors.size(); ++layer) {
      check_cancel();
      SectionWriter sections(out, selector_prefix(method.spec, layer));
      if (method.selectors[layer] != nullptr) method.selectors[layer]->save(0, sections);
    }
  }
}

}  // namespace

bool is_shard_id(std::string_view text) {
  return text.size() == kShardId && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

ContainerReader open_shard(const std::filesystem::path& path, const ShardSet& set, std::size_t index) {
  const Shard& shard = set.shards[index];
  const auto file = path.parent_path() / shard.file;
  std::error_code failed;
  if (std::filesystem::status(file, failed).type() == std::filesystem::file_type::not_found)
    throw InputError(fmt::format(
        "{}: its shard {} of {}, '{}' with tokens {} to {}, is missing: put it back beside the file, or "
        "index the text again",
        path.string(), index + 1, set.shards.size(), excerpt(shard.file, 400), shard.tokens.begin,
        shard.tokens.end));
  return ContainerReader(file);
}

std::string new_shard_id(const std::filesystem::path& path) {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return hash_hex(fmt::format("{} {} {}", path.string(), now, getpid())).substr(0, kShardId);
}

ShardSet shards_for(const std::filesystem::path& path, const std::string& id, std::int64_t tokens,
                    int ranks) {
  ShardSet set = {.id = id, .shards = {}};
  for (int r = 0; r < ranks; ++r)
    set.shards.push_back({.file = fmt::format("{}.{}-{}of{}", path.filename().string(), set.id, r + 1, ranks),
                          .tokens = token_share(tokens, r, ranks)});
  return set;
}

void save_shard(const Context& context, const std::filesystem::path& path, const ShardSet& shards,
                std::size_t index) {
  const Context::Impl& c = context.impl();
  const Shard& shard = shards.shards[index];
  LODE_ASSERT(c.indexed == c.tokens() && c.share.own == shard.tokens);
  expect_finite_rows(c, shard.tokens);
  ContainerWriter out(path.parent_path() / shard.file);
  const std::string about = Json{
      {"version", kShardVersion},
      {"id", shards.id},
      {"begin", shard.tokens.begin},
      {"end", shard.tokens.end}}.dump();
  out.add("shard", std::as_bytes(std::span(about)));
  add_rows(c, shard.tokens, out);
  add_indexes(c, out);
  out.finish();
}

std::size_t remove_shards(const std::filesystem::path& path, const std::string& id, RemovedShards which) {
  std::error_code failed;
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::vector<std::filesystem::path> found;
  for (auto at = std::filesystem::directory_iterator(folder, failed);
       !failed && at != std::filesystem::directory_iterator(); at.increment(failed)) {
    const std::string name = at->path().filename().string();
    const bool unfinished = name.starts_with('.') && name.ends_with(".tmp");
    const auto shard =
        parse_shard_name(unfinished ? std::string_view(name).substr(1, name.size() - 5) : name);
    if (!shard || shard->text != path.filename().string()) continue;
    if ((shard->id == id) == (which == RemovedShards::these)) found.push_back(at->path());
  }
  return static_cast<std::size_t>(
      std::ranges::count_if(found, [&](const auto& one) { return std::filesystem::remove(one, failed); }));
}

void save_context(const Context& context, const std::filesystem::path& path, std::string_view text,
                  const Attachments& attachments, const ShardSet& shards) {
  Context::Impl& c = context.impl();
  LODE_ASSERT(c.indexed == c.tokens());
  if (shards.empty()) {
    c.host_kv();
    restore_rows(c);
    expect_finite_rows(c, {0, c.tokens()});
    for (AttachedMethod& method : c.methods) {
      if (!method.dense() && !method.built_on_host) c.build_on_host(method, {});
    }
  }
  ContainerWriter out(path);
  const std::string meta = meta_of(c, attachments, shards).dump();
  out.add("meta", std::as_bytes(std::span(meta)));
  out.add("tokens", std::as_bytes(std::span(c.ids)));
  add_source(out, text, c.source->text == text ? c.source.get() : nullptr, c.first_token);
  for (const auto& [name, attachment] : attachments)
    out.add(attachment_section(name), std::as_bytes(std::span(attachment.text)));
  if (shards.empty()) {
    add_rows(c, {0, c.tokens()}, out);
    for (const std::int64_t tokens : c.kv.recurrent().kept())
      out.add(state_section(tokens), std::as_bytes(c.kv.recurrent().at(tokens)));
    add_indexes(c, out);
  }
  out.finish();
}

Context Context::load(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                      const ContextOptions& asked) {
  return load_context(path, std::move(model), asked, LoadIndexes::all);
}

Context load_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                     const ContextOptions& asked, LoadIndexes indexes, Communicator* ranks) {
  const auto opened = std::make_shared<const ContainerReader>(path);
  const ContainerReader& file = *opened;
  const ContextMeta meta = read_context_meta(file, path);
  check_fits(path, meta, *model);
  if (asked.rope_factor && *asked.rope_factor != std::max(meta.rope_factor, 1.0)) {
    throw InputError(
        fmt::format("{}: expected --rope-factor {:g}, with which its keys were stored, or none, found {:g}",
                    path.string(), std::max(meta.rope_factor, 1.0), *asked.rope_factor));
  }
  ContextOptions options = asked;
  options.rope_factor.reset();
  options.kv_type = meta.kv_type;
  options.seed = meta.seed;
  options.max_tokens = std::max({meta.rope_tokens, meta.tokens, asked.max_tokens});
  if (meta.rope_factor > 0) options.rope_factor = meta.rope_factor;
  Context context(std::move(model), options);
  Context::Impl& c = context.impl();
  // Stored keys were rotated for this length; with dynamic scaling another one would have other frequencies.
  c.rope = Rope(c.config, meta.rope_tokens);
  c.rope_tokens = meta.rope_tokens;
  const std::vector<RowFile> files = row_files(opened, path, meta);
  if (ranks != nullptr && !meta.shards.empty()) {
    c.share = {ranks, meta.tokens, token_share(meta.tokens, ranks->rank(), ranks->size())};
    c.read_all_rows = [&c, files, meta] {
      for (const RowFile& rows : files) check_rows(c, rows, meta);
    };
  }
  // Before there are tokens: methods that listen to a prefill come from the file with what they heard.
  if (indexes == LoadIndexes::all)
    for (const std::string& text : meta.methods) attach_stored(context, text, meta, path);
  c.ids = read_tokens(file, meta, c.config.vocab);
  StoredSource stored = read_source(file, path);
  c.source = std::make_shared<const SourceText>(std::move(stored.source));
  c.first_token = stored.first_token;
  restore_states(c, file, meta);
  map_kv(c, files, meta);
  c.indexed = meta.tokens;
  for (AttachedMethod& method : c.methods)
    if (const ContainerReader* const from = index_file(c, method, files, meta))
      load_indexes(c, method, *from);
  // Less room than it was indexed with: its frequencies and what lies on a GPU stay of that size.
  if (asked.max_tokens > 0) c.options.max_tokens = std::max(asked.max_tokens, meta.tokens);
  return context;
}

}  // namespace lode
