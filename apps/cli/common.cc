// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>

#include "base/file.h"
#include "base/printable.h"
#include "base/text.h"
#include "cli.h"
#include "engine/chat/indexed_text.h"
#include "engine/model.h"
#include "gpu/backend.h"
#include "help.h"
#include "io/container.h"
#include "io/safetensors.h"
#include "lab/eval/eval.h"
#include "lab/eval/fit_samples.h"
#include "lab/eval/settings.h"
#include "lab/tasks/datasets.h"
#include "lab/tasks/haystack.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "model/source.h"
#include "ranks.h"

namespace lode::cli {

namespace {

/// By the flag, or since several ranks share the work, which have the CPU.
bool keeps_off_gpu(const CommonFlags& common) {
  return common.device == "cpu" || (common.device == "auto" && ranks() != nullptr);
}

/// A check that parses the whole text as a T within [low, high].
template <class T>
CLI::Validator within(T low, T high, const std::string& kind) {
  const std::string range = fmt::format("{} from {} to {}", kind, low, high);
  return CLI::Validator(
      [=](std::string& text) {
        T value = {};
        const char* last = text.data() + text.size();
        const auto [end, error] = std::from_chars(text.data(), last, value);
        if (error == std::errc() && end == last && value >= low && value <= high) return std::string();
        return "expected " + range + ", found '" + text + "'";
      },
      "");
}

std::string check_device_name(const std::string& name) {
  if (name == "auto" || name == "cpu") return "";
  if (name == "cuda") {
    const GpuInfo gpu = gpu_present();
    return gpu.ok ? "" : "expected auto or cpu, found 'cuda': there is no GPU to use: " + gpu.why;
  }
  return "expected auto, cpu or cuda, found '" + name + "'";
}

/// Why nothing can be made in a folder, as the system says it; empty when it can.
std::string check_writable(const std::filesystem::path& folder) {
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return "";
  return fmt::format("expected a folder that can be written to, found '{}': {}", excerpt(folder.string()),
                     std::strerror(errno));
}

/// Why no file can be made at this path; empty when one can, as far as can be seen before.
std::string check_output_file(const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code failed;
  const fs::path path = fs::absolute(text, failed);
  if (fs::status(path, failed).type() == fs::file_type::none &&
      failed != std::errc::no_such_file_or_directory)
    return fmt::format("expected a file to write, found '{}': {}", excerpt(text), failed.message());
  if (!fs::is_directory(path.parent_path(), failed))
    return fmt::format("expected a file in a folder that exists, found no folder '{}'",
                       excerpt(path.parent_path().string()));
  if (text.empty() || fs::is_directory(path, failed))
    return fmt::format("expected a file to write, found the folder '{}'", excerpt(text));
  if (!fs::exists(path, failed)) return check_writable(path.parent_path());
  if (!fs::is_regular_file(path, failed))
    return fmt::format("expected a file to write, found a device, pipe or socket, '{}'", excerpt(text));
  return "";
}

std::string check_output_folder(const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code failed;
  for (fs::path path = fs::absolute(text, failed);; path = path.parent_path()) {
    if (fs::is_directory(path, failed)) return check_writable(path);
    if (fs::exists(path, failed) || path == path.parent_path())
      return fmt::format("expected a folder or a place for one, found something else at '{}'",
                         excerpt(path.string()));
  }
}

std::string check_bytes(const std::string& text) {
  try {
    parse_bytes(text, "");
    return "";
  } catch (const InputError&) {
    return "expected a size such as 24GiB or 512MiB, found '" + excerpt(text) + "'";
  }
}

/// Whether `path` is the input, "-" being standard input, or a text of that folder. Neither need exist.
bool is_or_holds(const std::string& input, const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code failed;
  const fs::path from = input == "-" ? "/dev/stdin" : input;
  if (input.empty()) return false;
  if (fs::weakly_canonical(from, failed) == path || fs::equivalent(from, path, failed)) return true;
  for (const auto& text : fs::directory_iterator(from, failed))
    if (Haystack::takes(text) && fs::equivalent(text, path, failed)) return true;
  return false;
}

/// Whether `path` is what a model at `place`, a folder or a GGUF file, is read from.
bool is_of_model(const std::filesystem::path& place, const std::filesystem::path& path) {
  std::error_code failed;
  if (!GgufModel::is_file(place) && (!std::filesystem::exists(place / "config.json", failed) ||
                                     !std::filesystem::exists(place / "tokenizer.json", failed)))
    return false;
  const auto files = ModelSource::files_of(place);
  return std::any_of(files.begin(), files.end(),
                     [&](const std::filesystem::path& file) {                             // or would be, when
                       return std::filesystem::weakly_canonical(file, failed) == path ||  // it is written
                              std::filesystem::equivalent(file, path, failed);
                     });
}

}  // namespace

void expect_apart(const std::string& output, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code failed;
  const fs::path path = fs::weakly_canonical(output, failed);
  if (output.empty() || failed) return;
  for (const std::string& input : inputs)
    if (is_or_holds(input, path))
      throw InputError("--output: expected another file than those it is made from, found '" +
                       excerpt(output) + "'");
  // In the folder of the path as given, too, and in that of a model that is read: the files of a model may be
  // links to somewhere else.
  std::vector<fs::path> folders(inputs.begin(), inputs.end());
  folders.insert(folders.end(), {fs::absolute(output, failed).parent_path(), path.parent_path()});
  for (const fs::path& folder : folders)
    if (is_of_model(folder, path))
      throw InputError("--output: expected none of a model's own files, found '" + excerpt(output) + "'");
}

void add_force_flag(CLI::App& verb, bool& force) {
  verb.add_flag("--force", force, "replace an existing file");
}

void expect_new(const std::string& output, bool force) {
  std::error_code failed;
  if (!force && !output.empty() && std::filesystem::exists(output, failed))
    throw InputError(excerpt(output, 4000) + ": this file exists already; --force replaces it");
}

void expect_no_context(const std::string& output) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(output, failed)) return;
  const MappedFile file(output);
  if (is_container(file.bytes()))
    throw InputError("--output: expected no indexed text, found the .lode file '" + excerpt(output) +
                     "' there");
}

