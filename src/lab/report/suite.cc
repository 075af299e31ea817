// SPDX-License-Identifier: Apache-2.0
#include "lab/report/suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <utility>

#include "base/file.h"
#include "base/text.h"
#include "lab/report/toml.h"
#include "lab/studies/saap_variants.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "model/config.h"

namespace lode {

namespace {

constexpr std::array<std::pair<std::string_view, RunKind>, 9> kKinds = {{{"eval", RunKind::eval},
                                                                         {"probe", RunKind::probe},
                                                                         {"recall", RunKind::recall},
                                                                         {"clusters", RunKind::clusters},
                                                                         {"key-query", RunKind::key_query},
                                                                         {"drift", RunKind::drift},
                                                                         {"training", RunKind::training},
                                                                         {"attention", RunKind::attention},
                                                                         {"decode", RunKind::decode}}};

struct ShowName {
  std::string_view name;
  Show show;
  std::vector<RunKind> kinds;  ///< empty = any
};

const std::vector<ShowName>& show_names() {
  static const std::vector<ShowName> names = {
      {"table", Show::table, {}},
      {"score-density", Show::score_density, {RunKind::eval}},
      {"score-selectivity", Show::score_selectivity, {RunKind::eval}},
      {"score-length", Show::score_length, {RunKind::eval}},
      {"score-time", Show::score_time, {RunKind::eval}},
      {"score-tasks", Show::score_tasks, {RunKind::eval}},
      {"far-keys-table", Show::far_keys_table, {RunKind::eval}},
      {"far-keys-budget", Show::far_keys_budget, {RunKind::eval}},
      {"needle-map", Show::needle_map, {RunKind::eval}},
      {"recovered-density", Show::recovered_density, {RunKind::probe}},
      {"error-density", Show::error_density, {RunKind::probe}},
      {"error-selectivity", Show::error_selectivity, {RunKind::probe}},
      {"mass-selectivity", Show::mass_selectivity, {RunKind::probe}},
      {"head-maps", Show::head_maps, {RunKind::probe}},
      {"recall-length", Show::recall_length, {RunKind::recall}},
      {"keys-length", Show::keys_length, {RunKind::recall}},
      {"cluster-map", Show::cluster_map, {RunKind::clusters}},
      {"axes", Show::axes, {RunKind::key_query}},
      {"dot-products", Show::dot_products, {RunKind::key_query}},
      {"cluster-shares", Show::cluster_shares, {RunKind::key_query}},
      {"search", Show::search, {RunKind::key_query}},
      {"distance", Show::distance, {RunKind::key_query}},
      {"deviations", Show::deviations, {RunKind::drift}},
      {"captured", Show::captured, {RunKind::training}},
      {"latency-bars", Show::latency_bars, {RunKind::attention}},
      {"latency-length", Show::latency_length, {RunKind::attention, RunKind::decode}}};
  return names;
}

bool yes_or_no(const TomlTable& table, std::string_view key) {
  const std::string text = table.text(key).value_or("no");
  if (text == "yes" || text == "no") return text == "yes";
  throw InputError(
      fmt::format("{}: '{}': expected \"yes\" or \"no\", found '{}'", table.where(key), key, excerpt(text)));
}

RunKind parse_kind(const TomlTable& table) {
  const std::string text = table.text("kind").value_or("");
  std::vector<std::string> valid;
  for (const auto& [name, kind] : kKinds) {
    if (name == text) return kind;
    valid.emplace_back(name);
  }
  throw InputError(fmt::format("{}: 'kind': expected one of {}; found '{}'", table.where("kind"), join(valid),
                               excerpt(text)));
}

Show parse_show(const std::string& text, RunKind kind, const TomlTable& table) {
  std::vector<std::string> valid;
  for (const ShowName& s : show_names()) {
    if (!s.kinds.empty() && std::find(s.kinds.begin(), s.kinds.end(), kind) == s.kinds.end()) continue;
    if (s.name == text) return s.show;
    valid.emplace_back(s.name);
  }
  throw InputError(fmt::format("{}: 'show': expected, for {}, any of {}; found '{}'", table.where("show"),
                               name_of(kind), join(valid), excerpt(text)));
}

/// Reads keys of a [[run]]; those named quick_KEY stand in for KEY in a quick report, others named gpu_KEY on
/// a GPU.
class RunReader {
 public:
  RunReader(const TomlTable& top, const TomlTable& table, bool quick, bool gpu)
      : top_(top), table_(table), quick_(quick), gpu_(gpu) {}

