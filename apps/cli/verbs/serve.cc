// SPDX-License-Identifier: Apache-2.0
// lodestone serve: named documents over HTTP, for clients of OpenAI's and Anthropic's interfaces, and for people.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <optional>
#include <thread>

#include "base/cancel.h"
#include "base/file.h"
#include "cli.h"
#include "lodestone/error.h"
#include "ranks.h"
#include "serve/guard.h"
#include "serve/http.h"
#include "serve/service.h"
#include "serving.h"

namespace lode::cli {

namespace {

struct ServeFlags {
  CommonFlags common;
  ServingFlags serving;
  std::vector<std::string> allowed_hosts;
  std::string key_file, upload = "256MiB";
  serve::HttpOptions http;
  double grace = 10;
};

std::atomic<int> signals{0};
std::atomic<bool> from_launcher{false};

/// The first asks for a graceful end, the second ends at once, as everywhere else.
void on_signal(int, siginfo_t* info, void*) {
  constexpr int kInterrupted = 130;
  if (info->si_pid == getppid()) from_launcher = true;
  if (++signals > 1) _exit(kInterrupted);
}

void install_handlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // a client that goes is an error of its own connection
}

std::vector<std::string> read_keys(const ServeFlags& flags) {
  if (!flags.key_file.empty()) return serve::parse_keys(read_file(flags.key_file, 1 << 20), flags.key_file);
  if (serve::is_loopback(flags.http.host)) return {};
  throw InputError(fmt::format(
      "--host {}: expected --api-key-file beside an address that other machines reach, found none",
      flags.http.host));
}

void say(const ServeFlags& flags, const std::string& line) {
  if (!flags.common.quiet) std::cerr << line << "\n";
}

/// Signals reach all ranks; rank 0 ends the others when it has done what it has to.
void follow(const ServeFlags& flags) {
  install_handlers();
  follow_backend(flags.serving, flags.common);
}

/// Seconds until mpirun kills all ranks, since it was told to or one of them has ended; none when it does not.
std::optional<double> killed_in() {
  return ranks() != nullptr && from_launcher ? seconds_to_kill() : std::nullopt;
}

/// Ends what ranks do together after so many seconds, unless the result goes before.
std::jthread cancel_after(double seconds) {
  return std::jthread([seconds](const std::stop_token& done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!done.stop_requested() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!done.stop_requested()) set_cancel(true);
  });
}

/// Answers under way have so many seconds; where all is killed soon, those that are not done hear of it before that.
void stop(serve::HttpServer& server, const ServeFlags& flags) {
  constexpr double kOfTheTime = 0.4;
  const std::optional<double> left = killed_in();
  const double grace = left ? std::min(flags.grace, kOfTheTime * *left) : flags.grace;
  say(flags, fmt::format("stopping: answers under way have {:g} s", grace));
  const std::jthread cut = left ? cancel_after(grace) : std::jthread();
  server.stop(left ? 2 * grace : grace);
}

void run(const ServeFlags& flags) {
  constexpr double kLastWords = 0.5;  // seconds; the other ranks end soon
  if (ranks() != nullptr && ranks()->rank() > 0) return follow(flags);
  serve::Guard guard(read_keys(flags), flags.allowed_hosts);
  serve::ServiceOptions options;
  options.log = !flags.common.quiet;
  options.upload_bytes = static_cast<std::uint64_t>(parse_bytes(flags.upload, "--max-upload"));

  auto backend = make_backend(flags.serving, flags.common);
  serve::Service service(*backend, std::move(guard), options);
  serve::HttpServer server(service, flags.http);
  service.count_connections([&server] { return server.open_connections(); });
  install_handlers();
  const std::string url = fmt::format("http://{}:{}/", flags.http.host, server.port());
  flags.common.json ? print_json({{"url", url}, {"port", server.port()}})
                    : print_text(fmt::format("listening on {}\n", url));
  while (signals == 0 && backend->failure().empty())
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  service.set_stopping();
  if (const int reading = backend->stats().reading; reading > 0)
    say(flags,
        fmt::format("{} document{} still being read {} not kept: send {} again", reading,
                    reading == 1 ? "" : "s", reading == 1 ? "is" : "are", reading == 1 ? "it" : "them"));
  backend->failure().empty() ? stop(server, flags) : server.stop(kLastWords);
  const std::string failure = backend->failure();
  backend.reset();  // what it still tells its listeners goes through the service
  if (!failure.empty()) throw RunError(failure);
}

void add_limits(CLI::App& verb, ServeFlags& flags) {
  verb.add_option("--max-upload", flags.upload, "largest document that is taken")->check(byte_size());
  verb.add_option("--max-connections", flags.http.connections, "connections at once; more are refused (503)")
      ->check(whole_number(1, 1 << 20));
  verb.add_option("--grace", flags.grace,
                  "seconds that answers under way have when the server is told to stop")
      ->check(number(0.0, 3600.0));
}

}  // namespace

void add_serve(CLI::App& app) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* verb = app.add_subcommand("serve",
                                      "Keep documents and answer questions about them over HTTP (OpenAI's "
                                      "and Anthropic's interfaces, a web page)");
  add_common_flags(*verb, flags->common);
  add_serving_flags(*verb, flags->serving);
  verb->add_option("--host", flags->http.host,
                   "address to listen on; others than loopback need --api-key-file");
  verb->add_option("--port", flags->http.port, "port to listen on; 0 = any that is free")
      ->check(whole_number(0, 65535));
  verb->add_option("--api-key-file", flags->key_file,
                   "file of API keys, one a line; requests need one of them");
  verb->add_option(
          "--allow-host", flags->allowed_hosts,
          "name by which the server may be called, besides localhost and IP addresses; may be repeated")
      ->allow_extra_args(false);
  add_limits(*verb, *flags);
  verb->callback([flags] { run(*flags); });
}

}  // namespace lode::cli
