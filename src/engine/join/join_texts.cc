// SPDX-License-Identifier: Apache-2.0
#include "engine/join/join_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/threads.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "kernels/kv_row.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "text/chat_template.h"

namespace lode {

namespace {

constexpr std::int64_t kRowsAtOnce = 512, kRoomForQuestions = 4096;

/// One of the files, as it was read.
struct Part {
  std::filesystem::path path;
  Context context;
  Attachments attachments;
};

Part open_part(const std::filesystem::path& path, const std::shared_ptr<const Model>& model,
               const ContextOptions& options) {
  const ContainerReader file(path);
  return {.path = path,
          .context = load_context(path, model, options, LoadIndexes::none),
          .attachments = read_attachments(file, path)};
}

/// Tokens in front of a text; a file that does not say has at most the tokenizer's own.
std::int64_t head_of(const Context::Impl& c) {
  if (c.first_token > 0) return c.first_token;
  const auto prefix = c.model->tokenizer().prefix();
  const bool there = c.ids.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), c.ids.begin());
  return there ? std::ssize(prefix) : 0;
}

void expect_model_joins(const Model& model) {
  if (!model.config().plan.recurrent_floats().empty())
    throw InputError(
        "--union: expected a model whose layers all keep keys, found recurrent layers, whose states of two "
        "texts cannot be joined: ask each text by itself, or index them together (index -f A -f B)");
  expect_like_layers(model.config(), "--union");
}

/// Before any is opened: -m can name the model of one of them, which is the wrong one for the other.
void expect_one_model(std::span<const std::filesystem::path> paths) {
  const auto meta_of = [](const std::filesystem::path& path) {
    return read_context_meta(ContainerReader(path), path);
  };
  const ContextMeta first = meta_of(paths.front());
  for (const std::filesystem::path& path : paths.subspan(1)) {
    const ContextMeta other = meta_of(path);
    if (other.model_fingerprint != first.model_fingerprint)
      throw InputError(
          fmt::format("--union: {}: expected a text that was read by the model of {} ('{}'), found one of "
                      "another model ('{}'): index it with that model, or leave --union out, which asks each "
                      "text by its own",
                      path.string(), paths.front().string(), first.model_path, other.model_path));
  }
}

void expect_alike(const Part& first, const Part& other) {
  const Context::Impl &a = first.context.impl(), &b = other.context.impl();
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw InputError(
        fmt::format("--union: {}: expected {}, as {} has, found {}: index it again like the other",
                    other.path.string(), expected, first.path.string(), found));
  };
  if (a.options.kv_type != b.options.kv_type)
    refuse(fmt::format("keys and values in {}", name_of(a.options.kv_type)),
           std::string(name_of(b.options.kv_type)));
  if (!std::ranges::equal(a.rope.frequencies(), b.rope.frequencies()) ||
      a.rope.attention_scaling() != b.rope.attention_scaling())
    refuse("keys that are rotated by the same frequencies", "others (--rope-factor, or another length)");
  const auto chat = [](const Part& part) {
    const auto found = part.attachments.find(DocumentChat::kAttachment);
    if (found == part.attachments.end()) return std::string();
    const auto settings = DocumentChat::from_json(found->second.text, part.path.string());
    return fmt::format("{}\n{}\n{}\n{}", settings.document_in_system, settings.think, settings.system,
                       settings.source);
  };
  if (chat(first) != chat(other))
    refuse("the same chat template, system message and role", "another one, or none");
}

/// As many tokens as the texts have, with room for questions, within what the model can.
std::int64_t room_of(std::span<const std::filesystem::path> paths, const Model& model) {
  std::int64_t tokens = 0;
  double factor = 1;  // the first text's, which the others are compared with
  for (const std::filesystem::path& path : paths) {
    const ContextMeta meta = read_context_meta(ContainerReader(path), path);
    tokens += meta.tokens;
    if (path == paths.front()) factor = std::max(factor, meta.rope_factor);
  }
  const auto most = static_cast<std::int64_t>(static_cast<double>(model.config().max_positions) * factor);
  return std::min(most, tokens + kRoomForQuestions);
}