  SuiteRun read() {
    SuiteRun run;
    run.kind = parse_kind(table_);
    run.where = table_.where();
    run.title = table_.text("title").value_or("");
    run.dense = table_.text("dense").value_or(run.kind == RunKind::eval ? "sink=1,window=511" : "");
    run.seed = static_cast<std::uint64_t>(table_.integer("seed", 0, std::int64_t{1} << 53).value_or(7));
    if (has_methods(run.kind)) read_methods(run);
    const bool of_samples = run.kind == RunKind::eval && yes_or_no(table_, "needs_samples");
    for (const std::string& text : of_samples ? std::vector<std::string>{} : required("lengths"))
      run.lengths.push_back(parse_length(text, table_.where("lengths")));
    for (const std::string& text : table_.list("show").value_or(std::vector<std::string>{"table"}))
      run.show.push_back(parse_show(text, run.kind, table_));
    if (run.kind == RunKind::eval) read_eval(run, of_samples);
    if (run.kind == RunKind::recall) {
      run.top = table_.integer("top", 1, 1'000'000).value_or(run.top);
      run.queries = table_.integer("queries", 1, 1'000'000).value_or(run.queries);
    }
    if (run.kind == RunKind::drift || run.kind == RunKind::training) {
      run.texts = integer("texts", 2, 1000, run.kind == RunKind::drift ? run.texts : 6);
      if (run.kind == RunKind::training) read_training(run);
    }
    if (run.kind == RunKind::attention || run.kind == RunKind::decode) read_bench(run);
    table_.check_all_used();
    return run;
  }

 private:
  /// A spec that nobody can run is found before anything is measured; whether this model can, a grid knows.
  void read_methods(SuiteRun& run) {
    for (const std::string& label : required("methods")) {
      naming(where_of_methods() + ": 'methods'", [&] {
        run.methods.push_back({label, with_dense(label, run.dense, run.kind)});
        parse_spec(run.methods.back().spec);
      });
    }
  }

  std::string where_of_methods() const {
    const TomlTable& from = table_.list("methods") || table_.list("quick_methods") ? table_ : top_;
    const bool quick = quick_ && from.list("quick_methods"), on_gpu = gpu_ && table_.list("gpu_methods");
    return quick ? from.where("quick_methods") : on_gpu ? table_.where("gpu_methods") : from.where("methods");
  }

  void read_eval(SuiteRun& run, bool of_samples) {
    if (!of_samples) run.tasks = required("tasks");
    const auto protocols = table_.list("protocols").value_or(std::vector<std::string>{"context-dense"});
    for (const std::string& text : protocols)
      run.protocols.push_back(Protocol::parse(text, table_.where("protocols") + ": 'protocols'"));
    run.samples = integer("samples", 1, 1'000'000, run.samples);
    run.questions = integer("questions", 0, 1000, 0);
    read_shared(run);
  }

  void read_shared(SuiteRun& run) {
    const std::string key = key_of("shared", [&](const std::string& k) { return table_.text(k); });
    const auto shared = table_.text(key);
    if (!shared) return;
    const std::string where = fmt::format("{}: '{}', unless it is \"all\"", table_.where(key), key);
    run.shared = *shared == "all" ? kSharedAll : parse_length(*shared, where);
    if (run.shared == kSharedAll && run.questions == 0)
      throw InputError(fmt::format(
          "{}: '{}': expected 'questions' beside \"all\", for texts are as many as samples / questions; "
          "found none",
          table_.where(key), key));
  }

  void read_training(SuiteRun& run) {
    run.steps = integer("steps", 1, 1'000'000, run.steps);
    run.variants = required("variants");
    for (const std::string& variant : run.variants)
      naming(table_.where("variants") + ": 'variants'", [&] { check_saap_variant(variant); });
  }

  /// The key that counts here: quick_KEY, gpu_KEY or KEY. `get` is asked for all three, so that none is taken
  /// for a key that nobody knows.
  std::string key_of(const std::string& key, const auto& get) const {
    const bool has_quick = get("quick_" + key).has_value(), has_gpu = get("gpu_" + key).has_value();
    get(key);
    return (quick_ && has_quick ? "quick_" : gpu_ && has_gpu ? "gpu_" : "") + key;
  }

  std::int64_t integer(const std::string& key, std::int64_t low, std::int64_t high,
                       std::int64_t otherwise) const {
    const auto get = [&](const std::string& k) { return table_.integer(k, low, high); };
    return get(key_of(key, get)).value_or(otherwise);
  }

  void read_bench(SuiteRun& run) {
    run.shape = table_.text("shape").value_or(run.shape);
    naming(table_.where("shape") + ": 'shape'", [&] { named_shape(run.shape); });
    run.batch = table_.integer("batch", 1, 1024).value_or(1);
    run.query_tokens = table_.integer("queries", 1, 4096).value_or(1);
    run.keep = table_.number("keep", 0.0, 1.0);
    if (run.kind != RunKind::decode) return;
    run.without_cache = yes_or_no(table_, "without_cache");
    if (const auto tier = table_.text("kv_tier"))
      naming(table_.where("kv_tier") + ": 'kv_tier'", [&] {
        run.kv_tier = parse_kv_tier(*tier);
        if (run.kv_tier != KvTier::host)
          throw InputError(
              fmt::format("expected host, found {}: without it keys and values lie where "
                          "report's --kv-tier says",
                          *tier));
      });
  }

