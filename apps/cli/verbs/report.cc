// SPDX-License-Identifier: Apache-2.0
// lodestone report: measures what suites ask for, and writes it as one page.
#include "lab/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "base/text.h"
#include "cli.h"
#include "commit.h"
#include "lab/eval/records.h"
#include "lab/eval/settings.h"
#include "lodestone/error.h"
#include "shell_word.h"

namespace lode::cli {

namespace {

namespace fs = std::filesystem;

struct ReportFlags {
  CommonFlags common;
  ModelFlags model;
  std::vector<std::string> suites;
  DatasetFlags dataset;
  std::string samples, haystack, chat = "off", output = "report";
  std::int64_t limit = 0;
  bool quick = false, so_far = false;
  std::string others;  ///< what else was given, as it was written
};

/// What changes results beside model and folder, so that the command on the page makes them again.
std::string other_options(const CLI::App& verb) {
  std::string text;
  for (const CLI::Option* option : verb.get_options()) {
    const std::string name = option->get_name();
    const bool told = name == "--model" || name == "--output" || name == "--so-far" || name == "--json" ||
                      name == "--quiet";
    if (option->count() == 0 || option->get_positional() || told) continue;
    text += " " + name;
    if (option->get_items_expected_max() == 0) continue;  // a flag
    for (const std::string& value : option->results())
      if (!value.empty() || option->get_items_expected_min() > 0) text += " " + as_word(value);
  }
  return text;
}

/// Where shipped suites lie: the papers' tables and figures, which are 'all', and published benchmarks.
std::array<fs::path, 2> suite_folders() {
  return {data_dir() / "suites", data_dir() / "suites" / "benchmarks"};
}

std::vector<fs::path> suites_in(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".toml") paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Shipped suites by their names, others by their paths.
fs::path find_suite(const std::string& name) {
  if (fs::exists(name)) return name;
  std::vector<std::string> names;
  for (const fs::path& folder : suite_folders()) {
    if (fs::path shipped = folder / (name + ".toml"); fs::exists(shipped)) return shipped;
    for (const fs::path& path : suites_in(folder)) names.push_back(path.stem().string());
  }
  throw InputError(fmt::format("report: expected a file, 'all' or a shipped suite out of {}; found '{}'",
                               join(names), excerpt(name)));
}

std::vector<Suite> read_suites(const ReportFlags& flags, Device device) {
  const std::array<fs::path, 2> shipped = suite_folders();
  std::vector<fs::path> paths;
  for (const std::string& name : flags.suites) {
    if (name != "all") {
      paths.push_back(find_suite(name));
      continue;
    }
    const std::vector<fs::path> papers = suites_in(shipped[0]);
    paths.insert(paths.end(), papers.begin(), papers.end());
  }
  std::vector<Suite> suites;
  for (const fs::path& path : paths) {
    suites.push_back(read_suite(path, flags.quick, device == Device::cuda));
    for (const SuiteRun& suite_run : suites.back().runs)
      if (suite_run.kind == RunKind::eval && suite_run.tasks.empty() && flags.samples.empty())
        throw InputError(
            fmt::format("{}: expected --samples FILE, whose questions it asks, found none", suite_run.where));
    if (std::find(shipped.begin(), shipped.end(), path.parent_path()) == shipped.end())
      suites.back().given = path.string();
  }
  return suites;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  return std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now)) > 0 ? text : "";
}

/// Whether a run measured anything: files of answers begin with a line that says only what they are.
bool holds_results(const fs::path& folder) {
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(folder, failed)) {
    if (entry.path().filename() == "effort.jsonl") continue;  // what the work took
    std::ifstream file(entry.path());
    std::string line;
    while (std::getline(file, line))
      if (line.find("\"answers of eval\"") == std::string::npos) return true;
  }
  return false;
}

/// What chat templates take for today: the day that the answers in the folder were begun on, where it has any.
std::time_t begun_in(const fs::path& folder) {
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(folder, failed))
    if (const auto begun = begun_at(entry.path())) return *begun;
  return std::time(nullptr);
}

