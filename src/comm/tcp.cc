// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::comm {

namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Null with `why` where the name is not known.
Addresses resolve(const std::string& address, int port, bool listens, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = listens ? AI_PASSIVE : 0;
  const char* node = address.empty() ? nullptr : address.c_str();
  const int code = getaddrinfo(node, std::to_string(port).c_str(), &hints, &found);
  if (code == 0) return Addresses(found);
  why = gai_strerror(code);
  return nullptr;
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

std::string words(int code) {
  return std::generic_category().message(code);
}

Socket socket_for(const addrinfo& address) {
  return Socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
}

// Heartbeats are a few bytes each: they must not wait for more.
void send_at_once(const Socket& socket) {
  const int on = 1;
  setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = other.descriptor_;
    other.descriptor_ = -1;
  }
  return *this;
}

void Socket::close() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

bool may_name_host(const std::string& address) {
  // What no name has, but an IPv6 address, which may name a network behind it.
  if (address.find_first_of(" \t\r\n/[]@*") != std::string::npos) return false;
  in6_addr number{};
  return address.find(':') == std::string::npos ||
         inet_pton(AF_INET6, address.substr(0, address.find('%')).c_str(), &number) == 1;
}

bool leads_to_loopback(const std::string& address) {
  in6_addr number{};
  if (address == "localhost" || inet_pton(AF_INET, address.c_str(), &number) == 1 ||
      inet_pton(AF_INET6, address.c_str(), &number) == 1) {
    return false;
  }
  std::string why;
  const Addresses found = resolve(address, 0, false, why);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    if (!is_loopback(*one->ai_addr)) return false;
  }
  return found != nullptr;
}

Socket listen_at(const std::string& address, int port) {
  std::string why;
  const Addresses found = resolve(address == "*" ? "" : address, port, true, why);
  const auto fail_address = [&](const std::string& reason) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("expected an address of this machine, found \"{}\": {}", printable(address, 80), reason));
  };
  if (found == nullptr) fail_address(why);
  // Of every network, IPv6's socket takes both kinds.
  std::vector<const addrinfo*> all;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) all.push_back(one);
  if (address == "*") {
    std::stable_partition(all.begin(), all.end(), [](const addrinfo* one) { return one->ai_family == AF_INET6; });
  }
  int code = 0;
  for (const addrinfo* one : all) {
    Socket socket = socket_for(*one);
    if (!socket.is_open()) {
      code = errno;
      continue;
    }
    const int on = 1, off = 0;
    setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address == "*") setsockopt(socket.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (::bind(socket.descriptor(), one->ai_addr, one->ai_addrlen) == 0 && ::listen(socket.descriptor(), 128) == 0) {
      return socket;
    }
    code = errno;
  }
  if (code == EADDRNOTAVAIL) fail_address(words(code));
  fail(ErrorCode::kDeviceError,
       fmt::format("can't listen at {} port {}: {}", printable(address, 80), port, words(code)));
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::string port(NI_MAXSERV, '\0');
  const bool is_known = getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
                        getnameinfo(reinterpret_cast<sockaddr*>(&address), size, nullptr, 0, port.data(),
                                    static_cast<socklen_t>(port.size()), NI_NUMERICSERV) == 0;
  TESSERA_CHECK(is_known, words(errno));
  return std::stoi(port);
}

Socket accept_one(const Socket& listener, std::string& peer) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  Socket socket(
      ::accept4(listener.descriptor(), reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket.is_open()) return socket;
  send_at_once(socket);
  std::string host(NI_MAXHOST, '\0'), port(NI_MAXSERV, '\0');
  const int code =
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), static_cast<socklen_t>(host.size()),
                  port.data(), static_cast<socklen_t>(port.size()), NI_NUMERICHOST | NI_NUMERICSERV);
  peer = code == 0 ? fmt::format("{} port {}", host.c_str(), port.c_str()) : "an unknown address";
  return socket;
}

Socket connect_to(const std::string& address, int port, int timeout_ms, std::string& why) {
  const Addresses found = resolve(address, port, false, why);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    Socket socket = socket_for(*one);
    if (!socket.is_open()) {
      why = words(errno);
      continue;
    }
    int code = ::connect(socket.descriptor(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (code == EINPROGRESS) {
      pollfd wait{socket.descriptor(), POLLOUT, 0};
      socklen_t size = sizeof(code);
      code = ::poll(&wait, 1, timeout_ms) > 0 ? 0 : ETIMEDOUT;
      if (code == 0) getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &code, &size);
    }
    if (code == 0) {
      send_at_once(socket);
      return socket;
    }
    why = words(code);
  }
  return {};
}

int64_t read_some(const Socket& socket, std::span<uint8_t> to) {
  const ssize_t count = ::recv(socket.descriptor(), to.data(), to.size(), 0);
  if (count > 0) return count;
  return count < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

int64_t write_some(const Socket& socket, std::span<const uint8_t> from) {
  const ssize_t count = ::send(socket.descriptor(), from.data(), from.size(), MSG_NOSIGNAL);
  if (count >= 0) return count;
  return errno == EAGAIN || errno == EINTR ? 0 : -1;
}

void shut_down_writing(const Socket& socket) {
  ::shutdown(socket.descriptor(), SHUT_WR);
}

}  // namespace tessera::comm
