// SPDX-License-Identifier: Apache-2.0
// lodestone index: prefill a text once, build the indexes that the specs need, write one `.lode` file; or go on
// from what such a file, or an interrupted reading, already holds.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <optional>

#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "cluster/rank_prefill.h"
#include "cluster/save_shards.h"
#include "engine/automatic.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "engine/memory.h"
#include "engine/prefill_log.h"
#include "engine/reuse.h"
#include "engine/source_sections.h"
#include "io/container.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "model/config.h"
#include "prompts.h"
#include "ranks.h"
#include "select/spec_list.h"
#include "shell_word.h"
#include "text/chat_template.h"

namespace lode::cli {

namespace {

struct IndexFlags {
  CommonFlags common;
  ModelFlags model;
  ChatFlags chat;
  std::vector<std::string> files;
  ReadOptions reading;
  std::string headings = "auto", output, append;
  std::vector<std::string> specs;
  bool force = false, restart = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A line for people; nothing in it that a terminal would obey.
void say(const std::string& line) {
  std::cerr << excerpt(line, 1000) << "\n";
}

/// What an indexed text says of itself that a new reading goes by.
struct Earlier {
  std::string path;
  ContextMeta meta;
  StoredSource stored;
  std::vector<TokenId> ids;
  std::vector<TokenId> head;  ///< tokens in front of the text
  Attachments attachments;
};

Earlier read_earlier(const std::string& path) {
  const ContainerReader file(path);
  Earlier earlier = {.path = path,
                     .meta = read_context_meta(file, path),
                     .stored = read_source(file, path),
                     .ids = {},
                     .head = {},
                     .attachments = read_attachments(file, path)};
  const auto ids = SectionReader(file, "").values<TokenId>("tokens");
  const auto head = std::min<std::size_t>(ids.size(), static_cast<std::size_t>(earlier.stored.first_token));
  earlier.ids.assign(ids.begin(), ids.end());
  earlier.head.assign(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(head));
  return earlier;
}

/// The file that the output replaces, if something of it may be kept.
std::optional<Earlier> earlier_output(const IndexFlags& flags) {
  std::error_code none;
  if (!std::filesystem::is_regular_file(flags.output, none)) return std::nullopt;
  try {
    return read_earlier(flags.output);
  } catch (const InputError&) {
    return std::nullopt;  // damaged, or no indexed text: to be replaced
  }
}

/// Whether a folder is indexed into the file that was made from it: that is an update, not a loss.
bool updates(const IndexFlags& flags) {
  const std::optional<Earlier> earlier = earlier_output(flags);
  if (!earlier || earlier->stored.source.inputs.size() != flags.files.size()) return false;
  for (std::size_t i = 0; i < flags.files.size(); ++i) {
    std::error_code none;
    if (!std::filesystem::is_directory(flags.files[i], none) ||
        std::filesystem::absolute(flags.files[i], none).lexically_normal() !=
            earlier->stored.source.inputs[i])
      return false;
  }
  return true;
}

void check_output(const IndexFlags& flags, const std::vector<Spec>& specs) {
  expect_apart(flags.output, flags.files);
  expect_apart(flags.output, files_of(specs, flags.model.model));
  if (flags.output != flags.append && !updates(flags)) expect_new(flags.output, flags.force);
}

/// What the indexes take in the file, as `inspect` counts it; in memory they have room to grow.
std::uint64_t stored_index_bytes(const std::string& path) {
  const ContainerReader file(path);
  std::uint64_t bytes = 0;
  for (const SectionInfo& s : file.sections())
    bytes += s.name.starts_with("select/") && !s.shared ? s.bytes : 0;
  return bytes;
}

/// What was not read, and what the user should know, on stderr.
void say_unread(const SourceText& source) {
  constexpr std::size_t kShown = 10;
  for (const std::string& remark : source.remarks) say(remark);
  for (std::size_t i = 0; i < std::min(kShown, source.unread.size()); ++i)
    say(fmt::format("not read: {}: {}", source.unread[i].path, source.unread[i].why));
  if (source.unread.size() > kShown)
    say(fmt::format("not read: {} more; --json and `lodestone inspect` list them",
                    source.unread.size() - kShown));
}

/// A folder that has grown is often appended in place of being indexed again.
void say_twice(const SourceText& source, std::size_t before) {
  const auto added = source.files.begin() + static_cast<std::ptrdiff_t>(before);
  const auto is_there = [&](const SourceFile& file) {
    return std::any_of(source.files.begin(), added, [&](const SourceFile& f) { return f.path == file.path; });
  };
  const auto first = std::find_if(added, source.files.end(), is_there);
  if (first == source.files.end()) return;
  const auto more = std::count_if(first + 1, source.files.end(), is_there);
  say(fmt::format("{}{} there already and will be there twice", excerpt(first->path),
                  more > 0 ? fmt::format(" and {} more are", more) : " is"));
}

SourceText read_sources(const IndexFlags& flags, const std::optional<Earlier>& earlier) {
  ReadOptions options = flags.reading;
  options.headings = flags.headings == "on"    ? ReadOptions::Headings::on
                     : flags.headings == "off" ? ReadOptions::Headings::off
                                               : ReadOptions::Headings::automatic;
  SourceText source;
  if (!flags.append.empty()) {
    source = earlier->stored.source;
    if (source.text.empty())
      throw InputError(flags.append + ": expected an indexed text with its text in it, found none");
    if (source.files.empty()) {  // of a file that does not say what it was made from
      source.files.push_back(
          {.path = flags.append, .kind = "text", .checksum = {}, .end = source.text.size()});
      source.marks = {{.begin = 0, .page = 0, .line = 1}};
    }
  } else if (earlier) {
    options.before = earlier->stored.source.files;
  }
  append_documents(source, flags.files, options);
  say_unread(source);
  return source;
}

/// What was read, and what it will take.
void say_read(const SourceText& source, std::int64_t tokens, std::int64_t kv_bytes) {
  std::int64_t pages = 0;
  for (const SourceFile& file : source.files) pages += file.pages;
  const std::string files =
      source.files.size() == 1 ? source.files.front().path : fmt::format("{} files", source.files.size());
  say(fmt::format("{}: {}{} tokens, {} on disk without indexes", files,
                  pages > 0 ? fmt::format("{} page{}, ", pages, pages == 1 ? "" : "s") : "", tokens,
                  human_bytes(kv_bytes)));
}

/// Of a text that is added to: it goes on as it began.
IndexedText appended_tokens(const Model& model, const SourceText& source, const Earlier& earlier) {
  IndexedText reading = {.tokens = earlier.head,
                         .first_token = std::ssize(earlier.head),
                         .attachments = earlier.attachments,
                         .remarks = {}};
  const auto text = model.tokenizer().encode(source.text, Tokenizer::Bos::none);
  reading.tokens.insert(reading.tokens.end(), text.begin(), text.end());
  return reading;
}

ContextOptions options_for(const IndexFlags& flags, const Model& model, std::int64_t tokens) {
  ContextOptions options = context_options(flags.common, flags.model);
  options.max_tokens = flags.model.context > 0 ? flags.model.context
                                               : room_for_questions(model, tokens, flags.model.rope_factor);
  return options;
}

/// Whether the file holds some of the text that need not be read again, not just what a template puts in front of any.
bool shares_text(const Earlier& earlier, const Model& model, const IndexFlags& flags,
                 const IndexedText& reading) {
  std::string why;
  const ContextOptions options = options_for(flags, model, std::ssize(reading.tokens));
  return reusable_tokens(earlier.meta, earlier.ids, model, options, reading.tokens, why) >
         reading.first_token;
}

struct DatedText {
  IndexedText reading;
  std::time_t now;  ///< what its chat template takes for today
};

/// What is to be indexed. A chat template may put the day in front: the one of a file that holds some of this text, or
/// of an interrupted reading of it, so that it need not be read again. Else it is today, whatever lies at these places.
DatedText text_to_index(const Model& model, const SourceText& source, const IndexFlags& flags,
                        const std::optional<Earlier>& earlier, const std::filesystem::path& log) {
  const std::time_t today = std::time(nullptr);
  if (!flags.append.empty() && !earlier->head.empty())
    return {appended_tokens(model, source, *earlier), today};
  const std::time_t begun_at = flags.restart ? 0 : PrefillLog::time_of(log).value_or(0);  // 0: there is none
  const auto read_at = [&](const Attachments& before, std::time_t now) {
    return indexed_text(model, chat_options(flags.chat, now), source.text, before,
                        earlier ? earlier->path : "");
  };
  if (earlier && earlier->attachments.contains(DocumentChat::kAttachment)) {
    IndexedText reading = read_at(earlier->attachments, today);
    if (shares_text(*earlier, model, flags, reading) || PrefillLog::begins(log, reading.tokens))
      return {std::move(reading), begun_at > 0 ? begun_at : today};
  }
  if (begun_at > 0) {
    IndexedText reading = read_at({}, begun_at);
    if (PrefillLog::begins(log, reading.tokens)) return {std::move(reading), begun_at};
  }
  return {read_at({}, today), today};
}

/// The file whose text a token belongs to.
std::string file_of_token(const Model& model, const IndexedText& reading, std::int64_t token,
                          const SourceText& source) {
  std::size_t bytes = 0;
  for (std::int64_t i = reading.first_token; i < token; ++i)
    bytes += model.tokenizer().bytes_of(reading.tokens[static_cast<std::size_t>(i)]).size();
  for (const SourceFile& file : source.files)
    if (bytes < file.end) return file.path;
  return source.files.empty() ? std::string() : source.files.back().path;
}

struct Begun {
  Context context;
  std::int64_t kept = 0;      ///< tokens of an earlier file
  std::int64_t restored = 0;  ///< of an interrupted reading
};

/// A context with what is already there of the tokens, and the methods attached.
Context begin_context(const IndexFlags& flags, std::shared_ptr<const Model> model,
                      const ContextOptions& options, const std::vector<Spec>& specs,
                      std::span<const TokenId> tokens, const std::optional<Earlier>& earlier) {
  std::string why;
  if (earlier) {
    try {
      if (auto context = reuse_context(earlier->path, model, options, tokens, specs, why))
        return std::move(*context);
    } catch (const InputError& error) {
      why = error.what();
    }
  }
  Context context(std::move(model), options);
  say_placement(context, flags.common);
  for (const Spec& spec : specs) context.attach(spec);  // refuses what is no fault of the earlier file
  if (earlier) say(fmt::format("{}: nothing of it is kept: {}", earlier->path, why));
  return context;
}

/// Reads what is missing; what is done of it survives an interruption.
void prefill(Context& context, const IndexFlags& flags, std::span<const TokenId> tokens, PrefillLog& log) {
  const auto left = tokens.subspan(static_cast<std::size_t>(context.tokens()));
  if (left.empty()) return;
  Progress progress("prefill", std::ssize(tokens), "tokens", flags.common.progress(),
                    Progress::Cost::growing);
  progress.skip(context.tokens());
  resumable(
      PrefillLog::beside(flags.output), [&] { return log.kept(); },
      [&] {
        try {
          context.prefill(left, [&](std::int64_t done) {
            progress.at(done);
            log.save_at_times(context);
          });
        } catch (const Interrupted&) {
          log.save(context);
          throw;
        }
      });
}

Json list_of(const std::vector<UnreadFile>& unread) {
  Json list = Json::array();
  for (const UnreadFile& file : unread) list.push_back({{"path", file.path}, {"why", file.why}});
  return list;
}

Json list_of(const std::vector<SourceFile>& files) {
  Json list = Json::array();
  for (const SourceFile& file : files)
    list.push_back({{"path", file.path}, {"kind", file.kind}, {"pages", file.pages}});
  return list;
}

/// Says what need not be read again.
void say_kept(const IndexFlags& flags, const Begun& begun, const IndexedText& reading,
              const SourceText& source) {
  const std::int64_t there = begun.context.tokens();
  if (there == 0 || flags.common.quiet) return;
  const bool all = there == std::ssize(reading.tokens);
  const std::string next =
      all ? "nothing is left to read"
          : "reading goes on from " + file_of_token(begun.context.model(), reading, there, source);
  if (begun.restored > 0)
    say(fmt::format("going on after {} tokens that an interrupted reading left; {}", there, next));
  else
    say(fmt::format("{} of {} tokens are kept from before; {}", there, reading.tokens.size(), next));
}

/// Flags that the file decides when nothing else is said.
void take_defaults(IndexFlags& flags, const Earlier& earlier) {
  if (flags.model.model.empty()) flags.model.model = earlier.meta.model_path;
  flags.model.kv_type = name_of(earlier.meta.kv_type);
  if (flags.specs.empty()) flags.specs = earlier.meta.methods;
  if (earlier.meta.rope_factor > 0) flags.model.rope_factor = earlier.meta.rope_factor;
}

/// Another model would read all anew, and its tokenizer would not know the tokens in front of the text.
void expect_its_model(const IndexFlags& flags, const Earlier& earlier, const Model& model) {
  if (earlier.meta.model_fingerprint == model.fingerprint()) return;
  throw InputError(fmt::format(
      "{}: --append: expected the model that read it, '{}', found another in '{}': {}, or index all files "
      "with this "
      "model into another file",
      flags.append, earlier.meta.model_path, flags.model.model,
      earlier.meta.model_path == flags.model.model ? "name the earlier one with -m" : "leave -m out"));
}

/// Before anything is said of a text that will not be read.
void expect_length(const IndexFlags& flags, const Model& model, std::int64_t tokens) {
  const std::int64_t room = flags.model.context;
  if (room > 0 && room < tokens)
    throw InputError(fmt::format(
        "--ctx-size: expected room for the text's {} tokens and for questions, found {}: leave it "
        "out, which makes room",
        tokens, room));
  const auto most = static_cast<std::int64_t>(static_cast<double>(model.config().max_positions) *
                                              std::max(1.0, flags.model.rope_factor));
  if (!flags.append.empty() && tokens > most)
    throw InputError(fmt::format(
        "{}: --append: expected at most the {} tokens that its model reads, found {} with the new "
        "files: index them into a file of their own; `ask` takes several",
        flags.append, most, tokens));
}

void build(Context& context, const IndexFlags& flags) {
  const auto indexed =
      std::ranges::count_if(context.methods(), [](const Spec& spec) { return spec.name != "full"; });
  const std::int64_t steps = indexed * context.model().config().layers;
  Progress progress("indexes", steps, indexed > 1 ? fmt::format("layers of {} methods", indexed) : "layers",
                    flags.common.progress());
  context.build_indexes([&](std::int64_t done) { progress.at(done); });
}

/// Takes `auto` off the specs; whether it was among them.
bool take_auto(std::vector<std::string>& specs) {
  return std::erase_if(specs, [](const std::string& spec) { return parse_auto(spec).has_value(); }) > 0;
}

/// With what `auto` indexes for beside the given specs.
std::vector<Spec> with_automatic(std::vector<Spec> specs, const Model& model, std::int64_t tokens,
                                 const CommonFlags& common) {
  std::vector<std::string> names;
  for (Spec& spec : automatic_methods(model, tokens)) {
    names.push_back(spec.str());
    if (!holds(specs, spec)) specs.push_back(std::move(spec));
  }
  if (!names.empty() && !common.quiet)
    print_remark(
        fmt::format("builds the indexes of {} and measures them, so that `ask` takes the cheapest that "
                    "suits this text: -a names others, -a full none",
                    join(names)));
  return specs;
}

/// What `auto` would take where the text was read, in a sentence.
std::string chosen(const Attachments& attachments, const Context& context) {
  const AutoChoice choice = choose_attention({}, attachments, context.methods(), auto_place(context));
  return choice.spec.str() + ": " + choice.why;
}

void expect_own_log(const PrefillLog& log, const std::filesystem::path& place) {
  if (!log.holds_another()) return;
  throw InputError(fmt::format(
      "{}: expected an interrupted reading of this text, found one of another text, model or "
      "setting, or without the queries that a method learns from: the command that began it goes on with it, "
      "--force replaces it, another -o keeps it",
      place.string()));
}

/// The file and, until it is whole, what an interrupted reading would go on from: hours later would be too late to ask.
void expect_room_for_all(const IndexFlags& flags, const MemoryPlan& plan, std::int64_t log_bytes,
                         const std::filesystem::path& log) {
  const std::int64_t file_bytes = plan.kv + plan.index;
  expect_room(flags.output, static_cast<std::uint64_t>(file_bytes + log_bytes),
              fmt::format("the file {}, and {} more for '{}' until it is whole", human_bytes(file_bytes),
                          human_bytes(log_bytes), log.filename().string()));
}

/// What --json says of a text that is indexed and saved, but for the time that it took.
Json told(const Context& context, const IndexFlags& flags, const IndexedText& reading, const Begun& begun) {
  const auto tokens = std::ssize(reading.tokens);
  return {{"file", flags.output},
          {"tokens", tokens},
          {"tokens_kept", begun.kept + begun.restored},
          {"tokens_read", tokens - begun.kept - begun.restored},
          {"files", list_of(source_of(context).files)},
          {"chat", reading.attachments.contains(DocumentChat::kAttachment)},
          {"unread", list_of(source_of(context).unread)},
          {"kv_bytes", context.kv_bytes()},
          {"index_bytes", stored_index_bytes(flags.output)},
          {"index_memory_bytes", context.index_bytes()},
          {"file_bytes", std::filesystem::file_size(flags.output)}};
}

Json index_text(IndexFlags flags) {
  std::optional<Earlier> earlier;
  // For specs that come from the file alone: the files of typed ones are where they are typed.
  std::vector<std::filesystem::path> folders;
  if (!flags.append.empty()) {
    earlier = read_earlier(flags.append);
    if (flags.specs.empty()) folders = earlier->meta.folders;
    take_defaults(flags, *earlier);
  } else {
    earlier = flags.restart ? std::nullopt : earlier_output(flags);
  }
  const bool automatic =
      take_auto(flags.specs) ||
      (flags.append.empty() ? flags.specs.empty() : earlier->attachments.contains(kAutoAttachment));
  std::vector<Spec> specs = parse_specs(flags.specs, folders);
  check_output(flags, specs);
  const auto starting = start_gpu(flags.common);
  SourceText source = read_sources(flags, earlier);
  const auto model = load_model(flags.common, flags.model);
  if (!flags.append.empty()) expect_its_model(flags, *earlier, *model);
  const auto place = PrefillLog::beside(flags.output);
  const auto [reading, now] = text_to_index(*model, source, flags, earlier, place);
  const auto tokens = std::ssize(reading.tokens);
  expect_length(flags, *model, tokens);
  if (!flags.common.quiet)
    for (const std::string& remark : reading.remarks) say(remark);
  if (automatic) specs = with_automatic(std::move(specs), *model, tokens, flags.common);
  const ContextOptions options = options_for(flags, *model, tokens);
  const MemoryPlan plan = plan_memory(*model, options.kv_type, tokens, specs);
  if (flags.restart) std::filesystem::remove(place);

  auto start = std::chrono::steady_clock::now();
  Begun begun = {begin_context(flags, model, options, specs, reading.tokens, earlier)};
  Context& context = begun.context;
  begun.kept = context.tokens();
  PrefillLog log(place, context, now);
  begun.restored = log.restore(context, reading.tokens);
  if (!flags.force) expect_own_log(log, place);
  expect_room_for_all(flags, plan, log.room(context, tokens), place);
  if (!flags.common.quiet && !flags.append.empty()) say_twice(source, earlier->stored.source.files.size());
  if (!flags.common.quiet) say_read(source, tokens, plan.kv);
  say_kept(flags, begun, reading, source);
  set_source(context, std::move(source), reading.first_token);
  prefill(context, flags, reading.tokens, log);
  const double prefill_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  build(context, flags);
  const double build_seconds = seconds_since(start);
  if (const std::string left = clusters_left_to_host(context); !left.empty() && !flags.common.quiet)
    say(left);
  check_output(flags, specs);  // another may have written it meanwhile
  Attachments attachments = reading.attachments;
  if (automatic) attachments[kAutoAttachment] = {.text = measure_automatic(context)};
  start = std::chrono::steady_clock::now();
  try {
    save_context(context, flags.output, source_of(context).text, attachments);
  } catch (const RunError& error) {  // the disk is full, say
    if (!log.kept()) throw;
    throw RunError(fmt::format("{}; what was read is kept in '{}'", error.what(), place.string()));
  }
  remove_shards(flags.output, {}, RemovedShards::all_others);  // of a text that ranks had indexed
  const double save_seconds = seconds_since(start);
  log.remove();
  Json result = told(context, flags, reading, begun);
  result["prefill_seconds"] = prefill_seconds;
  result["build_seconds"] = build_seconds;
  result["save_seconds"] = save_seconds;
  if (automatic) {
    result["auto"] = parse_json(attachments.at(kAutoAttachment).text, flags.output);
    result["chosen"] = chosen(attachments, context);
  }
  return result;
}

/// What ranks read together: rank 0 reads the files, and tells the others the tokens.
struct SharedReading {
  SourceText source;    ///< of rank 0
  IndexedText reading;  ///< elsewhere the tokens alone
};

SharedReading read_for_ranks(const IndexFlags& flags, const Model& model, const std::vector<Spec>& specs) {
  Ranks& all = *ranks();
  SharedReading shared;
  if (all.rank() == 0) {
    check_output(flags, specs);
    shared.source = read_sources(flags, std::nullopt);
    shared.reading = indexed_text(model, chat_options(flags.chat, std::time(nullptr)), shared.source.text);
    if (!flags.common.quiet)
      for (const std::string& remark : shared.reading.remarks) say(remark);
  }
  auto& tokens = shared.reading.tokens;
  const auto bytes = std::as_bytes(std::span(tokens));
  const std::string said =
      all.broadcast(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  tokens.resize(said.size() / sizeof(TokenId));
  std::memcpy(tokens.data(), said.data(), said.size());
  return shared;
}

Json index_over_ranks(const IndexFlags& flags) {
  const std::vector<Spec> specs = parse_specs(flags.specs);
  if (specs.empty() && !flags.common.quiet)
    print_remark(
        "several ranks measure no method: the text will be asked by full attention; -a names methods to "
        "index for");
  const auto model = load_model(flags.common, flags.model);
  for (const Spec& spec : specs) expect_shared_method(model, spec);
  SharedReading shared = read_for_ranks(flags, *model, specs);
  const auto tokens = std::ssize(shared.reading.tokens);
  expect_length(flags, *model, tokens);
  ContextOptions options = context_options(flags.common, flags.model);
  options.max_tokens = flags.model.context > 0 ? flags.model.context
                                               : room_for_questions(*model, tokens, flags.model.rope_factor);
  auto start = std::chrono::steady_clock::now();
  Progress progress("prefill", tokens, "tokens", flags.common.progress(), Progress::Cost::growing);
  Context context = read_over_ranks(model, options, shared.reading.tokens, specs, *ranks(),
                                    {.chunk_done = [&](std::int64_t done) { progress.at(done); }});
  const double prefill_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  build(context, flags);
  const double build_seconds = seconds_since(start);
  set_source(context, std::move(shared.source), shared.reading.first_token);
  start = std::chrono::steady_clock::now();
  save_shards(context, flags.output, shared.reading.attachments, *ranks());
  const double save_seconds = seconds_since(start);
  std::array<std::int64_t, 3> sums = {ranks()->sent().messages, ranks()->sent().bytes, context.index_bytes()};
  ranks()->sum(sums);
  return {{"file", flags.output},
          {"tokens", tokens},
          {"tokens_read", tokens},
          {"files", list_of(source_of(context).files)},
          {"chat", shared.reading.attachments.contains(DocumentChat::kAttachment)},
          {"unread", list_of(source_of(context).unread)},
          {"prefill_seconds", prefill_seconds},
          {"build_seconds", build_seconds},
          {"save_seconds", save_seconds},
          {"kv_bytes", context.kv_bytes()},
          {"index_bytes", sums[2]},
          {"ranks", {{"count", ranks()->size()}, {"messages", sums[0]}, {"bytes", sums[1]}}}};
}

void run(const IndexFlags& flags) {
  const Json result = ranks() == nullptr ? index_text(flags) : index_over_ranks(flags);
  if (flags.common.json) return print_json(result);
  if (result.contains("chosen") && !flags.common.quiet)
    print_remark("auto takes " + result["chosen"].get<std::string>());
  print_text(fmt::format(
      "{}: {} tokens, KV {}, indexes {}; prefill {:.1f} s, indexes {:.1f} s, file {:.1f} s\n"
      "next: lodestone ask {} \"...\"\n",
      flags.output, result["tokens"].get<std::int64_t>(), human_bytes(result["kv_bytes"]),
      human_bytes(result["index_bytes"]), result["prefill_seconds"].get<double>(),
      result["build_seconds"].get<double>(), result["save_seconds"].get<double>(), as_word(flags.output)));
}

void add_reading_flags(CLI::App& verb, IndexFlags& flags) {
  verb.add_option("-f,--file", flags.files,
                  "a text or document (plain text, Markdown, HTML, PDF, EPUB, DOCX, ODT, source code, CSV: "
                  "known by what it holds), a folder or repository of them, or - for standard input; may be "
                  "repeated")
      ->required()
      ->allow_extra_args(false);
  verb.add_option("--include", flags.reading.include,
                  "of a folder, read only files that match this glob, e.g. '*.md'; may be repeated")
      ->allow_extra_args(false);
  verb.add_option("--exclude", flags.reading.exclude,
                  "of a folder, leave out files that match this glob, e.g. 'build/*'; may be repeated")
      ->allow_extra_args(false);
  verb.add_option("--headings", flags.headings,
                  "whether a line with its path stands in front of a file: on, off, or auto: of files of a "
                  "folder, and of each further one that is no plain text")
      ->check(CLI::IsMember({"auto", "on", "off"}));
}

}  // namespace

void add_index(CLI::App& app) {
  auto flags = std::make_shared<IndexFlags>();
  CLI::App* verb =
      app.add_subcommand("index", "Prefill a text once and write it, with its indexes, to one .lode file");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, false);
  add_sharing_flags(*verb, flags->model.gpus);
  add_reading_flags(*verb, *flags);
  verb->add_option("-o,--output", flags->output,
                   "the .lode file to write; with --append that one, if none is named")
      ->check(output_file());
  verb->add_option("--append", flags->append,
                   "a .lode file whose text goes on with the files: only they are read; its model and type "
                   "of keys stay, and so do its methods unless -a names others");
  add_chat_flags(*verb, flags->chat);
  add_attention_flag(*verb, flags->specs, false);
  verb->get_option("--attention")
      ->description(
          "attention spec, name[:key=value,...], see `lodestone methods`, or auto, the default: a few "
          "methods, measured "
          "on this text so that `ask` takes the one that suits it; may be repeated");
  verb->add_flag("--force", flags->force,
                 "replace an existing file; what has not changed of its text is not read again");
  verb->add_flag("--restart", flags->restart,
                 "read all, whatever an existing file or an interrupted reading holds");
  verb->callback([flags, verb] {
    say_unaudited(flags->common, flags->model, "a text that is indexed is attended fully");
    expect_use(*verb, {"--append", "--restart"}, ranks() == nullptr,
               "expected none over several ranks, which read a text from its beginning, found one");
    if (ranks() != nullptr && take_auto(flags->specs))
      throw InputError(
          "-a auto: expected methods by name over several ranks, which measure none, found auto");
    expect_use(
        *verb,
        {"--kv-type", "--rope-factor", "--restart", "--chat", "--system", "--document-role", "--think"},
        flags->append.empty(), "expected none beside --append, which goes by the file's, found one");
    if (flags->append.empty()) {
      if (flags->model.model.empty()) throw InputError("index: expected a model (-m), found none");
      if (flags->output.empty()) throw InputError("index: expected a file to write (-o), found none");
    }
    if (flags->output.empty()) flags->output = flags->append;
    run(*flags);
  });
}

}  // namespace lode::cli