  std::vector<std::string> required(const std::string& key) {
    auto usual = table_.list(key);
    auto quick = table_.list("quick_" + key);
    if (key == "methods" && !usual && !quick) {  // those of all runs
      usual = top_.list(key);
      quick = top_.list("quick_" + key);
    }
    auto on_gpu = table_.list("gpu_" + key);
    auto& chosen = quick_ && quick ? quick : gpu_ && on_gpu ? on_gpu : usual;
    if (!chosen || chosen->empty())
      throw InputError(fmt::format("{}: expected a list '{}' that is not empty", table_.where(key), key));
    std::set<std::string> seen;
    for (const std::string& item : *chosen) {
      if (!seen.insert(item).second)
        throw InputError(fmt::format("{}: '{}': '{}' occurs twice", table_.where(key), key, excerpt(item)));
    }
    return *chosen;
  }

  const TomlTable &top_, &table_;
  bool quick_, gpu_;
};

}  // namespace

std::string_view name_of(RunKind kind) {
  for (const auto& [name, k] : kKinds) {
    if (k == kind) return name;
  }
  return "";
}

bool has_methods(RunKind kind) {
  return kind != RunKind::key_query && kind != RunKind::drift && kind != RunKind::training;
}

void naming(const std::string& where, const std::function<void()>& body) {
  try {
    body();
  } catch (const InputError& error) {
    throw InputError(where + ": " + error.what());
  }
}

std::int64_t parse_length(std::string_view text, std::string_view where) {
  std::int64_t value = 0;
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string_view unit(end, static_cast<std::size_t>(last - end));
  const std::int64_t factor = unit.empty() ? 1 : unit == "k" ? 1024 : unit == "M" ? 1024 * 1024 : 0;
  if (error != std::errc() || factor == 0 || value < 1 || value > (std::int64_t{1} << 30) / factor) {
    throw InputError(fmt::format(
        "{}: expected lengths such as \"4k\" with k = 1024 and M = 1024^2, at most 1024M, found '{}'", where,
        excerpt(text)));
  }
  return value * factor;
}

std::int64_t samples_at(const SuiteRun& run, std::int64_t length) {
  if (length <= kFullSamples) return run.samples;
  return std::max((run.samples + 3) / 4, std::min(run.samples, run.questions));
}

std::int64_t shared_texts(const SuiteRun& run, std::int64_t length) {
  const std::int64_t most = std::max<std::int64_t>(1, run.shared / length), samples = samples_at(run, length);
  const bool follows = run.shared == kSharedAll || (run.questions > 0 && run.samples > run.questions);
  if (!follows) return most;
  return std::min(most, (samples + run.questions - 1) / run.questions);
}

std::string with_dense(std::string_view spec, std::string_view dense, RunKind kind) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  if (dense.empty() || name == "full") return std::string(spec);
  std::string given = spec.size() > name.size() ? std::string(spec.substr(name.size() + 1)) : "";
  const std::string before = "," + given;
  const bool preset = before.find(",preset=") != std::string::npos,
             alike = kind == RunKind::probe || kind == RunKind::recall,
             // The text's end, which does not slide.
      own_window = kind == RunKind::eval && find_method(name).dense.from_context;
  for (std::size_t at = 0; at <= dense.size();) {
    const std::size_t comma = std::min(dense.find(',', at), dense.size());
    const std::string_view pair = dense.substr(at, comma - at);
    const std::string key = "," + std::string(pair.substr(0, pair.find('='))) + "=";
    const bool layers = key == ",dense_layers=";
    const bool keeps = (preset && (!alike || layers)) || (own_window && !layers);
    if (!keeps && before.find(key) == std::string::npos)
      given += (given.empty() ? "" : ",") + std::string(pair);
    at = comma + 1;
  }
  return given.empty() ? std::string(name) : fmt::format("{}:{}", name, given);
}

Suite parse_suite(std::string_view text, std::string_view where, std::string_view name, bool quick,
                  bool gpu) {
  const std::vector<TomlTable> tables = parse_toml(text, where);
  Suite suite = {.name = std::string(name), .given = std::string(name)};
  const TomlTable& top = tables.front();
  const auto title = top.text("title");
  if (!title || title->empty()) throw InputError(fmt::format("{}: expected a 'title' at its top", where));
  suite.title = *title;
  suite.source = top.text("source").value_or("");
  suite.note = top.text("note").value_or("");
  suite.ranking = yes_or_no(top, "ranking");
  for (std::size_t i = 1; i < tables.size(); ++i) {
    if (tables[i].name != "run")
      throw InputError(
          fmt::format("{}: expected [[run]], found [[{}]]", tables[i].where(), excerpt(tables[i].name)));
    suite.runs.push_back(RunReader(top, tables[i], quick, gpu).read());
    suite.runs.back().suite = suite.name;
  }
  top.check_all_used();
  if (suite.runs.empty())
    throw InputError(fmt::format("{}: expected at least one [[run]], found none", where));
  return suite;
}

Suite read_suite(const std::filesystem::path& path, bool quick, bool gpu) {
  return parse_suite(read_file(path, std::size_t{1} << 20), path.string(), path.stem().string(), quick, gpu);
}

}  // namespace lode