std::int64_t room_for_questions(const Model& model, std::int64_t tokens, double rope_factor) {
  constexpr std::int64_t kQuestionRoom = 4096;
  const double factor = rope_factor > 0 ? rope_factor : 1.0;
  const auto most = static_cast<std::int64_t>(static_cast<double>(model.config().max_positions) * factor);
  return std::max(tokens, std::min(most, tokens + kQuestionRoom));
}

std::vector<std::string> files_of(const std::vector<Spec>& specs, const std::string& model) {
  std::vector<std::string> files = {model};
  for (const Spec& spec : specs)
    for (const std::filesystem::path& file : lode::files_of(spec, model)) files.push_back(file.string());
  return files;
}

CLI::Validator output_file() {
  return CLI::Validator([](std::string& text) { return check_output_file(text); }, "");
}

CLI::Validator output_folder() {
  return CLI::Validator([](std::string& text) { return check_output_folder(text); }, "");
}

CLI::Validator byte_size() {
  return CLI::Validator([](std::string& text) { return check_bytes(text); }, "");
}

CLI::Validator whole_number(std::int64_t low, std::int64_t high) {
  return within(low, high, "a whole number");
}

CLI::Validator number(double low, double high) {
  return within(low, high, "a number");
}

void add_common_flags(CLI::App& verb, CommonFlags& flags) {
  verb.add_flag("--json", flags.json, "one JSON object on stdout and nothing else there");
  verb.add_flag("--quiet", flags.quiet, "no progress");
  verb.add_option("--device", flags.device, "auto, cpu or cuda")
      ->check(CLI::Validator(check_device_name, ""));
  // Many more threads than cores wait for one another most of the time.
  const std::int64_t most = std::max<std::int64_t>(64, 4 * std::int64_t{std::thread::hardware_concurrency()});
  verb.add_option("-t,--threads", flags.threads, "threads to use; 0 = all cores")
      ->check(whole_number(0, most));
}

void add_model_flags(CLI::App& verb, ModelFlags& flags, bool model_required) {
  auto* model = verb.add_option("-m,--model", flags.model,
                                "folder with config.json, tokenizer.json and *.safetensors, or a .gguf file");
  if (model_required) model->required();
  verb.add_option("--kv-type", flags.kv_type, "type of cached keys and values: f32, f16, bf16, q8 or q4")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8", "q4"}));
  verb.add_option_function<std::string>(
          "-c,--ctx-size",
          [&flags](const std::string& text) {
            flags.context = parse_count(text, "--ctx-size", 0, std::int64_t{1} << 30);
          },
          "room for context, question and answer in tokens, e.g. 128k; 0 = as much as the text needs")
      ->default_str("0");
  verb.add_option("--rope-factor", flags.rope_factor,
                  "stretch RoPE (yarn) by this factor, for texts longer than the model's context")
      ->check(number(1.0, 1024.0))
      ->default_str("");  // not to stretch
  verb.add_option("--gpu-memory", flags.gpu_memory, "limit of GPU memory, e.g. 24GiB")->check(byte_size());
  verb.add_option("--kv-tier", flags.kv_tier,
                  "where a GPU's keys and values lie: auto (there, if they fit), gpu, or host (searched and "
                  "attended by the CPU beside the GPU's sink and window)")
      ->check(CLI::IsMember({"auto", "gpu", "host"}));
  add_active_memory_flag(verb, flags.active_memory);
  verb.add_option("--audit", flags.audit,
                  "share of sparse attention calls that are also computed exactly, 0 to 1")
      ->check(number(0.0, 1.0));
}

