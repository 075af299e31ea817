// SPDX-License-Identifier: Apache-2.0
// Attention specs, "name[:key=value,...]", and the registry that turns them into selectors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/selector.h"

namespace lode {

/// A count, or a share of the far keys: "64" is a count; "1/32", "5%" and "0.05" are shares.
struct Amount {
  double value = 0;
  bool is_share = false;
  /// Resolved against n keys; a share rounds up, both are clipped to [0, n].
  std::int64_t of(std::int64_t n) const;
};

/// One key of a method, as `--help` and error messages list it.
struct SpecKey {
  std::string name;
  std::string meaning;  ///< with range, for the error message: "probes: buckets read per query, 1 to 1048576"
  std::string default_value;
};

/// A parsed spec. Keys keep their text; typed getters check it and throw InputError naming spec, key and
/// valid range.
class Spec {
 public:
  std::string name;                          ///< canonical: aliases are resolved
  std::map<std::string, std::string> given;  ///< what the user wrote
  LocalWindow dense;                         ///< sink, window
  int dense_layers = 0;                      ///< first layers that stay exact
  /// Where files are looked for that are not where `given` says: a document is asked in another folder than the one
  /// that it was indexed in. No part of str().
  std::vector<std::filesystem::path> folders;

  std::int64_t integer(std::string_view key, std::int64_t fallback, std::int64_t low,
                       std::int64_t high) const;
  double number(std::string_view key, double fallback, double low, double high) const;
  Amount amount(std::string_view key, Amount fallback) const;
  std::string choice(std::string_view key, std::string_view fallback,
                     std::span<const std::string_view> valid) const;
  std::optional<std::string> text(std::string_view key) const;
  /// The file that a key names: a relative path from the first of `folders` that has it, else as given where that is
  /// there, else by its name alone in one of `folders`, else as given.
  std::optional<std::string> file(std::string_view key) const;
  /// Canonical form: name and given keys in alphabetical order; equal specs give equal strings.
  std::string str() const;
};

/// Makes the selector of one layer. `model_fingerprint` lets artefacts refuse a model they were not trained
/// for.
using SelectorFactory = std::function<std::unique_ptr<Selector>(const Spec&, const LayerGeometry&,
                                                                std::string_view model_fingerprint)>;

struct MethodInfo {
  std::string name;
  std::vector<std::string> aliases;
  std::string source;         ///< the paper, for --help
  std::vector<SpecKey> keys;  ///< besides sink, window, dense_layers
  LocalWindow dense;          ///< defaults
  int dense_layers = 0;
  /// The key whose value may stand alone: "plan:FILE" for "plan:file=FILE". Empty = none.
  std::string plain_key;
  /// Needs a trained artefact: the key `weights`, or NAME.safetensors in the model's folder when that is not
  /// given.
  bool trained = false;
  /// Counted up when the method chooses otherwise under the same specs than it did in a release: answers of it that
  /// `eval` and `report` kept before count no more. 0 = chooses as it always did; the first change is 2.
  int revision = 0;
  SelectorFactory make;  ///< null for `full`: every far key, no index
  /// Bytes that one layer's index over `tokens` tokens will hold, for `inspect`; null = none.
  std::function<std::int64_t(const Spec&, const LayerGeometry&, std::int64_t tokens)> index_bytes;
  std::function<void(const Spec&)>
      validate;  ///< throws InputError on values out of range; called by parse_spec
  /// The dense parts that a spec has by itself where it depends on more than the name; null = `dense`.
  std::function<LocalWindow(const Spec&)> dense_of;
  /// What all layers decide together, such as one threshold for the model: called when a context is complete
  /// and its layers have been built, and again when it has grown. Null = nothing. Dense layers are null.
  std::function<void(std::span<Selector* const> layers, std::int32_t sequence,
                     const std::function<KvLayer(int layer)>& kv)>
      finish;
};

/// All methods, in the order in which --help lists them.
const std::vector<MethodInfo>& methods();
/// Throws InputError that lists the valid names or keys.
const MethodInfo& find_method(std::string_view name);
/// Files that are not where the text says are looked for in `folders`.
Spec parse_spec(std::string_view text, const std::vector<std::filesystem::path>& folders = {});
/// Whether both say the same, files by whatever path they are named.
bool same_method(const Spec& a, const Spec& b);
/// The folders, as absolute paths, that another process needs in `folders` to find the spec's files; none where it names
/// none.
std::vector<std::filesystem::path> starts_of_files(const Spec& spec);

}  // namespace lode
