// SPDX-License-Identifier: Apache-2.0
// Keys and values of a reading that is under way, on disk, so that it can go on after it was ended.
//
//   [header: magic, what the keys depend on, time]
//   [block: header, ids, rows of every layer, head and part, states, queries that methods keep of it]...
//
// A block is written behind the last one and counts once it is whole: after a crash what follows the last
// whole block is cut off. Memory beyond the keys' own: the queries of a block.
#pragma once

#include <chrono>
#include <ctime>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lodestone/engine.h"
#include "select/device_keys.h"

namespace lode {

class PrefillLog {
 public:
  /// Beside the file that is to be made: ".NAME.partial".
  static std::filesystem::path beside(const std::filesystem::path& output);
  /// `now` of the reading whose log lies there: a chat template may put the day into the text, which is another one
  /// when the reading goes on. None: there is no log.
  static std::optional<std::time_t> time_of(const std::filesystem::path& path);
  /// Whether the log that lies there is of these tokens, as far as its first block says. False: there is no log.
  static bool begins(const std::filesystem::path& path, std::span<const TokenId> tokens);
  /// Opens the log of a reading of this context, whose methods are attached, or begins it. What belongs to
  /// another model or setting is begun anew. Nothing is written before `save`.
  PrefillLog(const std::filesystem::path& path, const Context& context, std::time_t now = 0);
  ~PrefillLog();
  PrefillLog(const PrefillLog&) = delete;
  PrefillLog& operator=(const PrefillLog&) = delete;

  /// False: a method that is attached cannot hand out what it has heard, so that there is nothing to go on from.
  bool usable() const { return usable_; }
  /// Puts what the log holds of `tokens` behind those that the context has since it was made known to it, queries that
  /// methods have heard too; how many tokens that is. The text's last tokens are left to be read where a method must hear
  /// them (HearsQueries::unkept_end), or where it has heard nothing of what the log holds, since it was not attached then;
  /// all are, where such a method must hear everything.
  std::int64_t restore(Context& context, std::span<const TokenId> tokens);
  /// Whether restore() found a reading that this one cannot go on from: of another text, with another model or setting, or
  /// without what a method must hear. The next save replaces it.
  bool holds_another() const { return another_; }
  /// Bytes that the log will still take on its disk until it holds `tokens`.
  std::int64_t room(const Context& context, std::int64_t tokens) const;
  /// Adds the context's tokens that the log does not hold. RunError when the disk is full.
  void save(const Context& context);
  /// The same, now and then: writing takes at most a tenth of the time.
  void save_at_times(const Context& context);
  bool kept() const { return fd_ >= 0 && end_ > 0; }  ///< whether there is something to go on from
  void remove();

 private:
  /// A selector that keeps queries of the prefill.
  struct Listener {
    std::string key;  // method and layer, as 32 digits
    Selector* selector = nullptr;
    HearsQueries* queries = nullptr;  ///< the same
    bool knows_all = true;            ///< of what was restored
  };

  void open();  ///< InputError where another process has it
  bool restore_block(Context::Impl& c, std::span<const TokenId> tokens);
  bool has_whole_block() const;
  std::int64_t heard_up_to(Context::Impl& c, std::int64_t before, std::int64_t text);

  std::filesystem::path path_;
  std::string identity_;
  std::time_t now_;
  bool usable_ = true, another_ = false;
  std::vector<Listener> listeners_;
  int fd_ = -1;
  std::int64_t tokens_ = 0, end_ = 0;  // end_: bytes of whole blocks
  std::chrono::steady_clock::time_point next_;
};

}  // namespace lode
