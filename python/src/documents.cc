// SPDX-License-Identifier: Apache-2.0
// Documents: read, opened, made from keys that another engine has computed, saved, and their keys and values as
// arrays.
#include <nanobind/stl/pair.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>

#include "arrays.h"
#include "base/text.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "io/container.h"
#include "kv/store.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "model.h"
#include "model/config.h"
#include "text/blanks.h"
#include "text/chat_template.h"

namespace lode::python {

namespace {

using Rows = nb::ndarray<nb::numpy, nb::ro>;
/// (tokens done, tokens, layers indexed, layers)
using Progress = nb::typed<nb::callable, void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

/// Tells where passages stand (Answer.sources).
void keep_source(const Document& document, const std::string& text, std::int64_t first_token) {
  SourceText source;
  source.text = text;
  source.files = {{.path = "", .kind = "text", .checksum = {}, .begin = 0, .end = text.size()}};
  source.marks = {{.begin = 0, .page = 0, .line = 1}};
  Context::Impl& parts = document.impl().parts();
  parts.source = std::make_shared<const SourceText>(std::move(source));
  parts.first_token = first_token;
}

void check_room(const std::string& who, std::int64_t max_tokens) {
  if (max_tokens < 0)
    throw InputError(who + ": expected max_tokens of 0 or more, found " + std::to_string(max_tokens));
}

/// How a text is put to the model, as `lodestone index` puts it.
ChatOptions chat_options(const std::optional<bool>& chat, const std::optional<std::string>& system,
                         const std::string& document_role, const std::optional<std::string>& think) {
  if (document_role != "user" && document_role != "system")
    throw InputError("read: expected document_role 'user' or 'system', found '" + excerpt(document_role) +
                     "'");
  return {.chat = chat_use(chat),
          .system = system.value_or(""),
          .document_in_system = document_role == "system",
          .think = think.value_or(""),
          .names = kArguments};
}

std::shared_ptr<PyDocument> read_document(std::shared_ptr<PyModel> model, const std::string& text,
                                          const std::vector<std::string>& specs, const std::string& kv_type,
                                          std::int64_t max_tokens, std::uint64_t seed,
                                          const std::optional<Progress>& progress,
                                          const std::optional<bool>& chat,
                                          const std::optional<std::string>& system,
                                          const std::string& document_role,
                                          const std::optional<std::string>& think) {
  model->process.check("Model");
  InCallback::check_outside();
  check_room("read", max_tokens);
  if (without_blanks(text).empty())
    throw InputError("read: expected a text, found " +
                     std::string(text.empty() ? "an empty one" : "blanks alone"));
  DocumentOptions options = {
      .kv_type = parse_dtype(kv_type), .device = model->device, .max_tokens = max_tokens, .seed = seed};
  for (const std::string& spec : specs) {
    if (parse_auto(spec))
      options.automatic = true;
    else
      options.specs.push_back(parse_spec(spec));
  }
  if (progress) {
    options.progress = [&](const ReadProgress& done) {
      const nb::gil_scoped_acquire acquire;
      const InCallback mark;
      (*progress)(done.tokens_done, done.tokens, done.layers_indexed, done.layers);
    };
  }
  const ChatOptions how = chat_options(chat, system, document_role, think);
  IndexedText reading;
  {
    const nb::gil_scoped_release release;
    reading = indexed_text(*model->model, how, text);
  }
  options.attachments = reading.attachments;
  auto ticket = model->asked(
      [&](Scheduler& scheduler) { return scheduler.read(reading.tokens, text, std::move(options)); });
  auto document = wait_for(*model, ticket);
  keep_source(*document, text, reading.first_token);
  auto read = std::make_shared<PyDocument>(std::move(model), std::move(document));
  read->remarks = std::move(reading.remarks);
  return read;
}

std::shared_ptr<PyDocument> load_document(const std::string& path, std::shared_ptr<PyModel> model,
                                          const std::vector<std::string>& specs) {
  model->process.check("Model");
  DocumentOptions options = {.specs = parse_specs(specs), .device = model->device};
  const nb::gil_scoped_release release;
  auto document = Document::open(path, model->model, options);
  return std::make_shared<PyDocument>(std::move(model), std::move(document));
}

/// Where the model lies that a .lode file was made with; InputError when it does not lie there any more.
std::string model_path_of(const std::string& path) {
  const ContainerReader file(path);
  std::string model = read_context_meta(file, path).model_path;
  if (std::error_code failed; !std::filesystem::exists(model, failed))
    throw InputError(path + ": its model is not at '" + model + "' any more: load it and give it as model=");
  return model;
}

/// Copies one layer's rows into a store of the same type.
void put_rows(KvStore& store, int layer, const std::vector<KvRows>& heads) {
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const KvRows& rows = heads[h];
    const auto bytes = static_cast<std::size_t>(rows.rows * rows.row_bytes());
    const auto head = static_cast<int>(h);
    std::memcpy(store.rows_to_write(layer, head, KvStore::Part::k, rows.rows), rows.k, bytes);
    std::memcpy(store.rows_to_write(layer, head, KvStore::Part::v, rows.rows), rows.v, bytes);
  }
}

/// Keys and values of all layers, of one type and as many rows as there are tokens; InputError otherwise.
std::vector<std::vector<KvRows>> checked_layers(const ModelConfig& config, std::size_t tokens,
                                                const std::vector<Array>& keys,
                                                const std::vector<Array>& values) {
  expect_like_layers(config, "from_keys");
  std::vector<std::vector<KvRows>> layers;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    layers.push_back(kv_heads(keys[i], values[i]));
    if (std::ssize(layers.back()) != config.kv_heads || layers.back().front().d != config.head_dim ||
        layers.back().front().rows != static_cast<std::int64_t>(tokens) ||
        layers.back().front().type != layers.front().front().type)
      throw InputError("from_keys: expected keys [" + std::to_string(config.kv_heads) + ", " +
                       std::to_string(tokens) + ", " + std::to_string(config.head_dim) +
                       "] of one type in every layer, found " + shape_text(keys[i]) + " in layer " +
                       std::to_string(i));
  }
  if (std::ssize(layers) != config.layers || tokens == 0)
    throw InputError("from_keys: expected at least one token and keys of " + std::to_string(config.layers) +
                     " layers, found " + std::to_string(tokens) + " tokens and " +
                     std::to_string(layers.size()) + " layers");
  return layers;
}

