// SPDX-License-Identifier: Apache-2.0
#include "bench/serve/address.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/strings.h"
#include "bench/ops/timing.h"
#include "bench/serve/response_reader.h"

namespace tessera::bench {

namespace {

constexpr std::string_view kScheme = "http://";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

Address Address::parse(std::string_view url, std::string_view flag) {
  const auto refuse = [&](std::string_view why) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected http://HOST:PORT, found \"{}\"{}", flag, printable(url, 200), why));
  };
  std::string_view rest = url;
  if (!rest.starts_with(kScheme)) refuse(rest.starts_with("https://") ? "; TLS is not measured" : "");
  rest.remove_prefix(kScheme.size());
  while (rest.ends_with('/')) rest.remove_suffix(1);
  const bool is_plain = std::all_of(rest.begin(), rest.end(), [](char c) { return c > ' ' && c <= '~' && c != '/'; });
  if (rest.empty() || !is_plain) refuse("");
  Address out;
  out.url_ = std::string(kScheme) + std::string(rest);
  out.host_ = rest;
  std::string host(rest), port = "80";
  const size_t colon = host.rfind(':'), bracket = host.rfind(']');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    port = host.substr(colon + 1);
    host.resize(colon);
  }
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int fault = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> held(found, &freeaddrinfo);
  if (fault != 0) refuse(fmt::format(": {}", gai_strerror(fault)));
  std::memcpy(&out.storage_, found->ai_addr, found->ai_addrlen);
  out.size_ = found->ai_addrlen;
  return out;
}

int Address::connect() const {
  const int fd = socket(storage_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) fail(ErrorCode::kResourceExhausted, fmt::format("a socket: {}", std::strerror(errno)));
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&storage_), size_) != 0 && errno != EINPROGRESS) {
    const int fault = errno;
    close(fd);
    throw Unreachable(fmt::format("connecting to {}: {}", url_, std::strerror(fault)));
  }
  return fd;
}

std::string request_bytes(const Address& address, std::string_view method, std::string_view path, std::string_view key,
                          std::string_view body) {
  const std::string authorization = key.empty() ? "" : fmt::format("Authorization: Bearer {}\r\n", key);
  return fmt::format(
      "{} {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\n"
      "Content-Length: {}\r\n{}\r\n{}",
      method, path, address.host(), body.size(), authorization, body);
}

Got get(const Address& address, std::string_view path, std::string_view key, double seconds) {
  const double end = seconds_now() + seconds;
  const Descriptor socket(address.connect());
  std::string_view unsent;
  const std::string request = request_bytes(address, "GET", path, key, "");
  unsent = request;
  ResponseReader reader;
  Got out;
  while (!reader.is_complete()) {
    const double left = end - seconds_now();
    pollfd wait{socket.get(), static_cast<short>(unsent.empty() ? POLLIN : POLLOUT), 0};
    if (left <= 0 || poll(&wait, 1, static_cast<int>(left * 1e3) + 1) == 0) {
      throw Unreachable(fmt::format("{}{}: no answer within {} s", address.url(), path, seconds));
    }
    std::array<char, 16384> bytes{};
    const ssize_t count = unsent.empty() ? recv(socket.get(), bytes.data(), bytes.size(), 0)
                                         : send(socket.get(), unsent.data(), unsent.size(), MSG_NOSIGNAL);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count < 0) throw Unreachable(fmt::format("{}{}: {}", address.url(), path, std::strerror(errno)));
    if (!unsent.empty()) {
      unsent.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (count > 0) reader.feed({bytes.data(), static_cast<size_t>(count)});
    if (count == 0 && !reader.finish()) {
      throw Unreachable(fmt::format("{}{}: the connection ended within the answer", address.url(), path));
    }
  }
  out.status = reader.status();
  out.body = reader.take_body();
  return out;
}

}  // namespace tessera::bench
