// SPDX-License-Identifier: Apache-2.0
// lodestone index: prefill a text once, build the indexes that the specs need, write one `.lode` file.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <iostream>

#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "engine/memory.h"
#include "io/container.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "model/config.h"

namespace lode::cli {

namespace {

struct IndexFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> files;
  ReadOptions reading;
  std::string headings = "auto", output;
  std::vector<std::string> specs;
  bool force = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A line for people; nothing in it that a terminal would obey.
void say(const std::string& line) {
  std::cerr << excerpt(line, 1000) << "\n";
}

void check_output(const IndexFlags& flags, const std::vector<Spec>& specs) {
  expect_apart(flags.output, flags.files);
  expect_apart(flags.output, files_of(specs, flags.model.model));
  if (std::filesystem::exists(flags.output) && !flags.force) {
    throw InputError(flags.output + ": this file exists already; --force replaces it");
  }
}

/// What the indexes take in the file, as `inspect` counts it; in memory they have room to grow.
std::uint64_t stored_index_bytes(const std::string& path) {
  const ContainerReader file(path);
  std::uint64_t bytes = 0;
  for (const SectionInfo& s : file.sections())
    bytes += s.name.starts_with("select/") && !s.shared ? s.bytes : 0;
  return bytes;
}

/// What is read, and on stderr what is not, and what the user should know.
SourceText read_sources(const IndexFlags& flags) {
  constexpr std::size_t kShown = 10;
  ReadOptions options = flags.reading;
  options.headings = flags.headings == "on"    ? ReadOptions::Headings::on
                     : flags.headings == "off" ? ReadOptions::Headings::off
                                               : ReadOptions::Headings::automatic;
  SourceText source = read_documents(flags.files, options);
  for (const std::string& remark : source.remarks) say(remark);
  for (std::size_t i = 0; i < std::min(kShown, source.unread.size()); ++i)
    say(fmt::format("not read: {}: {}", source.unread[i].path, source.unread[i].why));
  if (source.unread.size() > kShown)
    say(fmt::format("not read: {} more; --json and `lodestone inspect` list them",
                    source.unread.size() - kShown));
  return source;
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

Json index_text(const IndexFlags& flags) {
  const std::vector<Spec> specs = parse_specs(flags.specs);
  check_output(flags, specs);
  SourceText source = read_sources(flags);
  const auto model = load_model(flags.common, flags.model);
  const std::vector<TokenId> tokens = model->tokenizer().encode(source.text, Tokenizer::Bos::as_template);
  ContextOptions options = context_options(flags.common, flags.model);
  options.max_tokens = flags.model.context > 0
                           ? flags.model.context
                           : room_for_questions(*model, std::ssize(tokens), flags.model.rope_factor);
  expect_room(flags.output,
              static_cast<std::uint64_t>(plan_memory(*model, options.kv_type, std::ssize(tokens), {}).kv));

  Context context(model, options);
  say_placement(context, flags.common);
  set_source(context, std::move(source), std::ssize(model->tokenizer().prefix()));
  for (const Spec& spec : specs) context.attach(spec);
  auto start = std::chrono::steady_clock::now();
  {
    Progress progress("prefill", static_cast<std::int64_t>(tokens.size()), "tokens", flags.common.progress(),
                      Progress::Cost::growing);
    context.prefill(tokens, [&](std::int64_t done) { progress.at(done); });
  }
  const double prefill_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  {
    const auto steps = static_cast<std::int64_t>(specs.size()) * model->config().layers;
    Progress progress("indexes", steps, "layers", flags.common.progress());
    context.build_indexes([&](std::int64_t done) { progress.at(done); });
  }
  const double build_seconds = seconds_since(start);
  check_output(flags, specs);  // another may have written it meanwhile
  context.save(flags.output, source_of(context).text);
  return {{"file", flags.output},
          {"tokens", tokens.size()},
          {"files", list_of(source_of(context).files)},
          {"unread", list_of(source_of(context).unread)},
          {"prefill_seconds", prefill_seconds},
          {"build_seconds", build_seconds},
          {"kv_bytes", context.kv_bytes()},
          {"index_bytes", stored_index_bytes(flags.output)},
          {"index_memory_bytes", context.index_bytes()},
          {"file_bytes", std::filesystem::file_size(flags.output)}};
}

void run(const IndexFlags& flags) {
  const Json result = index_text(flags);
  if (flags.common.json) return print_json(result);
  print_text(
      fmt::format("{}: {} tokens, KV {}, indexes {}; prefill {:.1f} s, indexes {:.1f} s\n"
                  "next: lodestone ask {} \"...\"\n",
                  flags.output, result["tokens"].get<std::int64_t>(), human_bytes(result["kv_bytes"]),
                  human_bytes(result["index_bytes"]), result["prefill_seconds"].get<double>(),
                  result["build_seconds"].get<double>(), flags.output));
}

}  // namespace

void add_index(CLI::App& app) {
  auto flags = std::make_shared<IndexFlags>();
  CLI::App* verb =
      app.add_subcommand("index", "Prefill a text once and write it, with its indexes, to one .lode file");
  add_common_flags(*verb, flags->common);
  add_model_flags(*verb, flags->model, true);
  verb->add_option(
          "-f,--file", flags->files,
          "a text or document (plain text, Markdown, HTML, PDF, EPUB, DOCX, ODT, source code, CSV: known by "
          "what it holds), a folder or repository of them, or - for standard input; may be repeated")
      ->required()
      ->allow_extra_args(false);
  verb->add_option("--include", flags->reading.include,
                   "of a folder, read only files that match this glob, e.g. '*.md'; may be repeated")
      ->allow_extra_args(false);
  verb->add_option("--exclude", flags->reading.exclude,
                   "of a folder, leave out files that match this glob, e.g. 'build/*'; may be repeated")
      ->allow_extra_args(false);
  verb->add_option("--headings", flags->headings,
                   "whether a line with its path stands in front of a file: on, off, or auto: of files of a "
                   "folder, and "
                   "of each further one that is no plain text")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  verb->add_option("-o,--output", flags->output, "the .lode file to write")->required()->check(output_file());
  add_attention_flag(*verb, flags->specs, false);
  verb->add_flag("--force", flags->force, "replace an existing file");
  verb->callback([flags] {
    say_unaudited(flags->common, flags->model, "a text that is indexed is attended fully");
    run(*flags);
  });
}

}  // namespace lode::cli