/// A file with other tokens could not be read again.
void expect_tokens(const ModelConfig& config, const std::vector<TokenId>& tokens) {
  const auto bad =
      std::ranges::find_if(tokens, [&](TokenId token) { return token < 0 || token >= config.vocab; });
  if (bad != tokens.end())
    throw InputError("from_keys: tokens: expected ids from 0 to " + std::to_string(config.vocab - 1) +
                     " of this model's vocabulary, found " + std::to_string(*bad) + " at " +
                     std::to_string(bad - tokens.begin()));
}

std::shared_ptr<PyDocument> document_of_keys(std::shared_ptr<PyModel> model,
                                             const std::vector<TokenId>& tokens, const std::string& text,
                                             const std::vector<ArrayArgument>& keys,
                                             const std::vector<ArrayArgument>& values,
                                             const std::vector<std::string>& specs, std::int64_t max_tokens,
                                             std::uint64_t seed) {
  model->process.check("Model");
  if (model->device != Device::cpu)
    throw InputError(
        "from_keys: expected a model on the CPU, found one on a GPU; save() the document there and "
        "load() it with this model");
  check_room("from_keys", max_tokens);
  if (keys.size() != values.size()) throw InputError("from_keys: expected as many values as keys");
  expect_tokens(model->model->config(), tokens);
  std::vector<Array> k, v;
  for (const ArrayArgument& array : keys) k.push_back(array_of(array, "keys"));
  for (const ArrayArgument& array : values) v.push_back(array_of(array, "values"));
  const auto layers = checked_layers(model->model->config(), tokens.size(), k, v);
  const std::vector<Spec> asked = parse_specs(specs);
  std::shared_ptr<const Document> document;
  {
    const nb::gil_scoped_release release;
    Context context(model->model,
                    {.kv_type = layers.front().front().type, .max_tokens = max_tokens, .seed = seed});
    Context::Impl& parts = context.impl();
    for (std::size_t layer = 0; layer < layers.size(); ++layer)
      put_rows(parts.kv, static_cast<int>(layer), layers[layer]);
    parts.kv.commit(std::ssize(tokens));
    parts.ids.assign(tokens.begin(), tokens.end());
    for (const Spec& spec : asked) context.attach(spec);
    context.build_indexes();
    document = Document::Impl::share(std::move(context), text, {});
    keep_source(*document, text, std::ssize(model->model->tokenizer().prefix()));
  }
  return std::make_shared<PyDocument>(std::move(model), std::move(document));
}

