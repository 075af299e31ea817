// SPDX-License-Identifier: Apache-2.0
// The HTTP layer on Boost.Beast, which parses heads and bodies; Boost.Asio waits. A connection is a chain of callbacks on
// a strand: wait for bytes, read a head, ask the app whether it may have a body, read that, hand the request to a handler
// thread, write what comes back, and from the beginning. While an answer is being made the socket is watched for its
// client's leaving.
#include <fmt/format.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <ctime>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>

#include "base/text.h"
#include "lodestone/error.h"
#include "serve/handler_pool.h"
#include "serve/http.h"
#include "serve/status.h"

namespace lode::serve {

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using Error = boost::system::error_code;

constexpr std::size_t kWriteSlice = 256 * 1024;  // bytes that one write deadline is for
constexpr std::uint64_t kLingerBytes =
    1024 * 1024;  // of a refused body that are read, so that the refusal arrives
constexpr double kLingerSeconds = 2;
constexpr int kClientGone = 499;

std::chrono::nanoseconds duration_of(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

std::string new_id() {
  static const std::uint64_t start = std::random_device{}() | (std::uint64_t{std::random_device{}()} << 32);
  static std::atomic<std::uint64_t> count{0};
  std::uint64_t x = start + 0x9e3779b97f4a7c15u * ++count;  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return fmt::format("req_{:016x}", x ^ (x >> 31));
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 40> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

/// As many connections as were asked for need as many descriptors.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // where that fails, the old limit stands and accepting waits
}

struct Shared {
  HttpApp& app;
  const HttpOptions options;
  std::shared_ptr<asio::io_context> io;
  HandlerPool handlers;
  std::atomic<int> connections{0};
  std::atomic<std::uint64_t> body_bytes{0};  ///< of all bodies that are being read or handled
  std::atomic<bool> stopping{false};

  Shared(HttpApp& app_, const HttpOptions& options_)
      : app(app_),
        options(options_),
        io(std::make_shared<asio::io_context>(1)),
        handlers(options_.handler_threads) {}
};

/// A share of the memory for bodies, given back when its request is done.
class BodyBudget {
 public:
  explicit BodyBudget(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  ~BodyBudget() { shared_->body_bytes -= taken_; }
  bool grow_to(std::uint64_t bytes) {
    if (bytes <= taken_) return true;
    if (shared_->body_bytes.fetch_add(bytes - taken_) + bytes - taken_ > shared_->options.bodies_bytes) {
      shared_->body_bytes -= bytes - taken_;
      return false;
    }
    taken_ = bytes;
    return true;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::uint64_t taken_ = 0;
};

class Connection;

/// Passes an answer on to its connection's strand.
class Reply : public HttpReply {
 public:
  explicit Reply(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}
  ~Reply() override;
  void send(HttpResponse response) override;
  void begin(HttpResponse head) override;
  void write(std::string piece) override;
  void finish() override;
  void on_gone(std::function<void()> gone) override;

 private:
  std::shared_ptr<Connection> connection_;
  std::atomic<bool> ended_{false};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Shared> shared, tcp::socket socket)
      : io_(shared->io), shared_(std::move(shared)), stream_(std::move(socket)) {
    ++shared_->connections;
  }
  ~Connection() { --shared_->connections; }

  void start() {
    Error ignored;
    stream_.socket().set_option(tcp::no_delay(true), ignored);
    run([](Connection& c) { c.wait_for_request(); });
  }
  /// Refuses whatever comes, since there are too many connections.
  void start_full() {
    run([](Connection& c) {
      c.request_ = std::make_shared<HttpRequest>();
      c.request_->id = new_id();
      c.refuse(503, fmt::format("the server has {} connections open, which is its limit: try again later",
                                c.shared_->options.connections));
    });
  }
  void close_if_idle() {
    run([](Connection& c) {
      if (!c.request_) c.close();
    });
  }
  void close_now() {
    run([](Connection& c) { c.client_gone(); });
  }

  // Called by replies, from any thread.
  void send(HttpResponse response) {
    run([response = std::move(response)](Connection& c) mutable { c.send_response(std::move(response)); });
  }
  void begin(HttpResponse head) {
    run([head = std::move(head)](Connection& c) mutable { c.begin_stream(std::move(head)); });
  }
  void write(std::string piece) {
    run([piece = std::move(piece)](Connection& c) { c.write_piece(piece); });
  }
  void finish() {
    run([](Connection& c) { c.end_stream(); });
  }
  void on_gone(std::function<void()> gone) {
    run([gone = std::move(gone)](Connection& c) mutable {
      if (c.gone_) return gone();
      if (c.request_ && !c.ended_) c.on_gone_ = std::move(gone);
    });
  }
  void abandoned() {
    run([](Connection& c) {
      if (c.gone_ || c.ended_) return;
      if (c.begun_)
        return c.client_gone();  // the head is out: cutting the body short is all that can be said
      c.send_response(
          c.shared_->app.refuse(c.request_->path, 500, "the request was given up: a fault of the server"));
    });
  }

 private:
  template <class Body>
  void run(Body body) {
    asio::dispatch(stream_.get_executor(),
                   [self = shared_from_this(), body = std::move(body)]() mutable { body(*self); });
  }
  template <class Body>
  auto then(Body body) {
    return [self = shared_from_this(), body](Error error, auto...) { body(*self, error); };
  }

  // ---- Reading. ---------------------------------------------------------------------------------------------
  void wait_for_request() {
    request_.reset();
    budget_.reset();
    parser_.reset();
    begun_ = ended_ = chunked_ = head_only_ = false;
    on_gone_ = nullptr;
    if (shared_->stopping) return close();
    if (buffer_.size() > 0) return read_head();
    stream_.expires_after(duration_of(shared_->options.idle_seconds));
    stream_.async_read_some(buffer_.prepare(2048),
                            [self = shared_from_this()](Error error, std::size_t bytes) {
                              if (error) return self->close();
                              self->buffer_.commit(bytes);
                              self->read_head();
                            });
  }

  void read_head() {
    parser_.emplace();
    parser_->header_limit(shared_->options.header_bytes);
    parser_->body_limit(std::numeric_limits<std::uint64_t>::max());
    stream_.expires_after(duration_of(shared_->options.header_seconds));
    http::async_read_header(stream_, buffer_, *parser_,
                            then([](Connection& c, Error error) { c.got_head(error); }));
  }

  void got_head(Error error) {
    started_ = Clock::now();
    request_ = std::make_shared<HttpRequest>();
    request_->id = new_id();
    if (error) return head_failed(error);
    take_head();
    if (const auto fault = fault_of_head(); fault.first != 0) {
      keep_alive_ = false;  // where such a request ends is anybody's guess
      return refuse(fault.first, fault.second);
    }
    Admission admission = shared_->app.admit(*request_);
    if (!admission.admitted) return refuse(std::move(admission.refusal));
    if (request_->body_bytes > admission.body_limit) {
      return refuse(413, fmt::format("expected a body of at most {}, found {}",
                                     human_bytes(static_cast<std::int64_t>(admission.body_limit)),
                                     human_bytes(static_cast<std::int64_t>(request_->body_bytes))));
    }
    parser_->body_limit(admission.body_limit);
    body_limit_ = admission.body_limit;
    quick_ = admission.quick;
    budget_ = std::make_shared<BodyBudget>(shared_);
    if (parser_->is_done()) return got_body();
    if (lower(request_->header("expect")) == "100-continue") return invite_body();
    start_body();
  }

  void head_failed(Error error) {
    if (error == http::error::end_of_stream || error == asio::error::connection_reset) return close();
    if (error == beast::error::timeout) return client_gone();  // Beast has closed the socket
    if (error == http::error::header_limit || error == http::error::buffer_overflow)
      return refuse(431, fmt::format("expected request headers of at most {} bytes, found more",
                                     shared_->options.header_bytes));
    if (error == http::error::bad_version)
      return refuse(505, "expected HTTP/1.0 or HTTP/1.1 in the request line, found another version");
    if (error.category() == make_error_code(http::error::bad_method).category())
      return refuse(400, fmt::format("expected an HTTP/1.1 request, found one with a {}", error.message()));
    close();
  }

  void take_head() {
    const auto& head = parser_->get();
    request_->method = std::string(head.method_string());
    const std::string_view target(head.target().data(), head.target().size());
    const std::size_t question = std::min(target.find('?'), target.size());
    request_->path = std::string(target.substr(0, question));
    request_->query = std::string(target.substr(std::min(question + 1, target.size())));
    for (const auto& field : head)
      request_->headers.emplace_back(lower({field.name_string().data(), field.name_string().size()}),
                                     std::string(field.value().data(), field.value().size()));
    keep_alive_ = head.keep_alive();
    version_1_0_ = head.version() == 10;
    head_only_ = request_->method == "HEAD";
    if (const auto length = parser_->content_length()) request_->body_bytes = *length;
  }

  /// What is wrong with a head that the parser lets pass; (0, "") when nothing is.
  std::pair<int, std::string> fault_of_head() const {
    const HttpRequest& r = *request_;
    if (r.path.empty() || r.path.front() != '/')
      return {400, "expected a request target that begins with '/', found another form"};
    for (const char* single :
         {"host", "content-length", "transfer-encoding", "authorization", "content-type"})
      if (r.count(single) > 1)
        return {400, fmt::format("expected one header '{}', found {}", single, r.count(single))};
    if (!version_1_0_ && r.count("host") == 0) return {400, "expected a header 'Host', found none"};
    if (r.header("content-length").find_first_not_of("0123456789") != std::string_view::npos)
      return {400, "expected one number as 'Content-Length', found a list"};  // a proxy may read it otherwise
    if (r.count("content-length") > 0 && r.count("transfer-encoding") > 0)
      return {400, "expected either 'Content-Length' or 'Transfer-Encoding', found both"};
    if (r.count("transfer-encoding") > 0 &&
        (version_1_0_ || lower(r.header("transfer-encoding")) != "chunked"))
      return {501, "expected 'Transfer-Encoding: chunked' or none, found another one"};
    return {0, ""};
  }

  void invite_body() {
    static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    stream_.expires_after(duration_of(shared_->options.write_seconds));
    asio::async_write(stream_, asio::buffer(kContinue), then([](Connection& c, Error error) {
                        if (error) return c.client_gone();
                        c.start_body();
                      }));
  }

  void start_body() {
    part_begin_ = 0;
    stream_.expires_after(duration_of(shared_->options.body_seconds));
    read_body();
  }

  void read_body() {
    http::async_read_some(stream_, buffer_, *parser_,
                          then([](Connection& c, Error error) { c.got_part(error); }));
  }

  void got_part(Error error) {
    const std::uint64_t bytes = parser_->get().body().size();
    if (error == beast::error::timeout) return client_gone();  // Beast has closed the socket
    if (error == http::error::body_limit)
      return refuse(413, fmt::format("expected a body of at most {}, found more",
                                     human_bytes(static_cast<std::int64_t>(body_limit_))));
    if (error && error.category() == make_error_code(http::error::bad_method).category() &&
        error != http::error::partial_message && error != http::error::end_of_stream)
      return refuse(400,
                    fmt::format("expected a body as its head announced it, found a {}", error.message()));
    if (error) return client_gone();
    if (!budget_->grow_to(bytes))
      return refuse(503, "the server is reading as many bodies as it has memory for: try again later");
    if (parser_->is_done()) return got_body();
    if (bytes - part_begin_ >= shared_->options.body_part_bytes) {
      part_begin_ = bytes;
      stream_.expires_after(duration_of(shared_->options.body_seconds));
    }
    read_body();
  }

  void got_body() {
    request_->body = std::move(parser_->get().body());
    request_->body_bytes = request_->body.size();
    stream_.expires_never();
    watch();
    auto work = [shared = shared_, request = request_, reply = std::make_shared<Reply>(shared_from_this())] {
      try {
        shared->app.handle(request, reply);
      } catch (const std::exception& e) {
        reply->send(shared->app.refuse(request->path, 500, e.what()));
      }
    };
    quick_ ? work() : shared_->handlers.post(std::move(work));
  }

  // ---- While an answer is made: has the client gone? -----------------------------------------------------------
  void watch() {
    watching_ = true;
    stream_.socket().async_wait(tcp::socket::wait_read, then([](Connection& c, Error error) {
                                  c.watching_ = false;
                                  if (c.next_after_watch_) return c.next();
                                  if (!error && !c.ended_ && c.left()) c.client_gone();
                                }));
  }

  /// The other side has closed; bytes of its next request are no sign of that.
  bool left() {
    char byte = 0;
    Error error;
    const std::size_t bytes =
        stream_.socket().receive(asio::buffer(&byte, 1), tcp::socket::message_peek, error);
    return error ? error != asio::error::would_block : bytes == 0;
  }

  void client_gone() {
    if (std::exchange(gone_, true)) return;
    if (request_ && !ended_) shared_->app.done(*request_, kClientGone, sent_bytes_, seconds());
    ended_ = true;
    if (on_gone_) std::exchange(on_gone_, nullptr)();
    close();
  }

  // ---- Writing. -----------------------------------------------------------------------------------------------
  void refuse(int status, std::string_view sentence) {
    refuse(shared_->app.refuse(request_->path, status, sentence));
  }
  /// The rest of the request is not understood or not wanted, so that the connection ends with it.
  void refuse(HttpResponse response) {
    const bool whole = parser_ && parser_->is_done();
    if (!whole) keep_alive_ = false;
    send_response(std::move(response));
  }

  std::string head_of(const HttpResponse& response, bool chunked) {
    std::string head =
        fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\nConnection: {}\r\nX-Request-Id: {}\r\n", response.status,
                    reason(response.status), http_date(), keep_alive_ ? "keep-alive" : "close", request_->id);
    if (!response.content_type.empty()) head += fmt::format("Content-Type: {}\r\n", response.content_type);
    for (const auto& [name, value] : response.headers) head += fmt::format("{}: {}\r\n", name, value);
    if (chunked) head += "Transfer-Encoding: chunked\r\n";
    return head += "X-Content-Type-Options: nosniff\r\n";
  }

  void send_response(HttpResponse response) {
    if (gone_ || ended_) return;
    ended_ = true;
    status_ = response.status;
    if (shared_->stopping) keep_alive_ = false;
    std::string head = head_of(response, false);
    if (response.status != 204) head += fmt::format("Content-Length: {}\r\n", response.body.size());
    head += "\r\n";
    if (!head_only_) head += response.body;
    queue(std::move(head));
  }

  void begin_stream(HttpResponse head) {
    if (gone_ || ended_ || begun_) return;
    begun_ = true;
    status_ = head.status;
    chunked_ = !version_1_0_;
    if (version_1_0_ || shared_->stopping) keep_alive_ = false;
    queue(head_of(head, chunked_) + "\r\n");
  }

  void write_piece(const std::string& piece) {
    if (gone_ || ended_ || piece.empty() || head_only_) return;
    if (waiting_.size() + writing_.size() - written_ > shared_->options.unsent_bytes) return client_gone();
    queue(chunked_ ? fmt::format("{:x}\r\n{}\r\n", piece.size(), piece) : piece);
  }

  void end_stream() {
    if (gone_ || ended_) return;
    ended_ = true;
    queue(chunked_ && !head_only_ ? "0\r\n\r\n" : "");
  }

  void queue(std::string bytes) {
    waiting_ += bytes;
    if (!busy_) write_more();
  }

  void write_more() {
    if (written_ == writing_.size()) {
      writing_ = std::exchange(waiting_, {});
      written_ = 0;
    }
    if (writing_.empty()) return ended_ ? answered() : void();
    busy_ = true;
    stream_.expires_after(duration_of(shared_->options.write_seconds));
    const std::size_t slice = std::min(writing_.size() - written_, kWriteSlice);
    stream_.async_write_some(asio::buffer(writing_.data() + written_, slice),
                             [self = shared_from_this()](Error error, std::size_t bytes) {
                               Connection& c = *self;
                               c.busy_ = false;
                               if (error || c.gone_) return c.client_gone();
                               c.written_ += bytes;
                               c.sent_bytes_ += bytes;
                               c.write_more();
                             });
  }

  void answered() {
    stream_.expires_never();
    shared_->app.done(*request_, status_, sent_bytes_, seconds());
    sent_bytes_ = 0;
    on_gone_ = nullptr;
    if (!watching_) return next();
    next_after_watch_ = true;
    stream_.socket().cancel();
  }

  void next() {
    next_after_watch_ = false;
    if (keep_alive_) return wait_for_request();
    linger_bytes_ = kLingerBytes;
    Error ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream_.expires_after(duration_of(kLingerSeconds));
    linger();
  }

  /// Closing with bytes unread would reset the connection, and the client might never see its answer.
  void linger() {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(16 * 1024),
                            [self = shared_from_this()](Error error, std::size_t bytes) {
                              if (error || bytes > self->linger_bytes_) return self->close();
                              self->linger_bytes_ -= bytes;
                              self->linger();
                            });
  }

  void close() {
    gone_ = true;
    Error ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.close();
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

  std::shared_ptr<asio::io_context> io_;  // first: outlives the stream
  std::shared_ptr<Shared> shared_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_{64 * 1024};
  std::optional<http::request_parser<http::string_body>> parser_;
  std::shared_ptr<HttpRequest> request_;  ///< null between requests
  std::shared_ptr<BodyBudget> budget_;
  std::function<void()> on_gone_;
  std::string waiting_, writing_;  ///< bytes of the answer; those of writing_ up to written_ are out
  std::size_t written_ = 0;
  std::uint64_t body_limit_ = 0, part_begin_ = 0, sent_bytes_ = 0, linger_bytes_ = 0;
  Clock::time_point started_ = Clock::now();
  int status_ = 0;
  bool keep_alive_ = false, version_1_0_ = false, head_only_ = false, quick_ = false;
  bool begun_ = false, ended_ = false, chunked_ = false;  ///< of the answer
  bool busy_ = false, watching_ = false, next_after_watch_ = false, gone_ = false;
};

Reply::~Reply() {
  if (!ended_) connection_->abandoned();
}
void Reply::send(HttpResponse response) {
  if (!ended_.exchange(true)) connection_->send(std::move(response));
}
void Reply::begin(HttpResponse head) {
  connection_->begin(std::move(head));
}
void Reply::write(std::string piece) {
  connection_->write(std::move(piece));
}
void Reply::finish() {
  if (!ended_.exchange(true)) connection_->finish();
}
void Reply::on_gone(std::function<void()> gone) {
  connection_->on_gone(std::move(gone));
}

tcp::endpoint endpoint_of(const HttpOptions& options) {
  Error error;
  const auto address =
      asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
  if (error)
    throw InputError(
        fmt::format("--host: expected an IP address such as 127.0.0.1, found '{}'", excerpt(options.host)));
  return {address, static_cast<std::uint16_t>(options.port)};
}

}  // namespace

struct HttpServer::Impl {
  Impl(HttpApp& app, const HttpOptions& options)
      : shared(std::make_shared<Shared>(app, options)), acceptor(*shared->io), retry(*shared->io) {
    raise_descriptor_limit();
    const tcp::endpoint endpoint = endpoint_of(options);
    try {
      acceptor.open(endpoint.protocol());
      acceptor.set_option(asio::socket_base::reuse_address(true));
      acceptor.bind(endpoint);
      acceptor.listen(1024);
    } catch (const boost::system::system_error& e) {
      throw InputError(fmt::format("cannot listen on {} port {}: {}; name another --host or --port",
                                   options.host, options.port, e.code().message()));
    }
    asio::post(*shared->io, [this] { accept(); });
    thread = std::thread([io = shared->io] { io->run(); });
  }

