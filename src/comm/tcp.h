// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sockets that don't block, for the bootstrap.
#include <cstdint>
#include <span>
#include <string>

namespace tessera::comm {

// An owned file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() { close(); }

  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  void close() noexcept;

 private:
  int descriptor_ = -1;
};

// Whether `address` is an IP address or could be the name of a host: not one with a port, and no URL.
bool may_name_host(const std::string& address);
// Listens at `address` (a name or a number; "*": every network) and `port`; 0: any. Throws kInvalidArgument for an
// address that is none of this machine's, kDeviceError where the port is taken.
Socket listen_at(const std::string& address, int port);
// Whether `address` is a name, not localhost, that leads to nothing but this machine's loopback, as a machine's own
// name does on Debian (127.0.1.1): who listens there is heard by nobody else.
bool leads_to_loopback(const std::string& address);
// The port of a listening socket.
int port_of(const Socket& socket);
// The next one who came, with who it is; not open where nobody has.
Socket accept_one(const Socket& listener, std::string& peer);
// One try to connect; not open where nobody listens yet, or the name is not known yet, with `why`.
Socket connect_to(const std::string& address, int port, int timeout_ms, std::string& why);

// Bytes read into `to`: 0 where none are there; -1 where the other side has closed or the connection broke.
int64_t read_some(const Socket& socket, std::span<uint8_t> to);
// Bytes taken of `from`: as read_some.
int64_t write_some(const Socket& socket, std::span<const uint8_t> from);
// The other side reads the end behind what was written.
void shut_down_writing(const Socket& socket);

}  // namespace tessera::comm
