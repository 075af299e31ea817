// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/library.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "base/file.h"
#include "base/json.h"
#include "base/leftovers.h"
#include "base/out_of_memory.h"
#include "base/text.h"
#include "engine/automatic.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "engine/memory.h"
#include "io/container.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "select/spec_list.h"
#include "serve/engine/rank_engine.h"
#include "serve/engine/source_places.h"
#include "serve/names.h"
#include "serve/specs.h"

namespace lode::serve {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kExtension = ".lode";
constexpr const char* kDeleted = "it was deleted before it had been read";
constexpr const char* kAttachment = "serve";  // title, created, expires
constexpr std::int64_t kQuestionRoom = 4096;
constexpr auto kHousekeeping = std::chrono::seconds(1);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

ApiError no_such(const std::string& name) {
  return ApiError(404, fmt::format("there is no context '{}'", excerpt(name)), "context_not_found");
}

std::int64_t created_of(const fs::path& path) {
  std::error_code failed;
  const auto age = fs::file_time_type::clock::now() - fs::last_write_time(path, failed);
  return failed ? 0 : std::time(nullptr) - std::chrono::duration_cast<std::chrono::seconds>(age).count();
}

std::string dump_json(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Without `full`, which needs no index.
std::vector<std::string> names_of(const std::vector<Spec>& specs) {
  std::vector<std::string> names;
  for (const Spec& spec : specs)
    if (spec.name != "full") names.push_back(spec.str());
  return names;
}

/// Of a document's file, and of its shards where it lists some.
std::int64_t stored_bytes(const fs::path& path, const ContextMeta& meta) {
  auto bytes = static_cast<std::int64_t>(fs::file_size(path));
  for (const Shard& shard : meta.shards.shards) {
    std::error_code missing;  // whoever opens it says so
    const auto more = fs::file_size(path.parent_path() / shard.file, missing);
    if (!missing) bytes += static_cast<std::int64_t>(more);
  }
  return bytes;
}

/// Room for a document, questions and answers, as far as the model's context goes.
std::int64_t room_for(const Model& model, std::int64_t tokens) {
  return std::max(tokens, std::min(model.config().max_positions, tokens + kQuestionRoom));
}

}  // namespace

struct Library::Entry {
  ContextInfo info;
  std::string title;
  const LoadedModel* model = nullptr;
  bool on_disk = false, removed = false;
  bool automatic = false;  ///< its methods are measured when it is read
  // While it is read:
  std::string text;  ///< a file's bytes until it has been converted
  bool is_file = false;
  std::vector<Spec> specs;
  std::function<void(const ContextInfo&)> on_read;  ///< until it has been called
  Clock::time_point since = Clock::now();
  GrowingCost cost;
  // Once it is a file:
  DType kv_type = DType::f16;
  std::int64_t file_tokens = 0;        ///< room for so many was there when it was indexed
  std::vector<fs::path> folders;       ///< where its methods' files may be
  std::shared_ptr<Openable> openable;  ///< made when it is first asked
  std::shared_ptr<Neutral> neutral = std::make_shared<Neutral>();
};

Library::Library(std::vector<LoadedModel> models, LibraryOptions options)
    : models_(std::move(models)),
      options_(std::move(options)),
      open_({.host = options_.memory, .gpu = options_.gpu_memory}) {
  std::error_code failed;
  fs::create_directories(options_.folder, failed);
  if (!fs::is_directory(options_.folder, failed))
    throw InputError(fmt::format("--contexts: expected a folder that is there or can be made, found '{}'",
                                 excerpt(options_.folder.string())));
  remove_leftovers(options_.folder, kExtension);
  scan();
  house_ = std::thread([this] { keep_house(); });
  reader_ = std::thread([this] { read_waiting(); });
}

Library::~Library() {
  stop();
}

void Library::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread* thread : {&house_, &reader_})
    if (thread->joinable()) thread->join();
  open_.stop();
}

// ---- What is there. ---------------------------------------------------------------------------------------------

Library::EntryPtr Library::find(const std::string& name) {
  const auto at = entries_.find(name);
  if (at == entries_.end()) throw no_such(name);
  return at->second;
}

const LoadedModel* Library::model_of_fingerprint(const std::string& fingerprint) const {
  for (const LoadedModel& model : models_)
    if (model.model->fingerprint() == fingerprint) return &model;
  return nullptr;
}

fs::path Library::path_of(const std::string& name) const {
  LODE_ASSERT(is_context_name(name));
  return options_.folder / (name + kExtension);
}

