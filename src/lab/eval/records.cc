// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/records.h"

#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 62;

Json to_json(const Sample& sample, const std::string& attention, const AnswerRecord& answer) {
  const WorkReport& w = answer.work;
  return {{"id", sample.id},
          {"attention", attention},
          {"task", sample.task},
          {"tokens", sample.tokens},
          {"answers", sample.answers},
          {"output", answer.text},
          {"output_ids", answer.tokens},
          {"score", answer.score},
          {"seconds", answer.seconds},
          {"density", w.density()},
          {"work",
           {w.kv_bytes, w.selector_bytes, w.full_bytes, w.far_keys, w.far_total, w.tokens, w.sparse_tokens}},
          {"dense_reason", w.dense_reason},
          {"notice", w.notice}};
}

void read_audit(const Json& audit, const std::string& where, AnswerRecord& answer) {
  WorkReport& work = answer.work;
  work.audited = json_int(audit, "outputs", where, 0, kMost);
  work.audit_error_sum = json_number(audit, "error_sum", where, 0.0, 1e300);
  work.audit_error_max = json_number(audit, "max_error", where, 0.0, 1e300);
  const Json& layers = json_member(audit, "full_layers");
  const bool whole = layers.is_array() && std::all_of(layers.begin(), layers.end(),
                                                      [](const Json& n) { return n.is_number_integer(); });
  if (!whole) throw InputError(where + ": field 'full_layers': expected a list of layers");
  answer.full_layers = layers.get<std::vector<int>>();
}

AnswerRecord from_json(const Json& line, const std::string& where) {
  AnswerRecord answer;
  answer.text = json_string(line, "output", where);
  answer.score = json_number(line, "score", where, 0.0, 1.0);
  answer.seconds = json_number(line, "seconds", where, 0.0, 1e12);
  const auto numbers = [&](const char* key, std::int64_t most) {
    const bool list = json_has(line, key) && line.at(key).is_array();
    if (!list) throw InputError(where + ": field '" + key + "': expected a list of whole numbers");
    for (const Json& n : line.at(key)) {
      if (!n.is_number_integer() || n.get<std::int64_t>() < 0 || n.get<std::int64_t>() > most) {
        throw InputError(where + ": field '" + key + "': expected whole numbers from 0 to " +
                         std::to_string(most) + ", found " + excerpt(n.dump()));
      }
    }
    return line.at(key).get<std::vector<std::int64_t>>();
  };
  for (const std::int64_t id : numbers("output_ids", INT32_MAX))
    answer.tokens.push_back(static_cast<TokenId>(id));
  const auto work = numbers("work", kMost);
  if (work.size() != 7)
    throw InputError(where + ": field 'work': expected 7 numbers, found " + std::to_string(work.size()));
  answer.work.kv_bytes = work[0];
  answer.work.selector_bytes = work[1];
  answer.work.full_bytes = work[2];
  answer.work.far_keys = work[3];
  answer.work.far_total = work[4];
  answer.work.tokens = work[5];
  answer.work.sparse_tokens = work[6];
  answer.work.dense_reason = json_string(line, "dense_reason", where);
  if (json_has(line, "notice")) answer.work.notice = json_string(line, "notice", where);
  if (json_has(line, "audit")) read_audit(line.at("audit"), where, answer);
  return answer;
}

/// JSON has neither infinities nor NaN.
double finite(double x) {
  return x < 1e300 ? x : 1e300;
}

/// What a file's first line says otherwise than this run.
std::string difference(const Json& found, const Json& wanted) {
  if (json_member(found, "lodestone") != json_member(wanted, "lodestone"))
    return "expected the answers of an earlier run, found something else";
  for (const auto& [key, value] : wanted.items()) {
    const Json& other = json_member(found, key);
    if (key == "begun_at" && other.is_null())
      return "expected answers that say on which day they were begun, which this model's chat template tells "
             "it, found "
             "those of an earlier version, which do not";
    if (other != value)
      return fmt::format("expected answers with {} = {}, found those of another run, with {}", key,
                         excerpt(value.dump(), 100), other.is_null() ? "none" : excerpt(other.dump(), 100));
  }
  return "expected the answers of a run with these settings, found more of them";
}

}  // namespace

