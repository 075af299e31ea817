// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_export.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/threads.h"
#include "io/gguf_writer.h"
#include "kernels/blocks/quantise.h"
#include "kernels/dequantise.h"
#include "lodestone/error.h"
#include "model/gguf_export/parts.h"
#include "model/gguf_export/random.h"
#include "model/source.h"
#include "model/weights.h"
#include "text/gguf_tokenizer.h"

namespace lode {

namespace {

constexpr std::size_t kMaxTokenizer = std::size_t{256} << 20;
constexpr std::string_view kEmbedding = "token_embd.weight", kOutput = "output.weight";

/// llama.cpp's number for a file that is mostly of one type.
std::uint32_t file_type(WeightType type) {
  switch (type) {
    case WeightType::f32:
      return 0;
    case WeightType::f16:
      return 1;
    case WeightType::q4_0:
      return 2;
    case WeightType::q4_1:
      return 3;
    case WeightType::q8_0:
      return 7;
    case WeightType::q4_k:
      return 14;
    case WeightType::q5_k:
      return 16;
    case WeightType::q6_k:
      return 18;
    case WeightType::bf16:
      return 32;
    default:
      return 1024;  // "guessed"
  }
}

/// Vectors stay float32, and so do routers and convolutions, which are small and decide much.
WeightType type_for(std::string_view name, const std::vector<std::int64_t>& shape, WeightType wanted,
                    bool tied) {
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (shape.size() < 2 || has("ffn_gate_inp") || has("ssm_conv1d") || name.ends_with(".bias"))
    return WeightType::f32;
  const bool output = name == kOutput || (tied && name == kEmbedding);
  if (output && wanted == WeightType::q4_k) wanted = WeightType::q6_k;
  if (shape.back() % layout_of(wanted).block == 0) return wanted;
  return shape.back() % layout_of(WeightType::q8_0).block == 0 ? WeightType::q8_0 : WeightType::f16;
}

void count_matrix(const std::vector<std::int64_t>& shape, WeightType type, MatrixTypes& matrices) {
  if (shape.size() >= 2) ++matrices[std::string(name_of(type))];
}

std::int64_t rows_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end() - 1, std::int64_t{1}, std::multiplies<>());
}

/// A tensor on its way into a file.
struct Source {
  std::string name;
  std::vector<std::int64_t> shape;
  TensorRows rows;
};

void convert(const Source& s, WeightType type, std::span<std::byte> to, ThreadPool& pool) {
  const std::int64_t cols = s.shape.back(), row_bytes = bytes_of(type, cols);
  pool.for_each(rows_of(s.shape), [&](std::int64_t row, int) {
    const auto [from_type, data] = s.rows.row(row);
    std::byte* const at = to.data() + row * row_bytes;
    if (s.rows.copied) return void(std::memcpy(at, data, static_cast<std::size_t>(row_bytes)));
    std::vector<float> numbers(static_cast<std::size_t>(cols));
    dequantise(from_type, data, cols, numbers.data());
    if (s.rows.change) s.rows.change(numbers);
    if (!quantise(type, numbers.data(), cols, at))
      throw InputError(
          fmt::format("tensor '{}', row {}: expected finite numbers that {} can hold, found others", s.name,
                      row, name_of(type)));
  });
}

MatrixTypes write_all(GgufWriter& writer, const std::vector<Source>& sources, const GgufExport& options,
                      const std::filesystem::path& to, ThreadPool& pool) {
  writer.add_u32("general.file_type", file_type(options.type));
  const bool tied = std::ranges::find(sources, kOutput, &Source::name) == sources.end();
  std::vector<WeightType> types;
  MatrixTypes matrices;
  for (const Source& s : sources) {
    types.push_back(s.rows.copied ? s.rows.row(0).type : type_for(s.name, s.shape, options.type, tied));
    writer.add_tensor(s.name, types.back(), s.shape);
    count_matrix(s.shape, types.back(), matrices);
  }
  writer.write(to, [&](std::int64_t i, std::span<std::byte> bytes) {
    convert(sources[static_cast<std::size_t>(i)], types[static_cast<std::size_t>(i)], bytes, pool);
    if (options.tensors_done) options.tensors_done(i + 1, std::ssize(sources));
  });
  return matrices;
}

TensorRows rows_in_place(WeightType type, const std::byte* data, std::int64_t cols) {
  return {.row = [=](std::int64_t row) { return TensorRows::Row{type, data + row * bytes_of(type, cols)}; }};
}

// ---- From a GGUF file: everything is there already. -------------------------------------------------------------

void copy_value(const std::string& key, const GgufValue& value, GgufWriter& to) {
  if (value.type == GgufType::string) {
    const auto* text = reinterpret_cast<const char*>(value.bytes.data());
    return to.add(key, std::string_view(text, value.bytes.size()));
  }
  if (value.type != GgufType::array)
    return to.add_raw(key, static_cast<std::uint32_t>(value.type), value.bytes);
  if (value.element == GgufType::string)
    return to.add_texts(key, std::vector<std::string>(value.strings.begin(), value.strings.end()));
  if (value.element == GgufType::array)
    throw InputError(
        fmt::format("metadata '{}': expected numbers or texts, found arrays in an array", excerpt(key)));
  std::vector<std::byte> bytes(12);
  const auto element = static_cast<std::uint32_t>(value.element);
  std::memcpy(bytes.data(), &element, 4);
  std::memcpy(bytes.data() + 4, &value.count, 8);
  bytes.insert(bytes.end(), value.bytes.begin(), value.bytes.end());
  to.add_raw(key, static_cast<std::uint32_t>(GgufType::array), bytes);
}