/// Clients need not know where the server keeps its files.
std::string Library::without_folder(std::string sentence) const {
  const std::string folder = options_.folder.string() + "/";
  for (std::size_t at = 0; (at = sentence.find(folder, at)) != std::string::npos;)
    sentence.erase(at, folder.size());
  return sentence;
}

std::vector<ContextInfo> Library::list() {
  const std::lock_guard lock(mutex_);
  std::vector<ContextInfo> all;
  for (const auto& [name, entry] : entries_) {
    all.push_back(entry->info);
    all.back().in_memory = entry->openable != nullptr && open_.is_open(*entry->openable);
    if (entry->info.state == ContextState::reading) all.back().seconds = seconds_since(entry->since);
  }
  return all;
}

ContextInfo Library::info(const std::string& name) {
  for (ContextInfo& info : list())
    if (info.name == name) return info;
  throw no_such(name);
}

void Library::count(BackendStats& stats) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, entry] : entries_) {
    ++stats.documents;
    stats.reading += entry->info.state == ContextState::reading ? 1 : 0;
  }
  open_.count(stats);
}

std::optional<Recognised> Library::recognise(std::string_view text, const std::string& model) {
  const std::lock_guard lock(mutex_);
  const auto found = finder_.longest_in(text, [&](const std::string& name) {
    const auto at = entries_.find(name);
    return at != entries_.end() && at->second->info.state == ContextState::ready &&
           (model.empty() || at->second->info.model == model);
  });
  if (!found) return std::nullopt;
  return Recognised{found->name, found->begin, found->end};
}

/// Files come from other programs, too: an indexed text that is put into the folder is served.
void Library::scan() {
  std::error_code failed;
  const auto changed = fs::last_write_time(options_.folder, failed);
  if (!failed && changed == scanned_) return;
  std::map<std::string, bool> there;
  for (auto at = fs::directory_iterator(options_.folder, failed); !failed && at != fs::directory_iterator();
       at.increment(failed)) {
    const std::string file = at->path().filename().string();
    if (!file.ends_with(kExtension) || file.starts_with('.')) continue;
    there[file.substr(0, file.size() - std::string_view(kExtension).size())] = true;
  }
  // Without descriptors, say: what is known stays known, and the next round looks again.
  if (failed && failed != std::errc::no_such_file_or_directory) return;
  scanned_ = changed;
  std::vector<std::pair<fs::path, EntryPtr>> fresh;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [&](const auto& entry) {
      // It may have been written since the folder was looked through.
      std::error_code unknown;
      const bool gone = entry.second->on_disk && !there.contains(entry.first) &&
                        !fs::exists(path_of(entry.first), unknown) && !unknown;
      if (gone) finder_.remove(entry.first);
      if (gone) forget(*entry.second, no_such(entry.first));
      return gone;
    });
    for (const auto& [name, found] : there) {
      if (entries_.contains(name)) continue;
      const auto entry = std::make_shared<Entry>();
      entry->info.name = name;
      entry->on_disk = true;
      fresh.emplace_back(options_.folder / (name + kExtension), entry);
    }
  }
  for (const auto& [path, entry] : fresh) {
    look_into(*entry);
    const std::lock_guard lock(mutex_);
    std::error_code unknown;
    if (fs::exists(path, unknown))
      entries_.emplace(entry->info.name, entry);
    else  // a request has deleted it since the folder was looked through
      finder_.remove(entry->info.name);
  }
}

