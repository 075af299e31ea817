// SPDX-License-Identifier: Apache-2.0
// Templates of 51 families of models and a list of snippets, rendered as Jinja renders them: tests/golden/chat, which
// make_chat_goldens.py writes. Where Jinja refuses a template, so do we.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "lodestone/error.h"
#include "support/source_dir.h"
#include "text/jinja/template.h"

namespace lode {
namespace {

using jinja::OrderedJson;
using jinja::Template;
using jinja::Value;

constexpr std::time_t kNow = 1772600767;  // 2026-03-04 05:06:07 UTC
const std::filesystem::path kFolder = source_dir() / "tests/golden/chat";

OrderedJson read_json(const char* name) {
  return OrderedJson::parse(read_file(kFolder / name));
}

Template::Globals globals_of(const OrderedJson& json) {
  Template::Globals globals;
  for (const auto& [key, value] : json.items())
    if (key != "name") globals.emplace_back(key, Value::of(value, 1));
  return globals;
}

/// As the golden file has it: {"text"}, {"raises"} or {"error"}.
OrderedJson rendered(const std::string& source, Template::Globals globals) {
  try {
    const Template parsed(source, "t");
    return {{"text", parsed.render(std::move(globals), kNow, 10000).bytes()}};
  } catch (const InputError& error) {
    return {{"error", error.what()}};
  }
}

void expect_as_golden(const OrderedJson& found, const OrderedJson& golden, const std::string& what) {
  if (golden.contains("text")) {
    ASSERT_TRUE(found.contains("text")) << what << ": " << found.dump();
    EXPECT_EQ(found["text"].get<std::string>(), golden["text"].get<std::string>()) << what;
    return;
  }
  ASSERT_FALSE(found.contains("text"))
      << what << ": expected " << golden.dump() << ", found " << found.dump();
  if (!golden.contains("raises")) return;
  std::string message = golden["raises"];
  EXPECT_NE(found["error"].get<std::string>().find(message), std::string::npos)
      << what << ": " << found.dump();
}

class JinjaGolden : public testing::Test {
 protected:
  void SetUp() override {
    setenv("TZ", "UTC", 1);
    tzset();
  }
  OrderedJson golden_ = read_json("golden.json");
};

TEST_F(JinjaGolden, FamiliesOfModels) {
  const OrderedJson conversations = read_json("conversations.json");
  EXPECT_GE(golden_["templates"].size(), 50);
  for (const auto& [name, results] : golden_["templates"].items()) {
    const std::string source = read_file(kFolder / "templates" / (name + ".jinja"));
    for (std::size_t i = 0; i < conversations.size(); ++i) {
      Template::Globals globals = globals_of(conversations[i]);
      globals.emplace_back("bos_token", "<s>");
      globals.emplace_back("eos_token", "</s>");
      expect_as_golden(rendered(source, globals), results[i],
                       name + ", " + conversations[i]["name"].get<std::string>());
    }
  }
}

TEST_F(JinjaGolden, Snippets) {
  for (const OrderedJson& snippet : golden_["snippets"]) {
    const std::string source = snippet["source"];
    expect_as_golden(rendered(source, globals_of(golden_["globals"])), snippet, source);
  }
}

}  // namespace
}  // namespace lode
