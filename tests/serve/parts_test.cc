// SPDX-License-Identifier: Apache-2.0
// The server's parts that need neither a socket nor a model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lodestone/error.h"
#include "serve/engine/text_finder.h"
#include "serve/guard.h"
#include "serve/handler_pool.h"
#include "serve/multipart.h"
#include "serve/names.h"
#include "serve/prompt_text.h"
#include "serve/specs.h"
#include "text/blanks.h"

namespace lode::serve {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

HttpRequest with(HeaderList headers) {
  HttpRequest request;
  request.headers = std::move(headers);
  return request;
}

TEST(Guard, HostsAreAddressesLocalhostAndNamesThatWereGiven) {
  const Guard guard({}, {"books.example"});
  for (const char* host : {"localhost", "LocalHost:8080", "127.0.0.1", "127.0.0.1:80", "[::1]:8080", "[::1]",
                           "192.0.2.7:1", "books.example", "BOOKS.example:443"})
    EXPECT_EQ(guard.wrong_host(with({{"host", host}})), "") << host;
  for (const char* host :
       {"", "attacker.example", "localhost.attacker.example", "127.0.0.1.nip.io", "a@localhost", "[::1",
        "[::1]x", "localhost:80x", "localhost/", "127.1.attacker", "books.example."})
    EXPECT_NE(guard.wrong_host(with({{"host", host}})), "") << host;
}

TEST(Guard, OriginsAreTheServersOwn) {
  const Guard guard({}, {});
  EXPECT_EQ(guard.wrong_origin(with({{"host", "localhost:1"}})), "");
  EXPECT_EQ(guard.wrong_origin(with({{"host", "localhost:1"}, {"origin", "http://localhost:1"}})), "");
  for (const char* origin : {"http://localhost:2", "http://localhost", "null", "", "http://attacker.example"})
    EXPECT_NE(guard.wrong_origin(with({{"host", "localhost:1"}, {"origin", origin}})), "") << origin;
  EXPECT_NE(guard.wrong_origin(with({{"host", "localhost"}, {"sec-fetch-site", "cross-site"}})), "");
}

TEST(Guard, KeysMustBeEqualInEveryByte) {
  const std::string key = "0123456789abcdef", other = "another-key-of-16";
  const Guard guard({key, other}, {});
  for (const std::string& good : {key, other}) {
    EXPECT_TRUE(guard.has_key(with({{"x-api-key", good}})));
    EXPECT_TRUE(guard.has_key(with({{"authorization", "Bearer " + good}})));
  }
  for (const std::string& bad :
       {std::string(), key + "0", key.substr(1), key + key, std::string("0123456789abcdeF")})
    EXPECT_FALSE(guard.has_key(with({{"x-api-key", bad}}))) << bad;
  EXPECT_FALSE(guard.has_key(with({{"authorization", key}})));
  EXPECT_TRUE(Guard({}, {}).has_key(with({})));
}

TEST(Guard, KeyFiles) {
  EXPECT_THAT(parse_keys("# team\r\n\n  0123456789abcdef \r\n0123456789abcdeg", "keys"),
              ElementsAre("0123456789abcdef", "0123456789abcdeg"));
  for (const char* bad : {"", "#", "short", "0123456789 abcdef",
                          "0123456789abcdef\n\x80"
                          "123456789abcdef"})
    EXPECT_THROW(parse_keys(bad, "keys"), InputError) << bad;
}

TEST(Guard, Loopback) {
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "localhost"})
    EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "128.0.0.1", "192.0.2.1", "", "127.0.0.1.example"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST(Names, OnlyNamesThatCannotLeaveTheFolder) {
  for (const char* name : {"a", "A.b_c-1", "0", "_x", "a..b"}) EXPECT_TRUE(is_context_name(name)) << name;
  for (const char* name : {"", ".", "..", ".a", "-a", "a/b", "a\\b", "a b", "a%b", "\xc3\xa4", "a\n", "../a"})
    EXPECT_FALSE(is_context_name(name)) << name;
  EXPECT_FALSE(is_context_name(std::string(129, 'a')));
  EXPECT_FALSE(is_context_name(std::string_view("a\0b", 3)));
  for (const char* file :
       {"../../etc/passwd", "My book (2).pdf", "", "...", "---", "\xc3\xa4\xc3\xb6", "a\nb"})
    EXPECT_TRUE(is_context_name(context_name_of(file))) << file;
  EXPECT_EQ(context_name_of("My book (2).pdf"), "My-book-2-.pdf");
  EXPECT_EQ(numbered_name("document", 2), "document-2");
  EXPECT_EQ(numbered_name("report.pdf", 12), "report-12.pdf");
  EXPECT_EQ(numbered_name("v1.something", 3), "v1.something-3");
  const std::string longest(kLongestContextName - 4, 'x');
  EXPECT_EQ(numbered_name(longest + ".pdf", 2), longest.substr(2) + "-2.pdf");
}

TEST(Names, PercentDecoding) {
  std::string out;
  EXPECT_TRUE(percent_decode("a%41%2fb", out));
  EXPECT_EQ(out, "aA/b");
  for (const char* bad : {"%", "%4", "a%", "%zz", "%4g", "%+1", "% 1", "%-1"})
    EXPECT_FALSE(percent_decode(bad, out)) << bad;
}