/// What a file says of itself. Keys and values are looked at when it is opened.
void Library::look_into(Entry& entry) {
  ContextInfo& info = entry.info;
  info.state = ContextState::failed;
  try {
    if (!is_context_name(info.name)) {
      info.name = excerpt(info.name, kLongestContextName);
      throw InputError(
          "expected a file name of letters, digits, '.', '_' and '-', found another one: rename the file");
    }
    const fs::path path = path_of(info.name);
    info.created = created_of(path);
    info.bytes = static_cast<std::int64_t>(fs::file_size(path));
    const ContainerReader file(path);
    const ContextMeta meta = read_context_meta(file, path);
    info.bytes = stored_bytes(path, meta);
    info.tokens = info.tokens_done = meta.tokens;
    entry.kv_type = meta.kv_type;
    entry.file_tokens = meta.rope_tokens;
    entry.folders = meta.folders;
    for (const std::string& spec : meta.methods)
      if (spec != "full") info.attentions.push_back(spec);
    entry.model = model_of_fingerprint(meta.model_fingerprint);
    if (entry.model == nullptr)
      throw InputError(fmt::format("it was made with a model that is not served here ('{}')",
                                   excerpt(fs::path(meta.model_path).filename().string())));
    info.model = entry.model->id;
    for (const std::string& needed : meta.required)
      if (needed != DocumentChat::kAttachment)
        throw InputError(
            fmt::format("its answers depend on '{}', which this server does not know", excerpt(needed)));
    const auto text = file.bytes("text");
    info.text_bytes = static_cast<std::int64_t>(text.size());
    const Attachments attachments = read_attachments(file, path);
    if (const auto ours = attachments.find(kAttachment); ours != attachments.end()) {
      const Json json = parse_json(ours->second.text, path.string() + ": attachment 'serve'");
      info.created = json_int(json, "created", path.string(), 0, INT64_MAX);
      info.expires = json_int(json, "expires", path.string(), 0, INT64_MAX);
    }
    const std::lock_guard lock(mutex_);
    finder_.add(info.name, {reinterpret_cast<const char*>(text.data()), text.size()});
    info.state = ContextState::ready;
  } catch (const std::exception& error) {
    info.error = without_folder(error.what());
  }
}

std::string Library::text_of(const std::string& name) {
  std::unique_lock lock(mutex_);
  const EntryPtr entry = find(name);
  if (entry->info.state == ContextState::reading && entry->is_file)
    throw ApiError(409, fmt::format("the context '{}' is being converted", name), "context_reading");
  if (entry->info.state == ContextState::reading) return entry->text;
  if (entry->info.state == ContextState::failed) throw unusable_context(name, entry->info.error);
  if (entry->openable != nullptr)
    if (std::optional<std::string> text = open_.text_of(*entry->openable)) return *std::move(text);
  lock.unlock();
  const ContainerReader file(path_of(name));
  const auto text = file.bytes("text");
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

// ---- Coming and going. ------------------------------------------------------------------------------------------

ContextInfo Library::create(NewContext context) {
  auto entry = std::make_shared<Entry>();
  entry->model = &model_named(models_, context.model);
  for (const std::string& text : context.attentions) {
    if (parse_request_auto(text))
      entry->automatic = true;
    else
      entry->specs.push_back(parse_request_spec(text));
  }
  if (context.attentions.empty()) {
    entry->specs = options_.specs;
    entry->automatic = options_.automatic;
  }
  entry->automatic = entry->automatic || entry->specs.empty();
  if (options_.ranks != nullptr) {
    if (std::ranges::any_of(context.attentions,
                            [](const auto& one) { return parse_request_auto(one).has_value(); }))
      throw ApiError(400,
                     "'attention': expected methods by name, or none for full attention, over several ranks, "
                     "which measure none, found 'auto'");
    entry->automatic = false;
  }
  entry->text = std::move(context.text);
  entry->is_file = context.is_file;
  entry->on_read = std::move(context.on_read);
  ContextInfo& info = entry->info;
  info.text_bytes = static_cast<std::int64_t>(entry->text.size());
  info.model = entry->model->id;
  info.step = "waiting";
  info.created = std::time(nullptr);
  info.expires = context.ttl_seconds > 0 ? info.created + context.ttl_seconds : 0;
  info.attentions = names_of(entry->specs);
  const std::lock_guard lock(mutex_);
  info.name = context.name;
  const auto is_taken = [&] {
    const auto before = entries_.find(info.name);
    // One that failed and left no file is as good as none.
    return before != entries_.end() &&
           (before->second->on_disk || before->second->info.state != ContextState::failed);
  };
  for (int number = 2; context.any_name && is_taken(); ++number)
    info.name = numbered_name(context.name, number);
  entry->title = context.title.empty() ? info.name : context.title;
  if (is_taken())
    throw ApiError(
        409, fmt::format("a context '{}' exists already: delete it first, or choose another name", info.name),
        "context_exists");
  if (waiting_.size() >= options_.most_waiting) {
    ApiError full(429, fmt::format("{} documents wait to be read, as many as may wait", waiting_.size()));
    full.retry_seconds = 30;
    throw full;
  }
  entries_[info.name] = entry;
  waiting_.push_back(entry);
  wake_.notify_all();
  return info;
}

void Library::remove(const std::string& name) {
  std::unique_lock lock(mutex_);
  const EntryPtr entry = find(name);
  entry->removed = true;
  forget(*entry, no_such(name));
  const bool waited = std::erase(waiting_, entry) > 0;
  finder_.remove(name);
  entries_.erase(name);
  if (waited) {
    fail(*entry, kDeleted);
    lock.unlock();
    return tell_read(entry);
  }
  if (!entry->on_disk) return;  // the thread that reads it sees that it is not wanted
  std::error_code failed;
  fs::remove(path_of(name), failed);
  remove_shards(path_of(name), {}, RemovedShards::all_others);
  if (failed)
    throw ApiError(500, fmt::format("the file of '{}' could not be deleted: {}", name, failed.message()));
}

void Library::expire() {
  std::vector<std::string> over;
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t now = std::time(nullptr);
    for (const auto& [name, entry] : entries_)
      if (entry->info.expires > 0 && entry->info.expires <= now) over.push_back(name);
  }
  for (const std::string& name : over) {
    try {
      remove(name);
    } catch (
        const ApiError&) {  // gone meanwhile, or a file that cannot be deleted: the next round tries again
      continue;
    }
  }
}