/// One head's keys or values [S, d], without a copy, kept alive by `owner`.
Rows rows_of(const KvRows& rows, bool keys, nb::handle owner) {
  if (rows.type != DType::f32 && rows.type != DType::f16 && rows.type != DType::bf16)
    throw InputError("kv: expected keys of f32, f16 or bf16, found a document of " +
                     std::string(name_of(rows.type)));
  const std::size_t shape[] = {static_cast<std::size_t>(rows.rows), static_cast<std::size_t>(rows.d)};
  return Rows(const_cast<std::byte*>(keys ? rows.k : rows.v), 2, shape, owner, nullptr,
              numpy_type(rows.type));
}

std::vector<std::pair<Rows, Rows>> kv_of(nb::handle_t<PyDocument> self, int layer) {
  const PyDocument& document = nb::cast<const PyDocument&>(self);
  const ModelConfig& config = document.here().model()->config();
  if (layer < 0 || layer >= config.layers)
    throw InputError("kv: expected a layer below " + std::to_string(config.layers) + ", found " +
                     std::to_string(layer));
  if (document.owner->device != Device::cpu)
    throw InputError(
        "kv: expected a document on the CPU, found one on a GPU; load() its file with a model there");
  const auto& all = document.document->impl().rows;
  std::vector<std::pair<Rows, Rows>> heads;
  for (int h = 0; h < config.kv_heads_of(layer); ++h) {
    const KvRows& rows = all[static_cast<std::size_t>(layer * config.most_kv_heads() + h)];
    heads.emplace_back(rows_of(rows, true, self), rows_of(rows, false, self));
  }
  return heads;
}

}  // namespace

void bind_documents(nb::module_& m) {
  nb::class_<PyDocument>(m, "_Document")
      .def_static("read", &read_document, nb::arg("model"), nb::arg("text"), nb::arg("specs"),
                  nb::arg("kv_type"), nb::arg("max_tokens"), nb::arg("seed"), nb::arg("progress"),
                  nb::arg("chat").none(), nb::arg("system").none(), nb::arg("document_role"),
                  nb::arg("think").none())
      .def_static("model_path", &model_path_of, nb::arg("path"))
      .def_static("load", &load_document, nb::arg("path"), nb::arg("model"), nb::arg("specs"))
      .def_static("from_keys", &document_of_keys, nb::arg("model"), nb::arg("tokens"), nb::arg("text"),
                  nb::arg("keys"), nb::arg("values"), nb::arg("specs"), nb::arg("max_tokens"),
                  nb::arg("seed"))
      .def(
          "save",
          [](const PyDocument& self, const std::string& path, bool overwrite) {
            self.owner->process.check("Document");
            const nb::gil_scoped_release release;
            if (std::error_code failed; !overwrite && std::filesystem::exists(path, failed))
              throw InputError(excerpt(path, 4000) +
                               ": this file exists already; overwrite=True replaces it");
            self.document->save(path);
          },
          nb::arg("path"), nb::arg("overwrite"))
      // Spelled out, since the type of the rows is known at run time only.
      .def("kv", &kv_of, nb::arg("layer"),
           nb::sig("def kv(self, layer: int) -> list[tuple[numpy.typing.NDArray[typing.Any], "
                   "numpy.typing.NDArray[typing.Any]]]"))
      .def_prop_ro("tokens", [](const PyDocument& self) { return self.document->tokens(); })
      .def_prop_ro("token_ids",
                   [](const PyDocument& self) {
                     const auto ids = self.document->token_ids();
                     return std::vector<TokenId>(ids.begin(), ids.end());
                   })
      .def_prop_ro("eos", [](const PyDocument& self) { return self.document->model()->config().eos; })
      .def_prop_ro("text", [](const PyDocument& self) { return self.document->text(); })
      .def_prop_ro("chat",
                   [](const PyDocument& self) {
                     return self.document->attachment(DocumentChat::kAttachment) != nullptr;
                   })
      .def_ro("remarks", &PyDocument::remarks)
      .def_prop_ro("fingerprint", [](const PyDocument& self) { return self.document->fingerprint(); })
      .def_prop_ro("kv_type",
                   [](const PyDocument& self) { return std::string(name_of(self.document->kv_type())); })
      .def_prop_ro("max_tokens", [](const PyDocument& self) { return self.document->max_tokens(); })
      .def_prop_ro("kv_bytes", [](const PyDocument& self) { return self.document->kv_bytes(); })
      .def_prop_ro("index_bytes", [](const PyDocument& self) { return self.document->index_bytes(); })
      .def_prop_ro("methods", [](const PyDocument& self) {
        std::vector<std::string> specs;
        for (const Spec& spec : self.document->methods()) specs.push_back(spec.str());
        return specs;
      });
}

}  // namespace lode::python