/// Frequencies that depend on the length have to be those of all texts together.
void expect_same_frequencies(const Context::Impl& first, std::int64_t tokens) {
  if (tokens <= first.rope_tokens ||
      std::ranges::equal(Rope(first.config, tokens).frequencies(), first.rope.frequencies()))
    return;
  throw InputError(fmt::format(
      "--union: expected a model whose RoPE does not depend on the length, found '{}' scaling, by which {} "
      "tokens are rotated otherwise: ask each text by itself, or index them together (index -f A -f B)",
      name_of(first.config.rope_scaling.kind), tokens));
}

/// Keys and values of rows [begin, begin + count) of a layer as numbers, each [T, Hkv, d].
struct RowNumbers {
  std::vector<float> k, v;
};
RowNumbers numbers_of(const Context::Impl& c, int layer, std::int64_t begin, std::int64_t count) {
  const KvLayer rows = c.kv.layer(layer);
  const std::size_t heads = rows.heads.size(), d = static_cast<std::size_t>(c.config.head_dim);
  RowNumbers numbers;
  numbers.k.resize(static_cast<std::size_t>(count) * heads * d);
  numbers.v.resize(numbers.k.size());
  c.model->pool().for_each(count, [&](std::int64_t t, int) {
    for (std::size_t head = 0; head < heads; ++head) {
      const std::size_t at = (static_cast<std::size_t>(t) * heads + head) * d;
      read_key_row(rows.heads[head], begin + t, numbers.k.data() + at);
      read_value_row(rows.heads[head], begin + t, numbers.v.data() + at);
    }
  });
  return numbers;
}

/// Rows [begin, end) of a context, moved behind those of another.
void move_rows_behind(Context::Impl& to, const Context::Impl& from, std::int64_t begin, std::int64_t end) {
  const auto width =
      static_cast<std::size_t>(to.config.kv_heads) * static_cast<std::size_t>(to.config.head_dim);
  for (std::int64_t at = begin; at < end; at += kRowsAtOnce) {
    check_cancel();
    const std::int64_t count = std::min(kRowsAtOnce, end - at), place = to.tokens();
    for (int layer = 0; layer < to.config.layers; ++layer) {
      RowNumbers rows = numbers_of(from, layer, at, count);
      const Rope &stood = from.llama.rope_of(layer, from.rope), &stands = to.llama.rope_of(layer, to.rope);
      to.model->pool().for_each(count, [&](std::int64_t t, int) {
        const std::span<float> key(rows.k.data() + static_cast<std::size_t>(t) * width, width);
        stood.unrotate(key, static_cast<Position>(at + t));
        stands.rotate(key, static_cast<Position>(place + t));
      });
      to.kv.write(layer, count, rows.k, rows.v, &to.model->pool());
    }
    to.kv.commit(count);
    to.ids.insert(to.ids.end(), from.ids.begin() + at, from.ids.begin() + at + count);
  }
}

double relative_difference(std::span<const float> found, std::span<const float> wanted) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : 0;
}

/// Puts a text behind the others; returns its drift. Its last tokens are read behind all that stands in front of
/// them first, then their rows are moved like the others.
double join(Context::Impl& all, const Context::Impl& part) {
  const std::int64_t head = head_of(part), count = std::min(kDriftTokens, part.tokens() - head),
                     seam = part.tokens() - count;
  move_rows_behind(all, part, head, seam);
  if (count == 0) return 0;
  const std::int64_t begin = all.tokens();
  all.run(std::span(part.ids).subspan(static_cast<std::size_t>(seam)), kDense, Phase::question,
          LogitRows::none);
  std::vector<RowNumbers> read;
  for (int layer = 0; layer < all.config.layers; ++layer)
    read.push_back(numbers_of(all, layer, begin, count));
  all.roll_back(begin);
  move_rows_behind(all, part, seam, part.tokens());
  double sum = 0;
  for (int layer = 0; layer < all.config.layers; ++layer) {
    const RowNumbers stored = numbers_of(all, layer, begin, count);
    const RowNumbers& wanted = read[static_cast<std::size_t>(layer)];
    sum += (relative_difference(stored.k, wanted.k) + relative_difference(stored.v, wanted.v)) / 2;
  }
  return sum / all.config.layers;
}