TEST(Multipart, PartsAsTheyAre) {
  const std::string body =
      "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a \\\"b\\\";c.txt\"\r\nContent-Type: "
      "x\r\n\r\n"
      "line\r\n--bogus\r\n\r\n--b\r\ncontent-disposition: form-data;name=ttl\r\n\r\n\r\n--b--\r\n";
  const auto parts = parse_multipart("Multipart/Form-Data; charset=utf-8; boundary=\"b\"", body);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].name, "file");
  EXPECT_EQ(parts[0].file_name, "a \"b\";c.txt");
  EXPECT_EQ(parts[0].content, "line\r\n--bogus\r\n");
  EXPECT_EQ(parts[1].name, "ttl");
  EXPECT_EQ(parts[1].content, "");
  EXPECT_EQ(media_type(" Application/JSON ; charset=utf-8"), "application/json");
}

TEST(Multipart, CutAnywhereItIsRefused) {
  const std::string body = "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\ntext\r\n--b--";
  EXPECT_EQ(parse_multipart("multipart/form-data; boundary=b", body).size(), 1u);
  for (std::size_t size = 0; size < body.size(); ++size)
    EXPECT_THROW(parse_multipart("multipart/form-data; boundary=b", body.substr(0, size)), InputError)
        << size;
  EXPECT_THROW(parse_multipart("multipart/form-data", body), InputError);
}

TEST(TextFinder, FindsTheLongestWhereverItStands) {
  std::mt19937 rng(1);
  const auto random_text = [&](std::size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += static_cast<char>('a' + rng() % 4);
    return text;
  };
  TextFinder finder;
  const std::string book = random_text(5000), part = book.substr(0, 900), letter = random_text(64),
                    tiny = random_text(63);
  for (const auto& [name, text] :
       {std::pair("book", book), {"part", part}, {"letter", letter}, {"tiny", tiny}})
    finder.add(name, "\n " + text + "\n\n");
  const auto all = [](const std::string&) { return true; };
  for (const std::size_t before : {0u, 1u, 777u}) {
    const std::string text = random_text(before) + " " + book + "\nWho?";
    const auto found = finder.longest_in(text, all);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->name, "book");
    EXPECT_EQ(text.substr(found->begin, found->end - found->begin), book);
  }
  EXPECT_EQ(finder.longest_in("x" + letter + part, all)->name, "part");
  EXPECT_EQ(finder.longest_in(letter, all)->name, "letter");
  EXPECT_EQ(finder.longest_in(book, [](const std::string& name) { return name != "book"; })->name, "part");
  std::string other = book;
  other[2500] = 'z';
  EXPECT_EQ(finder.longest_in(other, all)->name, "part");
  other[500] = 'z';
  EXPECT_FALSE(finder.longest_in(other, all));
  EXPECT_FALSE(finder.longest_in(tiny, all));
  EXPECT_FALSE(finder.longest_in("", all));
  finder.remove("book");
  EXPECT_EQ(finder.longest_in(book, all)->name, "part");
}

TEST(TextFinder, TextsOfOneLetterTakeLinearTime) {
  TextFinder finder;
  finder.add("a", std::string(200'000, 'a') + "b");
  EXPECT_FALSE(finder.longest_in(std::string(2'000'000, 'a'), [](const std::string&) { return true; }));
}

TEST(PromptText, OneQuestionIsThatOfAsk) {
  const std::string shape = "\n\nQuestion: {question}\nAnswer:";
  const PromptText one = plain_prompt({{"user", " Who?\n"}}, shape, true);
  EXPECT_EQ(one.text, "\n\nQuestion: Who?\nAnswer:");
  EXPECT_THAT(one.stop, ElementsAre("\n"));
  const PromptText more = plain_prompt(
      {{"system", "Be brief."}, {"user", "A?"}, {"assistant", "B."}, {"user", "C?"}}, shape, true);
  EXPECT_EQ(more.text, "\n\nBe brief.\n\nQuestion: A?\nAnswer: B.\n\nQuestion: C?\nAnswer:");
  const PromptText alone = plain_prompt({{"user", "Go on:"}}, shape, false);
  EXPECT_EQ(alone.text, "Go on:");
  EXPECT_TRUE(alone.stop.empty());
}

TEST(Blanks, AreLeftOutAtBothEnds) {
  for (const std::string text : {" \n a b \n", "a", "  ", "a \n b", "\ta\t\tb\t"}) {
    std::string out;
    BlankTrimmer trimmer;
    for (const char c : text) out += trimmer.push({&c, 1});
    EXPECT_EQ(out, std::string(without_blanks(text)));
  }
}

TEST(Specs, NoRequestNamesAFile) {
  EXPECT_EQ(parse_request_spec("kmeans:probes=4").name, "kmeans");
  for (const char* spec : {"plan:/etc/passwd", "plan", "saap:weights=/etc/passwd", "hash:bits=32,weights=x",
                           "kmeans:weights=x", "", "magic", "kmeans:probes=-1", "kmeans:"})
    EXPECT_THROW(parse_request_spec(spec), ApiError) << spec;
  EXPECT_THROW(parse_request_spec(std::string(5000, 'a')), ApiError);
}

TEST(HandlerPool, RunsEverythingThatWasPosted) {
  std::atomic<int> ran{0};
  {
    HandlerPool pool(3);
    for (int i = 0; i < 500; ++i) pool.post([&] { ++ran; });
  }
  EXPECT_EQ(ran, 500);
}

}  // namespace
}  // namespace lode::serve
