// SPDX-License-Identifier: Apache-2.0
#include "engine/document.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/hash.h"
#include "base/threads.h"
#include "engine/automatic.h"
#include "engine/batch.h"
#include "engine/context_file.h"
#include "lodestone/error.h"
#include "select/shared/branches.h"
#include "select/spec_list.h"

namespace lode {

namespace {

ContextOptions context_options(const DocumentOptions& options) {
  return {.kv_type = options.kv_type,
          .device = options.device,
          .gpu_memory = options.gpu_memory,
          .gpus = options.gpus,
          .max_tokens = options.max_tokens,
          .chunk = options.chunk,
          .seed = options.seed,
          .rope_factor = options.rope_factor};
}

/// Of what answers depend on beside the model.
std::string fingerprint_of(const Context::Impl& c) {
  const auto bytes = std::as_bytes(std::span(c.ids));
  const std::string tokens(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return hash_hex(fmt::format("{} {} {} {} {} {}", c.model->fingerprint(), name_of(c.options.kv_type),
                              c.options.seed, c.rope_tokens, c.options.rope_factor.value_or(0.0),
                              hash_hex(tokens)));
}

void build_indexes(Context& context, const DocumentOptions& options, ReadProgress progress) {
  for (const Spec& spec : context.methods())
    progress.layers += spec.name == "full" ? 0 : context.model().config().layers;
  context.build_indexes([&](std::int64_t done) {
    progress.layers_indexed = done;
    if (options.progress) options.progress(progress);
  });
}

}  // namespace

Document::Impl::Impl(Context context_, std::string text_, Attachments attachments_)
    : context(std::move(context_)),
      text(std::move(text_)),
      attachments(std::move(attachments_)),
      fingerprint(fingerprint_of(context.impl())) {
  for (const AttachedMethod& method : parts().methods)
    if (!method.dense() && method.built) methods.push_back(method.spec);
  if (GpuContext* const gpu = parts().gpu.get(); gpu != nullptr) {
    gpu->upload(parts().kv);
    return;
  }
  if (context.tokens() == 0) return;
  const int most = parts().config.most_kv_heads();
  rows.resize(static_cast<std::size_t>(parts().config.layers) * static_cast<std::size_t>(most));
  for (int layer = 0; layer < parts().config.layers; ++layer)
    std::ranges::copy(parts().kv.layer(layer).heads, rows.begin() + std::ptrdiff_t{layer} * most);
}

Position far_limit_of(std::int64_t tokens, const AttachedMethod& method) {
  const bool fixed =
      method.spec.dense.from_context || std::any_of(method.selectors.begin(), method.selectors.end(),
                                                    [](const Selector* s) { return grows_with_window(s); });
  const std::int64_t end = tokens - (fixed ? method.spec.dense.window : 0);
  return static_cast<Position>(std::max<std::int64_t>(0, end));
}

AttachedMethod* Document::Impl::method_of(const Spec& spec) const {
  if (spec.name == "full") return nullptr;
  for (AttachedMethod& method : parts().methods)
    if (method.built && same_method(method.spec, spec)) return &method;
  std::vector<std::string> names = {"full"};
  for (const Spec& known : methods) names.push_back(known.str());
  throw InputError(fmt::format("expected a method that the document is indexed for ({}), found '{}'",
                               fmt::join(names, ", "), spec.str()));
}

namespace {

/// A text that was appended to is indexed as far as its last window: here every key may become far at once.
void complete_index(Context::Impl& c, AttachedMethod& method) {
  for (std::size_t layer = 0; layer < method.selectors.size(); ++layer) {
    Selector* const selector = method.selectors[layer];
    if (selector == nullptr) continue;
    const Context::Impl::IndexedRows rows(c, method, static_cast<int>(layer));
    const std::int64_t end = std::min<std::int64_t>(rows.view().tokens, far_limit_of(c.tokens(), method));
    selector->append(0, rows.view(), static_cast<Position>(end));
  }
}

/// Of every method that the host chooses by.
void complete_indexes(Context& context) {
  Context::Impl& c = context.impl();
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    AttachedMethod& method = c.methods[i];
    if (!method.built || method.dense()) continue;
    if (c.gpu != nullptr) {
      const auto id = static_cast<MethodId>(i);
      if (c.gpu->chooses(method.selectors) || !asked_together(c, id)) continue;
      c.prepare_to_choose(id);
    }
    complete_index(c, method);
  }
}

}  // namespace

std::shared_ptr<const Document> Document::Impl::share(Context context, std::string text,
                                                      Attachments attachments) {
  complete_indexes(context);
  return std::shared_ptr<const Document>(
      new Document(std::make_unique<Impl>(std::move(context), std::move(text), std::move(attachments))));
}

Context Document::Impl::take_back(std::shared_ptr<const Document> document) {
  LODE_ASSERT(document.use_count() == 1);
  return std::move(document->impl_->context);
}

Document::Document(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Document::~Document() = default;

std::shared_ptr<const Document> Document::read(std::shared_ptr<const Model> model,
                                               std::span<const TokenId> tokens, std::string text,
                                               const DocumentOptions& options) {
  if (tokens.empty()) throw InputError("expected a document of at least one token, found none");
  const ThreadPool::Background background(model->pool());
  Context context(model, context_options(options));
  for (const Spec& spec : options.specs) context.attach(spec);
  if (options.automatic)
    for (const Spec& spec : automatic_methods(*model, std::ssize(tokens))) context.attach(spec);
  ReadProgress progress = {.tokens = std::ssize(tokens)};
  context.prefill(tokens, [&](std::int64_t done) {
    progress.tokens_done = done;
    if (options.progress) options.progress(progress);
  });
  build_indexes(context, options, progress);
  Attachments attachments = options.attachments;
  if (options.automatic) attachments[kAutoAttachment] = {.text = measure_automatic(context)};
  return Impl::share(std::move(context), std::move(text), std::move(attachments));
}

std::shared_ptr<const Document> Document::empty(std::shared_ptr<const Model> model,
                                                const DocumentOptions& options) {
  Context context(std::move(model), context_options(options));
  return Impl::share(std::move(context), {}, options.attachments);
}

std::shared_ptr<const Document> Document::open(const std::filesystem::path& path,
                                               std::shared_ptr<const Model> model,
                                               const DocumentOptions& options) {
  const ThreadPool::Background background(model->pool());
  return Impl::open(path, model, options, nullptr);
}

std::shared_ptr<const Document> Document::Impl::open(const std::filesystem::path& path,
                                                     std::shared_ptr<const Model> model,
                                                     const DocumentOptions& options, Communicator* ranks) {
  Context context = load_context(path, std::move(model), context_options(options), LoadIndexes::all, ranks);
  for (const Spec& spec : options.specs) context.attach(spec);
  build_indexes(context, options, {.tokens_done = context.tokens(), .tokens = context.tokens()});
  const ContainerReader file(path);
  const auto text = file.bytes("text");
  return share(std::move(context), {reinterpret_cast<const char*>(text.data()), text.size()},
               read_attachments(file, path));
}

void Document::save(const std::filesystem::path& path) const {
  const std::lock_guard lock(impl_->choosing);
  save_context(impl_->context, path, impl_->text, impl_->attachments);
}

const std::shared_ptr<const Model>& Document::model() const {
  return impl_->parts().model;
}
std::int64_t Document::tokens() const {
  return impl_->context.tokens();
}
std::span<const TokenId> Document::token_ids() const {
  return impl_->context.token_ids();
}
const std::string& Document::text() const {
  return impl_->text;
}
const Attachments& Document::attachments() const {
  return impl_->attachments;
}
const std::string* Document::attachment(std::string_view name) const {
  const auto found = impl_->attachments.find(std::string(name));
  return found == impl_->attachments.end() ? nullptr : &found->second.text;
}
const std::vector<Spec>& Document::methods() const {
  return impl_->methods;
}
bool Document::answers(const Spec& spec) const {
  return spec.name == "full" || holds(impl_->methods, spec);
}
DType Document::kv_type() const {
  return impl_->context.options().kv_type;
}
std::int64_t Document::max_tokens() const {
  return impl_->context.options().max_tokens;
}
std::int64_t Document::kv_bytes() const {
  return impl_->context.kv_bytes();
}
std::int64_t Document::index_bytes() const {
  return impl_->context.index_bytes();
}
const std::string& Document::fingerprint() const {
  return impl_->fingerprint;
}

}  // namespace lode