void add_sharing_flags(CLI::App& verb, SharingGpus& gpus) {
  verb.add_option(
          "--tensor-parallel", gpus.tensor_parallel,
          "GPUs of this host that share the model by its KV heads; their number must divide the heads'")
      ->check(whole_number(1, 8));
  verb.add_option("--context-parallel", gpus.context_parallel,
                  "ranges of the text, each on a GPU of its own, or on as many as --tensor-parallel says")
      ->check(whole_number(1, 8));
}

std::vector<int> SharingGpus::numbers() const {
  std::vector<int> all(count() > 1 ? static_cast<std::size_t>(count()) : 0);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void add_active_memory_flag(CLI::App& verb, std::string& size) {
  verb.add_option(
          "--active-memory", size,
          "GPU memory for keys in host memory that searches find token after token, e.g. 64MiB: the GPU "
          "attends them, too")
      ->check(byte_size())
      ->default_str("none");
}

void say_unaudited(const CommonFlags& common, const ModelFlags& flags, const std::string& why) {
  if (flags.audit > 0 && !common.quiet) print_remark("--audit: changes nothing here: " + why);
}

void add_audit_limit_flag(CLI::App& verb, ModelFlags& flags) {
  verb.add_option(
          "--audit-limit", flags.audit_limit,
          "output error, on average over a layer's audited calls, beyond which the layer goes back to "
          "full attention for the rest of an answer")
      ->check(number(0.0, 1e9))
      ->default_str("none");
}

std::optional<double> audit_limit(const ModelFlags& flags) {
  if (flags.audit_limit < 0) return std::nullopt;
  if (flags.audit == 0)
    throw InputError("--audit-limit: expected --audit RATE above 0 beside it, found none");
  return flags.audit_limit;
}

Device device_of(const CommonFlags& common, DType kv_type) {
  if (common.device == "cpu") return Device::cpu;
  const GpuInfo gpu = gpu_present();
  if (!gpu.ok || (common.device != "cuda" && bytes_of(kv_type) == 1)) return Device::cpu;
  if (!keeps_off_gpu(common)) return Device::cuda;
  static std::once_flag said;
  std::call_once(said, [&] {
    if (!common.quiet) print_remark("several ranks work on the CPU: this host's GPU is not used");
  });
  return Device::cpu;
}

std::future<void> start_gpu(const CommonFlags& common) {
  if (keeps_off_gpu(common)) return {};
  try {
    return std::async(std::launch::async, [] { lode::start_gpu(); });
  } catch (const std::system_error&) {  // no thread is to be had: it starts when it is needed
    return {};
  }
}

void expect_gpu(Device device, const std::string& gpu_memory, const std::string& kv_tier,
                const std::string& active_memory, const SharingGpus& gpus) {
  for (const auto& [flag, given] :
       {std::pair("--gpu-memory", !gpu_memory.empty()), std::pair("--kv-tier", kv_tier != "auto"),
        std::pair("--active-memory", !active_memory.empty()),
        std::pair("--tensor-parallel", gpus.tensor_parallel > 1),
        std::pair("--context-parallel", gpus.context_parallel > 1)})
    if (given && device == Device::cpu) {
      const GpuInfo gpu = gpu_present();
      throw InputError(
          gpu.ok ? fmt::format("{}: expected a GPU (--device cuda), found that the CPU computes", flag)
                 : fmt::format("{}: expected a GPU, found none to use: {}", flag, gpu.why));
    }
}

std::int64_t parse_bytes(std::string_view text, std::string_view flag) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1.0},       {"B", 1.0},  {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
      {"TiB", 0x1p40}, {"kB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, text.data() + text.size());
  for (const auto& [name, bytes] : kUnits) {
    if (error == std::errc() && unit == name && value * bytes >= 1 && value * bytes < 0x1p62)
      return static_cast<std::int64_t>(value * bytes);
  }
  throw InputError(fmt::format("{}: expected a size such as 24GiB or 512MiB, found '{}'", flag, text));
}

/// What is kept in files names the model: in JSON, which is UTF-8.
std::shared_ptr<const Model> load_model(const CommonFlags& common, const ModelFlags& flags) {
  std::error_code none;  // of an empty path, which is no model's either
  expect_utf8(std::filesystem::absolute(flags.model, none).string(), "--model: the path");
  auto model = Model::load(flags.model, common.threads);
  if (model->config().text_part && !common.quiet)
    print_remark(flags.model + ": the part that reads text is used; what it has for images is left alone");
  return model;
}

std::function<std::int64_t(std::string_view)> token_count(const std::string& model) {
  return [model, tokenizer = std::shared_ptr<const Tokenizer>()](std::string_view text) mutable {
    if (!tokenizer) tokenizer = std::make_shared<const Tokenizer>(Tokenizer::read(model));
    return std::ssize(tokenizer->encode(text, Tokenizer::Bos::as_template));
  };
}

ContextOptions context_options(const CommonFlags& common, const ModelFlags& flags) {
  ContextOptions options;
  options.kv_type = parse_dtype(flags.kv_type);
  options.device = device_of(common, options.kv_type);
  expect_gpu(options.device, flags.gpu_memory, flags.kv_tier, flags.active_memory, flags.gpus);
  options.gpus = flags.gpus.numbers();
  options.context_parallel = flags.gpus.context_parallel;
  if (!flags.gpu_memory.empty()) options.gpu_memory = parse_bytes(flags.gpu_memory, "--gpu-memory");
  options.kv_tier = parse_kv_tier(flags.kv_tier);
  if (!flags.active_memory.empty())
    options.active_memory = parse_bytes(flags.active_memory, "--active-memory");
  options.max_tokens = flags.context;
  options.audit = flags.audit;
  if (flags.rope_factor > 0) options.rope_factor = flags.rope_factor;
  return options;
}

void say_placement(const Context& context, const CommonFlags& common) {
  const ContextOptions& options = context.options();
  const bool asked =
      options.gpu_memory > 0 || options.kv_tier != KvTier::automatic || options.active_memory > 0;
  const std::string where = context.placement();
  if (asked && !where.empty() && !common.quiet) print_remark(where);
}

void add_attention_flag(CLI::App& verb, std::vector<std::string>& specs, bool required) {
  auto* option =
      verb.add_option("-a,--attention", specs,
                      "attention spec, name[:key=value,...], see `lodestone methods`; may be repeated");
  option->delimiter('\0')->allow_extra_args(false);
  if (required) option->required();
}

void expect_use(const CLI::App& verb, std::initializer_list<std::string> flags, bool used,
                const std::string& why) {
  for (const std::string& flag : flags)
    if (!used && verb.count(flag) > 0) throw InputError(fmt::format("{}: {}", flag, why));
}

void expect_beside(const CLI::App& verb, std::initializer_list<std::string> flags, bool used,
                   const std::string& beside) {
  expect_use(verb, flags, used, fmt::format("expected {} beside it, found none", beside));
}

void say_dense(const std::vector<Spec>& specs, const LocalWindow& dense, const CommonFlags& common) {
  for (const Spec& spec : specs) {
    for (const auto& [key, own, all] : {std::tuple{"sink", spec.dense.sink, dense.sink},
                                        std::tuple{"window", spec.dense.window, dense.window}}) {
      if (spec.text(key) && own != all && !common.quiet)
        print_remark(fmt::format("{}: measured with --{} {}, as all are, not {}", spec.str(), key, all, own));
    }
  }
}

void add_dataset_flags(CLI::App& verb, DatasetFlags& flags) {
  verb.add_option("--format", flags.format,
                  "of the samples: auto, own, ruler, infinitebench, longbench, prefixqa or needle");
  verb.add_option(
      "--prompts", flags.prompts,
      "file of prompt templates by task, such as LongBench's dataset2prompt.json; {context}, {input} and "
      "the samples' other fields but answers go into them");
  verb.add_option(
          "--truncate", flags.truncate,
          "what becomes of samples longer than the model's context or -c: none, they are left out and named, "
          "or middle, they lose the middle of their text, as LongBench has it")
      ->check(CLI::IsMember({"none", "middle"}));
}

std::string LeftOut::summary(std::size_t asked) const {
  if (samples.empty()) return {};
  std::map<std::string, std::int64_t> reasons;
  for (const Json& sample : samples) ++reasons[sample["reason"].get<std::string>()];
  std::string text = fmt::format("Left out: {} of {}\n", samples.size(),
                                 counted(static_cast<std::int64_t>(asked + samples.size()), "sample"));
  for (const auto& [reason, n] : reasons) text += "  " + wrapped(fmt::format("{}: {}", n, reason), 4) + "\n";
  return text;
}

std::vector<Sample> dataset_samples(const std::string& path, const DatasetFlags& flags, std::int64_t limit,
                                    const std::string& model, bool quiet, LeftOut& left_out) {
  Dataset dataset =
      read_dataset(path, parse_dataset_format(flags.format), limit, flags.prompts, token_count(model));
  for (const UnreadSample& bad : dataset.unread) {
    if (!quiet) print_remark("lodestone: " + remark_of(bad));
    left_out.samples.push_back(
        {{"id", bad.id.empty() ? Json() : Json(bad.id)}, {"place", bad.where}, {"reason", bad.reason}});
  }
  return std::move(dataset.samples);
}

std::vector<Sample> fitting(const Model& model, std::vector<Sample> samples, const DatasetFlags& flags,
                            ContextOptions options, const DocumentChat* chat, bool quiet, LeftOut& left_out) {
  if (chat != nullptr)
    options.max_tokens =
        std::max<std::int64_t>(1, most_tokens(model, options) - template_tokens(model, *chat));
  const std::int64_t most = most_tokens(model, options);
  FittedSamples fitted = fit_samples(model, std::move(samples), most, parse_truncate(flags.truncate));
  if (fitted.samples.empty())
    throw InputError(
        fmt::format("--samples: expected prompts of fewer than {} tokens, the model's context or -c, found "
                    "that all are longer, "
                    "'{}' has {}: --truncate middle cuts them",
                    most, excerpt(fitted.left_out.front().id), fitted.left_out.front().tokens));
  if (fitted.cut > 0 && !quiet)
    print_remark(fmt::format("lodestone: {} to fit {} tokens",
                             fitted.cut == 1 ? "1 sample lost its middle"
                                             : fmt::format("{} samples lost their middle", fitted.cut),
                             most));
  const std::string reason = fmt::format("expected fewer than {} tokens, the model's context or -c", most);
  for (const FittedSamples::LeftOut& sample : fitted.left_out) {
    if (!quiet)
      print_remark(fmt::format("lodestone: sample '{}': {}, found {}: left out; --truncate middle cuts it",
                               sample.id, reason, sample.tokens));
    left_out.samples.push_back({{"id", sample.id}, {"tokens", sample.tokens}, {"reason", reason}});
  }
  return std::move(fitted.samples);
}

void add_chat_flag(CLI::App& verb, std::string& chat) {
  verb.add_option(
          "--chat", chat,
          "put context and question into the model's chat template: on, also without a value; auto (where "
          "the model has one); or off, the default: they are given verbatim, as those of LongBench's tasks "
          "of "
          "examples and code always are")
      ->expected(0, 1)
      ->default_str("")
      ->transform(CLI::Validator(
          [](std::string& value) {
            if (value.empty()) value = "on";
            return std::string();
          },
          ""))
      ->check(CLI::IsMember({"auto", "on", "off"}));
}

std::shared_ptr<const DocumentChat> chat_of(const std::string& flag, const Model& model, std::time_t now) {
  if (flag == "off") return nullptr;
  const std::string where = model.path().string() + ": chat template";
  const std::string& source = model.impl().chat_template;
  if (source.empty() && flag == "auto") return nullptr;
  if (source.empty()) throw InputError(where + ": expected one for --chat, found none");
  return std::make_shared<const DocumentChat>(document_chat(model, {.source = source, .now = now}, where));
}

void resumable(const std::filesystem::path& path, const std::function<bool()>& kept,
               const std::function<void()>& work) {
  try {
    work();
  } catch (const Interrupted&) {
    if (kept())
      std::cerr << fmt::format("lodestone: what was done is in {}; the same command goes on from there\n",
                               excerpt(path.string(), 4000));
    throw;
  }
}

std::vector<Spec> parse_specs(const std::vector<std::string>& specs,
                              const std::vector<std::filesystem::path>& folders) {
  std::vector<Spec> parsed;
  for (const std::string& text : specs) {
    expect_utf8(text, "--attention");  // files name it
    parsed.push_back(parse_spec(text, folders));
  }
  return parsed;
}

std::int64_t parse_count(std::string_view text, std::string_view flag, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0, unit = 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view rest(end, text.data() + text.size());
  if (rest == "k" || rest == "K") unit = 1024;
  if (rest == "M") unit = 1024 * 1024;
  if (text == "171k") unit = 1000;  // the length of SAAP's paper is 171,000
  const bool parsed = error == std::errc() && end != text.data() && (rest.empty() || unit > 1);
  if (!parsed || value < low / unit || value > high / unit || value * unit < low || value * unit > high) {
    throw InputError(std::string(flag) + ": expected a whole number from " + std::to_string(low) + " to " +
                     std::to_string(high) + ", with k = 1024 and M = 1024^2, found '" + std::string(text) +
                     "'");
  }
  return value * unit;
}

std::vector<std::int64_t> parse_counts(std::string_view text, std::string_view flag, std::int64_t low,
                                       std::int64_t high) {
  std::vector<std::int64_t> counts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    counts.push_back(parse_count(text.substr(at, comma - at), flag, low, high));
    at = comma + 1;
  }
  return counts;
}