/// A text with its files; one that does not say what it was made from is called after its .lode file.
SourceText source_with_files(const Part& part) {
  SourceText source = source_of(part.context);
  if (source.files.empty()) {
    source.files = {{.path = part.path.string(), .kind = "text", .checksum = {}, .end = source.text.size()}};
    source.marks = {{.begin = 0, .page = 0, .line = 1}};
  }
  return source;
}

/// Files that are called alike in two texts are told apart by the name of the .lode file.
SourceText joined_source(const std::vector<Part>& parts) {
  std::vector<SourceText> sources;
  std::map<std::string, std::set<std::size_t>> known;  // the texts that have a file of this name
  for (std::size_t i = 0; i < parts.size(); ++i) {
    sources.push_back(source_with_files(parts[i]));
    for (const SourceFile& file : sources.back().files) known[file.path].insert(i);
  }
  SourceText all;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t begin = all.text.size();
    all.text += sources[i].text;
    for (SourceFile file : sources[i].files) {
      if (known[file.path].size() > 1) file.path = fmt::format("{}: {}", parts[i].path.string(), file.path);
      file.begin += begin;
      file.end += begin;
      all.files.push_back(std::move(file));
    }
    for (PlaceMark mark : sources[i].marks) {
      mark.begin += begin;
      if (!all.marks.empty() && all.marks.back().begin == mark.begin) all.marks.pop_back();
      all.marks.push_back(mark);
    }
  }
  return all;
}

}  // namespace

JoinedTexts join_texts(std::span<const std::filesystem::path> paths, std::shared_ptr<const Model> model,
                       const ContextOptions& asked) {
  LODE_ASSERT(paths.size() > 1 && asked.device == Device::cpu);
  expect_model_joins(*model);
  expect_one_model(paths);
  ContextOptions options = asked;
  if (options.max_tokens == 0) options.max_tokens = room_of(paths, *model);
  std::vector<Part> parts;
  for (const std::filesystem::path& path : paths) {
    parts.push_back(open_part(path, model, options));
    expect_alike(parts.front(), parts.back());
  }
  Context::Impl& all = parts.front().context.impl();
  if (all.options.kv_type == DType::q4)
    throw InputError(
        "--union: expected keys and values in f32, f16, bf16 or q8, found q4, which would be rounded twice: "
        "index the texts with another --kv-type, or together (index -f A -f B)");
  std::int64_t tokens = all.tokens();
  for (std::size_t i = 1; i < parts.size(); ++i)
    tokens += parts[i].context.tokens() - head_of(parts[i].context.impl());
  if (tokens >= all.options.max_tokens)
    throw InputError(
        fmt::format("--union: expected texts of fewer than {} tokens together, the room that there "
                    "is, found {}: without --union each is asked by itself",
                    all.options.max_tokens, tokens));
  expect_same_frequencies(all, tokens);
  SourceText source = joined_source(parts);
  std::vector<double> drift;
  for (std::size_t i = 1; i < parts.size(); ++i) drift.push_back(join(all, parts[i].context.impl()));
  set_source(parts.front().context, std::move(source), head_of(all));
  parts.front().context.build_indexes();
  parts.front().attachments.erase(kAutoAttachment);
  return {.context = std::move(parts.front().context),
          .attachments = std::move(parts.front().attachments),
          .drift = std::move(drift)};
}

}  // namespace lode
