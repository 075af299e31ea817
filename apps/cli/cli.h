// SPDX-License-Identifier: Apache-2.0
// What the verbs share: flags, how they are registered, and how results and errors leave the program.
//
// A verb is one file with one function add_NAME(CLI::App&): it declares its flags in a struct that
// lives as long as the program and registers what to run. It returns by finishing, or throws InputError (exit
// 2), RunError (exit 1) or Interrupted (exit 130). stdout carries the result alone, progress and remarks go
// to stderr.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lodestone/engine.h"
#include "text/chat_template.h"
#include "text/question_template.h"

namespace lode {
struct Sample;
}

namespace lode::cli {

/// Flags that every verb takes.
struct CommonFlags {
  bool json = false;
  bool quiet = false;
  std::string device = "auto";
  int threads = 0;
  Progress::Mode progress() const { return quiet ? Progress::Mode::quiet : Progress::Mode::automatic; }
};
void add_common_flags(CLI::App& verb, CommonFlags& flags);

/// GPUs of this host that share the model, the text, or both.
struct SharingGpus {
  int tensor_parallel = 1;   ///< shares of the model's KV heads
  int context_parallel = 1;  ///< ranges of the text
  int count() const { return tensor_parallel * context_parallel; }
  /// The first `count()`; none for one, which shares with nobody.
  std::vector<int> numbers() const;
};

/// Flags of verbs that run a model.
struct ModelFlags {
  std::string model;
  std::string kv_type = "f16";
  std::int64_t context = 0;  ///< -c: tokens of room; 0 = as many as the text needs
  double rope_factor = 0;    ///< yarn scaling asked for by the user; 0 = none
  std::string gpu_memory, kv_tier = "auto", active_memory;
  SharingGpus gpus;
  double audit = 0;         ///< share of sparse attention calls that are also computed exactly; 0 = none
  double audit_limit = -1;  ///< error of a layer beyond which it attends fully; below 0 = none
};
/// `model_required`: -m must be given (otherwise the verb finds the model itself).
void add_model_flags(CLI::App& verb, ModelFlags& flags, bool model_required);
/// A text and some room for questions about it, as far as the model's context goes, `rope_factor` times as
/// far where that is above 0.
std::int64_t room_for_questions(const Model& model, std::int64_t tokens, double rope_factor);
/// Every verb that runs a model takes --audit; says on stderr that it changes nothing in one without sparse
/// answers, and `why`.
void say_unaudited(const CommonFlags& common, const ModelFlags& flags, const std::string& why);
/// "--audit-limit ERR", of verbs that give answers, and what it says; InputError without --audit.
void add_audit_limit_flag(CLI::App& verb, ModelFlags& flags);
std::optional<double> audit_limit(const ModelFlags& flags);

/// The device that --device names. `auto` is the GPU where there is one that can hold keys of this type; several
/// ranks have the CPU, with a remark. `cuda` without a GPU was refused when the flag was read.
Device device_of(const CommonFlags& common, DType kv_type);
/// Starts the GPU that --device allows beside what the caller does until the result goes.
std::future<void> start_gpu(const CommonFlags& common);
/// Refuses flags of a GPU's memory where there is none to use.
void expect_gpu(Device device, const std::string& gpu_memory, const std::string& kv_tier,
                const std::string& active_memory, const SharingGpus& gpus = {});
/// "--tensor-parallel N" and "--context-parallel N".
void add_sharing_flags(CLI::App& verb, SharingGpus& gpus);
std::shared_ptr<const Model> load_model(const CommonFlags& common, const ModelFlags& flags);
/// Tokens of a prompt by the model in this folder, whose tokenizer is read when something is counted.
std::function<std::int64_t(std::string_view)> token_count(const std::string& model);
ContextOptions context_options(const CommonFlags& common, const ModelFlags& flags);

/// Says on stderr where keys and values lie and what fits, when the user asked for a limit or a place.
void say_placement(const Context& context, const CommonFlags& common);

/// "--active-memory SIZE" of a GPU beside keys and values in host memory.
void add_active_memory_flag(CLI::App& verb, std::string& size);

/// "24GiB", "512MiB", "8GB" or plain bytes; InputError otherwise.
std::int64_t parse_bytes(std::string_view text, std::string_view flag);

/// "-a SPEC", repeatable.
void add_attention_flag(CLI::App& verb, std::vector<std::string>& specs, bool required);
std::vector<Spec> parse_specs(const std::vector<std::string>& specs,
                              const std::vector<std::filesystem::path>& folders = {});

/// Flags that mean nothing here are refused, never ignored: those of `flags` that were given, unless `used`.
/// `why` is what the message says of each: "expected ..., found ...".
void expect_use(const CLI::App& verb, std::initializer_list<std::string> flags, bool used,
                const std::string& why);
/// Likewise, of flags that another one gives their meaning.
void expect_beside(const CLI::App& verb, std::initializer_list<std::string> flags, bool used,
                   const std::string& beside);
/// Of comparisons whose sink and window are flags, alike for all: says on stderr what specs say otherwise.
void say_dense(const std::vector<Spec>& specs, const LocalWindow& dense, const CommonFlags& common);

/// "--format NAME", "--prompts FILE" and "--truncate middle" of samples that may be published data sets.
struct DatasetFlags {
  std::string format = "auto", prompts, truncate = "none";
};
void add_dataset_flags(CLI::App& verb, DatasetFlags& flags);
/// Samples that are not asked, each with its reason, as --json has them.
struct LeftOut {
  Json samples = Json::array();
  /// How many there are beside `asked` others, and why, for a reader; empty where there are none.
  std::string summary(std::size_t asked) const;
};
/// The samples of a file; says on stderr which ones of a published data set are bad, and so left out.
std::vector<Sample> dataset_samples(const std::string& path, const DatasetFlags& flags, std::int64_t limit,
                                    const std::string& model, bool quiet, LeftOut& left_out);
/// Says on stderr which samples were cut, and which were left out because they are longer than the model's context,
/// where `chat` takes its part of that; InputError when all are.
std::vector<Sample> fitting(const Model& model, std::vector<Sample> samples, const DatasetFlags& flags,
                            ContextOptions options, const DocumentChat* chat, bool quiet, LeftOut& left_out);

/// "--chat [auto|on|off]": whether samples are put into the model's chat template.
void add_chat_flag(CLI::App& verb, std::string& chat);
/// The template that the flag asks for; null: contexts and questions are given verbatim. Templates take `now` for today.
std::shared_ptr<const DocumentChat> chat_of(const std::string& flag, const Model& model, std::time_t now);

/// Checks of flags. CLI11's own let NaN pass, and integers that wrap around.
CLI::Validator whole_number(std::int64_t low, std::int64_t high);
CLI::Validator number(double low, double high);
CLI::Validator byte_size();
/// A file, or a folder, that can be written as far as can be seen beforehand: long work does not end in a
/// surprise.
CLI::Validator output_file();
CLI::Validator output_folder();
/// InputError for an output, "" or a path, that is one of the `inputs` it is made from (files, folders of
/// texts or of a model, or "-"), or a file of a model, there or not yet.
void expect_apart(const std::string& output, const std::vector<std::string>& inputs);
/// "--force" of verbs that write one file, and InputError for an output that exists without it. Call it before
/// the work, and again before the file is written: another program may have made it meanwhile.
void add_force_flag(CLI::App& verb, bool& force);
void expect_new(const std::string& output, bool force);
/// InputError for an output that is a context file, of verbs that write something else: it took long to make.
void expect_no_context(const std::string& output);
/// The model's folder, and the files that specs read, by way of plans and from that folder, too.
std::vector<std::string> files_of(const std::vector<Spec>& specs, const std::string& model);

/// Work whose results so far are kept at `path` when Ctrl-C ends it: then says that the same command goes on
/// from there, if `kept` finds any.
void resumable(const std::filesystem::path& path, const std::function<bool()>& kept,
               const std::function<void()>& work);

/// Whole numbers with the suffixes k = 1024 and M = 1024^2 ("32k"); InputError otherwise.
std::int64_t parse_count(std::string_view text, std::string_view flag, std::int64_t low, std::int64_t high);

/// Several of them, "4k,8k,16k".
std::vector<std::int64_t> parse_counts(std::string_view text, std::string_view flag, std::int64_t low,
                                       std::int64_t high);

/// A text file as valid UTF-8, "-" is stdin; InputError when empty, not a file, or not UTF-8 (with the byte
/// offset).
std::string read_text(const std::string& path);
bool is_model(const std::string& path);     ///< a folder or a GGUF file
bool is_artefact(const std::string& path);  ///< tensors, whatever the file is called
/// InputError, which says what `inspect` and `verify` take, of a file that is none of that; where artefacts
/// and plans have been told apart already.
void expect_context(const std::string& path);

/// Writes one JSON object and a newline to stdout; RunError when stdout cannot take it.
void print_json(Json result);
/// Writes text to stdout, control characters made visible: what a document, a file's metadata or a model says may
/// hold escape sequences. RunError when stdout cannot take it.
void print_text(std::string_view text);
/// Likewise, byte for byte: of what is data.
void print_bytes(std::string_view text);
/// A line on stderr, control characters made visible.
void print_remark(std::string_view remark);

const char* program_version();

/// Folder of the shipped data: models/pocket and demo/ below it.
std::filesystem::path data_dir();

void add_index(CLI::App& app);
void add_ask(CLI::App& app);
void add_demo(CLI::App& app);
void add_inspect(CLI::App& app);
void add_estimate(CLI::App& app);
void add_verify(CLI::App& app);
void add_methods(CLI::App& app);
void add_tasks(CLI::App& app);
void add_train(CLI::App& app);
void add_train_kmeans(CLI::App& train);
void add_train_saap(CLI::App& train);
void add_train_hash(CLI::App& train);
void add_eval(CLI::App& app);
void add_probe(CLI::App& app);
void add_bench(CLI::App& app);
void add_quantize(CLI::App& app);
void add_tune(CLI::App& app);
void add_report(CLI::App& app);
void add_serve(CLI::App& app);
void add_mcp(CLI::App& app);

}  // namespace lode::cli
