// SPDX-License-Identifier: Apache-2.0
// For tests of bad input: it must end in an InputError whose sentence a user can act on.
#pragma once

#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "lodestone/error.h"

namespace lode::test {

/// Time of all cores that this process has used since: unlike the time of day, it is the same on a busy
/// machine.
class CpuClock {
 public:
  double seconds() const { return static_cast<double>(std::clock() - start_) / CLOCKS_PER_SEC; }

 private:
  std::clock_t start_ = std::clock();
};

/// Runs `body`, which must throw InputError; returns its message. Fails when it does not, takes more than two
/// seconds of a core, or when the message is no short printable sentence.
template <class Body>
std::string refusal(const Body& body) {
  const CpuClock clock;
  std::string message;
  try {
    body();
    ADD_FAILURE() << "expected an InputError, found none";
  } catch (const InputError& e) {
    message = e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "expected an InputError, found " << e.what();
  }
  EXPECT_LT(clock.seconds(), 2.0) << message;
  EXPECT_GE(message.size(), 10u);
  EXPECT_LE(message.size(), 1000u) << message.substr(0, 1000);
  return message;
}

/// The same, and the message must name `what`.
template <class Body>
void expect_refused(std::string_view what, const Body& body) {
  const std::string message = refusal(body);
  EXPECT_NE(message.find(what), std::string::npos) << "expected '" << what << "' in: " << message;
}

/// An empty folder of the running test, removed at the end.
class TestFolder {
 public:
  TestFolder() {
    const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string("lodestone-") + info->test_suite_name() + "-" + info->name() + "-XXXXXX";
    for (char& c : name) c = c == '/' ? '_' : c;
    std::string pattern = (std::filesystem::temp_directory_path() / name).string();
    path_ = mkdtemp(pattern.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(std::string_view name, std::string_view bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace lode::test