void Library::keep_house() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kHousekeeping, [&] { return stop_; });
      if (stop_) return;
    }
    expire();
    scan();
  }
}

void Library::read_waiting() {
  while (true) {
    EntryPtr entry;
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kHousekeeping, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      if (waiting_.empty()) continue;
      entry = waiting_.front();
      waiting_.pop_front();
    }
    read(entry);
    tell_read(entry);
  }
}

// ---- Reading. ---------------------------------------------------------------------------------------------------

void Library::set_step(const EntryPtr& entry, const char* step) {
  const std::lock_guard lock(mutex_);
  if (stop_ || entry->removed) throw Interrupted();
  entry->info.step = step;
}

SourceText Library::convert(const EntryPtr& entry) {
  if (!entry->is_file) return plain_source(entry->text, entry->title);
  set_step(entry, "converting");
  return read_document(entry->text, entry->title, options_.reading);
}

DocumentOptions Library::reading_options(const EntryPtr& entry, const IndexedText& text) {
  DocumentOptions options;
  options.attachments = text.attachments;
  options.specs = entry->specs;
  options.automatic = entry->automatic;
  options.kv_type = options_.kv_type;
  options.device = device_for(*entry->model, options_.kv_type);
  options.max_tokens = room_for(*entry->model->model, std::ssize(text.tokens));
  const Json ours = {
      {"title", entry->title}, {"created", entry->info.created}, {"expires", entry->info.expires}};
  options.attachments[kAttachment] = {.text = dump_json(ours), .required = false};
  options.progress = [this, entry](const ReadProgress& progress) {
    set_step(entry, progress.tokens_done < progress.tokens ? "tokens" : "indexes");
    const std::lock_guard lock(mutex_);
    if (progress.tokens_done == entry->info.tokens_done) return;
    entry->info.tokens_done = progress.tokens_done;
    entry->cost.add(progress.tokens_done, seconds_since(entry->since));
    entry->info.seconds_left = entry->cost.left(progress.tokens);
  };
  return options;
}

void Library::read(const EntryPtr& entry) {
  try {
    SourceText source = convert(entry);
    set_step(entry, "tokens");
    IndexedText text = entry->model->prompting->document(source.text);
    const std::int64_t tokens = std::ssize(text.tokens);
    {
      const std::lock_guard lock(mutex_);
      entry->text = source.text;
      entry->is_file = false;
      entry->info.attentions = names_of(entry->specs);
      entry->info.text_bytes = std::ssize(source.text);
      entry->info.tokens = tokens;
      entry->since = Clock::now();
    }
    DocumentOptions options = reading_options(entry, text);
    if (options_.ranks != nullptr) return read_over_ranks(entry, std::move(source), std::move(text), options);
    const auto [claim, document] = read_in_turn(entry, text.tokens, source.text, options);
    keep_source(*document, std::move(source), text.first_token);
    set_step(entry, "writing");
    keep(entry, *document);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    fail(*entry, entry->removed ? kDeleted : without_folder(error.what()));
  }
}

void Library::fail(Entry& entry, const std::string& why) {
  entry.info.state = ContextState::failed;
  entry.info.error = why;
  entry.text = {};
}

