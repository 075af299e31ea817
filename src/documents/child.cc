// SPDX-License-Identifier: Apache-2.0
#include "documents/child.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::size_t kMostErrorText = 1 << 16;

/// An open file that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

[[noreturn]] void cannot(const char* what) {
  throw RunError(std::string("a program that reads documents cannot be started: ") + what + ": " +
                 std::strerror(errno));
}

std::pair<Descriptor, Descriptor> make_pipe() {
  std::array<int, 2> ends = {};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) cannot("pipe");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

/// A file in memory: unlike a pipe, it can be read from any place.
Descriptor file_of(std::string_view bytes) {
  Descriptor file(::memfd_create("document", MFD_CLOEXEC));
  if (file.get() < 0) cannot("memfd_create");
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::pwrite(file.get(), bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    if (n <= 0 && errno != EINTR) cannot("write");
    if (n > 0) at += static_cast<std::size_t>(n);
  }
  return file;
}

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr std::uint32_t kArchitecture = 0;
#endif

/// socket() fails from now on, and so does any call made by another architecture's numbers. Only functions
/// that are safe between fork and exec.
bool forbid_network() {
  constexpr std::uint32_t kRefuse = SECCOMP_RET_ERRNO | EACCES;
  constexpr std::uint32_t kOtherNumbers = 0x40000000;  // of x32, from here on
  std::array<sock_filter, 8> code = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kOtherNumbers, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, kRefuse),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program = {.len = static_cast<unsigned short>(code.size()), .filter = code.data()};
  return kArchitecture != 0 && ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

void set_limit(decltype(RLIMIT_CPU) what, std::size_t most) {
  const rlimit limit = {.rlim_cur = most, .rlim_max = most};
  ::setrlimit(what, &limit);
}

struct Wiring {
  int in, out, err, report;  ///< `report` tells the parent: 'o' offline, 'n' not, 'x' no exec
};

/// The child, from fork to exec; only functions that are safe there.
[[noreturn]] void become(const std::vector<char*>& argv, const Wiring& wires, const ChildLimits& limits) {
  static char locale[] = "LC_ALL=C.UTF-8";
  static char path[] = "PATH=/usr/bin:/bin";
  std::array<char*, 3> environment = {locale, path, nullptr};
  ::dup2(wires.in, STDIN_FILENO);
  ::dup2(wires.out, STDOUT_FILENO);
  ::dup2(wires.err, STDERR_FILENO);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) ::signal(signal, SIG_DFL);
  set_limit(RLIMIT_AS, limits.memory);
  set_limit(RLIMIT_CPU, static_cast<std::size_t>(limits.seconds) + 1);
  set_limit(RLIMIT_FSIZE, 0);
  set_limit(RLIMIT_CORE, 0);
  set_limit(RLIMIT_NOFILE, 64);
  char report = forbid_network() ? 'o' : 'n';
  if (::write(wires.report, &report, 1) != 1) ::_exit(127);
  ::execve(argv.front(), argv.data(), environment.data());
  report = 'x';
  if (::write(wires.report, &report, 1) != 1) ::_exit(126);
  ::_exit(127);
}

/// What is there of a pipe, at most `most` bytes of it in all; true at its end.
bool drain(int fd, std::string& text, std::size_t most) {
  std::array<char, 1 << 16> buffer;
  const ssize_t n = ::read(fd, buffer.data(), buffer.size());
  if (n < 0 && errno == EINTR) return false;
  if (n <= 0) return true;
  text.append(buffer.data(), std::min(static_cast<std::size_t>(n), most - std::min(most, text.size())));
  return false;
}

/// Kills and reaps the child, however the parent leaves.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_;
};

/// Reads both pipes to their ends; how that ended.
ChildResult::End collect(ChildResult& result, int out, int err, const ChildLimits& limits) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(limits.seconds);
  std::array<pollfd, 2> pipes = {{{out, POLLIN, 0}, {err, POLLIN, 0}}};
  while (pipes[0].fd >= 0 || pipes[1].fd >= 0) {
    check_cancel();
    if (std::chrono::steady_clock::now() >= end) return ChildResult::End::out_of_time;
    ::poll(pipes.data(), pipes.size(), 100);
    if (pipes[0].revents != 0 && drain(out, result.out, limits.output + 1)) pipes[0].fd = -1;
    if (pipes[1].revents != 0 && drain(err, result.err, kMostErrorText)) pipes[1].fd = -1;
    if (result.out.size() > limits.output) return ChildResult::End::too_much_output;
  }
  return ChildResult::End::exited;
}

}  // namespace

std::string find_program(std::string_view name) {
  const char* set = std::getenv("PATH");
  std::string_view path = set != nullptr ? set : "/usr/local/bin:/usr/bin:/bin";
  while (!path.empty()) {
    const std::size_t colon = std::min(path.find(':'), path.size());
    const std::string candidate = std::string(path.substr(0, colon)) + "/" + std::string(name);
    if (candidate.front() == '/' && ::access(candidate.c_str(), X_OK) == 0) return candidate;
    path.remove_prefix(std::min(colon + 1, path.size()));
  }
  return {};
}

ChildResult run_child(const std::vector<std::string>& argv, std::string_view input,
                      const ChildLimits& limits) {
  Descriptor in = file_of(input);
  auto [out, out_end] = make_pipe();
  auto [err, err_end] = make_pipe();
  auto [report, report_end] = make_pipe();
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const Wiring wires = {in.get(), out_end.get(), err_end.get(), report_end.get()};
  const pid_t pid = ::fork();
  if (pid < 0) cannot("fork");
  if (pid == 0) become(words, wires, limits);
  Child child(pid);
  out_end.reset();
  err_end.reset();
  report_end.reset();
  std::string started;
  while (!drain(report.get(), started, 2)) {
  }
  if (started.empty() || started.back() == 'x') throw RunError(argv.front() + ": cannot be started");
  ChildResult result = {.offline = started.front() == 'o'};
  result.end = collect(result, out.get(), err.get(), limits);
  if (result.end != ChildResult::End::exited) return result;
  const int status = child.wait();
  if (WIFSIGNALED(status)) {
    result.code = WTERMSIG(status);
    result.end = result.code == SIGXCPU || result.code == SIGKILL ? ChildResult::End::out_of_time
                                                                  : ChildResult::End::killed;
  } else {
    result.code = WEXITSTATUS(status);
  }
  return result;
}

}  // namespace lode
