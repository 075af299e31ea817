// SPDX-License-Identifier: Apache-2.0
// Specs: what is valid parses to one canonical form, and whatever is not is one sentence that says what would
// be.
#include "lodestone/spec.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "lodestone/error.h"
#include "lodestone/register_method.h"
#include "select/presets.h"
#include "support/refusal.h"

namespace lode {
namespace {

TEST(Presets, EachIsASpecAndKeysBesideItWin) {
  for (const char* method : {"double-sparsity", "h2o", "hash", "hnsw", "infllm", "ivf", "kmeans", "magicpig",
                             "pqcache", "quest", "retrieval", "saap", "snapkv", "squeezed", "streaming"}) {
    const auto presets = presets_of(method);
    ASSERT_FALSE(presets.empty()) << method;
    for (const Preset& preset : presets) {
      EXPECT_EQ(preset.method, method);
      const Spec spec = parse_spec(std::string(method) + ":preset=" + std::string(preset.name));
      EXPECT_EQ(spec.str(), parse_spec(std::string(method) + ":" + std::string(preset.keys)).str());
      EXPECT_EQ(spec.str().find("preset"), std::string::npos) << "files and results name the keys themselves";
    }
  }
  EXPECT_EQ(parse_spec("quest:budget=64,preset=paper").text("budget"), "64");
  EXPECT_EQ(parse_spec("quest:preset=paper,window=9").dense.window, 9);
  EXPECT_TRUE(presets_of("full").empty());
  EXPECT_TRUE(presets_of("kdeformer").empty()) << "its paper leaves the size of a bin to the experiment";
  test::expect_refused("expected one of paper, found 'own'", [] { parse_spec("ivf:preset=own"); });
  test::expect_refused("unknown key 'preset'", [] { parse_spec("topk:preset=paper"); });
}

TEST(Presets, HaveThePapersSinkAndWindow) {
  const auto dense = [](std::string_view method) {
    return parse_spec(std::string(method) + ":preset=paper");
  };
  EXPECT_EQ(dense("streaming").dense.sink, 4);
  EXPECT_EQ(dense("infllm").dense.window, 4096);
  EXPECT_EQ(dense("ivf").dense.sink, 128) << "RetrievalAttention's static pattern, as it has itself";
  EXPECT_EQ(dense("hnsw").dense.window, dense("retrieval").dense.window);
  EXPECT_EQ(dense("snapkv").dense.window, 1) << "its observation window is no sliding one";
  EXPECT_EQ(dense("double-sparsity").dense_layers, 2);
  EXPECT_TRUE(dense("squeezed").dense.from_context);
  EXPECT_EQ(dense("kmeans").text("clusters"), "1024");
}

TEST(RegisterMethod, RefusesWhatSpecsCouldNotName) {
  const std::size_t before = methods().size();
  MethodInfo info = find_method("random");
  test::expect_refused("expected a name that no method has, found 'random'", [&] { register_method(info); });
  info.name = "own", info.aliases = {"flat"};  // topk's alias
  test::expect_refused("found 'flat'", [&] { register_method(info); });
  info.aliases = {};
  for (const char* name : {"", "a:b", "a,b", "a b", "ä"}) {
    info.name = name;
    test::expect_refused("expected a name of letters", [&] { register_method(info); });
  }
  info.name = "own", info.make = nullptr;
  test::expect_refused("found none", [&] { register_method(info); });
  EXPECT_EQ(methods().size(), before);
}

using testing::AllOf;
using testing::HasSubstr;

std::string error_of(std::string_view text) {
  try {
    parse_spec(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Spec, EveryMethodParsesByItsNamesAndHasTheCommonKeys) {
  for (const MethodInfo& method : methods()) {
    if (!method.plain_key.empty()) continue;  // means nothing without it
    EXPECT_EQ(parse_spec(method.name).str(), method.name);
    EXPECT_FALSE(method.source.empty());
    for (const std::string& alias : method.aliases) EXPECT_EQ(parse_spec(alias).name, method.name);
    if (method.name == "full") continue;
    const Spec spec = parse_spec(method.name + ":window=63,sink=2,dense_layers=1");
    EXPECT_EQ(spec.dense.window, 63);
    EXPECT_EQ(spec.dense.sink, 2);
    EXPECT_EQ(spec.dense_layers, 1);
    EXPECT_EQ(spec.str(), method.name + ":dense_layers=1,sink=2,window=63");
    EXPECT_EQ(parse_spec(spec.str()).str(), spec.str());
    const Spec plain = parse_spec(method.name);
    EXPECT_EQ(plain.dense.sink, method.dense.sink);
    EXPECT_EQ(plain.dense.window, method.dense.window);
  }
}

TEST(Spec, DefaultsOfTheInterface) {
  struct Defaults {
    std::int64_t sink = 1, window = 2047;
    int layers = 0;
    bool from_context = false;
  };
  const std::map<std::string, Defaults> others = {
      {"saap", {.layers = 1}},
      {"hash", {.sink = 128, .window = 128}},
      {"squeezed", {.sink = 0, .window = 100, .from_context = true}},
      {"retrieval", {.sink = 128, .window = 512}},
      {"quest", {.layers = 2}}};
  for (const MethodInfo& method : methods()) {
    if (method.name == "full" || method.name == "plan") continue;
    const auto found = others.find(method.name);
    const Defaults expected = found == others.end() ? Defaults() : found->second;
    const Spec spec = parse_spec(method.name);
    EXPECT_EQ(spec.dense.sink, expected.sink) << method.name;
    EXPECT_EQ(spec.dense.window, expected.window) << method.name;
    EXPECT_EQ(spec.dense.from_context, expected.from_context) << method.name;
    EXPECT_EQ(spec.dense_layers, expected.layers) << method.name;
  }
  EXPECT_EQ(parse_spec("flat:k=5").str(), "topk:k=5");
}

TEST(Spec, UnknownNamesAndKeysListTheValidOnes) {
  EXPECT_THAT(error_of("topkk"), AllOf(HasSubstr("'topkk'"), HasSubstr("did you mean 'topk'"),
                                       HasSubstr("streaming"), HasSubstr("flat")));
  EXPECT_THAT(error_of(""), HasSubstr("valid are full"));
  EXPECT_THAT(error_of("aut"), AllOf(HasSubstr("did you mean 'auto'"), HasSubstr("plan, and auto where")));
  EXPECT_THAT(error_of("auto"), AllOf(HasSubstr("valid are full"), HasSubstr("plan; auto chooses where")));
  EXPECT_THAT(error_of("full:window=3"), AllOf(HasSubstr("'window'"), HasSubstr("takes no keys")));
  EXPECT_THAT(error_of("kmeans:probe=3"), AllOf(HasSubstr("'probe'"), HasSubstr("did you mean 'probes'"),
                                                HasSubstr("clusters"), HasSubstr("sink")));
  EXPECT_THAT(error_of("topk:mass=1.5"), AllOf(HasSubstr("above 0 up to 1,"), HasSubstr("'1.5'")));
  EXPECT_THAT(error_of("kmeans:rope=maybe"),
              AllOf(HasSubstr("'rope'"), HasSubstr("off, on"), HasSubstr("'maybe'")));
}

TEST(Spec, MalformedText) {
  for (const char* text : {"topk:", "topk:k", "topk:k=", "topk:=3", "topk:k=3,", "topk:,k=3", "topk:k=3,k=4",
                           "topk;k=3", " topk", "topk:k =3", "TOPK", "topk:k=3:by=value"}) {
    EXPECT_THROW(parse_spec(text), InputError) << text;
  }
}

TEST(Spec, ValuesOutOfRange) {
  for (const char* text : {"topk:k=0",
                           "topk:k=-1",
                           "topk:k=nan",
                           "topk:k=inf",
                           "topk:k=1e400",
                           "topk:k=0.0",
                           "topk:k=101%",
                           "topk:k=3/0",
                           "topk:k=5/2",
                           "topk:k=99999999999999999999",
                           "topk:k=0x10",
                           "topk:k=+3",
                           "topk:k=3 ",
                           "topk:mass=0",
                           "topk:mass=1.1",
                           "topk:mass=nan",
                           "topk:mass=-0.5",
                           "topk:k=3,mass=0.5",
                           "topk:by=x",
                           "topk:per=x",
                           "random:fraction=0",
                           "random:fraction=2.0",
                           "kmeans:probes=0",
                           "kmeans:probes=5%",
                           "kmeans:clusters=0",
                           "kmeans:clusters=8,weights=x",
                           "streaming:window=0",
                           "streaming:window=-1",
                           "streaming:sink=-1",
                           "streaming:sink=1.5",
                           "streaming:dense_layers=-1",
                           "streaming:window=4294967297000"}) {
    const std::string error = error_of(text);
    EXPECT_NE(error, "no error") << text;
    EXPECT_THAT(error, HasSubstr("expected")) << text;
    EXPECT_THAT(error, HasSubstr("found")) << text;
  }
}

TEST(Amount, CountsAndShares) {
  const auto of = [](const char* text, std::int64_t n) {
    return parse_spec(std::string("topk:k=") + text).amount("k", {}).of(n);
  };
  EXPECT_EQ(of("64", 1000), 64);
  EXPECT_EQ(of("64", 10), 10);
  EXPECT_EQ(of("1/32", 320), 10);
  EXPECT_EQ(of("5%", 101), 6);
  EXPECT_EQ(of("0.05", 100), 5);
  EXPECT_EQ(of("1.0", 77), 77);
  EXPECT_EQ(of("100%", 77), 77);
  EXPECT_EQ(of("1e-3", 1), 1);
  EXPECT_EQ(of("1", 77), 1);  // a whole number is a count
  EXPECT_EQ(of("5%", 0), 0);
}

/// Two folders, of which the second has a file.
class SpecFiles : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"a", "b/deep"}) std::filesystem::create_directories(folder_ / name);
    std::ofstream(folder_ / "b/deep/x.safetensors") << "x";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / fmt::format("lodestone-spec-{}", getpid());
};

TEST_F(SpecFiles, AreLookedForInFolders) {
  const std::string found = (folder_ / "b/deep/x.safetensors").string();
  const auto file_of = [&](const std::string& path, const std::vector<std::filesystem::path>& folders) {
    return *parse_spec("kmeans:weights=" + path, folders).file("weights");
  };
  EXPECT_EQ(file_of("deep/x.safetensors", {folder_ / "a", folder_ / "b"}), found);
  EXPECT_EQ(file_of("elsewhere/x.safetensors", {folder_ / "a", folder_ / "b/deep"}), found) << "by its name";
  EXPECT_EQ(file_of("/gone/x.safetensors", {folder_ / "b/deep"}), found);
  EXPECT_EQ(file_of(found, {folder_ / "a"}), found);
  EXPECT_EQ(file_of("deep/y.safetensors", {folder_ / "b"}), "deep/y.safetensors");
  EXPECT_FALSE(parse_spec("kmeans").file("weights"));
}

TEST_F(SpecFiles, AreTheSameByWhateverPath) {
  const Spec stored = parse_spec("kmeans:probes=2,weights=deep/x.safetensors", {folder_ / "b"});
  const std::string path = (folder_ / "a/../b/deep/x.safetensors").string();
  EXPECT_TRUE(same_method(stored, parse_spec("kmeans:probes=2,weights=" + path)));
  EXPECT_FALSE(same_method(stored, parse_spec("kmeans:probes=3,weights=" + path)));
  EXPECT_FALSE(same_method(stored, parse_spec("kmeans:probes=2,weights=" + path + ".other")));
  EXPECT_FALSE(same_method(stored, parse_spec("kmeans:probes=2")));
}

TEST_F(SpecFiles, StartWhereAnotherProcessFindsThem) {
  const auto found_again = [&](const Spec& spec) {
    return parse_spec(spec.str(), starts_of_files(spec)).file("weights");
  };
  const Spec stored = parse_spec("kmeans:weights=deep/x.safetensors", {folder_ / "b"});
  EXPECT_EQ(found_again(stored), stored.file("weights"));
  const Spec moved = parse_spec("kmeans:weights=/gone/x.safetensors", {folder_ / "b/deep"});
  EXPECT_EQ(found_again(moved), moved.file("weights"));
  EXPECT_EQ(starts_of_files(parse_spec("kmeans:weights=x.safetensors")),
            std::vector<std::filesystem::path>{std::filesystem::current_path()});
  EXPECT_EQ(starts_of_files(parse_spec("kmeans")), std::vector<std::filesystem::path>{});
}

TEST_F(SpecFiles, NamesThatEndInASlashAreFolders) {
  EXPECT_EQ(parse_spec("kmeans:weights=gone/", {folder_ / "b/deep"}).file("weights"), "gone/")
      << "not the folder itself";
  EXPECT_EQ(parse_spec("kmeans:weights=deep/..", {folder_ / "b"}).file("weights"), "deep/..");
}

}  // namespace
}  // namespace lode
