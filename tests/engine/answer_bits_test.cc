// SPDX-License-Identifier: Apache-2.0
// The bits of answers and logits of every method on fixed inputs are those that were recorded: moving and renaming
// code changes none. Which bits they are depends on the machine's instructions, so that each kind of machine has
// its own record; scripts/answer_bits.sh writes it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "kernels/kernels.h"
#include "support/asking.h"
#include "support/source_dir.h"

namespace lode {
namespace {

using test::kMethods, test::lisbon, test::logits_alone, test::pocket, test::read;

const std::filesystem::path kPath = source_dir() / "tests/golden/answer_bits.json";

/// The processor's name and the kernels that are used.
std::string machine() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name"))
      return line.substr(line.find(':') + 2) + ", " + std::string(kernels().name);
  return "unknown, " + std::string(kernels().name);
}

template <class T>
std::string hash_of(const std::vector<T>& values) {
  return hash_hex(std::as_bytes(std::span(values)));
}

/// By type of keys, method, and "tokens" or "logits".
Json bits() {
  Json all;
  const Spec full = parse_spec("full");
  for (const DType type : {DType::f32, DType::bf16}) {
    const auto document = read(pocket(), lisbon(20), kMethods, type);
    std::vector<Spec> specs = document->methods();
    specs.push_back(full);
    Scheduler scheduler(pocket());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const Request request = test::ask(document, specs[i], i);
      const auto tokens = scheduler.submit(request).result.get().generation.tokens;
      Json& one = all[std::string(name_of(type))][specs[i].str()];
      one["tokens"] = hash_of(tokens);
      one["logits"] = hash_of(logits_alone(pocket(), document, specs[i], request.prompt, tokens));
    }
  }
  return all;
}

TEST(AnswerBits, AreThoseThatWereRecorded) {
  Json recorded = parse_json(read_file(kPath), kPath.string());
  if (std::getenv("LODESTONE_RECORD_BITS") != nullptr) {
    recorded[machine()] = bits();
    std::ofstream(kPath) << recorded.dump(1) << "\n";
    return;
  }
  if (!recorded.contains(machine()))
    GTEST_SKIP() << "no record of " << machine() << "; scripts/answer_bits.sh record makes one";
  const Json found = bits(), &expected = recorded[machine()];
  for (const auto& [type, specs] : expected.items())
    for (const auto& [spec, hashes] : specs.items())
      EXPECT_EQ(found[type][spec], hashes) << type << " " << spec;
}

}  // namespace
}  // namespace lode