/// Whoever waits for a reading hears how it ended.
void Library::tell_read(const EntryPtr& entry) {
  std::function<void(const ContextInfo&)> on_read;
  ContextInfo info;
  {
    const std::lock_guard lock(mutex_);
    on_read = std::exchange(entry->on_read, nullptr);
    info = entry->info;
  }
  if (on_read) on_read(info);
}

namespace {

/// Others than this program may have taken memory of the GPU that was counted as free.
void expect_free(std::int64_t bytes) {
  if (const std::int64_t free = gpu_info().free_bytes; free < bytes)
    throw OutOfDeviceMemory(fmt::format("expected {} of free GPU memory for the document, found {}",
                                        human_bytes(bytes), human_bytes(free)));
}

/// Where keys and values of a document of a GPU lie in host memory no questions are answered together.
void expect_on_gpu(const Document& document) {
  if (const GpuContext* const gpu = document.impl().parts().gpu.get(); gpu != nullptr && gpu->keys_on_host())
    throw OutOfDeviceMemory(gpu->placement());
}

}  // namespace

/// Reads a document, on a GPU when there is room for it there. Where the GPU then has less than was counted, it is read
/// again with less beside it, at last alone; nothing of it goes to the host.
Library::Read Library::read_in_turn(const EntryPtr& entry, const std::vector<TokenId>& tokens,
                                    const std::string& text, const DocumentOptions& options) {
  const LoadedModel& model = *entry->model;
  const auto read = [&] { return model.scheduler->read(tokens, text, options).result.get(); };
  if (options.device == Device::cpu) return {.claim = nullptr, .document = read()};
  std::vector<Spec> specs = options.specs;
  if (options.automatic)
    for (const Spec& spec : automatic_methods(*model.model, std::ssize(tokens))) specs.push_back(spec);
  std::int64_t bytes = document_bytes(*model.model, model.on_gpu.get(), options.kv_type, std::ssize(tokens),
                                      options.max_tokens, specs);
  for (;;) {
    set_step(entry, "waiting");
    auto claim = open_.claim(Device::cuda, bytes, [&] { set_step(entry, "waiting"); });
    set_step(entry, "tokens");
    try {
      expect_free(bytes);
      auto document = read();
      expect_on_gpu(*document);
      return {.claim = std::move(claim), .document = std::move(document)};
    } catch (const OutOfDeviceMemory&) {
      if (bytes == options_.gpu_memory) throw;
      bytes = std::min(options_.gpu_memory, bytes + bytes / 4);
    }
  }
}

void Library::read_over_ranks(const EntryPtr& entry, SourceText source, IndexedText text,
                              const DocumentOptions& options) {
  options_.ranks->read(*entry->model, {.tokens = std::move(text.tokens),
                                       .options = options,
                                       .source = std::move(source),
                                       .first_token = text.first_token,
                                       .path = path_of(entry->info.name)});
  take_in(entry, options, options.specs);
}

/// Writes the file; from then on the document survives everything.
void Library::keep(const EntryPtr& entry, const Document& document) {
  document.save(path_of(entry->info.name));
  DocumentOptions read;
  read.kv_type = document.kv_type();
  read.max_tokens = document.max_tokens();
  take_in(entry, read, document.methods());
}

/// An entry whose file has been written.
void Library::take_in(const EntryPtr& entry, const DocumentOptions& read, const std::vector<Spec>& methods) {
  const fs::path path = path_of(entry->info.name);
  const std::int64_t bytes = stored_bytes(path, read_context_meta(ContainerReader(path), path));
  const std::lock_guard lock(mutex_);
  if (entry->removed) {
    std::error_code ignored;
    fs::remove(path, ignored);
    remove_shards(path, {}, RemovedShards::all_others);
    return fail(*entry, kDeleted);
  }
  entry->on_disk = true;
  entry->kv_type = read.kv_type;
  entry->file_tokens = read.max_tokens;
  entry->info.attentions = names_of(methods);
  entry->info.bytes = bytes;
  finder_.add(entry->info.name, entry->text);
  entry->info.state = ContextState::ready;
  entry->info.step.clear();
  entry->text = {};
}

// ---- In memory. -------------------------------------------------------------------------------------------------

namespace {

/// Why a document cannot be asked: it is being read, or its file is damaged.
void expect_ready(const ContextInfo& info) {
  if (info.state == ContextState::reading) {
    ApiError early(409,
                   fmt::format("the context '{}' is being read: {} of {} tokens", info.name, info.tokens_done,
                               info.tokens),
                   "context_reading");
    early.retry_seconds = std::max(1, static_cast<int>(info.seconds_left));
    throw early;
  }
  if (info.state == ContextState::failed) throw unusable_context(info.name, info.error);
}

}  // namespace