  void accept() {
    acceptor.async_accept(asio::make_strand(*shared->io), [this](Error error, tcp::socket socket) {
      if (shared->stopping || error == asio::error::operation_aborted) return;
      if (error) {  // no descriptors: connections that end make room
        retry.expires_after(std::chrono::milliseconds(50));
        return retry.async_wait([this](Error) { accept(); });
      }
      const bool full = shared->connections >= shared->options.connections;
      auto connection = std::make_shared<Connection>(shared, std::move(socket));
      remember(connection);
      full ? connection->start_full() : connection->start();
      accept();
    });
  }

  void remember(const std::shared_ptr<Connection>& connection) {
    const std::lock_guard lock(mutex);
    if (connections.size() > 64 && connections.size() > 2 * static_cast<std::size_t>(shared->connections))
      std::erase_if(connections, [](const auto& entry) { return entry.second.expired(); });
    connections[connection.get()] = connection;
  }

  std::vector<std::shared_ptr<Connection>> open() {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Connection>> all;
    for (const auto& [pointer, weak] : connections)
      if (auto connection = weak.lock()) all.push_back(std::move(connection));
    return all;
  }

  void stop(double seconds) {
    if (shared->stopping.exchange(true)) return;
    asio::post(*shared->io, [this] {
      Error ignored;
      acceptor.close(ignored);
      retry.cancel();
    });
    const auto deadline = Clock::now() + duration_of(seconds);
    while (true) {
      const auto left = open();
      if (left.empty()) break;
      for (const auto& connection : left)
        Clock::now() < deadline ? connection->close_if_idle() : connection->close_now();
      if (Clock::now() > deadline + std::chrono::seconds(1)) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    shared->handlers.stop();
    shared->io->stop();
    thread.join();
    shared->io->restart();
    shared->io->poll();  // callbacks of what was closed let go of their connections
  }

  std::shared_ptr<Shared> shared;
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  std::thread thread;
  std::mutex mutex;
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections;
};

HttpServer::HttpServer(HttpApp& app, const HttpOptions& options)
    : impl_(std::make_unique<Impl>(app, options)) {}
HttpServer::~HttpServer() {
  impl_->stop(0);
}
int HttpServer::port() const {
  return impl_->acceptor.local_endpoint().port();
}
int HttpServer::open_connections() const {
  return impl_->shared->connections;
}
void HttpServer::stop(double seconds) {
  impl_->stop(seconds);
}

}  // namespace lode::serve