std::optional<std::time_t> begun_at(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const Json first = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!first.is_object()) return std::nullopt;
  const Json& time = json_member(first, kBegunAt);
  if (!time.is_number_integer()) return std::nullopt;
  const auto seconds = time.get<std::int64_t>();
  return seconds >= 0 && seconds < std::int64_t{1} << 40 ? std::optional<std::time_t>(seconds) : std::nullopt;
}

Records::Records(const std::filesystem::path& path, const Json& settings) : path_(path) {
  if (path.empty()) return;
  std::size_t whole = 0;
  file_ = std::fopen(path.c_str(), "abe");
  if (file_ == nullptr) throw InputError(path.string() + ": cannot write: " + std::strerror(errno));
  try {
    if (::flock(fileno(file_), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw InputError(path.string() + ": another process has it in use");
    whole = read(read_file(path), settings);
    std::filesystem::resize_file(path, whole);
  } catch (...) {
    std::fclose(file_);
    throw;
  }
  if (whole == 0) append(settings.dump());
}

Records::~Records() {
  if (file_ != nullptr) std::fclose(file_);
}

/// Returns the bytes of whole lines; 0 for a file without any.
std::size_t Records::read(const std::string& text, const Json& settings) {
  const std::size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
  bool first = true;
  for_each_line(std::string_view(text).substr(0, whole), path_.string(),
                [&](std::string_view line, const std::string& where) {
                  const Json object = parse_json(line, where);
                  if (first) {
                    first = false;
                    if (object == settings) return;
                    throw InputError(fmt::format("{}: {}; name another file or remove it", path_.string(),
                                                 difference(object, settings)));
                  }
                  answers_[{json_string(object, "id", where), json_string(object, "attention", where)}] = {
                      from_json(object, where), json_string(object, "sample", where),
                      json_has(object, "files") ? json_string(object, "files", where) : ""};
                });
  if (whole == 0 && !text.empty())
    throw InputError(path_.string() + ": expected the answers of an earlier run, found something else");
  return first ? 0 : whole;
}

void Records::append(const std::string& line) {
  const bool written = std::fwrite(line.data(), 1, line.size(), file_) == line.size() &&
                       std::fputc('\n', file_) != EOF && std::fflush(file_) == 0;
  if (!written) throw RunError(path_.string() + ": cannot write: " + std::strerror(errno));
}

/// Tells apart samples that have the same id: everything that an answer and its score depend on.
std::string Records::hash_of(const Sample& sample) const {
  std::string& context = contexts_[sample.context];
  if (context.empty()) context = hash_hex(*sample.context);
  Json all = {context,        sample.question, sample.answers,   name_of(sample.match),
              sample.classes, sample.max_new,  sample.first_line};
  if (sample.verbatim) all.push_back("verbatim");
  return hash_hex(all.dump(-1, ' ', false, Json::error_handler_t::replace)).substr(0, 16);
}

const AnswerRecord* Records::find(const Sample& sample, const std::string& attention,
                                  const std::string& files) const {
  const auto found = answers_.find({sample.id, attention});
  if (found == answers_.end()) return nullptr;
  if (found->second.sample_hash != hash_of(sample)) {
    throw InputError(path_.string() + ": answers another sample with the id '" + sample.id +
                     "'; name another file or remove it");
  }
  return found->second.files == files ? &found->second.answer : nullptr;
}

const AnswerRecord& Records::add(const Sample& sample, const std::string& attention, AnswerRecord answer,
                                 const std::string& files) {
  if (file_ != nullptr) {
    Json line = to_json(sample, attention, answer);
    line["sample"] = hash_of(sample);
    if (!files.empty()) line["files"] = files;
    const WorkReport& w = answer.work;
    if (w.audited > 0)
      line["audit"] = {{"outputs", w.audited},
                       {"error_sum", finite(w.audit_error_sum)},
                       {"max_error", finite(w.audit_error_max)},
                       {"full_layers", answer.full_layers}};
    append(line.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  Entry& entry = answers_[{sample.id, attention}];
  entry = {std::move(answer), hash_of(sample), files};
  return entry.answer;
}

}  // namespace lode