std::optional<Library::Opened> Library::open(const std::string& name, const Spec& spec, Waiter waiter) {
  EntryPtr entry;
  std::shared_ptr<Openable> openable;
  {
    const std::lock_guard lock(mutex_);
    entry = find(name);
    expect_ready(entry->info);
    if (entry->openable == nullptr) entry->openable = open_.add(source_of(*entry));
    openable = entry->openable;
  }
  const auto opened = [model = entry->model, neutral = entry->neutral](std::shared_ptr<const Document> d) {
    return Opened{std::move(d), model, neutral};
  };
  auto document = open_.get(
      openable,
      {.id = waiter.id,
       .spec = spec,
       .ready = [opened, ready = std::move(waiter.ready)](auto lease) { ready(opened(std::move(lease))); },
       .refused = std::move(waiter.refused)});
  if (document == nullptr) return std::nullopt;
  return opened(std::move(document));
}

void Library::forget(const Entry& entry, const ApiError& why) {
  if (entry.openable != nullptr) open_.forget(entry.openable, why);
}

/// Keys and values of eight bits or four stay on the host.
Device Library::device_for(const LoadedModel& model, DType kv_type) {
  return model.on_gpu != nullptr && bytes_of(kv_type) > 1 ? Device::cuda : Device::cpu;
}

/// How a file is opened. It knows all it needs of the entry: the library may have forgotten that meanwhile.
DocumentSource Library::source_of(const Entry& entry) const {
  const LoadedModel& model = *entry.model;
  const std::string& name = entry.info.name;
  const Device device = device_for(model, entry.kv_type);
  const std::int64_t tokens = entry.info.tokens, room = room_for(*model.model, tokens),
                     most = std::max(entry.file_tokens, room);
  std::vector<Spec> in_file;
  for (const std::string& spec : entry.info.attentions) in_file.push_back(parse_spec(spec, entry.folders));
  const auto need = [&model, device, type = entry.kv_type, tokens, most,
                     in_file](const std::vector<Spec>& specs) {
    std::vector<Spec> all = in_file;
    for (const Spec& spec : specs)
      if (!holds(in_file, spec)) all.push_back(spec);
    const GpuModel* const gpu = device == Device::cuda ? model.on_gpu.get() : nullptr;
    return document_bytes(*model.model, gpu, type, tokens, most, all);
  };
  const auto check = [&model](const Spec& spec) {
    try {
      expect_index_without_reading(model.model, spec);
    } catch (const InputError& error) {
      throw ApiError(400, error.what());
    }
  };
  const auto load = [this, name, &model, device, room, in_file, need](const std::vector<Spec>& specs) {
    if (device == Device::cuda) expect_free(need(specs));
    DocumentOptions options;
    options.max_tokens = room;
    options.device = device;
    options.specs = specs;
    return this->load(name, model, options, in_file);
  };
  return {.name = name, .device = device, .need = need, .check = check, .load = load};
}

namespace {

using OpenFile = std::function<std::shared_ptr<const Document>(const DocumentOptions&)>;

/// Why a file cannot be opened even without more indexes than it has; empty when it can.
std::string fault_of(const OpenFile& open, const DocumentOptions& options) {
  try {
    open({.max_tokens = options.max_tokens});
    return {};
  } catch (const InputError& error) {
    return error.what();
  }
}

}  // namespace

std::shared_ptr<const Document> Library::load(const std::string& name, const LoadedModel& model,
                                              const DocumentOptions& options,
                                              const std::vector<Spec>& in_file) const {
  const OpenFile open = [&](const DocumentOptions& with) {
    return options_.ranks != nullptr ? options_.ranks->open(model, path_of(name), with)
                                     : Document::open(path_of(name), model.model, with);
  };
  std::shared_ptr<const Document> document;
  try {
    document = open(options);
  } catch (const InputError& error) {
    const bool asked_for_more = std::ranges::any_of(
        options.specs, [&](const Spec& spec) { return spec.name != "full" && !holds(in_file, spec); });
    const std::string fault = asked_for_more ? fault_of(open, options) : error.what();
    if (fault.empty()) throw ApiError(400, without_folder(error.what()));
    throw unusable_context(name, without_folder(fault));
  }
  expect_on_gpu(*document);
  return document;
}

}  // namespace lode::serve