std::string read_text(const std::string& path) {
  std::string text =
      path == "-" ? std::string(std::istreambuf_iterator<char>(std::cin), {}) : read_file(path);
  const std::string where = path == "-" ? "standard input" : path;
  if (text.empty()) throw InputError(where + ": expected a text, found an empty file");
  expect_utf8(text, where);
  return text;
}

bool is_model(const std::string& path) {
  std::error_code failed;
  return std::filesystem::is_directory(path, failed) || GgufModel::is_file(path);
}

bool is_artefact(const std::string& path) {
  if (std::filesystem::path(path).extension() == ".safetensors") return true;
  const MappedFile file(path);
  return is_safetensors(file.bytes());
}

void expect_context(const std::string& path) {
  const MappedFile file(path);
  if (is_container(file.bytes())) return;
  const std::size_t bytes = file.bytes().size();
  const std::string_view begin(reinterpret_cast<const char*>(file.bytes().data()), bytes);
  throw InputError(fmt::format(
      "{}: expected a model folder, a GGUF file, a .lode file, a .safetensors file or a plan, found {}", path,
      bytes == 0 ? "an empty file"
                 : fmt::format("{} bytes that begin with '{}'", bytes, excerpt(begin, 16))));
}

void print_text(std::string_view text) {
  print_bytes(printable(text));
}