void run(const ReportFlags& flags) {
  GridOptions options;
  options.context = context_options(flags.common, flags.model);
  const std::vector<Suite> suites = read_suites(flags, options.context.device);
  options.folder = flags.output;
  options.haystack = flags.haystack;
  options.progress = flags.common.progress();
  options.so_far = flags.so_far;
  ModelFlags model_flags = flags.model;
  if (model_flags.model.empty()) model_flags.model = (data_dir() / "models" / "pocket").string();
  LeftOut left_out;
  if (!flags.samples.empty())
    options.samples = dataset_samples(flags.samples, flags.dataset, flags.limit, model_flags.model,
                                      flags.common.quiet, left_out);
  const auto model = load_model(flags.common, model_flags);
  options.chat = chat_of(flags.chat, *model, begun_in(fs::path(flags.output) / "raw"));
  if (!options.samples.empty())
    options.samples = fitting(*model, std::move(options.samples), flags.dataset, options.context,
                              options.chat.get(), flags.common.quiet, left_out);
  MeasurementRunner grid(model, suites, options);
  if (!flags.common.quiet) {
    for (const Skipped& s : grid.skipped()) print_remark("lodestone: skipped " + s.spec + ": " + s.reason);
  }
  const fs::path raw = fs::path(flags.output) / "raw";
  resumable(
      raw, [&] { return holds_results(raw); }, [&] { grid.run(); });
  const std::string model_name = flags.model.model.empty() ? "models/pocket" : flags.model.model;
  const std::string written = fmt::format("-m {} -o {}{}", model_name, flags.output, flags.others);
  const Provenance provenance = {.program = "lodestone report",
                                 .options = written,
                                 .commit = built_commit(),
                                 .machine = machine_name(*model, options.context.device),
                                 .date = today(),
                                 .model = model_name};
  make_report(grid, suites, provenance).write(flags.output);
  Json skipped = Json::array();
  for (const Skipped& s : grid.skipped()) skipped.push_back({{"attention", s.spec}, {"reason", s.reason}});
  const std::string page = (fs::path(flags.output) / "index.html").string();
  if (!flags.common.json) return print_text(page + "\n" + left_out.summary(options.samples.size()));
  Json result = {{"page", page}, {"suites", suites.size()}, {"skipped", skipped}};
  if (!flags.samples.empty()) result["left_out"] = left_out.samples;
  print_json(result);
}

}  // namespace

void add_report(CLI::App& app) {
  auto flags = std::make_shared<ReportFlags>();
  CLI::App& verb = *app.add_subcommand(
      "report", "Reproduce the papers' tables and figures: measure suites and write one page");
  add_common_flags(verb, flags->common);
  add_model_flags(verb, flags->model, false);
  verb.add_option("SUITE", flags->suites, "shipped suites by name, files, or 'all'")->required();
  verb.add_option("-o,--output", flags->output,
                  "folder of index.html, report.md, figures and raw results; what is measured there is not "
                  "measured again")
      ->check(output_folder());
  verb.add_flag("--quick", flags->quick, "fewer samples, lengths and methods, as the suites say");
  verb.add_flag("--so-far", flags->so_far, "measure nothing, write the page from what has been measured");
  verb.add_option("--samples", flags->samples,
                  "your own samples, or a published data set, in place of the suites' tasks and lengths");
  add_dataset_flags(verb, flags->dataset);
  add_chat_flag(verb, flags->chat);
  verb.add_option("--limit", flags->limit, "samples of each task and length of --samples at most; 0 = all")
      ->check(whole_number(0, 1'000'000'000));
  verb.add_option("--haystack", flags->haystack,
                  "folder of text files that tasks are hidden in; without it: built-in prose");
  verb.callback([flags, &verb] {
    flags->others = other_options(verb);
    run(*flags);
  });
}

}  // namespace lode::cli