MatrixTypes requantise(const std::filesystem::path& from, const std::filesystem::path& to,
                       const GgufExport& options, ThreadPool& pool) {
  const GgufModel model = GgufModel::open(from);
  GgufWriter writer;
  for (const auto& [key, value] : model.metadata().values()) {
    // Tensors lie at the writer's own alignment.
    if (key == "general.file_type" || key == "general.alignment" || key.starts_with("split.")) continue;
    copy_value(key, value, writer);
  }
  std::vector<Source> sources;
  for (const auto& [name, tensor] : model.tensors)
    sources.push_back(
        {name, tensor.shape, rows_in_place(tensor.type, tensor.bytes.data(), tensor.shape.back())});
  return write_all(writer, sources, options, to, pool);
}

// ---- From a folder. ---------------------------------------------------------------------------------------------

/// The format has three keys for tokens that end a text. A list of all, for more of them, is Ollama's; llama.cpp then
/// knows those beyond the three that have a usual text.
void add_ends(const std::vector<TokenId>& ends, const GgufExport& options, GgufWriter& to) {
  const char* const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                              "tokenizer.ggml.eom_token_id"};
  for (std::size_t i = 0; i < std::min(ends.size(), std::size(keys)); ++i)
    to.add_u32(keys[i], static_cast<std::uint32_t>(ends[i]));
  if (ends.size() <= std::size(keys)) return;
  to.add_i32s(kEndTokens, ends);
  std::vector<std::string> others;
  for (std::size_t i = std::size(keys); i < ends.size(); ++i) others.push_back(std::to_string(ends[i]));
  if (options.remark)
    options.remark(
        fmt::format("{} tokens end an answer, and GGUF has keys for {} of them: the others ({}) are in '{}', "
                    "which llama.cpp "
                    "does not read",
                    ends.size(), std::size(keys), join(others), kEndTokens));
}

/// Tokenizer, its tokens that begin and end texts, and the chat template.
void add_texts(const std::filesystem::path& folder, const ModelConfig& c, const GgufExport& options,
               GgufWriter& to) {
  const auto file = folder / "tokenizer.json";
  const ModelSource source = ModelSource::open(folder);
  source.tokenizer();  // names what is damaged in it
  const Json tokenizer = parse_json(read_file(file, kMaxTokenizer), file.string());
  add_tokenizer(tokenizer, file.string(), c.vocab, to, source.config().bos);
  add_ends(source.config().eos, options, to);
  if (const std::string chat = source.chat_template(); !chat.empty()) to.add("tokenizer.chat_template", chat);
}

}  // namespace

MatrixTypes export_gguf(const std::filesystem::path& model, const std::filesystem::path& to,
                        const GgufExport& options, ThreadPool& pool) {
  if (!can_quantise(options.type))
    throw InputError(fmt::format("expected a type of F32, F16, BF16, Q8_0, Q4_K or Q6_K, found {}",
                                 name_of(options.type)));
  if (GgufModel::is_file(model)) return requantise(model, to, options, pool);
  ModelSource source = ModelSource::open(model);
  const ModelConfig& c = source.config();
  GgufWriter writer;
  add_gguf_config(c, model.filename().string(), writer);
  const std::vector<GgufTarget> targets = gguf_targets(c);
  const std::vector<RopeVector> vectors = rope_vectors(c);
  expect_said(c, writer, targets, vectors, model.string());
  add_texts(model, c, options, writer);
  const ModelWeights weights = ModelWeights::read(source.take_weights(), c, false, &pool);
  std::vector<Source> sources;
  for (const GgufTarget& target : targets)
    sources.push_back({target.name, target.shape, rows_of_target(target, weights, c)});
  for (const RopeVector& v : vectors)
    sources.push_back(
        {v.name,
         {std::ssize(v.numbers)},
         rows_in_place(WeightType::f32, std::as_bytes(std::span(v.numbers)).data(), std::ssize(v.numbers))});
  return write_all(writer, sources, options, to, pool);
}

MatrixTypes export_random_gguf(std::string_view shape, const std::filesystem::path& tokenizer,
                               const std::filesystem::path& to, const GgufExport& options, ThreadPool& pool) {
  const ModelConfig c = named_shape(shape);
  GgufWriter writer;
  add_gguf_config(c, "random " + std::string(shape), writer);
  writer.add_u32("general.file_type", file_type(options.type));
  add_texts(tokenizer, c, options, writer);
  const std::vector<GgufTarget> all = gguf_targets(c);
  std::vector<WeightType> types;
  MatrixTypes matrices;
  for (const GgufTarget& s : all) {
    types.push_back(type_for(s.name, s.shape, options.type, c.tied_embeddings));
    writer.add_tensor(s.name, types.back(), s.shape);
    count_matrix(s.shape, types.back(), matrices);
  }
  writer.write(to, [&](std::int64_t i, std::span<std::byte> bytes) {
    const GgufTarget& s = all[static_cast<std::size_t>(i)];
    if (s.shape.size() == 1) {
      const std::vector<float> ones(static_cast<std::size_t>(s.shape[0]), 1.0f);
      std::memcpy(bytes.data(), ones.data(), bytes.size());
    } else {
      fill_random(types[static_cast<std::size_t>(i)], rows_of(s.shape), s.shape.back(), hash_seed(1, i),
                  bytes, pool);
    }
    if (options.tensors_done) options.tensors_done(i + 1, std::ssize(all));
  });
  return matrices;
}

}  // namespace lode