void print_bytes(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw RunError("cannot write to standard output");
  }
}

void print_remark(std::string_view remark) {
  std::fprintf(stderr, "%s\n", printable(remark).c_str());
}

namespace {

/// What is measured or computed has no more than 9 digits that mean something: 0.09006751600000001 is 0.090067516. Every
/// float stays what it is. Large numbers may be times since 1970, which have more.
void round_numbers(Json& value) {
  constexpr double kLarge = 1e9;
  if (value.is_structured())
    for (Json& member : value) round_numbers(member);
  if (value.is_number_float() && std::abs(value.get<double>()) < kLarge)
    value = std::strtod(fmt::format("{:.9g}", value.get<double>()).c_str(), nullptr);
}

}  // namespace

void print_json(Json result) {
  round_numbers(result);
  print_bytes(result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

const char* program_version() {
  return LODESTONE_VERSION;
}

std::filesystem::path data_dir() {
  namespace fs = std::filesystem;
  std::vector<fs::path> candidates;
  const char* set = std::getenv("LODESTONE_DATA");
  if (set != nullptr && !fs::exists(fs::path(set) / "models" / "pocket" / "config.json"))
    throw InputError(
        fmt::format("LODESTONE_DATA: expected a folder with models/pocket in it, found '{}'", excerpt(set)));
  if (set != nullptr) candidates.emplace_back(set);
  std::error_code failed;
  const fs::path program = fs::read_symlink("/proc/self/exe", failed).parent_path();
  candidates.push_back(program / ".." / "share" / "lodestone");
  candidates.push_back(program / ".." / "..");  // build/release below the source tree
  candidates.emplace_back(LODESTONE_SOURCE_DIR);
  for (const fs::path& candidate : candidates) {
    if (fs::exists(candidate / "models" / "pocket" / "config.json")) return fs::weakly_canonical(candidate);
  }
  throw InputError(
      "the shipped model was not found: expected models/pocket beside the program; name another model with "
      "-m, or set "
      "LODESTONE_DATA to the folder that holds models/pocket");
}

}  // namespace lode::cli
